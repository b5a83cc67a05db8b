"""What the FlashAttention kernels are held against: the formulas of kernel_loader/bundles/attention.py, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_FP8: Final = torch.float8_e4m3fn
_I32: Final = torch.int32
_INF: Final = float("inf")

# ------------------------------------------------------------------------------------------------------------ formula


def _one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    slopes: Tensor | None = None,
    qv: Tensor | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,  # noqa: ANN401, ARG001 - changes no result
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, (Sq, H, D), (Sk, Hk, D), (Sk, Hk, Dv): out (Sq, H, Dv) and lse (H, Sq)."""
    repeats = q.shape[1] // k.shape[1]
    keys, values = (x.to(_F64).repeat_interleave(repeats, dim=1) for x in (k, v))
    products = torch.einsum("ihd,jhd->hij", q.to(_F64), keys)
    dim = q.shape[2]
    if qv is not None:
        products = products + torch.einsum("ihd,jhd->hij", qv.to(_F64), values)
        dim += qv.shape[2]
    scores = products * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0.0:
        scores = softcap * (scores / softcap).tanh()
    place = (torch.arange(q.shape[0], device=q.device) + k.shape[0] - q.shape[0])[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None, :]
    if slopes is not None:
        scores = scores - slopes.to(_F64)[:, None, None] * (place - key).abs()
    left, right = (_INF if side < 0 else side for side in window_size)
    seen = (key >= place - left) & (key <= place + (0 if causal else right))
    if attention_chunk > 0:
        seen &= key // attention_chunk == place // attention_chunk
    blind = ~seen.any(-1)
    # Rows that see nothing get numbers that have a gradient, which is then multiplied by zero.
    scores = scores.masked_fill(~seen & ~blind[:, None], -_INF)
    if s_aux is not None:
        sink = s_aux.to(_F64)[:, None, None].expand(-1, q.shape[0], 1)
        lse = torch.cat((scores.masked_fill(~seen, -_INF), sink), dim=-1).logsumexp(-1)
        weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    else:
        lse = scores.logsumexp(-1).masked_fill(blind, -_INF)
        weights = scores.softmax(-1)
    weights = weights.masked_fill(blind[:, None], 0.0)
    return torch.einsum("hij,jhd->ihd", weights, values), lse.detach()


def _descaled(x: Tensor, descale: Tensor | None, b: int) -> Tensor:
    """FP8 codes of sequence b, (S, H, D), as numbers; other dtypes as they are."""
    if x.dtype != _FP8:
        return x
    wide = x.to(_F64)
    if descale is None:
        return wide
    return wide * descale[b].to(_F64).repeat_interleave(x.shape[1] // descale.shape[1])[:, None]


def _of(
    b: int,
    alibi_slopes: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **how: Any,  # noqa: ANN401
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The attention of sequence b."""
    slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        descaled = (_descaled(x, d, b) for x, d in zip((q, k, v), (q_descale, k_descale, v_descale), strict=True))
        return _one(*descaled, slopes=slopes, **how)

    return attend


def _dense(q: Tensor, k: Tensor, v: Tensor, *, qv: Tensor | None = None, **how: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    made = [_of(b, qv=None if qv is None else qv[b], **how)(q[b], k[b], v[b]) for b in range(q.shape[0])]
    if not made:
        return q.new_zeros((*q.shape[:3], v.shape[3]), dtype=_F64), q.new_zeros((0, q.shape[2], q.shape[1]), dtype=_F64)
    return torch.stack([out for out, _ in made]), torch.stack([lse for _, lse in made])


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,  # noqa: ARG001 - changes no result
    max_seqlen_k: int,  # noqa: ARG001
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    qv: Tensor | None = None,
    **how: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    starts, ends = cu_seqlens_q.tolist()[:-1], cu_seqlens_q.tolist()[1:]
    key_starts, key_ends = cu_seqlens_k.tolist()[:-1], cu_seqlens_k.tolist()[1:]
    outs, sums, row = [], [], 0
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        used = end - start if seqused_q is None else int(seqused_q[b])
        keys = key_ends[b] - key_starts[b] if seqused_k is None else int(seqused_k[b])
        if block_table is None:
            own = [x[key_starts[b] : key_starts[b] + keys] for x in (k, v)]
        else:
            own = [x[block_table[b].long()].flatten(0, 1)[:keys] for x in (k, v)]
        at = slice(start, start + used)
        out, lse = _of(b, qv=None if qv is None else qv[at], **how)(q[at], *own)
        for width in (start - row, 0):
            outs.append(out.new_zeros(width, *out.shape[1:]))
            sums.append(lse.new_full((lse.shape[0], width), -_INF))
            if not width:
                break
        outs.append(out)
        sums.append(lse)
        row = start + used
    outs.append(q.new_zeros((q.shape[0] - row, q.shape[1], v.shape[-1]), dtype=_F64))
    sums.append(q.new_full((q.shape[1], q.shape[0] - row), -_INF, dtype=_F64))
    return torch.cat(outs), torch.cat(sums, dim=1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, *, interleaved: bool) -> Tensor:
    """(S, H, D) with each pair of the first dims turned by the angle of its place, rounded to its dtype."""
    half, made = cos.shape[1], x.to(_F64).clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = (table.to(_F64)[places, i][:, None] for table in (cos, sin))
        first, second = x[..., a].to(_F64), x[..., b].to(_F64)
        made[..., a], made[..., b] = first * c - second * s, first * s + second * c
    return made.to(x.dtype)


def _cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    return_softmax_lse: bool = False,
    max_seqlen_q: int | None = None,
    whole: bool = False,
    **how: Any,  # noqa: ANN401
) -> tuple[Any, Tensor, Tensor]:
    """Sequence by sequence and place by place, out of caches that are copied.

    `whole`: a window counts unless it is as large as the cache, for the rotation; else, unless it hides nothing.
    """
    caches = [k_cache.to(_F64).clone(), v_cache.to(_F64).clone()]
    size, outs, sums = k_cache.shape[1], [], []
    offsets = None if cu_seqlens_q is None else cu_seqlens_q.tolist()
    room = size if page_table is None else size * page_table.shape[1]
    longest = max_seqlen_q or q.shape[-3]
    idle = (room, room) if whole else (room - 1, longest - 1)
    sides = zip(how.get("window_size", (-1, -1)), idle, strict=True)
    local = how.get("causal") or how.get("attention_chunk") or any(0 <= side < most for side, most in sides)
    for b in range(q.shape[0] if offsets is None else len(offsets) - 1):
        own = q[b] if offsets is None else q[offsets[b] : offsets[b + 1]]
        if cache_seqlens is None:
            length = size
        else:
            length = cache_seqlens if isinstance(cache_seqlens, int) else int(cache_seqlens[b])
        new = 0 if k is None else k.shape[1]
        total = length + new
        if page_table is None:
            row = b if cache_batch_idx is None else int(cache_batch_idx[b])
            where = [(row, place) for place in range(total)]
        else:
            where = [(int(page_table[b, place // size]), place % size) for place in range(total)]
        if rotary_cos is not None and rotary_sin is not None and k is not None:
            start = length if rotary_seqlens is None else int(rotary_seqlens[b])
            steps = torch.arange(own.shape[0], device=q.device) if local else torch.zeros_like(own[:, 0, 0]).long()
            own = _turned(own, rotary_cos, rotary_sin, start + steps, interleaved=rotary_interleaved)
            at = start + torch.arange(new, device=q.device)
            added = _turned(k[b], rotary_cos, rotary_sin, at, interleaved=rotary_interleaved)
        elif k is not None:
            added = k[b]
        for i in range(new):
            caches[0][where[length + i]] = added[i].to(_F64)
            caches[1][where[length + i]] = v[b, i].to(_F64)  # type: ignore[index]
        first = 0 if cache_leftpad is None else int(cache_leftpad[b])
        places = tuple(
            torch.tensor(part, device=q.device, dtype=torch.int64) for part in zip(*where[first:], strict=True)
        )
        keys, values = (cache[places] if places else cache[:0, 0] for cache in caches)
        out, lse = _of(b, qv=None if qv is None else qv[b], **how)(own, keys, values)
        outs.append(out)
        sums.append(lse)
    join = torch.stack if offsets is None else torch.cat
    out, lse = join(outs), torch.stack(sums) if offsets is None else torch.cat(sums, dim=1)
    return ((out, lse) if return_softmax_lse else out), caches[0], caches[1]


def _combined(
    out_partial: Tensor,
    lse_partial: Tensor,
    out_dtype: torch.dtype | None = None,  # noqa: ARG001 - rounds, which is for the tolerance
) -> tuple[Tensor, Tensor]:
    weights = lse_partial.to(_F64).exp()
    total = weights.sum(0)
    parts = out_partial.to(_F64).masked_fill(weights[..., None] == 0.0, 0.0)
    made = torch.einsum("nbsh,nbshd->bshd", weights, parts)
    return made / total.masked_fill(total == 0.0, 1.0)[..., None], total.log()


def _infinite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -_INF, _INF)


def _func2(q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: bool = False, **how: Any) -> Any:  # noqa: ANN401
    out, lse = _dense(q, k, v, **how)
    return (out, _infinite(lse), out.new_zeros(0)) if return_attn_probs else out


def _varlen2(*args: Any, return_attn_probs: bool = False, **how: Any) -> Any:  # noqa: ANN401
    out, lse = _packed(*args, **how)
    return (out, _infinite(lse), out.new_zeros(0)) if return_attn_probs else out


def _cached2(*args: Any, block_table: Tensor | None = None, **how: Any) -> tuple[Any, Tensor, Tensor]:  # noqa: ANN401
    returned, *caches = _cached(*args, page_table=block_table, whole=True, **how)
    if isinstance(returned, tuple):
        returned = returned[0], _infinite(returned[1])
    return returned, *caches


def _func3(q: Tensor, k: Tensor, v: Tensor, *, return_attn_probs: bool = False, **how: Any) -> Any:  # noqa: ANN401
    return _dense(q, k, v, **how) if return_attn_probs else _dense(q, k, v, **how)[0]


def _varlen3(*args: Any, return_attn_probs: bool = False, **how: Any) -> Any:  # noqa: ANN401
    return _packed(*args, **how) if return_attn_probs else _packed(*args, **how)[0]


def _parts(qkv: Tensor, heads: int | None = None) -> Sequence[Tensor]:
    if heads is None:
        return qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
    middle = (qkv.shape[2] + heads) // 2
    return qkv[:, :, :heads], qkv[:, :, heads:middle], qkv[:, :, middle:]


def _qkv3(qkv: Tensor, *, num_heads_q: int | None = None, **how: Any) -> Any:  # noqa: ANN401
    return _func3(*_parts(qkv, num_heads_q), **how)


# ------------------------------------------------------------------------------------------------------------- inputs


def _draw_qkv(
    draw: Draw,
    queries: Sequence[int],
    keys: Sequence[int],
    heads: Sequence[int],
    dims: Sequence[int],
    dtype: torch.dtype,
) -> list[Tensor]:
    shapes = ((*queries, heads[0], dims[0]), (*keys, heads[1], dims[0]), (*keys, heads[1], dims[1]))
    return [draw.normal(*shape).to(dtype) for shape in shapes]


def _case(
    sq: int,
    sk: int,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 4),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = _BF16,
    strided: bool = False,
    sinks: bool = False,
    qv: bool = False,
    slopes: int = 0,
    descales: bool = False,
    **how: Any,  # noqa: ANN401 - arguments of the entrypoint
) -> Callable[[Draw], Inputs]:
    """Sequences of one length; `slopes` is the number of dimensions of alibi_slopes."""

    def make(draw: Draw) -> Inputs:
        tensors = _draw_qkv(draw, (batch, sq), (batch, sk), heads, dims, dtype)
        if strided:  # as a model makes them: heads before the sequence, in memory
            tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        more = dict(how)
        if sinks:
            more["s_aux"] = draw.normal(heads[0], dtype=_BF16)
        if qv:
            more["qv"] = draw.normal(batch, sq, heads[0], dims[1], dtype=dtype)
        if slopes:
            more["alibi_slopes"] = draw.uniform(*(batch, heads[0])[2 - slopes :])
        if descales:
            for name in ("q_descale", "k_descale", "v_descale"):
                more[name] = draw.uniform(batch, heads[1], low=0.5, high=1.5)
        return Inputs(*tensors, **more)

    return make


def _offsets(draw: Draw, lengths: Sequence[int], extra: int = 0) -> Tensor:
    return draw.put(torch.tensor([0, *lengths]).cumsum(0).add(extra).to(_I32))


def _extras(
    draw: Draw, batch: int, heads: int, how: dict[str, Any], *, sinks: bool = False, slopes: int = 0
) -> dict[str, Any]:
    """`how` with sinks of heads, and slopes of heads, or of sequences and heads."""
    if sinks:
        how["s_aux"] = draw.normal(heads, dtype=_BF16)
    if slopes:
        how["alibi_slopes"] = draw.uniform(*(batch, heads)[2 - slopes :])
    return how


def _table(draw: Draw, lengths: Sequence[int], page: int) -> tuple[Tensor, int]:
    """Pages of sequences in any order, (B, pages) int32, and how many there are, one of them of no sequence."""
    needed = [-(-length // page) for length in lengths]
    order = draw.permutation(sum(needed) + 1).to(_I32)
    table = torch.zeros(len(lengths), max(needed, default=0), dtype=_I32, device=order.device)
    for b, count in enumerate(needed):
        table[b, :count] = order[sum(needed[:b]) :][:count]
    return table, len(order)


def _varlen(
    queries: Sequence[int],
    keys: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 4),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = _BF16,
    page: int = 0,
    sinks: bool = False,
    slopes: int = 0,
    **how: Any,  # noqa: ANN401
) -> Callable[[Draw], Inputs]:
    """Packed sequences; keys in pages of `page` places."""

    def make(draw: Draw) -> Inputs:
        q, k, v = _draw_qkv(draw, (sum(queries),), (sum(keys),), heads, dims, dtype)
        more = _extras(draw, len(queries), heads[0], dict(how), sinks=sinks, slopes=slopes)
        if page:
            more["block_table"], count = _table(draw, keys, page)
            k, v = (draw.normal(count, page, heads[1], dim, dtype=dtype) for dim in dims)
        longest = (max(queries, default=0), max(keys, default=0))
        return Inputs(q, k, v, _offsets(draw, queries), _offsets(draw, keys), *longest, **more)

    return make


def _used(draw: Draw) -> Inputs:
    """Sequences of which half of the keys count; the others are NaN."""
    inputs = _varlen((5, 17), (9, 34), causal=True)(draw)
    counts = draw.put(torch.tensor([4, 17], dtype=_I32))
    for x in inputs.args[1:3]:
        x[4:9] = x[26:] = float("nan")
    return Inputs(*inputs.args, seqused_k=counts, **inputs.kwargs)


def _cache(
    sq: int,
    lengths: Sequence[int],
    *,
    new: int = 0,
    size: int = 64,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = _BF16,
    page: str = "",
    turned: int = 0,
    sinks: bool = False,
    slopes: int = 0,
    options: Callable[[Draw], dict[str, Any]] | None = None,
    **how: Any,  # noqa: ANN401
) -> Callable[[Draw], Inputs]:
    """A cache of `size` places a row or page; `page` names the table of pages. `turned` dims are turned."""

    def make(draw: Draw) -> Inputs:
        batch = len(lengths)
        more = _extras(draw, batch, heads[0], dict(how), sinks=sinks, slopes=slopes)
        more.setdefault("cache_seqlens", draw.put(torch.tensor(lengths, dtype=_I32)))
        rows = batch + 1
        if page:
            more[page], rows = _table(draw, [length + new for length in lengths], size)
        args = [draw.normal(batch, sq, heads[0], dims[0], dtype=dtype)]
        args += [draw.normal(rows, size, heads[1], dim, dtype=dtype) for dim in dims]
        if new:
            args += [draw.normal(batch, new, heads[1], dim, dtype=dtype) for dim in dims]
        if turned:
            angles = draw.uniform(max(lengths) + new + sq, turned // 2, high=2 * math.pi)
            more |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
        return Inputs(*args, **more, **(options(draw) if options else {}))

    return make


def _ragged(make: Callable[[Draw], Inputs], lengths: Sequence[int]) -> Callable[[Draw], Inputs]:
    """The same cache, for packed queries."""

    def packed(draw: Draw) -> Inputs:
        inputs = make(draw)
        q = draw.normal(sum(lengths), *inputs.args[0].shape[2:], dtype=inputs.args[0].dtype)
        offsets = {"cu_seqlens_q": _offsets(draw, lengths), "max_seqlen_q": max(lengths)}
        return Inputs(q, *inputs.args[1:], **inputs.kwargs, **offsets)

    return packed


def _packed_in_one(make: Callable[[Draw], Inputs], *, parts: int, axis: int) -> Callable[[Draw], Inputs]:
    """The last `parts` of q, k and v in one tensor; k and v, or q, k and v."""

    def joined(draw: Draw) -> Inputs:
        inputs = make(draw)
        q, k, v, *rest = inputs.args
        if parts == 2:
            return Inputs(q, torch.stack((k, v), dim=axis), *rest, **inputs.kwargs)
        offsets = [] if not rest else [rest[0], rest[2]]
        return Inputs(torch.stack((q, k, v), dim=axis), *offsets, **inputs.kwargs)

    return joined


def _heads_in_one(make: Callable[[Draw], Inputs]) -> Callable[[Draw], Inputs]:
    """Heads of q, of k and of v in one tensor."""

    def joined(draw: Draw) -> Inputs:
        inputs = make(draw)
        return Inputs(torch.cat(inputs.args, dim=2), num_heads_q=inputs.args[0].shape[2], **inputs.kwargs)

    return joined


def _parts_of_keys(n: int, batch: int, rows: int, heads: int, dim: int, *, blind: bool = False, **how: Any) -> Any:  # noqa: ANN401
    def make(draw: Draw) -> Inputs:
        lse = draw.normal(n, batch, heads, rows, scale=3.0).transpose(2, 3)
        if blind:
            lse[0] = -_INF
            lse[:, :, 0] = -_INF
        out = draw.normal(n, batch, rows, heads, dim)
        if blind:
            out[0] = float("nan")  # of what a row sees nothing of, there may be anything
        return Inputs(out, lse, **how)

    return make


# -------------------------------------------------------------------------------------------------------------- cases

# A graph of each takes a moment: those that differ in the shapes and arguments that reach the operator are enough.
_NOT_COMPILED: Final[tuple[Mode, ...]] = ("eager", "graph", "backward")
_FORWARD: Final[tuple[Mode, ...]] = ("eager", "graph")

_HALF: Final = "published builds are for bfloat16 and float16"
_NOT_EMPTY: Final = "published builds want at least one sequence, query and key"
_GQA2: Final = "version 3 has no backward with fewer heads of k than of q"
_SM90: Final = "published builds have it on capability 9.0 alone"
_DIMS2: Final = "published builds want Dv = D"
_PAGES2: Final = "published builds want pages of a multiple of 256"


def _eager(
    name: str, make: Callable[[Draw], Inputs], may_refuse: str = "", modes: tuple[Mode, ...] = _NOT_COMPILED
) -> Case:
    return Case(name, make, modes, may_refuse)


_LENGTHS: Final = ((1, 1), (1, 65), (9, 5), (127, 128), (129, 129), (3, 513))

_DENSE_CASES: Final = (
    Case("causal", _case(17, 33, causal=True)),
    *(_eager(f"{sq} queries, {sk} keys", _case(sq, sk)) for sq, sk in _LENGTHS),
    *(_eager(f"causal, {sq} queries, {sk} keys", _case(sq, sk, causal=True)) for sq, sk in _LENGTHS),
    *(_eager(f"window {left}, 0", _case(70, 70, causal=True, window_size=(left, 0))) for left in (0, 63)),
    _eager("window 3, 5", _case(33, 33, window_size=(3, 5))),
    _eager("window 3, 5, fewer queries than keys", _case(9, 140, window_size=(3, 5))),
    _eager("window without left", _case(33, 40, window_size=(-1, 2))),
    _eager("window without right", _case(20, 40, window_size=(4, -1))),
    _eager("window past every key", _case(17, 17, window_size=(64, 64))),
    _eager("softcap", _case(33, 33, softcap=2.0)),
    _eager("softcap, causal, window", _case(33, 65, softcap=5.0, causal=True, window_size=(9, 0))),
    _eager("scale", _case(17, 17, softmax_scale=0.5)),
    *(_eager(f"{dim} dims", _case(17, 17, dims=(dim, dim))) for dim in (8, 64, 128, 256)),
    _eager("float16", _case(17, 33, dtype=_F16, causal=True)),
    _eager("float32", _case(17, 33, dtype=_F32, causal=True), _HALF),
    _eager("float64", _case(9, 12, dtype=_F64, causal=True), _HALF),
    _eager("strided", _case(17, 33, strided=True, causal=True)),
    _eager("no sequence", _case(5, 5, batch=0), _NOT_EMPTY),
    _eager("no query", _case(0, 5), _NOT_EMPTY),
    _eager("no key", _case(5, 0), _NOT_EMPTY),
)

_VARLEN: Final = ((1,), (4, 0, 7), (130, 1))
_PACKED_CASES: Final = (
    Case("causal", _varlen((5, 3, 9), (8, 3, 11), causal=True)),
    *(_eager(f"lengths {lengths}", _varlen(lengths, lengths)) for lengths in _VARLEN),
    *(_eager(f"causal, lengths {lengths}", _varlen(lengths, lengths, causal=True)) for lengths in _VARLEN),
    _eager("more keys than queries", _varlen((1, 4, 1), (64, 9, 513), causal=True)),
    _eager("fewer keys than queries", _varlen((9, 30, 5), (4, 13, 5), causal=True)),
    _eager("a sequence without keys", _varlen((3, 4), (0, 9))),
    _eager("window 5, 0", _varlen((40, 17), (40, 17), causal=True, window_size=(5, 0))),
    _eager("softcap", _varlen((9, 17), (9, 17), softcap=3.0)),
    _eager("float16", _varlen((9, 17), (9, 17), dtype=_F16)),
    _eager("float32", _varlen((9, 17), (9, 17), dtype=_F32), _HALF),
    _eager("no sequence", _varlen((), ()), _NOT_EMPTY),
    _eager("no row", _varlen((0, 0), (0, 0)), _NOT_EMPTY),
)


def _grouped(cases: Callable[..., Callable[[Draw], Inputs]], *lengths: Any, why: str = "") -> tuple[Case, ...]:  # noqa: ANN401
    """Several heads of q to one of k; two cases each, so that what may refuse its backward must still do forward."""
    found = []
    for heads in ((6, 2), (4, 1)):
        make = cases(*lengths, heads=heads, causal=True)
        name = f"{heads[0]} heads to {heads[1]}"
        found += [_eager(name, make, modes=_FORWARD), _eager(f"{name}, backward", make, why, ("backward",))]
    return tuple(found)


def _rows_of_cache(draw: Draw) -> dict[str, Any]:
    return {"cache_batch_idx": draw.permutation(4)[:3].to(_I32)}


def _left_padding(draw: Draw) -> dict[str, Any]:
    return {"cache_leftpad": draw.put(torch.tensor([1, 20, 3], dtype=_I32))}


def _cached_cases(page: str) -> tuple[Case, ...]:
    return (
        Case("one query", _cache(1, (5, 64, 1)), (*_FORWARD, "compile")),
        Case("one query, one new key", _cache(1, (5, 63, 0), new=1, causal=True), (*_FORWARD, "compile")),
        _eager("new keys, causal", _cache(4, (5, 60, 0), new=4, causal=True), modes=_FORWARD),
        _eager("new keys, not causal", _cache(3, (5, 60, 0), new=4), modes=_FORWARD),
        _eager("window", _cache(2, (5, 60, 0), new=4, causal=True, window_size=(7, 0)), modes=_FORWARD),
        _eager("softcap", _cache(2, (5, 60), softcap=2.0), modes=_FORWARD),
        _eager("lse", _cache(2, (5, 60), return_softmax_lse=True), modes=_FORWARD),
        _eager("a full cache", _cache(2, (64, 64), cache_seqlens=64), modes=_FORWARD),
        _eager("rows of the cache", _cache(2, (5, 60, 9), new=2, causal=True, options=_rows_of_cache), modes=_FORWARD),
        _eager("left padding", _cache(2, (5, 60, 9), causal=True, options=_left_padding), modes=_FORWARD),
        *(
            _eager(f"turned, {name}", _cache(3, (5, 60), new=3, turned=16, **how), modes=_FORWARD)
            for name, how in (
                ("causal", {"causal": True}),
                ("not causal", {}),
                ("window", {"window_size": (4, 1)}),
                ("window past every key", {"window_size": (64, 64)}),
                ("halves", {"causal": True, "rotary_interleaved": False}),
            )
        ),
        _eager("turned, all dims", _cache(2, (5, 60), new=2, turned=32, causal=True), modes=_FORWARD),
        _eager("pages", _cache(2, (255, 513, 1), size=256, page=page, causal=True), modes=_FORWARD),
        _eager("pages, new keys", _cache(2, (255, 300), size=256, page=page, new=2, causal=True), modes=_FORWARD),
        _eager("pages of 16", _cache(2, (5, 40), size=16, page=page, new=2, causal=True), _PAGES2, _FORWARD),
        _eager("float32", _cache(2, (5, 40), new=2, dtype=_F32), _HALF, _FORWARD),
    )


_FLASH2_DENSE: Final = (
    *_DENSE_CASES,
    *_grouped(_case, 17, 33, why=_GQA2),
    _eager("slopes of heads", _case(17, 33, slopes=1)),
    _eager("slopes of sequences, causal", _case(33, 65, slopes=2, causal=True)),
    _eager("slopes, window", _case(17, 17, slopes=1, window_size=(4, 2))),
    _eager("lse", _case(5, 9, return_attn_probs=True)),
    _eager("lse, rows that see nothing", _case(9, 5, causal=True, return_attn_probs=True)),
    _eager("12 dims", _case(17, 17, dims=(12, 12))),
    _eager("values of other dims", _case(9, 9, dims=(32, 16)), _DIMS2),
)

_FLASH2_PACKED: Final = (
    *_PACKED_CASES,
    *_grouped(_varlen, (5, 17), (9, 17), why=_GQA2),
    _eager("slopes", _varlen((5, 17), (9, 17), slopes=2)),
    _eager("lse", _varlen((5, 17), (9, 17), return_attn_probs=True)),
    _eager("pages", _varlen((5, 17), (300, 17), page=256, causal=True), modes=_FORWARD),
    _eager("pages of 16", _varlen((5, 17), (40, 17), page=16, causal=True), _PAGES2, _FORWARD),
)

_FLASH2_CACHE: Final = (
    *_cached_cases("block_table"),
    _eager("slopes", _cache(2, (5, 40), slopes=1), modes=_FORWARD),
)

_FP8_CASES: Final = (
    _eager("FP8", _case(17, 33, dtype=_FP8), _SM90, _FORWARD),
    _eager("FP8, scales", _case(17, 33, dtype=_FP8, descales=True, heads=(4, 2), causal=True), _SM90, _FORWARD),
)
_QV: Final = _eager("q for values", _case(9, 17, qv=True, dims=(32, 64), causal=True), _SM90, _FORWARD)
_UNEQUAL: Final = _eager(
    "values of other dims", _case(9, 9, dims=(32, 16)), "published builds have some pairs of D and Dv"
)

_FLASH3_DENSE: Final = (
    *_DENSE_CASES,
    *_grouped(_case, 17, 33),
    _eager("lse", _case(5, 9, return_attn_probs=True)),
    _eager("lse, rows that see nothing", _case(9, 5, causal=True, return_attn_probs=True)),
    *(
        _eager(f"chunks of {chunk}", _case(sq, 70, attention_chunk=chunk, causal=causal), modes=_FORWARD)
        for sq, chunk, causal in ((70, 16, True), (33, 7, False), (5, 64, True))
    ),
    *_FP8_CASES,
    _QV,
    _UNEQUAL,
)

_FLASH3_PACKED: Final = (
    *_PACKED_CASES,
    *_grouped(_varlen, (5, 17), (9, 17)),
    _eager("lse", _varlen((5, 17), (9, 17), return_attn_probs=True)),
    _eager("keys that do not count", _used),
)

_FLASH3_CACHE: Final = (
    *_cached_cases("page_table"),
    _eager("packed queries", _ragged(_cache(1, (5, 40, 7), causal=True), (1, 4, 2)), modes=_FORWARD),
    _eager("turned, idle window", _cache(3, (5, 60), new=3, turned=16, window_size=(63, 2)), modes=_FORWARD),
    _eager(
        "packed queries, pages",
        _ragged(_cache(1, (5, 40), size=16, page="page_table", causal=True), (1, 4)),
        modes=_FORWARD,
    ),
)

_CHUNKED_CACHE: Final = tuple(
    _eager(f"turned, chunks of {chunk}", _cache(3, (5, 60), new=3, turned=16, attention_chunk=chunk), modes=_FORWARD)
    for chunk in (4, 128)
)

_VLLM_DENSE: Final = (
    *_DENSE_CASES,
    *_grouped(_case, 17, 33),
    Case("sinks, causal", _case(17, 33, sinks=True, causal=True)),
    _eager("sinks", _case(33, 65, sinks=True)),
    _eager("sinks, window", _case(70, 70, sinks=True, causal=True, window_size=(15, 0))),
    _eager("sinks, 8 heads to 1", _case(17, 33, sinks=True, causal=True, heads=(8, 1))),
    _eager("sinks, softcap", _case(17, 33, sinks=True, softcap=2.0)),
    _eager("sinks, one query", _case(1, 130, sinks=True, causal=True, heads=(8, 2))),
    _eager("sinks, 64 dims", _case(17, 17, sinks=True, causal=True, dims=(64, 64), heads=(8, 1))),
    *_FP8_CASES,
    _QV,
    _UNEQUAL,
)

_VLLM_PACKED: Final = (
    *_PACKED_CASES,
    *_grouped(_varlen, (5, 17), (9, 17)),
    _eager("sinks", _varlen((5, 17, 1), (9, 17, 64), sinks=True, causal=True, heads=(8, 2))),
    _eager("sinks, window", _varlen((40, 17), (40, 17), sinks=True, causal=True, window_size=(5, 0))),
)

_VLLM_CACHE: Final = (
    *_FLASH3_CACHE,
    _eager("sinks", _cache(1, (5, 40), new=1, sinks=True, causal=True, heads=(8, 2)), modes=_FORWARD),
    _eager("sinks, pages", _cache(1, (5, 300), size=256, page="page_table", sinks=True, causal=True), modes=_FORWARD),
)

_COMBINE_CASES: Final = (
    Case("two parts", _parts_of_keys(2, 2, 5, 4, 32), _FORWARD),
    Case("one part", _parts_of_keys(1, 2, 5, 4, 32), _FORWARD),
    Case("nine parts", _parts_of_keys(9, 1, 65, 2, 64), _FORWARD),
    Case("parts and rows that see nothing", _parts_of_keys(3, 2, 5, 4, 32, blind=True), _FORWARD),
    Case("bfloat16", _parts_of_keys(3, 2, 5, 4, 32, out_dtype=_BF16), _FORWARD),
    Case("no row", _parts_of_keys(3, 2, 0, 4, 32), _FORWARD, _NOT_EMPTY),
)


# ----------------------------------------------------------------------------------------------------------- problems


def _problem(draw: Draw, *, batch: int, sq: int, sk: int, heads: int, kv_heads: int, dim: int) -> Inputs:
    return _case(sq, sk, batch=batch, heads=(heads, kv_heads), dims=(dim, dim), causal=True)(draw)


def _sink_problem(draw: Draw, *, batch: int, sq: int, sk: int, heads: int, kv_heads: int, dim: int) -> Inputs:
    return _case(sq, sk, batch=batch, heads=(heads, kv_heads), dims=(dim, dim), sinks=True, causal=True)(draw)


def _work(*, batch: int, sq: int, sk: int, heads: int, kv_heads: int, dim: int) -> Work:
    seen = sum(max(0, min(sk, i + sk - sq + 1)) for i in range(sq))
    nbytes = 2.0 * batch * dim * (2 * sq * heads + 2 * sk * kv_heads)
    return Work(4.0 * batch * heads * dim * seen, nbytes, "bf16")


# Llama 3.1 8B: prefill, and a step of decoding.
_LLAMA: Final = (
    {"batch": 1, "sq": 4096, "sk": 4096, "heads": 32, "kv_heads": 8, "dim": 128},
    {"batch": 16, "sq": 1, "sk": 4096, "heads": 32, "kv_heads": 8, "dim": 128},
)
_GPT_OSS: Final = (
    {"batch": 1, "sq": 4096, "sk": 4096, "heads": 64, "kv_heads": 8, "dim": 64},
    {"batch": 16, "sq": 1, "sk": 4096, "heads": 64, "kv_heads": 8, "dim": 64},
)

# Exponentials are rounded to the dtype of v before they are added up; sums cancel.
_OUT: Final = Tolerance(row=1e-2, least=1e-6)
_GRADIENT: Final = Tolerance(row=3e-2, each=2.0**-6, least=2e-2)
_NO_GRADIENT: Final = {"backward": "there is no gradient"}
_KEYS: Final = (0, 1, 2)


def _lse_too(returned: Any) -> Any:  # noqa: ANN401 - a tensor or several, of which two are promised
    return returned[:2] if isinstance(returned, (tuple, list)) else returned


def _entry(
    name: str,
    cases: Sequence[Case],
    formula: Callable[..., Any],
    gradients: tuple[int, ...],
    **how: Any,  # noqa: ANN401 - as Entry takes them
) -> Entry:
    return Entry(
        entrypoint=name,
        cases=cases,
        formula=formula,
        gradients=gradients,
        tolerance=_OUT,
        gradient_tolerance=_GRADIENT,
        dtypes=(_F32, _BF16),
        **how,
    )


def _cache_entry(cases: Sequence[Case], formula: Callable[..., Any]) -> Entry:
    return _entry("flash_attn_with_kvcache", cases, formula, (), mutates=(1, 2), canonical=_lse_too, skip=_NO_GRADIENT)


def _in_one(make: Callable[[Draw], Inputs], parts: int, axis: int) -> tuple[Case, ...]:
    return (Case("causal", _packed_in_one(make, parts=parts, axis=axis)),)


_SAME: Final = _case(17, 17, causal=True)
_SAME_PACKED: Final = _varlen((5, 17), (5, 17), causal=True)

FLASH_ATTN2_GRID: Final = (
    _entry("flash_attn_func", _FLASH2_DENSE, _func2, _KEYS, problem=_problem, sizes=_LLAMA, work=_work),
    _entry(
        "flash_attn_kvpacked_func",
        _in_one(_case(17, 33, causal=True), 2, -3),
        lambda q, kv, **how: _func2(q, kv[:, :, 0], kv[:, :, 1], **how),
        (0, 1),
    ),
    _entry("flash_attn_qkvpacked_func", _in_one(_SAME, 3, -3), lambda qkv, **how: _func2(*_parts(qkv), **how), (0,)),
    _entry("flash_attn_varlen_func", _FLASH2_PACKED, _varlen2, _KEYS),
    _entry(
        "flash_attn_varlen_kvpacked_func",
        _in_one(_varlen((5, 17), (9, 17), causal=True), 2, -3),
        lambda q, kv, *rest, **how: _varlen2(q, kv[:, 0], kv[:, 1], *rest, **how),
        (0, 1),
    ),
    _entry(
        "flash_attn_varlen_qkvpacked_func",
        _in_one(_SAME_PACKED, 3, -3),
        lambda qkv, offsets, longest, **how: _varlen2(*_parts(qkv), offsets, offsets, longest, longest, **how),
        (0,),
    ),
    _cache_entry(_FLASH2_CACHE, _cached2),
)

_QKV3_CASES: Final = (
    *_in_one(_SAME, 3, -3),
    _eager("heads of each", _heads_in_one(_case(17, 17, causal=True, heads=(4, 2)))),
)

FLASH_ATTN3_GRID: Final = (
    _entry("flash_attn_func", _FLASH3_DENSE, _func3, _KEYS, problem=_problem, sizes=_LLAMA, work=_work),
    _entry("flash_attn_qkvpacked_func", _QKV3_CASES, _qkv3, (0,)),
    _entry("flash_attn_varlen_func", _FLASH3_PACKED, _varlen3, _KEYS),
    _cache_entry((*_FLASH3_CACHE, *_CHUNKED_CACHE), _cached),
    _entry("flash_attn_combine", _COMBINE_CASES, _combined, (), skip=_NO_GRADIENT),
)

VLLM_FLASH_ATTN3_GRID: Final = (
    _entry("flash_attn_func", _VLLM_DENSE, _dense, _KEYS, problem=_sink_problem, sizes=_GPT_OSS, work=_work),
    _entry("flash_attn_qkvpacked_func", _QKV3_CASES, _qkv3, (0,)),
    _entry("flash_attn_varlen_func", _VLLM_PACKED, _packed, _KEYS),
    _cache_entry(_VLLM_CACHE, _cached),
    _entry("flash_attn_combine", _COMBINE_CASES, _combined, (), skip=_NO_GRADIENT),
)
