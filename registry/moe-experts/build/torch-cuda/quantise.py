# ruff: noqa: ANN001, ANN202 - arguments of kernels have no types of Python
"""The quantiser of rows: runs of `block` elements to e4m3 codes that share a scale."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .routing import Routing

E4M3_MAX: Final = tl.constexpr(448.0)

# Keeps a row of zeros from being divided by zero.
SCALE_FLOOR: Final = tl.constexpr(1e-12)


def quantise(x: Tensor, block: int, slots: int | None, routing: Routing) -> tuple[Tensor, Tensor]:
    """Codes (S, K) float8_e4m3fn and scales (S, ceil(K / block)) float32 of the real rows of x.

    x: (S, K) in order; or (T, K), from where the row of each slot is taken, if `slots` says how many a token has.
    """
    rows, width = routing.order.numel(), x.shape[1]
    runs = triton.cdiv(width, block)
    codes = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, runs), dtype=torch.float32, device=x.device)
    if codes.numel():
        span = triton.next_power_of_2(block)
        together = max(1, min(triton.next_power_of_2(runs), 4096 // span))
        _quantise[(rows,)](
            x,
            codes,
            scales,
            routing.order,
            routing.offsets,
            routing.offsets.numel() - 1,
            slots or 1,
            width,
            runs,
            block,
            x.stride(),
            GATHER=slots is not None,
            RUNS=together,
            SPAN=span,
            num_warps=4,
        )
    return codes, scales


@triton.jit
def _quantise(
    x,
    codes,
    scales,
    order,
    offsets,
    experts,
    slots,
    width,
    runs,
    block,
    strides,
    GATHER: tl.constexpr,
    RUNS: tl.constexpr,
    SPAN: tl.constexpr,
):
    row = tl.program_id(0)
    if row < tl.load(offsets + experts):
        source = row
        if GATHER:
            source = tl.load(order + row) // slots
        for start in range(0, runs, RUNS):
            run = start + tl.arange(0, RUNS)
            within = tl.arange(0, SPAN)
            column = run[:, None] * block + within[None, :]
            there = (within < block)[None, :] & (column < width)
            at = source.to(tl.int64) * strides[0] + column.to(tl.int64) * strides[1]
            value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
            # NaN shall make the scale of its run NaN, and tl.max passes it over.
            is_nan = value != value  # noqa: PLR0124
            scale = tl.div_rn(tl.max(tl.abs(value), 1), E4M3_MAX)
            scale = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), scale)
            divisor = tl.where(scale < SCALE_FLOOR, SCALE_FLOOR, scale)
            quotient = tl.div_rn(value, tl.broadcast_to(divisor[:, None], value.shape))
            quotient = tl.where(quotient > E4M3_MAX, E4M3_MAX, tl.where(quotient < -E4M3_MAX, -E4M3_MAX, quotient))
            at = row.to(tl.int64) * width + column
            tl.store(codes + at, quotient.to(codes.dtype.element_ty), mask=there)
            tl.store(scales + row.to(tl.int64) * runs + run, scale, mask=run < runs)
