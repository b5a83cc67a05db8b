"""Microscaling (MX): groups of 32 along the last dimension, with a power of two as their scale."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernel_loader.quantization.codes import (
    E2M1_MAX,
    E4M3_MAX,
    E8M0_DTYPES,
    Rounding,
    as_float32,
    check_rounding,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    expect_dtype,
    pack_e2m1,
    shared_exponent,
    unpack_e2m1,
)
from kernel_loader.quantization.groups import expect_pairs, expect_scales, join_groups, largest, split_groups

MX_GROUP: Final = 32


def quantize_mxfp8(x: Tensor, rounding: Rounding = "down") -> tuple[Tensor, Tensor]:
    """Quantise to MXFP8 with e4m3 elements (OCP MX v1.0, 6.3).

        scale = 2 ** (floor(log2(max(abs(x)))) - 8) over the group, within 2 ** -127 and 2 ** 127
        code  = e4m3(x / scale)

    An element above 448 * scale, which the rule allows for, saturates. With `rounding="up"` none does: the scale is the
    smallest power of two with max(abs(x)) <= 448 * scale. A group of zeros has the smallest scale.

    Exact for x = code * scale where some code of each group is at least 256 in magnitude (with "up", above 224), whose
    scale is a power of two within 2 ** -127 and 2 ** 119. Elsewhere an element that does not saturate is off by at most
    2 ** -4 of itself or scale * 2 ** -10, whichever is more.

    Args:
        x: (..., K), any floating-point dtype; the last group may be short.
        rounding: of the scale, see above.

    Returns:
        Codes (..., K) float8_e4m3fn, and UE8M0 scales (..., ceil(K / 32)) uint8.

    Raises:
        TypeError: the dtype of `x`.
        ValueError: no dimension, or `rounding`.
    """
    scaled, exponent = _scaled(x, E4M3_MAX, rounding)
    return join_groups(encode_e4m3(scaled), x.shape[-1]), exponent


def dequantize_mxfp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values: code * scale of its group in float32, cast to `dtype` at the end.

    Args:
        codes: (..., K) float8_e4m3fn.
        scales: (..., ceil(K / 32)) uint8 or float8_e8m0fnu.
        dtype: of the result.

    Returns:
        (..., K) in `dtype`.

    Raises:
        TypeError: a dtype.
        ValueError: the shape or device of `scales`.
    """
    expect_dtype("codes", codes, torch.float8_e4m3fn)
    return _dequantized(codes, decode_e4m3(codes), scales, dtype)


def quantize_mxfp4(x: Tensor, rounding: Rounding = "down") -> tuple[Tensor, Tensor]:
    """Quantise to MXFP4 (OCP MX v1.0, 6.3).

        scale = 2 ** (floor(log2(max(abs(x)))) - 2) over the group, within 2 ** -127 and 2 ** 127
        code  = e2m1(x / scale)

    An element above 6 * scale saturates; it can be as large as 8 * scale. With `rounding="up"` none does: the scale is
    the smallest power of two with max(abs(x)) <= 6 * scale. A group of zeros has the smallest scale.

    Exact for x = code * scale where some code of each group is 4 or 6 in magnitude, whose scale is a power of two
    within 2 ** -127 and 2 ** 125. Elsewhere an element that does not saturate is off by at most a quarter of itself or
    scale / 4, whichever is more.

    Args:
        x: (..., K), any floating-point dtype, K even; the last group may be short.
        rounding: of the scale, see above.

    Returns:
        Two e2m1 codes a byte, the one with the lower k in the low four bits, (..., K / 2) uint8, and UE8M0 scales
        (..., ceil(K / 32)) uint8.

    Raises:
        TypeError: the dtype of `x`.
        ValueError: no dimension, an odd K, or `rounding`.
    """
    expect_pairs("x", x)
    scaled, exponent = _scaled(x, E2M1_MAX, rounding)
    return pack_e2m1(join_groups(encode_e2m1(scaled), x.shape[-1])), exponent


def dequantize_mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values: code * scale of its group in float32, cast to `dtype` at the end.

    Args:
        codes: (..., K / 2) uint8 or int8, two e2m1 codes a byte.
        scales: (..., ceil(K / 32)) uint8 or float8_e8m0fnu.
        dtype: of the result.

    Returns:
        (..., K) in `dtype`.

    Raises:
        TypeError: a dtype.
        ValueError: the shape or device of `scales`.
    """
    return _dequantized(codes, decode_e2m1(unpack_e2m1(codes)), scales, dtype)


def _scaled(x: Tensor, element_max: float, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """The groups of `x` over their scales, and the exponents of these."""
    check_rounding(rounding)
    groups = split_groups("x", as_float32("x", x), MX_GROUP)
    exponent = shared_exponent(largest(groups), element_max, rounding)
    return groups / decode_e8m0(exponent), exponent.squeeze(-1)


def _dequantized(codes: Tensor, values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    expect_dtype("scales", scales, *E8M0_DTYPES)
    groups = split_groups("codes", values, MX_GROUP)
    expect_scales(scales, codes, tuple(groups.shape[:-1]), f"one for {MX_GROUP} along K = {values.shape[-1]}")
    return join_groups(groups * decode_e8m0(scales).unsqueeze(-1), values.shape[-1]).to(dtype)
