"""Guards of any function on tensors: each is called with the function, and then as the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_loader.guards.memory import is_whole, whole


def current_device(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The device of the first CUDA tensor is the current one during the call. Triton launches on the current device."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_cuda:
            with torch.cuda.device(value.device):
                return function(*args, **kwargs)
    return function(*args, **kwargs)


def contiguous(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Tensors reach the function contiguous. Those that are not are copied at each call, weights included."""
    return function(*map(_contiguous, args), **{name: _contiguous(value) for name, value in kwargs.items()})


def aligned_memory(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Tensors may start anywhere in memory: those that do not at a multiple of 16 bytes are copied at each call.

    So are all inside torch.compile. For functions that load 16 bytes at a time, and have what is contiguous.
    """
    return function(*map(_aligned, args), **{name: _aligned(value) for name, value in kwargs.items()})


def no_elements(function: Callable[..., Tensor], out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`out`, the first argument, is returned as it is where it has no element; the function is not called.

    Builds divide by sizes, which ends the process, or launch nothing, which fails in whatever is launched next.
    """
    return function(out, *args, **kwargs) if out.numel() else out


def nothing_written(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """A function that returns nothing is not called where there is nothing to write.

    That is where its first argument, or an int64 tensor, such as the slots to be written, has no element. Builds launch
    nothing then, which fails in whatever is launched next.
    """
    given = (*args, *kwargs.values())
    places = [value for value in given if isinstance(value, Tensor) and value.dtype == torch.int64]
    first = [given[0]] if isinstance(given[0], Tensor) else []
    if all(value.numel() for value in (*first, *places)):
        function(*args, **kwargs)


def zero_tail(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Rows of a grouped product at or past offsets[-1] are zeros. `offsets`, the fourth argument: (E,) int32 or int64.

    Rows are written in place. One vector is made, of a number for each.
    """
    result = function(*args, **kwargs)
    offsets = args[3] if len(args) > 3 else kwargs["offsets"]
    rows = torch.arange(result.shape[0], device=result.device)
    return result.masked_fill_((rows >= offsets[-1:]).unsqueeze(1), 0)


def zero_sentinels(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Rows of a batched product whose id is E or more are zeros, E experts being the first dimension of `B`.

    `B` is the second argument, `expert_ids` the fourth: (S,) int32 or int64. For functions that leave such rows
    unwritten, and read nothing for them. Rows are written in place.
    """
    result = function(*args, **kwargs)
    experts = (args[1] if len(args) > 1 else kwargs["B"]).shape[0]
    ids = args[3] if len(args) > 3 else kwargs["expert_ids"]
    return result.masked_fill_((ids >= experts).unsqueeze(1), 0)


def zero_negative_groups(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Rows of a product that is written into `d`, the third argument, are zeros where their group is negative.

    The groups of rows are `grouped_layout`, the fourth: (M,) integers. Rows are written in place.
    """
    result = function(*args, **kwargs)
    written = args[2] if len(args) > 2 else kwargs["d"]
    groups = args[3] if len(args) > 3 else kwargs["grouped_layout"]
    written.masked_fill_((groups < 0).unsqueeze(1), 0)
    return result


def empty(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A product `A @ B.T` without rows, columns, experts or terms is zeros of its shape; the function is not called.

    `A` is the first argument, (..., K), `B` the second, (..., N, K). The dtype is the one among the arguments, or that
    of `A`. Besides failing, functions that measure how to run would measure nothing, and keep what they found.
    """
    a, b = args[0] if args else kwargs["A"], args[1] if len(args) > 1 else kwargs["B"]
    if a.numel() and b.numel():
        return function(*args, **kwargs)
    given = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), a.dtype)
    zeros: Tensor = a.new_zeros((*a.shape[:-1], b.shape[-2]), dtype=given)
    return zeros


def no_gradient(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What comes out is not differentiable, and says so, instead of failing in backward."""
    with torch.no_grad():
        return function(*args, **kwargs)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _aligned(value: Any) -> Any:
    return whole(value) if isinstance(value, Tensor) and not is_whole(value) else value
