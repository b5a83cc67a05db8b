"""May a build run on a host? One small function a rule: (Host, Build) -> Accept | Reject | Unknown | Note.

A rule looks at one thing and gives one reason. All rules run on a build, so that a person sees every reason at once.
`Unknown` is for facts that nobody has: it ranks below Accept, and a warning tells of it when such a build is used.
`Note` is for what a person should know of a build that may be used.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from kernel_loader.host import Host, major_minor, normal_distribution
from kernel_loader.metadata import Metadata
from kernel_loader.variant import Variant

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

# The release of the `kernels` package whose build format is implemented here (metadata: kernels-minver).
FORMAT_VERSION: Final = "0.17.2"

# Compiled builds are made for manylinux_2_28 (PEP 600): its glibc is the least that they can run on.
LEAST_GLIBC: Final = (2, 28)

# Metal kernels are compiled as Metal 4, which macOS 26 brought.
LEAST_MACOS: Final = (26, 0)

# Free-threaded interpreters have a stable ABI from this release on (PEP 803).
FREE_THREADED_ABI: Final = (3, 15)

# Least driver for a CUDA major version under minor-version compatibility, by system (CUDA release notes, table 2).
LEAST_DRIVER: Final = {
    "linux": {11: "450.80.02", 12: "525.60.13", 13: "580"},
    "windows": {11: "452.39", 12: "528.33", 13: "580"},
}

# Dependencies that builds name otherwise than the distribution that provides them; None: no Python package.
DISTRIBUTIONS: Final = {"tvm-ffi": "apache-tvm-ffi", "onednn": None}

# Distributions that provide the same modules: torch brings Triton under one name or another.
ALIKE: Final = {
    "triton": (
        "pytorch-triton",
        "triton-rocm",
        "pytorch-triton-rocm",
        "triton-xpu",
        "pytorch-triton-xpu",
        "triton-windows",
    )
}


class Accept:
    """The rule has nothing against the build."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What a rule has to say of a build.

    Attributes:
        code: stable name of the reason, for programs.
        message: what the build needs and what the host has.
        remedy: what would change it.
    """

    code: str
    message: str
    remedy: str


class Reject(Reason):
    """The build cannot run on the host."""

    __slots__ = ()


class Unknown(Reason):
    """Nobody can tell: a fact about the host is missing, or the build says something in an unknown form."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Note(Reason):
    """The build may be used, and a person should know this of it.

    Attributes:
        untrained: layers whose gradient the fault is about, as (name, id of the advisory); "*" stands for all.
    """

    untrained: tuple[tuple[str, str], ...] = ()


Outcome = Accept | Reject | Unknown | Note
ACCEPT: Final = Accept()


class Requires(NamedTuple):
    """What a manifest demands of the host, beyond what builds say of themselves.

    Attributes:
        cuda_capability: specifier for the compute capability of every visible NVIDIA device, as ">=8.9".
        gfx: AMD architectures on which the kernel works; empty for all.
        cuda_toolkit: specifier for a CUDA toolkit with nvcc.
        driver: specifier for the NVIDIA driver.
        torch: specifier for torch.
        python: requirement strings of Python packages.
    """

    cuda_capability: SpecifierSet | None = None
    gfx: tuple[str, ...] = ()
    cuda_toolkit: SpecifierSet | None = None
    driver: SpecifierSet | None = None
    torch: SpecifierSet | None = None
    python: tuple[str, ...] = ()


NOTHING: Final = Requires()

Effect = Literal["reject", "doubt", "warn"]


class Advisory(NamedTuple):
    """A fault of a repository's builds that was publicly reported. Every condition that it names must hold.

    Attributes:
        id: unique name, for `KERNEL_LOADER_IGNORE_ADVISORIES`.
        repo: repository on the Hub.
        effect: "reject" refuses the build; "doubt" takes it when nothing else is accepted; "warn" takes it.
        fault: what goes wrong.
        remedy: what to do about it.
        source: where it was reported.
        versions: specifier for the version of the repository; None for all.
        devices: specifier for the number of visible NVIDIA devices, as ">1".
        capability: specifier that the compute capability of some visible device meets.
        no_cuda_toolkit: specifier that no CUDA toolkit with nvcc on the host meets.
        when: what a call must be like, in words.
        guard: the guard that mends it, in kernels whose manifest has it.
        no_training: layers that `kernelize` does not take for training because of it; "*" stands for all.
        mended: specifiers for the versions at which the kernel's manifest has that guard; None stands for all.
        overruled: why it is not heeded here, such as "ignored by KERNEL_LOADER_IGNORE_ADVISORIES".
    """

    id: str
    repo: str
    effect: Effect
    fault: str
    remedy: str
    source: str
    versions: SpecifierSet | None = None
    devices: SpecifierSet | None = None
    capability: SpecifierSet | None = None
    no_cuda_toolkit: SpecifierSet | None = None
    when: str = ""
    guard: str | None = None
    no_training: tuple[str, ...] = ()
    mended: tuple[SpecifierSet | None, ...] = ()
    overruled: str = ""


class Build(NamedTuple):
    """A build as far as it is known: its name, then what its metadata.json says, and what its manifest demands.

    `version` is that of the repository which was asked for. Where its metadata.json names one, that counts.
    """

    name: str
    variant: Variant
    metadata: Metadata | None = None
    requires: Requires = NOTHING
    version: int | None = None


Rule = Callable[[Host, Build], Outcome]


# --- what the name of a build says --------------------------------------------------------------------------------


def os_rule(host: Host, build: Build) -> Outcome:
    """Compiled code runs on the system that it was built for."""
    if build.variant.os in (None, host.os):
        return ACCEPT
    return Reject("os", f"built for {build.variant.os}, this is {host.os}", f"Use it on {build.variant.os}.")


def cpu_rule(host: Host, build: Build) -> Outcome:
    """Compiled code runs on the instruction set that it was built for."""
    if build.variant.cpu in (None, host.cpu):
        return ACCEPT
    return Reject("cpu", f"built for {build.variant.cpu}, this is {host.cpu}", f"Use it on {build.variant.cpu}.")


def python_rule(host: Host, build: Build) -> Outcome:
    """Compiled builds use CPython's stable ABI (abi3)."""
    if build.variant.is_noarch or not host.free_threaded:
        return ACCEPT
    release = major_minor(host.python or "")
    if release is not None and release >= FREE_THREADED_ABI:
        return ACCEPT
    return Reject(
        "python",
        f"compiled for the stable ABI, which free-threaded Python {host.python} does not have",
        "Use an interpreter with the GIL, or Python 3.15 or later.",
    )


def glibc_rule(host: Host, build: Build) -> Outcome:
    """Compiled code for Linux is linked against glibc."""
    if build.variant.os != "linux" or host.os != "linux":
        return ACCEPT
    needed = f"{LEAST_GLIBC[0]}.{LEAST_GLIBC[1]}"
    if "glibc" in host.unknown:
        return _unknown("glibc", f"it needs glibc {needed}")
    release = major_minor(host.glibc or "")
    if release is not None and release >= LEAST_GLIBC:
        return ACCEPT
    there = f"glibc {host.glibc}" if host.glibc else "a system without glibc"
    return Reject(
        "glibc", f"needs glibc {needed}, this is {there}", f"Use a distribution with glibc {needed} or later."
    )


def torch_rule(host: Host, build: Build) -> Outcome:
    """A build against torch's unstable ABI needs the very minor release; every torch build needs torch."""
    if build.variant.framework == "tvm-ffi":
        return ACCEPT
    if "torch" in host.unknown:
        return _unknown("torch", "it needs torch")
    release = major_minor(host.torch or "")
    if release is None:
        return Reject("torch", "needs torch, which is not installed", "Install torch.")
    if build.variant.framework != "torch" or build.variant.framework_version == release:
        return ACCEPT
    needed = _dotted(build.variant.framework_version)
    return Reject("torch", f"built for torch {needed}, this is {host.torch}", f"Install torch {needed}.")


def cxx11_abi_rule(host: Host, build: Build) -> Outcome:
    """Where the name carries a C++ ABI, torch has the same."""
    needed = build.variant.cxx11_abi
    if needed is None or host.torch is None or needed == host.cxx11_abi:
        return ACCEPT
    if "cxx11_abi" in host.unknown:
        return _unknown("cxx11_abi", f"it needs the {_abi(needed)}")
    return Reject(
        "cxx11-abi",
        f"built for the {_abi(needed)}, this torch uses the {_abi(bool(host.cxx11_abi))}",
        f"Install a torch that uses the {_abi(needed)}.",
    )


def stable_abi_rule(host: Host, build: Build) -> Outcome:
    """A build against torch's stable ABI runs on the release it was built for and on newer ones."""
    release = major_minor(host.torch or "")
    needed = build.variant.framework_version
    if build.variant.framework != "torch-stable-abi" or release is None or needed is None or needed <= release:
        return ACCEPT
    message = f"built for the stable ABI of torch {_dotted(needed)}, this is {host.torch}"
    return Reject("stable-abi", message, f"Install torch {_dotted(needed)} or later.")


def tvm_ffi_rule(host: Host, build: Build) -> Outcome:
    """A tvm-ffi build needs the same minor release of apache-tvm-ffi."""
    if build.variant.framework != "tvm-ffi":
        return ACCEPT
    needed = _dotted(build.variant.framework_version)
    if "tvm_ffi" in host.unknown:
        return _unknown("tvm_ffi", f"it needs apache-tvm-ffi {needed}")
    if major_minor(host.tvm_ffi or "") == build.variant.framework_version:
        return ACCEPT
    there = f"this is {host.tvm_ffi}" if host.tvm_ffi else "which is not installed"
    return Reject(
        "tvm-ffi", f"needs apache-tvm-ffi {needed}, {there}", f'Run `pip install "apache-tvm-ffi=={needed}.*"`.'
    )


def backend_rule(host: Host, build: Build) -> Outcome:
    """The build computes on what torch computes on. No-arch builds for Ascend are called npu."""
    kind = host.backend.kind
    if build.variant.backend in (kind, "universal") or (build.variant.backend == "npu" and kind == "cann"):
        return ACCEPT
    needed = build.variant.backend
    # torch for macOS computes on the CPU or on Metal, and no other torch on Metal.
    exists = needed == "cpu" or (needed == "metal") == (host.os == "darwin")
    return Reject(
        "backend",
        f"built for {needed}, this host computes on {kind}",
        f"Install a torch that was built for {needed}." if exists else f"There is no torch for {needed} on {host.os}.",
    )


def backend_version_rule(host: Host, build: Build) -> Outcome:
    """CUDA: same major, minor not above torch's (minor-version compatibility). ROCm, XPU, CANN: equal."""
    there, needed = host.backend, build.variant.backend_version
    if needed is None or there.kind != build.variant.backend:
        return ACCEPT
    if there.version is None:
        return _unknown(there.kind, f"it needs {there.kind} {_dotted(needed)}")
    if needed == there.version or (there.kind == "cuda" and needed[0] == there.version[0] and needed < there.version):
        return ACCEPT
    return Reject(
        "backend-version",
        f"built for {there.kind} {_dotted(needed)}, this torch was built for {_dotted(there.version)}",
        f"Install a torch that was built for {there.kind} {_dotted(needed)}.",
    )


def macos_rule(host: Host, build: Build) -> Outcome:
    """Compiled Metal code needs a macOS that knows its Metal version."""
    if build.variant.is_noarch or build.variant.backend != "metal" or host.os != "darwin":
        return ACCEPT
    if "macos" in host.unknown:
        return _unknown("macos", f"it needs macOS {LEAST_MACOS[0]}")
    release = tuple(int(part) for part in re.findall(r"\d+", host.macos or "")[:2])
    if release >= LEAST_MACOS[:1]:
        return ACCEPT
    message = f"needs macOS {LEAST_MACOS[0]} or later, this is {host.macos}"
    return Reject("macos", message, f"Update to macOS {LEAST_MACOS[0]}.")


def driver_rule(host: Host, build: Build) -> Outcome:
    """CUDA code needs a driver that can run its CUDA version."""
    if build.variant.backend != "cuda" or host.backend.kind != "cuda":
        return ACCEPT
    least = LEAST_DRIVER.get(host.os, {}).get((build.variant.backend_version or (0, 0))[0])
    needed = f"an NVIDIA driver, {least} or later" if least else "an NVIDIA driver"
    if "driver" in host.unknown:
        return _unknown("driver", f"it needs {needed}")
    remedy = f"Install {needed}, or use another host (`--host FILE` where you only prepare for one)."
    if host.driver is None:
        return Reject("driver", f"needs {needed}; none is loaded here", remedy)
    if least is None or _numbers(host.driver) >= _numbers(least):
        return ACCEPT
    return Reject("driver", f"needs {needed}; this is {host.driver}", remedy)


def device_rule(host: Host, build: Build) -> Outcome:
    """GPU code needs a GPU that the process can see."""
    kind = build.variant.backend
    if kind not in ("cuda", "rocm") or host.backend.kind != kind or _archs(host, kind):
        return ACCEPT
    if "devices" in host.unknown:
        return _unknown("devices", f"it needs a {kind} device")
    variable = "CUDA_VISIBLE_DEVICES" if kind == "cuda" else "HIP_VISIBLE_DEVICES"
    return Reject("device", f"needs a {kind} device, and none is visible", f"Look at {variable}, or use another host.")


# --- what the metadata of a build, and its manifest, say ----------------------------------------------------------


def arch_rule(host: Host, build: Build) -> Outcome:
    """Declared architectures against every visible device."""
    kind = build.variant.backend
    declared = build.metadata.archs if build.metadata else None
    if not declared or kind not in ("cuda", "rocm") or host.backend.kind != kind:
        return ACCEPT
    runs = cuda_arch_runs if kind == "cuda" else gfx_runs
    outcome: Outcome = ACCEPT
    for arch in _archs(host, kind):
        answers = {runs(entry, arch) for entry in declared}
        if True in answers:
            continue
        listed = ", ".join(declared)
        if None not in answers:
            remedy = f"Hide that device from the process, or use a version of the kernel that was built for {arch}."
            return Reject("arch", f"compiled for {listed}, and a visible device is {arch}", remedy)
        remedy = "Update kernel-loader, which does not know every form in that list."
        outcome = Unknown("arch", f"compiled for {listed}; whether that runs on {arch} is not known", remedy)
    return outcome


def cuda_arch_runs(declared: str, capability: str) -> bool | None:
    """Whether code compiled for an architecture runs on a compute capability; None for a text in no known form.

    `9.0` runs on 9.x at or above; `9.0a` on 9.0 only; `10.0f` on 10.x at or above; with `+PTX`, which the driver
    compiles for the device, on anything newer (CUDA programming guide, "Compute capability" and "Feature sets").
    """
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", declared, re.ASCII)
    device = major_minor(capability)
    if match is None or device is None:
        return None
    built = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return device == built
    if match[4] and not match[3]:
        return device >= built
    return device[0] == built[0] and device >= built


def gfx_runs(declared: str, gfx: str) -> bool | None:
    """Whether code compiled for a gfx name (its `:feature` flags left aside) runs on another; None for no gfx name."""
    name = declared.partition(":")[0]
    return name == gfx if re.fullmatch(r"gfx[0-9a-f]+", name) else None


def metadata_rule(host: Host, build: Build) -> Outcome:  # noqa: ARG001 - a rule's signature
    """The name of a build and its metadata.json speak of one backend."""
    said = build.metadata.backend if build.metadata else None
    named = "cann" if build.variant.backend == "npu" else build.variant.backend
    if said is None or named in (said, "universal"):
        return ACCEPT
    message = f"its metadata.json is of a build for {said}, its name of one for {named}"
    return Reject("metadata", message, "It was published wrong: report it to the kernel's author.")


def python_depends_rule(host: Host, build: Build) -> Outcome:
    """The Python packages that the build imports are installed, at a version that it allows."""
    return _packages(host, "python-depends", build.metadata.python_depends if build.metadata else ())


def loader_version_rule(host: Host, build: Build) -> Outcome:  # noqa: ARG001 - a rule's signature
    """The build's format is one that this loader implements."""
    minver = build.metadata.kernels_minver if build.metadata else None
    if minver is None or _numbers(minver) <= _numbers(FORMAT_VERSION):
        return ACCEPT
    return Reject(
        "loader-version",
        f"made for the build format of kernels {minver}, this loader implements that of {FORMAT_VERSION}",
        "Run `pip install --upgrade kernel-loader`.",
    )


def requires_capability_rule(host: Host, build: Build) -> Outcome:
    """The manifest's `cuda-capability` holds for every visible NVIDIA device."""
    needed = build.requires.cuda_capability
    if needed is not None and host.backend.kind == "cuda" and "devices" in host.unknown:
        return _unknown("devices", f"the kernel needs compute capability {needed}")
    bad = [a for a in _archs(host, "cuda") if needed is not None and not needed.contains(a)]
    if not bad or host.backend.kind != "cuda":
        return ACCEPT
    message = f"the kernel needs compute capability {needed}, and a visible device has {bad[0]}"
    return Reject("cuda-capability", message, "Hide that device from the process, or use another kernel.")


def requires_gfx_rule(host: Host, build: Build) -> Outcome:
    """The manifest's `gfx` names every visible AMD device."""
    bad = [a for a in _archs(host, "rocm") if build.requires.gfx and a not in build.requires.gfx]
    if not bad or host.backend.kind != "rocm":
        return ACCEPT
    message = f"the kernel works on {', '.join(build.requires.gfx)}, and a visible device is {bad[0]}"
    return Reject("gfx", message, "Hide that device from the process, or use another kernel.")


def requires_toolkit_rule(host: Host, build: Build) -> Outcome:
    """The manifest's `cuda-toolkit`: kernels that compile at run time need an nvcc."""
    remedy = "Install the CUDA toolkit and point CUDA_HOME to it."
    needed = build.requires.cuda_toolkit if host.backend.kind == "cuda" else None
    return _specifier(host, "cuda_toolkit", "cuda-toolkit", "a CUDA toolkit with nvcc", needed, remedy)


def requires_driver_rule(host: Host, build: Build) -> Outcome:
    """The manifest's `driver`."""
    needed = build.requires.driver if host.backend.kind == "cuda" else None
    return _specifier(host, "driver", "driver", "an NVIDIA driver", needed, "Update the driver.")


def requires_torch_rule(host: Host, build: Build) -> Outcome:
    """The manifest's `torch`."""
    return _specifier(host, "torch", "torch", "torch", build.requires.torch, "Install a torch of that version.")


def requires_python_rule(host: Host, build: Build) -> Outcome:
    """The manifest's `python` packages."""
    return _packages(host, "requires-python", build.requires.python)


# --- what is publicly known of it ---------------------------------------------------------------------------------


def advisory_rules(advisories: Iterable[Advisory]) -> tuple[Rule, ...]:
    """A rule for each advisory."""
    return tuple(functools.partial(advisory_rule, advisory) for advisory in advisories)


def advisory_rule(advisory: Advisory, host: Host, build: Build) -> Outcome:
    """A fault that was reported of the repository at the build's version, on hosts like this one."""
    conditions = {
        "the version": is_version(advisory.versions, version_of(build.metadata, build.version)),
        "the devices": _on_devices(advisory.devices, host, lambda archs: (str(len(archs)),)),
        "their compute capability": _on_devices(advisory.capability, host, lambda archs: archs),
        "the CUDA toolkit": _lacks_toolkit(advisory.no_cuda_toolkit, host),
    }
    if False in conditions.values():
        return ACCEPT
    unknown = [name for name, holds in conditions.items() if holds is None]
    message = f"known fault {advisory.id}: {advisory.fault}" + (f" ({advisory.when})" if advisory.when else "")
    remedy = f"{advisory.remedy} Reported: {advisory.source}."
    version = version_of(build.metadata, build.version)
    is_mended = any(is_version(versions, version) is not False for versions in advisory.mended)
    if overruled := advisory.overruled or (f"mended by the guard {advisory.guard}" if is_mended else ""):
        return Note("advisory-overruled", f"{message}; {overruled}", remedy)
    if unknown:
        message += f"; whether it shows depends on {' and '.join(unknown)}, which nobody knows here"
    if advisory.effect == "warn":
        return Note("advisory", message, remedy, tuple((layer, advisory.id) for layer in advisory.no_training))
    if unknown or advisory.effect == "doubt":
        return Unknown("advisory", message, remedy)
    return Reject("advisory", message, remedy)


def version_of(metadata: Metadata | None, asked: int | None) -> int | None:
    """The version of its repository that a build is of: what it says itself, or else what was asked for."""
    return metadata.version if metadata is not None and metadata.version is not None else asked


def is_version(specifier: SpecifierSet | None, version: int | None) -> bool | None:
    """Whether a version of a repository is meant by a specifier; None where the version is not known."""
    if specifier is None:
        return True
    return None if version is None else specifier.contains(str(version))


def _on_devices(needed: SpecifierSet | None, host: Host, versions: Callable[[list[str]], Iterable[str]]) -> bool | None:
    """Whether something that is told of the visible NVIDIA devices meets a specifier; None where nobody looked."""
    if needed is None:
        return True
    if host.backend.kind == "cuda" and "devices" in host.unknown:
        return None
    return host.backend.kind == "cuda" and any(needed.contains(version) for version in versions(_archs(host, "cuda")))


def _lacks_toolkit(needed: SpecifierSet | None, host: Host) -> bool | None:
    if needed is None:
        return True
    if host.backend.kind == "cuda" and "cuda_toolkit" in host.unknown:
        return None
    there = host.cuda_toolkit
    return host.backend.kind == "cuda" and (there is None or not _contains(needed, there))


NAME_RULES: Final[tuple[Rule, ...]] = (
    os_rule,
    cpu_rule,
    python_rule,
    glibc_rule,
    torch_rule,
    cxx11_abi_rule,
    stable_abi_rule,
    tvm_ffi_rule,
    backend_rule,
    backend_version_rule,
    macos_rule,
    driver_rule,
    device_rule,
)
REQUIRES_RULES: Final[tuple[Rule, ...]] = (
    requires_capability_rule,
    requires_gfx_rule,
    requires_toolkit_rule,
    requires_driver_rule,
    requires_torch_rule,
    requires_python_rule,
)
METADATA_RULES: Final[tuple[Rule, ...]] = (metadata_rule, arch_rule, python_depends_rule, loader_version_rule)

# From the change that a person makes most easily to the one that needs another machine.
EFFORT: Final = (
    "python-depends",
    "requires-python",
    "tvm-ffi",
    "loader-version",
    "advisory",
    "cuda-toolkit",
    "torch",
    "stable-abi",
    "cxx11-abi",
    "backend-version",
    "python",
    "driver",
    "glibc",
    "macos",
    "device",
    "arch",
    "cuda-capability",
    "gfx",
    "backend",
    "metadata",
    "os",
    "cpu",
    "grammar",
)


def judge(rules: tuple[Rule, ...], host: Host, build: Build) -> tuple[Reject | Unknown | Note, ...]:
    """What the rules have to say of a build on a host."""
    return tuple([outcome for rule in rules if not isinstance(outcome := rule(host, build), Accept)])


# --- shared by rules ----------------------------------------------------------------------------------------------


def _unknown(fact: str, need: str) -> Unknown:
    name = "ARCH" if fact == "devices" else fact.upper()
    remedy = f"Set KERNEL_LOADER_OVERRIDE_{name}, or add {fact!r} to the description of the host."
    return Unknown(fact.replace("_", "-"), f"{need}, and what this host has is not known", remedy)


def _specifier(host: Host, fact: str, code: str, what: str, needed: SpecifierSet | None, remedy: str) -> Outcome:
    if needed is None:
        return ACCEPT
    if fact in host.unknown:
        return _unknown(fact, f"the kernel needs {what} {needed}")
    there: str | None = getattr(host, fact)
    if there is not None and _contains(needed, there):
        return ACCEPT
    return Reject(
        code, f"the kernel needs {what} {needed}, {f'this is {there}' if there else 'and there is none'}", remedy
    )


def _contains(needed: SpecifierSet, version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        # A nightly or vendor build also counts by its public version.
        parsed = Version(version)
        return not needed or needed.contains(parsed, prereleases=True) or needed.contains(parsed.base_version)
    except InvalidVersion:
        return not needed


def _environment(host: Host) -> dict[str, str]:
    """The variables of requirement markers (PEP 508) as the host would answer them."""
    python = host.python or ".".join(map(str, sys.version_info[:3]))
    release = major_minor(python) or sys.version_info[:2]
    return {
        "os_name": "nt" if host.os == "windows" else "posix",
        "sys_platform": {"windows": "win32"}.get(host.os, host.os),
        "platform_system": host.os.capitalize(),
        "platform_machine": host.cpu,
        "python_version": f"{release[0]}.{release[1]}",
        "python_full_version": python,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }


def _packages(host: Host, code: str, requirements: tuple[str, ...]) -> Outcome:
    if not requirements:
        return ACCEPT
    from packaging.requirements import InvalidRequirement, Requirement

    missing = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            return Unknown(code, f"it needs {text!r}, which is no requirement string", "Ask the kernel's author.")
        name = DISTRIBUTIONS.get(requirement.name.lower(), requirement.name)
        if name is None or (requirement.marker is not None and not requirement.marker.evaluate(_environment(host))):
            continue
        if "packages" in host.unknown:
            return _unknown("packages", f"it needs {', '.join(requirements)}")
        names = (normal_distribution(name), *ALIKE.get(name, ()))
        there = next((host.packages[alike] for alike in names if alike in host.packages), None)
        if there is None or not _contains(requirement.specifier, there):
            missing.append((f"{name}{requirement.specifier}", f"{there} is installed" if there else "not installed"))
    if not missing:
        return ACCEPT
    install = " ".join(f'"{name}"' if re.search(r"[<>~!=]", name) else name for name, _ in missing)
    listed = ", ".join(f"{name} ({there})" for name, there in missing)
    return Reject(code, f"needs Python packages: {listed}", f"Run `pip install {install}`.")


def _archs(host: Host, kind: str) -> list[str]:
    return [d.arch for d in host.devices if d.arch.startswith("gfx") == (kind == "rocm")]


def _dotted(version: tuple[int, int] | None) -> str:
    return f"{version[0]}.{version[1]}" if version else ""


def _abi(cxx11: bool) -> str:  # noqa: FBT001 - the value of a fact, not a switch
    return f"C++{'11' if cxx11 else '98'} ABI"


@functools.lru_cache(maxsize=256)
def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
