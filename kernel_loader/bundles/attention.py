"""FlashAttention 2 and 3, and the third with attention sinks.

With q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), and head h of q with head h // (H / Hk) of k and v,
query i has the place p = i + Sk - Sq among the keys (masks are aligned to the last query and the last key), and

    s[i, j]  = softmax_scale * (q[i] . k[j])                         softmax_scale is 1 / sqrt(D) unless given
    s[i, j]  = softcap * tanh(s[i, j] / softcap)                     if softcap > 0
    s[i, j] -= alibi_slope * |p - j|                                 flash_attn2: slopes (H,) or (B, H), float32
    out[i]   = sum over seen j: exp(s[i, j] - lse[i]) v[j]
    lse[i]   = log(sum over seen j: exp(s[i, j]) + exp(s_aux))       s_aux: vllm_flash_attn3, sinks (H,)

Query i sees key j if all of these hold that apply:

    causal                       j <= p
    window_size (left, right)    p - left <= j <= p + right          -1 for a side without end; with causal, right is 0
    attention_chunk > 0          j // attention_chunk = p // attention_chunk          flash_attn3

A row that sees nothing is zeros. Its lse is +inf in flash_attn2 and -inf in the others, but for s_aux, where that is
the lse. Lse is float32 (float64 for float64).

Scores, their exponentials and sums are float32 (float64 for float64), whatever autocast says; out is rounded once, to
the dtype of q. Published builds round exp(s) to the dtype of v before the product, and out from one that was: in
bfloat16, two to four units in the last place of the largest values of a row.

Packed: q (Tq, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv), with sequence b at rows cu_seqlens[b] to cu_seqlens[b + 1], int32;
lse is (H, Tq). Rows that are of no sequence come out as zeros of the reference, and as anything of published builds.

A key that a query does not see has no part in its row: NaN in it stays there in the reference on the CPU, and elsewhere
reaches rows of the same tile, as 0 * NaN.

Cache: k_cache (Bc, S, Hk, D), or in pages, (pages, page, Hk, D) and a table (B, pages of a sequence) int32. v_cache the
same with Dv. With k (B, Sn, Hk, D) and v, these are written to the places from cache_seqlens on, in place, and the Sk
of the formulas counts them. With rotary_cos and rotary_sin (places, R / 2), the first R dims of k are turned first, as
at places cache_seqlens and on; those of q too, or, without causal, window and chunks, as at place cache_seqlens all of
them. A window that hides nothing is none: in flash_attn2, a side that is as large as the cache; in the others, a left
side as large as the cache less one, and a right side as large as the longest sequence of q (max_seqlen_q) less one.
Pairs are dims (2i, 2i + 1), or (i, i + R / 2) unless `rotary_interleaved`. What was turned is rounded to its dtype.

Gradients: to q, k, v and s_aux, through out alone: lse, slopes, scales and caches get none. That to s_aux comes from a
guard of the manifest in published builds. Qv gets one of the reference, and none of published builds. Dropout is
refused by the reference, and by builds for the stable ABI.
`deterministic`, `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata` and, but for that, `max_seqlen_*` change no
result; published builds allocate by `max_seqlen_*`, which must hold.

All raise TypeError for a dtype, and ValueError for a shape, a device, dropout, and sequences or places that leave their
tensor; published builds raise RuntimeError or AssertionError, and do not look at what offsets, tables and lengths hold.

Sources: Dao, FlashAttention-2 (arXiv:2307.08691); Shah et al., FlashAttention-3 (arXiv:2407.08608); Press et al., ALiBi
(arXiv:2108.12409); Gemma 2 (arXiv:2408.00118) for the softcap; Su et al., RoFormer (arXiv:2104.09864); the GPT-OSS
model card (arXiv:2508.10925) for sinks. Names, and the order of arguments, are those of kernels-community/flash-attn2
(version 3), flash-attn3 and vllm-flash-attn3 (version 1).

The reference builds do all of this, in every float dtype and on every device. Code that must also run on published
builds keeps to what those do:

- bfloat16 or float16; D up to 256, a multiple of 8; at least one sequence. The last dimension has stride one.
- flash_attn2: capability 8.0 and above; Dv = D; pages a multiple of 256; no `cache_leftpad` with pages. Version 3 has
  no backward with fewer heads of k than of q. With causal and slopes, lse is larger by slope * p. A window with more
  queries than keys is as above only where `right` is 0 (as with causal) or less than Sk, and given.
- flash_attn3 and vllm_flash_attn3: capability 8.x or 9.0; qv and FP8 on 9.0 only. FP8 rounds exp(s) to FP8 as well.
  flash_attn3 has no backward with attention_chunk.
- vllm_flash_attn3: s_aux is bfloat16, and there are at most 64 heads. A row that sees nothing may have an lse of -inf.
- rotary_cos and rotary_sin have the dtype of q, are contiguous, and turn a multiple of 16 dims. They have as many
  places as the cache in flash_attn2 and, with pages, in the others.
- A varlen backward leaves gradients unwritten in rows that are of no sequence, or past seqused_q and seqused_k; a
  guard of the manifest makes them zeros.
- flash_attn2: packed, with H > Hk, max_seqlen_q = 1 and neither window nor slopes, q has exactly one row a sequence:
  with a sequence of none, or spare rows, it raises or gives rows to other sequences.
- flash_attn3 and vllm_flash_attn3 return more tensors after lse from `flash_attn_with_kvcache`.

`get_scheduler_metadata` of flash_attn3 and vllm_flash_attn3, and what flash_attn2 has without gradients, are not
in the bundles; `load_module` has them.
"""

# ruff: noqa: FBT001, FBT002 - the published signatures

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

__all__ = [
    "FlashAttn2",
    "FlashAttn2Func",
    "FlashAttn2KVPacked",
    "FlashAttn2QKVPacked",
    "FlashAttn2Varlen",
    "FlashAttn2VarlenKVPacked",
    "FlashAttn2VarlenQKVPacked",
    "FlashAttn2WithKVCache",
    "FlashAttn3",
    "FlashAttn3Combine",
    "FlashAttn3Func",
    "FlashAttn3QKVPacked",
    "FlashAttn3Varlen",
    "FlashAttn3WithKVCache",
    "VllmFlashAttn3",
    "VllmFlashAttn3Func",
    "VllmFlashAttn3QKVPacked",
    "VllmFlashAttn3Varlen",
    "VllmFlashAttn3WithKVCache",
]


class FlashAttn2Func(Protocol):
    """`flash_attn_func` of flash_attn2."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention of sequences of one length, by the formulas at the top of this module.

        Args:
            q: (B, Sq, H, D).
            k: (B, Sk, Hk, D).
            v: (B, Sk, Hk, Dv).
            dropout_p: 0.0.
            softmax_scale: of products.
            causal: whether later keys are hidden.
            window_size: keys before and after the place of a query that it sees.
            softcap: bends scores.
            alibi_slopes: (H,) or (B, H) float32.
            deterministic: whether gradients repeat bit for bit.
            return_attn_probs: whether lse and a third tensor, for tests of dropout, come too.

        Returns:
            (B, Sq, H, Dv) in the dtype of q; with `return_attn_probs`, lse (B, H, Sq) and the third tensor after it.
        """
        ...


class FlashAttn2KVPacked(Protocol):
    """`flash_attn_kvpacked_func` of flash_attn2."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`flash_attn_func` with k and v in kv, (B, Sk, 2, Hk, D)."""
        ...


class FlashAttn2QKVPacked(Protocol):
    """`flash_attn_qkvpacked_func` of flash_attn2."""

    def __call__(
        self,
        qkv: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`flash_attn_func` with q, k and v in qkv, (B, S, 3, H, D)."""
        ...


class FlashAttn2Varlen(Protocol):
    """`flash_attn_varlen_func` of flash_attn2."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Attention of packed sequences.

        Its own arguments are:

        - q: (Tq, H, D).
        - k: (Tk, Hk, D), or (pages, page, Hk, D) with `block_table`.
        - v: like k, with Dv.
        - cu_seqlens_q: (B + 1,) int32.
        - cu_seqlens_k: (B + 1,) int32; with `block_table` only its differences count.
        - max_seqlen_q: at least the longest sequence of q.
        - max_seqlen_k: the same of k.
        - block_table: (B, pages of a sequence) int32. There is no gradient in published builds.

        Returns:
            (Tq, H, Dv) in the dtype of q; with `return_attn_probs`, lse (H, Tq) and a third tensor after it.
        """
        ...


class FlashAttn2VarlenKVPacked(Protocol):
    """`flash_attn_varlen_kvpacked_func` of flash_attn2."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`flash_attn_varlen_func` with k and v in kv, (Tk, 2, Hk, D)."""
        ...


class FlashAttn2VarlenQKVPacked(Protocol):
    """`flash_attn_varlen_qkvpacked_func` of flash_attn2."""

    def __call__(
        self,
        qkv: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`flash_attn_varlen_func` with q, k and v in qkv, (T, 3, H, D)."""
        ...


class FlashAttn2WithKVCache(Protocol):
    """`flash_attn_with_kvcache` of flash_attn2."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        block_table: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        alibi_slopes: torch.Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention to a cache, to which k and v are added first.

        Its own arguments are:

        - q: (B, Sq, H, D).
        - k_cache: (Bc, S, Hk, D), or pages.
        - v_cache: like k_cache, with Dv.
        - k: (B, Sn, Hk, D), or None; written to the cache.
        - v: like k, with Dv.
        - rotary_cos: (places, R / 2), with k alone.
        - rotary_sin: the same.
        - cache_seqlens: (B,) int32, or one for all: keys there before; S if None, which k and pages forbid.
        - cache_batch_idx: (B,) int32, the row of the cache of a sequence, not with pages; its own number if None.
        - cache_leftpad: (B,) int32, places at the beginning that are not seen; not with a rotation.
        - block_table: (B, pages of a sequence) int32, or None.
        - rotary_interleaved: which dims are a pair.
        - num_splits: parts of the keys that are worked at side by side; 0 for as many as seem good.
        - return_softmax_lse: whether lse (B, H, Sq) comes too.

        Returns:
            (B, Sq, H, Dv) in the dtype of q, not differentiable, and lse if asked for.
        """
        ...


class FlashAttn3Func(Protocol):
    """`flash_attn_func` of flash_attn3."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of sequences of one length, by the formulas at the top of this module.

        Args:
            q: (B, Sq, H, D); float8_e4m3fn too, which makes bfloat16 and has no gradient.
            k: (B, Sk, Hk, D).
            v: (B, Sk, Hk, Dv).
            softmax_scale: of products; 1 / sqrt(D + Dv) if None and there is qv.
            causal: whether later keys are hidden.
            qv: (B, Sq, H, Dv): qv . v is added to q . k; not with FP8.
            q_descale: (B, Hk) float32, what FP8 q is multiplied by; not looked at for other dtypes.
            k_descale: the same of k.
            v_descale: the same of v.
            window_size: keys before and after the place of a query that it sees.
            attention_chunk: length of runs of places that see each other alone; 0 for none.
            softcap: bends scores.
            num_splits: parts of the keys that are worked at side by side; 0 for as many as seem good.
            pack_gqa: whether heads that share a head of k are worked at together; None for what seems good.
            deterministic: whether gradients repeat bit for bit.
            sm_margin: multiprocessors to leave alone.
            return_attn_probs: whether lse comes too.

        Returns:
            (B, Sq, H, Dv) in the dtype of q, and lse (B, H, Sq) if asked for.
        """
        ...


class FlashAttn3QKVPacked(Protocol):
    """`flash_attn_qkvpacked_func` of flash_attn3."""

    def __call__(
        self,
        qkv: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        deterministic: bool = False,
        num_heads_q: int | None = None,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """`flash_attn_func` with q, k and v in qkv.

        Qkv is (B, S, 3, H, D), or, with `num_heads_q` = H, (B, S, H + 2 Hk, D): heads of q, of k, then of v.
        """
        ...


class FlashAttn3Varlen(Protocol):
    """`flash_attn_varlen_func` of flash_attn3."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of packed sequences.

        Its own arguments are:

        - q: (Tq, H, D).
        - k: (Tk, Hk, D).
        - v: (Tk, Hk, Dv).
        - cu_seqlens_q: (B + 1,) int32.
        - cu_seqlens_k: (B + 1,) int32.
        - max_seqlen_q: at least the longest sequence of q.
        - max_seqlen_k: the same of k.
        - seqused_q: (B,) int32, rows of each sequence that count, from its first on; all if None.
        - seqused_k: the same of k.
        - qv: (Tq, H, Dv).

        Returns:
            (Tq, H, Dv) in the dtype of q, and lse (H, Tq) if asked for.
        """
        ...


class FlashAttn3WithKVCache(Protocol):
    """`flash_attn_with_kvcache` of flash_attn3."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention to a cache, to which k and v are added first.

        Its own arguments are:

        - q: (B, Sq, H, D), or (Tq, H, D) with `cu_seqlens_q`.
        - k_cache: (Bc, S, Hk, D), or pages.
        - v_cache: like k_cache, with Dv.
        - k: (B, Sn, Hk, D), or (Tn, Hk, D) with `cu_seqlens_k_new`, or None; written there.
        - v: like k, with Dv.
        - qv: like q, with Dv, or None.
        - rotary_cos: (places, R / 2), with k alone.
        - rotary_sin: the same.
        - cache_seqlens: (B,) int32, or one for all: keys there before; S if None, which k and pages forbid.
        - cache_batch_idx: (B,) int32, the row of the cache of a sequence, not with pages; its own number if None.
        - cache_leftpad: (B,) int32, places at the beginning that are not seen; not with a rotation.
        - page_table: (B, pages of a sequence) int32, or None.
        - cu_seqlens_q: (B + 1,) int32.
        - cu_seqlens_k_new: (B + 1,) int32.
        - max_seqlen_q: at least the longest sequence of q.
        - rotary_seqlens: (B,) int32, places of the rotation that begin instead of `cache_seqlens`.
        - rotary_interleaved: which dims are a pair.
        - scheduler_metadata: what the build's `get_scheduler_metadata` returned, or None.
        - return_softmax_lse: whether lse, (B, H, Sq) or (H, Tq), comes too.

        Returns:
            (B, Sq, H, Dv) or (Tq, H, Dv) in the dtype of q, not differentiable, and lse if asked for.
        """
        ...


class VllmFlashAttn3Func(Protocol):
    """`flash_attn_func` of vllm_flash_attn3."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        s_aux: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of sequences of one length, by the formulas at the top of this module.

        Args:
            q: (B, Sq, H, D); float8_e4m3fn too, which makes bfloat16 and has no gradient.
            k: (B, Sk, Hk, D).
            v: (B, Sk, Hk, Dv).
            softmax_scale: of products; 1 / sqrt(D + Dv) if None and there is qv.
            causal: whether later keys are hidden.
            qv: (B, Sq, H, Dv): qv . v is added to q . k; not with FP8.
            q_descale: (B, Hk) float32, what FP8 q is multiplied by; not looked at for other dtypes.
            k_descale: the same of k.
            v_descale: the same of v.
            window_size: keys before and after the place of a query that it sees.
            softcap: bends scores.
            num_splits: parts of the keys that are worked at side by side; 0 for as many as seem good.
            pack_gqa: whether heads that share a head of k are worked at together; None for what seems good.
            deterministic: whether gradients repeat bit for bit.
            sm_margin: multiprocessors to leave alone.
            s_aux: (H,) sinks: one score more in each row of its head, with the value zero.

        Returns:
            (B, Sq, H, Dv) in the dtype of q, and lse (B, H, Sq).
        """
        ...


class VllmFlashAttn3QKVPacked(Protocol):
    """`flash_attn_qkvpacked_func` of vllm_flash_attn3."""

    def __call__(
        self,
        qkv: torch.Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        num_heads_q: int | None = None,
    ) -> torch.Tensor:
        """`flash_attn_func`, without lse, with q, k and v in qkv.

        Qkv is (B, S, 3, H, D), or, with `num_heads_q` = H, (B, S, H + 2 Hk, D): heads of q, of k, then of v.
        """
        ...


class VllmFlashAttn3Varlen(Protocol):
    """`flash_attn_varlen_func` of vllm_flash_attn3."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        s_aux: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of packed sequences.

        Its own arguments are:

        - q: (Tq, H, D).
        - k: (Tk, Hk, D).
        - v: (Tk, Hk, Dv).
        - cu_seqlens_q: (B + 1,) int32.
        - cu_seqlens_k: (B + 1,) int32.
        - max_seqlen_q: at least the longest sequence of q.
        - max_seqlen_k: the same of k.
        - seqused_q: (B,) int32, rows of each sequence that count, from its first on; all if None.
        - seqused_k: the same of k.
        - qv: (Tq, H, Dv).

        Returns:
            (Tq, H, Dv) in the dtype of q, and lse (H, Tq).
        """
        ...


class VllmFlashAttn3WithKVCache(Protocol):
    """`flash_attn_with_kvcache` of vllm_flash_attn3."""

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        rotary_cos: torch.Tensor | None = None,
        rotary_sin: torch.Tensor | None = None,
        cache_seqlens: int | torch.Tensor | None = None,
        cache_batch_idx: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
        s_aux: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention to a cache, to which k and v are added first.

        Its own arguments are:

        - q: (B, Sq, H, D), or (Tq, H, D) with `cu_seqlens_q`.
        - k_cache: (Bc, S, Hk, D), or pages.
        - v_cache: like k_cache, with Dv.
        - k: (B, Sn, Hk, D), or (Tn, Hk, D) with `cu_seqlens_k_new`, or None; written there.
        - v: like k, with Dv.
        - qv: like q, with Dv, or None.
        - rotary_cos: (places, R / 2), with k alone.
        - rotary_sin: the same.
        - cache_seqlens: (B,) int32, or one for all: keys there before; S if None, which k and pages forbid.
        - cache_batch_idx: (B,) int32, the row of the cache of a sequence, not with pages; its own number if None.
        - cache_leftpad: (B,) int32, places at the beginning that are not seen; not with a rotation.
        - page_table: (B, pages of a sequence) int32, or None.
        - cu_seqlens_q: (B + 1,) int32.
        - cu_seqlens_k_new: (B + 1,) int32.
        - max_seqlen_q: at least the longest sequence of q.
        - rotary_seqlens: (B,) int32, places of the rotation that begin instead of `cache_seqlens`.
        - rotary_interleaved: which dims are a pair.
        - scheduler_metadata: what the build's `get_scheduler_metadata` returned, or None.
        - return_softmax_lse: whether lse, (B, H, Sq) or (H, Tq), comes too.

        Returns:
            (B, Sq, H, Dv) or (Tq, H, Dv) in the dtype of q, not differentiable, and lse if asked for.
        """
        ...


class FlashAttn3Combine(Protocol):
    """`flash_attn_combine` of flash_attn3 and vllm_flash_attn3."""

    def __call__(
        self,
        out_partial: torch.Tensor,
        lse_partial: torch.Tensor,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention to all keys gives, from what attention to each of n parts of them gave.

        lse = log(sum of exp(lse_i)), out = sum of exp(lse_i - lse) out_i, in float32.

        Args:
            out_partial: (n, B, S, H, Dv) float32.
            lse_partial: (n, B, S, H) float32, -inf for a part of which a row sees nothing. Published builds want
                stride one along S.
            out: (B, S, H, Dv), to be written and returned, or None.
            out_dtype: of a new one: bfloat16, float16 or float32; float32 if None.

        Returns:
            (B, S, H, Dv), zeros for rows that see nothing, and lse (B, S, H). Neither is differentiable.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FlashAttn2:
    """The entrypoints of `flash_attn2`."""

    __kernel__: ClassVar = "flash_attn2"

    flash_attn_func: FlashAttn2Func
    flash_attn_kvpacked_func: FlashAttn2KVPacked
    flash_attn_qkvpacked_func: FlashAttn2QKVPacked
    flash_attn_varlen_func: FlashAttn2Varlen
    flash_attn_varlen_kvpacked_func: FlashAttn2VarlenKVPacked
    flash_attn_varlen_qkvpacked_func: FlashAttn2VarlenQKVPacked
    flash_attn_with_kvcache: FlashAttn2WithKVCache


@dataclass(frozen=True, kw_only=True)
class FlashAttn3:
    """The entrypoints of `flash_attn3`."""

    __kernel__: ClassVar = "flash_attn3"

    flash_attn_func: FlashAttn3Func
    flash_attn_qkvpacked_func: FlashAttn3QKVPacked
    flash_attn_varlen_func: FlashAttn3Varlen
    flash_attn_with_kvcache: FlashAttn3WithKVCache
    flash_attn_combine: FlashAttn3Combine


@dataclass(frozen=True, kw_only=True)
class VllmFlashAttn3:
    """The entrypoints of `vllm_flash_attn3`."""

    __kernel__: ClassVar = "vllm_flash_attn3"

    flash_attn_func: VllmFlashAttn3Func
    flash_attn_qkvpacked_func: VllmFlashAttn3QKVPacked
    flash_attn_varlen_func: VllmFlashAttn3Varlen
    flash_attn_with_kvcache: VllmFlashAttn3WithKVCache
    flash_attn_combine: FlashAttn3Combine
