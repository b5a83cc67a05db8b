"""Host: what a machine is, as far as it decides which builds run there. A frozen value, to and from JSON."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from kernel_loader.errors import HostError
from kernel_loader.reading import shown

SCHEMA: Final = 1

BackendKind = Literal["cpu", "cuda", "rocm", "xpu", "cann", "metal", "neuron", "tpu"]
BACKEND_KINDS: Final[tuple[BackendKind, ...]] = get_args(BackendKind)

# What different systems call the same instruction set.
_CPUS: Final = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}

# No release has numbers of more digits, and Python refuses to read very long ones.
_NUMBER: Final = r"\d{1,9}(?!\d)"
_RELEASE: Final = rf"({_NUMBER})\.({_NUMBER})"
_ARCH: Final = r"\d{1,3}\.\d{1,3}|gfx[0-9a-f]+"


@functools.lru_cache(maxsize=256)
def major_minor(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version: (2, 8) for "2.8.0a0+5228986c39.nv25.5", None for a text without them."""
    match = re.match(_RELEASE, version, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def normal_os(name: str) -> str:
    """The one spelling of an operating system."""
    return name.lower()


def normal_distribution(name: str) -> str:
    """The one spelling of a Python distribution's name (PEP 503).

    As `packaging.utils.canonicalize_name`, whose module takes longer to import than the rest of looking at a machine.
    """
    return "-".join(part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part)


def normal_cpu(name: str) -> str:
    """The one name of an instruction set; Windows and macOS have names of their own."""
    name = name.lower()
    return _CPUS.get(name, name)


class HostDevice(NamedTuple):
    """One accelerator that programs on the host can see.

    Attributes:
        arch: compute capability ("9.0") of an NVIDIA GPU, or the gfx name without feature flags ("gfx942") of an AMD
            GPU.
        name: what the driver calls it, or empty.
    """

    arch: str
    name: str = ""


class Backend(NamedTuple):
    """What torch on a host was built to compute on: a kind, and its (major, minor) version where it has one."""

    kind: BackendKind
    version: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.kind if self.version is None else f"{self.kind} {self.version[0]}.{self.version[1]}"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine and the Python environment on it.

    None means that a thing is known to be absent. A fact that could not be found out is named in `unknown` (its field
    then holds the value for absent), so that no rule mistakes silence for absence.

    Attributes:
        os: "linux", "darwin" or "windows"; other systems under their own lower-case name.
        cpu: "x86_64", "aarch64", or another machine name.
        macos: macOS release, such as "26.1".
        glibc: version of the GNU C library, such as "2.36"; None on musl and on other systems.
        python: version of the interpreter.
        free_threaded: the interpreter is a build without the GIL, which has no stable ABI before 3.15.
        torch: version of torch as it names itself, such as "2.13.0+cpu".
        cxx11_abi: torch uses the C++11 ABI of libstdc++.
        cuda: CUDA version that torch was built for ("13.0"); likewise rocm, xpu and cann.
        metal: torch computes on Apple GPUs; likewise neuron (AWS) and tpu (Google).
        driver: version of the NVIDIA kernel driver.
        cuda_toolkit: version of a CUDA toolkit whose nvcc is really there.
        devices: the visible accelerators.
        tvm_ffi: version of the apache-tvm-ffi package.
        packages: installed Python distributions, canonical name -> version.
        unknown: names of the fields above that could not be found out.
        provenance: field -> where its value came from. Takes no part in comparison.
    """

    os: str
    cpu: str
    macos: str | None = None
    glibc: str | None = None
    python: str | None = None
    free_threaded: bool = False
    torch: str | None = None
    cxx11_abi: bool | None = None
    cuda: str | None = None
    rocm: str | None = None
    xpu: str | None = None
    cann: str | None = None
    metal: bool = False
    neuron: bool = False
    tpu: bool = False
    driver: str | None = None
    cuda_toolkit: str | None = None
    devices: tuple[HostDevice, ...] = ()
    tvm_ffi: str | None = None
    packages: Mapping[str, str] = field(default_factory=dict, hash=False)
    unknown: frozenset[str] = frozenset()
    provenance: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def detect(cls, overrides: Mapping[str, str] | None = None) -> Host:
        """Ask this machine. Makes no CUDA context, imports nothing heavy, never raises for what it cannot find.

        Args:
            overrides: facts that replace what the probes find, as `Settings.overrides`.

        Raises:
            SettingsError: an override has an unknown name or an unreadable value.
        """
        from kernel_loader import probe

        return probe.detect(overrides or {})

    @functools.cached_property
    def backend(self) -> Backend:
        """What torch computes on. Where several are present, the first of tpu, neuron, cuda, rocm, metal, xpu, cann.

        An extension (TPU, Neuron) is loaded on top of a torch that may itself be a CUDA build, so it comes first.
        """
        if self.tpu:
            return Backend("tpu")
        if self.neuron:
            return Backend("neuron")
        if self.cuda is not None:
            return Backend("cuda", major_minor(self.cuda))
        if self.rocm is not None:
            return Backend("rocm", major_minor(self.rocm))
        if self.metal:
            return Backend("metal")
        if self.xpu is not None:
            return Backend("xpu", major_minor(self.xpu))
        if self.cann is not None:
            return Backend("cann", major_minor(self.cann))
        return Backend("cpu")

    @property
    def torch_is_release(self) -> bool:
        """Whether torch is a public release. Vendor and nightly builds count by their public version."""
        return (
            self.torch is None or re.fullmatch(r"\d+\.\d+\.\d+(\+(cpu|cu\d+|rocm[\d.]+|xpu))?", self.torch) is not None
        )

    def select(self, backend: str | None) -> Host:
        """This host as seen by a caller who asks for one backend: its own, or "cpu", which every host has.

        Raises:
            HostError: the host does not have that backend.
        """
        if backend is None or backend == self.backend.kind:
            return self
        if backend == "cpu":
            return replace(self, cuda=None, rocm=None, xpu=None, cann=None, metal=False, neuron=False, tpu=False)
        kinds = ", ".join(dict.fromkeys(("cpu", self.backend.kind)))
        detail = f"backend {backend!r} was asked for, and this host has {kinds}"
        raise HostError("backend", detail, "Leave the backend out to take the host's own, or name one that it has.")

    def to_json(self) -> str:
        """A JSON object with every known fact, that `from_json` reads back to an equal host."""
        # os and cpu stand in every description, even where they are not known.
        left_out = self.unknown - {"os", "cpu"}
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in left_out}
        facts["devices"] = [{"arch": d.arch, "name": d.name} for d in self.devices]
        facts["packages"] = dict(self.packages)
        facts["provenance"] = dict(self.provenance)
        facts["unknown"] = sorted(self.unknown)
        for name in left_out & {"devices", "packages"}:
            del facts[name]
        return json.dumps({"schema": SCHEMA} | facts, indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a description, complete (`to_json`) or by hand. Only `os` and `cpu` must be there.

        A fact that is left out is unknown, apart from the backends: a host has those that its description gives, unless
        `unknown`, a list of facts, names them.
        `devices` may be a list of architectures, such as `["9.0", "9.0"]`.

        Raises:
            HostError: not JSON, an unknown key, or a value of the wrong type.
        """
        try:
            data = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise HostError("whole text", f"not JSON ({error})") from error
        if not isinstance(data, dict):
            raise HostError("whole text", f"a JSON object was expected, not {type(data).__name__}")
        if data.pop("schema", SCHEMA) != SCHEMA:
            raise HostError(
                "schema", f"this version reads schema {SCHEMA}", "Describe the host again with this version."
            )
        return cls(**_read_facts(data))


# --- reading a description ----------------------------------------------------------------------------------------

_TEXT: Final = frozenset(
    {"macos", "glibc", "python", "torch", "cuda", "rocm", "xpu", "cann", "driver", "cuda_toolkit", "tvm_ffi"}
)
_MAJOR_ONLY: Final = frozenset({"python", "macos", "driver"})
_FLAG: Final = frozenset({"free_threaded", "metal", "neuron", "tpu"})
_BACKENDS: Final = frozenset({"cuda", "rocm", "xpu", "cann", "metal", "neuron", "tpu"})
_ALWAYS_KNOWN: Final = _BACKENDS | {"os", "cpu", "free_threaded", "unknown", "provenance"}


def _read_facts(data: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(Host)}
    for key in data:
        if key not in names:
            raise HostError(key, f"unknown fact; the facts are {', '.join(sorted(names))}")
    for key in ("os", "cpu"):
        if not isinstance(data.get(key), str):
            raise HostError(key, f"a text is needed, such as {'linux' if key == 'os' else 'x86_64'}")
    data = _inferred_backend(data) | data
    facts = {key: read_fact(key, value) for key, value in data.items() if key != "unknown"}
    facts["unknown"] = frozenset(names - data.keys() - _ALWAYS_KNOWN) | _read_unknown(data)
    return facts


def _inferred_backend(data: dict[str, Any]) -> dict[str, Any]:
    """The backend that torch's version tells ("2.11.0+cu130"), for a description that names none."""
    match = re.search(r"\+(?:cu(\d{2})(\d)|rocm(\d+\.\d+))", str(data.get("torch")), re.ASCII)
    if match is None or data.keys() & _BACKENDS or _BACKENDS & set(map(str, data.get("unknown") or ())):
        return {}
    return {"rocm": match[3]} if match[3] else {"cuda": f"{match[1]}.{match[2]}"}


def _read_unknown(data: dict[str, Any]) -> frozenset[str]:
    value = data.get("unknown", [])
    names = {f.name for f in fields(Host)} - {"unknown", "provenance"}
    if not isinstance(value, list) or not all(isinstance(name, str) and name in names for name in value):
        raise HostError("unknown", f"{shown(value)} is not a list of facts")
    for name in value:
        if name in data and name not in ("os", "cpu"):
            raise HostError(name, "it has a value, and is listed as unknown")
    return frozenset(value)


def read_fact(key: str, value: object) -> object:
    """A value of a description as the field holds it.

    Raises:
        HostError: the value is not of the fact's type.
    """
    if key == "devices":
        return _read_devices(value)
    if key in ("packages", "provenance"):
        return _read_texts(key, value)
    if key in _FLAG:
        expected, good = "true or false", isinstance(value, bool)
    elif key == "cxx11_abi":
        expected, good = "true, false or null", value is None or isinstance(value, bool)
    elif key in _TEXT:
        expected, good = "a version as text, or null", value is None or _is_version(key, value)
    else:
        expected, good = "a text", isinstance(value, str)
    if not good:
        raise HostError(key, f"{shown(value)} is not {expected}")
    if key in ("os", "cpu"):
        return (normal_os if key == "os" else normal_cpu)(str(value))
    return value


def _is_version(key: str, value: object) -> bool:
    if not isinstance(value, str):
        return False
    # A driver branch ("580") or a macOS ("26") is also written as one number.
    return major_minor(value) is not None or (key in _MAJOR_ONLY and re.fullmatch(_NUMBER, value, re.ASCII) is not None)


def _read_devices(value: object) -> tuple[HostDevice, ...]:
    if not isinstance(value, list):
        raise HostError("devices", f"a list was expected, not {type(value).__name__}")
    devices = []
    for index, item in enumerate(value):
        entry = {"arch": item.partition(":")[0]} if isinstance(item, str) else item  # gfx942:sramecc+:xnack-
        if not isinstance(entry, dict) or not is_arch(entry.get("arch")) or entry.keys() - {"arch", "name"}:
            raise HostError(
                f"devices[{index}]",
                f'{shown(item)} is not an architecture ("9.0", "gfx942"), nor a table of arch and name',
            )
        if not isinstance(entry.get("name", ""), str):
            raise HostError(f"devices[{index}].name", f"{shown(entry['name'])} is not a text")
        devices.append(HostDevice(**entry))
    return tuple(devices)


def is_arch(value: object) -> bool:
    """Whether a value is a compute capability ("9.0") or a gfx name ("gfx942")."""
    return isinstance(value, str) and re.fullmatch(_ARCH, value, re.ASCII) is not None


def _read_texts(key: str, value: object) -> Mapping[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise HostError(key, "an object of texts was expected")
    return dict(value)
