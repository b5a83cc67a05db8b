"""The grammar of build names. `Variant.parse` and `str` are inverse.

::

    torch<M><m>[-cxx11|-cxx98]-<backend>-<cpu>-<os>     torch210-cxx11-cu128-x86_64-linux
    torch-stable-abi<M><m>-<backend>-<cpu>-<os>         torch-stable-abi211-cu128-x86_64-linux
    tvm-ffi<M><m>-<backend>-<cpu>-<os>                  tvm-ffi01-cu130-x86_64-linux
    torch-<name>                                        no compiled code: torch-universal, torch-cuda

Versions are written without a dot, so the number of digits of the major version is part of the grammar: one for torch,
the stable ABI, tvm-ffi, ROCm and CANN, two for CUDA, four (a year) for XPU. Neither of them has a leading zero;
otherwise two names would mean one build.
"""

from __future__ import annotations

import functools
import re
from typing import Final, Literal, NamedTuple, Self

from kernel_loader.errors import VariantError

Framework = Literal["torch-stable-abi", "torch", "tvm-ffi", "noarch"]

OSES: Final = ("linux", "darwin", "windows")
CPUS: Final = ("x86_64", "aarch64")
UNVERSIONED: Final = ("cpu", "metal", "neuron", "tpu")
NOARCH: Final = ("cpu", "cuda", "metal", "neuron", "rocm", "tpu", "xpu", "npu", "universal")

# The one name of a build for no backend in particular. Embedded, it is the reference of its kernel.
REFERENCE: Final = "torch-universal"

# backend kind -> (prefix in a name, digits of the major version)
_VERSIONED: Final = {"cuda": ("cu", 2), "rocm": ("rocm", 1), "xpu": ("xpu", 4), "cann": ("cann", 1)}
_KIND_OF_PREFIX: Final = {prefix: kind for kind, (prefix, _) in _VERSIONED.items()}

_MINOR: Final = r"(?:0|[1-9]\d{0,5})"
_FORM: Final = (
    rf"(?:(?P<stable>torch-stable-abi)(?P<stable_version>\d{_MINOR})"
    rf"|(?P<torch>torch)(?P<torch_version>\d{_MINOR})(?:-(?P<abi>cxx11|cxx98))?"
    rf"|(?P<tvm>tvm-ffi)(?P<tvm_version>\d{_MINOR}))"
    rf"-(?:(?P<unversioned>{'|'.join(UNVERSIONED)})"
    rf"|(?P<prefix>cu)(?P<cu>[1-9]\d{_MINOR})|(?P<prefix1>rocm|cann)(?P<one>\d{_MINOR})"
    rf"|(?P<prefix4>xpu)(?P<year>[1-9]\d{{3}}{_MINOR}))"
    rf"-(?P<cpu>{'|'.join(CPUS)})-(?P<os>{'|'.join(OSES)})"
)


@functools.cache
def _pattern() -> re.Pattern[str]:
    return re.compile(_FORM, re.ASCII)  # takes half a millisecond, and many kernels have no compiled builds


class Variant(NamedTuple):
    """What the name of a build says about it.

    Attributes:
        framework: what the compiled code links against; "noarch" for builds without compiled code.
        backend: kind of backend, as `host.Backend.kind`; for noarch also "npu" and "universal".
        framework_version: (major, minor); None for noarch.
        cxx11_abi: which C++ ABI the name carries; None where it carries none.
        backend_version: (major, minor) of CUDA, ROCm, XPU or CANN.
        cpu, os: of compiled builds.
    """

    framework: Framework
    backend: str
    framework_version: tuple[int, int] | None = None
    cxx11_abi: bool | None = None
    backend_version: tuple[int, int] | None = None
    cpu: str | None = None
    os: str | None = None

    @property
    def is_noarch(self) -> bool:
        """Whether the build has no compiled code."""
        return self.framework == "noarch"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a build name.

        Raises:
            VariantError: the name is not of the grammar, or a version in it cannot be read unambiguously.
        """
        if name.startswith("torch-") and (backend := name.removeprefix("torch-")) in NOARCH:
            return cls(framework="noarch", backend=backend)
        match = _pattern().fullmatch(name)
        if match is None:
            raise VariantError(name, _what_is_wrong(name))
        part = match.groupdict()
        framework: Framework = "torch-stable-abi" if part["stable"] else "torch" if part["torch"] else "tvm-ffi"
        digits = part["stable_version"] or part["torch_version"] or part["tvm_version"]
        prefix = part["prefix"] or part["prefix1"] or part["prefix4"]
        backend = part["unversioned"] or _KIND_OF_PREFIX[prefix]
        version = part["cu"] or part["one"] or part["year"]
        return cls(
            framework=framework,
            framework_version=(int(digits[0]), int(digits[1:])),
            cxx11_abi=None if part["abi"] is None else part["abi"] == "cxx11",
            backend=backend,
            backend_version=_split(version, _VERSIONED[backend][1]) if version else None,
            cpu=part["cpu"],
            os=part["os"],
        )

    def __str__(self) -> str:
        if self.framework_version is None:
            return f"torch-{self.backend}"
        framework = f"{self.framework}{self.framework_version[0]}{self.framework_version[1]}"
        if self.cxx11_abi is not None:
            framework += "-cxx11" if self.cxx11_abi else "-cxx98"
        backend = self.backend
        if self.backend_version is not None:
            backend = f"{_VERSIONED[backend][0]}{self.backend_version[0]}{self.backend_version[1]}"
        return f"{framework}-{backend}-{self.cpu}-{self.os}"


def is_variant(name: str) -> bool:
    """Whether a name is of the grammar."""
    try:
        Variant.parse(name)
    except VariantError:
        return False
    return True


def _split(digits: str, major_digits: int) -> tuple[int, int]:
    return int(digits[:major_digits]), int(digits[major_digits:])


def _what_is_wrong(name: str) -> str:
    parts = name.split("-")
    if parts[0] == "torch" and len(parts) == 2:
        return f"builds without compiled code are torch- and one of {', '.join(NOARCH)}"
    if parts[-1] not in OSES:
        return f"it does not end in an operating system ({', '.join(OSES)})"
    if len(parts) < 3 or parts[-2] not in CPUS:
        return f"it names no known CPU ({', '.join(CPUS)}) before the operating system"
    if not re.match(r"torch\d|torch-stable-abi\d|tvm-ffi\d", name):
        return "it does not begin with torch, torch-stable-abi or tvm-ffi and a version"
    return f"{parts[-3]!r} is no known backend, or a version in the name cannot be read unambiguously"
