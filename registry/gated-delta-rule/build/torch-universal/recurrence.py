"""The delta rule, as an op with a gradient: one step after the other.

    S = exp(decay of rows) * S * exp(decay of columns)
    d = beta * (v - S.T @ k)                what the state should say of the key, less what it says
    S = S + k @ d.T
    o = S.T @ q

A backward goes over each stretch of steps once more, from the state before it, so that never more than these have their
states in memory.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ._ops import ops, qualified

# Steps of a stretch.
_STRETCH: Final = 64

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor row_decay, Tensor column_decay, Tensor beta, Tensor? initial,"
    " Tensor? cu_seqlens"
)


class _Step(NamedTuple):
    """One step, with decays as factors.

    q, k: (b, h, K, 1). v: (b, h, 1, V). row_decay: (b, h, K or 1, 1). column_decay, beta: (b, h, 1, V or 1).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    row_decay: Tensor
    column_decay: Tensor
    beta: Tensor

    def decayed(self, state: Tensor) -> Tensor:
        """What is left of the state before."""
        return state * self.row_decay * self.column_decay

    def missing(self, decayed: Tensor) -> Tensor:
        """What the state lacks at the key (b, h, 1, V)."""
        return self.v - (decayed * self.k).sum(2, keepdim=True)

    def after(self, state: Tensor) -> Tensor:
        """The state after the step."""
        decayed = self.decayed(state)
        return decayed + self.k * (self.beta * self.missing(decayed))


class _Rule(NamedTuple):
    """The arguments, all in the dtype that is computed in.

    q, k: (b, t, h, K), q scaled. v: (b, t, h, V). row_decay: (b, t, h, K or 1), logarithms. column_decay, beta:
    (b, t, h, V or 1). initial: (N, h, K, V), zeros if None; N is b without cu_seqlens (N + 1,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    row_decay: Tensor
    column_decay: Tensor
    beta: Tensor
    initial: Tensor | None
    cu_seqlens: Tensor | None

    def states_shape(self) -> tuple[int, ...]:
        """(N, h, K, V)."""
        count = self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        return (count, self.q.shape[2], self.q.shape[3], self.v.shape[3])

    def sequences(self) -> Iterator[tuple[slice, range]]:
        """The rows of the states, and the positions, of what has one length."""
        length = self.q.shape[1]
        if self.cu_seqlens is None:
            yield slice(None), range(length)
            return
        bounds = self.cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != length or any(end < start for start, end in pairwise(bounds)):
            raise ValueError(f"cu_seqlens: expected ascending numbers from 0 to T = {length}, got {bounds}")
        for number, (start, end) in enumerate(pairwise(bounds)):
            yield slice(number, number + 1), range(start, end)

    def initial_of(self, rows: slice) -> Tensor:
        """The states before the first step."""
        if self.initial is not None:
            return self.initial[rows]
        return self.q.new_zeros(self.states_shape())[rows]

    def step(self, t: int) -> _Step:
        """What concerns one position."""
        q, k, row_decay = (x[:, t].unsqueeze(3) for x in (self.q, self.k, self.row_decay))
        v, column_decay, beta = (x[:, t].unsqueeze(2) for x in (self.v, self.column_decay, self.beta))
        return _Step(q, k, v, row_decay.exp(), column_decay.exp(), beta)


def delta_rule(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - those of _Rule
    """The outputs (b, t, h, V) and the states after the last steps (N, h, K, V)."""
    result: tuple[Tensor, Tensor] = ops.delta_rule.default(*arguments)
    return result


@torch.library.custom_op(qualified("delta_rule"), mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _delta_rule(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - those of _Rule
    rule = _Rule(*arguments)
    outputs, states = rule.v.new_empty(rule.v.shape), rule.v.new_empty(rule.states_shape())
    for rows, positions in rule.sequences():
        state = rule.initial_of(rows)
        for t in positions:
            step = rule.step(t)
            state = step.after(state)
            outputs[:, t] = (state * step.q).sum(2)
        states[rows] = state
    return outputs, states


@_delta_rule.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - those of _Rule
    rule = _Rule(*arguments)
    return rule.v.new_empty(rule.v.shape), rule.v.new_empty(rule.states_shape())


@torch.library.custom_op(
    qualified("delta_rule_backward"),
    mutates_args=(),
    schema=f"(Tensor to_outputs, Tensor to_states, {_ARGUMENTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _delta_rule_backward(
    to_outputs: Tensor,
    to_states: Tensor,
    *arguments: Any,  # noqa: ANN401 - those of _Rule
) -> tuple[Tensor, ...]:
    """The gradients to q, k, v, the two decays, beta and the initial states."""
    rule = _Rule(*arguments)
    gradients = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in arguments[:6]]
    to_initial = to_states.clone(memory_format=torch.contiguous_format)
    for rows, positions in rule.sequences():
        stretches = [positions[start : start + _STRETCH] for start in range(0, len(positions), _STRETCH)]
        befores = [rule.initial_of(rows)]
        for stretch in stretches[:-1]:
            befores.append(_walk(rule, befores[-1], stretch)[-1])
        to_state = to_initial[rows]
        for stretch in reversed(stretches):
            states = _walk(rule, befores.pop(), stretch)
            for t in reversed(stretch):
                after, before = states.pop(), states[-1]
                to_state = _back(rule.step(t), before, after, to_state, to_outputs[:, t].unsqueeze(2), gradients, t)
        to_initial[rows] = to_state
    return *gradients, to_initial


def _walk(rule: _Rule, state: Tensor, positions: range) -> list[Tensor]:
    """The state before some positions, and those after each."""
    states = [state]
    for t in positions:
        states.append(rule.step(t).after(states[-1]))
    return states


def _back(
    step: _Step, before: Tensor, after: Tensor, to_state: Tensor, to_output: Tensor, gradients: list[Tensor], t: int
) -> Tensor:
    """The gradient to the state before a step, from those to the state after it and the output (b, h, 1, V)."""
    decayed = step.decayed(before)
    missing = step.missing(decayed)
    to_q = (after * to_output).sum(3)
    to_state = to_state + step.q * to_output
    to_written = (to_state * step.k).sum(2, keepdim=True)
    to_missing = to_written * step.beta
    to_k = (to_state * (step.beta * missing) - decayed * to_missing).sum(3)
    to_decayed = to_state - step.k * to_missing
    to_exponents = to_decayed * decayed
    steps = (
        to_q,
        to_k,
        to_missing.squeeze(2),
        to_exponents.sum(3),
        to_exponents.sum(2),
        (to_written * missing).squeeze(2),
    )
    for total, gradient in zip(gradients, steps, strict=True):
        # One number where all rows or columns share it.
        total[:, t] = gradient.sum(-1, keepdim=True) if total.shape[-1] == 1 else gradient
    return step.decayed(to_decayed)


@_delta_rule_backward.register_fake
def _(to_outputs: Tensor, to_states: Tensor, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401, ARG001
    return *(x.new_empty(x.shape) for x in arguments[:6]), to_states.new_empty(to_states.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401, ARG001 - torch's
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, to_outputs: Tensor, to_states: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    *gradients, to_initial = ops.delta_rule_backward.default(to_outputs, to_states, *ctx.saved_tensors)
    return *gradients, to_initial if ctx.saved_tensors[6] is not None else None, None


_delta_rule.register_autograd(_gradients, setup_context=_setup_context)
