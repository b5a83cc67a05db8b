"""Checks of arguments: shapes, dtypes and devices, also while a graph is made. `check_rows` looks at numbers, too."""

from typing import Final

import torch
from torch import Tensor

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS: Final = (torch.int32, torch.int64)

_ACTIVATIONS: Final = (None, "silu", "swish")


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
        raise ValueError(f"{name}: expected on {x.device}, where x is, got {value.device}")


def check_rows(name: str, index: Tensor, rows: int) -> None:
    """`index` names some of so many rows. Looked at where that makes nothing wait: on the CPU, and not in a graph."""
    if index.device.type != "cpu" or torch.compiler.is_compiling() or not index.numel():
        return
    if not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise ValueError(f"{name}: expected rows of {rows}, got {index.tolist()}")


def check_filter(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> int:
    """The filter has a row for each channel of x (B, D, ...). Returns its width."""
    check_float("weight", weight, "(D, W)")
    channels, width = x.shape[1], weight.shape[1]
    if width < 1:
        raise ValueError(f"weight: expected at least one column, got {tuple(weight.shape)}")
    check_like("weight", weight, x, (channels, width))
    if bias is not None:
        check_like("bias", bias, x, (channels,))
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation: expected None, 'silu' or 'swish', got {activation!r}")
    return width
