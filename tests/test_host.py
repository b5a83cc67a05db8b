"""Host: the description of a machine, as a value and as JSON."""

import dataclasses
import json
import pickle

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from packaging.utils import canonicalize_name

from kernel_loader.errors import HostError
from kernel_loader.host import BACKEND_KINDS, Backend, Host, HostDevice, major_minor, normal_distribution

TEXT = st.text(max_size=20)
PLACE = st.sampled_from(["linux", "darwin", "windows", "freebsd", "x86_64", "aarch64", "riscv64", ""])
RELEASE = st.builds("{}.{}{}".format, st.integers(0, 2100), st.integers(0, 99), st.sampled_from(["", ".1", "+cpu"]))
ARCH = st.one_of(st.builds("{}.{}".format, st.integers(3, 12), st.integers(0, 9)), st.just("gfx942"), st.just("gfx90a"))
DEVICES = st.lists(st.builds(HostDevice, arch=ARCH, name=TEXT), max_size=4).map(tuple)
PACKAGES = st.dictionaries(TEXT, TEXT, max_size=4)
ABSENT = Host(os="", cpu="")


def optional(strategy):
    return st.none() | strategy


@st.composite
def hosts(draw) -> Host:
    facts = {
        "macos": optional(RELEASE),
        "glibc": optional(RELEASE),
        "python": optional(RELEASE),
        "free_threaded": st.booleans(),
        "torch": optional(RELEASE),
        "cxx11_abi": optional(st.booleans()),
        "cuda": optional(RELEASE),
        "rocm": optional(RELEASE),
        "xpu": optional(RELEASE),
        "cann": optional(RELEASE),
        "metal": st.booleans(),
        "neuron": st.booleans(),
        "tpu": st.booleans(),
        "driver": optional(RELEASE),
        "cuda_toolkit": optional(RELEASE),
        "devices": DEVICES,
        "tvm_ffi": optional(RELEASE),
        "packages": PACKAGES,
        "provenance": st.dictionaries(TEXT, TEXT, max_size=3),
    }
    unknown = draw(st.frozensets(st.sampled_from(sorted(facts.keys() - {"provenance"} | {"os", "cpu"}))))
    known = {name: draw(strategy) for name, strategy in facts.items() if name not in unknown}
    places = {name: "" if name in unknown else draw(PLACE) for name in ("os", "cpu")}
    return Host(**places, **known, unknown=unknown)


def test_the_random_hosts_below_have_every_field() -> None:
    described = json.loads(Host(os="linux", cpu="x86_64").to_json())
    assert described.keys() - {"schema"} == {field.name for field in dataclasses.fields(Host)}


# ---------------------------------------------------------------------------------------------------- to and from JSON


@given(hosts())
def test_every_host_reads_back_from_its_json_as_it_was(host: Host) -> None:
    back = Host.from_json(host.to_json())
    assert back == host
    assert back.provenance == host.provenance
    assert Host.from_json(host.to_json().encode()) == host


@given(hosts())
def test_an_unknown_fact_has_no_value_in_json(host: Host) -> None:
    described = json.loads(host.to_json())
    assert not (host.unknown - {"os", "cpu"}) & described.keys()
    assert set(described["unknown"]) == host.unknown


def test_a_description_by_hand_needs_only_os_and_cpu() -> None:
    host = Host.from_json('{"os": "linux", "cpu": "x86_64"}')
    assert (host.os, host.cpu, host.backend) == ("linux", "x86_64", Backend("cpu"))
    assert host.unknown == {
        "macos", "glibc", "python", "torch", "cxx11_abi", "driver", "cuda_toolkit", "devices", "tvm_ffi", "packages"
    }  # fmt: skip


def test_a_description_by_hand_of_a_gpu_machine() -> None:
    text = '{"os": "linux", "cpu": "aarch64", "torch": "2.11.0", "cuda": "13.0", "devices": ["9.0", "9.0"]}'
    host = Host.from_json(text)
    assert host.devices == (HostDevice(arch="9.0"), HostDevice(arch="9.0"))
    assert host.backend == Backend("cuda", (13, 0))
    assert "driver" in host.unknown
    assert "torch" not in host.unknown


def test_null_says_absent_and_silence_says_unknown() -> None:
    said = Host.from_json('{"os": "linux", "cpu": "x86_64", "driver": null}')
    silent = Host.from_json('{"os": "linux", "cpu": "x86_64"}')
    assert said.driver is silent.driver is None
    assert "driver" not in said.unknown
    assert "driver" in silent.unknown


def test_a_backend_that_could_not_be_found_out_stays_unknown_through_json() -> None:
    # Read as absent it would make a machine whose torch probe failed a machine without a GPU.
    host = Host(os="linux", cpu="x86_64", unknown=frozenset({"cuda"}))
    assert Host.from_json(host.to_json()).unknown == {"cuda"}


@pytest.mark.parametrize(("kind", "value"), [("cuda", "12.8"), ("rocm", "7.0"), ("xpu", "2025.2"), ("metal", True)])
def test_backends_that_a_description_leaves_out_are_absent(kind: str, value: object) -> None:
    host = Host.from_json(json.dumps({"os": "linux", "cpu": "x86_64", kind: value}))
    assert host.backend.kind == kind
    assert not host.unknown & set(BACKEND_KINDS)


BASE = {"os": "linux", "cpu": "x86_64"}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"os": None}, "os"),
        ({"os": 1}, "os"),
        ({"cpu": ["x86_64"]}, "cpu"),
        ({"gpu": "h100"}, "gpu"),
        ({"schema": 2}, "schema"),
        ({"schema": None}, "schema"),
        ({"cuda": 12.8}, "cuda"),
        ({"cuda": "12"}, "cuda"),
        ({"cuda": "v12.8"}, "cuda"),
        ({"torch": ""}, "torch"),
        ({"torch": True}, "torch"),
        ({"glibc": "2."}, "glibc"),
        ({"driver": "none"}, "driver"),
        ({"driver": 580}, "driver"),
        ({"macos": "tahoe"}, "macos"),
        ({"python": ""}, "python"),
        ({"metal": 1}, "metal"),
        ({"metal": None}, "metal"),
        ({"free_threaded": "yes"}, "free_threaded"),
        ({"cxx11_abi": "cxx11"}, "cxx11_abi"),
        ({"devices": "9.0"}, "devices"),
        ({"devices": None}, "devices"),
        ({"devices": ["9.0", "90"]}, "devices[1]"),
        ({"devices": ["sm_90"]}, "devices[0]"),
        ({"devices": [9.0]}, "devices[0]"),
        ({"devices": [{"name": "H100"}]}, "devices[0]"),
        ({"devices": [{"arch": "9.0", "memory": 80}]}, "devices[0]"),
        ({"devices": [{"arch": "9.0", "name": ["H100"]}]}, "devices[0].name"),
        ({"devices": ["\u0669.\u0660"]}, "devices[0]"),
        ({"packages": ["numpy"]}, "packages"),
        ({"packages": {"numpy": 2}}, "packages"),
        ({"provenance": {"os": None}}, "provenance"),
        ({"unknown": "cuda"}, "unknown"),
        ({"unknown": ["gpu"]}, "unknown"),
        ({"unknown": [[]]}, "unknown"),
        ({"unknown": ["cuda"], "cuda": "12.8"}, "cuda"),
    ],
)
def test_a_wrong_description_names_the_key(change: dict[str, object], path: str) -> None:
    with pytest.raises(HostError) as caught:
        Host.from_json(json.dumps(BASE | change))
    assert caught.value.path == path
    assert path in str(caught.value)


@pytest.mark.parametrize("text", ["", "null", "[]", '"linux"', "{", b"\xff\xfe\xfd", "1" * 5000, "[" * 100_000])
def test_a_text_that_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(HostError, match="whole text"):
        Host.from_json(text)


@pytest.mark.parametrize("key", ["cuda", "driver", "torch", "macos"])
def test_a_number_too_long_for_python_is_refused(key: str) -> None:
    for value in ("9" * 5000, f"{'9' * 5000}.1", f"1.{'9' * 5000}"):
        with pytest.raises(HostError):
            Host.from_json(json.dumps(BASE | {key: value}))


def test_an_architecture_too_long_for_python_is_refused() -> None:
    with pytest.raises(HostError):
        Host.from_json(json.dumps(BASE | {"devices": ["9" * 5000 + ".0"]}))


@pytest.mark.parametrize("key", ["os", "cuda", "metal", "devices", "packages", "cxx11_abi", "unknown", "other"])
def test_a_value_nested_to_the_limit_of_the_parser_is_refused(key: str) -> None:
    # Deep enough that the parser just takes it and a repr of it would not end well.
    for depth in range(850, 1000, 5):
        with pytest.raises(HostError):
            Host.from_json(f'{{"os": "a", "cpu": "b", "{key}": [{"[" * depth}{"]" * depth}]}}')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | RELEASE | ARCH,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.sampled_from(["arch", "name"]), inner),
    max_leaves=6,
)
NAMES = sorted(field.name for field in dataclasses.fields(Host))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*NAMES, "schema", "extra"]), JSON))
def test_any_json_object_is_read_or_refused(facts: dict[str, object]) -> None:
    for document in (facts, BASE | facts, facts | BASE):
        try:
            host = Host.from_json(json.dumps(document))
        except HostError:
            continue
        assert Host.from_json(host.to_json()) == host


@given(st.text() | st.binary())
def test_garbage_is_refused(text: str | bytes) -> None:
    with pytest.raises(HostError):
        Host.from_json(text)


# ----------------------------------------------------------------------------------------------------------- as a value


@given(hosts())
def test_a_host_is_equal_to_its_copies_and_hashes_alike(host: Host) -> None:
    back = pickle.loads(pickle.dumps(host))
    assert back == host
    assert hash(back) == hash(host)
    assert back.provenance == host.provenance


def test_where_a_fact_came_from_takes_no_part_in_comparison() -> None:
    told = Host(os="linux", cpu="x86_64", provenance={"os": "platform"})
    assert told == Host(os="linux", cpu="x86_64")
    assert hash(told) == hash(Host(os="linux", cpu="x86_64"))


def test_installed_packages_and_unknown_facts_take_part_in_comparison() -> None:
    host = Host(os="linux", cpu="x86_64")
    assert host != dataclasses.replace(host, packages={"numpy": "2.0"})
    assert host != dataclasses.replace(host, unknown=frozenset({"packages"}))


def test_a_host_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Host(os="linux", cpu="x86_64").cuda = "13.0"


# ------------------------------------------------------------------------------------------------------------- backends

ORDER = ("tpu", "neuron", "cuda", "rocm", "metal", "xpu", "cann")
VALUES = {"cuda": "12.8", "rocm": "7.0", "xpu": "2025.2", "cann": "8.1", "metal": True, "neuron": True, "tpu": True}


@pytest.mark.parametrize("count", range(1, len(ORDER) + 1))
def test_the_first_backend_of_the_order_counts(count: int) -> None:
    last = ORDER[-count:]
    host = dataclasses.replace(ABSENT, **{kind: VALUES[kind] for kind in last})
    assert host.backend.kind == last[0]


@pytest.mark.parametrize(
    ("kind", "version"), [("cuda", (12, 8)), ("rocm", (7, 0)), ("xpu", (2025, 2)), ("cann", (8, 1))]
)
def test_a_backend_has_the_version_that_torch_was_built_for(kind: str, version: tuple[int, int]) -> None:
    host = dataclasses.replace(ABSENT, **{kind: VALUES[kind]})
    assert host.backend == Backend(kind, version)
    assert str(host.backend) == f"{kind} {version[0]}.{version[1]}"


def test_a_machine_without_accelerator_computes_on_the_cpu() -> None:
    assert ABSENT.backend == Backend("cpu")
    assert str(ABSENT.backend) == "cpu"


@pytest.mark.parametrize("backend", [None, "cuda"])
def test_selecting_its_own_backend_leaves_a_host_as_it_is(backend: str | None) -> None:
    host = dataclasses.replace(ABSENT, cuda="13.0")
    assert host.select(backend) is host


def test_every_host_has_a_cpu_to_select() -> None:
    host = dataclasses.replace(ABSENT, torch="2.11.0", driver="580.1", **VALUES)
    selected = host.select("cpu")
    assert selected.backend == Backend("cpu")
    assert selected == dataclasses.replace(ABSENT, torch="2.11.0", driver="580.1")


@pytest.mark.parametrize("backend", ["rocm", "CUDA", "", "gpu"])
def test_a_backend_that_is_not_there_cannot_be_selected(backend: str) -> None:
    host = dataclasses.replace(ABSENT, cuda="13.0")
    with pytest.raises(HostError, match="cpu, cuda") as caught:
        host.select(backend)
    assert caught.value.path == "backend"


def test_there_is_a_backend_for_each_kind() -> None:
    assert {*ORDER, "cpu"} == set(BACKEND_KINDS)


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0+cpu", (2, 13)),
        ("2.8.0a0+5228986c39.nv25.5", (2, 8)),
        ("2.11.0.dev20260101+cu130", (2, 11)),
        ("13.0", (13, 0)),
        ("2.10", (2, 10)),
        ("2025.2", (2025, 2)),
        ("13", None),
        ("", None),
        ("a2.1", None),
        ("2.x", None),
        ("2." + "1" * 5000, None),
        ("1" * 5000 + ".1", None),
    ],
)
def test_major_and_minor_are_the_first_two_numbers(version: str, release: tuple[int, int] | None) -> None:
    assert major_minor(version) == release


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.11.1+cu130", "2.10.0+rocm7.0.2", "2.10.0+xpu", None])
def test_public_releases_of_torch_carry_no_mark(version: str | None) -> None:
    assert dataclasses.replace(ABSENT, torch=version).torch_is_release


@pytest.mark.parametrize(
    "version", ["2.8.0a0+5228986c39.nv25.5", "2.11.0.dev20260101+cu130", "2.9.0rc1", "2.9.0+git1a2b"]
)
def test_vendor_and_nightly_builds_of_torch_are_marked(version: str) -> None:
    assert not dataclasses.replace(ABSENT, torch=version).torch_is_release


@pytest.mark.parametrize(
    ("written", "read"), [("AMD64", "x86_64"), ("arm64", "aarch64"), ("x64", "x86_64"), ("RISCV64", "riscv64")]
)
def test_a_description_may_name_its_cpu_as_its_system_does(written, read) -> None:
    host = Host.from_json(json.dumps({"os": "Linux", "cpu": written}))
    assert (host.os, host.cpu) == ("linux", read)


@pytest.mark.parametrize(
    ("description", "backend"),
    [
        ({"torch": "2.11.0+cu130"}, "cuda 13.0"),
        ({"torch": "2.10.0+rocm7.0"}, "rocm 7.0"),
        ({"torch": "2.11.0+cpu"}, "cpu"),
        ({"torch": "2.11.0+cu130", "cuda": None}, "cpu"),
        ({"torch": "2.11.0+cu130", "unknown": ["cuda"]}, "cpu"),
    ],
)
def test_a_description_that_names_no_backend_has_that_of_its_torch(description, backend) -> None:
    assert str(Host.from_json(json.dumps({"os": "linux", "cpu": "x86_64"} | description)).backend) == backend


def test_flags_of_a_gfx_name_are_left_aside() -> None:
    host = Host.from_json('{"os": "linux", "cpu": "x86_64", "devices": ["gfx942:sramecc+:xnack-"]}')
    assert host.devices == (HostDevice(arch="gfx942"),)


@pytest.mark.parametrize("name", ["torch", "Apache.TVM-ffi", "huggingface_hub", "a--b__c..d", "zope.interface", "X"])
def test_a_distribution_is_spelt_as_packaging_spells_it(name: str) -> None:
    assert normal_distribution(name) == canonicalize_name(name)
