"""Multi-scale deformable attention: each query reads a few points of several maps, and weighs them.

    out[b, q, m] = sum over l, p: attn_weight[b, q, m, l, p] * map[l](x * W[l] - 1/2, y * H[l] - 1/2)
                                  with (x, y) = sampling_loc[b, q, m, l, p]

map[l] has the height and width `spatial_shapes[l]` = (H, W) and D channels; its pixels, row by row, are
value[b, start : start + H * W, m] with start = level_start_index[l]. Pixel (i, j) lies at y = i, x = j; between pixels
the map is interpolated linearly along both sides, and outside it is zeros. All is computed in float32, or in float64
where value is. Numbers in `spatial_shapes` and `level_start_index` are not looked at: maps lie within value.

Source: Zhu et al., Deformable DETR (arXiv:2010.04159), equation 3. Names of parameters are those of
kernels-community/deformable-detr, version 1.

The reference build does all of this. So do the published builds (version 1) behind the guards of the manifest, with
these exceptions:

- They compute in the dtype of value. In half precision a point is then off by up to 2 ** -9 (bfloat16) or 2 ** -12
  (float16) of the side of a map, and gradients to value are summed in that dtype, in no fixed order.
- Functions refuse tensors of 2 ** 31 elements or more (ValueError). The layer reads elsewhere for those, ends the
  process for B or im2col_step of 0, and prints an error where there are no queries.
- Shapes that disagree are not noticed, and read elsewhere.
- They cannot be compiled to one graph.
- The layer refuses tensors that are not contiguous, the gradient to its output included, such as that of `sum()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DeformAttn", "DeformAttnBackward", "DeformableDETR", "Layers"]


class DeformAttn(Protocol):
    """`ms_deform_attn_forward`."""

    def __call__(
        self,
        value: torch.Tensor,
        spatial_shapes: torch.Tensor,
        level_start_index: torch.Tensor,
        sampling_loc: torch.Tensor,
        attn_weight: torch.Tensor,
        im2col_step: int,
    ) -> torch.Tensor:
        """Attend to L maps at P points of each, by the formula at the top of this module.

        Args:
            value: (B, S, M, D) float, the pixels of all maps for M heads.
            spatial_shapes: (L, 2) int64, the height and width of each map.
            level_start_index: (L,) int64, the row of value at which each map starts.
            sampling_loc: (B, Q, M, L, P, 2) of the dtype of value, x then y; the map lies between 0 and 1.
            attn_weight: (B, Q, M, L, P) of the dtype of value.
            im2col_step: how many batches go together, at least 1: B is a multiple of it, or less. Changes no result.

        Returns:
            (B, Q, M * D) in the dtype of value. No gradient is promised; the layer has one.

        Raises:
            TypeError: the dtype of an argument.
            ValueError: the shape or device of an argument, or `im2col_step`.
        """
        ...


class DeformAttnBackward(Protocol):
    """`ms_deform_attn_backward`."""

    def __call__(
        self,
        value: torch.Tensor,
        spatial_shapes: torch.Tensor,
        level_start_index: torch.Tensor,
        sampling_loc: torch.Tensor,
        attn_weight: torch.Tensor,
        grad_output: torch.Tensor,
        im2col_step: int,
    ) -> list[torch.Tensor]:
        """The gradients to `value`, `sampling_loc` and `attn_weight`, in this order.

        Args:
            value: (B, S, M, D), as the forward had it, like all arguments but one.
            spatial_shapes: (L, 2) int64.
            level_start_index: (L,) int64.
            sampling_loc: (B, Q, M, L, P, 2).
            attn_weight: (B, Q, M, L, P).
            grad_output: (B, Q, M * D) of the dtype of value, the gradient to what the forward returned.
            im2col_step: as the forward had it.

        Returns:
            Three tensors of the shapes and the dtype of those arguments. A point that lies on a row or column of pixels
            has the slope towards higher coordinates.

        Raises:
            TypeError: the dtype of an argument.
            ValueError: the shape or device of an argument, or `im2col_step`.
        """
        ...


class Layers(Protocol):
    """`layers`: a class whose `forward` is put into a module.

    Attributes:
        MultiScaleDeformableAttention: `forward(value, value_spatial_shapes, value_spatial_shapes_list,
            level_start_index, sampling_locations, attention_weights, im2col_step)` is `ms_deform_attn_forward` of these
            but the list, which holds the shapes of the maps once more and is not looked at. Differentiable in `value`,
            `sampling_locations` and `attention_weights`, once.
    """

    MultiScaleDeformableAttention: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class DeformableDETR:
    """The entrypoints of `deformable_detr`."""

    __kernel__: ClassVar = "deformable_detr"

    layers: Layers
    ms_deform_attn_forward: DeformAttn
    ms_deform_attn_backward: DeformAttnBackward
