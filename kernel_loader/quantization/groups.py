"""Runs of elements along the last dimension that share a scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def split_groups(name: str, x: Tensor, size: int) -> Tensor:
    """(..., K) -> (..., ceil(K / size), size); the last group is filled up with zeros.

    Raises:
        ValueError: no dimension, or a size below one.
    """
    if size < 1:
        raise ValueError(f"group_size: expected a positive number, got {size}")
    if x.ndim < 1:
        raise ValueError(f"{name}: expected shape (..., K), got ()")
    count = -(-x.shape[-1] // size)
    return functional.pad(x, (0, count * size - x.shape[-1])).reshape(*x.shape[:-1], count, size)


def join_groups(groups: Tensor, length: int) -> Tensor:
    """(..., groups, size) -> (..., length), contiguous: the inverse of `split_groups`."""
    return groups.flatten(-2)[..., :length].contiguous()


def largest(groups: Tensor, dim: int | tuple[int, ...] = -1) -> Tensor:
    """The largest magnitude along `dim`, which stays as size 1; NaN where there is one, zero of nothing."""
    if groups.numel() == 0:
        return groups.sum(dim=dim, keepdim=True)
    return groups.abs().amax(dim=dim, keepdim=True)


def expect_pairs(name: str, x: Tensor) -> None:
    """ValueError unless two elements can share a byte along the last dimension."""
    if x.ndim < 1 or x.shape[-1] % 2:
        raise ValueError(f"{name}: expected an even last dimension, got shape {tuple(x.shape)}")


def expect_scales(scales: Tensor, codes: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """ValueError unless the scales have this shape and lie where the codes do."""
    if tuple(scales.shape) != shape:
        raise ValueError(f"scales: expected shape {shape} ({meaning}), got {tuple(scales.shape)}")
    if scales.device != codes.device:
        raise ValueError(f"scales: expected on {codes.device}, where the codes are, got {scales.device}")


def divide(x: Tensor, scale: Tensor) -> Tensor:
    """The quotient; zero with the sign of x where the scale is zero."""
    return x / scale.masked_fill(scale == 0, torch.inf)
