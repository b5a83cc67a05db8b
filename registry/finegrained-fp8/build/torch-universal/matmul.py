"""One weight for all rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._ops import ops, qualified
from .arguments import as_block_size, check_activations, result_dtype
from .gradient import register_gradient
from .tiles import Segments, multiply, multiply_backward
from .weights import Weights, read_weights


def matmul_2d(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,
    activation_scale: Tensor | None = None,
) -> Tensor:
    """C = A @ B.T with A quantised on the way in, (..., K) x (N, K) -> (..., N).

    Args:
        A: (..., K) bfloat16, float16 or float32, any strides.
        B: (N, K) float8_e4m3fn, or (N, K / 2) int8 with two e2m1 codes a byte (MXFP4).
        Bs: scales, float32 or UE8M0 (float8_e8m0fnu or uint8): (ceil(N / block_n), ceil(K / block_k)); one element for
            the whole matrix; or UE8M0 (N, K / 32) for MX, whatever `block_size`.
        block_size: [block_n, block_k]; None or [N, K] for one scale a matrix.
        output_dtype: that of A if None.
        activation_scale: one float; A is divided by it instead of by scales computed from A. Not for MX.

    Returns:
        (..., N) in `output_dtype`. Gradient to A: dC @ dequantised B, straight through the quantiser; none to the rest.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, or `activation_scale` with MX weights.
    """
    result: Tensor = ops.matmul_2d.default(A, B, Bs, as_block_size(block_size), output_dtype, activation_scale)
    return result


def _check(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
    activation_scale: Tensor | None,
) -> tuple[Weights, torch.dtype]:
    weights = read_weights(B, Bs, block_size, experts=False)
    check_activations(A, weights)
    if activation_scale is not None:
        if not activation_scale.dtype.is_floating_point:
            raise TypeError(f"activation_scale: expected a floating-point dtype, got {activation_scale.dtype}")
        if activation_scale.numel() != 1:
            raise ValueError(f"activation_scale: expected one element, got shape {tuple(activation_scale.shape)}")
        if weights.mx:
            raise ValueError("activation_scale: expected None for MX weights (scales of 32 along K), got a tensor")
    return weights, result_dtype(A, output_dtype)


def _all_rows(x: Tensor) -> Segments:
    count = math.prod(x.shape[:-1])
    return [(0, torch.arange(count, device=x.device))] if count else []


@torch.library.custom_op(
    qualified("matmul_2d"),
    mutates_args=(),
    schema="(Tensor A, Tensor B, Tensor Bs, int[]? block_size, ScalarType? output_dtype, Tensor? activation_scale)"
    " -> Tensor",
)
def _matmul_2d(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
    activation_scale: Tensor | None,
) -> Tensor:
    weights, dtype = _check(A, B, Bs, block_size, output_dtype, activation_scale)
    static = None if activation_scale is None else activation_scale.to(A.device, torch.float32).reshape(())
    x = A.unsqueeze(0) if A.ndim == 1 else A
    result = multiply(x, weights, _all_rows(x), dtype, static)
    return result[0].clone() if A.ndim == 1 else result


@_matmul_2d.register_fake
def _(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
    activation_scale: Tensor | None,
) -> Tensor:
    weights, dtype = _check(A, B, Bs, block_size, output_dtype, activation_scale)
    return A.new_empty((*A.shape[:-1], weights.n), dtype=dtype)


@torch.library.custom_op(
    qualified("matmul_2d_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor B, Tensor Bs, int[]? block_size, ScalarType dtype) -> Tensor",
)
def _matmul_2d_backward(
    grad: Tensor, B: Tensor, Bs: Tensor, block_size: list[int] | None, dtype: torch.dtype
) -> Tensor:
    weights = read_weights(B, Bs, block_size, experts=False)
    g = grad.unsqueeze(0) if grad.ndim == 1 else grad
    result = multiply_backward(g, weights, _all_rows(g), dtype)
    return result[0].clone() if grad.ndim == 1 else result


register_gradient("matmul_2d", frozen=2)
