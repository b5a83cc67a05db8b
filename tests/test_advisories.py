"""Advisories: the file that ships, on the hosts that its faults are about; files of the user's; what a load does."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

import kernel_loader
from kernel_loader.advisories import about, parse
from kernel_loader.catalog import Catalog
from kernel_loader.errors import ManifestError, NoCompatibleBuild
from kernel_loader.host import Host, HostDevice
from kernel_loader.metadata import Metadata
from kernel_loader.resolver import resolve
from kernel_loader.resources import data_directory
from kernel_loader.settings import Settings
from tests.builds import CPU_HOST, H200, write_build

FILE = data_directory("manifests") / "advisories.toml"
TEXT = FILE.read_text(encoding="utf-8")
SHIPPED = {advisory.id: advisory for advisory in parse(TEXT, str(FILE))}
EIGHT = replace(H200, devices=H200.devices * 8)
B200 = replace(H200, devices=(HostDevice(arch="10.0"),))
A100 = replace(H200, devices=(HostDevice(arch="8.0"),))


def with_toolkit(host: Host, version: str | None) -> Host:
    return replace(host, cuda_toolkit=version)


def said(repo: str, version: int | None, host: Host) -> dict[str, str]:
    """What the file says of a build of a repository's version on a host: id -> what comes of it."""
    advisories = [advisory for advisory in SHIPPED.values() if advisory.repo == f"kernels-community/{repo}"]
    assert advisories
    found = {}
    for advisory in advisories:
        resolution = resolve(
            ["torch-cuda"], host, advisories=[advisory], read_metadata=lambda _: Metadata(version=version)
        )
        (verdict,) = resolution.verdicts
        if verdict.notes or verdict.reasons:
            found[advisory.id] = "warned" if verdict.notes else verdict.status
    return found


@pytest.mark.parametrize(
    ("repo", "version", "host", "expected"),
    [
        # backward with fewer key/value heads than query heads
        ("flash-attn2", 3, H200, {"flash-attn2-gqa-backward": "warned"}),
        ("flash-attn2", 2, H200, {}),
        ("flash-attn2", 4, H200, {}),
        # more than one device in a process
        (
            "finegrained-fp8",
            1,
            EIGHT,
            {"finegrained-fp8-devices": "rejected", "finegrained-fp8-short-blocks": "warned"},
        ),
        ("finegrained-fp8", 1, H200, {"finegrained-fp8-short-blocks": "warned"}),
        ("finegrained-fp8", 2, EIGHT, {"finegrained-fp8-short-blocks": "warned"}),
        # N or K not a multiple of the block
        ("finegrained-fp8", 4, H200, {"finegrained-fp8-short-blocks": "warned"}),
        ("finegrained-fp8", 5, EIGHT, {}),
        # a model spread over several devices
        ("deep-gemm", 2, EIGHT, {"deep-gemm-devices": "unknown"}),
        ("deep-gemm", 9, EIGHT, {"deep-gemm-devices": "unknown"}),
        ("deep-gemm", 2, H200, {}),
        # no nvcc, or one that is too old
        ("deep-gemm", 2, with_toolkit(H200, None), {"deep-gemm-toolkit-sm90": "rejected"}),
        ("deep-gemm", 2, with_toolkit(H200, "12.2"), {"deep-gemm-toolkit-sm90": "rejected"}),
        ("deep-gemm", 2, with_toolkit(H200, "12.3"), {}),
        ("deep-gemm", 2, with_toolkit(B200, "12.8"), {"deep-gemm-toolkit-sm100": "rejected"}),
        ("deep-gemm", 2, with_toolkit(B200, None), {"deep-gemm-toolkit-sm100": "rejected"}),
        ("deep-gemm", 2, with_toolkit(B200, "12.9"), {}),
        # a device newer than the declared architectures, and a late import inside torch.compile
        ("flash-attn3", 1, B200, {"flash-attn3-new-devices": "rejected", "flash-attn3-compile": "warned"}),
        ("flash-attn3", 1, H200, {"flash-attn3-compile": "warned"}),
        ("flash-attn3", 1, A100, {"flash-attn3-compile": "warned"}),
        ("flash-attn3", 2, B200, {}),
        # RMSNorm inside torch.compile
        (
            "liger-kernels",
            2,
            H200,
            {
                "liger-kernels-compiled-rmsnorm": "warned",
                "liger-kernels-rmsnorm-gradient": "warned",
                "liger-kernels-rotary-inputs": "warned",
            },
        ),
        # RMSNorm in training, and rotary embedding of what is transposed
        (
            "liger-kernels",
            3,
            H200,
            {"liger-kernels-rmsnorm-gradient": "warned", "liger-kernels-rotary-inputs": "warned"},
        ),
        ("liger-kernels", 4, H200, {}),
        # expert ids at or above the number of local experts
        ("sonic-moe", 1, H200, {"sonic-moe-sentinels": "warned"}),
        ("sonic-moe", 2, H200, {}),
        # gradients that are lost
        ("vllm-flash-attn3", 1, H200, {"vllm-flash-attn3-sink-gradient": "warned"}),
        ("vllm-flash-attn3", 2, H200, {}),
        ("activation", 1, H200, {"activation-gradient": "warned"}),
        ("activation", 2, H200, {}),
        ("layer-norm", 1, H200, {"layer-norm-gradient": "warned", "layer-norm-alignment": "warned"}),
        ("layer-norm", 2, H200, {}),
        ("rotary", 2, H200, {"rotary-gradient": "warned", "rotary-tables": "warned"}),
        ("rotary", 3, H200, {}),
        # memory that is not there, or does not lie as it should
        ("causal-conv1d", 1, H200, {"causal-conv1d-alignment": "warned"}),
        ("causal-conv1d", 2, H200, {}),
        ("paged-attention", 1, H200, {"paged-attention-length": "warned"}),
        ("paged-attention", 2, H200, {}),
        ("fla", 1, H200, {"fla-recurrent-rates": "warned", "fla-hopper-backward": "warned"}),
        ("fla", 1, B200, {"fla-recurrent-rates": "warned"}),
        ("fla", 2, H200, {}),
        ("relu", 1, H200, {"relu-gradient": "warned", "relu-alignment": "warned"}),
        ("relu", 2, H200, {}),
        # no batch
        ("deformable-detr", 1, H200, {"deformable-detr-empty-batch": "warned"}),
        ("deformable-detr", 2, H200, {}),
    ],
)
def test_each_fault_is_told_on_the_hosts_that_it_is_about(repo, version, host, expected):
    assert said(repo, version, host) == expected


def test_each_that_ships_is_tried_above_and_reads_as_a_sentence():
    tried = {
        advisory
        for mark in test_each_fault_is_told_on_the_hosts_that_it_is_about.pytestmark
        for *_, expected in mark.args[1]
        for advisory in expected
    }
    assert tried == set(SHIPPED)
    for advisory in SHIPPED.values():
        assert advisory.fault[-1] not in ".;,"
        assert advisory.remedy[-1] == "."
        assert advisory.source


# --- files ----------------------------------------------------------------------------------------------------------

LEAST = {"id": "a-b", "repo": "org/k", "effect": "warn", "fault": "it fails", "remedy": "Stop.", "source": "issue 1"}


def written(*advisories: dict[str, str]) -> str:
    lines = [
        ["[[advisories]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())] for table in advisories
    ]
    return "\n".join(line for table in lines for line in table)


def test_an_advisory_of_every_key_is_read():
    conditions = {"versions": "<=2", "devices": ">1", "capability": ">=9", "no-cuda-toolkit": ">=12"}
    (advisory,) = parse(
        written(LEAST | conditions | {"when": "always", "guard": "empty", "no-training": ["A", "b"]}), "a.toml"
    )
    assert (advisory.id, advisory.repo, advisory.effect, advisory.guard) == ("a-b", "org/k", "warn", "empty")
    assert advisory.no_training == ("A", "b")
    assert str(advisory.versions) == "<=2"
    assert str(advisory.devices) == ">1"
    assert str(advisory.capability) == ">=9"
    assert str(advisory.no_cuda_toolkit) == ">=12"
    assert (advisory.when, advisory.overruled) == ("always", "")
    assert parse("", "a.toml") == ()


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"id": "A b"}, "id"),
        ({"repo": "k"}, "repo"),
        ({"effect": "refuse"}, "effect"),
        ({"remedy": "stop"}, "remedy"),
        ({"versions": "2"}, "versions"),
        ({"devices": "2"}, "devices"),
        ({"capability": "sm_90"}, "capability"),
        ({"no-cuda-toolkit": "12"}, "no-cuda-toolkit"),
        ({"guard": "emtpy"}, "guard"),
        ({"cuda-toolkit": ">=12"}, "cuda-toolkit"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_with_the_way_to_it(change, path):
    with pytest.raises(ManifestError) as caught:
        parse(written(LEAST, LEAST | {"id": "other"} | change), "a.toml")
    assert caught.value.path == f"advisories[1].{path}"
    assert caught.value.file == "a.toml"


@pytest.mark.parametrize("key", LEAST)
def test_a_missing_key_is_named(key):
    with pytest.raises(ManifestError, match=f"the key {key} is missing"):
        parse(written({name: value for name, value in LEAST.items() if name != key}), "a.toml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[advisories]", "not TOML"),
        ("advisories = 1", "a list was expected"),
        ("advisories = [1]", "a table was expected"),
        ("[[advisory]]", "did you mean advisories"),
        (written(LEAST, LEAST), "there is another advisory a-b"),
    ],
)
def test_what_is_no_list_of_advisories_is_refused(text, told):
    with pytest.raises(ManifestError, match=told):
        parse(text, "a.toml")
    if "advisory" not in text:
        with pytest.raises(ManifestError, match=told):
            about("org/k", [("a.toml", text)])


def test_an_earlier_file_replaces_what_has_its_id_and_adds_the_rest():
    first = ("a.toml", written(LEAST | {"fault": "mine"}, LEAST | {"id": "new"}, LEAST | {"id": "x", "repo": "org/x"}))
    second = ("b.toml", written(LEAST, LEAST | {"id": "old"}))
    assert [(a.id, a.fault) for a in about("org/k", [first, second])] == [
        ("a-b", "mine"),
        ("new", "it fails"),
        ("old", "it fails"),
    ]


def test_the_catalog_finds_those_of_the_user_and_of_this_package(tmp_path):
    repo = "kernels-community/deep-gemm"
    mine = {"id": "deep-gemm-devices", "repo": repo, "fault": "mine"}
    (tmp_path / "advisories.toml").write_text(written(LEAST, LEAST | mine))
    catalog = Catalog(Settings(manifests=(tmp_path,)))
    assert [advisory.id for advisory in catalog.advisories("org/k")] == ["a-b"]
    assert {advisory.id: advisory.fault for advisory in catalog.advisories(repo)}["deep-gemm-devices"] == "mine"
    assert len(catalog.advisories(repo)) == len(Catalog(Settings()).advisories(repo)) == 3
    assert catalog.advisories("org/unheard-of") == ()


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / "advisories.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="it cannot be read"):
        Catalog(Settings(manifests=(tmp_path,))).advisories("org/k")
    (tmp_path / "advisories.toml").write_text("org/k = [")
    catalog = Catalog(Settings(manifests=(tmp_path,)))
    with pytest.raises(ManifestError, match="not TOML"):
        catalog.advisories("org/k")
    assert catalog.advisories("org/other") == ()


# --- at load --------------------------------------------------------------------------------------------------------


def known(workshop, **change: str) -> Path:
    """A kernel of version 1 with an advisory, and one build for every backend."""
    (workshop.manifests / "advisories.toml").write_text(written(LEAST | {"repo": "org/my-kernel"} | change))
    repository = workshop.kernel("my_kernel", reference="mine")
    write_build(workshop.manifests / "registry" / "mine", "torch-universal")
    return write_build(repository, "torch-universal")


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_warning_is_given_once_for_a_kernel(workshop, caplog):
    known(workshop)
    loader = workshop.loader()
    assert not kernel_loader.origin(loader.load("my_kernel")).reference
    loader.load("my_kernel", version=1)
    loader.load_module("my_kernel")
    assert warnings(caplog) == ["my_kernel has a known fault a-b: it fails. Stop. Reported: issue 1."]


def test_a_repository_without_a_name_is_warned_of_too(workshop, caplog):
    known(workshop)
    workshop.loader().load_module("org/my-kernel", version=1)
    assert warnings(caplog) == ["org/my-kernel has a known fault a-b: it fails. Stop. Reported: issue 1."]


def test_a_build_with_a_fault_that_rejects_it_is_not_loaded(workshop, caplog):
    known(workshop, effect="reject")
    loader = workshop.loader()
    origin = kernel_loader.origin(loader.load("my_kernel"))
    assert origin.reference
    assert "known fault a-b: it fails" in origin.why
    assert "Stop. Reported: issue 1." in warnings(caplog)[0]
    with pytest.raises(NoCompatibleBuild, match="known fault a-b: it fails"):
        loader.load("my_kernel", fallback="error")
    with pytest.raises(NoCompatibleBuild, match="known fault a-b: it fails"):
        loader.load_module("org/my-kernel")
    assert loader.resolve("my_kernel").nearest.reasons[0].code == "advisory"


def test_a_build_in_doubt_is_loaded_with_a_warning_and_refused_by_strict(workshop, caplog):
    known(workshop, effect="doubt")
    assert not kernel_loader.origin(workshop.loader().load("my_kernel")).reference
    assert "which may not run on this host: known fault a-b: it fails." in warnings(caplog)[0]
    assert kernel_loader.origin(workshop.loader(strict=True).load("my_kernel")).reference


@pytest.mark.parametrize("ignored", ["a-b", "all"])
@pytest.mark.parametrize("effect", ["reject", "doubt", "warn"])
def test_an_advisory_can_be_ignored(workshop, caplog, ignored, effect):
    known(workshop, effect=effect)
    loader = workshop.loader(ignore_advisories={ignored})
    assert not kernel_loader.origin(loader.load("my_kernel")).reference
    assert warnings(caplog) == []
    assert (
        "known fault a-b: it fails; ignored by KERNEL_LOADER_IGNORE_ADVISORIES" in loader.resolve("my_kernel").explain()
    )
    with_another = workshop.loader(ignore_advisories={"other"})
    assert kernel_loader.origin(with_another.load("my_kernel")).reference == (effect == "reject")


def test_a_fault_of_training_is_told_to_who_loads_the_module_and_by_its_origin(workshop, caplog):
    known(workshop, **{"no-training": ["Mine"]})
    loader = workshop.loader()
    module = loader.load_module("my_kernel", for_layers=True)
    assert warnings(caplog) == []
    assert kernel_loader.origin(module).untrained == (("Mine", "a-b"),)
    loader.load_module("my_kernel")
    assert warnings(caplog) == ["my_kernel has a known fault a-b: it fails. Stop. Reported: issue 1."]
    ignoring = workshop.loader(ignore_advisories={"a-b"})
    assert kernel_loader.origin(ignoring.load_module("my_kernel")).untrained == ()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"no-training": ["*"], "effect": "reject"}, "it goes with the effect warn"),
        ({"no-training": ["*"], "effect": "doubt"}, "it goes with the effect warn"),
        ({"no-training": "*"}, "a list was expected"),
        ({"no-training": [1]}, "a text was expected"),
    ],
)
def test_layers_that_are_kept_out_of_training_are_a_list(change, told):
    with pytest.raises(ManifestError, match=told) as caught:
        parse(written(LEAST | change), "a.toml")
    assert caught.value.path.startswith("advisories[0].no-training")


def test_the_version_that_a_directory_names_counts(workshop):
    build = known(workshop, effect="reject", versions="==1")
    loader = workshop.loader()
    assert not loader.can_load("my_kernel", version=7, fallback="error")
    write_build(build.parents[1], "torch-universal", version=7)
    assert workshop.loader().can_load("my_kernel", fallback="error")


def test_embedded_builds_have_no_advisories(workshop, caplog):
    known(workshop, effect="warn")
    assert kernel_loader.origin(workshop.loader(disable={"my_kernel"}).load("my_kernel")).reference
    assert not any("known fault" in warning for warning in warnings(caplog))


def test_another_version_is_not_recommended_when_it_has_a_fault_too(tmp_path):
    from kernel_loader.loader import KernelLoader
    from kernel_loader.sources import Listing, LocalDirectories

    class Versioned(LocalDirectories):
        """A source with versions, of which each has its own builds."""

        def versions(self, request):
            return (1, 2, 3)

        def listing(self, request):
            names = ("torch-cuda",) if request.version == 1 else ("torch-universal",)
            return Listing(repo=request.repo, revision=None, names=names)

        def metadata(self, listing, name):
            return Metadata()

    (tmp_path / "advisories.toml").write_text(written(LEAST | {"effect": "reject", "versions": ">=3"}))
    loader = KernelLoader(Settings(manifests=(tmp_path,)), CPU_HOST, sources=[Versioned({"org/k": tmp_path})])
    with pytest.raises(NoCompatibleBuild) as caught:
        loader.load_module("org/k", version=1, trust_remote_code=True)
    assert caught.value.version == 2


def test_a_guard_that_is_not_put_there_mends_nothing(workshop):
    """An advisory that a guard mends is heeded for the versions at which the kernel has no such guard."""
    text = """
[[advisories]]
id = "tail"
repo = "org/grouped"
effect = "reject"
fault = "rows past the last are left unwritten"
remedy = "Use version 2."
source = "a test"
guard = "zero-tail"
"""
    (workshop.manifests / "advisories.toml").write_text(text)
    for name, versions in (("grouped", "<=1"), ("other", "<=0")):
        guards = {"double": [{"guard": "zero-tail", "versions": versions}]}
        repository = workshop.kernel(name, repo="org/grouped", guards=guards)
        if name == "grouped":
            write_build(repository, "torch-universal", version=1)
    workshop.local["org/grouped"] = workshop.root / "repositories" / "grouped"
    assert "mended by the guard zero-tail" in workshop.loader().resolve("grouped").explain()
    assert workshop.loader().resolve("grouped").chosen is not None
    assert workshop.loader().resolve("other").chosen is None


def test_an_advisory_of_what_is_no_repository_is_refused(workshop):
    workshop.simple("my_kernel")
    for repo in ('repo = "my-scale"\n', ""):
        (workshop.manifests / "advisories.toml").write_text(f'[[advisories]]\nid = "a-b"\n{repo}')
        with pytest.raises(ManifestError, match=r"advisories\.toml, advisories\[0\]"):
            workshop.loader().load("my_kernel")
