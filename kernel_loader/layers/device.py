"""Devices of a mapping: a kind, and the range of capabilities that a kernel is for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kernel_loader.errors import RequestError

if TYPE_CHECKING:
    import torch

# Kind of device -> kind of backend that its builds are for (`host.BackendKind`).
BACKENDS: Final = {
    "cpu": "cpu",
    "cuda": "cuda",
    "rocm": "rocm",
    "mps": "metal",
    "xpu": "xpu",
    "npu": "cann",
    "neuron": "neuron",
    "tpu": "tpu",
}


@dataclass(frozen=True)
class CapabilityRange:
    """Capabilities of a device, both ends included, as one number: 90 for NVIDIA's 9.0, 94 for AMD's gfx94x.

    Raises:
        RequestError: the ends are no whole numbers, or the wrong way round.
    """

    min_capability: int = 0
    max_capability: int = sys.maxsize

    def __post_init__(self) -> None:
        ends = (self.min_capability, self.max_capability)
        if not all(type(end) is int and end >= 0 for end in ends) or ends[0] > ends[1]:
            detail = f"{type(self).__name__} from {ends[0]!r} to {ends[1]!r} is no range of capabilities"
            raise RequestError(detail, "Give whole numbers, the lower first, such as 80 and 90 for 8.0 to 9.0.")

    @property
    def ends(self) -> tuple[int, int]:
        """Both ends."""
        return self.min_capability, self.max_capability


class CUDAProperties(CapabilityRange):
    """Compute capabilities of NVIDIA GPUs, major * 10 + minor."""


class ROCMProperties(CapabilityRange):
    """Capabilities of AMD GPUs as torch tells them, major * 10 + minor of the gfx name."""


@dataclass(frozen=True)
class Device:
    """A kind of device in a mapping, all of it or a range of capabilities.

    Args:
        type: cpu, cuda, rocm, mps, xpu, npu, neuron or tpu.
        properties: the range; None for all.

    Raises:
        RequestError: there is no such kind, or the range is that of another.
    """

    type: str
    properties: CapabilityRange | None = None

    def __post_init__(self) -> None:
        given: tuple[object, object] = (self.type, self.properties)
        if not isinstance(given[1], CapabilityRange | None):
            raise RequestError(f"properties {given[1]!r} were given", "Pass CUDAProperties(80, 90), or leave them out.")
        if not isinstance(given[0], str) or self.type not in BACKENDS:
            raise RequestError(f"{self.type!r} is no kind of device", f"There are {', '.join(BACKENDS)}.")
        for owner, properties in (("cuda", CUDAProperties), ("rocm", ROCMProperties)):
            if isinstance(self.properties, properties) and self.type != owner:
                detail = f"{properties.__name__} were given for {self.type}"
                raise RequestError(detail, f"They are for {owner}; CapabilityRange is for any kind.")

    @property
    def ends(self) -> tuple[int, int]:
        """Both ends of the range."""
        return (self.properties or CapabilityRange()).ends


def kind_of(device: torch.device) -> str:
    """The kind of a torch device: AMD's GPUs are "cuda" to torch, and "rocm" here."""
    import torch

    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def capability_of(kind: str, index: int | None) -> int | None:
    """The capability of a device of this machine; None where the kind has none, or no such device is here."""
    import torch

    if kind not in ("cuda", "rocm") or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return major * 10 + minor
