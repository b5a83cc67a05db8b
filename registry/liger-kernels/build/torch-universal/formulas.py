"""What the layers compute: the norm and the gates."""

import torch
from torch import Tensor
from torch.nn import functional

from .wide import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm weight * x / sqrt(mean(x ** 2) + eps) over the last dimension, (..., H) -> (..., H) in the dtype of x.

    The mean is taken in float32, and what the weight multiplies is rounded to the dtype of x, as in the Llama models.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (arXiv:1910.07467).
    """
    if tuple(weight.shape) != tuple(x.shape[-1:]):
        raise ValueError(f"weight: expected shape {tuple(x.shape[-1:])}, got {tuple(weight.shape)}")
    large = wide(x)
    rstd = torch.rsqrt(large.square().mean(-1, keepdim=True) + eps)
    return (weight * (large * rstd).to(x.dtype)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply silu(gate) and up, the gate being rounded before that. Source: Shazeer (arXiv:2002.05202)."""
    return functional.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply gelu(gate), by tanh, and up, the gate being rounded before that. Source: as above."""
    return functional.gelu(gate, approximate="tanh") * up
