"""Quantised number formats, their quantisers and dequantisers: what makes the weights of a test, or of a small model.

A quantiser takes a real tensor and returns codes and scales as the kernels of `kernel_loader.bundles` want them; the
dequantiser of the same name takes them back. They are written to be read and to be exact, not to be fast.

==================  ===========================  ==================================  ==============================
format              codes                        scales                              kernels
==================  ===========================  ==================================  ==============================
block FP8           float8_e4m3fn (..., N, K)    float32, one a block [bn, bk]       finegrained_fp8, deep_gemm
per-token FP8       float8_e4m3fn (..., K)       float32, one a row and group of K   activations of the same
MXFP8               float8_e4m3fn (..., K)       UE8M0, one for 32 along K           finegrained_fp8
MXFP4               two e2m1 a byte (..., K/2)   UE8M0, one for 32 along K           finegrained_fp8, mxfp4
NVFP4               two e2m1 a byte (..., K/2)   e4m3 for 16 along K, one float32    nvfp4_gemm
==================  ===========================  ==================================  ==============================

What holds for all of them:

- Input is of any floating-point dtype, any strides, any number of leading dimensions (experts, heads), on any device.
  It is taken as float32; so a float64 is rounded once before anything else happens.
- Codes are rounded to the nearest, ties to even, and saturate: nothing finite becomes an infinity or NaN.
- NaN or an infinity makes all elements that share its scale NaN, and nothing else.
- Sizes need not be multiples of a block or group: the last one is short.
- UE8M0 scales are uint8, because torch 2.6 has no float8_e8m0fnu; dequantisers take either.
- What the format can represent survives exactly, each function saying what that is; signs of zeros included.
- Nothing here is differentiable.

Sources: OCP 8-bit Floating Point Specification (OFP8) v1.0 for e4m3; OCP Microscaling Formats (MX) v1.0 for e2m1, E8M0,
MXFP8 and MXFP4; DeepSeek-V3 technical report (arXiv:2412.19437), 3.3.2, for blocks of 128; Pretraining Large Language
Models with NVFP4 (arXiv:2509.25149), appendix C, for NVFP4.
"""

from kernel_loader.quantization.codes import (
    decode_e2m1 as decode_e2m1,
    decode_e4m3 as decode_e4m3,
    decode_e8m0 as decode_e8m0,
    encode_e2m1 as encode_e2m1,
    encode_e4m3 as encode_e4m3,
    encode_e8m0 as encode_e8m0,
    pack_e2m1 as pack_e2m1,
    unpack_e2m1 as unpack_e2m1,
)
from kernel_loader.quantization.fp8 import (
    dequantize_block_fp8 as dequantize_block_fp8,
    dequantize_token_fp8 as dequantize_token_fp8,
    quantize_block_fp8 as quantize_block_fp8,
    quantize_token_fp8 as quantize_token_fp8,
)
from kernel_loader.quantization.mx import (
    dequantize_mxfp4 as dequantize_mxfp4,
    dequantize_mxfp8 as dequantize_mxfp8,
    quantize_mxfp4 as quantize_mxfp4,
    quantize_mxfp8 as quantize_mxfp8,
)
from kernel_loader.quantization.nvfp4 import (
    NVFP4 as NVFP4,
    dequantize_nvfp4 as dequantize_nvfp4,
    quantize_nvfp4 as quantize_nvfp4,
)
