"""What `paged_attention` is held against: kernel_loader/bundles/paged_attention.py, place by place, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_I32: Final = torch.int32
_PARTITION: Final = 512

# ------------------------------------------------------------------------------------------------------------ formula


class _Head(NamedTuple):
    """One head of one sequence: scores (keys,), -inf for what is not seen, and values (keys, D)."""

    scores: Tensor
    values: Tensor


def _number(codes: Tensor, kind: str, scale: Tensor) -> Tensor:
    """Elements of a cache as numbers."""
    if kind == "auto":
        return codes.to(_F64)
    sign = 1.0 - 2.0 * (codes >> 7).to(_F64)
    exponent, mantissa = (codes >> 3 & 15).to(_F64), (codes & 7).to(_F64) / 8
    small = mantissa * 2.0**-6
    made = torch.where(exponent == 0, small, (1 + mantissa) * torch.exp2(exponent - 7))
    return sign * made * scale.to(_F64)


def _head(
    b: int,
    h: int,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    alibi_slopes: Tensor | None,
    kind: str,
    scales: tuple[Tensor, Tensor],
    sparse: Sequence[int],
) -> _Head:
    length, heads = int(seq_lens[b]), query.shape[1]
    group = h // (heads // num_kv_heads)
    places = torch.arange(length, device=query.device)
    block, at = block_tables[b, places // block_size].long(), places % block_size
    keys = _number(key_cache[block, group, :, at].flatten(1), kind, scales[0])
    values = _number(value_cache[block, group, :, at], kind, scales[1])
    scores = keys @ query[b, h].to(_F64) * scale
    if alibi_slopes is not None:
        scores = scores + float(alibi_slopes[h]) * (places - (length - 1))
    rank, local, stride, size, step = sparse
    if stride > 1:
        offset = (rank * heads + h) * step + 1 if step >= 0 else (rank * num_kv_heads + group) * -step + 1
        for place in range(length):
            run = place // block_size * block_size // size
            if (run + offset) % stride and run <= (length - 1) // size - local:
                scores[place] = float("-inf")
    return _Head(scores, values)


def _attention(
    out: Tensor,
    *args: Any,  # noqa: ANN401 - as the entrypoint has them
    parts: tuple[Tensor, Tensor, Tensor] | None = None,
    **how: int,
) -> tuple[Tensor | None, ...]:
    """What `out`, and sums, maxima and outputs of partitions, hold afterwards."""
    query, key_cache, value_cache, heads, scale, tables, lengths, size, _, slopes, kind, k_scale, v_scale = args
    names = ("tp_rank", "local_blocks", "vert_stride", "block_size", "head_sliding_step")
    sparse = [how.get(name if i == 0 else f"blocksparse_{name}", 64 if i == 3 else 0) for i, name in enumerate(names)]
    made = torch.zeros_like(out, dtype=_F64)
    written = [] if parts is None else [x.to(_F64) for x in parts]
    for b in range(query.shape[0]):
        for h in range(query.shape[1] if int(lengths[b]) else 0):
            rest = (
                query,
                key_cache,
                value_cache,
                heads,
                scale,
                tables,
                lengths,
                size,
                slopes,
                kind,
                (k_scale, v_scale),
                sparse,
            )
            found = _head(b, h, *rest)
            made[b, h] = found.scores.softmax(0) @ found.values
            for p, first in enumerate(range(0, len(found.scores), _PARTITION) if written else ()):
                scores = found.scores[first : first + _PARTITION]
                written[0][b, h, p] = (scores - scores.max()).exp().sum()
                written[1][b, h, p] = scores.max()
                written[2][b, h, p] = scores.softmax(0) @ found.values[first : first + _PARTITION]
    return None, made, *written


def _attention_in_parts(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    *args: Any,  # noqa: ANN401
    **how: int,
) -> tuple[Tensor | None, ...]:
    return _attention(out, *args, parts=(exp_sum, max_logits, tmp_out), **how)


def _code(x: Tensor, scale: Tensor | float) -> Tensor:
    """The nearest of the codes of e4m3 to x / scale, ties to the even one, by looking at all of them."""
    codes = torch.arange(127, dtype=torch.uint8, device=x.device)
    numbers = _number(codes, "fp8", torch.ones((), device=x.device))
    y = (x.to(_F32) / scale).to(_F64)  # the quotient is float32
    distance = (y.abs().flatten()[:, None] - numbers).abs()
    nearest = distance.amin(1, keepdim=True) == distance
    even = nearest & (codes % 2 == 0)
    chosen = torch.where(even.any(1, keepdim=True), even, nearest).to(torch.uint8).argmax(1).to(torch.uint8)
    return (chosen | (y.flatten() < 0).to(torch.uint8) << 7).view(x.shape)


def _written(x: Tensor, kind: str, scale: Tensor, cache: Tensor) -> Tensor:
    return _code(x, scale.to(_F32)).to(cache.dtype) if kind != "auto" else x.to(cache.dtype)


def _wide(cache: Tensor) -> Tensor:
    return cache if cache.dtype == torch.uint8 else cache.to(_F64)


def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kind: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[None, Tensor, Tensor]:
    keys, values = key_cache.clone(), value_cache.clone()
    k, v = _written(key, kind, k_scale, keys), _written(value, kind, v_scale, values)
    size, x = key_cache.shape[3:]
    for t, slot in enumerate(slot_mapping.tolist()):
        for d in range(key.shape[2] if slot >= 0 else 0):
            keys[slot // size, :, d // x, slot % size, d % x] = k[t, :, d]
            values[slot // size, :, d, slot % size] = v[t, :, d]
    return None, _wide(keys), _wide(values)


def _reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kind: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> tuple[None, Tensor, Tensor]:
    keys, values = key_cache.clone(), value_cache.clone()
    k, v = _written(key, kind, k_scale, keys), _written(value, kind, v_scale, values)
    size = key_cache.shape[1]
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            keys[slot // size, slot % size], values[slot // size, slot % size] = k[t], v[t]
    return None, _wide(keys), _wide(values)


def _copy_blocks(keys: list[Tensor], values: list[Tensor], mapping: Tensor) -> tuple[Any, ...]:
    made = [[_wide(cache).clone() for cache in caches] for caches in (keys, values)]
    for source, target in mapping.tolist():
        for before, after in zip((*keys, *values), (*made[0], *made[1]), strict=True):
            after[target] = _wide(before)[source]
    return None, *made


def _swap_blocks(src: Tensor, dst: Tensor, mapping: Tensor) -> tuple[None, Tensor]:
    made = _wide(dst).clone()
    for source, target in mapping.tolist():
        made[target] = _wide(src)[source]
    return None, made


def _convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> tuple[None, Tensor]:  # noqa: A002
    if output.dtype == torch.uint8:
        return None, _code(input, scale)
    return None, _number(input, kv_dtype, torch.tensor(scale, dtype=_F32, device=input.device))


# ------------------------------------------------------------------------------------------------------------- inputs


def _draw_cache(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:  # any code but NaN
        return draw.integers(0, 127, *shape, dtype=dtype) + draw.integers(0, 2, *shape, dtype=dtype) * 128
    return draw.normal(*shape, dtype=dtype)


def _caches(draw: Draw, blocks: int, heads: int, dim: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = 16 // dtype.itemsize
    shapes = ((blocks, heads, dim // x, size, x), (blocks, heads, dim, size))
    return _draw_cache(draw, shapes[0], dtype), _draw_cache(draw, shapes[1], dtype)


def _scales(draw: Draw) -> tuple[Tensor, Tensor]:
    return draw.put(torch.tensor(0.03)), draw.put(torch.tensor(0.05))


def _call(
    lengths: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    size: int = 16,
    dtype: torch.dtype = _BF16,
    kind: str = "auto",
    slopes: bool = False,
    strided: bool = False,
    offset: int = 0,
    parts: bool = False,
    **how: int,
) -> Callable[[Draw], Inputs]:
    """One query a sequence, keys in blocks in any order; with `parts`, for the entrypoint with partitions."""

    def make(draw: Draw) -> Inputs:
        batch, longest = len(lengths), max(lengths, default=0)
        blocks = max(1, sum(-(-length // size) for length in lengths))
        stored = dtype if kind == "auto" else torch.uint8
        caches = _caches(draw, blocks + 1, heads[1], dim, size, stored)
        tables = torch.zeros(batch, max(1, -(-longest // size)), dtype=_I32)
        order, row = draw.permutation(blocks + 1).to(_I32).cpu(), 0
        for b, length in enumerate(lengths):
            count = -(-length // size)
            tables[b, :count] = order[row : row + count]
            row += count
        query = draw.normal(batch, 2 * heads[0], dim, dtype=dtype)
        query = query[:, : heads[0]] if strided else query[:, : heads[0]].contiguous()
        if offset:
            large = torch.ones(batch, offset + query[0].numel(), dtype=dtype, device=query.device)
            query = large[:, offset:].view(query.shape).copy_(query)
        written = [torch.zeros_like(query, memory_format=torch.contiguous_format)]
        if parts:
            shape = (batch, heads[0], -(-longest // _PARTITION))
            written += [draw.put(torch.zeros(shape)), draw.put(torch.zeros(shape))]
            written += [draw.put(torch.zeros(*shape, dim, dtype=dtype))]
        counts = draw.put(torch.tensor(lengths, dtype=_I32))
        alibi = draw.uniform(heads[0]) if slopes else None
        rest = (heads[1], dim**-0.5, draw.put(tables), counts, size, longest, alibi, kind, *_scales(draw))
        return Inputs(*written, query, *caches, *rest, **how)

    return make


def _write(
    slots: Sequence[int],
    *,
    tokens: int | None = None,
    flash: bool = False,
    dtype: torch.dtype = _BF16,
    kind: str = "auto",
    strided: bool = False,
) -> Callable[[Draw], Inputs]:
    heads, dim, size, blocks = 2, 32, 16, 4

    def make(draw: Draw) -> Inputs:
        count = len(slots) if tokens is None else tokens
        whole = draw.normal(count, 2 * heads, dim, dtype=dtype, scale=4.0)
        key, value = whole[:, :heads], whole[:, heads:]
        if not strided:
            key, value = key.contiguous(), value.contiguous()
        stored = dtype if kind == "auto" else torch.uint8
        if flash:
            caches = tuple(_draw_cache(draw, (blocks, size, heads, dim), stored) for _ in range(2))
        else:
            caches = _caches(draw, blocks, heads, dim, size, stored)
        return Inputs(key, value, *caches, draw.put(torch.tensor(slots, dtype=torch.int64)), kind, *_scales(draw))

    return make


def _copy(pairs: Sequence[tuple[int, int]], *, layers: int = 2, dtype: torch.dtype = _BF16) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        drawn = [_caches(draw, 8, 2, 32, 16, dtype) for _ in range(layers)]
        mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        return Inputs([k for k, _ in drawn], [v for _, v in drawn], draw.put(mapping))

    return make


def _swap(pairs: Sequence[tuple[int, int]], dtype: torch.dtype = _BF16) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        caches = [_draw_cache(draw, (8, 2, 32, 16), dtype) for _ in range(2)]
        return Inputs(*caches, torch.tensor(pairs, dtype=torch.int64).view(-1, 2))

    return make


def _convert(source: torch.dtype, target: torch.dtype, *rest: Any, blocks: int = 3) -> Callable[[Draw], Inputs]:  # noqa: ANN401
    def make(draw: Draw) -> Inputs:
        shape = (blocks, 2, 5, 16)
        given = (
            _draw_cache(draw, shape, source) if source == torch.uint8 else draw.normal(*shape, dtype=source, scale=99.0)
        )
        return Inputs(draw.put(torch.zeros(shape, dtype=target)), given, *rest)

    return make


# -------------------------------------------------------------------------------------------------------------- cases

_SOME: Final[tuple[Mode, ...]] = ("eager", "graph")

_SPARSE: Final[dict[str, Any]] = {
    "blocksparse_local_blocks": 1,
    "blocksparse_vert_stride": 3,
    "blocksparse_block_size": 16,
}


def _attention_cases(*, parts: bool) -> tuple[Case, ...]:
    def case(name: str, lengths: Sequence[int], may_refuse: str = "", **how: Any) -> Case:  # noqa: ANN401
        return Case(name, _call(lengths, parts=parts, **how), _SOME, may_refuse)

    return (
        Case("three sequences", _call((5, 33, 1), parts=parts)),
        *(case(f"{length} keys", (length,)) for length in (1, 15, 16, 17, 511, 512, 513)),
        *(case(f"blocks of {size}", (40, 7), size=size) for size in (8, 32)),
        *(case(f"{dim} dims", (40, 7), dim=dim) for dim in (64, 80, 128, 256)),
        *(case(f"{h} heads to {g}", (40, 7), heads=(h, g)) for h, g in ((4, 4), (6, 2), (4, 1))),
        case("a sequence without keys", (0, 20)),
        case("float16", (40, 7), dtype=_F16),
        case("float32", (40, 7), dtype=_F32),
        case("FP8", (40, 7), kind="fp8"),
        case("FP8 in float16", (40, 7), kind="fp8_e4m3", dtype=_F16),
        case("slopes", (40, 7), slopes=True),
        case("query strided", (40, 7), strided=True),
        case("query behind one number", (40, 7), offset=1),
        case("no keys", (0, 0)),
        case("sparse, heads of q", (200, 40), blocksparse_head_sliding_step=1, **_SPARSE),
        case("sparse, heads of k, second rank", (200, 40), blocksparse_head_sliding_step=-1, tp_rank=1, **_SPARSE),
        case("no sequence", ()),
        case("blocks of 4", (9, 7), "published builds have blocks of 8, 16 and 32", size=4),
        case("24 dims", (9, 7), "published builds have some numbers of dims", dim=24),
    )


def _write_cases(*, flash: bool) -> tuple[Case, ...]:
    def case(name: str, slots: Sequence[int], **how: Any) -> Case:  # noqa: ANN401
        return Case(name, _write(slots, flash=flash, **how), _SOME)

    return (
        Case("some slots", _write((3, 16, 63, 0), flash=flash)),
        case("one token", (17,)),
        case("no token", ()),
        case("padding", (5, -1, 40, -1)),
        case("padding alone", (-1, -1)),
        *(case(str(dtype).removeprefix("torch."), (3, 16, 63), dtype=dtype) for dtype in (_F16, _F32)),
        case("FP8", (3, 16, 63), kind="fp8"),
        case("FP8 of float16", (3, 16, 63), kind="fp8_e4m3", dtype=_F16),
        case("strided", (3, 16, 63), strided=True),
        *([case(f"{n} slots for 5 tokens", range(n), tokens=5) for n in (0, 2)] if flash else []),
    )


_COPY_CASES: Final = (
    Case("two pairs", _copy(((0, 3), (1, 7))), _SOME),
    Case("one to several", _copy(((0, 3), (0, 7), (0, 1))), _SOME),
    Case("no pair", _copy(()), _SOME),
    Case("float32", _copy(((5, 2),), dtype=_F32), _SOME),
    Case("codes", _copy(((5, 2),), dtype=torch.uint8), _SOME),
)

_SWAP_CASES: Final = (
    Case("two pairs", _swap(((0, 3), (1, 7))), ("eager",)),
    Case("the same block", _swap(((2, 2),)), ("eager",)),
    Case("no pair", _swap(()), ("eager",)),
    Case("codes", _swap(((5, 2),), torch.uint8), ("eager",)),
)

_CONVERT_CASES: Final = (
    Case("to codes", _convert(_BF16, torch.uint8)),
    Case("from codes", _convert(torch.uint8, _BF16)),
    *(Case(f"{dtype} to codes", _convert(dtype, torch.uint8, 0.5), _SOME) for dtype in (_F16, _F32)),
    *(Case(f"codes to {dtype}", _convert(torch.uint8, dtype, 0.5, "fp8_e4m3"), _SOME) for dtype in (_F16, _F32)),
    Case("one block", _convert(_BF16, torch.uint8, 0.03, blocks=1), _SOME),
    Case("no block", _convert(_BF16, torch.uint8, blocks=0), _SOME),
)


# ----------------------------------------------------------------------------------------------------------- problems


def _problem(draw: Draw, *, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Inputs:
    return _call((length,) * batch, heads=(heads, kv_heads), dim=dim)(draw)


def _problem_in_parts(draw: Draw, *, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Inputs:
    return _call((length,) * batch, heads=(heads, kv_heads), dim=dim, parts=True)(draw)


def _work(*, batch: int, length: int, heads: int, kv_heads: int, dim: int) -> Work:
    return Work(4.0 * batch * heads * length * dim, 4.0 * batch * dim * (kv_heads * length + heads), "bf16")


# A step of decoding of Llama 3.1 8B.
_SIZES: Final = tuple(
    {"batch": b, "length": n, "heads": 32, "kv_heads": 8, "dim": 128} for b, n in ((1, 4096), (16, 1024))
)

_SUM: Final = Tolerance(row=1e-2, least=1e-6)
_SKIP: Final[dict[Mode, str]] = {"backward": "nothing is differentiable"}
_NO_GRAPH: Final[dict[Mode, str]] = {"graph": "published builds wait for a copy of addresses to the device"}

PAGED_ATTENTION_GRID: Final = (
    Entry(
        entrypoint="paged_attention_v1",
        cases=_attention_cases(parts=False),
        formula=_attention,
        tolerance=_SUM,
        mutates=(0,),
        skip=_SKIP,
        problem=_problem,
        sizes=_SIZES,
        work=_work,
    ),
    Entry(
        entrypoint="paged_attention_v2",
        cases=_attention_cases(parts=True),
        formula=_attention_in_parts,
        tolerance=_SUM,
        mutates=(0, 1, 2, 3),
        skip=_SKIP,
        problem=_problem_in_parts,
        sizes=_SIZES,
        work=_work,
    ),
    Entry(
        entrypoint="reshape_and_cache",
        cases=_write_cases(flash=False),
        formula=_reshape_and_cache,
        mutates=(2, 3),
        skip=_SKIP,
    ),
    Entry(
        entrypoint="reshape_and_cache_flash",
        cases=_write_cases(flash=True),
        formula=_reshape_and_cache_flash,
        mutates=(2, 3),
        skip=_SKIP,
    ),
    Entry(entrypoint="copy_blocks", cases=_COPY_CASES, formula=_copy_blocks, mutates=(0, 1), skip=_SKIP | _NO_GRAPH),
    Entry(entrypoint="swap_blocks", cases=_SWAP_CASES, formula=_swap_blocks, mutates=(1,), skip=_SKIP),
    Entry(entrypoint="convert_fp8", cases=_CONVERT_CASES, formula=_convert_fp8, mutates=(0,), skip=_SKIP),
)
