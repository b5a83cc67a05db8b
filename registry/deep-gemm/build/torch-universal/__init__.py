"""DeepGEMM's FP8 matmuls in plain PyTorch: slow, exact, and the definition of what a faster build must compute.

    fp8_fp4_gemm_nt                          d = a @ b.T
    m_grouped_fp8_fp4_gemm_nt_contiguous     d[m] = a[m] @ b[group of m].T
    get_mk_alignment_for_contiguous_layout   rows of a block of the latter
    utils.per_token_cast_to_fp8              the quantiser of activations

Factors are pairs of float8_e4m3fn codes and float32 scales, of blocks of 128. Runs on every device that has
float8_e4m3fn, with torch 2.6 or later, and under torch.compile. Nothing is differentiable.
"""

from . import utils
from .gemm import M_ALIGNMENT, fp8_fp4_gemm_nt, m_grouped_fp8_fp4_gemm_nt_contiguous

__all__ = [
    "fp8_fp4_gemm_nt",
    "get_mk_alignment_for_contiguous_layout",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "utils",
]


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows of a block of `m_grouped_fp8_fp4_gemm_nt_contiguous`."""
    return M_ALIGNMENT
