"""Matmuls on NVFP4 weights in plain PyTorch: slow, exact, and the definition of what a faster build must compute.

    pack, pack_swiglu     a weight, or two of a gated MLP, in NVFP4
    gemm, gemm_swiglu     the product with it, activations quantised on the way in, and the gated activation after it
    quantize_reference    what a weight becomes
    layers                the forwards of a linear layer and of a gated MLP

Runs on every device that has float8_e4m3fn, with torch 2.6 or later, and under torch.compile. Nothing is
differentiable.
"""

from . import layers
from .gemm import gemm, gemm_swiglu
from .pack import PackedWeight, pack, pack_swiglu
from .quantize import global_scale_for, quantize_reference
from .swizzle import swizzled_sf_shape

__all__ = [
    "PackedWeight",
    "gemm",
    "gemm_swiglu",
    "global_scale_for",
    "layers",
    "pack",
    "pack_swiglu",
    "quantize_reference",
    "swizzled_sf_shape",
]
