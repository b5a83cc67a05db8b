"""Matmuls of experts on MXFP4 weights in plain PyTorch: slow, exact, and what a faster build must compute.

    matmul_ogs      the product, with rows gathered for experts and scattered back, and what it is configured with
    routing         which rows go to which experts
    swiglu          the gated activation of GPT-OSS, alone and for the product
    tensor          tensors of codes, and how they lie in memory (tensor_details.layout)

Runs on every device, with torch 2.6 or later, and under torch.compile. Nothing is differentiable.
"""

from . import matmul_ogs, numerics, routing, swiglu, tensor, tensor_details

__all__ = ["matmul_ogs", "numerics", "routing", "swiglu", "tensor", "tensor_details"]
