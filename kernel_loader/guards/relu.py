"""The guard of `kernel_loader.bundles.relu`: it is called with the function, and then as the function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_loader.guards.memory import is_whole, whole


def aligned(function: Callable[..., Tensor], x: Tensor, out: Tensor | None = None) -> Tensor:
    """`x` and `out` may have any strides, start anywhere in memory, and have no element.

    What is not contiguous, or on a CPU does not start at a multiple of 16 bytes, is copied at each call: x before it,
    and `out` after it.
    """
    if not x.numel():
        return torch.empty_like(x) if out is None else out
    x = x.contiguous()
    if not _fits(x):
        x = whole(x)
    if out is None or _fits(out):
        return function(x, out)
    out.copy_(function(x, torch.empty_like(out, memory_format=torch.contiguous_format)))
    return out


def _fits(x: Tensor) -> bool:
    # Builds for x86 CPUs load and store by instructions that fail elsewhere than at a multiple of 16 bytes.
    return x.is_contiguous() and (x.device.type != "cpu" or is_whole(x))
