# ruff: noqa: ANN001, ANN202, FBT003, RET505 - kernels: no types of Python, and branches of the compiler
"""Rows sorted by expert times one matrix an expert, with bias and activation on the way out.

One persistent program a multiprocessor goes through the tiles of the output that exist, which the device alone knows.
A tall tile takes 128 rows of one expert. What is left of an expert, or all that it has where it has few, is a short
tile: that multiplies the other way round, weights @ rows.T, as tensor cores take 64 rows at least on the left and as
few as 8 on the right.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .arguments import Activation
from .device import has_copy_engine, multiprocessors, precision
from .epilogue import finish
from .order import rounds, tile_of
from .routing import Routing


class Matrices(NamedTuple):
    """One matrix (K, halves * N) an expert, as a view of weights: half h of column n stands at h * half + n * column.

    Attributes:
        data: where the elements are.
        experts: E.
        depth: K, over which is summed.
        halves: 2 for gate and up, 1 for others.
        columns: N.
        strides: of expert, k, half and column, in elements.
    """

    data: Tensor
    experts: int
    depth: int
    halves: int
    columns: int
    strides: tuple[int, int, int, int]

    @property
    def is_deep(self) -> bool:
        """Whether neighbours in memory are neighbours in k, rather than in n."""
        return self.strides[1] == 1

    @property
    def alternates(self) -> bool:
        """Whether gate and up alternate in memory, so that no rectangle of it holds a tile of one of them."""
        return not self.is_deep and self.strides[2] == 1 and self.strides[3] == 2


def matrices(weight: Tensor, *, is_transposed: bool, gated: bool = False, interleaved: bool = False) -> Matrices:
    """A weight (E, N, K), or (E, K, N) if transposed, by which rows (S, K) are multiplied."""
    n, k = (2, 1) if is_transposed else (1, 2)
    halves = 2 if gated else 1
    columns = weight.shape[n] // halves
    of_n = weight.stride(n)
    half, column = (of_n, 2 * of_n) if interleaved else (columns * of_n, of_n)
    return Matrices(
        weight, weight.shape[0], weight.shape[k], halves, columns, (weight.stride(0), weight.stride(k), half, column)
    )


class Blocking(NamedTuple):
    """How the work is cut.

    Attributes:
        tall: rows of a tall tile; 0 for short tiles alone.
        short: rows of a short tile, 16 to 64.
        width: columns of a tile, both halves together.
        depth: of a step along K.
        stages: steps that are on their way at a time.
        warps: of a program.
        programs: for each multiprocessor.
    """

    tall: int
    short: int
    width: int
    depth: int
    stages: int
    warps: int
    programs: int

    @property
    def height(self) -> int:
        """Rows of the tallest tile."""
        return self.tall or self.short


def blocking(rows: int, experts: int, dtype: torch.dtype, device: torch.device) -> Blocking:
    """For so many rows at most, of a dtype. How many there are is not known here, nor how even they are."""
    each = rows / max(experts, 1)
    few, size = 16 if each <= 8 else 32, dtype.itemsize
    if size == 4:
        return Blocking(tall=64, short=16, width=64, depth=32, stages=2, warps=4, programs=2)
    if not has_copy_engine(device):
        if each > 32:
            return Blocking(tall=128, short=64, width=128, depth=64 // size, stages=4, warps=8, programs=1)
        return Blocking(tall=0, short=16, width=128, depth=128 // size, stages=3, warps=4, programs=2)
    if each > 32:
        return Blocking(tall=128, short=64, width=128 * size, depth=128 // size, stages=4, warps=8, programs=1)
    return Blocking(tall=0, short=few, width=128, depth=128 // size, stages=5, warps=4, programs=2)


def product(
    x: Tensor,
    weight: Matrices,
    bias: Tensor | None,
    between: Activation | None,
    routing: Routing,
    cut: Blocking,
    kept: Tensor | None = None,
) -> Tensor:
    """Rows x (S, K), which are in order, by the matrices of their experts: (S, N) in the dtype of x.

    Rows past the last real one are not written.

    Args:
        x: (S, K) contiguous.
        weight: (E, K, halves * N).
        bias: (E, halves * N), its columns placed as those of the weight; or None.
        between: makes one column of two halves, or of one; None leaves them.
        routing: made for tiles of `cut.height` rows.
        cut: the tiles.
        kept: (S, halves * N) for what `between` is given, with columns placed as those of the weight; or None.
    """
    out = x.new_empty((x.shape[0], weight.columns))
    width = cut.width // weight.halves
    programs = min(cut.programs * multiprocessors(x.device), routing.most * triton.cdiv(weight.columns, width))
    if not programs:
        return out
    interleaved = weight.halves == 2 and weight.strides[2] < weight.strides[3]
    described = can_describe(x, weight)
    tall, short, w = describe(x, weight, width, cut) if described else (x, x, weight.data)
    _product[(programs,)](
        tall,
        short,
        w,
        bias,
        out,
        kept,
        routing.tiles,
        routing.count,
        weight.depth,
        weight.columns,
        weight.strides,
        (0, 0) if bias is None else bias.stride(),
        (1, 2) if interleaved else (weight.columns, 1),
        0.0 if between is None else between.alpha,
        0.0 if between is None or between.limit is None else between.limit,
        ACTIVATION=None if between is None else between.name,
        LIMITED=between is not None and between.limit is not None,
        HALVES=weight.halves,
        DESCRIBED=described,
        DEEP=weight.is_deep,
        ALTERNATING=weight.alternates,
        PRECISION=precision(x.dtype),
        TALL=cut.tall,
        SHORT=cut.short,
        WIDTH=width,
        DEPTH=cut.depth,
        num_stages=cut.stages,
        num_warps=cut.warps,
    )
    return out


def can_describe(x: Tensor, weight: Matrices) -> bool:
    """Whether the copy engine can bring tiles of both: rows of whole 16 bytes, at such an address."""
    if not has_copy_engine(x.device) or not min(*x.shape, weight.experts, weight.columns):
        return False
    size = x.element_size()
    unit = 16 // size
    steps = weight.strides[:2] if weight.alternates else weight.strides
    return (
        size == weight.data.element_size() < 4
        and x.shape[1] % unit == 0
        and weight.data.data_ptr() % 16 == 0
        # Tensor cores take bytes along K alone.
        and (weight.is_deep or (size == 2 and (weight.alternates or weight.strides[3] == 1)))
        and all(step % unit == 0 for step in steps if step != 1)
    )


def describe(x: Tensor, weight: Matrices, width: int, cut: Blocking) -> tuple[Any, Any, Any]:
    """Descriptors of tall and of short tiles of x, and of tiles of `width` columns of each half.

    Those of the weight have the order of memory.
    """
    short = TensorDescriptor.from_tensor(x, [cut.short, cut.depth])
    tall = TensorDescriptor.from_tensor(x, [cut.tall, cut.depth]) if cut.tall else None
    expert, k, half, column = weight.strides
    if weight.is_deep:
        shape, strides = [weight.experts, weight.halves, weight.columns, weight.depth], [expert, half, column, k]
        block = [1, weight.halves, width, cut.depth]
    elif weight.alternates:
        shape, strides = [weight.experts, weight.depth, 2 * weight.columns], [expert, k, 1]
        block = [1, cut.depth, 2 * width]
    else:
        shape, strides = [weight.experts, weight.depth, weight.halves, weight.columns], [expert, k, half, column]
        block = [1, cut.depth, weight.halves, width]
    return tall, short, TensorDescriptor(weight.data, shape, strides, block)


@triton.jit
def _rows_of(x, row, end, k, K, DESCRIBED: tl.constexpr, HEIGHT: tl.constexpr, DEPTH: tl.constexpr):
    """A step of rows, (HEIGHT, DEPTH). Rows past `end` hold anything."""
    if DESCRIBED:
        return x.load([row, k])
    else:
        at = row + tl.arange(0, HEIGHT)
        depth = k + tl.arange(0, DEPTH)
        there = (at < end)[:, None] & (depth < K)[None, :]
        return tl.load(x + at.to(tl.int64)[:, None] * K + depth[None, :], mask=there, other=0.0)


@triton.jit
def _columns_of(
    w,
    expert,
    k,
    column,
    K,
    columns,
    strides,
    HALVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP: tl.constexpr,
    ALTERNATING: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A step of columns: (HALVES * WIDTH, DEPTH) if DEEP, else (DEPTH, HALVES * WIDTH)."""
    if DESCRIBED:
        if DEEP:
            return w.load([expert, 0, column, k]).reshape(HALVES * WIDTH, DEPTH)
        elif ALTERNATING:
            return w.load([expert, k, 2 * column]).reshape(DEPTH, HALVES * WIDTH)
        else:
            return w.load([expert, k, 0, column]).reshape(DEPTH, HALVES * WIDTH)
    else:
        each = tl.arange(0, HALVES * WIDTH)
        half = each % 2 if ALTERNATING else each // WIDTH
        n = column + (each // 2 if ALTERNATING else each % WIDTH)
        depth = k + tl.arange(0, DEPTH)
        at_n = half.to(tl.int64) * strides[2] + n.to(tl.int64) * strides[3]
        at_k = expert.to(tl.int64) * strides[0] + depth.to(tl.int64) * strides[1]
        if DEEP:
            there = (n < columns)[:, None] & (depth < K)[None, :]
            return tl.load(w + at_n[:, None] + at_k[None, :], mask=there, other=0.0)
        else:
            there = (depth < K)[:, None] & (n < columns)[None, :]
            return tl.load(w + at_k[:, None] + at_n[None, :], mask=there, other=0.0)


@triton.jit
def _tile(
    x,
    w,
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
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP: tl.constexpr,
    ALTERNATING: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of the output. TURNED: weights @ rows.T."""
    if TURNED:
        total = tl.zeros((HALVES * WIDTH, HEIGHT), dtype=tl.float32)
    else:
        total = tl.zeros((HEIGHT, HALVES * WIDTH), dtype=tl.float32)
    for k in range(0, K, DEPTH):
        a = _rows_of(x, row, end, k, K, DESCRIBED, HEIGHT, DEPTH)
        b = _columns_of(
            w,
            expert,
            k,
            column,
            K,
            columns,
            strides,
            HALVES,
            DESCRIBED,
            DEEP,
            ALTERNATING,
            WIDTH,
            DEPTH,
        )
        if TURNED:
            total = tl.dot(b if DEEP else b.T, a.T, total, input_precision=PRECISION)
        else:
            total = tl.dot(a, b.T if DEEP else b, total, input_precision=PRECISION)

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
        ALTERNATING,
        TURNED,
        HEIGHT,
        WIDTH,
    )


@triton.jit
def _product(
    tall,
    short,
    w,
    bias,
    out,
    kept,
    tiles,
    count,
    K,
    columns,
    strides,
    bias_strides,
    places,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    HALVES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DEEP: tl.constexpr,
    ALTERNATING: tl.constexpr,
    PRECISION: tl.constexpr,
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
                w,
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
                bias_strides,
                places,
                alpha,
                limit,
                ACTIVATION,
                LIMITED,
                HALVES,
                DESCRIBED,
                DEEP,
                ALTERNATING,
                PRECISION,
                False,
                TALL,
                WIDTH,
                DEPTH,
            )
        elif height > 0:
            _tile(
                short,
                w,
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
                bias_strides,
                places,
                alpha,
                limit,
                ACTIVATION,
                LIMITED,
                HALVES,
                DESCRIBED,
                DEEP,
                ALTERNATING,
                PRECISION,
                True,
                SHORT,
                WIDTH,
                DEPTH,
            )
