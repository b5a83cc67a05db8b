"""FP8 with float32 scales: blocks of a weight, and groups along the rows of an activation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.quantization.codes import (
    E4M3_MAX,
    E8M0_DTYPES,
    as_float32,
    decode_e4m3,
    decode_e8m0,
    encode_e4m3,
    expect_dtype,
    shared_exponent,
)
from kernel_loader.quantization.groups import divide, expect_scales, join_groups, largest, split_groups


def quantize_block_fp8(
    w: Tensor, block_size: Sequence[int] = (128, 128), *, ue8m0: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise a weight with one scale a block (DeepSeek-V3, 3.3.2).

        scale = max(abs(w)) / 448 over the block, in float32; with `ue8m0` the smallest power of two not below that
        code  = e4m3(w / scale)

    A block of zeros has scale zero (with `ue8m0`, 2 ** -127), and keeps the signs of its zeros.

    Exact for w = code * scale where some code of each block is 448 in magnitude and the scale has at most 20
    significant bits and is at least 2 ** -117: quantising gives codes and scales back, and dequantising w. With
    `ue8m0`, for powers of two as scales and a code above 224. Elsewhere, for scales of at least 2 ** -126, an element
    is off by at most 2 ** -4 of itself or scale * 2 ** -10, whichever is more, and 2 ** -22 of itself.

    Args:
        w: (..., N, K), any floating-point dtype.
        block_size: [bn, bk]; the last blocks of N and K may be short.
        ue8m0: whether scales are powers of two, as Blackwell's FP8 kernels need them.

    Returns:
        Codes (..., N, K) float8_e4m3fn, and scales (..., ceil(N / bn), ceil(K / bk)) float32.

    Raises:
        TypeError: the dtype of `w`.
        ValueError: fewer than two dimensions, or `block_size`.
    """
    values = as_float32("w", w)
    if w.ndim < 2:
        raise ValueError(f"w: expected shape (..., N, K), got {tuple(w.shape)}")
    block_n, block_k = _sides(block_size)
    n, k = w.shape[-2:]
    padded = functional.pad(values, (0, -k % block_k, 0, -n % block_n))
    blocks = padded.reshape(*w.shape[:-2], -(-n // block_n), block_n, -(-k // block_k), block_k)
    scale = _scale(largest(blocks, (-3, -1)), ue8m0=ue8m0)
    codes = encode_e4m3(divide(blocks, scale)).flatten(-2).flatten(-3, -2)[..., :n, :k]
    return codes.contiguous(), scale.squeeze(-1).squeeze(-2)


def dequantize_block_fp8(
    codes: Tensor, scales: Tensor, block_size: Sequence[int] = (128, 128), dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values: code * scale of its block in float32, cast to `dtype` at the end.

    Args:
        codes: (..., N, K) float8_e4m3fn.
        scales: (..., ceil(N / bn), ceil(K / bk)) float32, or UE8M0 (uint8 or float8_e8m0fnu).
        block_size: [bn, bk].
        dtype: of the result.

    Returns:
        (..., N, K) in `dtype`.

    Raises:
        TypeError: a dtype.
        ValueError: the shape or device of `scales`, or `block_size`.
    """
    expect_dtype("codes", codes, torch.float8_e4m3fn)
    block_n, block_k = _sides(block_size)
    if codes.ndim < 2:
        raise ValueError(f"codes: expected shape (..., N, K), got {tuple(codes.shape)}")
    *leading, n, k = codes.shape
    shape = (*leading, -(-n // block_n), -(-k // block_k))
    expect_scales(scales, codes, shape, f"one for {block_n} x {block_k} of {tuple(codes.shape)}")
    rows = torch.arange(n, device=codes.device) // block_n
    columns = torch.arange(k, device=codes.device) // block_k
    return (decode_e4m3(codes) * _real(scales)[..., rows[:, None], columns]).contiguous().to(dtype)


def quantize_token_fp8(x: Tensor, group_size: int = 128, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise activations with one scale for each row and group along K; the formula is that of `quantize_block_fp8`.

    Args:
        x: (..., K), any floating-point dtype.
        group_size: elements that share a scale; the last group may be short.
        ue8m0: whether scales are powers of two.

    Returns:
        Codes (..., K) float8_e4m3fn, and scales (..., ceil(K / group_size)) float32.

    Raises:
        TypeError: the dtype of `x`.
        ValueError: no dimension, or `group_size`.
    """
    groups = split_groups("x", as_float32("x", x), group_size)
    scale = _scale(largest(groups), ue8m0=ue8m0)
    return join_groups(encode_e4m3(divide(groups, scale)), x.shape[-1]), scale.squeeze(-1)


def dequantize_token_fp8(
    codes: Tensor, scales: Tensor, group_size: int = 128, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The values: code * scale of its group in float32, cast to `dtype` at the end.

    Args:
        codes: (..., K) float8_e4m3fn.
        scales: (..., ceil(K / group_size)) float32, or UE8M0 (uint8 or float8_e8m0fnu).
        group_size: elements that share a scale.
        dtype: of the result.

    Returns:
        (..., K) in `dtype`.

    Raises:
        TypeError: a dtype.
        ValueError: the shape or device of `scales`, or `group_size`.
    """
    expect_dtype("codes", codes, torch.float8_e4m3fn)
    groups = split_groups("codes", decode_e4m3(codes), group_size)
    expect_scales(scales, codes, tuple(groups.shape[:-1]), f"one for {group_size} along K")
    return join_groups(groups * _real(scales).unsqueeze(-1), codes.shape[-1]).to(dtype)


def _sides(block_size: Sequence[int]) -> tuple[int, int]:
    if len(block_size) != 2 or min(block_size) < 1:
        raise ValueError(f"block_size: expected two positive numbers [N, K], got {list(block_size)}")
    return block_size[0], block_size[1]


def _scale(amax: Tensor, *, ue8m0: bool) -> Tensor:
    if ue8m0:
        return decode_e8m0(shared_exponent(amax, E4M3_MAX, "up"))
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number, which is one ulp away from dividing.
    return (amax / torch.full_like(amax, E4M3_MAX)).masked_fill(~amax.isfinite(), torch.nan)


def _real(scales: Tensor) -> Tensor:
    expect_dtype("scales", scales, torch.float32, *E8M0_DTYPES)
    return scales if scales.dtype == torch.float32 else decode_e8m0(scales)
