"""The references of flash_attn2, flash_attn3 and vllm_flash_attn3, against loops over rows and keys in float64."""

import inspect
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_loader.bundles import attention
from kernel_loader.guards.attention import packed_gradient, sink_gradient
from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    REGISTRY,
    assert_near,
    compiled,
    is_shipped_reference,
    load_reference,
    random,
)

KERNELS = {
    "flash_attn2": attention.FlashAttn2,
    "flash_attn3": attention.FlashAttn3,
    "vllm_flash_attn3": attention.VllmFlashAttn3,
}
HEADS, KV_HEADS, DIM = 4, 2, 6


@pytest.fixture(params=KERNELS)
def kernel(request, cpu_machine, monkeypatch):
    return load_reference(request.param, monkeypatch)


@pytest.fixture
def flash2(cpu_machine, monkeypatch):
    return load_reference("flash_attn2", monkeypatch)


@pytest.fixture
def flash3(cpu_machine, monkeypatch):
    return load_reference("flash_attn3", monkeypatch)


@pytest.fixture
def vllm(cpu_machine, monkeypatch):
    return load_reference("vllm_flash_attn3", monkeypatch)


def draw(sq: int, sk: int, *, batch: int = 2, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor]:
    return (
        random(batch, sq, HEADS, DIM, dtype=dtype),
        random(batch, sk, KV_HEADS, DIM, dtype=dtype, seed=1),
        random(batch, sk, KV_HEADS, DIM, dtype=dtype, seed=2),
    )


def first(returned: Any) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned[0]


# ---------------------------------------------------------------------------------------------------------- formula


def row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: int,
    h: int,
    *,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    chunk: int = 0,
    slope: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and lse of query i of head h of one sequence, key by key."""
    place, group = i + len(k) - len(q), h // (HEADS // KV_HEADS)
    weights, total = [], torch.zeros((), dtype=F64) if sink is None else sink.to(F64).exp()
    for j in range(len(k)):
        hidden = causal and j > place
        hidden |= window[0] >= 0 and j < place - window[0]
        hidden |= window[1] >= 0 and j > place + window[1]
        hidden |= chunk > 0 and j // chunk != place // chunk
        score = sum(q[i, h, d].to(F64) * k[j, group, d].to(F64) for d in range(DIM)) / math.sqrt(DIM)
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        weights.append(0.0 if hidden else (score - slope * abs(place - j)).exp())
        total = total + weights[-1]
    out = torch.zeros(DIM, dtype=F64)
    for j, weight in enumerate(weights):
        out = out + (weight / total if total else 0.0) * v[j, group].to(F64)
    return out, total.log()


def rows(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, sinks: Tensor | None = None, **how: Any) -> Any:
    found = [
        row(
            q,
            k,
            v,
            i,
            h,
            slope=0.0 if slopes is None else float(slopes[h]),
            sink=None if sinks is None else sinks[h],
            **how,
        )
        for i in range(len(q))
        for h in range(HEADS)
    ]
    return torch.stack([out for out, _ in found]).view(q.shape), torch.stack([s for _, s in found]).view(-1, HEADS).T


# ---------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_loads_as_its_reference(name, cpu_machine, monkeypatch):
    bundle = load_reference(name, monkeypatch)
    assert is_shipped_reference(bundle, name.replace("_", "-"))
    assert isinstance(bundle, KERNELS[name])


def test_the_builds_share_every_file_but_their_functions():
    first_build, *others = (REGISTRY / name.replace("_", "-") / "build" / "torch-universal" for name in KERNELS)
    files = {path.name for path in first_build.glob("*.py")} - {"__init__.py", "interface.py"}
    assert len(files) == 6
    for other in others:
        assert {path.name for path in other.glob("*.py")} - {"__init__.py", "interface.py"} == files
        for name in files:
            assert (other / name).read_bytes() == (first_build / name).read_bytes(), name


def parameters(function: Any) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in found if p.name != "self"]


def test_parameters_are_those_of_the_bundle(kernel):
    hints = inspect.get_annotations(type(kernel))
    for name in set(hints) - {"__kernel__"}:
        protocol = getattr(attention, hints[name])
        assert parameters(getattr(kernel, name)) == parameters(protocol.__call__), name


def test_parameters_are_those_of_published_builds(flash2, flash3, vllm):
    names = [" ".join(name for name, _ in parameters(k.flash_attn_func)) for k in (flash2, flash3, vllm)]
    scales, speed = "q_descale k_descale v_descale window_size", "num_splits pack_gqa deterministic sm_margin"
    assert names == [
        "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
        f"q k v softmax_scale causal qv {scales} attention_chunk softcap {speed} return_attn_probs",
        f"q k v softmax_scale causal qv {scales} softcap {speed} s_aux",
    ]


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    "how",
    [{}, {"causal": True}, {"window": (1, 2)}, {"causal": True, "window": (2, -1), "softcap": 0.7}],
    ids=["all", "causal", "window", "softcap"],
)
@pytest.mark.parametrize(("sq", "sk"), [(3, 5), (5, 3), (1, 4)])
def test_each_row_is_that_of_the_formula(kernel, sq, sk, how):
    q, k, v = draw(sq, sk)
    more = {"causal": how.get("causal", False), "window_size": how.get("window", (-1, -1))}
    window = (how.get("window", (-1, -1))[0], 0) if how.get("causal") else how.get("window", (-1, -1))
    out = first(kernel.flash_attn_func(q, k, v, softcap=how.get("softcap", 0.0), **more))
    for b in range(2):
        assert_near(out[b], rows(q[b], k[b], v[b], **{**how, "window": window})[0], ulps=256, atol=1e-14)


@pytest.mark.parametrize("ndim", [1, 2])
def test_slopes_lower_scores_by_distance(flash2, ndim):
    q, k, v = draw(3, 5)
    slopes = torch.arange(2 * HEADS, dtype=F32).view(2, HEADS) / 8
    out = flash2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes if ndim == 2 else slopes[1])
    for b in range(2):
        assert_near(out[b], rows(q[b], k[b], v[b], slopes[b if ndim == 2 else 1], causal=True)[0], ulps=256, atol=1e-14)


def test_chunks_see_themselves_alone(flash3):
    q, k, v = draw(5, 7, batch=1)
    out = flash3.flash_attn_func(q, k, v, causal=True, attention_chunk=3)
    assert_near(out[0], rows(q[0], k[0], v[0], causal=True, chunk=3)[0], ulps=256, atol=1e-14)


def test_sinks_take_their_share(vllm):
    q, k, v = draw(4, 3, batch=1)
    sinks = random(HEADS, seed=3)
    out, lse = vllm.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    expected, sums = rows(q[0], k[0], v[0], sinks=sinks, causal=True)
    assert_near(out[0], expected, ulps=256, atol=1e-14)
    assert_near(lse[0], sums, ulps=256)
    assert torch.equal(lse[0, :, 0], sinks)  # query 0 sees no key
    assert not out[0, 0].any()


def test_rows_that_see_nothing_are_zeros_with_an_infinite_lse(flash2, flash3, vllm):
    q, k, v = draw(5, 3)
    out2, lse2, _ = flash2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out3, lse3 = flash3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out, lse = vllm.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(out2, out3)
    assert torch.equal(out, out3)
    assert not out2[:, :2].any()
    assert (lse2[..., :2] == math.inf).all()
    assert (lse3[..., :2] == -math.inf).all()
    assert torch.equal(lse, lse3)
    assert torch.equal(lse2[..., 2:], lse3[..., 2:])


@pytest.mark.parametrize(("sq", "sk"), [(127, 511), (128, 512), (129, 513), (257, 1025)])
def test_tiles_fit_together(vllm, sq, sk):
    q, k, v = (x.requires_grad_() for x in draw(sq, sk, batch=1))
    out, _ = vllm.flash_attn_func(q, k, v, causal=True, window_size=(600, 0))
    place, key = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)
    seen = (key <= place) & (key >= place - 600)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    upstream = random(*out.shape, seed=4)
    pairs = zip(
        (out, *torch.autograd.grad(out, (q, k, v), upstream)),
        (right, *torch.autograd.grad(right, (q, k, v), upstream)),
        strict=True,
    )
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_it_is_computed_in_float32_and_rounded_once(kernel, dtype):
    q, k, v = draw(3, 5, batch=1, dtype=dtype)
    out = first(kernel.flash_attn_func(q, k, v))
    assert out.dtype == dtype
    assert_near(out[0], rows(q[0], k[0], v[0])[0], ulps=1, atol=2e-6)


def test_fp8_is_what_its_scales_make_of_it(flash3):
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(3, 5, dtype=F32))
    descales = [random(2, KV_HEADS, dtype=F32, seed=5 + i).abs() for i in range(3)]
    out = flash3.flash_attn_func(q, k, v, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])
    assert out.dtype == BF16
    wide = [x.to(F64) for x in (q, k, v)]
    groups = (HEADS // KV_HEADS, 1, 1)
    scaled = [
        x * d.to(F64).repeat_interleave(g, 1)[:, None, :, None] for x, d, g in zip(wide, descales, groups, strict=True)
    ]
    for b in range(2):
        assert_near(out[b], rows(*(x[b] for x in scaled))[0], ulps=1, atol=1e-5)


def test_packed_sequences_do_not_see_each_other(kernel):
    q, k, v = (x[0] for x in draw(9, 9, batch=1))
    offsets = torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = first(kernel.flash_attn_varlen_func(*leaves, offsets, offsets, 5, 5, causal=True))
    for start, stop in ((0, 2), (2, 7)):
        at = slice(start, stop)
        assert_near(out[at].detach(), rows(q[at], k[at], v[at], causal=True)[0], ulps=256, atol=1e-14)
    assert not out[7:].any()
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert all(not gradient[7:].any() for gradient in gradients)
    assert all(gradient[:7].any() for gradient in gradients)


def test_a_cache_is_read_and_written_as_one_tensor_would_be(kernel):
    q, k, v = draw(2, 9)
    caches = [torch.full((4, 12, KV_HEADS, DIM), math.nan, dtype=F64) for _ in range(2)]
    rows_of, lengths = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([4, 7], dtype=torch.int32)
    new = [torch.stack([x[b, n : n + 2] for b, n in enumerate((4, 7))]) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        for b, n in enumerate((4, 7)):
            cache[int(rows_of[b]), :n] = x[b, :n]
    out = kernel.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lengths, cache_batch_idx=rows_of, causal=True)
    for b, n in enumerate((6, 9)):
        assert_near(out[b], rows(q[b], k[b, :n], v[b, :n], causal=True)[0], ulps=256, atol=1e-14)
        assert torch.equal(caches[0][int(rows_of[b]), :n], k[b, :n])
        assert caches[0][int(rows_of[b]), n:].isnan().all()
    assert caches[0][[1, 3]].isnan().all()


def test_parts_of_the_keys_combine_to_all_of_them(flash3):
    q, k, v = draw(3, 8)
    whole, lse = flash3.flash_attn_func(q, k, v, return_attn_probs=True)
    halves = [flash3.flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(5), slice(5, 8))]
    out, sums = flash3.flash_attn_combine(
        torch.stack([o for o, _ in halves]), torch.stack([s for _, s in halves]).transpose(2, 3)
    )
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(sums, lse.transpose(1, 2), rtol=1e-12, atol=1e-14)


# -------------------------------------------------------------------------------------------------------- gradients


def test_everything_that_is_promised_one_has_a_gradient(flash2, flash3, vllm):
    q, k, v = (x.requires_grad_() for x in draw(4, 3, batch=1))
    qv, sinks = random(1, 4, HEADS, DIM, seed=5).requires_grad_(), random(HEADS, seed=3).requires_grad_()
    slopes = torch.arange(HEADS, dtype=F32) / 8
    how = {"causal": True, "window_size": (2, 0), "softcap": 1.5}
    check = torch.autograd.gradcheck
    assert check(lambda *x: vllm.flash_attn_func(*x[:3], s_aux=x[3], **how)[0], (q, k, v, sinks), fast_mode=True)
    assert check(lambda *x: flash2.flash_attn_func(*x, alibi_slopes=slopes, **how), (q, k, v), fast_mode=True)
    assert check(lambda *x: flash3.flash_attn_func(*x[:3], qv=x[3], attention_chunk=2), (q, k, v, qv), fast_mode=True)


def test_lse_has_no_gradient(vllm):
    q, k, v = (x.requires_grad_() for x in draw(3, 3))
    out, lse = vllm.flash_attn_func(q, k, v)
    assert out.requires_grad
    assert not lse.requires_grad


def test_compiles_into_one_graph_with_the_same_result_and_gradient(vllm):
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    sinks = random(HEADS, dtype=F32, seed=3)

    def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, _ = vllm.flash_attn_varlen_func(q * 2, k, v, offsets, offsets, 3, 3, causal=True, s_aux=sinks)
        return out.square().sum()

    results = []
    for function in (step, compiled(step)):
        leaves = [x[0].clone().requires_grad_() for x in draw(5, 5, dtype=F32)] + [sinks.clone().requires_grad_()]
        value = function(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_a_step_over_a_cache_compiles_into_one_graph(flash2):
    q, k, v = draw(2, 2, dtype=F32)
    angles = random(16, 2, dtype=F32)
    lengths = torch.tensor([3, 0], dtype=torch.int32)

    def step(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        table = (angles.cos(), angles.sin())
        return flash2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, *table, cache_seqlens=lengths, causal=True)

    results = []
    for function in (step, compiled(step)):
        caches = [random(2, 16, KV_HEADS, DIM, dtype=F32, seed=6 + i) for i in range(2)]
        results.append([function(*caches), *caches])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


# ----------------------------------------------------------------------------------------------------------- errors


def test_dropout_is_refused(flash2):
    with pytest.raises(ValueError, match=r"^dropout_p: expected 0\.0, .* got 0\.1$"):
        flash2.flash_attn_func(*draw(3, 3), dropout_p=0.1)


WRONG = {
    "q: expected bfloat16": (TypeError, lambda q, k, v: (q.long(), k, v)),
    "k: expected torch.float64": (TypeError, lambda q, k, v: (q, k.float(), v)),
    "q: expected shape": (ValueError, lambda q, k, v: (q[0], k, v)),
    "k: expected last dimension 6": (ValueError, lambda q, k, v: (q, k[..., :5], v)),
    "k: expected a number of heads that divides 3": (ValueError, lambda q, k, v: (q[:, :, :3], k, v)),
    "v: expected shape": (ValueError, lambda q, k, v: (q, k, v[:, :2])),
    "k: expected 2 sequences": (ValueError, lambda q, k, v: (q, k[:1], v[:1])),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(kernel, message):
    error, change = WRONG[message]
    with pytest.raises(error, match=message):
        kernel.flash_attn_func(*change(*draw(3, 3)))


def test_sequences_past_the_end_are_named(vllm):
    q, k, v = (x[0] for x in draw(4, 4))
    good, long, back = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 4], [0, 2, 5], [0, 3, 2]))
    with pytest.raises(ValueError, match=r"^q: expected sequences in order within 4 rows, got rows 2 to 5"):
        vllm.flash_attn_varlen_func(q, k, v, long, good, 3, 2)
    with pytest.raises(ValueError, match=r"^q: expected sequences in order"):
        vllm.flash_attn_varlen_func(q, k, v, back, good, 3, 2)
    with pytest.raises(ValueError, match=r"^k: expected sequences within its rows, got rows 2 to 5"):
        vllm.flash_attn_varlen_func(q, k, v, good, long, 2, 3)
    with pytest.raises(ValueError, match=r"^s_aux: expected shape \(4,\), one a head, got \(3,\)"):
        vllm.flash_attn_varlen_func(q, k, v, good, good, 2, 2, s_aux=torch.zeros(3))


def test_what_a_cache_cannot_hold_is_named(flash3):
    q, k, v = draw(1, 4)
    lengths = torch.tensor([4, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^k: expected to fit in a cache of 4 places, got place 4"):
        flash3.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=lengths)
    with pytest.raises(ValueError, match=r"^cache_seqlens: expected the length of each sequence before"):
        flash3.flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1])
    table = torch.tensor([[0, 1], [1, 9]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^the table of pages: expected pages of 2"):
        flash3.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([4, 5], dtype=torch.int32), page_table=table)
    with pytest.raises(ValueError, match=r"^k: expected at most 8 keys"):
        flash3.flash_attn_with_kvcache(q, k, v, cache_seqlens=torch.tensor([9, 5], dtype=torch.int32), page_table=table)


def cached(kernel: Any, **changes: Any) -> tuple[Any, Tensor]:
    """A call that adds one key to each of two sequences of 16 places, and the cache of keys."""
    cache = random(2, 16, 1, 16, seed=9)
    new = random(2, 1, 1, 16, seed=10)
    given = {"k": new, "v": new, "cache_seqlens": torch.tensor([5, 5], dtype=torch.int32)} | changes
    return kernel.flash_attn_with_kvcache, (random(2, 3, 1, 16), cache, cache.clone(), given)


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_rows_of_no_sequence_are_not_written(flash3):
    rows = random(7, 1, 16, seed=4)
    function, (q, k_cache, v_cache, given) = cached(flash3, k=rows, v=rows, cu_seqlens_k_new=whole(2, 4, 6))
    want = k_cache.clone()
    want[0, 5:7], want[1, 5:7] = rows[2:4], rows[4:6]
    function(q, k_cache, v_cache, **given)
    assert torch.equal(k_cache, want)


TABLES = {"rotary_cos": random(8, 4), "rotary_sin": random(8, 4)}
REFUSED = {
    "cu_seqlens_k_new: expected int32": (TypeError, {"cu_seqlens_k_new": torch.zeros(3)}),
    r"cu_seqlens_k_new: expected shape \(3,\)": (ValueError, {"cu_seqlens_k_new": whole(0, 1)}),
    "k: expected sequences in order within 2 rows": (ValueError, {"cu_seqlens_k_new": whole(0, 1, 3)}),
    "k: expected sequences in order within": (ValueError, {"cu_seqlens_k_new": whole(0, 2, 1)}),
    r"cu_seqlens_q: expected shape \(sequences": (ValueError, {"cu_seqlens_q": whole(0, 1, 3)[None]}),
    "cu_seqlens_q: expected int32": (TypeError, {"cu_seqlens_q": torch.zeros(3)}),
    "q: expected sequences in order within 6 rows": (ValueError, {"cu_seqlens_q": whole(0, 1, 7)}),
    r"rotary_seqlens: expected shape \(2,\)": (ValueError, {**TABLES, "rotary_seqlens": whole(0)}),
    "rotary_cos: expected places .* -1 to 2": (ValueError, {**TABLES, "rotary_seqlens": whole(0, -1), "causal": True}),
    "rotary_cos: expected places .* 6 to 9": (ValueError, {**TABLES, "rotary_seqlens": whole(0, 6), "causal": True}),
    "cache_seqlens: expected lengths": (ValueError, {"cache_seqlens": whole(-1, 5)}),
    "cache_batch_idx: expected rows of 2": (ValueError, {"cache_batch_idx": whole(0, -1)}),
    r"cache_batch_idx: expected rows of 2, got \[0, 2\]": (ValueError, {"cache_batch_idx": whole(0, 2)}),
    "cache_leftpad: expected places": (ValueError, {"cache_leftpad": whole(0, 7)}),
    "the table of pages: expected pages of 2": (ValueError, {"page_table": whole(0, -1)[:, None]}),
    "the table of pages: expected pages of 2, got": (ValueError, {"page_table": whole(0, 2)[:, None]}),
    "k: expected to fit": (ValueError, {"cache_seqlens": whole(0, 16)}),
    "qv: expected shape": (ValueError, {"qv": random(2, 3, 1, 8)}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_nothing_is_written_by_a_call_that_is_refused(flash3, message):
    error, changes = REFUSED[message]
    function, (q, k_cache, v_cache, given) = cached(flash3, **changes)
    if "cu_seqlens_q" in changes:
        q = q.flatten(0, 1)
    if "cu_seqlens_k_new" in changes:
        given |= {name: given[name].flatten(0, 1) for name in ("k", "v")}
    before = k_cache.clone()
    with pytest.raises(error, match=message):
        function(q, k_cache, v_cache, **given)
    assert torch.equal(k_cache, before)


def test_more_keys_than_a_sequence_has_are_refused(flash3):
    q, k, v = (x[0] for x in draw(4, 4, batch=1))
    offsets = whole(0, 2, 4)
    for name in ("seqused_q", "seqused_k"):
        with pytest.raises(ValueError, match=rf"^{name}: expected at most the rows of each sequence, \[2, 2\]"):
            flash3.flash_attn_varlen_func(q, k, v, offsets, offsets, 2, 2, **{name: whole(3, 1)})


def test_chunks_turn_queries_and_windows_that_hide_nothing_do_not(flash2, flash3):
    def out(kernel: Any, **changes: Any) -> Tensor:
        function, (q, k_cache, v_cache, given) = cached(kernel, rotary_cos=random(16, 4), rotary_sin=random(16, 4))
        return function(q, k_cache, v_cache, **given, **changes)

    still, moved = out(flash3), out(flash3, window_size=(14, 1))
    assert not torch.equal(still, moved)
    assert torch.equal(out(flash3, attention_chunk=64), out(flash3, window_size=(14, 3)))
    assert torch.equal(out(flash3, window_size=(15, 2)), still)
    assert torch.equal(out(flash2, window_size=(16, 16)), still)
    assert not torch.equal(out(flash2, window_size=(15, 2)), still)


def test_nan_stays_with_the_rows_that_see_it(kernel):
    q, k, v = draw(5, 5, batch=1)
    bad = [x.clone() for x in (q, k, v)]
    for x in bad[1:]:
        x[:, 3] = math.nan
    want = first(kernel.flash_attn_func(q, k, v, causal=True))
    leaves = [x.requires_grad_() for x in bad]
    got = first(kernel.flash_attn_func(*leaves, causal=True))
    torch.testing.assert_close(got[:, :3], want[:, :3])
    assert got[:, 3:].isnan().all()
    assert not torch.autograd.grad(got[:, :3].sum(), leaves[0])[0][:, :3].isnan().any()
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        leaves[0][:, 1] = math.nan  # sees keys 0 and 1
    to_q, to_k, to_v = torch.autograd.grad(first(kernel.flash_attn_func(*leaves, causal=True)).sum(), leaves)
    assert not to_q[:, 2:].isnan().any()
    assert not to_k[:, 2:].isnan().any()
    assert not to_v[:, 2:].isnan().any()


def test_no_dims_are_weighed_alike(kernel):
    q, k, v = (x[..., :0] for x in draw(3, 4))
    v = draw(3, 4)[2]
    out = first(kernel.flash_attn_func(q, k, v))
    torch.testing.assert_close(out, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand(out.shape))


def test_what_a_part_of_no_weight_holds_does_not_count(flash3):
    parts, lse = random(2, 1, 3, 2, 4, dtype=F32), random(2, 1, 3, 2, dtype=F32)
    lse[0] = -math.inf
    parts[0] = math.nan
    assert torch.equal(flash3.flash_attn_combine(parts, lse)[0], parts[1])


def test_gradients_are_the_same_in_a_backward_under_autocast(kernel):
    leaves = [x.requires_grad_() for x in draw(40, 50, dtype=F32)]
    plain = torch.autograd.grad(first(kernel.flash_attn_func(*leaves)).square().sum(), leaves)
    with torch.autocast("cpu", BF16):
        cast = torch.autograd.grad(first(kernel.flash_attn_func(*leaves)).square().sum(), leaves)
    for got, want in zip(cast, plain, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("form", ["qkv", "kv", "three", "names"])
@pytest.mark.parametrize("used", [False, True])
def test_a_guard_gives_rows_of_no_sequence_a_gradient_of_zero(form, used):
    offsets, counts = whole(2, 4, 6), whole(1, 2)
    x = random(8, 2, 4, dtype=F32)
    tail = (offsets, offsets, 2, 2, *((counts, counts) if used and form == "three" else ()))

    def build(*args: Any, **named: Any) -> Tensor:  # of which all rows get a gradient
        return sum(a.sum() for a in (*args, *named.values()) if isinstance(a, Tensor) and a.is_floating_point())

    parts = {"qkv": 1, "kv": 2}.get(form, 3)
    leaves = [torch.stack([x] * (3 if form == "qkv" else 2), 1) if form == "qkv" or (form == "kv" and i) else x.clone()
              for i in range(parts)]  # fmt: skip
    leaves = [leaf.requires_grad_() for leaf in leaves]
    if form == "names":
        named = dict(zip(("q", "k", "v"), leaves, strict=True)) | {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        named |= {"seqused_q": counts, "seqused_k": counts} if used else {}
        out = packed_gradient(build, **named)
    else:
        out = packed_gradient(build, *leaves, *(tail[1:] if form == "qkv" else tail))
    rows = [2, 4, 5] if used and form in ("three", "names") else [2, 3, 4, 5]
    for gradient in torch.autograd.grad(out, leaves):
        assert gradient.flatten(1).any(1).nonzero().flatten().tolist() == rows


def test_sinks_get_nothing_from_rows_before_the_first_sequence(vllm):
    q, k, v = (x[0] for x in draw(6, 6, batch=1, dtype=F32))
    offsets = whole(2, 6)

    def build(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        out, lse = (x.clone() for x in vllm.flash_attn_varlen_func(*args, **named))
        out[:2], lse[:, :2] = 7.0, 0.0
        return out, lse

    found = []
    for function in (vllm.flash_attn_varlen_func, partial(sink_gradient, build)):
        sinks = random(HEADS, dtype=F32, seed=3).requires_grad_()
        out, _ = function(q, k, v, offsets, offsets, 4, 4, s_aux=sinks)
        found += torch.autograd.grad(out.sum(), sinks)
    torch.testing.assert_close(*found)
