"""Checks of arguments: shapes, dtypes and devices. What shapes of maps say is on the device, and not looked at."""

import torch
from torch import Tensor


def check(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """All arguments of the forward agree with each other."""
    if not value.dtype.is_floating_point:
        raise TypeError(f"value: expected a float dtype, got {value.dtype}")
    if value.ndim != 4:
        raise ValueError(f"value: expected shape (B, S, M, D), got {tuple(value.shape)}")
    batch, _, heads, _ = value.shape
    if spatial_shapes.ndim != 2 or spatial_shapes.shape[1] != 2:
        raise ValueError(f"spatial_shapes: expected shape (L, 2), got {tuple(spatial_shapes.shape)}")
    levels = spatial_shapes.shape[0]
    if sampling_loc.ndim != 6:
        raise ValueError(f"sampling_loc: expected shape (B, Q, M, L, P, 2), got {tuple(sampling_loc.shape)}")
    queries, points = sampling_loc.shape[1], sampling_loc.shape[4]
    _check_like(value, "spatial_shapes", spatial_shapes, (levels, 2), torch.int64)
    _check_like(value, "level_start_index", level_start_index, (levels,), torch.int64)
    _check_like(value, "sampling_loc", sampling_loc, (batch, queries, heads, levels, points, 2), value.dtype)
    _check_like(value, "attn_weight", attn_weight, (batch, queries, heads, levels, points), value.dtype)
    if im2col_step < 1 or batch % min(batch or 1, im2col_step):
        raise ValueError(f"im2col_step: expected at least 1, and to divide B = {batch} or pass it, got {im2col_step}")


def check_gradient(value: Tensor, sampling_loc: Tensor, grad_output: Tensor) -> None:
    """The gradient is one to the output of the forward."""
    shape = (value.shape[0], sampling_loc.shape[1], value.shape[2] * value.shape[3])
    _check_like(value, "grad_output", grad_output, shape, value.dtype)


def _check_like(value: Tensor, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != value.device:
        raise ValueError(f"{name}: expected on {value.device}, where value is, got {tensor.device}")
