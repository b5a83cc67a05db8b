"""Codes: numbers of four and eight bits, to and from float32."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from kernel_loader.quantization.groups import expect_pairs

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
E8M0_NAN: Final = 255

E8M0_DTYPES: Final = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))

Rounding = Literal["down", "up"]

# By code: one bit of sign, two of exponent, one of mantissa (OCP MX v1.0, 5.3.3).
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Halfway between two codes; a tie goes to the even one: the lower in the first row, the upper in the second.
_TIES_DOWN: Final = (0.25, 1.25, 2.5, 5.0)
_TIES_UP: Final = (0.75, 1.75, 3.5)

_MANTISSA: Final = (1 << 23) - 1


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest float8_e4m3fn, ties to even; infinities and all beyond 448 become 448; NaN stays NaN.

    Args:
        x: any shape and floating-point dtype, taken as float32.

    Returns:
        float8_e4m3fn of the same shape.

    Raises:
        TypeError: the dtype of `x`.
    """
    # e4m3fn has no infinity: what would round beyond 448 is NaN to the cast of torch 2.6, and 448 to that of 2.13.
    return as_float32("x", x).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor) -> Tensor:
    """The values of float8_e4m3fn codes, or of their bits as uint8, in float32; exact.

    Raises:
        TypeError: the dtype of `codes`.
    """
    expect_dtype("codes", codes, torch.float8_e4m3fn, torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 code, ties to even; infinities and all beyond 6 become 6; NaN, which e2m1 has not, becomes zero.

    Args:
        x: any shape and floating-point dtype, taken as float32.

    Returns:
        uint8 of the same shape, one code within 0 and 15 an element; 8 is minus zero.

    Raises:
        TypeError: the dtype of `x`.
    """
    x = as_float32("x", x)
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for halfway in _TIES_DOWN:
        code += magnitude > halfway
    for halfway in _TIES_UP:
        code += magnitude >= halfway
    code += torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(x.isnan(), 0)


def decode_e2m1(codes: Tensor) -> Tensor:
    """The values of e2m1 codes in float32; exact.

    Args:
        codes: uint8 of any shape, one code an element; the high four bits are not looked at.

    Raises:
        TypeError: the dtype of `codes`.
    """
    expect_dtype("codes", codes, torch.uint8)
    return torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)[(codes & 0xF).long()]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Two codes a byte along the last dimension, the first in the low four bits: (..., K) -> (..., K / 2) uint8.

    Raises:
        TypeError: the dtype of `codes`.
        ValueError: an odd K.
    """
    expect_dtype("codes", codes, torch.uint8)
    expect_pairs("codes", codes)
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The codes of packed bytes, one an element: (..., K / 2) uint8 or int8 -> (..., K) uint8.

    Raises:
        TypeError: the dtype of `packed`.
        ValueError: no dimension to unpack along.
    """
    expect_dtype("packed", packed, torch.uint8, torch.int8)
    if packed.ndim < 1:
        raise ValueError("packed: expected at least one dimension, got shape ()")
    octets = packed.view(torch.uint8)
    return torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(-2)


def encode_e8m0(scales: Tensor, rounding: Rounding = "up") -> Tensor:
    """Exponents of powers of two: 2 ** (code - 127), within 2 ** -127 and 2 ** 127; 255 for NaN and infinity.

    Args:
        scales: positive, any shape and floating-point dtype, taken as float32. Zero becomes 2 ** -127.
        rounding: "up" to the smallest power of two that is not below, "down" to the largest that is not above.

    Returns:
        uint8 of the same shape.

    Raises:
        TypeError: the dtype of `scales`.
        ValueError: `rounding`.
    """
    check_rounding(rounding)
    bits = as_float32("scales", scales).contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & _MANTISSA
    if rounding == "up":
        # 2 ** -127 itself is a subnormal float32, with half of the mantissa's range.
        exponent = exponent + (mantissa > torch.where(exponent == 0, 1 << 22, 0))
    return exponent.clamp(max=254).masked_fill(~scales.isfinite(), E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """2 ** (code - 127) in float32, 255 being NaN; exact.

    Args:
        codes: uint8 or float8_e8m0fnu of any shape.

    Raises:
        TypeError: the dtype of `codes`.
    """
    expect_dtype("codes", codes, *E8M0_DTYPES)
    exponent = codes.view(torch.uint8).to(torch.int32)
    # The code is the exponent field of the float32, save at the ends: code 0 is subnormal, and 255 would be infinity.
    bits = (exponent << 23).masked_fill_(exponent == 0, 1 << 22).masked_fill_(exponent == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)


def shared_exponent(amax: Tensor, largest: float, rounding: Rounding) -> Tensor:
    """E8M0 code of a scale for numbers up to `amax`, in a format whose largest number is `largest`.

    "down" is floor(log2(amax)) - floor(log2(largest)); "up" the smallest scale that brings amax to at most `largest`.
    Taken from the bits, so that no logarithm or quotient is rounded.

    Args:
        amax: float32, not negative.
        largest: a normal float32.
        rounding: see above.

    Returns:
        uint8 of the same shape; 255 where amax is not finite.
    """
    of_largest = torch.tensor(largest, dtype=torch.float32).view(torch.int32).item()
    bits = amax.contiguous().view(torch.int32)
    exponent = (bits >> 23) - ((int(of_largest) >> 23) - 127)
    if rounding == "up":
        exponent = exponent + ((bits & _MANTISSA) > (int(of_largest) & _MANTISSA))
    return exponent.clamp(0, 254).masked_fill(~amax.isfinite(), E8M0_NAN).to(torch.uint8)


def as_float32(name: str, x: Tensor) -> Tensor:
    """`x` in float32, without a gradient.

    Raises:
        TypeError: `x` is not of a floating-point dtype.
    """
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name}: expected a floating-point dtype, got {x.dtype}")
    return x.detach().to(torch.float32)


def expect_dtype(name: str, x: Tensor, *dtypes: torch.dtype) -> None:
    """TypeError unless `x` is of one of the dtypes."""
    if x.dtype not in dtypes:
        listed = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(f"{name}: expected {listed}, got {x.dtype}")


def check_rounding(rounding: str) -> None:
    """ValueError unless it is one of the two."""
    if rounding not in ("down", "up"):
        raise ValueError(f'rounding: expected "down" or "up", got {rounding!r}')
