"""Attention of one query a sequence to a cache of keys and values in blocks, and what fills such a cache.

Keys of a sequence lie in blocks, in the order of its row in a table of blocks. FP8 caches hold e4m3 codes as uint8,
with one scale for all keys and one for all values. Scores, their exponentials and sums are float32, whatever autocast
says. Nothing is differentiable.

All raise TypeError for a dtype, and ValueError for a shape, a device, and blocks, slots and lengths that cannot be;
published builds raise RuntimeError, and do not look at what tables, slots and lengths hold.

Source: Kwon et al., PagedAttention (arXiv:2309.06180). Names, and the order of arguments, are those of
kernels-community/paged-attention, version 1. Its annotations call `k_scale` and `v_scale` floats; its operators take
tensors.

The reference builds do all of this on every device. Code that must also run on published builds keeps to what those do
behind the guards of the manifest: D one of 32, 64, 80, 96, 112, 120, 128, 192 and 256; blocks of 8, 16 or 32; x of 16
bytes; int32 tables and lengths, int64 slots and mappings; all contiguous but for query, and the first dimension of key
and value; caches that start at multiples of 16 bytes; no FP8 cache with a float32 query. `paged_attention_v1` keeps the
scores of a sequence in shared memory and refuses a `max_seq_len` for which there is not enough: 57,000 on devices with
227 KiB. Published builds round exponentials, and what they read of FP8 caches, to the dtype of query, and
`copy_blocks` cannot be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "ConvertFP8",
    "CopyBlocks",
    "PagedAttention",
    "PagedAttentionV1",
    "PagedAttentionV2",
    "ReshapeAndCache",
    "ReshapeAndCacheFlash",
    "SwapBlocks",
]


class PagedAttentionV1(Protocol):
    """`paged_attention_v1`: one query a sequence."""

    def __call__(
        self,
        out: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: torch.Tensor | None,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
    ) -> None:
        """Write attention of query (B, H, D), the last of its sequence, to the keys of its blocks, to `out`.

        s[j] = scale * (q . k[j]) + alibi_slope * (j + 1 - length), and out = sum of softmax(s)[j] v[j], in float32 and
        rounded once.

        With `blocksparse_vert_stride` above 1, key j is of run r = (first place of its block) //
        blocksparse_block_size, and is seen if r > (length - 1) // blocksparse_block_size - blocksparse_local_blocks,
        or if r + offset is a multiple of `blocksparse_vert_stride`. With step = blocksparse_head_sliding_step, the
        offset of head h is (tp_rank * H + h) * step + 1, or, for a negative step,
        (tp_rank * Hk + h // (H / Hk)) * -step + 1.

        Args:
            out: (B, H, D), to be written; zeros for a sequence without keys.
            query: (B, H, D) bfloat16, float16 or float32.
            key_cache: (blocks, Hk, D / x, block, x), x being 16 bytes; the dtype of query, or uint8 for FP8.
            value_cache: (blocks, Hk, D, block), the same dtype.
            num_kv_heads: Hk.
            scale: of products.
            block_tables: (B, blocks of a sequence) int32.
            seq_lens: (B,) int32, keys of each sequence.
            block_size: 8, 16 or 32; anything of the reference.
            max_seq_len: at least the largest of `seq_lens`.
            alibi_slopes: (H,) float32, or None.
            kv_cache_dtype: "auto", or "fp8" or "fp8_e4m3" for e4m3 codes.
            k_scale: one float32 on the device, what FP8 keys are multiplied by.
            v_scale: the same of values.
            tp_rank: see above.
            blocksparse_local_blocks: see above.
            blocksparse_vert_stride: see above.
            blocksparse_block_size: see above; a multiple of `block_size`.
            blocksparse_head_sliding_step: see above.
        """
        ...


class PagedAttentionV2(Protocol):
    """`paged_attention_v2`: one query a sequence, in partitions of 512 keys."""

    def __call__(
        self,
        out: torch.Tensor,
        exp_sum: torch.Tensor,
        max_logits: torch.Tensor,
        tmp_out: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        num_kv_heads: int,
        scale: float,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        block_size: int,
        max_seq_len: int,
        alibi_slopes: torch.Tensor | None,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
    ) -> None:
        """`paged_attention_v1`, with P = ceil(max_seq_len / 512) partitions of which it tells.

        Partitions that have no keys are left alone. Those of which sparse attention sees nothing are not promised.

        Its own arguments are:

        - exp_sum: (B, H, P) float32, to be written: the sum of exp(s - max) of each partition.
        - max_logits: (B, H, P) float32, to be written: the largest s.
        - tmp_out: (B, H, P, D) in the dtype of query, to be written: attention to the partition alone.
        """
        ...


class ReshapeAndCache(Protocol):
    """`reshape_and_cache`: keys and values go to their slots."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> None:
        """Write tokens to slots, in place: slot s is place s % block of block s // block.

        Args:
            key: (T, Hk, D) bfloat16, float16 or float32.
            value: the same.
            key_cache: (blocks, Hk, D / x, block, x), of the dtype of key, or uint8 for FP8.
            value_cache: (blocks, Hk, D, block), the same dtype.
            slot_mapping: (T,) int64; a token with a negative slot is left out.
            kv_cache_dtype: "auto", or "fp8" or "fp8_e4m3" for e4m3(x / scale), where what is too large becomes 448.
            k_scale: one float32 on the device.
            v_scale: the same.
        """
        ...


class ReshapeAndCacheFlash(Protocol):
    """`reshape_and_cache_flash`: the same in the layout of FlashAttention."""

    def __call__(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        v_scale: torch.Tensor,
    ) -> None:
        """`reshape_and_cache` with caches (blocks, block, Hk, D), and a `slot_mapping` that may be shorter than T."""
        ...


class CopyBlocks(Protocol):
    """`copy_blocks`: within caches."""

    def __call__(
        self,
        key_caches: list[torch.Tensor],
        value_caches: list[torch.Tensor],
        block_mapping: torch.Tensor,
    ) -> None:
        """Copy blocks within each cache, in place, as they were before.

        Args:
            key_caches: one a layer, (blocks, ...), contiguous.
            value_caches: as many.
            block_mapping: (n, 2) int64 on the device: from which block to which. In published builds no block may be
                both.
        """
        ...


class SwapBlocks(Protocol):
    """`swap_blocks`: from one cache to another."""

    def __call__(
        self,
        src: torch.Tensor,
        dst: torch.Tensor,
        block_mapping: torch.Tensor,
    ) -> None:
        """Copy blocks of `src` to `dst`, which may be on another device, in place.

        Args:
            src: (blocks, ...), contiguous; on the same device, or one of the two on the CPU.
            dst: (blocks, ...), the same dtype and shape of a block.
            block_mapping: (n, 2) int64 on the CPU: from which block to which.
        """
        ...


class ConvertFP8(Protocol):
    """`convert_fp8`: a cache to e4m3 codes, or back."""

    def __call__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - the published name
        scale: float = 1.0,
        kv_dtype: str = "fp8",
    ) -> None:
        """Write `input` to `output`, of which one is uint8, codes of e4m3, and the other bfloat16, float16 or float32.

        Codes are e4m3(input / scale), where what is too large becomes 448; numbers are code * scale.

        Args:
            output: (blocks, ...), contiguous.
            input: the same shape.
            scale: of all elements.
            kv_dtype: "fp8" or "fp8_e4m3".
        """
        ...


@dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """The entrypoints of `paged_attention`."""

    __kernel__: ClassVar = "paged_attention"

    paged_attention_v1: PagedAttentionV1
    paged_attention_v2: PagedAttentionV2
    reshape_and_cache: ReshapeAndCache
    reshape_and_cache_flash: ReshapeAndCacheFlash
    copy_blocks: CopyBlocks
    swap_blocks: SwapBlocks
    convert_fp8: ConvertFP8
