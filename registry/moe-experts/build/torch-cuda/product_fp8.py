# ruff: noqa: ANN001, ANN202, FBT003 - kernels: arguments have no types of Python, and no names in calls
"""Rows sorted by expert times one FP8 matrix an expert."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arguments import Activation
from .device import multiprocessors
from .epilogue import finish
from .order import rounds, tile_of
from .product import Blocking, Matrices, can_describe, describe
from .routing import Routing


class Scales(NamedTuple):
    """The scales of quantised matrices: that of (k, n) of an expert stands at block (k // of_k, n // of_n).

    n counts the rows or columns of the weight as they lie in memory, whatever half they belong to.

    Attributes:
        data: float32 or uint8 (UE8M0 exponents).
        strides: of expert, block of k and block of n.
        of_k: block along k.
        of_n: block along n.
    """

    data: Tensor
    strides: tuple[int, int, int]
    of_k: int
    of_n: int


def scales(scale: Tensor, block_size: list[int], *, turned: bool = False) -> Scales:
    """Of a weight (E, N, K) with blocks [bn, bk]; turned: for the product that sums over N."""
    data = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    expert, n, k = data.stride()
    if turned:
        return Scales(data, (expert, n, k), block_size[0], block_size[1])
    return Scales(data, (expert, k, n), block_size[1], block_size[0])


def product_fp8(
    x: Tensor,
    x_scales: Tensor | None,
    weight: Matrices,
    scale: Scales,
    bias: Tensor | None,
    between: Activation | None,
    routing: Routing,
    cut: Blocking,
    dtype: torch.dtype,
    kept: Tensor | None = None,
) -> Tensor:
    """As `product`, in `dtype`, for x (S, K) float8_e4m3fn with x_scales (S, ceil(K / of_k)), or x in a float dtype."""
    out = torch.empty((x.shape[0], weight.columns), dtype=dtype, device=x.device)
    width = min(cut.width, 128) // weight.halves
    programs = min(cut.programs * multiprocessors(x.device), routing.most * triton.cdiv(weight.columns, width))
    if not programs:
        return out
    # Tensor cores want 32 bytes in a step at least.
    depth = min(cut.depth, max(32, triton.next_power_of_2(scale.of_k)))
    described = depth == scale.of_k and can_describe(x, weight)
    tall, short, w = describe(x, weight, width, cut._replace(depth=depth)) if described else (x, x, weight.data)
    interleaved = weight.halves == 2 and weight.strides[2] < weight.strides[3]
    _product_fp8[(programs,)](
        tall,
        short,
        x_scales,
        w,
        scale.data,
        bias,
        out,
        kept,
        routing.tiles,
        routing.count,
        weight.depth,
        weight.columns,
        weight.strides,
        scale.strides,
        scale.of_k,
        scale.of_n,
        (0, 0) if bias is None else bias.stride(),
        (1, 2) if interleaved else (weight.columns, 1),
        0.0 if between is None else between.alpha,
        0.0 if between is None or between.limit is None else between.limit,
        ACTIVATION=None if between is None else between.name,
        LIMITED=between is not None and between.limit is not None,
        HALVES=weight.halves,
        DESCRIBED=described,
        DEEP=weight.is_deep,
        TALL=cut.tall,
        SHORT=cut.short,
        WIDTH=width,
        DEPTH=depth,
        num_stages=cut.stages if described else 2,
        num_warps=cut.warps,
    )
    return out


@triton.jit
def _real_scale(scale):
    """UE8M0 exponents as float32, 2 ** (e - 127), 255 being NaN; float32 as it is."""
    if scale.dtype == tl.float32:
        return scale
    exponent = scale.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tile(
    x,
    x_scales,
    w,
    w_scales,
    bias,
    out,
    kept,
    expert,
    row,
    end,
    column,
    K,
    columns,
    strides,
    scale_strides,
    of_k,
    of_n,
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP: tl.constexpr,
    TURNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of the output. TURNED: weights @ rows.T. DESCRIBED: a step is a block of K."""
    rows = row + tl.arange(0, HEIGHT)
    each = tl.arange(0, HALVES * WIDTH)
    n = column + each % WIDTH
    at_n = (each // WIDTH).to(tl.int64) * strides[2] + n.to(tl.int64) * strides[3]
    at_expert = expert.to(tl.int64) * strides[0]
    in_memory = n * places[1] + each // WIDTH * places[0]
    of_expert = w_scales + expert.to(tl.int64) * scale_strides[0]
    at_scale = of_expert + (in_memory // of_n).to(tl.int64) * scale_strides[2]
    blocks = tl.cdiv(K, of_k)
    steps = 1 if DESCRIBED else tl.cdiv(of_k, DEPTH)
    if TURNED:
        total = tl.zeros((HALVES * WIDTH, HEIGHT), dtype=tl.float32)
    else:
        total = tl.zeros((HEIGHT, HALVES * WIDTH), dtype=tl.float32)
    for step in range(blocks * steps):
        block = step // steps
        if DESCRIBED:
            a = x.load([row, block * DEPTH])
            b = w.load([expert, 0, column, block * DEPTH]).reshape(HALVES * WIDTH, DEPTH)
        else:
            within = step % steps * DEPTH + tl.arange(0, DEPTH)
            k = block * of_k + within
            is_k = (within < of_k) & (k < K)
            is_there = (rows < end)[:, None] & is_k[None, :]
            a = tl.load(x + rows.to(tl.int64)[:, None] * K + k[None, :], mask=is_there, other=0.0)
            at_k = at_expert + k.to(tl.int64) * strides[1]
            is_there = (n < columns)[:, None] & is_k[None, :]
            if DEEP:
                b = tl.load(w + at_n[:, None] + at_k[None, :], mask=is_there, other=0.0)
            else:
                b = tl.load(w + at_k[:, None] + at_n[None, :], mask=is_there.T, other=0.0).T
        # Codes first, scales after: products of codes are exact, and so are codes in any float dtype.
        b = b.to(a.dtype)
        scale = _real_scale(tl.load(at_scale + block * scale_strides[1], mask=n < columns, other=0))
        if TURNED:
            part = tl.dot(b, a.T, input_precision="ieee") * scale[:, None]
        else:
            part = tl.dot(a, b.T, input_precision="ieee") * scale[None, :]
        if x_scales is not None:
            of_row = tl.load(x_scales + rows.to(tl.int64) * blocks + block, mask=rows < end, other=0.0)
            part *= of_row[None, :] if TURNED else of_row[:, None]
        total += part
    finish(
        total,
        out,
        kept,
        bias,
        expert,
        row,
        end,
        column,
        columns,
        bias_strides,
        places,
        alpha,
        limit,
        ACTIVATION,
        LIMITED,
        HALVES,
        False,
        TURNED,
        HEIGHT,
        WIDTH,
    )


@triton.jit
def _product_fp8(
    tall,
    short,
    x_scales,
    w,
    w_scales,
    bias,
    out,
    kept,
    tiles,
    count,
    K,
    columns,
    strides,
    scale_strides,
    of_k,
    of_n,
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP: tl.constexpr,
    TALL: tl.constexpr,
    SHORT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    HALVED: tl.constexpr = TALL == 2 * SHORT
    across = tl.cdiv(columns, WIDTH)
    total, whole, last = rounds(count, across, HALVED)
    for number in range(tl.program_id(0), last, tl.num_programs(0)):
        expert, row, height, place = tile_of(number, total, whole, last, tiles, across, HALVED, SHORT)
        column = place * WIDTH
        if TALL > 0 and height > SHORT:
            _tile(
                tall,
                x_scales,
                w,
                w_scales,
                bias,
                out,
                kept,
                expert,
                row,
                row + height,
                column,
                K,
                columns,
                strides,
                scale_strides,
                of_k,
                of_n,
                bias_strides,
                places,
                alpha,
                limit,
                ACTIVATION,
                LIMITED,
                HALVES,
                DESCRIBED,
                DEEP,
                False,
                TALL,
                WIDTH,
                DEPTH,
            )
        elif height > 0:
            _tile(
                short,
                x_scales,
                w,
                w_scales,
                bias,
                out,
                kept,
                expert,
                row,
                row + height,
                column,
                K,
                columns,
                strides,
                scale_strides,
                of_k,
                of_n,
                bias_strides,
                places,
                alpha,
                limit,
                ACTIVATION,
                LIMITED,
                HALVES,
                DESCRIBED,
                DEEP,
                True,
                SHORT,
                WIDTH,
                DEPTH,
            )
