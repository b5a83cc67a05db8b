"""Activation functions, alone and gating the other half of a row, as functions that write into `out` and as layers.

===================  ==============  ======================================================================
function             layer           of x (..., d), or of the halves a and b of x (..., 2 * d)
===================  ==============  ======================================================================
silu                 Silu            x * sigmoid(x)
gelu                 Gelu            x * Phi(x), Phi being the distribution function of the standard normal
gelu_tanh            GeluTanh        x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))
gelu_new, gelu_fast  NewGELU,        the same, give or take the roundings of half precision within
                     FastGELU
gelu_quick           QuickGELU       x * sigmoid(1.702 * x)
silu_and_mul         SiluAndMul      silu(a) * b
mul_and_silu         MulAndSilu      a * silu(b)
gelu_and_mul         GeluAndMul      gelu(a) * b
gelu_tanh_and_mul    GeluTanhAndMul  gelu_tanh(a) * b
fatrelu_and_mul      FatreluAndMul   a * b where a > threshold, else 0
===================  ==============  ======================================================================

Each activation is computed in float32 (float64 in float64) and rounded once to the dtype of x; a gate is rounded before
it is multiplied.

Sources: Hendrycks and Gimpel, Gaussian Error Linear Units (arXiv:1606.08415); Shazeer, GLU Variants Improve Transformer
(arXiv:2002.05202); Kurtz et al., Inducing and Exploiting Activation Sparsity (ICML 2020), for FATReLU. Names are those
of kernels-community/activation, version 1.

The reference build does all of this, for any strides, and its functions are differentiable too. Code that must also
run on published builds (version 1) keeps to what those do behind the guards of the manifest: contiguous x and `out`
for the functions, no float64, and no gradients, which functions say by raising in backward and layers do not
(`has_backward`); `kernelize` does not take these for training. Without an element layers end the process, or make the
next call of another kernel fail. Shapes and dtypes that disagree are not noticed there, and read or write elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Activation", "ActivationFunction", "GatedByThreshold", "Layers"]


class ActivationFunction(Protocol):
    """A function of the table at the top of this module."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Set `out` to the function of x.

        Args:
            out: (..., d), of the dtype and device of x. May be x itself where the shapes agree.
            x: (..., d) float, or (..., 2 * d) for functions that multiply.

        Returns:
            `out`.

        Raises:
            TypeError: the dtype of `out`.
            ValueError: the shape or device of `out`, or the shape of x.
        """
        ...


class GatedByThreshold(Protocol):
    """`fatrelu_and_mul`."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor, threshold: float = 0.0) -> torch.Tensor:
        """Set `out` to a * b where a > threshold, else 0, a and b being the halves of x; a that is NaN gives 0 * b.

        Args:
            out: (..., d), of the dtype and device of x.
            x: (..., 2 * d) float.
            threshold: not rounded to the dtype of x.

        Returns:
            `out`.

        Raises:
            TypeError: the dtype of `out`.
            ValueError: the shape or device of `out`, or the shape of x.
        """
        ...


class Layers(Protocol):
    """`layers`: classes whose `forward(x)` returns a new tensor, by the table at the top of this module.

    They have no state; `FatreluAndMul` takes `threshold` from the module which it is put into. x may have any strides.
    """

    Silu: type[nn.Module]
    Gelu: type[nn.Module]
    GeluTanh: type[nn.Module]
    NewGELU: type[nn.Module]
    FastGELU: type[nn.Module]
    QuickGELU: type[nn.Module]
    SiluAndMul: type[nn.Module]
    MulAndSilu: type[nn.Module]
    GeluAndMul: type[nn.Module]
    GeluTanhAndMul: type[nn.Module]
    FatreluAndMul: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """The entrypoints of `activation`."""

    __kernel__: ClassVar = "activation"

    layers: Layers
    silu_and_mul: ActivationFunction
    mul_and_silu: ActivationFunction
    gelu_and_mul: ActivationFunction
    gelu_tanh_and_mul: ActivationFunction
    fatrelu_and_mul: GatedByThreshold
    gelu_fast: ActivationFunction
    gelu_new: ActivationFunction
    gelu_quick: ActivationFunction
    gelu_tanh: ActivationFunction
    silu: ActivationFunction
    gelu: ActivationFunction
