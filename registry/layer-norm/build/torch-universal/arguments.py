"""Checks of arguments. Numbers in the subsets are on the device, and not looked at."""

import torch
from torch import Tensor


def check(
    input: Tensor,  # noqa: A002 - the published name
    gamma: Tensor,
    beta: Tensor | None,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    z_subset: Tensor | None,
    dropout_p: float,
    epsilon: float,
) -> None:
    """All arguments agree with `input` (S, H) and with each other."""
    if not input.dtype.is_floating_point:
        raise TypeError(f"input: expected a float dtype, got {input.dtype}")
    if input.ndim != 2:
        raise ValueError(f"input: expected shape (S, H), got {tuple(input.shape)}")
    if gamma.dtype not in (input.dtype, torch.float32):
        raise TypeError(f"gamma: expected {input.dtype} or torch.float32, got {gamma.dtype}")
    if (x0_subset is None) != (z_subset is None):
        raise ValueError("z_subset: expected exactly where there is an x0_subset")
    (rows, columns), device = input.shape, input.device
    places = (rows,) if x0_subset is None else tuple(x0_subset.shape)[:1]
    _check_like(device, "gamma", gamma, (columns,), gamma.dtype)
    _check_like(device, "beta", beta, (columns,), gamma.dtype)
    _check_like(device, "colscale", colscale, (columns,), gamma.dtype)
    _check_like(device, "x0_subset", x0_subset, places, torch.int32)
    _check_like(device, "z_subset", z_subset, places, torch.int32)
    _check_like(device, "rowscale", rowscale, places, input.dtype)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a number of 0 or more, and below 1, got {dropout_p}")
    if not epsilon >= 0:
        raise ValueError(f"epsilon: expected a number of 0 or more, got {epsilon}")


def _check_like(
    device: torch.device, name: str, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if value is None:
        return
    if value.dtype != dtype:
        raise TypeError(f"{name}: expected {dtype}, got {value.dtype}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name}: expected on {device}, where input is, got {value.device}")
