"""Rows to their experts, through them, and back."""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call
from .device import check_device, on
from .product import blocking, product
from .product_fp8 import product_fp8, scales
from .quantise import quantise
from .routing import route
from .rows import sort_rows, sum_slots


class Result(NamedTuple):
    """What comes of a call.

    Attributes:
        out: (T, H).
        z: (S, 2I), or (S, I) without a gate: what the activation was given, row by row in order; None unless kept.
    """

    out: Tensor
    z: Tensor | None


def like_z(call: Call) -> Tensor:
    """A tensor for z: in the dtype of the hidden states; float32 where a last digit could give h another code."""
    width = call.gate_up_proj.shape[2 if call.is_transposed else 1]
    dtype = call.hidden_states.dtype if call.block_size is None else torch.float32
    return call.hidden_states.new_empty((call.top_k_index.numel(), width), dtype=dtype)


def forward(call: Call, *, keep: bool) -> Result:
    """The result, and z if `keep`."""
    hidden, index, between = call.hidden_states, call.top_k_index, call.between
    check_device(hidden.device, fp8=call.block_size is not None)
    z = like_z(call) if keep else None
    if call.is_empty:
        return Result(hidden.new_zeros(hidden.shape), z)
    with on(hidden.device):
        dtype = hidden.dtype if call.block_size is None else call.gate_up_proj.dtype
        cut = blocking(index.numel(), call.experts, dtype, hidden.device)
        routing = route(index, call.experts, cut.height)
        first, second = call.first(), call.second()
        if call.block_size is None:
            # Nothing holds the sorted rows after this, so that what comes next can have their memory.
            h = product(sort_rows(hidden, call.slots, routing), first, call.gate_up_proj_bias, between, routing, cut, z)
            y = product(h, second, call.down_proj_bias, None, routing, cut)
        else:
            run = call.block_size[1]
            assert call.gate_up_proj_scale is not None, "FP8 weights have scales"
            assert call.down_proj_scale is not None, "FP8 weights have scales"
            by, then_by = (scales(s, call.block_size) for s in (call.gate_up_proj_scale, call.down_proj_scale))
            codes = quantise(hidden, run, call.slots, routing)
            h = product_fp8(*codes, first, by, call.gate_up_proj_bias, between, routing, cut, hidden.dtype, z)
            codes = quantise(h, run, None, routing)
            y = product_fp8(*codes, second, then_by, call.down_proj_bias, None, routing, cut, hidden.dtype)
        return Result(sum_slots(y, index, call.top_k_weights, call.experts, routing), z)
