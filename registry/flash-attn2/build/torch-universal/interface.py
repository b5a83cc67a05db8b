"""The published functions of flash-attn2, version 3, with its parameters."""

# ruff: noqa: FBT001, FBT002 - the published signatures

from typing import Any

import torch
from torch import Tensor

from .attend import scale_of, window
from .cache import New, Places, attend_with_cache
from .core import Rules
from .sequences import attend_dense, attend_packed

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attention of q (B, Sq, H, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    Args:
        q: bfloat16, float16, float32 or float64.
        k: the same dtype; H is a multiple of Hk, and head h reads head h // (H / Hk).
        v: the same dtype.
        dropout_p: 0.0; anything else is refused.
        softmax_scale: of products; 1 / sqrt(D) if None.
        causal: whether query i sees keys up to i + Sk - Sq alone.
        window_size: keys (before, after) that place which are seen; -1 for all.
        softcap: scores are softcap * tanh(score / softcap); 0.0 for scores as they are.
        alibi_slopes: (H,) or (B, H) float32: slope * |i + Sk - Sq - j| is taken from scores.
        deterministic: not looked at; it is.
        return_attn_probs: whether lse (B, H, Sq) comes too, +inf for rows that see nothing, and an empty tensor where
            builds with dropout put its mask.

    Returns:
        (B, Sq, H, Dv) in the dtype of q, differentiable in q, k and v; rows that see nothing are zeros.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, or dropout.
    """
    del deterministic
    rules = _rules(q, dropout_p, softmax_scale, window_size, softcap, causal=causal)
    return _result(*attend_dense(q, k, v, rules, slopes=alibi_slopes), probs=return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of k and v in one tensor, (B, Sk, 2, Hk, D)."""
    k, v = _unpack("kv", kv, 5, 2)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q, k and v in one tensor, (B, S, 3, H, D)."""
    q, k, v = _unpack("qkv", qkv, 5, 3)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` of B sequences of their own lengths, packed: q (Tq, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv).

    Args:
        q: as there.
        k: as there; (pages, page, Hk, D) with `block_table`.
        v: as there; (pages, page, Hk, Dv) with `block_table`.
        cu_seqlens_q: (B + 1,) int32 or int64, where sequences begin, and the end of the last one.
        cu_seqlens_k: the same of k; with `block_table` only its differences count.
        max_seqlen_q: not looked at.
        max_seqlen_k: not looked at.
        dropout_p: as there, and so on to `deterministic`.
        softmax_scale: as there.
        causal: as there.
        window_size: as there.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: whether lse (H, Tq) comes too, and an empty tensor.
        block_table: (B, pages a sequence) int32, the pages of each sequence in order.

    Returns:
        (Tq, H, Dv); rows of no sequence are zeros.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, dropout, or sequences out of order or past the end.
    """
    del max_seqlen_q, max_seqlen_k, deterministic
    rules = _rules(q, dropout_p, softmax_scale, window_size, softcap, causal=causal)
    made = attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, rules, table=block_table, slopes=alibi_slopes)
    return _result(*made, probs=return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of k and v in one tensor, (Tk, 2, Hk, D)."""
    k, v = _unpack("kv", kv, 4, 2)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q, k and v in one tensor, (T, 3, H, D)."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    rest = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) to a cache, to which k and v are added first, in place.

    Args:
        q: as for `flash_attn_func`.
        k_cache: (Bc, S, Hk, D), or (pages, page, Hk, D) with `block_table`.
        v_cache: the same with Dv.
        k: (B, Sn, Hk, D), written to the places from `cache_seqlens` on.
        v: (B, Sn, Hk, Dv).
        rotary_cos: (places, R / 2), with k: k and q are turned first, k from place `cache_seqlens` on; q too if
            `causal` or with a window that hides something, and else all of it as at place `cache_seqlens`.
        rotary_sin: the same.
        cache_seqlens: (B,), or one for all: keys in the cache before; the length of the cache if None.
        cache_batch_idx: (B,), the row of the cache that a sequence has; its own number if None.
        cache_leftpad: (B,), places at the beginning that are not seen.
        block_table: (B, pages a sequence) int32.
        softmax_scale: as for `flash_attn_func`, and so on to `softcap`.
        causal: as there, Sk being all keys of the sequence, the new ones too.
        window_size: as there.
        softcap: as there.
        rotary_interleaved: whether dims 2i and 2i + 1 turn together, and not i and i + R / 2.
        alibi_slopes: as there.
        num_splits: not looked at.
        return_softmax_lse: whether lse (B, H, Sq) comes too.

    Returns:
        (B, Sq, H, Dv), not differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, or places that the cache has not.
    """
    del num_splits
    out, lse = attend_with_cache(
        q,
        k_cache,
        v_cache,
        new=New(k, v, None, rotary_cos, rotary_sin, rotary_interleaved),
        places=Places(cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        rules=_rules(q, 0.0, softmax_scale, window_size, softcap, causal=causal),
        slopes=alibi_slopes,
    )
    return (out, _infinite(lse)) if return_softmax_lse else out


def _rules(
    q: Tensor, dropout_p: float, scale: float | None, window_size: Window, softcap: float, *, causal: bool
) -> Rules:
    if dropout_p:
        raise ValueError(f"dropout_p: expected 0.0, as the reference has no dropout, got {dropout_p}")
    left, right = window(window_size, causal=causal)
    return Rules(scale_of(q.shape[-1]) if scale is None else scale, left, right, 0, softcap)


def _result(out: Tensor, lse: Tensor, *, probs: bool) -> Result:
    return (out, _infinite(lse), out.new_empty(0)) if probs else out


def _infinite(lse: Tensor) -> Tensor:
    """Lse, +inf for rows that see nothing, as flash-attn2 has it."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _unpack(name: str, x: Tensor, ndim: int, parts: int) -> Any:  # noqa: ANN401 - that many tensors
    if x.ndim != ndim or x.shape[-3] != parts:
        front = "batch, sequence" if ndim == 5 else "rows"
        raise ValueError(f"{name}: expected shape ({front}, {parts}, heads, dim), got {tuple(x.shape)}")
    return x.unbind(-3)
