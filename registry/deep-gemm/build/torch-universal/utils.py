"""The quantiser of activations."""

import torch
from torch import Tensor

from ._ops import ops, qualified

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def per_token_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Quantise each run of `gran_k` elements along the last dimension to float8_e4m3fn.

    scale = max(amax, 1e-4) / 448 in float32, rounded up to a power of two with `use_ue8m0`; code = x * (1 / scale).

    Args:
        x: (M, K) bfloat16, float16 or float32, any strides; the last run may be short.
        use_ue8m0: whether scales are powers of two.
        gran_k: elements that share a scale.

    Returns:
        Codes (M, K) float8_e4m3fn and scales (M, ceil(K / gran_k)) float32, both contiguous.

    Raises:
        TypeError: the dtype of `x`.
        ValueError: the shape of `x`, or `gran_k`.
    """
    result: tuple[Tensor, Tensor] = ops.per_token_cast_to_fp8.default(x, use_ue8m0, gran_k)
    return result


def _empty_outputs(x: Tensor, use_ue8m0: bool, gran_k: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001, FBT001 - a fake's
    if x.dtype not in _FLOATS:
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x: expected shape (M, K), got {tuple(x.shape)}")
    if gran_k < 1:
        raise ValueError(f"gran_k: expected a positive number, got {gran_k}")
    m, k = x.shape
    return (
        torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device),
        torch.empty((m, -(-k // gran_k)), dtype=torch.float32, device=x.device),
    )


@torch.library.custom_op(
    qualified("per_token_cast_to_fp8"),
    mutates_args=(),
    schema="(Tensor x, bool use_ue8m0, int gran_k) -> (Tensor, Tensor)",
)
def _per_token_cast_to_fp8(x: Tensor, use_ue8m0: bool, gran_k: int) -> tuple[Tensor, Tensor]:  # noqa: FBT001 - an op's
    codes, scales = _empty_outputs(x, use_ue8m0, gran_k)
    for block in range(scales.shape[1]):
        run = x[:, block * gran_k : (block + 1) * gran_k].to(torch.float32)
        amax = run.abs().amax(dim=1).clamp(min=1e-4)
        # A tensor, not a number: CUDA multiplies by the reciprocal of a number, which is one ulp away from dividing.
        scale = amax / torch.full_like(amax, 448.0)
        if use_ue8m0:
            scale = _round_up_to_power_of_two(scale)
        scales[:, block] = scale
        # What rounds beyond 448, which is all the reciprocal can bring about, is NaN to the cast of torch 2.6.
        scaled = (run * (1.0 / scale).unsqueeze(1)).clamp_(-448.0, 448.0)
        codes[:, block * gran_k : (block + 1) * gran_k] = scaled.to(torch.float8_e4m3fn)
    return codes, scales


_per_token_cast_to_fp8.register_fake(_empty_outputs)


def _round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """The smallest power of two not below each positive float32, within 2 ** -126 and 2 ** 127."""
    bits = scale.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).ne(0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
