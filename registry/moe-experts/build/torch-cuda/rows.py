# ruff: noqa: ANN001, ANN202 - arguments of kernels have no types of Python
"""Rows to their places, and back to their tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .routing import Routing


def sort_rows(x: Tensor, slots: int, routing: Routing) -> Tensor:
    """The row of x (T, H) of each real slot, in order, (S, H). Rows past the last real one are not written."""
    rows, width = routing.order.numel(), x.shape[1]
    out = x.new_empty((rows, width))
    if out.numel():
        block = min(4096, triton.next_power_of_2(width))
        experts = routing.offsets.numel() - 1
        _sort_rows[(rows,)](
            x, out, routing.order, routing.offsets, experts, slots, width, x.stride(), BLOCK=block, num_warps=4
        )
    return out


def sum_slots(y: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None, experts: int, routing: Routing) -> Tensor:
    """The sum (T, H) of each token's rows of y (S, H), which are in order; weighted if there are weights."""
    tokens, slots = top_k_index.shape
    width = y.shape[1]
    out = y.new_empty((tokens, width))
    if out.numel():
        block = min(2048, triton.next_power_of_2(width))
        _sum_slots[(tokens, triton.cdiv(width, block))](
            y,
            top_k_index,
            top_k_weights,
            routing.place,
            out,
            slots,
            width,
            top_k_index.stride(),
            (0, 0) if top_k_weights is None else top_k_weights.stride(),
            experts,
            BLOCK=block,
            num_warps=4,
        )
    return out


def sum_rows(x: Tensor, top_k_weights: Tensor | None, experts: int, dtype: torch.dtype, routing: Routing) -> Tensor:
    """The float32 sum (E, N) of the rows of each expert of x (S, N), which are in order, in `dtype`."""
    width = x.shape[1]
    out = torch.empty((experts, width), dtype=dtype, device=x.device)
    if out.numel():
        _sum_rows[(experts, triton.cdiv(width, 128))](
            x,
            top_k_weights,
            routing.order,
            routing.offsets,
            out,
            width,
            1 if top_k_weights is None else top_k_weights.shape[1],
            (0, 0) if top_k_weights is None else top_k_weights.stride(),
            ROWS=32,
            BLOCK=128,
            num_warps=4,
        )
    return out


@triton.jit
def _sort_rows(x, out, order, offsets, experts, slots, width, strides, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(offsets + experts):
        token = tl.load(order + row) // slots
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < width
            value = tl.load(x + token.to(tl.int64) * strides[0] + column.to(tl.int64) * strides[1], mask=there)
            tl.store(out + row.to(tl.int64) * width + column, value, mask=there)


@triton.jit
def _sum_slots(
    y,
    ids,
    weights,
    place,
    out,
    slots,
    width,
    id_strides,
    weight_strides,
    experts,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for slot in range(slots):
        expert = tl.load(ids + token * id_strides[0] + slot * id_strides[1])
        if (expert >= 0) & (expert < experts):
            row = tl.load(place + token * slots + slot).to(tl.int64)
            value = tl.load(y + row * width + column, mask=there, other=0.0).to(tl.float32)
            if weights is not None:
                value *= tl.load(weights + token * weight_strides[0] + slot * weight_strides[1]).to(tl.float32)
            total += value
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _sum_rows(
    x,
    weights,
    order,
    offsets,
    out,
    width,
    slots,
    weight_strides,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(tl.load(offsets + expert), end, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < end)[:, None] & (column < width)[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * width + column[None, :], mask=there, other=0.0).to(tl.float32)
        if weights is not None:
            slot = tl.load(order + row, mask=row < end, other=0)
            at = (slot // slots).to(tl.int64) * weight_strides[0] + (slot % slots) * weight_strides[1]
            value *= tl.load(weights + at, mask=row < end, other=0.0).to(tl.float32)[:, None]
        total += value
    result = tl.sum(total, 0).to(out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * width + column, result, mask=column < width)
