"""The tree of errors: what each one is, holds and says."""

import copy
import pickle
import re
from pathlib import Path

import pytest

import kernel_loader
from kernel_loader import errors
from kernel_loader.errors import (
    AbiMismatch,
    BundleError,
    CyclicDependency,
    FusionError,
    HostError,
    HubUnavailable,
    IntegrityError,
    KernelImportError,
    KernelizeError,
    KernelLoaderError,
    LockError,
    LockMismatch,
    LockMissing,
    LockStale,
    ManifestError,
    MetadataError,
    MissingDependency,
    MissingEntrypoints,
    NoCompatibleBuild,
    NotCached,
    OpNamespaceTaken,
    RepositoryMissing,
    RequestError,
    SettingsError,
    SourceError,
    StoreError,
    TrustError,
    UnknownKernel,
    UnknownVersion,
    VariantError,
)
from kernel_loader.host import Host, HostDevice
from kernel_loader.metadata import Metadata
from kernel_loader.provenance import Origin
from kernel_loader.resolver import Resolution, Verdict
from kernel_loader.rules import Reject, Requires
from kernel_loader.variant import Variant

ORIGIN = Origin(
    kernel="activation",
    source="local",
    repo="org/activation",
    revision="v1",
    variant="torch-cuda",
    digest="ab" * 32,
    path=Path("/builds/torch-cuda"),
    reference=False,
    why="the only one that fits",
)
HOST = Host(os="linux", cpu="x86_64", cuda="13.0", torch="2.11.0+cu130", devices=(HostDevice(arch="9.0"),))
NAME = "torch211-cxx11-cu128-x86_64-linux"
REJECTED = Verdict(
    NAME,
    Variant.parse(NAME),
    "rejected",
    (Reject("arch", "compiled for 10.0", "Use another device."), Reject("os", "built for linux", "Use linux.")),
    Metadata.parse('{"version": 1, "digest": {"algorithm": "sha256", "files": {}}}'),
)
SAMPLES = [
    SettingsError("KERNEL_LOADER_STRICT", "perhaps", "1 or 0"),
    HostError("cuda", "13 is not a version"),
    HostError("backend", "no rocm here", "Leave it out."),
    VariantError("torch", "too short"),
    ManifestError("a.toml", "requires.driver", "wrong"),
    ManifestError("a.toml", "", "not TOML"),
    MetadataError("metadata.json", "digest.files", "wrong"),
    MetadataError("metadata.json", "", "not JSON"),
    RequestError("version= and revision= exclude each other", "Pass one."),
    UnknownKernel("activatoin", ("activation", "activations")),
    UnknownKernel("xyz"),
    NoCompatibleBuild("activation", Resolution("org/activation", HOST, (REJECTED,))),
    NoCompatibleBuild("activation", Resolution("org/activation", HOST, note="it is empty")),
    NoCompatibleBuild("activation", Resolution("org/activation", HOST, (REJECTED,)), 7),
    NoCompatibleBuild(
        "activation", Resolution("org/activation", HOST, alternatives=(Resolution("org/other", HOST, (REJECTED,)),))
    ),
    UnknownKernel("org/activation"),
    UnknownVersion("org/activation", "v9", (1, 2)),
    UnknownVersion("org/activation", "v9", ()),
    NotCached("org/activation@v1"),
    HubUnavailable("org/activation@v1", "the Hub answers 503", "Try again later."),
    RepositoryMissing("org/activation@v1", "the Hub does not know it", "Check the name."),
    TrustError("org/activation@v1", "its publisher is not trusted"),
    StoreError("/cache", "there is no space left", "Free space."),
    CyclicDependency(("org/a@v1", "org/b@v1", "org/a@v1")),
    LockError("kernels.lock", "it cannot be read"),
    LockMissing("kernels.lock", "it does not name org/activation"),
    LockStale("kernel-loader.lock", "it has org/activation at v1, and v2 is asked for"),
    LockMismatch("kernel-loader.lock", "org/activation, torch-cuda: the build at hand is not what is locked"),
    BundleError("kernels.klb", "it has no bundle.json"),
    KernelizeError("RMSNorm", "no-mode", "its kernel is for inference", "Add one to the mapping."),
    FusionError(tuple(f"tensor{i} is taken twice" for i in range(9))),
    SourceError("/nowhere", "it is not there", "Look at the path."),
    IntegrityError("/build", tuple(f"file{i}.py is missing" for i in range(9))),
    KernelImportError("activation", ORIGIN, "no\nsuch\r\nthing"),
    AbiMismatch("activation", ORIGIN, "undefined symbol: _ZN3c10"),
    MissingDependency("activation", ORIGIN, "No module named 'einops'", ("einops>=0.8", "numpy")),
    OpNamespaceTaken("activation", ORIGIN, "op namespaces _activation are those of another", ("_activation",)),
    MissingEntrypoints("activation", ORIGIN, "It has: gelu", ("silu = silu_and_mul", "gelu = gelu_fast")),
]
IDS = [f"{type(error).__name__}{index}" for index, error in enumerate(SAMPLES)]
CLASSES = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, KernelLoaderError)]
BUILTIN = [v for v in vars(__import__("builtins")).values() if isinstance(v, type) and issubclass(v, Exception)]


def each_error(test):
    return pytest.mark.parametrize("error", SAMPLES, ids=IDS)(test)


def fields_of(error: KernelLoaderError) -> dict[str, object]:
    return {name: getattr(error, name) for name in error._fields}


def test_every_class_of_error_is_tested_here() -> None:
    assert {type(error) for error in SAMPLES} == set(CLASSES) - {KernelLoaderError}


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not KernelLoaderError])
def test_every_error_is_also_the_builtin_that_a_caller_expects(cls: type) -> None:
    assert [base for base in cls.__mro__ if base in BUILTIN and base is not Exception]


@each_error
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling(error: KernelLoaderError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert fields_of(back) == fields_of(error)
    assert str(back) == str(error)


@each_error
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_an_error_survives_copying(error: KernelLoaderError, duplicate) -> None:
    back = duplicate(error)
    assert back is not error
    assert type(back) is type(error)
    assert fields_of(back) == fields_of(error)
    assert str(back) == str(error)


def test_fields_are_given_by_position_or_by_name_and_all_of_them() -> None:
    assert fields_of(SourceError("a", "b", advice="c")) == {"source": "a", "detail": "b", "advice": "c"}
    assert fields_of(NotCached("a"))["detail"] == NotCached.detail
    assert repr(VariantError("x", "wrong")) == "VariantError(name='x', detail='wrong')"
    for args, named in ((("a", "b"), {}), (tuple("abcd"), {}), (("a", "b", "c"), {"detail": "b"}), (("a",), {"x": 1})):
        with pytest.raises(TypeError, match="SourceError takes source, detail, advice"):
            SourceError(*args, **named)


def test_a_note_on_an_error_survives_pickling() -> None:
    error = VariantError("x", "wrong")
    error.add_note("while reading a listing")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["while reading a listing"]


@each_error
def test_the_text_is_one_paragraph_that_ends_with_the_remedy(error: KernelLoaderError) -> None:
    text = str(error)
    assert len(text.splitlines()) == 1
    assert error.remedy.strip()
    assert text.endswith(error.remedy)
    assert len(text) > len(error.remedy) + 10


@each_error
def test_the_text_follows_the_fields(error: KernelLoaderError) -> None:
    changed = copy.copy(error)
    for name, value in fields_of(changed).items():
        if isinstance(value, str):
            setattr(changed, name, f"<{name}>")
        elif type(value) is tuple:
            setattr(changed, name, (f"<{name}>",))
    assert str(changed) != str(error)


@pytest.mark.parametrize("key", ["a\nb", "a\rb", "a\u2028b"])
def test_a_line_break_in_a_damaged_file_makes_no_second_paragraph(key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        kernel_loader.manifest.Manifest.from_table({"name": "a", key: 1}, "a.toml")
    assert len(str(caught.value).splitlines()) == 1


def test_the_drawn_tree_is_the_tree() -> None:
    """Every line of the tree is a class below its parent, with the builtin that it adds."""
    tree = errors.__doc__.split("::\n", 1)[1].split("\n\nEvery error")[0]
    drawn, above = {}, []
    for indent, name, builtin in re.findall(r"^( *)(\w+|\.\.\.)(?:\((\w+)\))?", tree.strip("\n"), re.MULTILINE):
        depth = (len(indent) - 4) // 2
        above[depth:] = [name]
        drawn[name] = (above[depth - 1] if depth else None, builtin or None)
    there = {}
    for cls in CLASSES:
        parents = [base.__name__ for base in cls.__bases__ if issubclass(base, KernelLoaderError)]
        builtins = [base.__name__ for base in cls.__bases__ if not issubclass(base, KernelLoaderError)]
        there[cls.__name__] = (next(iter(parents), None), next((b for b in builtins if b != "Exception"), None))
    assert drawn == there


def test_every_error_is_exported_from_the_package() -> None:
    for cls in CLASSES:
        assert cls.__name__ in kernel_loader.__all__
        assert getattr(kernel_loader, cls.__name__) is cls


def test_all_violations_are_in_the_field_and_a_few_in_the_text() -> None:
    error = IntegrityError("/build", tuple(f"file{i}.py is missing" for i in range(9)))
    assert "file4.py" in str(error)
    assert "file5.py" not in str(error)
    assert "and 4 more" in str(error)
    assert len(error.violations) == 9


def test_the_nearest_build_gives_the_reasons_and_remedies() -> None:
    error = NoCompatibleBuild("activation", Resolution("org/activation", HOST, (REJECTED,)))
    assert error.nearest == REJECTED
    for part in (NAME, "compiled for 10.0", "built for linux", "Use another device.", "Use linux."):
        assert part in str(error)


def test_an_unknown_kernel_names_what_may_have_been_meant() -> None:
    assert "activation or activations" in str(UnknownKernel("activatoin", ("activation", "activations")))
    assert "Did you mean" not in str(UnknownKernel("xyz"))


def test_what_to_install_can_be_copied_to_a_shell() -> None:
    error = MissingDependency("a", ORIGIN, "none", ("einops",))
    assert error.remedy.endswith("pip install einops")


def test_requires_of_a_manifest_pickles() -> None:
    # A resolution inside an error may carry it to another process.
    assert pickle.loads(pickle.dumps(Requires(gfx=("gfx942",)))) == Requires(gfx=("gfx942",))


def test_a_field_that_ends_a_sentence_ends_it_once():
    said = {
        "did you mean summary?": "did you mean summary? Do.",
        "it goes to 8.0.": "it goes to 8.0. Do.",
        "v1, v2, ...": "v1, v2, .... Do.",
        "it is in ..": "it is in ... Do.",
    }
    for detail, text in said.items():
        assert str(RequestError(detail, "Do.")) == text
