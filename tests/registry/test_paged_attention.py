"""The paged-attention reference against attention to keys that were never cut into blocks, in float64."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_loader.bundles import paged_attention as protocols
from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    assert_near,
    compiled,
    is_shipped_reference,
    load_reference,
    random,
)

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 9
LENGTHS = (11, 0, 8)
ONE = torch.ones(())
TABLES = torch.tensor([[7, 2], [0, 0], [4, 0]], dtype=torch.int32)


@pytest.fixture
def paged(cpu_machine, monkeypatch):
    return load_reference("paged_attention", monkeypatch)


def caches(dtype: torch.dtype = F32, fill: float = float("nan")) -> tuple[Tensor, Tensor]:
    x = 16 // dtype.itemsize
    fill = 127 if dtype == torch.uint8 else fill  # 127 is a code of NaN
    return (
        torch.full((BLOCKS, KV_HEADS, DIM // x, BLOCK, x), fill, dtype=dtype),
        torch.full((BLOCKS, KV_HEADS, DIM, BLOCK), fill, dtype=dtype),
    )


def slots() -> Tensor:
    """The slot of each key, sequence by sequence."""
    found = [int(TABLES[b, j // BLOCK]) * BLOCK + j % BLOCK for b, length in enumerate(LENGTHS) for j in range(length)]
    return torch.tensor(found)


def filled(paged: Any, dtype: torch.dtype = F32, kind: str = "auto", scale: float = 1.0) -> tuple[Tensor, ...]:
    """Keys and values (T, Hk, D), and caches that hold them; everything else there is NaN."""
    key, value = (random(sum(LENGTHS), KV_HEADS, DIM, dtype=dtype, seed=i) for i in (1, 2))
    stored = caches(dtype if kind == "auto" else torch.uint8)
    paged.reshape_and_cache(key, value, *stored, slots(), kind, torch.tensor(scale), torch.tensor(scale))
    return key, value, *stored


def right(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None = None) -> Tensor:
    out = torch.zeros(query.shape, dtype=F64)
    for b, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:b])
        for h in range(HEADS if length else 0):
            k, v = (x[start : start + length, h // (HEADS // KV_HEADS)].to(F64) for x in (key, value))
            scores = k @ query[b, h].to(F64) * 0.25
            if slopes is not None:
                scores = scores - slopes[h].to(F64) * torch.arange(length).flip(0)
            out[b, h] = scores.softmax(0) @ v
    return out


def call(function: Any, written: tuple[Tensor, ...], query: Tensor, stored: tuple[Tensor, ...], **how: Any) -> None:
    how = {"slopes": None, "kind": "auto", "scale": 1.0, "longest": 16} | how
    scale = torch.tensor(how["scale"])
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    rest = (KV_HEADS, 0.25, TABLES, lengths, BLOCK, how["longest"], how["slopes"], how["kind"], scale, scale)
    function(*written, query, *stored, *rest)


# ---------------------------------------------------------------------------------------------------------- loading


def test_the_kernel_loads_as_its_reference(paged):
    assert is_shipped_reference(paged, "paged-attention")
    assert isinstance(paged, protocols.PagedAttention)


def test_parameters_are_those_of_the_bundle(paged):
    for name, hint in inspect.get_annotations(protocols.PagedAttention).items():
        if name != "__kernel__":
            ours, theirs = getattr(paged, name), getattr(protocols, hint).__call__
            found = [list(inspect.signature(function).parameters.values()) for function in (ours, theirs)]
            assert [(p.name, p.default) for p in found[0]] == [(p.name, p.default) for p in found[1][1:]], name


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("with_slopes", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_attention_reads_what_was_written_and_nothing_else(paged, dtype, with_slopes):
    key, value, *stored = filled(paged, dtype)
    query = random(len(LENGTHS), HEADS, DIM, dtype=dtype)
    slopes = torch.arange(HEADS, dtype=F32) / 8 if with_slopes else None
    out = torch.full_like(query, float("nan"))
    call(paged.paged_attention_v1, (out,), query, tuple(stored), slopes=slopes)
    assert_near(out, right(query, key, value, slopes), ulps=1, atol=2e-6)
    assert not out[1].any()  # a sequence without keys


def test_partitions_make_the_whole(paged):
    length, query = 1030, random(1, 2, 16, dtype=F32)
    key, value = (random(length, 1, 16, dtype=F32, seed=i) for i in (1, 2))
    stored = torch.zeros(129, 1, 4, 8, 4), torch.zeros(129, 1, 16, 8)
    paged.reshape_and_cache(key, value, *stored, torch.arange(length), "auto", ONE, ONE)
    out, tmp = torch.empty(1, 2, 16), torch.full((1, 2, 4, 16), 7.0)
    sums, most = torch.full((1, 2, 4), 7.0), torch.full((1, 2, 4), 7.0)
    tables = torch.arange(129, dtype=torch.int32)[None]
    rest = (1, 0.25, tables, torch.tensor([length]), 8, 2048, None, "auto", ONE, ONE)
    paged.paged_attention_v2(out, sums, most, tmp, query, *stored, *rest)
    scores = torch.einsum("hd,jd->hj", query[0].to(F64), key[:, 0].to(F64)) * 0.25
    assert_near(out[0], scores.softmax(1) @ value[:, 0].to(F64), ulps=64, atol=1e-6)
    for p, part in enumerate(scores.split(512, dim=1)):
        assert_near(most[0, :, p], part.amax(1), ulps=64, atol=1e-6)
        assert_near(sums[0, :, p], (part - part.amax(1, keepdim=True)).exp().sum(1), ulps=64)
        assert_near(tmp[0, :, p], part.softmax(1) @ value[512 * p : 512 * p + 512, 0].to(F64), ulps=64, atol=1e-6)
    assert (sums[..., 3] == 7.0).all()  # a partition without keys is left alone
    assert (tmp[..., 3, :] == 7.0).all()
    again = torch.empty_like(out)
    paged.paged_attention_v1(again, query, *stored, *rest)
    assert torch.equal(again, out)


def test_fp8_caches_hold_codes_of_a_scale(paged):
    key, value, *stored = filled(paged, kind="fp8", scale=0.5)
    query = random(len(LENGTHS), HEADS, DIM, dtype=F32)
    out = torch.empty_like(query)
    call(paged.paged_attention_v1, (out,), query, tuple(stored), kind="fp8", scale=0.5)
    rounded = [(x / 0.5).to(torch.float8_e4m3fn).to(F64) * 0.5 for x in (key, value)]
    assert_near(out, right(query, *rounded), ulps=64, atol=2e-6)


def test_padding_and_what_is_too_large(paged):
    key = torch.full((2, KV_HEADS, DIM), 1e6)
    stored = [torch.zeros(2, BLOCK, KV_HEADS, DIM, dtype=torch.uint8) for _ in range(2)]
    paged.reshape_and_cache_flash(key, -key, *stored, torch.tensor([-1, 9]), "fp8_e4m3", ONE, ONE)
    codes = [cache.view(torch.float8_e4m3fn).float() for cache in stored]
    assert (codes[0][1, 1] == 448).all()
    assert (codes[1][1, 1] == -448).all()
    assert not stored[0][0].any()
    assert stored[0].count_nonzero() == KV_HEADS * DIM


def test_sparse_attention_sees_the_last_runs_and_every_third(paged):
    length = 32
    key, value = torch.zeros(length, 1, DIM), torch.arange(length, dtype=F32)[:, None, None].expand(-1, 1, DIM)
    stored = torch.zeros(4, 1, DIM // 4, 8, 4), torch.zeros(4, 1, DIM, 8)
    paged.reshape_and_cache(key, value, *stored, torch.arange(length), "auto", ONE, ONE)
    out = torch.empty(1, 2, DIM)
    tables = torch.arange(4, dtype=torch.int32)[None]
    rest = (1, 1.0, tables, torch.tensor([length]), 8, length, None, "auto", ONE, ONE, 0, 1, 3, 8, 1)
    paged.paged_attention_v1(out, torch.zeros(1, 2, DIM), *stored, *rest)
    # Offsets are 1 and 2: head 0 sees runs 2 and 3 of 0 .. 3, head 1 runs 1 and 3.
    assert out[0, 0, 0] == pytest.approx((16 + 31) / 2)
    assert out[0, 1, 0] == pytest.approx((sum(range(8, 16)) + sum(range(24, 32))) / 16)


def test_blocks_are_copied_as_they_were(paged):
    layers = [[random(5, 3, dtype=F32, seed=i + 2 * j) for i in range(2)] for j in range(2)]
    before = [[x.clone() for x in layer] for layer in layers]
    paged.copy_blocks(*layers, torch.tensor([[0, 1], [1, 2], [0, 4]]))
    for now, then in zip((*layers[0], *layers[1]), (*before[0], *before[1]), strict=True):
        assert torch.equal(now, then[[0, 0, 1, 3, 0]])
    src, dst = before[0]
    paged.swap_blocks(src, dst, torch.tensor([[4, 0], [3, 3]]))
    assert torch.equal(dst[[0, 3]], src[[4, 3]])


def test_codes_convert_back_to_what_they_stand_for(paged):
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = torch.empty(256)
    paged.convert_fp8(numbers, codes, 0.25)
    assert torch.equal(numbers[:127], codes.view(torch.float8_e4m3fn)[:127].float() * 0.25)
    again = torch.empty_like(codes)
    paged.convert_fp8(again, numbers, 0.25)
    assert torch.equal(again[:127], codes[:127])
    assert numbers[[127, 255]].isnan().all()


# ---------------------------------------------------------------------------------------------------------- compile


def test_a_step_compiles_into_one_graph(paged):
    key, value = (random(sum(LENGTHS), KV_HEADS, DIM, dtype=F32, seed=i) for i in (1, 2))
    query = random(len(LENGTHS), HEADS, DIM, dtype=F32)

    place = slots()

    def step(out: Tensor, *stored: Tensor) -> Tensor:
        paged.reshape_and_cache(key, value, *stored, place, "auto", ONE, ONE)
        call(paged.paged_attention_v1, (out,), query, stored)
        return out * 2

    eager, graph = (f(torch.empty_like(query), *caches(fill=0.0)) for f in (step, compiled(step)))
    assert torch.equal(graph, eager)


# ----------------------------------------------------------------------------------------------------------- errors


def test_wrong_arguments_are_named(paged):
    key, value, *stored = filled(paged)
    query = random(len(LENGTHS), HEADS, DIM, dtype=F32)
    out = torch.empty_like(query)
    v1 = paged.paged_attention_v1
    with pytest.raises(TypeError, match=r"^query: expected bfloat16, float16 or float32, got torch.float64"):
        call(v1, (out,), query.double(), tuple(stored))
    with pytest.raises(TypeError, match=r"^key_cache: expected torch.uint8 for kv_cache_dtype 'fp8', got"):
        call(v1, (out,), query, tuple(stored), kind="fp8")
    with pytest.raises(ValueError, match=r'^kv_cache_dtype: expected "auto", "fp8" or "fp8_e4m3", got \'int8\''):
        call(v1, (out,), query, tuple(stored), kind="int8")
    with pytest.raises(ValueError, match=r"^seq_lens: expected at most 10, which is max_seq_len, and 16, .* got 11"):
        call(v1, (out,), query, tuple(stored), longest=10)
    with pytest.raises(ValueError, match=r"^value_cache: expected shape \(9, 2, 16, 8\), got \(8, 2, 16, 8\)"):
        call(v1, (out,), query, (stored[0], stored[1][:8]))
    with pytest.raises(ValueError, match=r"^block_tables: expected blocks from 0 to 6, got 2 to 7"):
        call(v1, (out,), query, (stored[0][:7], stored[1][:7]))
    with pytest.raises(ValueError, match=r"^slot_mapping: expected slots below 72, got 72"):
        paged.reshape_and_cache(key[:1], value[:1], *stored, torch.tensor([72]), "auto", ONE, ONE)
    with pytest.raises(ValueError, match=r"^block_mapping: expected blocks from 0 to 8, got 9 to 9"):
        paged.swap_blocks(stored[0], stored[0].clone(), torch.tensor([[9, 0]]))
    with pytest.raises(TypeError, match=r"^output and input: expected uint8 and bfloat16"):
        paged.convert_fp8(torch.empty(3), torch.empty(3))
