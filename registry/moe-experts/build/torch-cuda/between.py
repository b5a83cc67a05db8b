# ruff: noqa: ANN001, ANN202 - arguments of kernels have no types of Python
"""Backward through the activation and the routing weight, one row at a time."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import activation, clamp_gate, clamp_up, derivative
from .arguments import Activation
from .routing import Routing


class Gradients(NamedTuple):
    """What comes of a row.

    Attributes:
        z: (S, 2I), or (S, I) without a gate; to the sums in front of the activation.
        h: (S, I) what the activation gave, times the routing weight.
        routing: (T, k) to the routing weights, float32; zero for sentinels.
    """

    z: Tensor
    h: Tensor
    routing: Tensor


def through_activation(
    to_h: Tensor,
    z: Tensor,
    grad: Tensor,
    top_k_weights: Tensor,
    down_proj_bias: Tensor | None,
    between: Activation,
    routing: Routing,
) -> Gradients:
    """From the gradient of h before it is weighted.

    to_h: (S, I). z: (S, 2I) or (S, I). grad: (S, H), upstream, by row. down_proj_bias: (E, H), or None.
    """
    rows, width = to_h.shape
    result = Gradients(
        torch.empty_like(z, dtype=to_h.dtype),
        torch.empty_like(to_h),
        torch.zeros(top_k_weights.shape, dtype=torch.float32, device=z.device),
    )
    if not rows:
        return result
    _through_activation[(rows,)](
        to_h,
        z,
        grad,
        top_k_weights,
        down_proj_bias,
        routing.order,
        routing.offsets,
        *result,
        routing.offsets.numel() - 1,
        top_k_weights.shape[1],
        width,
        grad.shape[1],
        top_k_weights.stride(),
        (0, 0) if down_proj_bias is None else down_proj_bias.stride(),
        (1, 2) if between.interleaved else (width, 1),
        between.alpha,
        0.0 if between.limit is None else between.limit,
        ACTIVATION=between.name,
        LIMITED=between.limit is not None,
        GATED=between.gated,
        EXPERTS=triton.next_power_of_2(routing.offsets.numel() - 1),
        BLOCK=min(1024, triton.next_power_of_2(max(width, grad.shape[1], 1))),
        num_warps=4,
    )
    return result


@triton.jit
def _through_activation(
    to_h,
    z,
    grad,
    weights,
    bias,
    order,
    offsets,
    to_z,
    weighted,
    to_weights,
    experts,
    slots,
    width,
    hidden,
    weight_strides,
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    GATED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(offsets + experts):
        slot = tl.load(order + row)
        at_weight = (slot // slots).to(tl.int64) * weight_strides[0] + (slot % slots) * weight_strides[1]
        weight = tl.load(weights + at_weight).to(tl.float32)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < width
            g = tl.load(to_h + row * width + column, mask=there, other=0.0).to(tl.float32)
            if GATED:
                at_gate = row * (2 * width) + column * places[1]
                at_up = at_gate + places[0]
                gate = tl.load(z + at_gate, mask=there, other=0.0).to(tl.float32)
                up = tl.load(z + at_up, mask=there, other=0.0).to(tl.float32)
                gate_counts = 1.0
                up_counts = 1.0
                if LIMITED:
                    # At the limit itself the gradient passes, as torch.clamp has it.
                    gate_counts = tl.where(gate > limit, 0.0, 1.0)
                    up_counts = tl.where((up > limit) | (up < -limit), 0.0, 1.0)
                    gate = clamp_gate(gate, limit)
                    up = clamp_up(up, limit)
                if ACTIVATION == "swiglu_oai":
                    up += 1
                value = activation(gate, alpha, ACTIVATION)
                h = value * up
                to_gate = g * weight * up * derivative(gate, alpha, ACTIVATION) * gate_counts
                to_up = g * weight * value * up_counts
                tl.store(to_z + at_gate, to_gate.to(to_z.dtype.element_ty), mask=there)
                tl.store(to_z + at_up, to_up.to(to_z.dtype.element_ty), mask=there)
            else:
                x = tl.load(z + row * width + column, mask=there, other=0.0).to(tl.float32)
                h = activation(x, alpha, ACTIVATION)
                to_x = g * weight * derivative(x, alpha, ACTIVATION)
                tl.store(to_z + row * width + column, to_x.to(to_z.dtype.element_ty), mask=there)
            tl.store(weighted + row * width + column, (h * weight).to(weighted.dtype.element_ty), mask=there)
            total += tl.where(there, g * h, 0.0)
        if bias is not None:
            each = tl.arange(0, EXPERTS)
            ends = tl.load(offsets + 1 + each, mask=each < experts, other=2147483647)
            expert = tl.sum((ends <= row).to(tl.int32))
            for start in range(0, hidden, BLOCK):
                column = start + tl.arange(0, BLOCK)
                there = column < hidden
                g = tl.load(grad + row * hidden + column, mask=there, other=0.0).to(tl.float32)
                at_bias = expert.to(tl.int64) * bias_strides[0] + column * bias_strides[1]
                total += g * tl.load(bias + at_bias, mask=there, other=0.0).to(tl.float32)
        tl.store(to_weights + slot, tl.sum(total))
