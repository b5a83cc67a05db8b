"""RMS normalisation of the last dimension, and its gradients.

    rstd   = 1 / sqrt(mean(input ** 2) + eps)          over the last dimension, in float32
    output = weight * (input * rstd)                   the product in parentheses rounded to the dtype of input

Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467), with the roundings of the Llama
models. Names of parameters are those of kernels-community/rmsnorm, version 1.

The reference build does all of this, and computes float64 in float64. Code that must also run on published builds
(version 1) keeps to what those do: contiguous tensors, and a `weight` of the dtype of `input`. Those for CPUs do not
look at `output` and `rstd`. Published builds name `apply_rms_norm_forward`, which they lack; it is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Layers", "Norm", "NormBackward", "RMSNorm"]


class Norm(Protocol):
    """`apply_rms_norm`."""

    def __call__(
        self,
        input: torch.Tensor,  # noqa: A002 - the published name
        weight: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Normalise the last dimension, by the formula at the top of this module.

        Args:
            input: (..., H) float.
            weight: (H,) float.
            eps: what is added under the root.

        Returns:
            (..., H) in the dtype that `input` and `weight` promote to. No gradient is promised; the layer has one.
        """
        ...


class NormBackward(Protocol):
    """`apply_rms_norm_backward`."""

    def __call__(
        self,
        grad_output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - the published name
        weight: torch.Tensor,
        output: torch.Tensor,
        rstd: torch.Tensor,
        eps: float,
        input_requires_grad: bool = True,  # noqa: FBT001, FBT002 - the published signature
        weight_requires_grad: bool = True,  # noqa: FBT001, FBT002 - the published signature
    ) -> Sequence[torch.Tensor | None]:
        """The gradients to `input` and `weight`, None for one that is not asked for.

        Args:
            grad_output: (..., H), the gradient to what the forward returned.
            input: (..., H), as the forward had it.
            weight: (H,), as the forward had it.
            output: (..., H), as the forward returned it.
            rstd: (...) float32, that of the formula.
            eps: as the forward had it.
            input_requires_grad: whether the first gradient is wanted.
            weight_requires_grad: whether the second is.

        Returns:
            (..., H) in the dtype of `input` and (H,) in that of `weight`, as a tuple or a list; sums are in float32.
        """
        ...


class Layers(Protocol):
    """`layers`: a class whose `forward` is put into a module with `weight` (H,) and `variance_epsilon`.

    Attributes:
        RMSNorm: `forward(hidden_states)` is `apply_rms_norm` with those of the module, differentiable in
            `hidden_states` and `weight`.
    """

    RMSNorm: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """The entrypoints of `rmsnorm`."""

    __kernel__: ClassVar = "rmsnorm"

    layers: Layers
    apply_rms_norm: Norm
    apply_rms_norm_backward: NormBackward
