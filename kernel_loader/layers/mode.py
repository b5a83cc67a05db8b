"""What a model is used for, and when its own forward may stay."""

from __future__ import annotations

from enum import Flag, auto
from typing import Final

from kernel_loader.errors import RequestError


class Mode(Flag):
    """What layers are kernelized for, and what a kernel of a mapping is for.

    Attributes:
        INFERENCE: no gradients are needed.
        TRAINING: the backward pass must work.
        TORCH_COMPILE: added to one of these: the layer is inside torch.compile.
        FALLBACK: in mappings alone: for every mode that no other entry is for.
    """

    FALLBACK = auto()
    TRAINING = auto()
    INFERENCE = auto()
    TORCH_COMPILE = auto()

    def __or__(self, other: Mode) -> Mode:
        union = super().__or__(other)
        if Mode.INFERENCE in union and Mode.TRAINING in union:
            raise RequestError("Mode.INFERENCE and Mode.TRAINING exclude each other", "Kernelize again to switch.")
        if Mode.FALLBACK in union and union is not Mode.FALLBACK:
            raise RequestError("Mode.FALLBACK cannot be combined", "Give it an entry of its own in the mapping.")
        return union

    def __str__(self) -> str:
        return " | ".join(mode.name or "" for mode in Mode if mode in self)

    @property
    def tried(self) -> tuple[Mode, ...]:
        """The modes of a mapping that serve this one, best first.

        A kernel for training serves inference, and one for torch.compile serves eager mode, never the other way.

        Raises:
            RequestError: layers are not kernelized for this mode.
        """
        compiled = Mode.TORCH_COMPILE in self
        if self & ~Mode.TORCH_COMPILE is Mode.INFERENCE:
            own = [
                Mode.INFERENCE,
                Mode.INFERENCE | Mode.TORCH_COMPILE,
                Mode.TRAINING,
                Mode.TRAINING | Mode.TORCH_COMPILE,
            ]
        elif self & ~Mode.TORCH_COMPILE is Mode.TRAINING:
            own = [Mode.TRAINING, Mode.TRAINING | Mode.TORCH_COMPILE]
        else:
            detail = f"mode {str(self) or 'nothing'} was given, and layers are kernelized for INFERENCE or TRAINING"
            raise RequestError(
                detail, "Pass Mode.INFERENCE or Mode.TRAINING, with | Mode.TORCH_COMPILE where it is used."
            )
        return (*(mode for mode in own if Mode.TORCH_COMPILE in mode or not compiled), Mode.FALLBACK)


# What an entry of a mapping may be for.
USABLE: Final = (
    Mode.INFERENCE,
    Mode.TRAINING,
    Mode.INFERENCE | Mode.TORCH_COMPILE,
    Mode.TRAINING | Mode.TORCH_COMPILE,
    Mode.FALLBACK,
)


class KernelizeFallback(Flag):
    """Where a layer may keep its own forward.

    Attributes:
        NO_LAYER: no mapping has its name.
        NO_DEVICE: the mapping has nothing for its kind of device.
        NO_COMPATIBLE_PROPERTIES: nothing for the capability of its device.
        NO_COMPATIBLE_MODE: nothing for the mode, or the kernel itself does not support it.
        CANNOT_LOAD: the kernel could not be loaded, whatever the reason, or does not fit the layer.
        DEFAULT: all but the last.
        ALL: in every case.
    """

    NONE = 0
    NO_LAYER = auto()
    NO_DEVICE = auto()
    NO_COMPATIBLE_PROPERTIES = auto()
    NO_COMPATIBLE_MODE = auto()
    CANNOT_LOAD = auto()
    DEFAULT = NO_LAYER | NO_DEVICE | NO_COMPATIBLE_PROPERTIES | NO_COMPATIBLE_MODE
    ALL = DEFAULT | CANNOT_LOAD
