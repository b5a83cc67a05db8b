"""The guard of functions that have no gradient, and do not say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def refuse_gradient(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Backward through what comes out raises NotImplementedError, instead of leaving a gradient out.

    What comes out is a tensor, `out` among the arguments included, or a list of tensors and None. Ops without a
    derivative give a result that needs no gradient, or whose gradient is lost with a warning.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    with torch.no_grad():
        result = function(*args, **kwargs)
    needing = [value for value in given if value.requires_grad and value is not result]
    if isinstance(result, Tensor):
        return _attached(result, needing, written=any(value is result for value in given))
    return [value if value is None else _attached(value, needing, written=False) for value in result]


def _attached(result: Tensor, needing: list[Tensor], *, written: bool) -> Tensor:
    if not (result.is_floating_point() and (needing or result.requires_grad)):
        return result
    attached: Tensor = _Refused.apply(result, written, *needing)  # type: ignore[no-untyped-call]
    return attached


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, written: bool, *needing: Tensor) -> Tensor:  # noqa: FBT001 - of a row
        ctx.like = [(list(value.shape), value.dtype) for value in needing]
        if not written:
            return result.detach()  # a view would not let its user change it in place
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        before = _refuse(grad, list(grad.shape), grad.dtype) if ctx.needs_input_grad[0] else None
        return before, None, *(_refuse(grad, shape, dtype) for shape, dtype in ctx.like)


# An op, since what raises could not be compiled.
@torch.library.custom_op(
    "kernel_loader_guards::refuse_gradient",
    mutates_args=(),
    schema="(Tensor grad, SymInt[] shape, ScalarType dtype) -> Tensor",
)
def _refuse(grad: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    raise NotImplementedError(
        "this build of the kernel has no gradient. Call it under torch.no_grad(), or take the reference, "
        "which has one, by KERNEL_LOADER_DISABLE=<name of the kernel>."
    )


@_refuse.register_fake
def _(grad: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return grad.new_empty(shape, dtype=dtype)
