"""The attention and its gradients: a few points of each map, read between pixels, and their weighted sum.

    out[b, q, m] = sum over l, p: attn_weight[b, q, m, l, p] * map[l](x * W[l] - 1/2, y * H[l] - 1/2)
                                  with (x, y) = sampling_loc[b, q, m, l, p]

map[l] (H[l], W[l], D), those of `spatial_shapes`, are rows level_start_index[l] onwards of value[b, :, m]. Between
pixels it is interpolated linearly along both sides; outside there are zeros. All in float32, or in float64 where value
is. Source: Zhu et al., Deformable DETR (arXiv:2010.04159), equation 3.
"""

from itertools import product

import torch
from torch import Tensor

from .arguments import check, check_gradient


def ms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    im2col_step: int,
) -> Tensor:
    """Attend to L maps at P points of each.

    Args:
        value: (B, S, M, D) float: the pixels of all maps, by heads.
        spatial_shapes: (L, 2) int64, the height and width of each map.
        level_start_index: (L,) int64, the row at which each map starts.
        sampling_loc: (B, Q, M, L, P, 2) of the dtype of value, x then y, within a map between 0 and 1.
        attn_weight: (B, Q, M, L, P) of the dtype of value.
        im2col_step: batches that go together: at least 1, and B is a multiple of it or less than it. Changes nothing.

    Returns:
        (B, Q, M * D) in the dtype of value.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device or `im2col_step`.
    """
    check(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, im2col_step)
    batch, _, heads, depth = value.shape
    queries = sampling_loc.shape[1]
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    pixels = value.to(wide).transpose(1, 2)  # (B, M, S, D)
    height, width = (spatial_shapes[:, side, None].to(wide) for side in (0, 1))
    x, y = sampling_loc.to(wide).transpose(1, 2).unbind(-1)  # (B, M, Q, L, P) each
    x, y = x * width - 0.5, y * height - 0.5
    left, top = x.detach().floor(), y.detach().floor()
    across, down = x - left, y - top  # within a square of four pixels
    weights = attn_weight.to(wide).transpose(1, 2)
    out = pixels.new_zeros(batch, heads, queries, depth)
    for right, below in product((0, 1), repeat=2):
        column, row = left + right, top + below
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        share = (across if right else 1 - across) * (down if below else 1 - down) * weights
        place = level_start_index[:, None] + row.long() * spatial_shapes[:, 1, None] + column.long()
        place = torch.where(inside, place, 0).flatten(2).unsqueeze(-1).expand(-1, -1, -1, depth)
        found = _rows(pixels, place).view(*inside.shape, depth)
        # Both factors are masked: neither a pixel nor a weight that does not count may bring in its NaN.
        share, found = torch.where(inside, share, 0.0), torch.where(inside.unsqueeze(-1), found, 0.0)
        out = out + (share.unsqueeze(-1) * found).sum((3, 4))  # no product of matrices, which autocast would round
    return out.transpose(1, 2).reshape(batch, queries, heads * depth).to(value.dtype)


def ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
    im2col_step: int,
) -> list[Tensor]:
    """The gradients to `value`, `sampling_loc` and `attn_weight`, in a list.

    Args:
        value: as the forward had it, like all that follow but one.
        spatial_shapes: as above.
        level_start_index: as above.
        sampling_loc: as above.
        attn_weight: as above.
        grad_output: (B, Q, M * D) of the dtype of value, the gradient to what the forward returned.
        im2col_step: as the forward had it.

    Returns:
        Three tensors of the shapes and dtype of those arguments; sums are in float32, or in float64 where value is.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device or `im2col_step`.
    """
    check(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, im2col_step)
    check_gradient(value, sampling_loc, grad_output)

    def forward(value: Tensor, sampling_loc: Tensor, attn_weight: Tensor) -> Tensor:
        return ms_deform_attn_forward(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, im2col_step)

    _, pull, *_ = torch.func.vjp(forward, value, sampling_loc, attn_weight)
    return list(pull(grad_output))


def _rows(pixels: Tensor, place: Tensor) -> Tensor:
    """The rows of (B, M, S, D) at (B, M, N, D), equal along D; zeros where there is no row at all."""
    return pixels.gather(2, place) if pixels.shape[2] else pixels.new_zeros(place.shape)
