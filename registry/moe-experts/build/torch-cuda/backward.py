"""Gradients, from that of the result and from z."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .between import through_activation
from .call import Call
from .device import on
from .outer import outer
from .product import blocking, matrices, product
from .product_fp8 import product_fp8, scales
from .routing import route
from .rows import sort_rows, sum_rows, sum_slots


def like_gradients(call: Call, wanted: Sequence[bool]) -> list[Tensor]:
    """A tensor for the gradient of each of `call.learned`; an empty one where it is not wanted."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        if want and x is not None
        else call.hidden_states.new_empty(0)
        for x, want in zip(call.learned, wanted, strict=True)
    ]


def backward(grad: Tensor, z: Tensor, call: Call, wanted: Sequence[bool]) -> list[Tensor]:
    """The gradients of `call.learned`. grad: (T, H). z: of the forward call, (S, 2I) or (S, I)."""
    if call.is_empty:
        return [gradient.zero_() for gradient in like_gradients(call, wanted)]
    hidden, index, weights, experts = call.hidden_states, call.top_k_index, call.top_k_weights, call.experts
    to_hidden, to_weights, to_gate_up, to_down, to_gate_up_bias, to_down_bias = wanted
    found = [hidden.new_empty(0) for _ in wanted]
    with on(hidden.device):
        cut = blocking(index.numel(), experts, hidden.dtype, hidden.device)
        routing = route(index, experts, cut.height)

        def back(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
            """Rows times the weight, the other way."""
            turned = matrices(weight, is_transposed=not call.is_transposed)
            if call.block_size is None or scale is None:
                return product(x, turned, None, None, routing, cut)
            by = scales(scale, call.block_size, turned=True)
            return product_fp8(x, None, turned, by, None, None, routing, cut, x.dtype)

        g = sort_rows(grad, call.slots, routing)
        to_h = back(g, call.down_proj, call.down_proj_scale)
        through = through_activation(to_h, z, g, weights, call.down_proj_bias, call.between, routing)
        del to_h
        if to_hidden:
            to_x = back(through.z, call.gate_up_proj, call.gate_up_proj_scale)
            found[0] = sum_slots(to_x, index, None, experts, routing)
        if to_weights:
            found[1] = through.routing.to(weights.dtype)
        if to_gate_up:
            x = sort_rows(hidden, call.slots, routing)
            found[2] = outer(*((x, through.z) if call.is_transposed else (through.z, x)), experts, routing)
        if to_down:
            found[3] = outer(*((through.h, g) if call.is_transposed else (g, through.h)), experts, routing)
        if to_gate_up_bias and call.gate_up_proj_bias is not None:
            found[4] = sum_rows(through.z, None, experts, call.gate_up_proj_bias.dtype, routing)
        if to_down_bias and call.down_proj_bias is not None:
            found[5] = sum_rows(g, weights, experts, call.down_proj_bias.dtype, routing)
    return found
