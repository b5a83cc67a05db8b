"""Random machines, and random sets of builds such as a repository for many machines holds them.

A host has a driver, a C library and a device that fit, so that only what a build's name says decides.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from kernel_loader.host import Host, HostDevice
from kernel_loader.variant import NOARCH, UNVERSIONED, Framework, Variant

VERSIONS = {
    "cuda": ("11.8", "12.1", "12.4", "12.6", "12.8", "12.9", "12.10", "13.0", "13.1", "13.2", "13.10"),
    "rocm": ("6.2", "6.3", "6.4", "7.0", "7.1", "7.2", "7.10", "7.14"),
    "xpu": ("2025.0", "2025.1", "2025.2", "2025.3", "2025.10"),
    "cann": ("8.0", "8.1", "8.2", "8.5", "8.10", "9.0"),
}
TORCH = tuple((2, minor) for minor in range(5, 14))
TVM_FFI = ((0, 1), (0, 2), (0, 10))

# backend -> (share of the hosts, systems that have it)
_SHARES = {
    "cuda": (45, ("linux", "linux", "linux", "windows")),
    "rocm": (13, ("linux",)),
    "xpu": (8, ("linux", "windows")),
    "cann": (6, ("linux",)),
    "metal": (9, ("darwin",)),
    "cpu": (11, ("linux", "darwin", "windows")),
    "neuron": (4, ("linux",)),
    "tpu": (4, ("linux",)),
}
_FRAMEWORKS: tuple[Framework, ...] = ("torch", "torch-stable-abi", "tvm-ffi", "noarch")
_DEVICE = {"cuda": "9.0", "rocm": "gfx942"}
_TORCH_SUFFIXES = ("", "", "", "+local", "a0+5228986c39.nv25.5", ".dev20260110+nightly")


def random_host(rng: random.Random) -> Host:
    """A machine with a torch (one in 25 has none), a backend at some version, and what fits both."""
    torch = None if rng.random() < 0.04 else rng.choice(TORCH)
    kinds = list(_SHARES)
    # What torch was built for is the backend, so that without torch there is only the CPU.
    kind = rng.choices(kinds, [_SHARES[k][0] for k in kinds])[0] if torch else "cpu"
    version = rng.choice(VERSIONS[kind]) if kind in VERSIONS else None
    os = rng.choice(_SHARES[kind][1])
    free_threaded = rng.random() < 0.08
    tvm_ffi = rng.choice(TVM_FFI) if rng.random() < 0.6 else None
    return Host(
        os="freebsd" if kind == "cpu" and rng.random() < 0.05 else os,
        cpu="riscv64" if os == "linux" and rng.random() < 0.02 else rng.choice(("x86_64", "x86_64", "aarch64")),
        macos=rng.choice(("15.5", "15.7.1", "26.0", "26.1")) if os == "darwin" else None,
        glibc="2.39" if os == "linux" else None,
        python=rng.choice(("3.13", "3.14", "3.15")) if free_threaded else rng.choice(("3.11", "3.12", "3.13", "3.14")),
        free_threaded=free_threaded,
        torch=_torch_version(rng, torch) if torch else None,
        cxx11_abi=_cxx11_abi(rng, torch) if torch and os == "linux" else None,
        cuda=version if kind == "cuda" else None,
        rocm=version if kind == "rocm" else None,
        xpu=version if kind == "xpu" else None,
        cann=version if kind == "cann" else None,
        metal=kind == "metal",
        neuron=kind == "neuron",
        tpu=kind == "tpu",
        driver="590.44.01" if kind == "cuda" else None,
        devices=(HostDevice(arch=_DEVICE[kind]),) if kind in _DEVICE else (),
        tvm_ffi=f"{tvm_ffi[0]}.{tvm_ffi[1]}.{rng.randrange(8)}" if tvm_ffi else None,
    )


def random_builds(rng: random.Random, host: Host, count: int) -> list[str]:
    """Up to `count` names, in random order, made for versions near those of a host, so that several of them fit."""
    names = {_spoilt(rng, name) if rng.random() < 0.08 else name for name in (_name(rng, host) for _ in range(count))}
    ordered = sorted(names)
    rng.shuffle(ordered)
    return ordered


def _torch_version(rng: random.Random, release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}.{rng.randrange(2)}{rng.choice(_TORCH_SUFFIXES)}"


def _cxx11_abi(rng: random.Random, release: tuple[int, int]) -> bool:
    # The wheels of torch changed to the C++11 ABI with 2.7; builds by others had either before.
    return release >= (2, 7) or rng.random() < 0.5


def _name(rng: random.Random, host: Host) -> str:
    backend = host.backend.kind if rng.random() < 0.8 else rng.choice((*VERSIONS, *UNVERSIONED))
    framework: Framework = rng.choices(_FRAMEWORKS, (45, 20, 17, 18))[0]
    if framework == "noarch":
        own = {"cann": "npu"}.get(backend, backend)
        return str(Variant(framework="noarch", backend=rng.choice((own, own, "universal", rng.choice(NOARCH)))))
    at_home = rng.random() < 0.88
    name = Variant(
        framework=framework,
        framework_version=_framework_version(rng, framework, host),
        cxx11_abi=rng.choice((None, True, True, False)) if framework == "torch" and host.os != "darwin" else None,
        backend=backend,
        backend_version=_near(rng, _releases(VERSIONS[backend]), host.backend.version) if backend in VERSIONS else None,
        cpu=host.cpu if at_home else rng.choice(("x86_64", "aarch64")),
        os=host.os if at_home else rng.choice(("linux", "darwin", "windows")),
    )
    return str(name)


def _framework_version(rng: random.Random, framework: str, host: Host) -> tuple[int, int]:
    if framework == "tvm-ffi":
        return _near(rng, TVM_FFI, _release(host.tvm_ffi))
    return _near(rng, TORCH, _release(host.torch))


def _near(rng: random.Random, versions: Sequence[tuple[int, int]], there: tuple[int, int] | None) -> tuple[int, int]:
    """A version at most two places away from the host's, and more often than not the host's own."""
    if there not in versions:
        return rng.choice(versions)
    index = versions.index(there) + rng.choice((0, 0, 0, -1, 1, -2, 2))
    return versions[min(max(index, 0), len(versions) - 1)]


def _releases(versions: Sequence[str]) -> list[tuple[int, int]]:
    return [release for version in versions if (release := _release(version))]


def _release(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def _spoilt(rng: random.Random, name: str) -> str:
    """A name as somebody might get it wrong."""
    return rng.choice(
        (
            re.sub(r"^(torch|torch-stable-abi|tvm-ffi)(\d)(\d+)", r"\1\g<2>0\3", name),  # torch2010
            re.sub(r"-(cu|rocm|xpu|cann)(\d)", r"-\g<1>0\2", name),  # cu0128
            name.upper(),
            name.rpartition("-")[0],
            f"{name}-debug",
            name.replace("x86_64", "amd64"),
            name.replace("-cxx11", "").replace("-", "-cxx11-", 1),
            re.sub(r"-cu(\d\d)\d+", r"-cu\1", name),
            name.replace("torch2", "torch"),
        )
    )
