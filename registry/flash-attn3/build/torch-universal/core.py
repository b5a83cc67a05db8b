"""Attention by tiles: memory beyond inputs, outputs and gradients is that of one tile of scores.

But for qv: (q, qv) and (k, v), of a cache all of it, are joined in copies first.

Rows of queries and of keys are packed, (rows, heads, dim); a `Span` names those of one sequence. With s the scores of a
row, m their maximum and l the sum of exp(s - m), both kept while tiles of keys go by (Milakov and Gimelshein,
arXiv:1805.02867; Dao et al., FlashAttention, arXiv:2205.14135):

    out = sum of exp(s - m) v / l        lse = m + log(l)

A sink is one score more in each row of its head, whose value is zero. Everything is float32, or float64 for float64.
Backward makes the scores again from lse:

    p = exp(s - lse)    dv = p^T g    ds = p (g v^T - rowsum(g out))    dq = scale ds k    dk = scale ds^T q

A key that a query does not see has no part in its sums, nor it in those of the key: NaN in one reaches not the other.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor

TILE_Q: Final = 128
TILE_K: Final = 512

_LOWEST: Final = float("-inf")


class Rules(NamedTuple):
    """What turns products into scores.

    Attributes:
        scale: of products.
        left: keys before the place of a query that it sees; -1 for all.
        right: keys after it; -1 for all.
        chunk: a query sees only keys of its own run of so many places; 0 for no runs.
        softcap: scores are softcap * tanh(score / softcap); 0.0 for scores as they are.
    """

    scale: float
    left: int
    right: int
    chunk: int
    softcap: float


class Descales(NamedTuple):
    """What elements of q, k and v are multiplied by: (Hk,) each for one sequence, (B, Hk) for all, or None."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


NO_DESCALES: Final = Descales()


class Span(NamedTuple):
    """One sequence.

    Attributes:
        first: its first row of q.
        length: its rows of q.
        keys: (Sk,) int64, its rows of k and v, in order.
        slopes: (H,) slopes of ALiBi, or None.
        descales: (Hk,) each.
    """

    first: int
    length: int
    keys: Tensor
    slopes: Tensor | None
    descales: Descales


class _Scores(NamedTuple):
    """Scores (Hk, G, Tq, Tk), their slope before the softcap, and where they are -inf as a key is not seen (Tq, Tk)."""

    value: Tensor
    slope: Tensor | None
    hidden: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(
    q: Tensor, k: Tensor, v: Tensor, spans: list[Span], rules: Rules, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Out (Tq, H, Dv) of `dtype`, and lse (H, Tq) in the dtype that is computed in.

    Rows of no span, and rows that see no key and have no sink, are zeros, with an lse of -inf.
    """
    rows, heads, _ = q.shape
    out = q.new_zeros((rows, heads, v.shape[2]), dtype=dtype)
    lse = q.new_full((heads, rows), _LOWEST, dtype=wide(q.dtype))
    for span in spans:
        for start, stop in _query_tiles(span):
            at = slice(span.first + start, span.first + stop)
            made, sums = _forward_tile(_load(q[at], k.shape[1], span.descales.q), start, k, v, span, rules, sinks)
            out[at] = _store(made).to(dtype)
            lse[:, at] = sums.flatten(0, 1)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: list[Span],
    rules: Rules,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of q, k, v and sinks, each in the dtype of its own."""
    kv_heads, dtype = k.shape[1], wide(q.dtype)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    dsinks = None if sinks is None else torch.zeros_like(sinks, dtype=dtype)
    for span in spans:
        for start, stop in _query_tiles(span):
            at = slice(span.first + start, span.first + stop)
            query, upstream = _load(q[at], kv_heads), _load(grad[at], kv_heads)
            inner = (upstream * _load(out[at], kv_heads)).sum(-1)
            sums = lse[:, at].view(kv_heads, -1, stop - start)
            base = sums.masked_fill(sums == _LOWEST, 0.0).unsqueeze(-1)  # rows that see nothing have no score to lower
            dquery = torch.zeros_like(query)
            for keys, key, value, scores in _key_tiles(query, start, k, v, span, rules):
                p = torch.exp(scores.value - base)
                p = p.masked_fill(scores.hidden, 0.0)  # where lse is NaN, so is p
                ds = p * (upstream @ value.mT.unsqueeze(1) - inner.unsqueeze(-1)) * rules.scale
                if scores.slope is not None:
                    ds = ds * scores.slope
                ds = ds.masked_fill(scores.hidden, 0.0)
                dquery += _weighed(ds, key.unsqueeze(1), scores.hidden)
                dv.index_add_(0, keys, _weighed(p.mT, upstream, scores.hidden.mT).sum(1).transpose(0, 1))
                dk.index_add_(0, keys, _weighed(ds.mT, query, scores.hidden.mT).sum(1).transpose(0, 1))
            dq[at] = _store(dquery)
            if sinks is not None and dsinks is not None:
                share = torch.exp(sinks.to(dtype).unsqueeze(1) - lse[:, at])
                dsinks -= (share * inner.flatten(0, 1)).sum(1)
    dsinks = None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _forward_tile(
    query: Tensor, start: int, k: Tensor, v: Tensor, span: Span, rules: Rules, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    kv_heads, group, count, _ = query.shape
    if sinks is None:
        most = query.new_full((kv_heads, group, count), _LOWEST)
        total = torch.zeros_like(most)
    else:
        most = sinks.to(query.dtype).view(kv_heads, group, 1).expand(-1, -1, count)
        total = torch.ones_like(most)
    made = query.new_zeros((kv_heads, group, count, v.shape[2]))
    for _, _, value, scores in _key_tiles(query, start, k, v, span, rules):
        higher = torch.maximum(most, scores.value.amax(-1))
        base = higher.masked_fill(higher == _LOWEST, 0.0)  # -inf less -inf would be NaN
        p, shrink = torch.exp(scores.value - base.unsqueeze(-1)), torch.exp(most - base)
        made = made * shrink.unsqueeze(-1) + _weighed(p, value.unsqueeze(1), scores.hidden)
        total = total * shrink + p.sum(-1)
        most = higher
    return made / total.masked_fill(total == 0.0, 1.0).unsqueeze(-1), most + total.log()


def _query_tiles(span: Span) -> Iterator[tuple[int, int]]:
    for start in range(0, span.length, TILE_Q):
        yield start, min(start + TILE_Q, span.length)


def _key_tiles(
    query: Tensor, start: int, k: Tensor, v: Tensor, span: Span, rules: Rules
) -> Iterator[tuple[Tensor, Tensor, Tensor, _Scores]]:
    """Rows of k and v, what stands there, (Hk, Tk, D) and (Hk, Tk, Dv), and scores, for the tiles that are seen."""
    count = query.shape[2]
    place = start + len(span.keys) - span.length  # of the first query, among the keys
    low, high = _seen(place, place + count - 1, len(span.keys), rules)
    for first in range(low, high, TILE_K):
        last = min(first + TILE_K, high)
        keys = span.keys[first:last]
        key = _load(k[keys], k.shape[1], span.descales.k)[:, 0]
        value = _load(v[keys], v.shape[1], span.descales.v)[:, 0]
        places = torch.arange(place, place + count, device=k.device).unsqueeze(1)
        yield keys, key, value, _scores(query, key, places, torch.arange(first, last, device=k.device), span, rules)


def _seen(first: int, last: int, keys: int, rules: Rules) -> tuple[int, int]:
    """The range of keys that some query of these places sees."""
    low, high = 0, keys
    if rules.left >= 0:
        low = max(low, first - rules.left)
    if rules.right >= 0:
        high = min(high, last + rules.right + 1)
    if rules.chunk > 0:
        low = max(low, first // rules.chunk * rules.chunk)
        high = min(high, (last // rules.chunk + 1) * rules.chunk)
    return low, high


def _scores(query: Tensor, key: Tensor, places: Tensor, at: Tensor, span: Span, rules: Rules) -> _Scores:
    value, slope = query @ key.mT.unsqueeze(1) * rules.scale, None
    if rules.softcap > 0.0:
        bent = torch.tanh(value / rules.softcap)
        value, slope = rules.softcap * bent, 1.0 - bent * bent
    if span.slopes is not None:
        value = value - span.slopes.to(value.dtype).view(*value.shape[:2], 1, 1) * (places - at).abs()
    hidden = torch.zeros_like(places - at, dtype=torch.bool)
    if rules.left >= 0:
        hidden |= at < places - rules.left
    if rules.right >= 0:
        hidden |= at > places + rules.right
    if rules.chunk > 0:
        hidden |= places // rules.chunk != at // rules.chunk
    return _Scores(value.masked_fill(hidden, _LOWEST), slope, hidden)


def _weighed(weights: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
    """The product of weights (Hk, G, N, M) and x (Hk, G or 1, M, D), in which `hidden` (N, M) pairs have no part.

    Their weights are zero, which is enough unless x is infinite or NaN. Rows where it is are added one by one, on the
    CPU alone, as others would have to be waited for.
    """
    if x.device.type != "cpu" or bool((finite := x.isfinite()).all()):
        return weights @ x
    made = weights @ x.masked_fill(~finite, 0.0)
    for row in (~finite).flatten(0, 1).any(0).any(-1).nonzero().flatten().tolist():
        term = weights[..., row].unsqueeze(-1) * x[..., row, :].masked_fill(finite[..., row, :], 0.0).unsqueeze(-2)
        made = made + term.masked_fill(hidden[:, row].unsqueeze(-1), 0.0)
    return made


def _load(x: Tensor, kv_heads: int, descale: Tensor | None = None) -> Tensor:
    """(T, H, D) as (Hk, G, T, D), in the dtype that is computed in."""
    rows, heads, dim = x.shape
    made = x.to(wide(x.dtype)).view(rows, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
    return made if descale is None else made * descale.to(made.dtype).view(kv_heads, 1, 1, 1)


def _store(x: Tensor) -> Tensor:
    """(Hk, G, T, D) as (T, H, D)."""
    return x.flatten(0, 1).transpose(0, 1)
