"""DeepGEMM: matmuls of two FP8 matrices, each of which the caller has quantised.

Both factors are pairs (codes, scales), and the result is written into a tensor that the caller brings:

=======  ========================  ==========================================
factor   codes                     scales
=======  ========================  ==========================================
a        float8_e4m3fn (M, K)      float32 (M, ceil(K / 128))
b        float8_e4m3fn (N, K)      float32 (ceil(N / 128), ceil(K / 128))
=======  ========================  ==========================================

    d[m, n] = sum over blocks of K: (sum over the block: codes_a[m, k] * codes_b[n, k]) * scale_a * scale_b

in float32, cast to the dtype of d at the end. Scales multiply; the last blocks of N and K may be short. Experts put
their number G in front of both parts of b. NaN in a row of a makes that row of d NaN. Nothing is differentiable.

Sources: DeepSeek-V3 technical report (arXiv:2412.19437), 3.3.2, for blocks of 128 along K and scales applied outside
the inner product. Names, and the order of arguments, are those of kernels-community/deep-gemm.

The reference build does all of this. Code that must also run on the published build (version 2) keeps to:

- codes contiguous, N a multiple of 8, K of 16; M a multiple of `m_alignment` where rows are grouped;
- on compute capability 10.x, scales that are powers of two: `per_token_cast_to_fp8(x, True)`, and
  `quantize_block_fp8(w, ue8m0=True)` of `kernel_loader.quantization`. Others are cut down to one without a word;
- one CUDA device a process, and an nvcc: kernels are compiled at the first call of a shape.

`kernel_loader.quantization` makes both kinds of pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch

__all__ = ["DeepGEMM", "GroupedMatmul", "Matmul", "PerTokenCast", "Quantized"]

Quantized: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Codes and scales."""


class Matmul(Protocol):
    """`fp8_fp4_gemm_nt`: one weight for all rows."""

    def __call__(self, a: Quantized, b: Quantized, d: torch.Tensor, *, compiled_dims: str = "nk") -> None:
        """The product d = a @ b.T, (M, K) x (N, K) -> (M, N), by the formula at the top of this module.

        Args:
            a: codes (M, K) and scales (M, ceil(K / 128)). M, N and K may be zero.
            b: codes (N, K) and scales (ceil(N / 128), ceil(K / 128)).
            d: (M, N) bfloat16, the last stride 1; every element is written, whatever stood there.
            compiled_dims: which of m, n and k the build may compile kernels for ("nk": M may change at no cost). The
                result is the same.

        Raises:
            TypeError: the dtype of an argument, or a factor that is no pair.
            ValueError: the shape, strides or device of an argument. (The published build raises RuntimeError.)
        """
        ...


class GroupedMatmul(Protocol):
    """`m_grouped_fp8_fp4_gemm_nt_contiguous`: rows sorted by expert, each expert's beginning at a block of its own."""

    def __call__(
        self,
        a: Quantized,
        b: Quantized,
        d: torch.Tensor,
        grouped_layout: torch.Tensor,
        *,
        compiled_dims: str = "nk",
    ) -> None:
        """The products d[m] = a[m] @ b[grouped_layout[m]].T, (M, K) x (G, N, K) -> (M, N).

        The rows are taken in blocks of `m_alignment`, of which the last may be short. Those of a block belong to one
        group, and come first in it; what remains of the block is padding, whose group is -1. A block may be all
        padding, and a group may have any number of blocks, in any order.

        Args:
            a: codes (M, K) and scales (M, ceil(K / 128)).
            b: codes (G, N, K) and scales (G, ceil(N / 128), ceil(K / 128)); G, N and K at least one.
            d: (M, N) bfloat16, the last stride 1. Rows of padding come out as zeros, whatever stands in a or stood
                in d.
            grouped_layout: (M,) int32, contiguous, the group of each row; negative for padding.
            compiled_dims: see `Matmul`.

        Raises:
            TypeError: the dtype of an argument, or a factor that is no pair.
            ValueError: the shape, strides or device of an argument, a group of G or more, or a block that is not as
                above. (The published build raises RuntimeError for shapes, and does not look at groups.)
        """
        ...


class PerTokenCast(Protocol):
    """`utils.per_token_cast_to_fp8`: the quantiser of activations."""

    def __call__(self, x: torch.Tensor, use_ue8m0: bool, gran_k: int = 128) -> Quantized:  # noqa: FBT001 - as published
        """Quantise each run of `gran_k` elements along the last dimension of `x`.

            scale = max(max(abs(x)), 1e-4) / 448, in float32; with `use_ue8m0` rounded up to a power of two
            code  = e4m3(x * (1 / scale))

        NaN stays NaN. Without `use_ue8m0`, NaN or an infinity makes the whole of its run NaN.

        Args:
            x: (M, K) bfloat16, float16 or float32; strides do not matter. The last run may be short.
            use_ue8m0: whether scales are powers of two.
            gran_k: elements that share a scale; `fp8_matmul` wants 128.

        Returns:
            Codes (M, K) float8_e4m3fn and scales (M, ceil(K / gran_k)) float32, both contiguous, neither
            differentiable.

        Raises:
            TypeError: the dtype of `x`.
            ValueError: the shape of `x`, or `gran_k` below one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DeepGEMM:
    """The entrypoints of `deep_gemm`.

    Attributes:
        fp8_matmul: one weight for all rows.
        grouped_fp8_matmul: rows sorted by expert.
        per_token_cast_to_fp8: the quantiser of activations.
        m_alignment: rows of a block of `grouped_fp8_matmul`; asked for once, when the kernel is loaded.
    """

    __kernel__: ClassVar = "deep_gemm"

    fp8_matmul: Matmul
    grouped_fp8_matmul: GroupedMatmul
    per_token_cast_to_fp8: PerTokenCast
    m_alignment: int
