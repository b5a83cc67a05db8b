"""Attention to a cache in blocks, in plain PyTorch: slow, exact, and the definition of what a faster build computes.

    reshape_and_cache     keys and values go to their slots; _flash, in another layout
    paged_attention_v1    one query a sequence; _v2, in partitions
    copy_blocks           within caches
    swap_blocks           from one cache to another
    convert_fp8           a cache to e4m3 codes, or back

Runs on every device that has float8_e4m3fn, with torch 2.6 or later, under torch.compile. Nothing is differentiable.
"""

from .attention import paged_attention_v1, paged_attention_v2
from .cache import convert_fp8, copy_blocks, reshape_and_cache, reshape_and_cache_flash, swap_blocks

__all__ = [
    "convert_fp8",
    "copy_blocks",
    "paged_attention_v1",
    "paged_attention_v2",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]
