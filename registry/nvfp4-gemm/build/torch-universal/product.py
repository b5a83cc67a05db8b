"""The op that multiplies, in temporaries of bounded size."""

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ._ops import ops, qualified
from .quantize import quantize, scaled_values
from .swizzle import GROUP

# No temporary of the op is larger than this, whatever the shapes.
MAX_TEMPORARY_BYTES: Final = 64 * 1024 * 1024


def product(x: Tensor, codes: Tensor, scales: Tensor, activation_scale: Tensor | None) -> Tensor:
    """The product x @ (codes * scales).T, with `activation_scale` of the codes and scales of x instead of x.

    Args:
        x: (M, K) bfloat16.
        codes: (N, K / 2) uint8, two e2m1 codes a byte.
        scales: (N, K / 16) uint8, e4m3 by their bits.
        activation_scale: (1,) float32, the scale of the whole of x where it is quantised.

    Returns:
        (M, N) float32, not yet divided by the scales of whole tensors.
    """
    result: Tensor = ops.product.default(x, codes, scales, activation_scale)
    return result


def _empty_output(x: Tensor, codes: Tensor, scales: Tensor, activation_scale: Tensor | None) -> Tensor:  # noqa: ARG001
    return torch.empty((x.shape[0], codes.shape[0]), dtype=torch.float32, device=x.device)


@torch.library.custom_op(
    qualified("product"),
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scales, Tensor? activation_scale) -> Tensor",
)
def _product(x: Tensor, codes: Tensor, scales: Tensor, activation_scale: Tensor | None) -> Tensor:
    out = _empty_output(x, codes, scales, activation_scale).zero_()
    side = max(GROUP, math.isqrt(MAX_TEMPORARY_BYTES // 8) // GROUP * GROUP)
    for m0, m1 in _spans(0, x.shape[0], side):
        for k0, k1 in _spans(0, x.shape[1], side):
            left = x[m0:m1, k0:k1].to(torch.float32)
            if activation_scale is not None:
                left = scaled_values(*quantize(left, activation_scale))
            for n0, n1 in _spans(0, codes.shape[0], side):
                right = scaled_values(codes[n0:n1, k0 // 2 : k1 // 2], scales[n0:n1, k0 // GROUP : k1 // GROUP])
                out[m0:m1, n0:n1].addmm_(left, right.t())
    return out


_product.register_fake(_empty_output)


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """start:stop in pieces of at most `step`."""
    return ((low, min(low + step, stop)) for low in range(start, stop, step))
