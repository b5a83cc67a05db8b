# ruff: noqa: ANN001, ANN202 - arguments of kernels have no types of Python
"""The gradient of weights: for each expert, one matrix of its rows transposed times another."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import has_copy_engine, multiprocessors, precision
from .routing import Routing


def outer(left: Tensor, right: Tensor, experts: int, routing: Routing) -> Tensor:
    """left.T @ right over the rows of each expert, (S, M), (S, N) -> (E, M, N); zeros where an expert has no rows.

    Both are contiguous, of one dtype, and in order; what stands past the last real row is not used.
    """
    m, n = left.shape[1], right.shape[1]
    out = left.new_empty((experts, m, n))
    if not out.numel():
        return out
    if left.dtype == torch.float32:
        side, across, rows, stages, warps = 64, 64, 32, 2, 4
    elif has_copy_engine(left.device):
        side, across, rows, stages, warps = 128, 256, 64, 4, 8
    else:
        side, across, rows, stages, warps = 128, 128, 32, 4, 8
    unit = 16 // left.element_size()
    described = (
        has_copy_engine(left.device) and left.element_size() == 2 and left.shape[0] > 0 and m % unit == n % unit == 0
    )
    a: Any = TensorDescriptor.from_tensor(left, [rows, side]) if described else left
    b: Any = TensorDescriptor.from_tensor(right, [rows, across]) if described else right
    tiles = experts * triton.cdiv(m, side) * triton.cdiv(n, across)
    _outer[(min(tiles, multiprocessors(left.device)),)](
        a,
        b,
        left,
        right,
        out,
        routing.offsets,
        m,
        n,
        tiles,
        DESCRIBED=described,
        PRECISION=precision(left.dtype),
        SIDE=side,
        ACROSS=across,
        ROWS=rows,
        num_stages=stages,
        num_warps=warps,
    )
    return out


@triton.jit
def _outer(
    a,
    b,
    left,
    right,
    out,
    offsets,
    m,
    n,
    tiles,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
    SIDE: tl.constexpr,
    ACROSS: tl.constexpr,
    ROWS: tl.constexpr,
):
    down = tl.cdiv(m, SIDE)
    across = tl.cdiv(n, ACROSS)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert = t // (down * across)
        i = t % down * SIDE
        j = t // down % across * ACROSS
        start = tl.load(offsets + expert)
        end = tl.load(offsets + expert + 1)
        total = tl.zeros((SIDE, ACROSS), dtype=tl.float32)
        whole = start
        if DESCRIBED:
            # The copy engine knows the end of memory but not that of an expert: the last step is not its own.
            whole = start + (end - start) // ROWS * ROWS
            for row in range(start, whole, ROWS):
                total = tl.dot(a.load([row, i]).T, b.load([row, j]), total, input_precision=PRECISION)
        column_i = i + tl.arange(0, SIDE)
        column_j = j + tl.arange(0, ACROSS)
        for row in range(whole, end, ROWS):
            at = row + tl.arange(0, ROWS)
            here = (at < end)[:, None]
            of_row = at.to(tl.int64)[:, None]
            x = tl.load(left + of_row * m + column_i[None, :], mask=here & (column_i < m)[None, :], other=0.0)
            y = tl.load(right + of_row * n + column_j[None, :], mask=here & (column_j < n)[None, :], other=0.0)
            total = tl.dot(x.T, y, total, input_precision=PRECISION)
        there = (column_i < m)[:, None] & (column_j < n)[None, :]
        at = out + expert.to(tl.int64) * m * n + column_i.to(tl.int64)[:, None] * n + column_j[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=there)
