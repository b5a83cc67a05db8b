"""Manifests: what a named kernel may say, and what it may not."""

import pickle

import pytest
from hypothesis import given, settings, strategies as st
from packaging.specifiers import SpecifierSet

from kernel_loader.errors import ManifestError
from kernel_loader.host import BACKEND_KINDS
from kernel_loader.manifest import Entrypoint, Guard, Manifest, Offered, normalise
from kernel_loader.resources import data_directory
from kernel_loader.rules import Requires

LEAST = {"name": "activation", "reference": "activation"}
REPO = {"repo": "org/a", "version": 1}
SHIPPED = sorted(data_directory("manifests").glob("*.toml"))
KERNELS = [file for file in SHIPPED if file.stem not in ("layers", "advisories", "capabilities")]


def test_a_manifest_of_every_key_is_read() -> None:
    text = """
        name = "finegrained_fp8"
        summary = "Block-wise FP8"
        repo = "kernels-community/finegrained-fp8"
        version = 4
        backends = ["cuda", "rocm"]
        bundle = "kernel_loader.bundles.fp8:FineGrainedFP8"
        reference = "finegrained-fp8"
        grid = "kernel_loader.conformance.grids.fp8:GRID"

        [requires]
        cuda-capability = ">=8.9"
        cuda-toolkit = ">=12.8,<14"
        driver = ">=580"
        torch = ">=2.9"
        gfx = ["gfx942", "gfx90a"]
        python = ["einops>=0.8", "numpy"]

        [entrypoints]
        fp8_matmul = "matmul_2d"
        nested = "layers.Gelu"
        table = { call = "make.table" }

        [guards]
        fp8_matmul = ["contiguous", { guard = ["empty", "vector"], versions = "<=4" }, { guard = "zero-tail" }]

        [[alternatives]]
        repo = "org/other"
        revision = "main"
        backends = ["xpu"]
        requires = { torch = ">=2.10" }
        guards = { nested = ["no-gradient"] }

        [[alternatives]]
        repo = "org/third"
        version = 2
        entrypoints = { fp8_matmul = "matmul" }
    """
    entrypoints = {
        "fp8_matmul": Entrypoint("matmul_2d"),
        "nested": Entrypoint("layers.Gelu"),
        "table": Entrypoint("make.table", call=True),
    }
    kernel = {
        "name": "finegrained_fp8",
        "summary": "Block-wise FP8",
        "bundle": "kernel_loader.bundles.fp8:FineGrainedFP8",
        "reference": "finegrained-fp8",
        "grid": "kernel_loader.conformance.grids.fp8:GRID",
    }
    assert Manifest.parse(text, "a.toml") == Manifest(
        **kernel,
        repo="kernels-community/finegrained-fp8",
        version=4,
        backends=("cuda", "rocm"),
        requires=Requires(
            cuda_capability=SpecifierSet(">=8.9"),
            cuda_toolkit=SpecifierSet(">=12.8,<14"),
            driver=SpecifierSet(">=580"),
            torch=SpecifierSet(">=2.9"),
            gfx=("gfx942", "gfx90a"),
            python=("einops>=0.8", "numpy"),
        ),
        entrypoints=entrypoints,
        guards={
            "fp8_matmul": (
                Guard("contiguous"),
                Guard("empty", SpecifierSet("<=4")),
                Guard("vector", SpecifierSet("<=4")),
                Guard("zero-tail"),
            )
        },
        alternatives=(
            Manifest(
                **kernel,
                repo="org/other",
                revision="main",
                backends=("xpu",),
                requires=Requires(torch=SpecifierSet(">=2.10")),
                entrypoints=entrypoints,
                guards={"nested": (Guard("no-gradient"),)},
            ),
            Manifest(**kernel, repo="org/third", version=2, entrypoints={"fp8_matmul": Entrypoint("matmul")}),
        ),
    )


@pytest.mark.parametrize(
    ("version", "names"),
    [(3, ("contiguous", "empty")), (4, ("contiguous",)), (None, ("contiguous", "empty"))],
)
def test_guards_are_those_of_a_version_and_all_where_it_is_not_known(version: int | None, names: object) -> None:
    guards = {"a": ["contiguous", {"guard": "empty", "versions": "<4"}], "b": [{"guard": "empty", "versions": ">9"}]}
    manifest = Manifest.from_table(LEAST | REPO | {"guards": guards}, "a.toml")
    found = manifest.guards_of(version)
    assert found["a"] == names
    assert ("b" in found) == (version is None)


def test_a_kernel_without_its_guards_is_otherwise_the_same() -> None:
    guards = {"guards": {"a": ["contiguous"]}}
    table = LEAST | REPO | guards | {"alternatives": [REPO | guards, REPO]}
    manifest = Manifest.from_table(table, "a.toml")
    bare = Manifest.from_table(LEAST | REPO | {"alternatives": [REPO, REPO]}, "a.toml")
    assert manifest.unguarded() == bare
    assert manifest != bare


def test_a_name_and_a_reference_are_enough() -> None:
    manifest = Manifest.from_table(LEAST, "a.toml")
    assert manifest == Manifest(name="activation", reference="activation")
    assert manifest.requires == Requires()
    assert manifest.file == "a.toml"
    assert (manifest.guards, manifest.alternatives) == ({}, ())


@pytest.mark.parametrize("at", [{"version": 1}, {"version": 0}, {"revision": "main"}, {"revision": "refs/pr/3"}])
def test_a_name_and_a_place_in_a_repository_are_enough(at: dict[str, object]) -> None:
    manifest = Manifest.from_table({"name": "a", "repo": "org/a"} | at, "a.toml")
    assert (manifest.version, manifest.revision) == (at.get("version"), at.get("revision"))


@pytest.mark.parametrize("kind", BACKEND_KINDS)
def test_every_kind_of_backend_may_stand_in_backends(kind: str) -> None:
    assert Manifest.from_table(LEAST | {"backends": [kind]}, "a").backends == (kind,)


def test_an_entrypoint_shows_whether_it_is_called() -> None:
    assert str(Entrypoint("a.b")) == "a.b"
    assert str(Entrypoint("a.b", call=True)) == "a.b()"


def test_where_it_was_read_takes_no_part_in_comparison() -> None:
    assert Manifest.from_table(LEAST, "a.toml") == Manifest.from_table(LEAST, "b.toml")


def test_a_manifest_is_a_value() -> None:
    table = LEAST | REPO | {"entrypoints": {"a": "b"}, "requires": {"torch": ">=2.9"}, "guards": {"a": ["empty"]}}
    manifest = Manifest.from_table(table | {"alternatives": [REPO]}, "a.toml")
    back = pickle.loads(pickle.dumps(manifest))
    assert back == manifest
    assert hash(back) == hash(manifest)
    assert manifest != Manifest.from_table(LEAST, "a.toml")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"name": None}, ""),
        ({"reference": None}, ""),
        ({"repo": "org/a"}, ""),
        ({"repo": "org/a", "version": 1, "revision": "main"}, ""),
        ({"name": 1}, "name"),
        ({"name": "Activation"}, "name"),
        ({"name": "finegrained-fp8"}, "name"),
        ({"name": "2d"}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "ä"}, "name"),
        ({"summary": ["a"]}, "summary"),
        (REPO | {"repo": "a"}, "repo"),
        (REPO | {"repo": "org/a/b"}, "repo"),
        (REPO | {"repo": "../a"}, "repo"),
        (REPO | {"repo": "org/.."}, "repo"),
        (REPO | {"repo": "https://huggingface.co/org/a"}, "repo"),
        (REPO | {"repo": 1}, "repo"),
        (REPO | {"version": "1"}, "version"),
        (REPO | {"version": True}, "version"),
        (REPO | {"version": -1}, "version"),
        (REPO | {"version": 1.0}, "version"),
        (REPO | {"version": 2**64}, "version"),
        ({"repo": "org/a", "revision": 1}, "revision"),
        ({"repo": "org/a", "revision": ""}, "revision"),
        ({"repo": "org/a", "revision": "my branch"}, "revision"),
        ({"backends": "cuda"}, "backends"),
        ({"backends": ["cuda", "gpu"]}, "backends[1]"),
        ({"backends": ["CUDA"]}, "backends[0]"),
        ({"backends": [1]}, "backends[0]"),
        ({"bundle": "kernel_loader.bundles.fp8"}, "bundle"),
        ({"bundle": "a:b:c"}, "bundle"),
        ({"bundle": "a-b:C"}, "bundle"),
        ({"bundle": 1}, "bundle"),
        ({"reference": "../elsewhere"}, "reference"),
        ({"reference": "a/b"}, "reference"),
        ({"reference": "a_b"}, "reference"),
        ({"reference": ""}, "reference"),
        ({"requires": []}, "requires"),
        ({"requires": {"cuda-capability": "8.9"}}, "requires.cuda-capability"),
        ({"requires": {"cuda-capability": 8.9}}, "requires.cuda-capability"),
        ({"requires": {"cuda-toolkit": "new"}}, "requires.cuda-toolkit"),
        ({"requires": {"driver": ">"}}, "requires.driver"),
        ({"requires": {"torch": "=2.9"}}, "requires.torch"),
        ({"requires": {"gfx": "gfx942"}}, "requires.gfx"),
        ({"requires": {"gfx": ["gfx942", 90]}}, "requires.gfx[1]"),
        ({"requires": {"gfx": ["MI300"]}}, "requires.gfx[0]"),
        ({"requires": {"python": "einops"}}, "requires.python"),
        ({"requires": {"python": ["einops", "not a requirement"]}}, "requires.python[1]"),
        ({"requires": {"python": [""]}}, "requires.python[0]"),
        ({"requires": {"cuda_capability": ">=8.9"}}, "requires.cuda_capability"),
        ({"entrypoints": ["a"]}, "entrypoints"),
        ({"entrypoints": {"a": 1}}, "entrypoints.a"),
        ({"entrypoints": {"a": ""}}, "entrypoints.a"),
        ({"entrypoints": {"a": "b."}}, "entrypoints.a"),
        ({"entrypoints": {"a": "b c"}}, "entrypoints.a"),
        ({"entrypoints": {"a": "__import__('os')"}}, "entrypoints.a"),
        ({"entrypoints": {"a-b": "c"}}, "entrypoints.a-b"),
        ({"entrypoints": {"a.b": "c"}}, "entrypoints.a.b"),
        ({"entrypoints": {"": "c"}}, "entrypoints."),
        ({"entrypoints": {"a": {}}}, "entrypoints.a"),
        ({"entrypoints": {"a": {"call": 1}}}, "entrypoints.a.call"),
        ({"entrypoints": {"a": {"call": "b("}}}, "entrypoints.a.call"),
        ({"entrypoints": {"a": {"call": "b", "args": []}}}, "entrypoints.a.args"),
        ({"grid": "module"}, "grid"),
        ({"grid": 1}, "grid"),
        ({"guards": {"a": ["contiguous"]}}, ""),
        (REPO | {"guards": ["contiguous"]}, "guards"),
        (REPO | {"guards": {"a": "contiguous"}}, "guards.a"),
        (REPO | {"guards": {"a": [1]}}, "guards.a[0]"),
        (REPO | {"guards": {"a": ["contiguous", "contigous"]}}, "guards.a[1]"),
        (REPO | {"guards": {"a": [{"versions": "<2"}]}}, "guards.a[0]"),
        (REPO | {"guards": {"a": [{"guard": "empty", "version": "<2"}]}}, "guards.a[0].version"),
        (REPO | {"guards": {"a": [{"guard": "empty", "versions": "2"}]}}, "guards.a[0].versions"),
        (REPO | {"guards": {"a": [{"guard": ["empty", "full"]}]}}, "guards.a[0].guard[1]"),
        ({"alternatives": [REPO]}, ""),
        (REPO | {"alternatives": REPO}, "alternatives"),
        (REPO | {"alternatives": [{}]}, "alternatives[0]"),
        (REPO | {"alternatives": [REPO, {"repo": "org/b"}]}, "alternatives[1]"),
        (REPO | {"alternatives": [{"repo": "b", "version": 1}]}, "alternatives[0].repo"),
        (REPO | {"alternatives": [REPO | {"name": "b"}]}, "alternatives[0].name"),
        (REPO | {"alternatives": [REPO | {"reference": "b"}]}, "alternatives[0].reference"),
        (REPO | {"alternatives": [REPO | {"alternatives": []}]}, "alternatives[0].alternatives"),
        (REPO | {"alternatives": [REPO | {"guards": {"a": ["b"]}}]}, "alternatives[0].guards.a[0]"),
        (REPO | {"alternatives": [REPO | {"entrypoints": {"a": 1}}]}, "alternatives[0].entrypoints.a"),
        ({"verison": 1}, "verison"),
        ({"x": {}}, "x"),
        ({1: 2}, "1"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_with_the_way_to_it(change: dict[object, object], path: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_table(LEAST | change, "dir/a.toml")
    assert caught.value.path == path
    assert caught.value.file == "dir/a.toml"
    assert (f"dir/a.toml, {path}" if path else "dir/a.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("key", "near"), [("verison", "version"), ("entrypoint", "entrypoints"), ("backend", "backends")]
)
def test_a_misspelt_key_is_told_the_right_one(key: str, near: str) -> None:
    with pytest.raises(ManifestError, match=f"did you mean {near}"):
        Manifest.from_table(LEAST | {key: "x"}, "a.toml")


@pytest.mark.parametrize(
    ("name", "told"),
    [("zero_tail", "did you mean zero-tail"), ("q", "there are aligned, aligned-memory, aligned-rows, contiguous")],
)
def test_a_misspelt_guard_is_told_the_right_one(name: str, told: str) -> None:
    with pytest.raises(ManifestError, match=f"is no guard; {told}"):
        Manifest.from_table(LEAST | REPO | {"guards": {"a": [name]}}, "a.toml")


def test_what_a_kernel_offers_is_kept_as_it_is_written() -> None:
    table = LEAST | {"capabilities": {"attention": ["varlen", "gqa-backward"], "rms_norm": []}}
    manifest = Manifest.from_table(table, "a.toml")
    assert manifest.capabilities == {"attention": (Offered("varlen"), Offered("gqa-backward")), "rms_norm": ()}
    assert manifest.offers("attention", "xpu") == ("varlen", "gqa-backward")
    assert manifest.offers("moe") == ()
    assert Manifest.from_table(LEAST, "a.toml").capabilities == {}
    assert hash(manifest) == hash(Manifest.from_table(table, "b.toml"))


def test_a_feature_may_be_offered_on_some_backends_alone() -> None:
    offered = ["varlen", {"feature": "softcap", "backends": ["cuda", "rocm"]}]
    manifest = Manifest.from_table(LEAST | {"capabilities": {"attention": offered}}, "a.toml")
    assert manifest.offers("attention", "rocm") == manifest.offers("attention") == ("varlen", "softcap")
    assert manifest.offers("attention", "xpu") == ("varlen",)
    assert [str(feature) for feature in manifest.capabilities["attention"]] == ["varlen", "softcap on cuda and rocm"]


@pytest.mark.parametrize(
    ("offered", "path"),
    [
        (["attention"], "capabilities"),
        ({"attention": "varlen"}, "capabilities.attention"),
        ({"attention": True}, "capabilities.attention"),
        ({"Attention": []}, "capabilities.Attention"),
        ({"rms-norm": []}, "capabilities.rms-norm"),
        ({"attention": ["gqa_backward"]}, "capabilities.attention[0]"),
        ({"attention": ["varlen", 1]}, "capabilities.attention[1]"),
        ({"attention": [{"feature": "varlen"}]}, "capabilities.attention[0]"),
        ({"attention": [{"feature": "varlen", "backends": ["abacus"]}]}, "capabilities.attention[0].backends[0]"),
        ({"attention": [{"feature": "varlen", "backend": ["cpu"]}]}, "capabilities.attention[0].backend"),
    ],
)
def test_an_offer_of_another_form_is_refused_with_its_place(offered: object, path: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_table(LEAST | {"capabilities": offered}, "a.toml")
    assert caught.value.path == path


def test_a_key_like_no_other_is_told_all_keys() -> None:
    with pytest.raises(ManifestError, match="alternatives, backends, bundle, capabilities, entrypoints"):
        Manifest.from_table(LEAST | {"zzz": "x"}, "a.toml")


@pytest.mark.parametrize(
    "text",
    [
        "name =",
        "name = 'a'\nname = 'b'",
        "{}",
        "\0",
        "x = " + "[" * 100_000,
        "version = " + "1" * 5000,
        "version = 1979-99-99",
    ],
)
def test_what_is_not_toml_is_refused(text: str) -> None:
    with pytest.raises(ManifestError, match="not TOML"):
        Manifest.parse(text, "a.toml")


def test_a_number_too_long_for_python_to_write_is_refused() -> None:
    number = f"0x{'f' * 5000}"
    for key in ("version", "summary", "requires.gfx", "entrypoints.a"):
        with pytest.raises(ManifestError):
            Manifest.parse(f'name = "a"\nrepo = "org/a"\nrevision = "x"\n{key} = {number}', "a.toml")
        with pytest.raises(ManifestError):
            Manifest.parse(f'name = "a"\nrepo = "org/a"\nrevision = "x"\n{key} = {{ a = [{number}] }}', "a.toml")


@pytest.mark.parametrize("key", ["cuda-capability", "driver", "torch"])
def test_a_version_too_long_for_python_is_refused_or_kept(key: str) -> None:
    try:
        Manifest.from_table(LEAST | {"requires": {key: ">=" + "9" * 5000}}, "a.toml")
    except ManifestError as error:
        assert error.path == f"requires.{key}"  # noqa: PT017 - releases of packaging differ


WORDS = st.sampled_from(
    ["name", "summary", "repo", "version", "revision", "backends", "bundle", "reference", "requires", "entrypoints",
     "cuda-capability", "gfx", "python", "torch", "driver", "call", "a", "org/a", "cuda", "m:C", ">=1", "einops>=1",
     "alternatives", "guards", "guard", "versions", "grid", "empty"]
)  # fmt: skip
VALUE = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.dates() | st.text(max_size=6) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(WORDS | st.text(max_size=3), VALUE))
@settings(max_examples=300)
def test_any_table_is_read_or_refused(table: dict[str, object]) -> None:
    for candidate in (table, LEAST | table, table | LEAST):
        try:
            manifest = Manifest.from_table(candidate, "a.toml")
        except ManifestError as error:
            assert len(str(error).splitlines()) == 1  # noqa: PT017 - much is refused, some is not
        else:
            assert manifest.name == candidate["name"]


@given(st.text() | st.lists(WORDS | st.sampled_from(["=", "\n", '"', "[", "]", "{", "}", "1", "."])).map("".join))
@settings(max_examples=300)
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.parse(text, "a.toml")


@pytest.mark.parametrize("name", ["finegrained-fp8", "finegrained_fp8", "FineGrained-FP8"])
def test_dashes_and_capitals_in_a_name_mean_nothing(name: str) -> None:
    assert normalise(name) == "finegrained_fp8"


def test_manifests_ship_with_the_package() -> None:
    assert KERNELS


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_a_shipped_manifest_is_read_and_has_the_name_of_its_file(file) -> None:
    manifest = Manifest.parse(file.read_text(encoding="utf-8"), str(file))
    assert manifest.name == file.stem
    assert manifest.summary
    assert manifest.reference is None or (data_directory("registry") / manifest.reference / "build").is_dir()
