"""Attention without a cache: sequences of one length, and of several."""

import torch
from torch import Tensor

from .attend import attend, check_heads, check_qv, check_vector
from .core import NO_DESCALES, Descales, Rules
from .rows import by_offsets, equal_lengths, unpack_lse


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Rules,
    *,
    qv: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    descales: Descales = NO_DESCALES,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) to k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv): out (B, Sq, H, Dv), lse (B, H, Sq)."""
    check_heads(q, k, v, 4)
    if k.ndim != 4 or k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected {q.shape[0]} sequences in four dimensions, as q has them, got {tuple(k.shape)}")
    q, k = _with_values(q, k, v, qv)
    queries, keys = (equal_lengths(x.shape[0], x.shape[1], q.device) for x in (q, k))
    out, lse = attend(
        *(x.flatten(0, 1) for x in (q, k, v)),
        spans=(queries.first, queries.lengths, keys.first, keys.lengths),
        rules=rules,
        slopes=slopes,
        sinks=sinks,
        descales=descales,
    )
    return out.view(*q.shape[:3], v.shape[3]), unpack_lse(lse, q.shape[0], q.shape[1])


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    rules: Rules,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    qv: Tensor | None = None,
    table: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    descales: Descales = NO_DESCALES,
) -> tuple[Tensor, Tensor]:
    """Attention of q (Tq, H, D) to k (Tk, Hk, D) and v (Tk, Hk, Dv): out (Tq, H, Dv), lse (H, Tq).

    Sequence b has rows cu_seqlens[b] and on, to cu_seqlens[b + 1], or as many as `seqused` says. With a `table`
    (B, pages), k and v are (pages, page, Hk, D or Dv), and cu_seqlens_k tells lengths alone.
    """
    check_heads(q, k, v, 3)
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape (sequences + 1,), got {tuple(cu_seqlens_q.shape)}")
    batch = cu_seqlens_q.shape[0] - 1
    check_vector("cu_seqlens_q", cu_seqlens_q, batch + 1)
    check_vector("cu_seqlens_k", cu_seqlens_k, batch + 1)
    check_vector("seqused_q", seqused_q, batch)
    check_vector("seqused_k", seqused_k, batch)
    if k.ndim != (3 if table is None else 4):
        form = "(rows, heads, dim)" if table is None else "(pages, page, heads, dim)"
        raise ValueError(f"k: expected shape {form}, got {tuple(k.shape)}")
    q, k = _with_values(q, k, v, qv)
    queries, keys = by_offsets(q.shape[0], cu_seqlens_q), by_offsets(k.shape[0], cu_seqlens_k)
    return attend(
        q,
        k if table is None else k.flatten(0, 1),
        v if table is None else v.flatten(0, 1),
        spans=(
            queries.first,
            queries.lengths if seqused_q is None else seqused_q.long(),
            keys.first if table is None else torch.zeros_like(keys.first),
            keys.lengths if seqused_k is None else seqused_k.long(),
        ),
        most=(
            None if seqused_q is None else queries.lengths,
            None if seqused_k is None or table is not None else keys.lengths,
        ),
        rules=rules,
        page=0 if table is None else k.shape[1],
        table=table,
        slopes=slopes,
        sinks=sinks,
        descales=descales,
    )


def _with_values(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """(q, qv) and (k, v), whose product is q k^T + qv v^T."""
    if qv is None:
        return q, k
    check_qv(q, v, qv)
    return torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
