"""Attention over a cache of keys and values, to which new ones may be added first."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import ops, qualified
from .attend import attend, check_heads, check_qv, check_vector
from .core import NO_DESCALES, Descales, Rules, wide
from .rows import Packed, by_offsets, equal_lengths, unpack_lse


class New(NamedTuple):
    """What is added to the cache, and how it is turned before.

    Attributes:
        k: (B, Sn, Hk, D), or (rows, Hk, D) with `cu_seqlens`; None for nothing.
        v: the same with Dv.
        cu_seqlens: (B + 1,), or None.
        cos: (places, R / 2) of the rotation of the first R dims of q and k; None for none.
        sin: the same.
        interleaved: dims 2i and 2i + 1 are a pair, not i and i + R / 2.
        first: (B,), the place of the first new key in the rotation; None for the length of the sequence before.
    """

    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = True
    first: Tensor | None = None


class Places(NamedTuple):
    """Where sequences are in the cache.

    Attributes:
        lengths: (B,), one int for all, or None for a cache that is full.
        batch: (B,), the row of the cache of each sequence; None for its own number.
        leftpad: (B,), the first place that counts; None for 0.
        table: (B, pages), or None for a cache without pages.
    """

    lengths: Tensor | int | None
    batch: Tensor | None
    leftpad: Tensor | None
    table: Tensor | None


def attend_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    new: New,
    places: Places,
    rules: Rules,
    cu_seqlens_q: Tensor | None = None,
    qv: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    descales: Descales = NO_DESCALES,
) -> tuple[Tensor, Tensor]:
    """Add `new` to the caches, in place, and attend to all of each sequence.

    Args:
        q: (B, Sq, H, D), or (rows, H, D) with `cu_seqlens_q`.
        k_cache: (Bc, S, Hk, D), or (pages, page, Hk, D) with a table.
        v_cache: the same with Dv.
        new: what is added, and the rotation.
        places: where sequences are.
        rules: of scores.
        cu_seqlens_q: (B + 1,), or None.
        qv: q for values: scores are of (q, qv) and (k, v). Like q with Dv; None for none.
        slopes: of ALiBi.
        sinks: one a head.
        descales: for FP8.

    Returns:
        Out in the form of q, with Dv; lse (B, H, Sq), or (H, rows). Neither is differentiable.
    """
    check_heads(q, k_cache, v_cache, 4 if cu_seqlens_q is None else 3, ("q", "k_cache", "v_cache"))
    if k_cache.ndim != 4:
        raise ValueError(f"k_cache: expected shape (batch or pages, length, heads, dim), got {tuple(k_cache.shape)}")
    queries = (
        equal_lengths(q.shape[0], q.shape[1], q.device)
        if cu_seqlens_q is None
        else by_offsets(q.shape[0], cu_seqlens_q)
    )
    batch, size = queries.first.shape[0], k_cache.shape[1]
    lengths = _lengths(places, batch, size, q.device)
    base = _base(places, batch, size, k_cache.shape[0], q.device)
    flat = q.flatten(0, q.ndim - 3).detach()
    if new.cos is not None or new.sin is not None:
        _check_rotation(new, places, q.shape[-1])
    added = torch.zeros_like(lengths)
    if new.k is not None or new.v is not None:
        added, flat = _append(flat, k_cache, v_cache, queries, new, places, rules, lengths, base)
    elif new.cos is not None:
        raise ValueError("rotary_cos: expected None without k, got a tensor")
    pad = torch.zeros_like(lengths) if places.leftpad is None else places.leftpad.long()
    keys = k_cache.detach()
    if qv is not None:
        check_qv(q, v_cache, qv)
        flat = torch.cat((flat, qv.flatten(0, q.ndim - 3).detach()), dim=-1)
        keys = torch.cat((keys, v_cache.detach()), dim=-1)
    out, lse = attend(
        flat,
        keys.flatten(0, 1),
        v_cache.detach().flatten(0, 1),
        spans=(queries.first, queries.lengths, pad if places.table is not None else base + pad, lengths + added - pad),
        rules=rules,
        page=size,
        table=places.table,
        slopes=slopes,
        sinks=None if sinks is None else sinks.detach(),
        descales=descales,
    )
    if cu_seqlens_q is not None:
        return out, lse
    return out.view(*q.shape[:3], v_cache.shape[3]), unpack_lse(lse, q.shape[0], q.shape[1])


def _lengths(places: Places, batch: int, size: int, device: torch.device) -> Tensor:
    if places.lengths is None and places.table is not None:
        raise ValueError("cache_seqlens: expected the length of each sequence, as there is a table of pages, got None")
    if not isinstance(places.lengths, Tensor):
        return torch.full((batch,), size if places.lengths is None else places.lengths, device=device)
    check_vector("cache_seqlens", places.lengths, batch)
    return places.lengths.long()


def _base(places: Places, batch: int, size: int, rows: int, device: torch.device) -> Tensor:
    """The row of the flat cache where each sequence begins; not used where there are pages."""
    check_vector("cache_batch_idx", places.batch, batch)
    check_vector("cache_leftpad", places.leftpad, batch)
    if places.table is not None:
        if places.batch is not None:
            raise ValueError("cache_batch_idx: expected None, as there is a table of pages, got a tensor")
        if places.table.ndim != 2 or places.table.shape[0] != batch:
            raise ValueError(f"the table of pages: expected shape ({batch}, pages), got {tuple(places.table.shape)}")
        return torch.zeros(batch, dtype=torch.int64, device=device)
    if places.batch is not None:
        return places.batch.long() * size
    if rows < batch:
        raise ValueError(f"k_cache: expected {batch} sequences or more, as q has them, got {rows}")
    return torch.arange(batch, device=device) * size


def _check_rotation(new: New, places: Places, dim: int) -> None:
    for name, x in (("rotary_cos", new.cos), ("rotary_sin", new.sin)):
        if x is None or new.cos is None or x.ndim != 2 or x.shape != new.cos.shape or 2 * x.shape[1] > dim:
            shape = None if x is None else tuple(x.shape)
            raise ValueError(f"{name}: expected shape (places, half of at most {dim} dims), as its fellow, got {shape}")
    if places.leftpad is not None:
        raise ValueError("cache_leftpad: expected None with a rotation, about whose places builds disagree")


def _append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    queries: Packed,
    new: New,
    places: Places,
    rules: Rules,
    lengths: Tensor,
    base: Tensor,
) -> tuple[Tensor, Tensor]:
    """Rotate, and write to the cache. How many keys each sequence got, and q."""
    k, v, batch = new.k, new.v, queries.first.shape[0]
    if k is None or v is None:
        raise ValueError(f"{'k' if k is None else 'v'}: expected a tensor, as its fellow is there, got None")
    if places.lengths is None:
        raise ValueError("cache_seqlens: expected the length of each sequence before k is added, got None")
    front = (batch, k.shape[1]) if new.cu_seqlens is None else (k.shape[0],)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.dtype != cache.dtype:
            raise TypeError(f"{name}: expected {cache.dtype}, as the cache is, got {x.dtype}")
        if tuple(x.shape) != (*front, *cache.shape[2:]):
            raise ValueError(f"{name}: expected shape {(*front, *cache.shape[2:])}, got {tuple(x.shape)}")
    rows = (
        equal_lengths(batch, k.shape[1], q.device) if new.cu_seqlens is None else by_offsets(k.shape[0], new.cu_seqlens)
    )
    owner, number = rows.owners()
    flat = k.detach().flatten(0, k.ndim - 3)
    if new.cos is not None and new.sin is not None:
        start = lengths if new.first is None else new.first.long()
        flat = rotate(flat, start[owner] + number, new)
        who, at = queries.owners()
        moves = rules.left >= 0 or rules.right >= 0  # where all see all, each query stands at the end
        q = rotate(q, start[who] + at if moves else start[who], new)
    place = lengths[owner] + number
    place = torch.where(number < rows.lengths[owner], place, -1)
    ops.write.default(k_cache, v_cache, flat, v.detach().flatten(0, v.ndim - 3), owner, place, base, places.table)
    return rows.lengths, q


def rotate(x: Tensor, places: Tensor, new: New) -> Tensor:
    """Turn the pairs of the first R dims of each row by the angles of its place, in float32 or float64.

    (a, b) becomes (a cos - b sin, a sin + b cos): Su et al., RoFormer (arXiv:2104.09864), 3.2.2.
    """
    assert new.cos is not None
    assert new.sin is not None
    half, dtype = new.cos.shape[1], wide(x.dtype)
    at = places.clamp(0, new.cos.shape[0] - 1)  # rows of no sequence have no place
    cos, sin = (table.to(dtype)[at].unsqueeze(1) for table in (new.cos, new.sin))
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    if new.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        made = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        made = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((made.to(x.dtype), rest), dim=-1)


@torch.library.custom_op(
    qualified("write"),
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor owner, Tensor place, Tensor base,"
    " Tensor? table) -> ()",
)
def _write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    owner: Tensor,
    place: Tensor,
    base: Tensor,
    table: Tensor | None,
) -> None:
    kept = place >= 0
    owner, place, size = owner[kept], place[kept], k_cache.shape[1]
    room = size if table is None else size * table.shape[1]
    if len(place) and int(place.max()) >= room:
        raise ValueError(f"k: expected to fit in a cache of {room} places, got place {int(place.max())}")
    row = base[owner] // size if table is None else table.long()[owner, place // size]
    k_cache[row, place % size] = k[kept]
    v_cache[row, place % size] = v[kept]


@_write.register_fake
def _(*arguments: object) -> None:
    pass
