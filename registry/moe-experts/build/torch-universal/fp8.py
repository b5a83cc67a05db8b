"""Rows sorted by expert times one FP8 matrix an expert, the rows quantised on the way in."""

from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from ._ops import ops, qualified
from .autocast import without_autocast
from .grouped import grouped_sum, segments

E4M3_MAX: Final = 448.0

# Keeps a row of zeros from being divided by zero.
SCALE_FLOOR: Final = 1e-12


def grouped_linear_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    block_size: list[int],
    dtype: torch.dtype,
) -> Tensor:
    """As `grouped_linear`, in `dtype`, for weight (E, N, K) float8_e4m3fn with scale (E, ceil(N / bn), ceil(K / bk)).

    Each run of bk along a row of x is quantised first. Weight and scale are frozen; the gradient of x goes straight
    through the quantiser.
    """
    result: Tensor = ops.grouped_linear_fp8.default(x, weight, scale, bias, offsets, block_size, dtype)
    return result


def decode_scale(scale: Tensor) -> Tensor:
    """UE8M0 exponents as float32, 2 ** (e - 127), 255 being NaN (OCP MX v1.0, E8M0); float32 as it is."""
    if scale.dtype == torch.float32:
        return scale
    exponent = scale.view(torch.uint8).to(torch.int32)
    # e is the exponent field of the float32 itself, save at the ends: 2 ** -127 is subnormal there, and 255 with an
    # empty mantissa would be infinity.
    bits = (exponent << 23).masked_fill_(exponent == 0, 1 << 22).masked_fill_(exponent == 255, 0x7FC00000)
    return bits.view(torch.float32)


def _quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes as float32 and the scale of each row, (rows, K) -> (rows, K), (rows, 1)."""
    amax = x.abs().amax(1, keepdim=True)
    # A tensor, not a number: CUDA multiplies by the reciprocal of a number, which is one ulp away from dividing.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    # e4m3fn has no infinity: what would round beyond 448 is NaN to the cast of torch 2.6, and 448 to that of 2.13.
    codes = (x / scale.clamp_min(SCALE_FLOOR)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.float(), scale


@torch.library.custom_op(
    qualified("grouped_linear_fp8"),
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor offsets, int[] block_size,"
    " ScalarType dtype) -> Tensor",
)
@without_autocast
def _grouped_linear_fp8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    block_size: list[int],
    dtype: torch.dtype,
) -> Tensor:
    n, k = weight.shape[1:]
    real = decode_scale(scale)
    out = x.new_zeros((x.shape[0], n), dtype=dtype)
    for expert, rows in segments(offsets):
        columns = real[expert].repeat_interleave(block_size[0], dim=0)[:n]
        total = torch.zeros((rows.stop - rows.start, n), dtype=torch.float32, device=x.device)
        for block, (start, end) in enumerate(pairwise([*range(0, k, block_size[1]), k])):
            codes, row_scale = _quantise(x[rows, start:end].float())
            # Codes first, scales after: a product of two e4m3 codes is exact, even where float32 matmuls run in TF32.
            total += (codes @ weight[expert, :, start:end].float().t()) * row_scale * columns[:, block]
        if bias is not None:
            total += bias[expert].float()
        out[rows] = total
    return out


@_grouped_linear_fp8.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,  # noqa: ARG001 - the op's
    bias: Tensor | None,  # noqa: ARG001
    offsets: Tensor,  # noqa: ARG001
    block_size: list[int],  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]), dtype=dtype)


@torch.library.custom_op(
    qualified("grouped_linear_fp8_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor weight, Tensor scale, Tensor offsets, int[] block_size, ScalarType dtype) -> Tensor",
)
@without_autocast
def _grouped_linear_fp8_backward(
    grad: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, block_size: list[int], dtype: torch.dtype
) -> Tensor:
    n, k = weight.shape[1:]
    real = decode_scale(scale)
    out = grad.new_zeros((grad.shape[0], k), dtype=dtype)
    for expert, rows in segments(offsets):
        each = real[expert].repeat_interleave(block_size[0], dim=0)[:n].repeat_interleave(block_size[1], dim=1)[:, :k]
        out[rows] = grad[rows].float() @ (weight[expert].float() * each)
    return out


@_grouped_linear_fp8_backward.register_fake
def _(
    grad: Tensor,
    weight: Tensor,
    scale: Tensor,  # noqa: ARG001 - the op's
    offsets: Tensor,  # noqa: ARG001
    block_size: list[int],  # noqa: ARG001
    dtype: torch.dtype,
) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[2]), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401, ARG001 - torch's
    x, weight, scale, bias, offsets, ctx.block_size, _ = inputs
    ctx.save_for_backward(weight, scale, offsets)
    ctx.dtype = x.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    weight, scale, offsets = ctx.saved_tensors
    to_x = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = ops.grouped_linear_fp8_backward.default(grad, weight, scale, offsets, ctx.block_size, ctx.dtype)
    if ctx.needs_input_grad[3]:
        to_bias = grouped_sum(grad, offsets, ctx.bias_dtype)
    return to_x, None, None, to_bias, None, None, None


_grouped_linear_fp8.register_autograd(_backward, setup_context=_setup_context)
