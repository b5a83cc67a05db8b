"""Checks of arguments that the ops share. They look at shapes, dtypes and devices only, so they also run on fakes."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from .weights import Weights

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

_INTEGERS: Final = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def check_float(name: str, x: Tensor) -> None:
    """TypeError unless `x` is something that can be quantised."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {x.dtype}")


def check_activations(A: Tensor, weights: Weights, *, ndim: int | None = None) -> None:
    """A is (..., K), or has exactly `ndim` dimensions, and lies where the weights are."""
    check_float("A", A)
    if A.ndim < 1 or (ndim is not None and A.ndim != ndim):
        raise ValueError(f"A: expected shape {'(..., K)' if ndim is None else '(S, K)'}, got {tuple(A.shape)}")
    if A.shape[-1] != weights.k:
        raise ValueError(f"A: expected last dimension K = {weights.k} to match B, got {tuple(A.shape)}")
    if A.device != weights.codes.device:
        raise ValueError(f"B: expected on {A.device}, where A is, got {weights.codes.device}")


def check_indices(name: str, index: Tensor, length: int, meaning: str) -> None:
    """`index` is a vector of `length` whole numbers."""
    if index.dtype not in _INTEGERS:
        raise TypeError(f"{name}: expected an integer dtype, got {index.dtype}")
    if tuple(index.shape) != (length,):
        raise ValueError(f"{name}: expected shape ({length},), {meaning}, got {tuple(index.shape)}")


def result_dtype(A: Tensor, output_dtype: torch.dtype | None) -> torch.dtype:
    """`output_dtype`, or that of A."""
    dtype = A.dtype if output_dtype is None else output_dtype
    if dtype not in FLOATS:
        raise TypeError(f"output_dtype: expected bfloat16, float16, float32 or None, got {dtype}")
    return dtype


def as_block_size(block_size: Sequence[int] | None) -> list[int] | None:
    """`block_size` as the op schema takes it; a bare number or a string would fail there without a name."""
    if block_size is None:
        return None
    if not isinstance(block_size, (list, tuple)) or not all(isinstance(size, int) for size in block_size):
        raise TypeError(f"block_size: expected None or a list of two ints, got {block_size!r}")
    return list(block_size)
