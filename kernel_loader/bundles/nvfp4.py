"""NVFP4: matmuls on weights of four bits, whose activations are quantised to four bits on the way in.

A tensor in NVFP4 is e2m1 codes, an e4m3 scale for 16 along K, and one float32 for all of it:

    global_scale = 448 * 6 / max(max(abs(x)), 1e-12) over the tensor
    scale        = e4m3(max(abs(x)) / 6 * global_scale) over the group
    code         = e2m1(x * global_scale / scale), zero where the scale is
    element      = code * scale / global_scale

in float32, rounded to the nearest, ties to even, saturating. Other builds may take a reciprocal where a division stands
here, and resolve ties otherwise, so that an element next to a tie may come out as either neighbour. With NaN or an
infinity somewhere, nothing is promised of the whole tensor. Nothing is differentiable.

Sources: Pretraining Large Language Models with NVFP4 (arXiv:2509.25149), appendix C, for the format; the cuBLAS
documentation, 1D block scaling factors layout, for swizzled scales. Names, and the order of arguments, are those of
kernels-community/nvfp4-gemm.

The reference build does all of this on every device. Code that must also run on the published build (version 1) keeps
to: weights on a CUDA device of capability 10.0 or above, where `pack` puts them; N and K multiples of 32; at least one
row; and `quantize_reference` on the CPU. `kernel_loader.quantization.quantize_nvfp4` has the same format, with
1 / global_scale for what is called so there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "GEMM",
    "NVFP4GEMM",
    "GlobalScale",
    "Layers",
    "MakePacked",
    "Pack",
    "PackSwiGLU",
    "PackedWeight",
    "Quantize",
    "SwizzledShape",
]


class PackedWeight(Protocol):
    """`PackedWeight`: a weight (n, k).

    Attributes:
        qweight: (n, k / 2) uint8, two e2m1 codes a byte, the one with the lower k in the low four bits.
        sf: int32 of the shape that `swizzled_sf_shape` says: e4m3 scales in the tiles that tensor cores read. A tile is
            of 128 rows and 4 scales; row 32 * i + j of it, scale c, is byte 16 * j + 4 * i + c. Tiles follow each other
            along the columns first.
        global_scale: (1,) float32.
        n: rows.
        k: columns.
        swiglu: whether it is two weights, gates above what they open.
        sf_rowmajor: (n, k / 16) uint8, the same scales row by row; None where they are not there.
    """

    qweight: torch.Tensor
    sf: torch.Tensor
    global_scale: torch.Tensor
    n: int
    k: int
    swiglu: bool
    sf_rowmajor: torch.Tensor | None

    def to(self, device: str | torch.device) -> PackedWeight:
        """The same on another device."""
        ...


class MakePacked(Protocol):
    """`PackedWeight`, as what is called: a weight from what a checkpoint holds."""

    def __call__(
        self,
        qweight: torch.Tensor,
        sf: torch.Tensor,
        global_scale: torch.Tensor,
        n: int,
        k: int,
        swiglu: bool = False,  # noqa: FBT001, FBT002 - as published
        sf_rowmajor: torch.Tensor | None = None,
    ) -> PackedWeight:
        """Hold the parts; they are looked at when they are used."""
        ...


class Pack(Protocol):
    """`pack`: a weight in NVFP4."""

    def __call__(
        self,
        w: torch.Tensor,
        device: str | torch.device = ...,
        swiglu: bool = False,  # noqa: FBT001, FBT002 - as published
    ) -> PackedWeight:
        """Quantise a weight, rounded to bfloat16 first, by the formula at the top of this module.

        Args:
            w: (N, K) of any floating-point dtype, on any device, K a multiple of 16.
            device: where the packed weight shall lie. By default where the build computes: "cuda", and with the
                reference where `w` lies.
            swiglu: whether it is two weights, gates above what they open.

        Returns:
            The weight, with `sf_rowmajor`.

        Raises:
            TypeError: the dtype of `w`. (The published build raises ValueError.)
            ValueError: the shape of `w`.
        """
        ...


class PackSwiGLU(Protocol):
    """`pack_swiglu`: the two weights of a gated MLP as one."""

    def __call__(
        self,
        w_gate: torch.Tensor,
        w_up: torch.Tensor,
        device: str | torch.device = ...,
    ) -> PackedWeight:
        """Pack (N, K) and (N, K) as (2 * N, K), gates above, with one global scale; otherwise as `pack`.

        Raises:
            TypeError: a dtype.
            ValueError: a shape, or that the two are not alike.
        """
        ...


class GEMM(Protocol):
    """`gemm`, and `gemm_swiglu`."""

    def __call__(self, pw: PackedWeight, x: torch.Tensor) -> torch.Tensor:
        """The product x @ W.T, (..., K) -> (..., N); `gemm_swiglu` makes silu(gates) * what they open of it, N / 2.

        `x` is rounded to bfloat16 and quantised by the formula at the top of this module, one global scale for all of
        its rows; at most two rows are not quantised, where the weight has `sf_rowmajor`. Summed in float32, rounded to
        bfloat16; `gemm_swiglu` rounds silu, and the product with it, to bfloat16 once more.

        Args:
            pw: of `pack`, or of `pack_swiglu` for `gemm_swiglu`.
            x: (..., K) bfloat16, float16 or float32; any strides.

        Returns:
            bfloat16, contiguous.

        Raises:
            TypeError: a dtype.
            ValueError: the last dimension of `x`, a shape or a device within `pw`, or for `gemm_swiglu` a weight that
                is not two.
        """
        ...


class Quantize(Protocol):
    """`quantize_reference`: what a weight becomes."""

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        """Quantise and dequantise (N, K), K a multiple of 16, by the formula at the top, without rounding to bfloat16.

        Returns:
            (N, K) in the dtype of `w`.

        Raises:
            TypeError: the dtype of `w`.
            ValueError: the shape of `w`. (The published build raises RuntimeError.)
        """
        ...


class GlobalScale(Protocol):
    """`global_scale_for`: the scale of a whole tensor."""

    def __call__(self, w: torch.Tensor) -> torch.Tensor:
        """448 * 6 / max(max(abs(w)), 1e-12), (1,) float32, for a tensor of at least one element."""
        ...


class SwizzledShape(Protocol):
    """`swizzled_sf_shape`: the shape of `PackedWeight.sf`."""

    def __call__(self, rows: int, cols: int) -> tuple[int, int]:
        """(rows up to a multiple of 128, ceil(cols / 16 / 4)), for (rows, cols) elements."""
        ...


class Layers(Protocol):
    """`layers`: classes whose forward goes into a module of a model.

    Attributes:
        NVFP4Linear: x -> x @ W.T by `gemm`. The module has `weight`, `weight_sf` and `weight_global_scale`, which are
            qweight, sf and global_scale, `in_features`, `out_features`, and maybe `weight_sf_rowmajor`.
        NVFP4FusedSwiGLUMLP: x -> down_proj(act_fn(gate_proj(x)) * up_proj(x)). Where the module has
            `nvfp4_fused_qweight` (2 * N, K / 2) and `nvfp4_fused_sf` (2 * N, K / 16), gates above what they open, as
            qweight and sf_rowmajor, and `nvfp4_fused_alpha` (2 * N,) float32, 1 / global_scale of each row, at most two
            rows of x are multiplied with these instead, not quantised, with silu for act_fn.
    """

    NVFP4Linear: type[nn.Module]
    NVFP4FusedSwiGLUMLP: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class NVFP4GEMM:
    """The entrypoints of `nvfp4_gemm`."""

    __kernel__: ClassVar = "nvfp4_gemm"

    PackedWeight: MakePacked
    pack: Pack
    pack_swiglu: PackSwiGLU
    gemm: GEMM
    gemm_swiglu: GEMM
    quantize_reference: Quantize
    global_scale_for: GlobalScale
    swizzled_sf_shape: SwizzledShape
    layers: Layers
