"""The grammar of build names."""

import pickle

import pytest
from hypothesis import given, strategies as st

from kernel_loader.errors import VariantError
from kernel_loader.variant import CPUS, NOARCH, OSES, UNVERSIONED, Variant


def compiled(framework: str, version: tuple[int, int], backend: str, backend_version=None, **rest) -> Variant:
    rest = {"cpu": "x86_64", "os": "linux"} | rest
    return Variant(
        framework=framework, framework_version=version, backend=backend, backend_version=backend_version, **rest
    )


FORMS = {
    "torch210-cxx11-cu128-x86_64-linux": compiled("torch", (2, 10), "cuda", (12, 8), cxx11_abi=True),
    "torch26-cxx98-cu118-x86_64-linux": compiled("torch", (2, 6), "cuda", (11, 8), cxx11_abi=False),
    "torch210-cu128-x86_64-windows": compiled("torch", (2, 10), "cuda", (12, 8), os="windows"),
    "torch29-metal-aarch64-darwin": compiled("torch", (2, 9), "metal", cpu="aarch64", os="darwin"),
    "torch211-cxx11-cpu-aarch64-linux": compiled("torch", (2, 11), "cpu", cxx11_abi=True, cpu="aarch64"),
    "torch211-cxx11-rocm71-x86_64-linux": compiled("torch", (2, 11), "rocm", (7, 1), cxx11_abi=True),
    "torch210-cxx11-xpu20252-x86_64-linux": compiled("torch", (2, 10), "xpu", (2025, 2), cxx11_abi=True),
    "torch29-cxx11-cann81-aarch64-linux": compiled("torch", (2, 9), "cann", (8, 1), cxx11_abi=True, cpu="aarch64"),
    "torch29-neuron-x86_64-linux": compiled("torch", (2, 9), "neuron"),
    "torch29-tpu-x86_64-linux": compiled("torch", (2, 9), "tpu"),
    "torch-stable-abi211-cu128-x86_64-linux": compiled("torch-stable-abi", (2, 11), "cuda", (12, 8)),
    "torch-stable-abi210-rocm70-x86_64-linux": compiled("torch-stable-abi", (2, 10), "rocm", (7, 0)),
    "tvm-ffi01-cu130-x86_64-linux": compiled("tvm-ffi", (0, 1), "cuda", (13, 0)),
    "tvm-ffi110-cpu-x86_64-linux": compiled("tvm-ffi", (1, 10), "cpu"),
} | {f"torch-{name}": Variant(framework="noarch", backend=name) for name in NOARCH}

MINOR = st.integers(0, 9) | st.integers(10, 999_999)
FRAMEWORKS = st.one_of(
    st.tuples(st.just("torch"), st.tuples(st.integers(0, 9), MINOR), st.sampled_from([None, True, False])),
    st.tuples(st.sampled_from(["torch-stable-abi", "tvm-ffi"]), st.tuples(st.integers(0, 9), MINOR), st.none()),
)
BACKENDS = st.one_of(
    st.tuples(st.sampled_from(UNVERSIONED), st.none()),
    st.tuples(st.just("cuda"), st.tuples(st.integers(10, 99), MINOR)),
    st.tuples(st.sampled_from(["rocm", "cann"]), st.tuples(st.integers(0, 9), MINOR)),
    st.tuples(st.just("xpu"), st.tuples(st.integers(1000, 9999), MINOR)),
)
VARIANTS = st.sampled_from(NOARCH).map(lambda backend: Variant(framework="noarch", backend=backend)) | st.builds(
    lambda framework, backend, cpu, os: Variant(
        framework=framework[0],
        framework_version=framework[1],
        cxx11_abi=framework[2],
        backend=backend[0],
        backend_version=backend[1],
        cpu=cpu,
        os=os,
    ),
    FRAMEWORKS,
    BACKENDS,
    st.sampled_from(CPUS),
    st.sampled_from(OSES),
)


@pytest.mark.parametrize(("name", "variant"), FORMS.items(), ids=FORMS)
def test_every_form_of_the_grammar_is_read_and_written(name: str, variant: Variant) -> None:
    assert Variant.parse(name) == variant
    assert str(variant) == name


@given(VARIANTS)
def test_every_variant_reads_back_from_its_name(variant: Variant) -> None:
    assert Variant.parse(str(variant)) == variant


# Names near the grammar: whatever of it parses must be the one name of what it means.
DIGITS = st.text("0123456789", max_size=6)
NEARLY = st.builds(
    "{}{}{}-{}{}-{}-{}".format,
    st.sampled_from(["torch", "torch-stable-abi", "tvm-ffi", "torch-"]),
    DIGITS,
    st.sampled_from(["", "-cxx11", "-cxx98"]),
    st.sampled_from(["cu", "rocm", "xpu", "cann", "cpu", "metal"]),
    DIGITS,
    st.sampled_from([*CPUS, ""]),
    st.sampled_from([*OSES, ""]),
)


@given(NEARLY)
def test_no_two_names_mean_one_build(name: str) -> None:
    try:
        variant = Variant.parse(name)
    except VariantError:
        return
    assert str(variant) == name


@given(st.text() | st.from_regex(r"torch[\w\-]*", fullmatch=True))
def test_garbage_is_refused_or_is_the_name_of_what_it_means(name: str) -> None:
    try:
        assert str(Variant.parse(name)) == name
    except VariantError as error:
        assert error.name == name  # noqa: PT017 - most names are refused, a few are not


@pytest.mark.parametrize(
    ("digits", "version"),
    [("24", (2, 4)), ("26", (2, 6)), ("29", (2, 9)), ("210", (2, 10)), ("213", (2, 13)), ("30", (3, 0))],
)
def test_torch_has_one_digit_of_major_version(digits: str, version: tuple[int, int]) -> None:
    assert Variant.parse(f"torch{digits}-cxx11-cpu-x86_64-linux").framework_version == version
    assert Variant.parse(f"torch-stable-abi{digits}-cpu-x86_64-linux").framework_version == version


@pytest.mark.parametrize(
    ("text", "backend", "version"),
    [
        ("cu118", "cuda", (11, 8)),
        ("cu126", "cuda", (12, 6)),
        ("cu130", "cuda", (13, 0)),
        ("cu1210", "cuda", (12, 10)),
        ("rocm63", "rocm", (6, 3)),
        ("rocm714", "rocm", (7, 14)),
        ("rocm70", "rocm", (7, 0)),
        ("xpu20252", "xpu", (2025, 2)),
        ("xpu202510", "xpu", (2025, 10)),
        ("cann81", "cann", (8, 1)),
    ],
)
def test_versions_of_backends_are_read_as_their_makers_count(text: str, backend: str, version: tuple[int, int]) -> None:
    variant = Variant.parse(f"torch210-{text}-x86_64-linux")
    assert (variant.backend, variant.backend_version) == (backend, version)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "torch",
        "torch-",
        "torch-vulkan",
        "torch-Universal",
        "torch-universal ",
        "torch-universal\n",
        "universal",
        "torch-xpu-x86_64-linux",
        "torch2-cpu-x86_64-linux",  # no minor version
        "torch2.10-cxx11-cu128-x86_64-linux",
        "torch201-cpu-x86_64-linux",  # 2.01 or 20.1
        "torch210-cu12-x86_64-linux",
        "torch210-cu1208-x86_64-linux",
        "torch210-cu0128-x86_64-linux",  # 1.28 would be written cu128, which is 12.8
        "torch210-cu-x86_64-linux",
        "torch210-cuda128-x86_64-linux",
        "torch210-rocm6-x86_64-linux",
        "torch210-rocm703-x86_64-linux",
        "torch210-xpu2025-x86_64-linux",
        "torch210-xpu202502-x86_64-linux",
        "torch210-xpu00252-x86_64-linux",
        "torch210-cpu1-x86_64-linux",
        "torch210-metal26-aarch64-darwin",
        "torch210-npu-aarch64-linux",
        "torch210-universal-x86_64-linux",
        "torch210-cxx14-cu128-x86_64-linux",
        "torch210-CXX11-cu128-x86_64-linux",
        "torch210-cu128-cxx11-x86_64-linux",
        "torch-stable-abi211-cxx11-cu128-x86_64-linux",
        "torch-stable-abi-cu128-x86_64-linux",
        "tvm-ffi01-cxx11-cu130-x86_64-linux",
        "tvm-ffi-cu130-x86_64-linux",
        "tvm-ffi1-cu130-x86_64-linux",
        "jax05-cu128-x86_64-linux",
        "torch210-cxx11-cu128-linux",
        "torch210-cxx11-cu128-x86_64",
        "torch210-cxx11-cu128-amd64-linux",
        "torch210-cxx11-cu128-x86_64-macos",
        "torch210-cxx11-cu128-x86_64-linux-musl",
        "torch210-cxx11-cu128-x86_64-linux\n",
        " torch210-cxx11-cu128-x86_64-linux",
        "../torch-universal",
        "torch\u066210-cpu-x86_64-linux",
        "torch2" + "1" * 5000 + "-cpu-x86_64-linux",
        "torch210-cu12" + "1" * 5000 + "-x86_64-linux",
    ],
)
def test_a_name_outside_the_grammar_is_refused(name: str) -> None:
    with pytest.raises(VariantError) as caught:
        Variant.parse(name)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("torch-vulkan", "universal"),
        ("torch210-cxx11-cu128-x86_64-beos", "operating system"),
        ("torch210-cxx11-cu128-sparc-linux", "CPU"),
        ("jax05-cu128-x86_64-linux", "does not begin"),
        ("torch210-cu1208-x86_64-linux", "'cu1208'"),
        ("torch210-vulkan-x86_64-linux", "'vulkan'"),
    ],
)
def test_a_refusal_says_which_part_is_wrong(name: str, part: str) -> None:
    with pytest.raises(VariantError, match=part):
        Variant.parse(name)


def test_only_builds_without_compiled_code_are_noarch() -> None:
    assert {name for name in FORMS if Variant.parse(name).is_noarch} == {f"torch-{name}" for name in NOARCH}


@given(VARIANTS)
def test_a_variant_is_a_value(variant: Variant) -> None:
    back = pickle.loads(pickle.dumps(variant))
    assert back == variant
    assert hash(back) == hash(variant)
