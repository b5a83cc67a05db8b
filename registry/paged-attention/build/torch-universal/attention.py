"""Attention of one query a sequence to a cache in blocks."""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ._ops import ops, qualified, without_autocast
from .formats import FLOATS, check_blocks, check_shape, check_whole, decode, is_fp8, one_scale

PARTITION: Final = 512


class Sparse(NamedTuple):
    """Which keys are seen; a `stride` of 0 or 1 for all.

    Key j is of run j // block * block // size, the first of these being blocks of the cache. Its run is seen if it is
    one of the last `local`, or if run + offset is a multiple of `stride`. Head h has an offset of (rank * H + h) * step
    + 1, or, if step is negative, of (rank * Hk + h // (H / Hk)) * -step + 1.
    """

    rank: int
    local: int
    stride: int
    size: int
    step: int


def paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of query (B, H, D), the last of its sequence, to keys in blocks, written to `out`.

    Args:
        out: (B, H, D), the dtype of `query`; zeros for a sequence without keys.
        query: bfloat16, float16 or float32; a row of heads may have any stride.
        key_cache: (blocks, Hk, D / x, block, x): the same dtype, or uint8 for FP8.
        value_cache: (blocks, Hk, D, block), the same dtype as `key_cache`.
        num_kv_heads: Hk, which divides H; head h reads head h // (H / Hk).
        scale: of products.
        block_tables: (B, blocks a sequence) int32 or int64, the blocks of each sequence in order.
        seq_lens: (B,) int32 or int64, keys of each sequence.
        block_size: places of a block.
        max_seq_len: at least the largest of `seq_lens`.
        alibi_slopes: (H,) float32: slope * (j + 1 - length) is added to the score of key j.
        kv_cache_dtype: "auto" for the dtype of `query`; "fp8" or "fp8_e4m3" for e4m3 codes.
        k_scale: one float32, what FP8 keys are multiplied by.
        v_scale: the same of values.
        tp_rank: which of several processes that share heads this is, for sparse attention.
        blocksparse_local_blocks: as `Sparse.local`.
        blocksparse_vert_stride: as `Sparse.stride`; above 1 for sparse attention.
        blocksparse_block_size: as `Sparse.size`, a multiple of `block_size`.
        blocksparse_head_sliding_step: as `Sparse.step`.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a block that is not there, or a sequence longer than `max_seq_len`.
    """
    fp8 = _check(out, query, key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, kv_cache_dtype)
    _check_slopes(alibi_slopes, query.shape[1])
    sparse = _sparse(
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        block_size,
    )
    scales = one_scale("k_scale", k_scale, query.device), one_scale("v_scale", v_scale, query.device)
    caches = (query, key_cache, value_cache, block_tables, seq_lens)
    ops.paged_attention_v1.default(out, *caches, alibi_slopes, *scales, scale, max_seq_len, fp8, list(sparse))


def paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1` in partitions of 512 keys, P = ceil(max_seq_len / 512) of them, which it tells of.

    Args:
        out: as there.
        exp_sum: (B, H, P) float32, to be written: the sum of exp(score - max) of each partition that has keys.
        max_logits: (B, H, P) float32, to be written: the largest score there.
        tmp_out: (B, H, P, D), the dtype of `query`, to be written: attention to the keys of the partition alone.
        query: as there, and so on. Partitions without keys are left alone.
        key_cache: as there.
        value_cache: as there.
        num_kv_heads: as there.
        scale: as there.
        block_tables: as there.
        seq_lens: as there.
        block_size: as there.
        max_seq_len: as there.
        alibi_slopes: as there.
        kv_cache_dtype: as there.
        k_scale: as there.
        v_scale: as there.
        tp_rank: as there.
        blocksparse_local_blocks: as there.
        blocksparse_vert_stride: as there.
        blocksparse_block_size: as there.
        blocksparse_head_sliding_step: as there.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a block that is not there, or a sequence longer than `max_seq_len`.
    """
    fp8 = _check(out, query, key_cache, value_cache, num_kv_heads, block_tables, seq_lens, block_size, kv_cache_dtype)
    _check_slopes(alibi_slopes, query.shape[1])
    parts = (query.shape[0], query.shape[1], -(-max_seq_len // PARTITION))
    for name, x, dtype in (("exp_sum", exp_sum, torch.float32), ("max_logits", max_logits, torch.float32)):
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected {dtype}, got {x.dtype}")
        check_shape(name, x, parts)
    if tmp_out.dtype != query.dtype:
        raise TypeError(f"tmp_out: expected {query.dtype}, as query is, got {tmp_out.dtype}")
    check_shape("tmp_out", tmp_out, (*parts, query.shape[2]))
    sparse = _sparse(
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        block_size,
    )
    scales = one_scale("k_scale", k_scale, query.device), one_scale("v_scale", v_scale, query.device)
    caches = (query, key_cache, value_cache, block_tables, seq_lens)
    written = (out, exp_sum, max_logits, tmp_out)
    ops.paged_attention_v2.default(*written, *caches, alibi_slopes, *scales, scale, max_seq_len, fp8, list(sparse))


def _check(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    kv_heads: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    kv_cache_dtype: str,
) -> bool:
    """Whether the caches hold FP8."""
    if query.dtype not in FLOATS:
        raise TypeError(f"query: expected bfloat16, float16 or float32, got {query.dtype}")
    if out.dtype != query.dtype:
        raise TypeError(f"out: expected {query.dtype}, as query is, got {out.dtype}")
    check_shape("query", query, ("sequences", "heads", "dim"))
    check_shape("out", out, tuple(query.shape))
    count, heads, dim = query.shape
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_kv_heads: expected a divisor of {heads}, the heads of query, got {kv_heads}")
    if key_cache.ndim != 5 or key_cache.shape[4] < 1 or dim % key_cache.shape[4]:
        raise ValueError(
            f"key_cache: expected shape (blocks, heads, {dim} / x, block, x), got {tuple(key_cache.shape)}"
        )
    x = key_cache.shape[4]
    check_shape("key_cache", key_cache, ("blocks", kv_heads, dim // x, block_size, x))
    check_shape("value_cache", value_cache, (key_cache.shape[0], kv_heads, dim, block_size))
    check_whole("block_tables", block_tables, (count, "blocks"))
    check_whole("seq_lens", seq_lens, (count,))
    return is_fp8(kv_cache_dtype, {"key_cache": key_cache, "value_cache": value_cache}, query.dtype)


def _check_slopes(slopes: Tensor | None, heads: int) -> None:
    if slopes is None:
        return
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes: expected float32, got {slopes.dtype}")
    check_shape("alibi_slopes", slopes, (heads,))


def _sparse(rank: int, local: int, stride: int, size: int, step: int, block_size: int) -> Sparse:
    if stride > 1 and (size < 1 or size % block_size):
        raise ValueError(f"blocksparse_block_size: expected a multiple of block_size, {block_size}, got {size}")
    return Sparse(rank, local, stride, size, step)


class _Sequence(NamedTuple):
    """Scores (H, keys) of one sequence, with -inf for what is not seen, and values (Hk, keys, D), both float32."""

    scores: Tensor
    values: Tensor


def _sequence(
    b: int,
    length: int,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    slopes: Tensor | None,
    scales: tuple[Tensor, Tensor],
    scale: float,
    sparse: Sparse,
    *,
    fp8: bool,
) -> _Sequence:
    heads, dim = query.shape[1:]
    kv_heads, size = key_cache.shape[1], key_cache.shape[3]
    table = block_tables[b, : -(-length // size)].long()
    check_blocks("block_tables", table, key_cache.shape[0])
    # (blocks, Hk, D / x, block, x) and (blocks, Hk, D, block), the places of a sequence in one row.
    keys = key_cache[table].permute(1, 0, 3, 2, 4).reshape(kv_heads, len(table) * size, dim)[:, :length]
    values = value_cache[table].permute(1, 0, 3, 2).reshape(kv_heads, len(table) * size, dim)[:, :length]
    keys, values = (decode(x, s) if fp8 else x.float() for x, s in zip((keys, values), scales, strict=True))
    grouped = query[b].float().view(kv_heads, heads // kv_heads, dim)
    scores = (grouped @ keys.mT).flatten(0, 1) * scale
    places = torch.arange(length, device=query.device)
    if slopes is not None:
        scores = scores + slopes.unsqueeze(1) * (places + 1 - length)
    if sparse.stride > 1:
        scores = scores.masked_fill(~_seen(places, heads, kv_heads, length, size, sparse), -torch.inf)
    return _Sequence(scores, values)


def _seen(places: Tensor, heads: int, kv_heads: int, length: int, block: int, sparse: Sparse) -> Tensor:
    head = torch.arange(heads, device=places.device).unsqueeze(1)
    if sparse.step >= 0:
        offset = (sparse.rank * heads + head) * sparse.step + 1
    else:
        offset = (sparse.rank * kv_heads + head // (heads // kv_heads)) * -sparse.step + 1
    run = places // block * block // sparse.size
    return ((run + offset) % sparse.stride == 0) | (run > (length - 1) // sparse.size - sparse.local)


def _weigh(part: _Sequence) -> tuple[Tensor, Tensor, Tensor]:
    """What attention to these keys gives, (H, D), the largest score and the sum of exp(score - largest), (H,)."""
    most = part.scores.amax(1)
    p = torch.exp(part.scores - most.masked_fill(most == -torch.inf, 0.0).unsqueeze(1))
    total = p.sum(1)
    kv_heads = part.values.shape[0]
    made = (p.view(kv_heads, -1, p.shape[1]) @ part.values).flatten(0, 1)
    return made / total.masked_fill(total == 0.0, 1.0).unsqueeze(1), most, total


def _lengths(seq_lens: Tensor, max_seq_len: int, room: int) -> list[int]:
    lengths = [int(n) for n in seq_lens.tolist()]
    for length in lengths:
        if not 0 <= length <= min(max_seq_len, room):
            raise ValueError(
                f"seq_lens: expected at most {max_seq_len}, which is max_seq_len, and {room}, for which there are"
                f" blocks, got {length}"
            )
    return lengths


_INPUTS: Final = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor? slopes,"
    " Tensor k_scale, Tensor v_scale, float scale, int max_seq_len, bool fp8, int[] sparse) -> ()"
)


@torch.library.custom_op(qualified("paged_attention_v1"), mutates_args=("out",), schema=f"(Tensor(a!) out, {_INPUTS}")
@without_autocast
def _paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    slopes: Tensor | None,
    k_scale: Tensor,
    v_scale: Tensor,
    scale: float,
    max_seq_len: int,
    fp8: bool,  # noqa: FBT001 - as the schema has it
    sparse: list[int],
) -> None:
    rest = (query, key_cache, value_cache, block_tables, slopes, (k_scale, v_scale), scale, Sparse(*sparse))
    out.zero_()
    for b, length in enumerate(_lengths(seq_lens, max_seq_len, block_tables.shape[1] * key_cache.shape[3])):
        if length:
            out[b] = _weigh(_sequence(b, length, *rest, fp8=fp8))[0]


@torch.library.custom_op(
    qualified("paged_attention_v2"),
    mutates_args=("out", "exp_sum", "max_logits", "tmp_out"),
    schema=f"(Tensor(a!) out, Tensor(b!) exp_sum, Tensor(c!) max_logits, Tensor(d!) tmp_out, {_INPUTS}",
)
@without_autocast
def _paged_attention_v2(
    out: Tensor,
    exp_sum: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    slopes: Tensor | None,
    k_scale: Tensor,
    v_scale: Tensor,
    scale: float,
    max_seq_len: int,
    fp8: bool,  # noqa: FBT001 - as the schema has it
    sparse: list[int],
) -> None:
    rest = (query, key_cache, value_cache, block_tables, slopes, (k_scale, v_scale), scale, Sparse(*sparse))
    out.zero_()
    for b, length in enumerate(_lengths(seq_lens, max_seq_len, block_tables.shape[1] * key_cache.shape[3])):
        if not length:
            continue
        whole = _sequence(b, length, *rest, fp8=fp8)
        out[b] = _weigh(whole)[0]
        for part, first in enumerate(range(0, length, PARTITION)):
            at = slice(first, first + PARTITION)
            made, most, total = _weigh(_Sequence(whole.scores[:, at], whole.values[:, at]))
            tmp_out[b, :, part], max_logits[b, :, part], exp_sum[b, :, part] = made, most, total


@_paged_attention_v1.register_fake
@_paged_attention_v2.register_fake
def _(*arguments: object) -> None:
    pass
