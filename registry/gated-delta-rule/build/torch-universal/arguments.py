"""Checks of arguments. They look at shapes, dtypes and devices only, so that they also run while a graph is made."""

from typing import Final

import torch
from torch import Tensor

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS: Final = (torch.int32, torch.int64)


def check_float(name: str, x: Tensor, shape: str) -> None:
    """`x` is a float tensor with as many dimensions as `shape` names."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected bfloat16, float16, float32 or float64, got {x.dtype}")
    if x.ndim != shape.count(",") + 1:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")


def check_like(
    name: str, value: Tensor, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS
) -> None:
    """`value` has this shape and one of these dtypes, and lies where `x` does."""
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected {' or '.join(str(dtype) for dtype in dtypes)}, got {value.dtype}")
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.device != x.device:
        raise ValueError(f"{name}: expected on {x.device}, got {value.device}")


def check_heads(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    """Queries and keys (B, T, H, K) and values (B, T, HV, V) agree, and are of one row where they are packed."""
    check_float("q", q, "(B, T, H, K)")
    check_float("v", v, "(B, T, HV, V)")
    batch, length, heads, width = q.shape
    check_like("k", k, q, (batch, length, heads, width), (q.dtype,))
    check_like("v", v, q, (batch, length, *v.shape[2:]), (q.dtype,))
    if not heads or v.shape[2] % heads:
        raise ValueError(f"v: expected a multiple of H = {heads} heads, got {tuple(v.shape)}")
    if cu_seqlens is None:
        return
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f"cu_seqlens: expected shape (N + 1,), got {tuple(cu_seqlens.shape)}")
    check_like("cu_seqlens", cu_seqlens, q, tuple(cu_seqlens.shape), INTEGERS)
    if batch != 1:
        raise ValueError(f"q: expected one row, as there are cu_seqlens, got {tuple(q.shape)}")


def check_gates(v: Tensor, sizes: dict[str, int | None], **gates: Tensor | None) -> None:
    """Gates have one number for each head of v, (B, T, HV), or as many as `sizes` says, (B, T, HV, size)."""
    for name, value in gates.items():
        if value is not None:
            size = sizes.get(name)
            check_like(name, value, v, tuple(v.shape[:3]) if size is None else (*v.shape[:3], size))
