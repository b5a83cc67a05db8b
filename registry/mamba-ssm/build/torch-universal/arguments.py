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


def check_groups(name: str, groups: int, members: int) -> None:
    """The groups of `name` share the heads or channels evenly."""
    if not groups or members % groups:
        raise ValueError(f"{name}: expected a number of groups that divides {members}, got {groups}")


def widen(x: Tensor) -> Tensor:
    """The tensor as it is computed with: in float32, or in float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()
