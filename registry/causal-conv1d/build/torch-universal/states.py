"""Decoding: some steps more from a state, and the states that packed sequences leave."""

import torch
from torch import Tensor

from .arguments import INTEGERS, check_filter, check_float, check_like, check_rows
from .convolution import convolve, widen


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """The convolution of `causal_conv1d_fn` for L steps that come after those in `conv_state`, which is written.

    Args:
        x: (B, D) for one step, or (B, D, L); float.
        conv_state: (B, D, S), S >= W - 1, in the dtype of x; (N, D, S) with `conv_state_indices`. Afterwards it holds
            the last S inputs, those of x included. Written in place.
        weight: (D, W) float of any dtype.
        bias: (D,) float of any dtype.
        activation: None, or "silu" or "swish", which are the same.
        cache_seqlens: (B,) int32 or int64, >= 0, the steps that came before. The state is then a circular buffer: step
            s is kept at s % S.
        conv_state_indices: (B,) int32 or int64, no two alike: the row of `conv_state` that each row of x has.

    Returns:
        (B, D) or (B, D, L) in the dtype of x. Not differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device or an activation; on the CPU, a row that is not there.
    """
    check_float("x", x, "(B, D)" if x.ndim == 2 else "(B, D, L)")
    width = check_filter(x, weight, bias, activation)
    batch, channels = x.shape[:2]
    check_float("conv_state", conv_state, "(B, D, S)")
    size = conv_state.shape[2]
    rows = batch if conv_state_indices is None else conv_state.shape[0]
    check_like("conv_state", conv_state, x, (rows, channels, size), (x.dtype,))
    if size < width - 1:
        raise ValueError(f"conv_state: expected room for W - 1 = {width - 1} steps, got {tuple(conv_state.shape)}")
    for name, index in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if index is not None:
            check_like(name, index, x, (batch,), INTEGERS)
    if conv_state_indices is not None:
        check_rows("conv_state_indices", conv_state_indices, rows)

    steps = x.unsqueeze(-1) if x.ndim == 2 else x
    state = conv_state if conv_state_indices is None else conv_state[conv_state_indices]
    if cache_seqlens is None:
        inputs = torch.cat([state, steps], dim=-1)
        state = inputs[..., steps.shape[-1] :]
        inputs = inputs[..., size - (width - 1) :]
    else:
        inputs = torch.cat([state.gather(2, _places(state, cache_seqlens, 1 - width, 0)), steps], dim=-1)
        # Of more steps than there is room for, only the last stay.
        last = steps[..., max(steps.shape[-1] - size, 0) :]
        places = _places(state, cache_seqlens, steps.shape[-1] - last.shape[-1], steps.shape[-1])
        state = state.scatter(2, places, last)
    output = convolve(widen(inputs), weight, bias, activation).to(x.dtype)
    if conv_state_indices is None:
        conv_state.copy_(state)
    else:
        conv_state.index_copy_(0, conv_state_indices.long(), state)
    return output.squeeze(-1) if x.ndim == 2 else output


def _places(state: Tensor, cache_seqlens: Tensor, first: int, end: int) -> Tensor:
    """Where a circular buffer (B, D, S) keeps the steps cache_seqlens + (first .. end - 1), (B, D, end - first)."""
    steps = cache_seqlens.long().unsqueeze(1) + torch.arange(first, end, device=state.device)
    return (steps % state.shape[2]).unsqueeze(1).expand(-1, state.shape[1], -1)


@torch.no_grad()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` inputs of each of the sequences that x holds one after the other.

    Args:
        x: (T, D) float.
        cu_seqlens: (B + 1,) int32 or int64, ascending from 0: where sequences start, and where the last one ends.
        state_len: inputs that a state holds.

    Returns:
        (B, D, state_len) in the dtype of x, zeros in front of a shorter sequence. Not differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or device, or a negative `state_len`.
    """
    check_float("x", x, "(T, D)")
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0]:
        raise ValueError(f"cu_seqlens: expected shape (B + 1,), got {tuple(cu_seqlens.shape)}")
    check_like("cu_seqlens", cu_seqlens, x, tuple(cu_seqlens.shape), INTEGERS)
    if state_len < 0:
        raise ValueError(f"state_len: expected a number >= 0, got {state_len}")
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    if not x.shape[0]:
        return x.new_zeros(ends.shape[0], x.shape[1], state_len)
    positions = ends + torch.arange(-state_len, 0, device=x.device)
    states = torch.where((positions >= starts).unsqueeze(-1), x[positions.clamp(min=0)], 0)
    return states.transpose(1, 2).contiguous()
