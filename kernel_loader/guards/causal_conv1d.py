"""Guards of `kernel_loader.bundles.causal_conv1d`: each is called with the function, and then as the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_loader.guards.memory import is_whole, whole

_Result = Tensor | tuple[Tensor, Tensor]

# Threads that take a sequence together, a vector of 16 bytes each, but of 8 elements at most.
_THREADS: Final = 128


def aligned_rows(
    function: Callable[..., _Result],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> _Result:
    """x, the states, and the gradients to what comes out may start anywhere and have any strides.

    Builds load 16 bytes at a time. What does not lie so that they can is copied: before the call, before backward, and
    `final_states_out` after the call. The gradient to y is copied too where x is channels-last and it is not. For
    `causal_conv1d_fn`.
    """
    is_last = _is_channels_last(x)
    into = final_states_out if return_final_states else None
    own = into if into is None else _aligned_states(into)
    states = initial_states if initial_states is None else _aligned_states(initial_states)
    given = _aligned(x, is_last=is_last)
    result = function(given, weight, bias, seq_idx, states, return_final_states, own, activation)
    if isinstance(result, Tensor):
        return _attached(result, is_last=is_last)
    y, final = result
    if into is not None and own is not into:
        final = into.copy_(final)
    return _attached(y, is_last=is_last), final


def whole_ends(
    function: Callable[..., _Result],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> _Result:
    """Gradients are right whatever L is. For `causal_conv1d_fn`.

    In backward with an activation, builds compute outputs again, 1024 positions at a time (512 of float32). Where the
    last stretch is shorter than a vector, they take zeros for what is before it. x then gets zeros behind it, a copy,
    and so many positions are cut off y.
    """
    elements = 4 if x.itemsize == 4 else 8
    over = x.shape[2] % (_THREADS * elements)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    is_short = 0 < over < elements and x.shape[2] > over
    if not (is_short and learns and activation is not None) or _is_channels_last(x):
        given = (seq_idx, initial_states, return_final_states, final_states_out)
        return function(x, weight, bias, *given, activation)
    y = function(pad(x, (0, elements - over)), weight, bias, activation=activation)
    assert isinstance(y, Tensor), "final states are of channels-last alone"
    return y[..., : x.shape[2]].contiguous()


def no_rows(function: Callable[..., _Result], x: Tensor, *rest: Any, **named: Any) -> _Result:
    """Of an x without an element, y is empty, and the function is not called, which would launch nothing and fail.

    The gradients are those of an empty sum. With final states, which need elements, the function is called.
    """
    final = named.get("return_final_states", rest[4] if len(rest) > 4 else False)
    if x.numel() or final is True:  # the fifth of a step is a tensor
        return function(x, *rest, **named)
    learned = [t for t in (*rest, *named.values()) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([x.clone(), *((0 * t).sum().to(x.dtype).expand_as(x) for t in learned)]).sum(0)


def _is_channels_last(x: Tensor) -> bool:
    """Whether builds take (B, D, L) for a transposed (B, L, D), whose vectors run along channels."""
    return x.stride(1) == 1 and x.stride(2) > 1


def _aligned(x: Tensor, *, is_last: bool) -> Tensor:
    """(B, D, L), or a copy of it where a vector would not be whole; transposed (B, L, D) if `is_last`."""
    if is_last:
        is_fit = x.stride(1) == 1 and is_whole(x, x.stride(0), x.stride(2))
        return x if is_fit else whole(x.transpose(1, 2)).transpose(1, 2)
    # Builds copy what has no stride of 1, and load rows by vectors only where these divide them.
    if x.stride(2) != 1 or x.shape[2] * x.itemsize % 16 or is_whole(x, x.stride(0), x.stride(1)):
        return x
    return whole(x)


def _aligned_states(states: Tensor) -> Tensor:
    """(B, D, W - 1), which builds want transposed and refuse otherwise; a copy where it is, and is not whole."""
    return _aligned(states, is_last=True) if states.stride(1) == 1 else states


def _attached(result: Tensor, *, is_last: bool) -> Tensor:
    if not result.requires_grad:
        return result
    attached: Tensor = _AlignedGradient.apply(result, is_last)  # type: ignore[no-untyped-call]
    return attached


class _AlignedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, is_last: bool) -> Tensor:  # noqa: FBT001 - of a row
        ctx.is_last = is_last
        return result.detach()  # a view would not let its user change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _aligned(grad, is_last=ctx.is_last), None
