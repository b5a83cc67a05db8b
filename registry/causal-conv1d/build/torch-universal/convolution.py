"""Whole sequences."""

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import INTEGERS, check_filter, check_float, check_like


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """y[b, d, t] = act(bias[d] + sum over w of weight[d, w] * x[b, d, t - (W - 1) + w]), in float32.

    Args:
        x: (B, D, L) float, any strides.
        weight: (D, W) float of any dtype.
        bias: (D,) float of any dtype.
        seq_idx: (B, L) int32 or int64. Terms from a position with another number are left out.
        initial_states: (B, D, W - 1) in the dtype of x, the inputs before the first; zeros if None.
        return_final_states: also return the last W - 1 inputs, those of `initial_states` included.
        final_states_out: (B, D, W - 1) in the dtype of x; they are written here, and this is returned.
        activation: None, or "silu" or "swish", which are the same.

    Returns:
        (B, D, L) in the dtype of x; with `return_final_states`, the states (B, D, W - 1) besides. Differentiable in x,
        weight, bias and initial_states.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device or an activation; states together with `seq_idx`.
    """
    check_float("x", x, "(B, D, L)")
    width = check_filter(x, weight, bias, activation)
    batch, channels, length = x.shape
    if seq_idx is not None:
        check_like("seq_idx", seq_idx, x, (batch, length), INTEGERS)
        if initial_states is not None or return_final_states:
            raise ValueError("seq_idx: expected None where there are initial or final states, got a tensor")
    for name, states in (("initial_states", initial_states), ("final_states_out", final_states_out)):
        if states is not None:
            check_like(name, states, x, (batch, channels, width - 1), (x.dtype,))

    past = x.new_zeros(batch, channels, width - 1) if initial_states is None else initial_states
    inputs = widen(torch.cat([past, x], dim=-1))
    output = convolve(inputs, weight, bias, activation, seq_idx).to(x.dtype)
    if not return_final_states:
        return output
    final_states = inputs[..., length:].to(x.dtype, copy=True)
    if final_states_out is not None:
        final_states = final_states_out.copy_(final_states)
    return output, final_states


def widen(x: Tensor) -> Tensor:
    """The tensor as it is computed with: in float32, or in float64 if it is that."""
    return x if x.dtype == torch.float64 else x.float()


def convolve(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seq_idx: Tensor | None = None
) -> Tensor:
    """The filter over `inputs` (B, D, W - 1 + L), whose first W - 1 come before the first output.

    Returns:
        (B, D, L) in the dtype of inputs.
    """
    width = weight.shape[1]
    length = inputs.shape[-1] - (width - 1)
    if seq_idx is not None:
        # Before the first position are zeros, whatever sequence they count for.
        indices = functional.pad(seq_idx, (width - 1, 0))
    total = inputs.new_zeros(inputs.shape[0], inputs.shape[1], length)
    for tap in range(width):
        terms = inputs[..., tap : tap + length]
        if seq_idx is not None:
            same = indices[:, tap : tap + length] == seq_idx
            # Not a product with zero, which would let NaN of another sequence through.
            terms = torch.where(same.unsqueeze(1), terms, 0)
        total = total + weight[:, tap, None].to(inputs.dtype) * terms
    if bias is not None:
        total = total + bias[:, None].to(inputs.dtype)
    return total if activation is None else functional.silu(total)
