"""Which kernel a layer takes: name -> kind of device and capability -> mode -> repository. Immutable values.

What is registered holds for the whole process; what `use_kernel_mapping` adds, inside its block and for its own thread
and tasks. Beneath both lies the mapping that ships, manifests/layers.toml, and what a project adds to it.
"""

from __future__ import annotations

import functools
import threading
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from kernel_loader.errors import KernelLoaderError, ManifestError, RequestError
from kernel_loader.layers.device import CapabilityRange, CUDAProperties, Device, ROCMProperties
from kernel_loader.layers.mode import USABLE, KernelizeFallback, Mode
from kernel_loader.layers.repository import LayerRepository, Repository
from kernel_loader.reading import Node
from kernel_loader.resources import data_directory

# What users write: a layer's name -> a device -> a repository, or one for each mode.
Given = Mapping[str, Mapping[Device | str, Repository | Mapping[Mode, Repository]]]

_Ends = tuple[int, int]
_Layers = Mapping[str, Mapping[str, Mapping[_Ends, Mapping[Mode, Repository]]]]


class Found(NamedTuple):
    """The repository for a layer, and the mode that it is registered for."""

    repository: Repository
    mode: Mode


class Missing(NamedTuple):
    """Why a mapping has nothing for a layer."""

    code: str
    message: str
    allowed_by: KernelizeFallback


class KernelMapping(NamedTuple):
    """A mapping; `extended` gives another."""

    layers: _Layers = MappingProxyType({})

    def extended(self, given: Given) -> KernelMapping:
        """This mapping with entries added. One for the same layer, kind of device and range replaces what was there.

        Raises:
            RequestError: something in `given` is no device, mode or repository.
        """
        layers = {name: dict(devices) for name, devices in self.layers.items()}
        for name, devices in _table(given, "a mapping is a table of layers").items():
            for key, entry in _table(devices, f"the mapping of {name} is a table of devices").items():
                device = key if isinstance(key, Device) else Device(key)
                ranges = dict(layers.setdefault(name, {}).get(device.type, {}))
                ranges[device.ends] = _modes(name, entry)
                layers[name][device.type] = MappingProxyType(ranges)
        return KernelMapping(MappingProxyType({name: MappingProxyType(devices) for name, devices in layers.items()}))

    def select(self, name: str, kind: str, capability: int | None, mode: Mode) -> Found | Missing:
        """The repository for a layer on a device: the smallest range that holds, then the modes in their order."""
        devices = self.layers.get(name)
        if devices is None:
            return Missing("no-layer", f"no mapping has the name {name}", KernelizeFallback.NO_LAYER)
        ranges = devices.get(kind)
        if ranges is None:
            there = ", ".join(devices)
            message = f"the mapping of {name} has nothing for {kind}; it has {there}"
            return Missing("no-device", message, KernelizeFallback.NO_DEVICE)
        holding = [ends for ends in ranges if _holds(ends, capability)]
        if not holding:
            there = ", ".join(f"{low} to {high}" for low, high in ranges)
            message = f"the mapping of {name} is for {kind} of capability {there}, and the device has {capability}"
            return Missing("no-properties", message, KernelizeFallback.NO_COMPATIBLE_PROPERTIES)
        modes = ranges[min(holding, key=lambda ends: (ends[1] - ends[0], ends))]
        for tried in mode.tried:
            if tried in modes:
                return Found(modes[tried], tried)
        there = ", ".join(map(str, modes)) or "no mode at all"
        message = f"the mapping of {name} on {kind} is for {there}, not for {mode}"
        return Missing("no-mode", message, KernelizeFallback.NO_COMPATIBLE_MODE)


def _holds(ends: _Ends, capability: int | None) -> bool:
    # A device that tells no capability takes what is for all.
    return ends == CapabilityRange().ends if capability is None else ends[0] <= capability <= ends[1]


def _table(given: object, what: str) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(f"{what}, and {given!r} was given", 'It is {"RMSNorm": {"cuda": LayerRepository(...)}}.')
    return given


def _modes(name: str, entry: Repository | Mapping[Mode, Repository]) -> Mapping[Mode, Repository]:
    modes = dict(entry) if isinstance(entry, Mapping) else {Mode.FALLBACK: entry}
    given: dict[Any, Any] = {**modes}
    for mode, repository in given.items():
        # An entry for TORCH_COMPILE alone would never be tried.
        if mode not in USABLE or not callable(getattr(repository, "load", None)):
            detail = f"the mapping of {name} has {mode!r}: {repository!r}"
            raise RequestError(detail, "It is a LayerRepository, or a table of Mode -> LayerRepository.")
    return MappingProxyType(modes)


# --- what is in force ---------------------------------------------------------------------------------------------

_INSIDE: Final[ContextVar[KernelMapping | None]] = ContextVar("kernel_mapping", default=None)


class Registered:
    """The mapping of the process: replaced whole, never changed."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._mapping: KernelMapping | None = None

    def get(self) -> KernelMapping:
        """The mapping; what ships with the package until something was registered."""
        return self._mapping if self._mapping is not None else shipped_mapping()

    def add(self, given: Given, *, inherit: bool) -> None:
        """Extend or replace it."""
        with self._lock:
            self._mapping = (self.get() if inherit else KernelMapping()).extended(given)


REGISTERED: Final = Registered()


def current_mapping() -> KernelMapping:
    """The mapping that `kernelize` goes by, here and now."""
    inside = _INSIDE.get()
    return inside if inside is not None else REGISTERED.get()


def register_kernel_mapping(mapping: Given, *, inherit_mapping: bool = True) -> None:
    """Add kernels for layers, for the whole process; inside `use_kernel_mapping`, until its block ends.

    Args:
        mapping: name of a layer -> device ("cuda", or a `Device` with a range) -> a repository, or one for each mode.
            An entry replaces that of the same name, kind of device and range.
        inherit_mapping: False drops all that was registered, and what ships with the package.

    Raises:
        RequestError: something in it is no device, mode or repository.
    """
    inside = _INSIDE.get()
    if inside is None:
        REGISTERED.add(mapping, inherit=inherit_mapping)
    else:
        _INSIDE.set((inside if inherit_mapping else KernelMapping()).extended(mapping))


def use_kernel_mapping(mapping: Given, *, inherit_mapping: bool = True) -> AbstractContextManager[None]:
    """As `register_kernel_mapping`, inside a `with` block. Other threads and tasks do not see it."""
    KernelMapping().extended(mapping)  # so that a mistake is raised where it was made
    return _inside(mapping, inherit=inherit_mapping)


@contextmanager
def _inside(mapping: Given, *, inherit: bool) -> Iterator[None]:
    token = _INSIDE.set((current_mapping() if inherit else KernelMapping()).extended(mapping))
    try:
        yield
    finally:
        _INSIDE.reset(token)


# --- what ships, and what a project adds ----------------------------------------------------------------------------

_MODES: Final = {
    "inference": Mode.INFERENCE,
    "training": Mode.TRAINING,
    "inference-compile": Mode.INFERENCE | Mode.TORCH_COMPILE,
    "training-compile": Mode.TRAINING | Mode.TORCH_COMPILE,
    "fallback": Mode.FALLBACK,
}


@functools.cache
def shipped_mapping() -> KernelMapping:
    """manifests/layers.toml, and `[tool.kernel-loader.layers]` of a pyproject.toml in the working directory.

    Read when it is first used.

    Raises:
        ManifestError: one of them cannot be read.
    """
    shipped = data_directory("manifests") / "layers.toml"
    mapping = KernelMapping().extended(
        read_layers(tomllib.loads(shipped.read_text(encoding="utf-8")), str(shipped), trusted=True)
    )
    project = Path("pyproject.toml")
    if not project.is_file():
        return mapping
    try:
        tool = tomllib.loads(project.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(str(project.absolute()), "", f"it cannot be read ({error})") from error
    own = tool.get("kernel-loader", {}) if isinstance(tool, dict) else {}
    if not isinstance(own, dict):
        raise ManifestError(str(project.absolute()), "tool.kernel-loader", "a table was expected")
    layers = own.get("layers", {})
    return mapping.extended(read_layers(layers, str(project.absolute()), trusted=False))


def read_layers(table: object, file: str, *, trusted: bool) -> Given:
    """A mapping that is written in TOML: `[<layer>.<device>]`, mode = { repo or kernel, version or revision, layer }.

    A device is a kind ("cuda") or a kind and a range of capabilities ("cuda 80..90").

    Raises:
        ManifestError: an unknown key, a missing one, or a value of the wrong form.
    """
    root = Node(table, lambda path, detail: ManifestError(file, path, detail))
    return {
        name: {_device(key, modes): _read_modes(modes, trusted=trusted) for key, modes in devices.table().items()}
        for name, devices in root.table().items()
    }


def _device(key: str, node: Node) -> Device:
    kind, _, ends = key.partition(" ")
    low, dots, high = ends.partition("..")
    properties = {"cuda": CUDAProperties, "rocm": ROCMProperties}.get(kind, CapabilityRange)
    if ends and not (dots and low.isdecimal() and high.isdecimal()):
        node.error(f"{key!r} is not a device, such as cuda, or cuda 80..90")
    try:
        return Device(kind, properties(int(low), int(high)) if ends else None)
    except KernelLoaderError as error:
        node.error(str(error))


def _read_modes(node: Node, *, trusted: bool) -> dict[Mode, Repository]:
    modes: dict[Mode, Repository] = {}
    for key, value in node.table().items():
        if key not in _MODES:
            value.error(f"unknown mode; there are {', '.join(_MODES)}")
        modes[_MODES[key]] = _repository(value, trusted=trusted)
    return modes


def _repository(node: Node, *, trusted: bool) -> LayerRepository:
    table = node.table()
    if table.keys() - {"repo", "kernel", "version", "revision", "layer"} or "layer" not in table:
        node.error("an entry has a layer, a repo with its version or revision, or the name of a kernel")
    if ("repo" in table) == ("kernel" in table):
        node.error("an entry has a repo or a kernel")
    source = table["repo"] if "repo" in table else table["kernel"]
    try:
        return LayerRepository(
            source.text(),
            layer_name=table["layer"].text(),
            version=table["version"].integer() if "version" in table else None,
            revision=table["revision"].text() if "revision" in table else None,
            trust_remote_code=trusted,
        )
    except RequestError as error:
        node.error(str(error))
