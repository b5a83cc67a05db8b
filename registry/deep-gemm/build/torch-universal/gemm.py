"""The two products, and the tiles that they are computed in."""

import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from ._ops import ops, qualified, without_autocast
from .arguments import check_grouped, check_plain

# Sides of the blocks that share a scale, along N and K.
BLOCK: Final = 128

M_ALIGNMENT: Final = 128

# No temporary is larger than this, whatever the shapes.
MAX_TEMPORARY_BYTES: Final = 64 * 1024 * 1024

Quantized: TypeAlias = tuple[Tensor, Tensor]


def fp8_fp4_gemm_nt(a: Quantized, b: Quantized, d: Tensor, *, compiled_dims: str = "nk") -> None:
    """The product d = a @ b.T, (M, K) x (N, K) -> (M, N).

    Args:
        a: codes (M, K) float8_e4m3fn and scales (M, ceil(K / 128)) float32.
        b: codes (N, K) float8_e4m3fn and scales (ceil(N / 128), ceil(K / 128)) float32.
        d: (M, N) bfloat16, written whole.
        compiled_dims: not looked at; nothing is compiled.

    Raises:
        TypeError: a dtype, or a factor that is no pair.
        ValueError: a shape, strides or a device.
    """
    del compiled_dims
    ops.fp8_gemm_nt.default(*pair("a", a), *pair("b", b), d)


def m_grouped_fp8_fp4_gemm_nt_contiguous(
    a: Quantized, b: Quantized, d: Tensor, grouped_layout: Tensor, *, compiled_dims: str = "nk"
) -> None:
    """The products d[m] = a[m] @ b[grouped_layout[m]].T; rows of negative groups are zeros.

    Args:
        a: codes (M, K) float8_e4m3fn and scales (M, ceil(K / 128)) float32.
        b: codes (G, N, K) float8_e4m3fn and scales (G, ceil(N / 128), ceil(K / 128)) float32.
        d: (M, N) bfloat16, written whole.
        grouped_layout: (M,) int32. Within each 128 rows, those of one group come first and negative numbers after.
        compiled_dims: not looked at; nothing is compiled.

    Raises:
        TypeError: a dtype, or a factor that is no pair.
        ValueError: a shape, strides, a device, or the order of the groups.
    """
    del compiled_dims
    ops.m_grouped_fp8_gemm_nt.default(*pair("a", a), *pair("b", b), d, grouped_layout)


def pair(name: str, factor: object) -> Quantized:
    """The two tensors of a factor."""
    if not isinstance(factor, (tuple, list)) or len(factor) != 2 or not all(isinstance(x, Tensor) for x in factor):
        raise TypeError(f"{name}: expected a pair of tensors (codes, scales), got {type(factor).__name__}")
    return factor[0], factor[1]


@torch.library.custom_op(
    qualified("fp8_gemm_nt"),
    mutates_args=("d",),
    schema="(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) d) -> ()",
)
@without_autocast
def _gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor) -> None:
    check_plain(a, a_scale, b, b_scale, d)
    _multiply_into(d, a, a_scale, b, b_scale, 0, a.shape[0])


@_gemm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor) -> None:
    check_plain(a, a_scale, b, b_scale, d)


@torch.library.custom_op(
    qualified("m_grouped_fp8_gemm_nt"),
    mutates_args=("d",),
    schema="(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor(a!) d, Tensor grouped_layout) -> ()",
)
@without_autocast
def _grouped_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    check_grouped(a, a_scale, b, b_scale, d, grouped_layout)
    groups = grouped_layout.tolist()
    d.zero_()
    for first, last, group in _runs(groups, b.shape[0]):
        _multiply_into(d, a, a_scale, b[group], b_scale[group], first, last)


@_grouped_gemm.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    check_grouped(a, a_scale, b, b_scale, d, grouped_layout)


def _runs(groups: list[int], count: int) -> list[tuple[int, int, int]]:
    """(first row, row after the last, group) of the rows of each block that are not padding."""
    runs = []
    for first in range(0, len(groups), M_ALIGNMENT):
        block = groups[first : first + M_ALIGNMENT]
        group = block[0]
        rows = next((row for row, other in enumerate(block) if other != group), len(block)) if group >= 0 else 0
        stray = next((row for row in range(rows, len(block)) if block[row] >= 0), None)
        if stray is not None:
            raise ValueError(
                f"grouped_layout: expected one group and then -1 within rows {first}:{first + len(block)}, got "
                f"{block[stray]} in row {first + stray} after {block[stray - 1]}"
            )
        if group >= count:
            raise ValueError(f"grouped_layout: expected groups below G = {count}, got {group} in row {first}")
        if rows:
            runs.append((first, first + rows, group))
    return runs


def _multiply_into(d: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: int, last: int) -> None:
    """Rows first:last of d from the same rows of a. Tiles along N end where the blocks of b do."""
    side = max(BLOCK, math.isqrt(MAX_TEMPORARY_BYTES // 4) // BLOCK * BLOCK)
    for m0, m1 in _spans(first, last, side):
        for n0, n1 in _spans(0, b.shape[0], side):
            total = torch.zeros((m1 - m0, n1 - n0), dtype=torch.float32, device=d.device)
            columns = torch.arange(n0, n1, device=d.device) // BLOCK
            for block, (k0, k1) in enumerate(_spans(0, a.shape[1], BLOCK)):
                # Codes first, scales after: a product of two e4m3 codes is exact even where float32 matmuls run in
                # TF32 or bf16 passes.
                partial = a[m0:m1, k0:k1].to(torch.float32) @ b[n0:n1, k0:k1].to(torch.float32).t()
                total += partial.mul_(a_scale[m0:m1, block, None]).mul_(b_scale[columns, block])
            d[m0:m1, n0:n1] = total.to(d.dtype)


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """start:stop in pieces of at most `step`."""
    return ((low, min(low + step, stop)) for low in range(start, stop, step))
