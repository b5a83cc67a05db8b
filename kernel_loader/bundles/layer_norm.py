"""Layer and RMS normalisation of rows, with scales, dropout and subsets of rows.

    x  = colscale * dropout(rowscale * input)
    mu = mean(x)
    z  = gamma * (x - mu) * rsigma + beta    with rsigma = 1 / sqrt(mean((x - mu) ** 2) + epsilon)
    z  = gamma * x * rsigma + beta           with rsigma = 1 / sqrt(mean(x ** 2) + epsilon), the RMS norm

All is computed in float32; z and x are rounded once, at the end.

Sources: Ba, Kiros and Hinton, Layer Normalization (arXiv:1607.06450); Zhang and Sennrich, Root Mean Square Layer
Normalization (arXiv:1910.07467). Names of parameters are those of kernels-community/layer-norm, version 1.

The reference build does all of this; it is differentiable, can be compiled, and computes float64 in float64. So do the
published builds (version 1) behind the guards of the manifest, with these exceptions:

- They have no gradient, which the function says by raising in backward and the layers do not (`has_backward`), so that
  `kernelize` does not take these for training. They cannot be compiled to one graph.
- H is a multiple of 8, and at most 8192.
- The layers want at least two dimensions, in memory so that they can be viewed as rows, and memory, that of `weight`
  included, that starts at a multiple of 16 bytes: elsewhere they fail, and no CUDA call works afterwards.

The repository has three functions more, `dropout_add_ln_bwd`, `dropout_add_ln_parallel_residual_fwd` and
`dropout_add_ln_parallel_residual_bwd`. Each hands its op fewer arguments than that takes, and so always raises; they
are not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DropoutAddNorm", "LayerNorms", "Layers"]


class DropoutAddNorm(Protocol):
    """`dropout_add_ln_fwd`."""

    def __call__(
        self,
        input: torch.Tensor,  # noqa: A002 - the published name
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        rowscale: torch.Tensor | None,
        colscale: torch.Tensor | None,
        x0_subset: torch.Tensor | None,
        z_subset: torch.Tensor | None,
        dropout_p: float,
        epsilon: float,
        rowscale_const: float,
        z_numrows: int,
        gen: torch.Generator | None,
        residual_in_fp32: bool,  # noqa: FBT001 - the published signature
        is_rms_norm: bool,  # noqa: FBT001 - the published signature
    ) -> list[torch.Tensor | None]:
        """Normalise rows, by the formula at the top of this module.

        Args:
            input: (S, H) float.
            gamma: (H,) of the dtype of `input`, or float32.
            beta: (H,) of the dtype of `gamma`, or None for zeros.
            rowscale: (R,) of the dtype of `input`, or None for ones. Not looked at where there are subsets.
            colscale: (H,) of the dtype of `gamma`, or None for ones.
            x0_subset: (R,) int32, which row of `input` each row is, counted from 1; 0 for a row of zeros. None for all
                rows as they are, so that R = S.
            z_subset: (R,) int32, which row of z each row becomes, counted from 1; 0 for none. No two become the same.
                Goes with `x0_subset`.
            dropout_p: share of the elements of `input` that are set to zero, below 1; the others are divided by 1 - p.
            epsilon: at least 0.
            rowscale_const: in the place of `rowscale` for all rows where there are subsets.
            z_numrows: rows of z where there are subsets; not looked at otherwise.
            gen: where random numbers come from, of the device of `input`; None for torch's own.
            residual_in_fp32: whether x comes out in float32.
            is_rms_norm: whether the mean is left in.

        Returns:
            z: (R, H) in the dtype of `input`, or (z_numrows, H) where there are subsets; rows that no row becomes hold
                anything.
            x: (R, H) in the dtype of `input`, or float32; None where it is `input` itself: without scales, subsets and
                dropout, and with the dtype of `input`.
            mask: (S, H) uint8, 1 for elements that were kept, and unset in rows of which no row is made; None without
                dropout.
            mu: (R,) float32, the mean for either norm.
            rsigma: (R,) float32.

        Raises:
            TypeError: the dtype of an argument.
            ValueError: the shape or device of an argument, a number out of range, or one subset without the other.
        """
        ...


class Layers(Protocol):
    """`layers`: classes whose `forward(hidden_states)` is put into a module with `weight` (H,) and `variance_epsilon`.

    Each takes (..., H) and returns the same shape and dtype, normalised over the last dimension by the formula at the
    top of this module, with `weight` for gamma. `weight` has the dtype of the input, or is float32.

    Attributes:
        LayerNorm: the layer norm. There is no beta: a bias that the module has is not added.
        LlamaRMSNorm: the RMS norm. Unlike in the Llama models, what `weight` multiplies is not rounded first.
    """

    LayerNorm: type[nn.Module]
    LlamaRMSNorm: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The entrypoints of `layer_norm`."""

    __kernel__: ClassVar = "layer_norm"

    layers: Layers
    dropout_add_ln_fwd: DropoutAddNorm
