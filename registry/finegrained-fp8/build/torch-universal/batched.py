"""Each row names its expert."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ._ops import ops, qualified
from .arguments import as_block_size, check_activations, check_indices, result_dtype
from .gradient import register_gradient
from .tiles import Segments, multiply, multiply_backward
from .weights import Weights, read_weights


def matmul_batched(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """C[s] = A[s] @ B[expert_ids[s]].T with A quantised on the way in, (S, K) x (E, N, K) -> (S, N).

    Args:
        A: (S, K) bfloat16, float16 or float32, any strides.
        B: (E, N, K) float8_e4m3fn, or (E, N, K / 2) int8 with two e2m1 codes a byte (MXFP4).
        Bs: scales as in `matmul_2d` with E in front; one scale a matrix is (E,) or (E, 1, 1).
        expert_ids: (S,) integers. An id of E or more is a sentinel: its row is not read and comes out as zeros.
        block_size: [block_n, block_k]; None or [N, K] for one scale a matrix.
        output_dtype: that of A if None.

    Returns:
        (S, N) in `output_dtype`. Gradient to A as in `matmul_2d`, exactly zero in the rows of sentinels.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, or a negative id.
    """
    result: Tensor = ops.matmul_batched.default(A, B, Bs, expert_ids, as_block_size(block_size), output_dtype)
    return result


def _check(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
) -> tuple[Weights, torch.dtype]:
    weights = read_weights(B, Bs, block_size, experts=True)
    check_activations(A, weights, ndim=2)
    check_indices("expert_ids", expert_ids, A.shape[0], "one for each row of A")
    return weights, result_dtype(A, output_dtype)


def _segments(expert_ids: Tensor, experts: int, device: torch.device) -> Segments:
    """The rows of each expert that has any; sentinels are in none."""
    if not expert_ids.numel():
        return []
    ids = expert_ids.to(device, torch.int64)
    if expert_ids.dtype == torch.uint64:
        ids = ids.masked_fill(ids < 0, experts)  # beyond int64, so certainly a sentinel
    lowest = int(ids.min())
    if lowest < 0:
        raise ValueError(f"expert_ids: expected ids >= 0 ({experts} and above being sentinels), got {lowest}")
    ids = ids.clamp(max=experts)
    counts = torch.bincount(ids, minlength=experts + 1).tolist()[:experts]
    members = ids.argsort(stable=True)
    ends = accumulate(counts)
    return [
        (expert, members[end - count : end])
        for expert, (count, end) in enumerate(zip(counts, ends, strict=True))
        if count
    ]


@torch.library.custom_op(
    qualified("matmul_batched"),
    mutates_args=(),
    schema="(Tensor A, Tensor B, Tensor Bs, Tensor expert_ids, int[]? block_size, ScalarType? output_dtype) -> Tensor",
)
def _matmul_batched(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    weights, dtype = _check(A, B, Bs, expert_ids, block_size, output_dtype)
    return multiply(A, weights, _segments(expert_ids, B.shape[0], A.device), dtype, None)


@_matmul_batched.register_fake
def _(
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    expert_ids: Tensor,
    block_size: list[int] | None,
    output_dtype: torch.dtype | None,
) -> Tensor:
    weights, dtype = _check(A, B, Bs, expert_ids, block_size, output_dtype)
    return A.new_empty((A.shape[0], weights.n), dtype=dtype)


@torch.library.custom_op(
    qualified("matmul_batched_backward"),
    mutates_args=(),
    schema="(Tensor grad, Tensor B, Tensor Bs, Tensor expert_ids, int[]? block_size, ScalarType dtype) -> Tensor",
)
def _matmul_batched_backward(
    grad: Tensor, B: Tensor, Bs: Tensor, expert_ids: Tensor, block_size: list[int] | None, dtype: torch.dtype
) -> Tensor:
    weights = read_weights(B, Bs, block_size, experts=True)
    return multiply_backward(grad, weights, _segments(expert_ids, B.shape[0], grad.device), dtype)


register_gradient("matmul_batched", frozen=3)
