"""Each rule of design 4, looked at alone: what it lets through, what it stops, and with which code."""

from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet

from kernel_loader.host import Host, HostDevice
from kernel_loader.manifest import Manifest
from kernel_loader.metadata import Metadata
from kernel_loader.resolver import resolve
from kernel_loader.rules import (
    EFFORT,
    METADATA_RULES,
    NAME_RULES,
    REQUIRES_RULES,
    Accept,
    Advisory,
    Build,
    Note,
    Reject,
    Requires,
    Unknown,
    advisory_rule,
    advisory_rules,
    cuda_arch_runs,
    gfx_runs,
    is_version,
    judge,
    version_of,
)
from kernel_loader.variant import Variant
from tests.builds import CPU_HOST, H200

MAC = Host(os="darwin", cpu="aarch64", macos="26.1", python="3.12.1", torch="2.11.0", metal=True)
MI300 = replace(H200, torch="2.10.0+rocm7.0", cuda=None, rocm="7.0", driver=None, devices=(HostDevice(arch="gfx942"),))
WINDOWS = replace(H200, os="windows", glibc=None, cxx11_abi=None, torch="2.10.0+cu128", cuda="12.8", driver="581.15")
ASCEND = replace(CPU_HOST, cpu="aarch64", torch="2.9.0", cann="8.2")
INTEL = replace(CPU_HOST, torch="2.10.0+xpu", xpu="2025.2")


def codes(host: Host, name: str, metadata: Metadata | None = None, requires: Requires | None = None) -> set[str]:
    build = Build(name, Variant.parse(name), metadata, requires or Requires())
    return {
        f"{'?' if isinstance(reason, Unknown) else ''}{reason.code}"
        for reason in judge(NAME_RULES + REQUIRES_RULES + METADATA_RULES, host, build)
    }


@pytest.mark.parametrize(
    ("host", "name", "expected"),
    [
        # operating system and CPU
        (H200, "torch211-cxx11-cu130-x86_64-linux", set()),
        (H200, "torch211-cu130-x86_64-windows", {"os"}),
        (H200, "torch211-cxx11-cu130-aarch64-linux", {"cpu"}),
        (WINDOWS, "torch210-cu128-x86_64-windows", set()),
        # Python: compiled builds use abi3
        (replace(H200, free_threaded=True), "torch211-cxx11-cu130-x86_64-linux", {"python"}),
        (replace(H200, free_threaded=True, python="3.15.0"), "torch211-cxx11-cu130-x86_64-linux", set()),
        (replace(H200, free_threaded=True), "torch-cuda", set()),
        # glibc
        (replace(H200, glibc="2.28"), "torch211-cxx11-cu130-x86_64-linux", set()),
        (replace(H200, glibc="2.27"), "torch211-cxx11-cu130-x86_64-linux", {"glibc"}),
        (replace(H200, glibc=None), "torch211-cxx11-cu130-x86_64-linux", {"glibc"}),
        (replace(H200, glibc=None), "torch-cuda", set()),
        (replace(H200, unknown=frozenset({"glibc"})), "torch211-cxx11-cu130-x86_64-linux", {"?glibc"}),
        # torch: the same minor; vendor and nightly builds count by their public version
        (H200, "torch210-cxx11-cu130-x86_64-linux", {"torch"}),
        (H200, "torch212-cxx11-cu130-x86_64-linux", {"torch"}),
        (replace(H200, torch="2.11.0a0+5228986c39.nv25.5"), "torch211-cxx11-cu130-x86_64-linux", set()),
        (replace(H200, torch="2.11.0.dev20260101+cu130"), "torch211-cxx11-cu130-x86_64-linux", set()),
        (replace(H200, torch="2.1.1"), "torch211-cxx11-cu130-x86_64-linux", {"torch"}),
        (replace(H200, torch=None), "torch-cuda", {"torch"}),
        # C++11 ABI
        (H200, "torch211-cxx98-cu130-x86_64-linux", {"cxx11-abi"}),
        (replace(H200, cxx11_abi=False), "torch211-cxx98-cu130-x86_64-linux", set()),
        (replace(H200, cxx11_abi=False), "torch211-cu130-x86_64-linux", set()),
        (
            replace(H200, cxx11_abi=None, unknown=frozenset({"cxx11_abi"})),
            "torch211-cxx11-cu130-x86_64-linux",
            {"?cxx11-abi"},
        ),
        # stable ABI: built for this torch or an older one
        (H200, "torch-stable-abi211-cu130-x86_64-linux", set()),
        (H200, "torch-stable-abi29-cu130-x86_64-linux", set()),
        (H200, "torch-stable-abi212-cu130-x86_64-linux", {"stable-abi"}),
        # tvm-ffi: the same minor, torch or not
        (replace(H200, tvm_ffi="0.1.9"), "tvm-ffi01-cu130-x86_64-linux", set()),
        (replace(H200, tvm_ffi="0.2.0"), "tvm-ffi01-cu130-x86_64-linux", {"tvm-ffi"}),
        (H200, "tvm-ffi01-cu130-x86_64-linux", {"tvm-ffi"}),
        # CUDA: the same major, the minor not above torch's
        (H200, "torch211-cxx11-cu129-x86_64-linux", {"backend-version"}),
        (H200, "torch211-cxx11-cu131-x86_64-linux", {"backend-version"}),
        (replace(H200, cuda="12.9"), "torch211-cxx11-cu126-x86_64-linux", set()),
        (replace(H200, cuda="12.10"), "torch211-cxx11-cu129-x86_64-linux", set()),
        (replace(H200, cuda="12.9"), "torch211-cxx11-cu1210-x86_64-linux", {"backend-version"}),
        # ROCm, XPU and CANN: equal
        (MI300, "torch210-cxx11-rocm70-x86_64-linux", set()),
        (MI300, "torch210-cxx11-rocm71-x86_64-linux", {"backend-version"}),
        (MI300, "torch210-cxx11-rocm64-x86_64-linux", {"backend-version"}),
        (replace(MI300, rocm="7.14"), "torch210-cxx11-rocm714-x86_64-linux", set()),
        (replace(MI300, rocm="7.1"), "torch210-cxx11-rocm714-x86_64-linux", {"backend-version"}),
        (INTEL, "torch210-cxx11-xpu20252-x86_64-linux", set()),
        (INTEL, "torch210-cxx11-xpu20251-x86_64-linux", {"backend-version"}),
        (ASCEND, "torch29-cxx11-cann82-aarch64-linux", set()),
        (ASCEND, "torch29-cxx11-cann83-aarch64-linux", {"backend-version"}),
        (ASCEND, "torch-npu", set()),
        # the driver must be able to run it
        (replace(H200, driver="579.99"), "torch211-cxx11-cu130-x86_64-linux", {"driver"}),
        (replace(H200, driver="580.65.06"), "torch211-cxx11-cu130-x86_64-linux", set()),
        (replace(H200, cuda="12.9", driver="525.60.13"), "torch211-cxx11-cu128-x86_64-linux", set()),
        (replace(H200, cuda="12.9", driver="525.60.12"), "torch211-cxx11-cu128-x86_64-linux", {"driver"}),
        (replace(WINDOWS, driver="528.32"), "torch210-cu128-x86_64-windows", {"driver"}),
        (replace(H200, driver=None), "torch-cuda", {"driver"}),
        (replace(H200, unknown=frozenset({"driver"})), "torch-cuda", {"?driver"}),
        # a device that the process can see
        (replace(H200, devices=()), "torch-cuda", {"device"}),
        (replace(MI300, devices=()), "torch-rocm", {"device"}),
        (replace(H200, devices=(), unknown=frozenset({"devices"})), "torch-cuda", {"?devices"}),
        (replace(H200, devices=()), "torch-universal", set()),
        # backends
        (CPU_HOST, "torch-cuda", {"backend"}),
        (CPU_HOST, "torch-cpu", set()),
        (H200, "torch-cpu", {"backend"}),
        (H200, "torch211-cxx11-cpu-x86_64-linux", {"backend"}),
        (H200, "torch-universal", set()),
        # Metal
        (MAC, "torch211-metal-aarch64-darwin", set()),
        (replace(MAC, macos="15.6"), "torch211-metal-aarch64-darwin", {"macos"}),
        (replace(MAC, macos="15.6"), "torch-metal", set()),
        (replace(MAC, macos=None, unknown=frozenset({"macos"})), "torch211-metal-aarch64-darwin", {"?macos"}),
        # all reasons at once
        (CPU_HOST, "torch211-cxx98-cu130-aarch64-windows", {"os", "cpu", "torch", "cxx11-abi", "backend"}),
    ],
)
def test_what_a_name_says_is_held_against_the_host(host, name, expected):
    assert codes(host, name) == expected


@pytest.mark.parametrize(
    ("declared", "capability", "runs"),
    [
        ("9.0", "9.0", True),
        ("8.0", "8.9", True),
        ("8.9", "8.0", False),
        ("8.0", "9.0", False),
        ("9.0", "10.0", False),
        ("9.0a", "9.0", True),
        ("9.0a", "9.1", False),
        ("10.0a", "10.3", False),
        ("10.0f", "10.3", True),
        ("10.3f", "10.0", False),
        ("10.0f", "12.0", False),
        ("8.0+PTX", "9.0", True),
        ("8.0+PTX", "12.1", True),
        ("8.0+PTX", "7.5", False),
        ("9.0a+PTX", "10.0", False),
        ("10.0f+PTX", "12.0", False),
        ("12.10", "12.9", False),
        ("12.9", "12.10", True),
        ("sm_90", "9.0", None),
        ("9", "9.0", None),
        ("9.0b", "9.0", None),
        ("", "9.0", None),
    ],
)
def test_a_declared_cuda_architecture_runs_where_the_programming_guide_says(declared, capability, runs):
    assert cuda_arch_runs(declared, capability) is runs


@pytest.mark.parametrize(
    ("declared", "gfx", "runs"),
    [
        ("gfx942", "gfx942", True),
        ("gfx90a:sramecc+:xnack-", "gfx90a", True),
        ("gfx90a", "gfx942", False),
        ("gfx9-4-generic", "gfx942", None),
    ],
)
def test_a_gfx_name_runs_on_itself_without_its_flags(declared, gfx, runs):
    assert gfx_runs(declared, gfx) is runs


@pytest.mark.parametrize(
    ("devices", "archs", "expected"),
    [
        (["9.0"], ("8.0", "9.0a"), set()),
        (["9.0", "9.0"], ("9.0a",), set()),
        (["9.0", "10.0"], ("9.0a",), {"arch"}),
        (["10.0"], ("9.0a", "sm_100"), {"?arch"}),
        (["9.0", "10.0"], ("9.0a", "sm_100"), {"?arch"}),
        (["9.0"], ("9.0a", "sm_100"), set()),
        (["9.0"], (), set()),
        (["9.0"], None, set()),
    ],
)
def test_declared_architectures_must_run_on_every_visible_device(devices, archs, expected):
    host = replace(H200, devices=tuple(HostDevice(arch=arch) for arch in devices))
    assert codes(host, "torch-cuda", Metadata(archs=archs)) == expected


@pytest.mark.parametrize(
    ("packages", "depends", "expected"),
    [
        ({"einops": "0.8.1"}, ("einops",), set()),
        ({}, ("einops",), {"python-depends"}),
        ({"einops": "0.6"}, ("einops>=0.7",), {"python-depends"}),
        ({"apache-tvm-ffi": "0.1.9"}, ("tvm-ffi",), set()),
        ({"nvidia-cutlass-dsl": "4.2"}, ("nvidia-cutlass-dsl",), set()),
        ({"nvidia-cutlass-dsl": "4.2"}, ("nvidia_cutlass.dsl",), set()),
        ({}, ("onednn",), set()),
        ({}, ('einops; python_version < "3"',), set()),
        ({}, ("not a requirement",), {"?python-depends"}),
        ({"einops": "2026.9.0.dev1"}, ("einops>=0.7",), set()),
    ],
)
def test_python_dependencies_are_present_and_of_the_right_version(packages, depends, expected):
    host = replace(H200, packages=packages)
    assert codes(host, "torch-cuda", Metadata(python_depends=depends)) == expected


def test_packages_that_nobody_looked_at_are_unknown():
    host = replace(H200, unknown=frozenset({"packages"}))
    assert codes(host, "torch-cuda", Metadata(python_depends=("einops",))) == {"?packages"}


def test_the_remedy_for_missing_packages_is_one_command():
    build = Build("torch-cuda", Variant.parse("torch-cuda"), Metadata(python_depends=("einops>=0.7", "triton")))
    (reason,) = judge(METADATA_RULES, H200, build)
    assert reason.remedy == 'Run `pip install "einops>=0.7" triton`.'


@pytest.mark.parametrize(("minver", "expected"), [("0.17.2", set()), ("0.9", set()), ("0.18.0", {"loader-version"})])
def test_a_build_of_a_newer_format_is_refused(minver, expected):
    assert codes(H200, "torch-cuda", Metadata(kernels_minver=minver)) == expected


REQUIRES = """
name = "k"
repo = "org/k"
version = 1
[requires]
{0}
"""


@pytest.mark.parametrize(
    ("host", "requires", "expected"),
    [
        (H200, 'cuda-capability = ">=8.9"', set()),
        (H200, 'cuda-capability = ">=10.0"', {"cuda-capability"}),
        (replace(H200, devices=(HostDevice(arch="12.0"),)), 'cuda-capability = ">=8.9"', set()),
        (MI300, 'cuda-capability = ">=10.0"', set()),
        (MI300, 'gfx = ["gfx942", "gfx950"]', set()),
        (MI300, 'gfx = ["gfx90a"]', {"gfx"}),
        (H200, 'gfx = ["gfx90a"]', set()),
        (H200, 'cuda-toolkit = ">=12.3"', set()),
        (H200, 'cuda-toolkit = ">=13.1"', {"cuda-toolkit"}),
        (replace(H200, cuda_toolkit=None), 'cuda-toolkit = ">=12.3"', {"cuda-toolkit"}),
        (replace(H200, unknown=frozenset({"cuda_toolkit"})), 'cuda-toolkit = ">=12.3"', {"?cuda-toolkit"}),
        (H200, 'driver = ">=590"', {"driver"}),
        (H200, 'driver = ">=580.126"', set()),
        (H200, 'torch = ">=2.12"', {"torch"}),
        (replace(H200, torch="2.12.0a0+5228986c39.nv25.5"), 'torch = ">=2.12"', set()),
        (H200, 'python = ["triton>=3.2"]', {"requires-python"}),
        (replace(H200, packages={"triton": "3.6.0"}), 'python = ["triton>=3.2"]', set()),
    ],
)
def test_what_a_manifest_requires_is_held_against_the_host(host, requires, expected):
    manifest = Manifest.parse(REQUIRES.format(requires), "k.toml")
    name = "torch-rocm" if host is MI300 else "torch-cuda"
    assert codes(host, name, requires=manifest.requires) == expected


def test_every_reason_has_a_message_and_a_remedy_that_end_as_sentences_do():
    names = [
        "torch211-cxx98-cu121-aarch64-windows",
        "torch-stable-abi219-metal-aarch64-darwin",
        "tvm-ffi09-cpu-x86_64-linux",
    ]
    old = Host(os="linux", cpu="riscv64", torch="2.6", cxx11_abi=True, python="3.13", free_threaded=True, cuda="11.8")
    for host in (CPU_HOST, H200, MAC, MI300, old, replace(old, unknown=frozenset({"glibc", "driver", "devices"}))):
        for verdict in resolve(names, host).verdicts:
            for reason in verdict.reasons:
                assert reason.message, reason
                assert reason.message[-1] not in ".;,", reason
                assert "None" not in reason.message + reason.remedy, reason
                assert reason.remedy[0].isupper(), reason
                assert reason.remedy[-1] == ".", reason


def test_every_code_of_a_rejection_has_its_place_in_the_order_of_effort():
    import inspect
    import re

    from kernel_loader import rules

    source = inspect.getsource(rules)
    written = set(re.findall(r'Reject\(\s*"([\w-]+)"', source)) | {
        "grammar",
        "cuda-toolkit",
        "python-depends",
        "requires-python",
    }
    assert written == set(EFFORT)


def test_outcomes_of_different_kinds_are_never_equal():
    assert Reject("a", "b", "c") != Unknown("a", "b", "c")
    assert Note("a", "b", "c") != Unknown("a", "b", "c")


@pytest.mark.parametrize(
    ("host", "depends", "expected"),
    [
        (WINDOWS, 'einops; sys_platform == "win32"', {"python-depends"}),
        (H200, 'einops; sys_platform == "win32"', set()),
        (replace(H200, python="3.9.1"), 'einops; python_version < "3.10"', {"python-depends"}),
        (H200, 'einops; platform_machine == "aarch64"', set()),
    ],
)
def test_markers_are_those_of_the_host_and_not_of_this_machine(host, depends, expected):
    assert codes(replace(host, packages={}), "torch-cuda", Metadata(python_depends=(depends,))) == expected


@pytest.mark.parametrize(
    ("there", "needed", "fits"),
    [
        ("3.2.0rc1", "triton==3.2.0rc1", True),
        ("0.8.1.post1", "triton==0.8.1.post1", True),
        ("2.13.0+cpu", "triton==2.13.0+cpu", True),
        ("2.13.0+cpu", "triton==2.13.0", True),
        ("unknown", "triton", True),
        ("unknown", "triton>=1", False),
        ("3.2.0.dev1", "triton>=3.2", True),
    ],
)
def test_an_installed_version_counts_as_itself_and_by_its_public_version(there, needed, fits):
    found = codes(replace(H200, packages={"triton": there}), "torch-cuda", Metadata(python_depends=(needed,)))
    assert found == (set() if fits else {"python-depends"})


def test_a_capability_that_nobody_looked_at_is_unknown():
    manifest = Manifest.parse(REQUIRES.format('cuda-capability = ">=8.9"'), "k.toml")
    host = replace(H200, devices=(), unknown=frozenset({"devices"}))
    assert codes(host, "torch-cuda", requires=manifest.requires) == {"?devices"}


@pytest.mark.parametrize(
    ("host", "name", "remedy"),
    [
        (CPU_HOST, "torch-cuda", "Install a torch that was built for cuda."),
        (MAC, "torch-cuda", "There is no torch for cuda on darwin."),
        (MAC, "torch-cpu", "Install a torch that was built for cpu."),
        (CPU_HOST, "torch-metal", "There is no torch for metal on linux."),
        (replace(MAC, metal=False), "torch-metal", "Install a torch that was built for metal."),
    ],
)
def test_no_torch_is_recommended_that_does_not_exist(host, name, remedy):
    (reason,) = judge(NAME_RULES, host, Build(name, Variant.parse(name), None, Requires()))
    assert reason.remedy == remedy


@pytest.mark.parametrize(
    ("name", "said", "expected"),
    [
        ("torch-cuda", "cuda", set()),
        ("torch-cuda", "rocm", {"metadata"}),
        ("torch-universal", "cpu", set()),
        ("torch211-cxx11-cu130-x86_64-linux", "cpu", {"metadata"}),
    ],
)
def test_metadata_of_another_backend_than_the_name_is_refused(name, said, expected):
    assert codes(H200, name, Metadata(backend=said)) == expected


# --- advisories -----------------------------------------------------------------------------------------------------

FAULT = Advisory("the-id", "org/k", "reject", "it fails", "Use another.", "issue 1")


def advised(host: Host = H200, version: int | None = 1, metadata: Metadata | None = None, **about: object) -> object:
    """What an advisory says of a build."""
    about = {key: SpecifierSet(value) if key in SPECIFIERS else value for key, value in about.items()}
    build = Build("torch-cuda", Variant.parse("torch-cuda"), metadata, version=version)
    return advisory_rule(FAULT._replace(**about), host, build)


SPECIFIERS = ("versions", "devices", "capability", "no_cuda_toolkit")
TWO = replace(H200, devices=H200.devices * 2)
NO_TOOLKIT = replace(H200, cuda_toolkit=None)


@pytest.mark.parametrize(
    ("host", "about", "applies"),
    [
        (H200, {}, True),
        (CPU_HOST, {}, True),
        (H200, {"versions": "<=1"}, True),
        (H200, {"versions": "==1"}, True),
        (H200, {"versions": "<1"}, False),
        (H200, {"versions": ">=2"}, False),
        (H200, {"devices": ">1"}, False),
        (TWO, {"devices": ">1"}, True),
        (replace(CPU_HOST, devices=TWO.devices), {"devices": ">1"}, False),
        (replace(MI300, devices=MI300.devices * 2), {"devices": ">1"}, False),
        (H200, {"capability": ">=9,<10"}, True),
        (H200, {"capability": ">=10"}, False),
        (replace(H200, devices=(*H200.devices, HostDevice(arch="10.0"))), {"capability": ">=10"}, True),
        (H200, {"no_cuda_toolkit": ">=12.3"}, False),
        (replace(H200, cuda_toolkit="12.2"), {"no_cuda_toolkit": ">=12.3"}, True),
        (NO_TOOLKIT, {"no_cuda_toolkit": ">=12.3"}, True),
        (replace(MI300, cuda_toolkit=None), {"no_cuda_toolkit": ">=12.3"}, False),
        (TWO, {"devices": ">1", "versions": ">1"}, False),
        (TWO, {"devices": ">1", "capability": "<9"}, False),
    ],
)
def test_an_advisory_applies_where_all_its_conditions_hold(host, about, applies):
    assert isinstance(advised(host, **about), Reject if applies else Accept)


@pytest.mark.parametrize(
    ("effect", "outcome", "in_doubt"), [("reject", Reject, Unknown), ("doubt", Unknown, Unknown), ("warn", Note, Note)]
)
def test_what_an_advisory_does(effect, outcome, in_doubt):
    found = advised(effect=effect, when="for some calls")
    assert type(found) is outcome
    assert found.code == "advisory"
    assert found.message == "known fault the-id: it fails (for some calls)"
    assert found.remedy == "Use another. Reported: issue 1."
    unseen = replace(H200, unknown=frozenset({"devices", "cuda_toolkit"}), devices=(), cuda_toolkit=None)
    for about in ({"devices": ">1"}, {"capability": ">=9"}, {"no_cuda_toolkit": ">=12"}):
        found = advised(unseen, effect=effect, **about)
        assert type(found) is in_doubt
        assert "which nobody knows here" in found.message
    assert type(advised(version=None, effect=effect, versions="<2")) is in_doubt
    assert isinstance(advised(replace(unseen, cuda=None), effect=effect, devices=">1"), Accept)


def test_an_advisory_that_is_overruled_is_a_note_of_another_code():
    found = advised(overruled="ignored by KERNEL_LOADER_IGNORE_ADVISORIES")
    assert type(found) is Note
    assert found.code == "advisory-overruled"
    assert found.message.endswith("it fails; ignored by KERNEL_LOADER_IGNORE_ADVISORIES")


def test_the_version_of_a_build_is_what_it_says_itself_or_else_what_was_asked_for():
    assert version_of(Metadata(version=3), 1) == 3
    assert version_of(Metadata(), 1) == 1
    assert version_of(None, None) is None
    assert isinstance(advised(version=1, metadata=Metadata(version=2), versions="<2"), Accept)
    assert isinstance(advised(version=None, metadata=Metadata(version=1), versions="<2"), Reject)
    assert [is_version(SpecifierSet("<2"), version) for version in (1, 2, None)] == [True, False, None]
    assert is_version(None, None)


def test_every_advisory_is_a_rule_of_its_own():
    rules = advisory_rules([FAULT, FAULT._replace(id="another", effect="warn")])
    found = judge(rules, H200, Build("torch-cuda", Variant.parse("torch-cuda")))
    assert [type(outcome) for outcome in found] == [Reject, Note]
