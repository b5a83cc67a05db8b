"""Rows sorted by expert."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._ops import ops, qualified
from .arguments import as_block_size, check_activations, check_indices, result_dtype
from .gradient import register_gradient
from .tiles import Segments, multiply, multiply_backward
from .weights import Weights, read_weights


def matmul_grouped(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """C[s] = A[s] @ B[e].T for s in offsets[e - 1] : offsets[e], A quantised on the way in.

    Args:
        A: (S, K) bfloat16, float16 or float32, sorted by expert, any strides.
        B: (E, N, K) float8_e4m3fn, or (E, N, K / 2) int8 with two e2m1 codes a byte (MXFP4).
        Bs: scales as in `matmul_2d` with E in front; one scale a matrix is (E,) or (E, 1, 1).
        offsets: (E,) integers, the row after the last of each expert. Rows at or past offsets[-1] are sentinels: they
            are not read and come out as zeros.
        tokens_per_expert: (E,) integers, how many rows each expert has; must agree with `offsets`.
        block_size: [block_n, block_k]; None or [N, K] for one scale a matrix.
        output_dtype: that of A if None.

    Returns:
        (S, N) in `output_dtype`. Gradient to A as in `matmul_2d`, exactly zero in the rows of sentinels.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, or offsets that decrease, pass S or disagree with `tokens_per_expert`.
    """
    result: Tensor = ops.matmul_grouped.default(
        A, B, Bs, offsets, tokens_per_expert, as_block_size(block_size), output_dtype
    )
    return result


def _check(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
) -> tuple[Weights, torch.dtype]:
    weights = read_weights(B, Bs, block_size, experts=True)
    check_activations(A, weights, ndim=2)
    check_indices("offsets", offsets, B.shape[0], "one for each expert of B")
    check_indices("tokens_per_expert", tokens_per_expert, B.shape[0], "one for each expert of B")
    return weights, result_dtype(A, output_dtype)


def _segments(offsets: Tensor, tokens_per_expert: Tensor, count: int, device: torch.device) -> Segments:
    """The rows of each expert that has any, once the two vectors are known to agree."""
    segments: list[tuple[int, Tensor]] = []
    start = 0
    for expert, (end, tokens) in enumerate(zip(offsets.tolist(), tokens_per_expert.tolist(), strict=True)):
        if not start <= end <= count:
            raise ValueError(f"offsets: expected offsets[{expert}] within {start} and S = {count}, got {end}")
        if end - start != tokens:
            raise ValueError(
                f"tokens_per_expert: expected {end - start} for expert {expert}, whose rows by offsets are "
                f"{start}:{end}, got {tokens}"
            )
        if tokens:
            segments.append((expert, torch.arange(start, end, device=device)))
        start = end
    return segments


@torch.library.custom_op(
    qualified("matmul_grouped"),
    mutates_args=(),
    schema="(Tensor A, Tensor B, Tensor Bs, Tensor offsets, Tensor tokens_per_expert, int[]? block_size,"
    " ScalarType? output_dtype) -> Tensor",
)
def _matmul_grouped(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    weights, dtype = _check(A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype)
    return multiply(A, weights, _segments(offsets, tokens_per_expert, A.shape[0], A.device), dtype, None)


@_matmul_grouped.register_fake
def _(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    weights, dtype = _check(A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype)
    return A.new_empty((A.shape[0], weights.n), dtype=dtype)


@torch.library.custom_op(
    qualified("matmul_grouped_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor B, Tensor Bs, Tensor offsets, Tensor tokens_per_expert, int[]? block_size,"
    " ScalarType dtype) -> Tensor",
)
def _matmul_grouped_backward(
    grad: Tensor,
    B: Tensor,
    Bs: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,
    block_size: list[int] | None,
    dtype: torch.dtype,
) -> Tensor:
    weights = read_weights(B, Bs, block_size, experts=True)
    segments = _segments(offsets, tokens_per_expert, grad.shape[0], grad.device)
    return multiply_backward(grad, weights, segments, dtype)


register_gradient("matmul_grouped", frozen=4)
