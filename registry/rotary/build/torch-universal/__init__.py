"""Rotary position embedding in plain PyTorch.

    apply_rotary                 turns pairs that lie in two tensors, into two others
    apply_rotary_transformers    turns queries and keys, as model libraries call it

Runs on every device and float dtype, with torch 2.6 or later, under autograd and torch.compile.
"""

from . import layers
from .rotate import apply_rotary, apply_rotary_transformers

__all__ = ["apply_rotary", "apply_rotary_transformers", "layers"]
