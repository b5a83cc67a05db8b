"""The function. Source: Nair and Hinton, Rectified Linear Units Improve Restricted Boltzmann Machines (ICML 2010)."""

import torch
from torch import Tensor


def relu(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Keep x where x > 0, and set the rest, NaN included, to 0; elementwise.

    Args:
        x: float tensor of any shape and strides.
        out: written to, of the shape, dtype and device of x. May be x itself.

    Returns:
        `out`, or a new tensor where there is none.

    Raises:
        TypeError: x is no float tensor, or the dtype of `out`.
        ValueError: the shape or device of `out`.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"x: expected a float dtype, got {x.dtype}")
    value = torch.where(x > 0, x, 0.0)
    if out is None:
        return value
    # copy_ alone would broadcast, cast and change devices in silence, which no compiled kernel does.
    if out.dtype != x.dtype:
        raise TypeError(f"out: expected {x.dtype}, which x has, got {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out: expected shape {tuple(x.shape)}, got {tuple(out.shape)}")
    if out.device != x.device:
        raise ValueError(f"out: expected on {x.device}, where x is, got {out.device}")
    return out.copy_(value)
