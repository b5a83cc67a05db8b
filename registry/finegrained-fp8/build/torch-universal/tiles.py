"""Tiled products: the one place that multiplies, in temporaries of bounded size."""

import math
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from .weights import Weights

# No temporary is larger than this, whatever the shapes. (Row numbers, eight bytes a row, are not counted.)
MAX_TEMPORARY_BYTES: Final = 64 * 1024 * 1024

E4M3_MAX: Final = 448.0

# Keeps a row of zeros from being divided by zero.
SCALE_FLOOR: Final = 1e-12

# (expert, the numbers of its rows, int64); rows in no segment are never read.
Segments: TypeAlias = Iterable[tuple[int, Tensor]]


def tile_side() -> int:
    """Side of the largest square float32 tile; even, because two e2m1 codes share a byte."""
    return max(2, math.isqrt(MAX_TEMPORARY_BYTES // 4) // 2 * 2)


def spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """start:stop in pieces of at most `step`."""
    return ((low, min(low + step, stop)) for low in range(start, stop, step))


def gather(x: Tensor, rows: Tensor, start: int, stop: int) -> Tensor:
    """Columns start:stop of rows `rows` of `x`, counted over all its leading dimensions. (rows, columns) float32.

    Indexes the leading dimensions one by one: flattening them would copy the whole of an `x` with unusual strides.
    """
    return x[..., start:stop][torch.unravel_index(rows, x.shape[:-1])].to(torch.float32)


def row_scale(x: Tensor, rows: Tensor, start: int, stop: int, *, mx: bool) -> Tensor:
    """Largest magnitude / 448 of columns start:stop of each row, for MX rounded up to a power of two. (rows,) float32.

    NaN among the columns makes the scale NaN, or 2 ** 127 for MX, where only the codes carry it.
    """
    amax = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
    for piece in spans(start, stop, tile_side()):
        amax = torch.maximum(amax, gather(x, rows, *piece).abs_().amax(dim=1))
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number, which is one ulp away from dividing.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    return _round_up_to_power_of_two(scale) if mx else scale


def encode(values: Tensor, divisor: Tensor) -> Tensor:
    """`values` (rows, columns) over `divisor` (rows, 1) in float8_e4m3fn, saturating; NaN stays NaN."""
    # e4m3fn has no infinity: what would round beyond 448 is NaN to the cast of torch 2.6, and 448 to that of 2.13.
    return (values / divisor).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def multiply(x: Tensor, weights: Weights, segments: Segments, dtype: torch.dtype, static: Tensor | None) -> Tensor:
    """Quantised x @ B[expert].T over the rows of each segment, zeros in all others.

    x: (..., K), at least 2-D, float, any strides. static: one float32 that replaces the scales computed from `x`.
    Returns (..., N) in `dtype`, contiguous, and no view of anything.
    """
    result = torch.zeros((*x.shape[:-1], weights.n), dtype=dtype, device=x.device)
    out = result.view(math.prod(x.shape[:-1]), weights.n)
    for expert, members in segments:
        for rows in torch.split(members, tile_side()):
            for n0, n1 in spans(0, weights.n, tile_side()):
                tile = _product(x, rows, weights, expert, n0, n1, static)
                out[:, n0:n1].index_copy_(0, rows, tile.to(dtype))
    return result


def multiply_backward(grad: Tensor, weights: Weights, segments: Segments, dtype: torch.dtype) -> Tensor:
    """Upstream gradient @ dequantised B[expert] in float32 over the rows of each segment, zeros in all others.

    grad: (..., N), at least 2-D. Returns (..., K) in `dtype`, contiguous, and no view of anything.
    """
    side = tile_side()
    result = torch.zeros((*grad.shape[:-1], weights.k), dtype=dtype, device=grad.device)
    out = result.view(math.prod(grad.shape[:-1]), weights.k)
    for expert, members in segments:
        for rows in torch.split(members, side):
            for k0, k1 in spans(0, weights.k, side):
                tile = torch.zeros((rows.numel(), k1 - k0), dtype=torch.float32, device=grad.device)
                for n0, n1 in spans(0, weights.n, side):
                    tile.addmm_(gather(grad, rows, n0, n1), weights.dequantised(expert, n0, n1, k0, k1))
                out[:, k0:k1].index_copy_(0, rows, tile.to(dtype))
    return result


def _product(x: Tensor, rows: Tensor, weights: Weights, expert: int, n0: int, n1: int, static: Tensor | None) -> Tensor:
    """One tile of the output, (rows, n1 - n0) float32."""
    total = torch.zeros((rows.numel(), n1 - n0), dtype=torch.float32, device=x.device)
    for block, (k0, k1) in enumerate(spans(0, weights.k, weights.block_k)):
        if static is None:
            scale = row_scale(x, rows, k0, k1, mx=weights.mx).unsqueeze(1)
            divisor = scale.clamp_min(SCALE_FLOOR)
        else:
            scale = divisor = static
        # Codes first, scales after: an e4m3 code has four significant bits, so a product of two codes is exact even
        # where float32 matmuls run in TF32 or bf16 passes; codes times an fp32 scale would be rounded before they
        # were multiplied. The scales are constant over the block, so they can wait until its sum is there.
        partial = torch.zeros_like(total)
        for p0, p1 in spans(k0, k1, tile_side()):
            codes = encode(gather(x, rows, p0, p1), divisor).to(torch.float32)
            partial.addmm_(codes, weights.tile(expert, n0, n1, p0, p1).t())
        total += partial.mul_(scale).mul_(weights.column_scale(expert, n0, n1, block))
    return total


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Smallest UE8M0 value not below each positive float32, within 2 ** -126 and 2 ** 127."""
    bits = scale.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).ne(0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
