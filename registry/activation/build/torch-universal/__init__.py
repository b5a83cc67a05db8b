"""Activation functions in plain PyTorch: alone, and gating the other half of a row.

Every function writes into `out` and returns it; `layers` has the same as modules that make their own output. Runs on
every device and float dtype, with torch 2.6 or later, under autograd and torch.compile.
"""

from . import layers
from .functions import (
    fatrelu_and_mul,
    gelu,
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh,
    gelu_tanh_and_mul,
    mul_and_silu,
    silu,
    silu_and_mul,
)

__all__ = [
    "fatrelu_and_mul",
    "gelu",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "layers",
    "mul_and_silu",
    "silu",
    "silu_and_mul",
]
