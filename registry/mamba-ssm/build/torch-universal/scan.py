"""The scan, as an op with a gradient.

    h[t] = exp(delta[t] * A) * h[t - 1] + delta[t] * u[t] * B[t]        y[t] = sum over the state of C[t] * h[t]

Positions are worked on some at a time, and in backward once more from the states before them, so that never more than
these have their states in memory.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ._ops import ops, qualified

# Positions that are worked on at a time.
_CHUNK: Final = 64

_ARGUMENTS = "Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? initial, Tensor? starts"


class _Chunk(NamedTuple):
    """Some positions, which come first: u, delta (t, b, d), decay, B, C (t, b, d, n), starts (t, b, 1, 1).

    B and C have t = 1 where they do not change.
    """

    u: Tensor
    delta: Tensor
    decay: Tensor
    B: Tensor
    C: Tensor
    starts: Tensor | None

    @property
    def weighted(self) -> Tensor:
        """What comes in, (t, b, d, 1)."""
        return (self.delta * self.u).unsqueeze(-1)

    def entered(self, state: Tensor, t: int) -> Tensor:
        """What is left at position t of the state before it."""
        return state if self.starts is None else state.masked_fill(self.starts[t], 0)

    def states(self, before: Tensor) -> Tensor:
        """The states after all positions (t, b, d, n), from that before the first."""
        states = self.weighted * self.B
        for t, state in enumerate(states):
            before = state.addcmul_(self.decay[t], self.entered(before, t))
        return states

    def earlier(self, before: Tensor, states: Tensor) -> Tensor:
        """The states that each position starts from (t, b, d, n)."""
        earlier = torch.cat([before.unsqueeze(0), states[:-1]])
        return earlier if self.starts is None else earlier.masked_fill(self.starts, 0)


class _Scan(NamedTuple):
    """The arguments of a scan, all in the dtype that is computed in.

    u, delta: (b, d, l). A: (d, n). B, C: (b, g, n, l), or (b, g, n, 1) for what does not change; d / g channels share
    one. initial: (b, d, n), zeros if None. starts: (b, l) bool, where the state is forgotten before the step.
    """

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    initial: Tensor | None
    starts: Tensor | None

    def first(self) -> Tensor:
        """The state before the first position."""
        if self.initial is not None:
            return self.initial
        return self.u.new_zeros(self.u.shape[0], *self.A.shape)

    def cuts(self) -> list[slice]:
        """All positions, some at a time."""
        return [slice(start, start + _CHUNK) for start in range(0, self.u.shape[2], _CHUNK)]

    def chunk(self, cut: slice) -> _Chunk:
        """What concerns some positions."""
        u, delta = (x[:, :, cut].permute(2, 0, 1) for x in (self.u, self.delta))
        starts = None if self.starts is None else self.starts[:, cut].t()[..., None, None]
        decay = torch.exp(delta.unsqueeze(-1) * self.A)
        return _Chunk(u, delta, decay, self._of_channels(self.B, cut), self._of_channels(self.C, cut), starts)

    def _of_channels(self, shared: Tensor, cut: slice) -> Tensor:
        part = shared if shared.shape[-1] == 1 else shared[..., cut]
        return part.permute(3, 0, 1, 2).repeat_interleave(self.u.shape[1] // shared.shape[1], dim=2)


def scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The outputs (b, d, l) and the state after the last position (b, d, n). Arguments are those of `_Scan`."""
    result: tuple[Tensor, Tensor] = ops.scan.default(u, delta, A, B, C, initial, starts)
    return result


@torch.library.custom_op(qualified("scan"), mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def _scan(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - those of _Scan
    s = _Scan(*arguments)
    y, state = s.u.new_empty(s.u.shape), s.first()
    for cut in s.cuts():
        chunk = s.chunk(cut)
        states = chunk.states(state)
        y[:, :, cut] = (states * chunk.C).sum(-1).permute(1, 2, 0)
        state = states[-1]
    return y, state.clone(memory_format=torch.contiguous_format)


@_scan.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - those of _Scan
    s = _Scan(*arguments)
    return s.u.new_empty(s.u.shape), s.u.new_empty(s.u.shape[0], *s.A.shape)


@torch.library.custom_op(
    qualified("scan_backward"),
    mutates_args=(),
    schema=f"(Tensor to_y, Tensor to_last, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _scan_backward(to_y: Tensor, to_last: Tensor, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - of _Scan
    """The gradients to u, delta, A, B, C and the state before the first position."""
    s = _Scan(*arguments)
    to_u, to_delta, to_A, to_B, to_C = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in arguments[:5])
    befores = [s.first()]
    for cut in s.cuts()[:-1]:
        befores.append(s.chunk(cut).states(befores[-1])[-1])

    to_state = to_last.clone(memory_format=torch.contiguous_format)
    for cut in reversed(s.cuts()):
        before, chunk = befores.pop(), s.chunk(cut)
        states = chunk.states(before)
        to_outputs = to_y[:, :, cut].permute(2, 0, 1).unsqueeze(-1)
        to_states = to_outputs * chunk.C
        for t in range(len(to_states) - 1, -1, -1):
            to_state = chunk.entered(to_states[t].add_(to_state) * chunk.decay[t], t)
        _add_shared(to_C, states * to_outputs, cut)
        _add_shared(to_B, to_states * chunk.weighted, cut)
        to_weighted = (to_states * chunk.B).sum(-1)
        to_exponents = to_states * chunk.decay * chunk.earlier(before, states)
        to_u[:, :, cut] = (to_weighted * chunk.delta).permute(1, 2, 0)
        to_delta[:, :, cut] = (to_weighted * chunk.u + (to_exponents * s.A).sum(-1)).permute(1, 2, 0)
        to_A += (to_exponents * chunk.delta.unsqueeze(-1)).sum((0, 1))
    return to_u, to_delta, to_A, to_B, to_C, to_state


def _add_shared(total: Tensor, of_channels: Tensor, cut: slice) -> None:
    """Add what channels give at some positions (t, b, d, n) to what they share (b, g, n, l), or (b, g, n, 1)."""
    # Both sizes are named: torch cannot tell one from the other where there are no rows.
    sizes = (total.shape[1], of_channels.shape[2] // total.shape[1])
    shared = torch.unflatten(of_channels, 2, sizes).sum(3).permute(1, 2, 3, 0)
    if total.shape[-1] == 1:
        total += shared.sum(-1, keepdim=True)
    else:
        total[..., cut] += shared


@_scan_backward.register_fake
def _(to_y: Tensor, to_last: Tensor, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401, ARG001 - of _Scan
    return *(x.new_empty(x.shape) for x in arguments[:5]), to_last.new_empty(to_last.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401, ARG001 - torch's
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, to_y: Tensor, to_last: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    *gradients, to_initial = ops.scan_backward.default(to_y, to_last, *ctx.saved_tensors)
    return *gradients, to_initial if ctx.saved_tensors[5] is not None else None, None


_scan.register_autograd(_gradients, setup_context=_setup_context)
