"""Attention in plain PyTorch, tile by tile: slow, exact, the definition of what a faster build computes.

    flash_attn_func            sequences of one length; _kvpacked, _qkvpacked
    flash_attn_varlen_func     sequences of their own lengths, packed; _kvpacked, _qkvpacked
    flash_attn_with_kvcache    new keys and values go to a cache first

Runs on every device, with torch 2.6 or later, under autograd and torch.compile. Everything but `interface.py` is the
same in flash-attn2, flash-attn3 and vllm-flash-attn3.
"""

from .interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
