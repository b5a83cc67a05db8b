"""Rows to their experts, through them, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .activations import activate
from .arguments import Activation, check
from .fp8 import grouped_linear_fp8
from .grouped import grouped_linear
from .routing import route, sort_rows, sum_slots


def experts_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    block_size: Sequence[int] | None = None,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float | None = None,
    has_gate: bool = True,
    is_concatenated: bool = True,
    is_transposed: bool = False,
) -> Tensor:
    """out[t] = sum over slots j of top_k_weights[t, j] * down(activation(gate_up(hidden_states[t]))), by expert.

    Args:
        hidden_states: (T, H) bfloat16, float16 or float32.
        top_k_index: (T, k) integers; an id that is not within 0 .. E - 1 is a sentinel, which leaves no trace.
        top_k_weights: (T, k) bfloat16, float16 or float32.
        gate_up_proj: (E, 2I, H), (E, H, 2I) if transposed, I for 2I without a gate; float8_e4m3fn or as hidden_states.
        down_proj: (E, H, I), (E, I, H) if transposed.
        gate_up_proj_bias: (E, 2I) or None.
        down_proj_bias: (E, H) or None.
        gate_up_proj_scale: of FP8 weights, (E, ceil(2I / bn), ceil(H / bk)) float32 or UE8M0.
        down_proj_scale: of FP8 weights, (E, ceil(H / bn), ceil(I / bk)).
        block_size: [bn, bk] of FP8 weights.
        activation: "silu", "gelu", "gelu_tanh", "relu", "relu2" or "swiglu_oai".
        alpha: of "swiglu_oai".
        limit: clamps the gate from above and the up on both sides.
        has_gate: gate_up_proj holds gate and up.
        is_concatenated: the gate precedes the up; otherwise they alternate.
        is_transposed: the last two dimensions of both weights are exchanged.

    Returns:
        (T, H) in the dtype of hidden_states, contiguous.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, an unknown activation, or options that exclude each other.
    """
    between = Activation(activation, alpha, limit, has_gate, has_gate and not is_concatenated)
    problem = check(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_proj_bias,
        down_proj_bias,
        gate_up_proj_scale,
        down_proj_scale,
        block_size,
        between,
        is_transposed=is_transposed,
    )

    routing = route(top_k_index, problem.experts)
    x = sort_rows(hidden_states, problem.slots, routing)
    offsets, blocks, dtype = routing.offsets, problem.block_size, x.dtype
    if gate_up_proj_scale is None or down_proj_scale is None or blocks is None:
        first, second = (w if is_transposed else w.transpose(1, 2) for w in (gate_up_proj, down_proj))
        z = grouped_linear(x, first, gate_up_proj_bias, offsets)
        y = grouped_linear(activate(z, between, dtype), second, down_proj_bias, offsets)
    else:
        # In float32: a last digit of z can give h another code.
        z = grouped_linear_fp8(x, gate_up_proj, gate_up_proj_scale, gate_up_proj_bias, offsets, blocks, torch.float32)
        h = activate(z, between, dtype)
        y = grouped_linear_fp8(h, down_proj, down_proj_scale, down_proj_bias, offsets, blocks, dtype)
    return sum_slots(y, top_k_weights, routing)
