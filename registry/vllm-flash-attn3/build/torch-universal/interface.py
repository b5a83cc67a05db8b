"""The published functions of vllm-flash-attn3, version 1, with its parameters."""

# ruff: noqa: FBT001, FBT002 - the published signatures

import torch
from torch import Tensor

from .attend import scale_of, window
from .cache import New, Places, attend_with_cache
from .core import Descales, Rules
from .sequences import attend_dense, attend_packed

Window = tuple[int, int]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv).

    Args:
        q: bfloat16, float16, float32, float64, or float8_e4m3fn, which makes bfloat16 and has no gradient.
        k: the same dtype; H is a multiple of Hk, and head h reads head h // (H / Hk).
        v: the same dtype.
        softmax_scale: of products; 1 / sqrt(D) if None, or 1 / sqrt(D + Dv) with `qv`.
        causal: whether query i sees keys up to i + Sk - Sq alone.
        qv: (B, Sq, H, Dv), whose product with v is added to that of q with k, before the scale; not with FP8.
        q_descale: (B, Hk) float32, what FP8 elements of q are multiplied by; not looked at for other dtypes.
        k_descale: the same of k.
        v_descale: the same of v.
        window_size: keys (before, after) that place which are seen; -1 for all.
        softcap: scores are softcap * tanh(score / softcap); 0.0 for scores as they are.
        num_splits: not looked at, nor what follows it but the last.
        pack_gqa: not looked at.
        deterministic: not looked at; it is.
        sm_margin: not looked at.
        s_aux: (H,) sinks: one score more in each row of its head, with the value zero; any float dtype.

    Returns:
        (B, Sq, H, Dv) in the dtype of q, differentiable in q, k, v, qv and s_aux; rows that see nothing are zeros.
        And lse (B, H, Sq), with the sink in it, -inf for rows that see nothing and have none; not differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or a device.
    """
    del num_splits, pack_gqa, deterministic, sm_margin
    rules = _rules(q, qv, softmax_scale, window_size, 0, softcap, causal=causal)
    descales = Descales(q_descale, k_descale, v_descale)
    return attend_dense(q, k, v, rules, qv=qv, sinks=s_aux, descales=descales)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
) -> Tensor:
    """`flash_attn_func` of q, k and v in one tensor, without sinks.

    Args:
        qkv: (B, S, 3, H, D), or (B, S, H + 2 Hk, D) with `num_heads_q`: heads of q, then of k, then of v.
        softmax_scale: as there, and so on to `deterministic`.
        causal: as there.
        q_descale: as there.
        k_descale: as there.
        v_descale: as there.
        window_size: as there.
        softcap: as there.
        deterministic: as there.
        num_heads_q: H, for the second form.

    Returns:
        As there, without lse.

    Raises:
        TypeError: a dtype.
        ValueError: a shape.
    """
    del deterministic
    rules = _rules(qkv, None, softmax_scale, window_size, 0, softcap, causal=causal)
    q, k, v = _unpack(qkv, num_heads_q)
    return attend_dense(q, k, v, rules, descales=Descales(q_descale, k_descale, v_descale))[0]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`flash_attn_func` of B sequences of their own lengths, packed: q (Tq, H, D), k (Tk, Hk, D), v (Tk, Hk, Dv).

    Args:
        q: as there.
        k: as there.
        v: as there.
        cu_seqlens_q: (B + 1,) int32 or int64, where sequences begin, and the end of the last one.
        cu_seqlens_k: the same of k.
        max_seqlen_q: not looked at.
        max_seqlen_k: not looked at.
        seqused_q: (B,), rows of each sequence that count, from its first on; all if None.
        seqused_k: the same of k.
        softmax_scale: as there, and so on.
        causal: as there.
        qv: (Tq, H, Dv).
        q_descale: as there.
        k_descale: as there.
        v_descale: as there.
        window_size: as there.
        softcap: as there.
        num_splits: as there.
        pack_gqa: as there.
        deterministic: as there.
        sm_margin: as there.
        s_aux: as there.

    Returns:
        (Tq, H, Dv); rows that are of no sequence, or do not count, are zeros.
        And lse (H, Tq).

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, or sequences out of order or past the end.
    """
    del max_seqlen_q, max_seqlen_k, num_splits, pack_gqa, deterministic, sm_margin
    rules = _rules(q, qv, softmax_scale, window_size, 0, softcap, causal=causal)
    return attend_packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        rules,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        qv=qv,
        sinks=s_aux,
        descales=Descales(q_descale, k_descale, v_descale),
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) to a cache, to which k and v are added first, in place.

    Args:
        q: as for `flash_attn_func`; (Tq, H, D) with `cu_seqlens_q`.
        k_cache: (Bc, S, Hk, D), or (pages, page, Hk, D) with `page_table`.
        v_cache: the same with Dv.
        k: (B, Sn, Hk, D), or (Tn, Hk, D) with `cu_seqlens_k_new`, written to the places from `cache_seqlens` on.
        v: the same with Dv.
        qv: as for `flash_attn_func`, in the form of q.
        rotary_cos: (places, R / 2), with k: k and q are turned first, k from place `rotary_seqlens` on; q too if
            `causal` or with a window that hides something, and else all of it as at place `rotary_seqlens`.
        rotary_sin: the same.
        cache_seqlens: (B,), or one for all: keys in the cache before; the length of the cache if None.
        cache_batch_idx: (B,), the row of the cache that a sequence has; its own number if None.
        cache_leftpad: (B,), places at the beginning that are not seen.
        page_table: (B, pages a sequence) int32.
        cu_seqlens_q: (B + 1,), or None.
        cu_seqlens_k_new: (B + 1,), or None.
        max_seqlen_q: at least the longest sequence of q; looked at with `cu_seqlens_q`, a window and a rotation alone.
        rotary_seqlens: (B,); `cache_seqlens` if None.
        q_descale: as for `flash_attn_func`.
        k_descale: as there.
        v_descale: as there.
        softmax_scale: as there, and so on to `softcap`.
        causal: as there, Sk being all keys of the sequence, the new ones too.
        window_size: as there.
        softcap: as there.
        rotary_interleaved: whether dims 2i and 2i + 1 turn together, and not i and i + R / 2.
        scheduler_metadata: not looked at.
        num_splits: not looked at.
        pack_gqa: not looked at.
        sm_margin: not looked at.
        return_softmax_lse: whether lse (B, H, Sq), or (H, Tq), comes too.
        s_aux: as there.

    Returns:
        (B, Sq, H, Dv), or (Tq, H, Dv), not differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, or places that the cache has not.
    """
    del scheduler_metadata, num_splits, pack_gqa, sm_margin
    out, lse = attend_with_cache(
        q,
        k_cache,
        v_cache,
        new=New(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        places=Places(cache_seqlens, cache_batch_idx, cache_leftpad, page_table),
        rules=_rules(q, qv, softmax_scale, window_size, 0, softcap, causal=causal),
        cu_seqlens_q=cu_seqlens_q,
        qv=qv,
        sinks=s_aux,
        descales=Descales(q_descale, k_descale, v_descale),
        longest=max_seqlen_q,
        whole=False,
    )
    return (out, lse) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """What attention to all keys gives, from what attention to each of n parts of them gave.

    lse = log(sum of exp(lse_i)) and out = sum of exp(lse_i - lse) out_i, in float32.

    Args:
        out_partial: (n, B, S, H, Dv) float32; float64 makes float64.
        lse_partial: (n, B, S, H) in the same dtype, -inf for a part of which a row sees nothing.
        out: (B, S, H, Dv), to be written and returned; a new one if None.
        out_dtype: of a new one: bfloat16, float16 or float32; that of `out_partial` if None.

    Returns:
        Out (B, S, H, Dv), zeros for rows that see nothing, and lse (B, S, H). Neither is differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape.
    """
    if out_partial.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"out_partial: expected float32 or float64, got {out_partial.dtype}")
    if lse_partial.dtype != out_partial.dtype:
        raise TypeError(f"lse_partial: expected {out_partial.dtype}, as out_partial is, got {lse_partial.dtype}")
    if out_partial.ndim != 5:
        raise ValueError(f"out_partial: expected shape (n, batch, rows, heads, dim), got {tuple(out_partial.shape)}")
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(f"lse_partial: expected shape {tuple(out_partial.shape[:-1])}, got {tuple(lse_partial.shape)}")
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(f"out: expected shape {tuple(out_partial.shape[1:])}, got {tuple(out.shape)}")
    parts = lse_partial.detach()
    lse = torch.logsumexp(parts, dim=0)
    share = torch.exp(parts - lse.masked_fill(lse == -torch.inf, 0.0))
    share = share.unsqueeze(-1)
    made = torch.where(share > 0, share * out_partial.detach(), 0).sum(0)  # not 0 * NaN
    if out is None:
        return made.to(out_partial.dtype if out_dtype is None else out_dtype), lse
    return out.copy_(made), lse


def _rules(
    q: Tensor,
    qv: Tensor | None,
    scale: float | None,
    window_size: Window,
    chunk: int,
    softcap: float,
    *,
    causal: bool,
) -> Rules:
    left, right = window(window_size, causal=causal)
    dim = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    return Rules(scale_of(dim) if scale is None else scale, left, right, chunk, softcap)


def _unpack(qkv: Tensor, heads: int | None) -> list[Tensor]:
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return list(qkv.unbind(2))
    if heads is None or qkv.ndim != 4:
        raise ValueError(
            f"qkv: expected shape (batch, sequence, 3, heads, dim), or four dimensions and num_heads_q, got"
            f" {tuple(qkv.shape)} and {heads}"
        )
    kv_heads, odd = divmod(qkv.shape[2] - heads, 2)
    if odd or kv_heads < 1:
        raise ValueError(f"num_heads_q: expected to leave as many heads to k as to v of {qkv.shape[2]}, got {heads}")
    return list(torch.split(qkv, [heads, kv_heads, kv_heads], dim=2))
