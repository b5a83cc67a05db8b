"""The activation quantiser, as an op of its own."""

import math
from typing import Any

import torch
from torch import Tensor

from ._ops import ops, qualified
from .arguments import check_float
from .tiles import SCALE_FLOOR, encode, gather, row_scale, spans, tile_side


def fp8_act_quant(x: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise each run of `block_size` elements along the last dimension to float8_e4m3fn.

    scale = amax / 448 in float32; code = x / max(scale, 1e-12), saturating. No gradient flows through either output.

    Args:
        x: (..., K) bfloat16, float16 or float32, any strides; K a multiple of `block_size`.
        block_size: elements that share a scale.

    Returns:
        Codes (..., K) float8_e4m3fn and scales (..., K / block_size) float32, both contiguous.

    Raises:
        TypeError: dtype of `x`.
        ValueError: shape of `x`, or `block_size`.
    """
    result: tuple[Tensor, Tensor] = ops.fp8_act_quant.default(x, block_size)
    return result


def _empty_outputs(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    check_float("x", x)
    if block_size < 1:
        raise ValueError(f"block_size: expected a positive number, got {block_size}")
    if x.ndim < 1 or x.shape[-1] % block_size:
        raise ValueError(f"x: expected last dimension to be a multiple of {block_size}, got shape {tuple(x.shape)}")
    scales = (*x.shape[:-1], x.shape[-1] // block_size)
    return (
        torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty(scales, dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op(
    qualified("fp8_act_quant"), mutates_args=(), schema="(Tensor x, int block_size) -> (Tensor, Tensor)"
)
def _fp8_act_quant(x: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    codes, scales = _empty_outputs(x, block_size)
    count, k = math.prod(x.shape[:-1]), x.shape[-1]
    flat_codes, flat_scales = codes.view(count, k), scales.view(count, k // block_size)
    table = x.unsqueeze(0) if x.ndim == 1 else x
    for r0, r1 in spans(0, count, tile_side()):
        rows = torch.arange(r0, r1, device=x.device)
        for block, (k0, k1) in enumerate(spans(0, k, block_size)):
            scale = row_scale(table, rows, k0, k1, mx=False)
            flat_scales[r0:r1, block] = scale
            divisor = scale.clamp_min(SCALE_FLOOR).unsqueeze(1)
            for p0, p1 in spans(k0, k1, tile_side()):
                flat_codes[r0:r1, p0:p1] = encode(gather(table, rows, p0, p1), divisor)
    return codes, scales


def _setup_context(ctx: Any, inputs: object, output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401, ARG001 - torch's
    ctx.mark_non_differentiable(*output)


def _backward(*_: object) -> tuple[None, None]:
    return None, None


_fp8_act_quant.register_fake(_empty_outputs)
_fp8_act_quant.register_autograd(_backward, setup_context=_setup_context)
