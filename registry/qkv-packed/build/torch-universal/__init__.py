"""Attention with the projections of queries, keys and values packed into one matrix, in plain PyTorch.

    layers.PackedQKV          forward
    layers.PackedQKVLayout    the module, made of an attention module, and where its weights come from

Runs on every device and float dtype, with torch 2.6 or later, under autograd.
"""

from . import layers

__all__ = ["layers"]
