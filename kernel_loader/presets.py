"""Presets: hosts that have a name, for who prepares builds and has no description of the machine.

`<accelerator>-<backend version>-torch<version>`, such as `h200-cu130-torch2.11`. A preset assumes what most such
machines have: Linux with the glibc of Ubuntu 22.04, Python 3.12, the least NVIDIA driver that runs the CUDA version,
and the C++ ABI of the wheels of that torch. Which Python packages and which CUDA toolkit are there it does not know, so
that rules about them answer "unknown".

Sources:
    Compute capabilities: NVIDIA, "CUDA GPU Compute Capability" (Thor is the Jetson T5000 there). Of those that it does
    not list, A10G is 8.6 by the runners of pytorch/test-infra (#769), H800 and H20 are cut-down H100s and report 9.0.
    gfx names: AMD, "System requirements" of ROCm for Linux.
    The CUDA version that brought an architecture: PTX ISA, release history; that dropped one: release notes of CUDA 13.
    The first ROCm with gfx950: PyTorch's builds of wheels, which compile for it with ROCm 6.4 and later.
    Intel GPUs: PyTorch, "Getting Started on Intel GPU".
    The C++ ABI of wheels: the release notes of PyTorch 2.6 (those for CUDA 12.6, ROCm, XPU and aarch64 on Linux use the
    C++11 ABI) and 2.7 (all do).
"""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from kernel_loader.errors import HostError, VariantError
from kernel_loader.host import Host, HostDevice
from kernel_loader.rules import LEAST_DRIVER, LEAST_MACOS
from kernel_loader.variant import Variant

PREFIX: Final = "preset:"
FORM: Final = "<accelerator>-<backend version>-torch<version>, such as h200-cu130-torch2.11"

GLIBC: Final = "2.35"  # of Ubuntu 22.04
PYTHON: Final = "3.12"
MACOS: Final = ".".join(map(str, LEAST_MACOS))
UNKNOWN: Final = ("cuda_toolkit", "packages", "tvm_ffi")
ASSUMES: Final = (
    f"Python {PYTHON}, on Linux glibc {GLIBC} (Ubuntu 22.04), on a Mac macOS {MACOS}, torch as its wheels are, and "
    "the least NVIDIA driver that runs its CUDA version"
)

_NAME: Final = r"(?P<accelerator>.+)-(?P<backend>[a-z]+[\d.]*)-torch(?P<torch>[1-9]\.(?:0|[1-9]\d?))"

_LEAST_TORCH: Final = (2, 6)

# The minor version that a finished major version ended with. Names that write 6.2.4 without dots read as 6.24.
_LAST: Final = {("cuda", 11): 8, ("cuda", 12): 9, ("rocm", 6): 4}

_TITLES: Final = {"cuda": "CUDA", "rocm": "ROCm"}

# Architecture -> the first CUDA or ROCm that compiles for it, and the first that no longer does.
_COMPILERS: Final[dict[str, tuple[tuple[int, int], tuple[int, int] | None]]] = {
    "7.0": ((9, 0), (13, 0)),
    "7.5": ((10, 0), None),
    "8.0": ((11, 0), None),
    "8.6": ((11, 1), None),
    "8.7": ((11, 4), None),
    "8.9": ((11, 8), None),
    "9.0": ((11, 8), None),
    "10.0": ((12, 8), None),
    "10.3": ((12, 9), None),
    "11.0": ((13, 0), None),
    "12.0": ((12, 8), None),
    "12.1": ((12, 9), None),
    "gfx950": ((6, 4), None),
}


class Accelerator(NamedTuple):
    """What torch computes on.

    Attributes:
        backends: kinds of backend that it can have.
        name: what it is called.
        arch: compute capability or gfx name; None where builds do not ask for one.
        cpu, os: of the machine that it is in.
    """

    backends: tuple[str, ...]
    name: str
    arch: str | None = None
    cpu: str = "x86_64"
    os: str = "linux"


def _nvidia(name: str, arch: str, cpu: str = "x86_64") -> Accelerator:
    return Accelerator(("cuda",), f"NVIDIA {name}", arch, cpu)


def _amd(name: str, arch: str) -> Accelerator:
    return Accelerator(("rocm",), f"AMD {name}", arch)


ACCELERATORS: Final = {
    "v100": _nvidia("V100", "7.0"),
    "t4": _nvidia("T4", "7.5"),
    "a100": _nvidia("A100", "8.0"),
    "a30": _nvidia("A30", "8.0"),
    "a10": _nvidia("A10", "8.6"),
    "a10g": _nvidia("A10G", "8.6"),
    "a40": _nvidia("A40", "8.6"),
    "rtx3090": _nvidia("GeForce RTX 3090", "8.6"),
    "rtxa6000": _nvidia("RTX A6000", "8.6"),
    "orin": _nvidia("Jetson Orin", "8.7", "aarch64"),
    "l4": _nvidia("L4", "8.9"),
    "l40": _nvidia("L40", "8.9"),
    "l40s": _nvidia("L40S", "8.9"),
    "rtx4090": _nvidia("GeForce RTX 4090", "8.9"),
    "rtx6000ada": _nvidia("RTX 6000 Ada Generation", "8.9"),
    "h100": _nvidia("H100", "9.0"),
    "h200": _nvidia("H200", "9.0"),
    "h800": _nvidia("H800", "9.0"),
    "h20": _nvidia("H20", "9.0"),
    "gh200": _nvidia("GH200", "9.0", "aarch64"),
    "b200": _nvidia("B200", "10.0"),
    "gb200": _nvidia("GB200", "10.0", "aarch64"),
    "b300": _nvidia("B300", "10.3"),
    "gb300": _nvidia("GB300", "10.3", "aarch64"),
    "thor": _nvidia("Jetson Thor", "11.0", "aarch64"),
    "rtx5090": _nvidia("GeForce RTX 5090", "12.0"),
    "rtxpro6000": _nvidia("RTX PRO 6000 Blackwell", "12.0"),
    "gb10": _nvidia("GB10", "12.1", "aarch64"),
    "mi210": _amd("Instinct MI210", "gfx90a"),
    "mi250": _amd("Instinct MI250", "gfx90a"),
    "mi250x": _amd("Instinct MI250X", "gfx90a"),
    "mi300a": _amd("Instinct MI300A", "gfx942"),
    "mi300x": _amd("Instinct MI300X", "gfx942"),
    "mi325x": _amd("Instinct MI325X", "gfx942"),
    "mi350x": _amd("Instinct MI350X", "gfx950"),
    "mi355x": _amd("Instinct MI355X", "gfx950"),
    "rx7900xtx": _amd("Radeon RX 7900 XTX", "gfx1100"),
    "rx9070xt": _amd("Radeon RX 9070 XT", "gfx1201"),
    "max1550": Accelerator(("xpu",), "Intel Data Center GPU Max 1550"),
    "b580": Accelerator(("xpu",), "Intel Arc B580"),
    "mac": Accelerator(("metal", "cpu"), "Apple silicon", None, "aarch64", "darwin"),
    "x86_64": Accelerator(("cpu",), "no accelerator"),
    "aarch64": Accelerator(("cpu",), "no accelerator", None, "aarch64"),
    "windows": Accelerator(("cpu",), "no accelerator", os="windows"),
}


def preset(name: str) -> Host:
    """The host of a name, without the `preset:` before it.

    Raises:
        HostError: the name is not of the form, names something unknown, or a combination that cannot be.
    """
    match = re.fullmatch(_NAME, name.lower(), re.ASCII)
    if match is None:
        raise _refusal(name, f"a preset is {FORM}")
    accelerator = ACCELERATORS.get(match["accelerator"])
    if accelerator is None:
        near = difflib.get_close_matches(match["accelerator"], ACCELERATORS)
        there = f"near it are {', '.join(near)}" if near else f"there are {', '.join(ACCELERATORS)}"
        raise _refusal(name, f"{match['accelerator']} is no accelerator that has a name here; {there}")
    torch = tuple(map(int, match["torch"].split(".")))
    if torch < _LEAST_TORCH:
        raise _refusal(name, f"torch {match['torch']} is older than any that is supported ({_dotted(_LEAST_TORCH)})")
    backend, version = _backend(name, match["backend"])
    if backend not in accelerator.backends:
        there = " or ".join(accelerator.backends)
        raise _refusal(name, f"{accelerator.name} computes on {there}, and {match['backend']} is for {backend}")
    if version is not None:
        _check_version(name, accelerator, backend, version)
    host = _host(accelerator, backend, version, torch)
    known = {field.name for field in fields(Host)} - host.unknown - {"unknown", "provenance"}
    return replace(host, provenance=dict.fromkeys(sorted(known), f"{PREFIX}{name}"))


def _backend(name: str, word: str) -> tuple[str, tuple[int, int] | None]:
    """Kind and version of a backend, as names of builds have them; a dot may stand between major and minor."""
    refusal = _refusal(name, f"{word!r} is no backend, such as cu130, rocm72, xpu20260, metal or cpu")
    try:
        read = Variant.parse(f"torch-stable-abi20-{word.replace('.', '')}-x86_64-linux")
    except VariantError as error:
        raise refusal from error
    if "." in word and (read.backend_version is None or not word.endswith(_dotted(read.backend_version))):
        raise refusal
    return read.backend, read.backend_version


def _check_version(name: str, accelerator: Accelerator, backend: str, version: tuple[int, int]) -> None:
    title = _TITLES.get(backend, backend)
    first, dropped = _COMPILERS.get(accelerator.arch or "", ((0, 0), None))
    if version < first:
        raise _refusal(name, f"{accelerator.name} needs {title} {_dotted(first)} or later")
    if dropped is not None and version >= dropped:
        raise _refusal(name, f"{title} {_dotted(dropped)} and later have nothing for {accelerator.name}")
    has_driver = backend != "cuda" or version[0] in LEAST_DRIVER["linux"]
    if not has_driver or version[1] > _LAST.get((backend, version[0]), version[1]):
        raise _refusal(name, f"{title} {_dotted(version)} is not known here")


def _host(accelerator: Accelerator, backend: str, version: tuple[int, int] | None, torch: tuple[int, ...]) -> Host:
    linux = accelerator.os == "linux"
    facts: dict[str, Any] = {backend: _dotted(version)} if version is not None else {}
    local = {"cuda": "+cu{0}{1}", "rocm": "+rocm{0}.{1}", "xpu": "+xpu", "cpu": "+cpu"}.get(backend, "")
    if accelerator.os == "darwin":
        local = ""  # its wheels say nothing of what they are for
    if backend == "cuda" and version is not None:
        facts["driver"] = LEAST_DRIVER["linux"][version[0]]
    if backend == "metal":
        facts["metal"] = True
    return Host(
        os=accelerator.os,
        cpu=accelerator.cpu,
        macos=MACOS if accelerator.os == "darwin" else None,
        glibc=GLIBC if linux else None,
        python=PYTHON,
        torch=f"{_dotted(torch)}.0{local.format(*(version or ()))}",
        cxx11_abi=_cxx11_abi(accelerator, backend, version, torch) if linux else None,
        devices=(HostDevice(accelerator.arch, accelerator.name),) if accelerator.arch is not None else (),
        unknown=frozenset(UNKNOWN),
        **facts,
    )


def _cxx11_abi(accelerator: Accelerator, backend: str, version: tuple[int, int] | None, torch: tuple[int, ...]) -> bool:
    is_new = torch >= (2, 7) or accelerator.cpu == "aarch64" or backend in ("rocm", "xpu")
    return is_new or (backend == "cuda" and version == (12, 6))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _refusal(name: str, detail: str) -> HostError:
    advice = (
        "`kernel-loader host --presets` lists them; a machine that has no name is described by `host --json` there."
    )
    return HostError(f"{PREFIX}{name}", detail, advice)
