"""The gradient that the three products share."""

from typing import Any

import torch
from torch import Tensor

from ._ops import ops, qualified
from .weights import read_weights


def register_gradient(name: str, frozen: int) -> None:
    """Make op `name` differentiable in A, straight through the quantiser, and in nothing else.

    The op takes A, then `frozen` tensors, B and Bs first, then block_size, then whatever has no gradient. Op
    `{name}_backward` takes the upstream gradient, the same tensors, block_size and the dtype of A.
    """
    backward = getattr(ops, f"{name}_backward").default

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401, ARG001 - torch's
        ctx.save_for_backward(*inputs[1 : 1 + frozen])
        ctx.dtype, ctx.block_size, ctx.count = inputs[0].dtype, inputs[1 + frozen], len(inputs)

    def to_activations(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
        rest = (None,) * (ctx.count - 1)
        if not ctx.needs_input_grad[0]:  # a weight that asks for a gradient does not get one
            return None, *rest
        return backward(grad, *ctx.saved_tensors, ctx.block_size, ctx.dtype), *rest

    torch.library.register_fake(qualified(f"{name}_backward"), _empty_gradient)
    torch.library.register_autograd(qualified(name), to_activations, setup_context=setup_context)


def _empty_gradient(grad: Tensor, B: Tensor, Bs: Tensor, *rest: Any) -> Tensor:  # noqa: ANN401 - as the op has them
    block_size, dtype = rest[-2:]
    k = read_weights(B, Bs, block_size, experts=B.ndim == 3).k
    return grad.new_empty((*grad.shape[:-1], k), dtype=dtype)
