"""Attention with sinks in plain PyTorch, tile by tile: slow, exact, what a faster build must compute.

    flash_attn_func              sequences of one length
    flash_attn_qkvpacked_func    the same of one tensor
    flash_attn_varlen_func       sequences of their own lengths, packed
    flash_attn_with_kvcache      new keys and values go to a cache first
    flash_attn_combine           one attention out of several, each to a part of the keys

Runs on every device, with torch 2.6 or later, under autograd and torch.compile. Everything but `interface.py` is the
same in flash-attn2, flash-attn3 and vllm-flash-attn3.
"""

from .interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]
