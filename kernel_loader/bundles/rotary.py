"""Rotary position embedding: pairs of numbers turned by an angle that grows with the position.

Computed in float32 (float64 in float64) and rounded once. The two of a pair lie half a head apart, not side by side.

Source: Su et al., RoFormer (arXiv:2104.09864), 3.4. Names of parameters are those of kernels-community/rotary, version
2.

The reference build does all of this. Published builds (version 2) do so behind the guards of the manifest for cos and
sin whose halves are alike, but compute float64 in float32. Their op has no derivative: `apply_rotary_transformers` has
its gradient by a guard. The layer gives q and k the gradient to what comes out, not turned back, so that `kernelize`
does not take it for training; it wants cos and sin of the dtype of q and k. On CPUs with AVX-512 neither
`apply_rotary` nor the layer takes bfloat16 with cos and sin that are broadcast along the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["ApplyRotary", "ApplyRotaryTransformers", "Layers", "Rotary"]


class ApplyRotary(Protocol):
    """`apply_rotary`."""

    def __call__(
        self,
        x1: torch.Tensor,
        x2: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        out1: torch.Tensor,
        out2: torch.Tensor,
        conj: bool,  # noqa: FBT001 - the published signature
    ) -> None:
        """Set (out1, out2) = (x1 * cos - x2 * sin, x1 * sin + x2 * cos), with -sin for sin if `conj`.

        Args:
            x1: (..., d) float, any strides: the first of each pair.
            x2: the second of each pair, as x1.
            cos: broadcasts to the shape of x1.
            sin: as cos.
            out1: written to, of the shape and dtype of x1. May be x1 itself.
            out2: written to, as out1. May be x2 itself.
            conj: whether pairs are turned the other way, which undoes a turn.

        Raises:
            TypeError: the dtype of x2 or an output.
            ValueError: shapes that do not agree.
        """
        ...


class ApplyRotaryTransformers(Protocol):
    """`apply_rotary_transformers`, with the parameters of a model library's own function."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn queries and keys: x * cos + (-second half of x, first half of x) * sin.

        Args:
            q: (..., D) float with D even, such as (batch, heads, sequence, D).
            k: as q; the number of heads may differ.
            cos: (batch, sequence, D), or D / 2 where the two halves are the same; batch may be 1.
            sin: as cos.
            unsqueeze_dim: where the dimension of the heads is: 1, or 2 for (batch, sequence, heads, D).

        Returns:
            q and k turned, new tensors of their shapes and dtypes. Differentiable in q and k.

        Raises:
            ValueError: D is odd, or the last dimension of cos or sin is neither D nor D / 2.
        """
        ...


class Layers(Protocol):
    """`layers`: a class whose `forward` takes the place of a model's own function.

    Attributes:
        apply_rotary_transformers: `forward` is the function of this name.
    """

    apply_rotary_transformers: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """The entrypoints of `rotary`."""

    __kernel__: ClassVar = "rotary"

    layers: Layers
    apply_rotary: ApplyRotary
    apply_rotary_transformers: ApplyRotaryTransformers
