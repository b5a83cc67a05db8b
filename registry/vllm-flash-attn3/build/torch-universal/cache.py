"""Attention over a cache of keys and values, to which new ones may be added first."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._ops import ops, qualified
from .attend import attend, check_heads, check_order, check_qv, check_terms, check_vector, rows_of_keys
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
    longest: int | None = None,
    whole: bool = True,
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
        longest: rows that a sequence of q has at most, where there is `cu_seqlens_q`; all of them if None.
        whole: whether sides of a window are left out by the size of the cache alone; see `_without_idle_sides`.

    Returns:
        Out in the form of q, with Dv; lse (B, H, Sq), or (H, rows). Neither is differentiable.
    """
    check_heads(q, k_cache, v_cache, 4 if cu_seqlens_q is None else 3, ("q", "k_cache", "v_cache"))
    if k_cache.ndim != 4:
        raise ValueError(f"k_cache: expected shape (batch or pages, length, heads, dim), got {tuple(k_cache.shape)}")
    _check_offsets("cu_seqlens_q", cu_seqlens_q, None)
    queries = (
        equal_lengths(q.shape[0], q.shape[1], q.device)
        if cu_seqlens_q is None
        else by_offsets(q.shape[0], cu_seqlens_q)
    )
    batch, size = queries.first.shape[0], k_cache.shape[1]
    lengths = _lengths(places, batch, size, q.device)
    base = _base(places, batch, size, k_cache.shape[0], q.device)
    pad = torch.zeros_like(lengths) if places.leftpad is None else places.leftpad.long()
    room = size if places.table is None else size * places.table.shape[1]
    if cu_seqlens_q is None or longest is None:
        longest = q.shape[-3]
    rules = _without_idle_sides(rules, *((room, room) if whole else (room - 1, longest - 1)))
    check_terms(q, k_cache, batch, slopes, sinks, descales)
    if qv is not None:
        check_qv(q, v_cache, qv)
    flat = q.flatten(0, q.ndim - 3).detach()
    if new.cos is not None or new.sin is not None:
        _check_rotation(new, places, q.shape[-1])
    added = torch.zeros_like(lengths)
    if new.k is not None or new.v is not None:
        added, flat = _append(flat, k_cache, v_cache, queries, new, places, rules, lengths, base, pad)
    elif new.cos is not None:
        raise ValueError("rotary_cos: expected None without k, got a tensor")
    keys = k_cache.detach()
    if qv is not None:
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


def _without_idle_sides(rules: Rules, left: int, right: int) -> Rules:
    """Rules without sides of a window of so many places and more, which hide nothing.

    The results are the same but for a rotation: without a window, q is turned as at one place. Published builds leave
    these sides out, from one place on that depends on the build.
    """
    return rules._replace(
        left=-1 if rules.left >= left else rules.left, right=-1 if rules.right >= right else rules.right
    )


def _check_offsets(name: str, offsets: Tensor | None, batch: int | None) -> None:
    if offsets is None:
        return
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name}: expected shape (sequences + 1,), got {tuple(offsets.shape)}")
    check_vector(name, offsets, offsets.shape[0] if batch is None else batch + 1)


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
    pad: Tensor,
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
    _check_offsets("cu_seqlens_k_new", new.cu_seqlens, batch)
    check_vector("rotary_seqlens", new.first, batch)
    rows = (
        equal_lengths(batch, k.shape[1], q.device) if new.cu_seqlens is None else by_offsets(k.shape[0], new.cu_seqlens)
    )
    flat, start, places_turned = k.detach().flatten(0, k.ndim - 3), None, 0
    moves = rules.left >= 0 or rules.right >= 0 or rules.chunk > 0  # where all see all, each query stands at the end
    if batch and new.cos is not None and new.sin is not None:
        start, places_turned = lengths if new.first is None else new.first.long(), new.cos.shape[0]
        owner, number = rows.owners()
        flat = rotate(flat, start[owner] + number, new)
        who, at = queries.owners()
        q = rotate(q, start[who] + at if moves else start[who], new)
    ops.write.default(
        k_cache,
        v_cache,
        flat,
        v.detach().flatten(0, v.ndim - 3),
        *(rows.first, rows.lengths, queries.first, queries.lengths, lengths, base, pad),
        places.table,
        start,
        q.shape[0],
        places_turned,
        moves,
    )
    return rows.lengths, q


def rotate(x: Tensor, places: Tensor, new: New) -> Tensor:
    """Turn the pairs of the first R dims of each row by the angles of its place, in float32 or float64.

    (a, b) becomes (a cos - b sin, a sin + b cos): Su et al., RoFormer (arXiv:2104.09864), 3.2.2.
    """
    assert new.cos is not None
    assert new.sin is not None
    half, dtype = new.cos.shape[1], wide(x.dtype)
    # Rows of no sequence have no place. The op that writes refuses those of others that the tables have not.
    at = places.clamp(0, max(new.cos.shape[0] - 1, 0))
    if not new.cos.shape[0]:
        return x
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
    schema="(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor first, Tensor count, Tensor q_first,"
    " Tensor q_count, Tensor length, Tensor base, Tensor pad, Tensor? table, Tensor? turned_from, int q_rows,"
    " int places_turned, bool moves) -> ()",
)
def _write(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    count: Tensor,
    q_first: Tensor,
    q_count: Tensor,
    length: Tensor,
    base: Tensor,
    pad: Tensor,
    table: Tensor | None,
    turned_from: Tensor | None,
    q_rows: int,
    places_turned: int,
    moves: bool,  # noqa: FBT001 - as the schema has it
) -> None:
    """Add `count` rows of k and v from `first` on to the `length` ones of each sequence, (B,) each.

    All that the call will read and write is looked at before anything is written.
    """
    firsts, counts, q_firsts, q_counts, lengths, bases, pads = (
        x.tolist() for x in (first, count, q_first, q_count, length, base, pad)
    )
    check_order("q", q_firsts, q_counts, q_rows)
    check_order("k", firsts, counts, len(k))
    if turned_from is not None:
        steps = [max(new, (own if moves else min(own, 1))) for new, own in zip(counts, q_counts, strict=True)]
        _check_turned(turned_from.tolist(), steps, places_turned)
    pages, size = k_cache.shape[:2]
    room = size if table is None else size * table.shape[1]
    rows, sources = [], []
    for b, (start, new, before) in enumerate(zip(firsts, counts, lengths, strict=True)):
        if before < 0:
            raise ValueError(f"cache_seqlens: expected lengths of at least 0, got {lengths}")
        if before + new > room:
            raise ValueError(f"k: expected to fit in a cache of {room} places, got place {before + new - 1}")
        if not 0 <= pads[b] <= before + new:
            raise ValueError(f"cache_leftpad: expected places of the {before + new} keys there are, got {pads}")
        if table is None and not 0 <= bases[b] < max(pages * size, 1):
            raise ValueError(
                f"cache_batch_idx: expected rows of {pages}, got {[place // max(size, 1) for place in bases]}"
            )
        own = None if table is None else table[b]
        rows.append(rows_of_keys(bases[b], before + new, pages * size, size, own)[before:])
        sources.append(torch.arange(start, start + new))
    if not rows:
        return
    row, source = torch.cat(rows).to(k_cache.device), torch.cat(sources).to(k.device)
    k_cache[row // max(size, 1), row % max(size, 1)] = k[source]
    v_cache[row // max(size, 1), row % max(size, 1)] = v[source]


def _check_turned(starts: list[int], steps: list[int], places: int) -> None:
    """The tables of the rotation have the places of all rows that are turned, `steps` from `starts` on."""
    for start, count in zip(starts, steps, strict=True):
        if start < 0 or (count and start + count > places):
            raise ValueError(
                f"rotary_cos: expected places that are turned to be among its {places}, got {start} to {start + count}"
            )


@_write.register_fake
def _(*arguments: object) -> None:
    pass
