"""NVFP4: groups of 16 along the last dimension with an e4m3 scale, and one float32 for the whole tensor."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.quantization.codes import (
    E2M1_MAX,
    E4M3_MAX,
    as_float32,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    expect_dtype,
    pack_e2m1,
    unpack_e2m1,
)
from kernel_loader.quantization.groups import divide, expect_pairs, expect_scales, join_groups, largest, split_groups

NVFP4_GROUP: Final = 16


class NVFP4(NamedTuple):
    """A tensor in NVFP4: element = code * scale of its group * global_scale.

    Attributes:
        codes: (..., K / 2) uint8, two e2m1 codes a byte, the one with the lower k in the low four bits.
        scales: (..., ceil(K / 16)) float8_e4m3fn, row-major.
        global_scale: () float32. It multiplies; kernels that divide hold 1 / global_scale.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor


def quantize_nvfp4(x: Tensor) -> NVFP4:
    """Quantise to NVFP4 (arXiv:2509.25149, appendix C, with the tensor's scale stored as what multiplies).

        global_scale = max(abs(x)) / (448 * 6) over the finite elements, in float32
        scale        = e4m3(max(abs(x)) / 6 / global_scale) over the group
        code         = e2m1(x / (scale * global_scale))

    Scales are rounded to the nearest, so that the largest elements of a group may saturate. A group whose scale rounds
    to zero becomes zeros, which keep their signs.

    Exact for x = code * scale * global_scale where some code of each group is 6 in magnitude, some scale is 448, and
    global_scale has at most 17 significant bits and is at least 2 ** -100.

    Args:
        x: (..., K), any floating-point dtype, K even; the last group may be short.

    Raises:
        TypeError: the dtype of `x`.
        ValueError: no dimension, or an odd K.
    """
    values = as_float32("x", x)
    expect_pairs("x", x)
    groups = split_groups("x", values, NVFP4_GROUP)
    of_all = largest(values.masked_fill(~values.isfinite(), 0.0).reshape(1, -1)).reshape(())
    # Tensors, not numbers: CUDA multiplies by the reciprocal of a number, which is one ulp away from dividing.
    global_scale = of_all / torch.full_like(of_all, E4M3_MAX * E2M1_MAX)
    amax = largest(groups)
    wanted = divide(amax / torch.full_like(amax, E2M1_MAX), global_scale)
    scales = encode_e4m3(wanted.masked_fill(~amax.isfinite(), torch.nan))
    codes = encode_e2m1(divide(groups, decode_e4m3(scales) * global_scale))
    return NVFP4(pack_e2m1(join_groups(codes, x.shape[-1])), scales.squeeze(-1), global_scale)


def dequantize_nvfp4(codes: Tensor, scales: Tensor, global_scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values: code * (scale of its group * global_scale) in float32, cast to `dtype` at the end.

    Args:
        codes: (..., K / 2) uint8 or int8, two e2m1 codes a byte.
        scales: (..., ceil(K / 16)) float8_e4m3fn, or its bits as uint8; row-major.
        global_scale: one float32.
        dtype: of the result.

    Returns:
        (..., K) in `dtype`.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or a device.
    """
    expect_dtype("scales", scales, torch.float8_e4m3fn, torch.uint8)
    values = decode_e2m1(unpack_e2m1(codes))
    groups = split_groups("codes", values, NVFP4_GROUP)
    expect_scales(scales, codes, tuple(groups.shape[:-1]), f"one for {NVFP4_GROUP} along K = {values.shape[-1]}")
    expect_dtype("global_scale", global_scale, torch.float32)
    if global_scale.numel() != 1:
        raise ValueError(f"global_scale: expected one element, got shape {tuple(global_scale.shape)}")
    scale = decode_e4m3(scales) * global_scale.reshape(())
    return join_groups(groups * scale.unsqueeze(-1), values.shape[-1]).to(dtype)
