"""Fine-grained FP8: matmuls whose weights are stored in eight bits or fewer, with one scale a block.

Every entrypoint computes `C = A @ B.T` with `A` quantised on the way in, for these formats of `(B, Bs)`:

==========  ======================  ===========================================  =======================  ============
mode        B                       Bs                                           scales of A              block_size
==========  ======================  ===========================================  =======================  ============
block       float8_e4m3fn (N, K)    (ceil(N / bn), ceil(K / bk)), fp32 or UE8M0  one a row and bk of K    [bn, bk]
per-tensor  float8_e4m3fn (N, K)    one element, fp32 or UE8M0                   one a row                None, [N, K]
MXFP8       float8_e4m3fn (N, K)    (N, K / 32), UE8M0                           one a row and 32 of K    not looked at
MXFP4       int8 (N, K / 2)         (N, K / 32), UE8M0                           one a row and 32 of K    not looked at
==========  ======================  ===========================================  =======================  ============

- Experts put their number E in front: B (E, N, K), Bs (E, ...), one scale a matrix being (E,) or (E, 1, 1).
- UE8M0 is float8_e8m0fnu or the same exponent bytes as uint8: 2 ** (e - 127), 255 being NaN. Scales multiply codes.
- MXFP4 holds two e2m1 codes a byte, the one with the lower k in the low four bits.
- The MX formats are recognised by the shape and dtype of Bs before `block_size` is looked at; K is a multiple of 32.
  In block mode neither N nor K need be a multiple of its block: the last block is short.

Quantisation of A, in float32, for each run of K that shares a scale:

    scale = max(abs(a)) / 448            MX: rounded up to a power of two within 2 ** -126 and 2 ** 127
    code  = e4m3(clamp(a / max(scale, 1e-12), -448, 448))

and the product, in float32, cast to `output_dtype` at the end:

    C[s, n] = sum over blocks of K: (sum over the block: code(a) * code(b)) * scale(a) * scale(b)

NaN in a row of A makes that row of C NaN. The gradient goes straight through the quantiser: dA = dC @ (code(b) *
scale(b)) in float32, cast to the dtype of A. Weights, scales and indices are frozen and get none.

Sources: DeepSeek-V3 technical report (arXiv:2412.19437), 3.3.2, for blocks of 128 along K and scales applied outside
the inner product; OCP 8-bit Floating Point Specification for e4m3; OCP Microscaling Formats (MX) v1.0 for e2m1, E8M0
and groups of 32. Parameter names are those of kernels-community/finegrained-fp8.

The reference build does all of this. So do the published Triton builds (version 4) behind the guards that the manifest
puts around them (`kernel_loader.guards`), with these exceptions:

- Other errors tell what is wrong (AssertionError, NotImplementedError), and values of indices are not looked at:
  negative ids, and offsets that decrease, pass S or disagree, read and write elsewhere.
- Blocks are powers of two. UE8M0 scales 0 and 255 are zero and infinity, save where tensor cores decode them.
- Weights that are not contiguous are copied at each call; so are those of experts whose N or K is no multiple of a
  tile, which is the block, and 256 in the other formats. Store them otherwise where that counts.
- The gradient of weights of experts makes the host wait, once in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["BatchedFP8Matmul", "FP8ActQuant", "FP8Matmul", "FineGrainedFP8", "GroupedFP8Matmul"]


class FP8Matmul(Protocol):
    """`matmul_2d`: one weight for all rows."""

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        Bs: torch.Tensor,
        block_size: Sequence[int] | None,
        output_dtype: torch.dtype | None = None,
        activation_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """C = A @ B.T, (..., K) x (N, K) -> (..., N), by the formula at the top of this module.

        Args:
            A: (..., K) bfloat16, float16 or float32; any number of leading dimensions, none or empty ones included.
            B: (N, K) float8_e4m3fn, or (N, K / 2) int8 for MXFP4.
            Bs: float32 or UE8M0. Block: (ceil(N / block_n), ceil(K / block_k)); per-tensor: (), (1,) or (1, 1);
                MX: (N, K / 32), UE8M0 only.
            block_size: [block_n, block_k], in elements; None or [N, K] for per-tensor. Not looked at for MX.
            output_dtype: bfloat16, float16 or float32; that of A if None.
            activation_scale: one float that takes the place of every scale of A (static quantisation): the code is
                e4m3(clamp(a / activation_scale, -448, 448)), with no floor under the scale. Not for MX.

        Returns:
            (..., N) in `output_dtype`, contiguous. Differentiable in A.

        Raises:
            TypeError: the dtype of an argument, or a `block_size` that is no list of ints.
            ValueError: the shape or device of an argument, or `activation_scale` with MX weights.
        """
        ...


class FP8ActQuant(Protocol):
    """`fp8_act_quant`: the activation quantiser alone."""

    def __call__(self, x: torch.Tensor, block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise each run of `block_size` elements along the last dimension of `x`.

        scale = max(abs(x)) / 448 and code = e4m3(clamp(x / max(scale, 1e-12), -448, 448)), both in float32. A run of
        zeros has scale zero. NaN stays NaN, and makes the scale of its run NaN.

        Args:
            x: (..., K) bfloat16, float16 or float32, K a multiple of `block_size`; strides do not matter.
            block_size: elements that share a scale.

        Returns:
            Codes (..., K) float8_e4m3fn, and scales (..., K / block_size) float32; both contiguous, neither
            differentiable.

        Raises:
            TypeError: the dtype of `x`.
            ValueError: K not a multiple of `block_size`, or `block_size` below one.
        """
        ...


class BatchedFP8Matmul(Protocol):
    """`matmul_batched`: each row names its expert. For few rows, as in decoding."""

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        Bs: torch.Tensor,
        expert_ids: torch.Tensor,
        block_size: Sequence[int] | None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """C[s] = A[s] @ B[expert_ids[s]].T, (S, K) x (E, N, K) -> (S, N), by the formula at the top of this module.

        Args:
            A: (S, K) bfloat16, float16 or float32.
            B: (E, N, K) float8_e4m3fn, or (E, N, K / 2) int8 for MXFP4.
            Bs: float32 or UE8M0. Block: (E, ceil(N / block_n), ceil(K / block_k)); per-tensor: (E,) or (E, 1, 1);
                MX: (E, N, K / 32), UE8M0 only.
            expert_ids: (S,) of any integer dtype. An id of E or more is a sentinel, a row that belongs to an expert on
                another device: whatever stands in the row, it is not read, comes out as zeros, and gets a gradient of
                exactly zero, even from an upstream gradient that is NaN there.
            block_size: [block_n, block_k], in elements; None or [N, K] for per-tensor. Not looked at for MX.
            output_dtype: bfloat16, float16 or float32; that of A if None.

        Returns:
            (S, N) in `output_dtype`, contiguous. Differentiable in A.

        Raises:
            TypeError: the dtype of an argument, or a `block_size` that is no list of ints.
            ValueError: the shape or device of an argument, or a negative id.
        """
        ...


class GroupedFP8Matmul(Protocol):
    """`matmul_grouped`: rows sorted by expert. For many rows, as in prefill and training."""

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        Bs: torch.Tensor,
        offsets: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        block_size: Sequence[int] | None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """C[s] = A[s] @ B[e].T for s in offsets[e - 1] : offsets[e], by the formula at the top of this module.

        Args:
            A: (S, K) bfloat16, float16 or float32, sorted by expert.
            B: (E, N, K) float8_e4m3fn, or (E, N, K / 2) int8 for MXFP4.
            Bs: float32 or UE8M0. Block: (E, ceil(N / block_n), ceil(K / block_k)); per-tensor: (E,) or (E, 1, 1);
                MX: (E, N, K / 32), UE8M0 only.
            offsets: (E,) integers, the row after the last one of each expert: the inclusive cumulative sum of
                `tokens_per_expert`. Rows at or past offsets[-1] are sentinels: whatever stands in them, they are not
                read, come out as zeros, and get a gradient of exactly zero.
            tokens_per_expert: (E,) integers, rows of each expert; zero is fine.
            block_size: [block_n, block_k], in elements; None or [N, K] for per-tensor. Not looked at for MX.
            output_dtype: bfloat16, float16 or float32; that of A if None.

        Returns:
            (S, N) in `output_dtype`, contiguous. Differentiable in A.

        Raises:
            TypeError: the dtype of an argument, or a `block_size` that is no list of ints.
            ValueError: the shape or device of an argument, or offsets that decrease, pass S or disagree with
                `tokens_per_expert`.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FineGrainedFP8:
    """The entrypoints of `finegrained_fp8`."""

    __kernel__: ClassVar = "finegrained_fp8"

    fp8_matmul: FP8Matmul
    fp8_act_quant: FP8ActQuant
    batched_fp8_matmul: BatchedFP8Matmul
    grouped_fp8_matmul: GroupedFP8Matmul
