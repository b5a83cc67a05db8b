"""ReLU: x where x > 0, else 0.

Source: Nair and Hinton, Rectified Linear Units Improve Restricted Boltzmann Machines (ICML 2010). Names of parameters
are those of kernels-community/relu, version 1.

The reference build does all of this, is differentiable, and can be compiled. Code that must also run on published
builds (version 1) keeps to what those do behind the guards of the manifest: float32 tensors (float16 too on Metal) with
at least one dimension, and neither gradients, which the function says by raising in backward, nor torch.compile with
one graph. Builds for ARM keep NaN. No guard stands before the layer: there, what is not contiguous may be read and
written in the wrong places, and builds for x86 CPUs end the process where memory does not start at a multiple of 16
bytes, as that of a view may not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Layers", "ReLU", "Rectify"]


class Rectify(Protocol):
    """`relu`."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Keep x where x > 0, and set the rest, NaN included, to 0; elementwise.

        Args:
            x: float tensor of any shape and strides.
            out: written to, of the shape, dtype and device of x. May be x itself.

        Returns:
            `out`, or a new tensor where there is none.

        Raises:
            TypeError: x is no float tensor, or the dtype of `out`.
            ValueError: the shape or device of `out`.
        """
        ...


class Layers(Protocol):
    """`layers`: a class whose `forward` is put into a module.

    Attributes:
        ReLU: `forward(x)` is `relu(x)`.
    """

    ReLU: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class ReLU:
    """The entrypoints of `relu`."""

    __kernel__: ClassVar = "relu"

    relu: Rectify
    layers: Layers
