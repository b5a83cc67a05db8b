"""Guards of single kernels: builds with the faults of published ones keep what their bundles promise behind them."""

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_loader
from kernel_loader.bundles import paged_attention
from kernel_loader.guards import Guarded
from kernel_loader.loader import KernelLoader
from kernel_loader.settings import Settings
from tests import faulty_builds
from tests.builds import CPU_HOST, write_build

# What some manifests ask for. The builds of tests import neither.
HOST = replace(CPU_HOST, packages={"triton": "3.4.0", "transformers": "5.0.0"})
NAN = float("nan")

# Kernel -> the name of its repository, the last version with the faults, and the source of a build that has them.
FAULTY = {
    "liger": ("liger-kernels", 3, faulty_builds.LIGER),
    "liger_kernels": ("liger-kernels", 3, faulty_builds.LIGER),
    "rotary": ("rotary", 2, faulty_builds.ROTARY),
    "vllm_flash_attn3": ("vllm-flash-attn3", 1, faulty_builds.VLLM_FLASH_ATTN3),
    "mamba_ssm": ("mamba-ssm", 2, faulty_builds.MAMBA_SSM),
    "gated_delta_rule": ("fla", 1, faulty_builds.FLA),
    "fla": ("fla", 1, faulty_builds.FLA),
    "layer_norm": ("layer-norm", 1, faulty_builds.LAYER_NORM),
    "activation": ("activation", 1, faulty_builds.ACTIVATION),
    "relu": ("relu", 1, faulty_builds.RELU),
    "deformable_detr": ("deformable-detr", 1, faulty_builds.DEFORMABLE_DETR),
    "paged_attention": ("paged-attention", 1, faulty_builds.PAGED_ATTENTION),
    "causal_conv1d": ("causal-conv1d", 1, faulty_builds.CAUSAL_CONV1D),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Numbers this few take longer among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """Load a kernel from a build with its faults; as of another version where one is given."""
    found = {}

    def loaded(kernel: str, version: int | None = None) -> object:
        name, last, source = FAULTY[kernel]
        key = (kernel, version)
        if key not in found:
            root: Path = tmp_path_factory.mktemp(kernel) / name
            write_build(root, "torch-cpu", {"__init__.py": source}, name=name, version=version or last)
            settings = Settings(
                local={f"kernels-community/{name}": root}, offline=True, cache=root / "store", fallback="error"
            )
            found[key] = KernelLoader(settings, HOST).load(kernel, revision="main" if version else None)
        return found[key]

    return loaded


@pytest.mark.parametrize("kernel", FAULTY)
def test_guards_are_for_the_versions_that_have_the_fault(load, kernel):
    assert kernel_loader.origin(load(kernel)).guards
    assert kernel_loader.origin(load(kernel, FAULTY[kernel][1] + 1)).guards == ()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def copies(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


# --- rotary embedding -----------------------------------------------------------------------------------------------


def tables(*shape: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines whose halves are alike."""
    angle = torch.randn(*shape[:-1], shape[-1] // 2)
    return torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cos.unsqueeze(dim) + torch.cat((-other, one), -1) * sin.unsqueeze(dim)


@pytest.mark.parametrize("dim", [1, 2])
def test_rotary_gives_q_and_k_their_gradient(load, dim):
    function = load("rotary").apply_rotary_transformers
    q, k = leaf(2, 3, 5, 8), leaf(2, 3, 5, 8)
    cos, sin = tables(1, 5 if dim == 1 else 3, 8)
    upstream = torch.randn(2, 2, 3, 5, 8)
    want_q, want_k = turned(q, cos, sin, dim), turned(k, cos, sin, dim)
    want = torch.autograd.grad((want_q, want_k), (q, k), tuple(upstream))
    for call in (function, compiled(function)):
        got = call(q, k, cos, sin, unsqueeze_dim=dim)
        torch.testing.assert_close(got, (want_q, want_k))
        torch.testing.assert_close(torch.autograd.grad(got, (q, k), tuple(upstream)), want)
    bare = function.__wrapped__(q, k, cos.expand(2, -1, -1), sin.expand(2, -1, -1), dim)
    torch.testing.assert_close(torch.autograd.grad(bare, (q, k), tuple(upstream)), tuple(upstream))


def test_the_gradient_of_rotary_has_one_of_its_own(load):
    function = load("rotary").apply_rotary_transformers
    q, k = leaf(1, 2, 3, 4, dtype=torch.float64), leaf(1, 2, 3, 4, dtype=torch.float64)
    cos, sin = (x.double() for x in tables(1, 3, 4))
    assert torch.autograd.gradcheck(lambda *x: function(*x, cos, sin), (q, k))
    assert torch.autograd.gradgradcheck(lambda *x: function(*x, cos, sin), (q, k))


def test_rotary_without_need_of_a_gradient_is_called_as_it_is():
    calls = []
    guarded = Guarded(lambda *args: calls.append(args), ["turn-gradient"])
    q = leaf(1, 1, 1, 2)
    with torch.no_grad():
        guarded(q, q, "cos", "sin", 2)
    guarded(q.detach(), q.detach(), "cos", "sin")
    assert [call[2:] for call in calls] == [("cos", "sin", 2), ("cos", "sin", 1)]


def test_rotary_turns_only_q_or_only_k(load):
    function = load("rotary").apply_rotary_transformers
    q, k = leaf(1, 2, 3, 4), torch.randn(1, 2, 3, 4)
    cos, sin = tables(1, 3, 4)
    (got,) = torch.autograd.grad(function(q, k, cos, sin)[0].sum(), q)
    (want,) = torch.autograd.grad(turned(q, cos, sin).sum(), q)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("dim", "shape"), [(1, (3, 2, 5, 8)), (2, (3, 1, 4, 8))])
def test_rotary_takes_tables_of_one_batch_and_of_one_position(load, dim, shape):
    function = load("rotary").apply_rotary_transformers
    q, k = torch.randn(shape), torch.randn(shape)
    cos, sin = tables(1, shape[3 - dim], 8)
    for call in (function, compiled(function)):
        torch.testing.assert_close(call(q, k, cos, sin, dim), (turned(q, cos, sin, dim), turned(k, cos, sin, dim)))
    with pytest.raises(AssertionError, match="past the end of cos"):
        function.__wrapped__(q, k, cos, sin, dim)


def test_tables_are_expanded_without_a_copy():
    calls = []
    guarded = Guarded(lambda *args: calls.append(args), ["table-batch"])
    q, cos = torch.ones(3, 2, 5, 8), torch.ones(1, 5, 8)
    guarded(q, q, cos, cos, 1)
    assert [x.shape for x in calls[0][2:4]] == [(3, 5, 8)] * 2
    assert {x.data_ptr() for x in calls[0][2:4]} == {cos.data_ptr()}


@pytest.mark.parametrize("given", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_rotary_takes_tables_of_another_dtype_and_rounds_once(load, given):
    kernel, (own, other) = load("rotary"), given
    q, k = leaf(2, 3, 5, 8, dtype=own), leaf(2, 2, 5, 8, dtype=own)
    cos, sin = (table.to(other) for table in tables(1, 5, 8))
    want = [turned(x.double(), cos.double(), sin.double()) for x in (q, k)]
    upstream = [torch.randn_like(x, dtype=own) for x in (q, k)]
    grads = torch.autograd.grad(want, (q, k), [x.double() for x in upstream])
    for call in (kernel.apply_rotary_transformers, compiled(kernel.apply_rotary_transformers)):
        got = call(q, k, cos, sin)
        assert {x.dtype for x in got} == {own}
        torch.testing.assert_close(
            got, tuple(x.to(own) for x in want), rtol=1e-2 if own != torch.float32 else 1e-5, atol=1e-6
        )
        found = torch.autograd.grad(got, (q, k), upstream)
        torch.testing.assert_close(found, grads, rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="the dtype of x1"):
        kernel.apply_rotary_transformers.__wrapped__(q, k, cos.expand(2, -1, -1), sin.expand(2, -1, -1))


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("conj", [False, True])
def test_pairs_are_turned_by_tables_of_another_dtype(load, conj, other):
    function = load("rotary").apply_rotary
    x, out = torch.randn(2, 5, 3, 8).bfloat16(), torch.full((2, 5, 3, 8), NAN).bfloat16()
    (x1, x2), outs = x.chunk(2, -1), out.chunk(2, -1)
    angle = torch.randn(5, 1, 4)
    cos, sin = angle.cos().to(other), angle.sin().to(other)
    assert function(x1, x2, cos, sin, *outs, conj) is None
    sign = -1 if conj else 1
    want = x1.double() * cos - sign * x2.double() * sin, sign * x1.double() * sin + x2.double() * cos
    torch.testing.assert_close(torch.cat(want, -1), out.double(), rtol=2**-8, atol=2**-8)
    function(x1, x2, cos, sin, out1=x1, out2=x2, conj=conj)
    torch.testing.assert_close(x, out, rtol=0, atol=0)
    if other == torch.float32:
        with pytest.raises(RuntimeError, match="the dtype of x1"):
            function.__wrapped__(x1, x2, cos, sin, *outs, conj)


def liger_inputs(layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Heads before positions, in memory as told."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    if layout == "transposed":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    return q, k, *tables(1, 5, 8)


@pytest.mark.parametrize("kernel", ["liger", "liger_kernels"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_liger_leaves_q_k_and_gradients_alone(load, kernel, layout):
    function = load(kernel).liger_rotary_pos_emb
    q, k, cos, sin = liger_inputs(layout)
    for call in (function, compiled(function)):
        before = q.clone(), k.clone()
        mine, theirs = q.detach().requires_grad_(), k.detach().requires_grad_()
        got = call(mine, theirs, cos, sin)
        torch.testing.assert_close(got, (turned(before[0], cos, sin), turned(before[1], cos, sin)))
        torch.testing.assert_close((q, k), before, rtol=0, atol=0)
        upstream = torch.randn_like(q), torch.randn_like(k)  # as strided as q and k
        kept = upstream[0].clone(), upstream[1].clone()
        found = torch.autograd.grad(got, (mine, theirs), upstream)
        torch.testing.assert_close(upstream, kept, rtol=0, atol=0)
        torch.testing.assert_close(found, (turned(kept[0], cos, -sin), turned(kept[1], cos, -sin)))
    function.__wrapped__(q, k, cos, sin)
    assert torch.equal(q, before[0]) == (layout == "contiguous")


def test_what_liger_returns_can_be_added_to_what_shares_its_gradient(load):
    function = load("liger").liger_rotary_pos_emb
    q, k, cos, sin = liger_inputs("transposed")
    upstream = torch.randn_like(q)
    found = {}
    for name, call in (("guarded", function), ("bare", function.__wrapped__)):
        other, mine = torch.zeros_like(q).requires_grad_(), q.clone().requires_grad_()
        total = other + call(mine, k, cos, sin)[0]
        found[name], _ = torch.autograd.grad(total, (other, mine), upstream.clone())
    torch.testing.assert_close(found["guarded"], upstream)
    assert not torch.allclose(found["bare"], upstream)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_liger_takes_heads_after_positions(load, layout):
    function = load("liger").liger_rotary_pos_emb
    q, k, cos, sin = liger_inputs(layout)
    want = turned(q, cos, sin).transpose(1, 2), turned(k, cos, sin).transpose(1, 2)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    kept = q.clone()
    for call in (function, compiled(function)):
        torch.testing.assert_close(call(q, k, cos, sin, unsqueeze_dim=2), want)
        assert torch.equal(q, kept)
    assert function.guards == ("left-alone", "heads-dimension")


def test_what_a_rotary_guard_returns_may_be_changed_in_place(load):
    for kernel, name in (("liger", "liger_rotary_pos_emb"), ("rotary", "apply_rotary_transformers")):
        q, k, cos, sin = liger_inputs("transposed")
        got = getattr(load(kernel), name)(q.requires_grad_(), k, cos, sin)[0]
        got.mul_(2).sum().backward()
        assert q.grad is not None


# --- attention ------------------------------------------------------------------------------------------------------


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """Attention of (rows, heads, dim), as a softmax over one column more."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    scores = torch.cat((scores.masked_fill(~seen, -torch.inf), sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :-1], v)


@pytest.mark.parametrize("by", ["keyword", "position"])
@pytest.mark.parametrize("causal", [False, True])
def test_sinks_get_their_gradient(load, causal, by):
    function = load("vllm_flash_attn3").flash_attn_func
    q, k, v, sinks = leaf(2, 5, 3, 8), leaf(2, 4, 3, 8), leaf(2, 4, 3, 8), leaf(3)
    upstream = torch.randn(2, 5, 3, 8)
    seen = torch.ones(5, 4, dtype=torch.bool)
    seen = seen.tril(-1) if causal else seen  # the first row sees nothing
    want_out = torch.stack([with_sinks(q[b], k[b], v[b], sinks, seen) for b in range(2)])
    want = torch.autograd.grad(want_out, (q, k, v, sinks), upstream)
    between = (None, None, None, None, (-1, -1), 0.0, 1, None, False, 0)
    rest, named = (
        ((None, causal, *between, sinks), {}) if by == "position" else ((), {"causal": causal, "s_aux": sinks})
    )
    for call in (function, compiled(function)):
        out, lse = call(q, k, v, *rest, **named)
        assert not lse.requires_grad
        torch.testing.assert_close(out, want_out)
        torch.testing.assert_close(torch.autograd.grad(out, (q, k, v, sinks), upstream), want)
    out, _ = function.__wrapped__(q, k, v, *rest, **named)
    assert torch.autograd.grad(out, (q, sinks), upstream, allow_unused=True)[1] is None


@pytest.mark.parametrize("by", ["keyword", "position"])
@pytest.mark.parametrize("used", [None, [2, 1]])
def test_sinks_of_packed_sequences_get_their_gradient(load, used, by):
    """Rows of no sequence hold NaN, and so may the gradient to them."""
    function = load("vllm_flash_attn3").flash_attn_varlen_func
    q, k, v, sinks = leaf(6, 3, 8), leaf(7, 3, 8), leaf(7, 3, 8), leaf(3)
    starts_q, starts_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    counts = None if used is None else torch.tensor(used, dtype=torch.int32)
    mine = torch.tensor([0, 0, 1, 1, 1, -1] if used is None else [0, 0, 1, -1, -1, -1])
    seen = mine[:, None] == torch.tensor([0, 0, 0, 1, 1, 1, 1])
    rows = mine >= 0
    upstream = torch.randn(6, 3, 8)
    want_out = with_sinks(q, k, v, sinks, seen)[rows]
    (want,) = torch.autograd.grad(want_out, sinks, upstream[rows])
    upstream[~rows] = NAN
    args = (q, k, v, starts_q, starts_k, 3, 4)
    between = (None, None, False, None, None, None, None, (-1, -1), 0.0, 1, None, False, 0)
    rest, named = ((counts, *between, sinks), {}) if by == "position" else ((), {"seqused_q": counts, "s_aux": sinks})
    for call in (function, compiled(function)):
        out, lse = call(*args, *rest, **named)
        assert lse.shape == (3, 6)
        torch.testing.assert_close(out[rows], want_out)
        (found,) = torch.autograd.grad(out, sinks, upstream, retain_graph=True)
        torch.testing.assert_close(found, want)
    assert not function.__wrapped__(*(x.detach() for x in args[:3]), *args[3:], *rest, **named)[0].requires_grad


def test_the_gradient_to_sinks_has_their_dtype_and_is_of_sinks_alone_too(load):
    function = load("vllm_flash_attn3").flash_attn_func
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.bfloat16) for _ in range(3))
    sinks = leaf(2, dtype=torch.bfloat16)
    out, _ = function(q, k, v, s_aux=sinks)
    (found,) = torch.autograd.grad(out.float().sum(), sinks)
    wide = sinks.detach().double().requires_grad_()
    right = with_sinks(q[0].double(), k[0].double(), v[0].double(), wide, torch.ones(4, 4, dtype=torch.bool))
    (want,) = torch.autograd.grad(right.sum(), wide)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("sinks", [None, torch.zeros(2)])
def test_without_sinks_that_need_a_gradient_nothing_is_attached(sinks):
    result = object()
    q = torch.ones(1, 1, 2, 8)
    assert Guarded(lambda *args, **kwargs: result, ["sink-gradient"])(q, q, q, s_aux=sinks) is result
    with torch.no_grad():
        needing = torch.zeros(2, requires_grad=True)
        assert Guarded(lambda *args, **kwargs: result, ["sink-gradient"])(q, q, q, s_aux=needing) is result


def test_the_places_of_arguments_are_those_of_the_bundle():
    bundles = pytest.importorskip("kernel_loader.bundles.attention")
    for name, first, where in (("VllmFlashAttn3Func", "s_aux", 15), ("VllmFlashAttn3Varlen", "s_aux", 21)):
        names = list(inspect.signature(getattr(bundles, name).__call__).parameters)[1:]
        assert names.index(first) == where
    assert (names.index("cu_seqlens_q"), names.index("seqused_q")) == (3, 7)


# --- arguments that may be left out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(), (3,)])
@pytest.mark.parametrize("left_out", ["D", "dt_bias", "both"])
def test_a_step_of_mamba_needs_neither_d_nor_a_bias(load, heads, left_out):
    function = load("mamba_ssm").selective_state_update
    shape = (*heads, 4)
    state, x, dt, a = torch.randn(2, *shape, 5), torch.randn(2, *shape), torch.rand(2, *shape), -torch.rand(*shape, 5)
    b, c = torch.randn(2, *heads, 5), torch.randn(2, *heads, 5)
    z, given, zeros = torch.randn(2, *shape), torch.randn(shape), torch.zeros(shape)
    d, bias = (None, given) if left_out == "D" else (given, None) if left_out == "dt_bias" else (None, None)
    own = state.clone()
    full = [zeros if value is None else value for value in (d, bias)]
    want = function.__wrapped__(own, x, dt, a, b, c, full[0], z, full[1], True)
    for call in (function, compiled(function)):
        mine = state.clone()
        torch.testing.assert_close(call(mine, x, dt, a, b, c, d, z=z, dt_bias=bias, dt_softplus=True), want)
        torch.testing.assert_close(mine, own)
    with pytest.raises(AttributeError):
        function.__wrapped__(state.clone(), x, dt, a, b, c, d, z, bias, True)


def test_zeros_for_a_step_of_mamba_take_no_memory_and_what_is_given_stays():
    calls = []
    guarded = Guarded(lambda *args, **kwargs: calls.append((args, kwargs)), ["step-terms"])
    x, given = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.ones(3, 4)
    guarded("state", x, "dt", "A", "B", "C", dt_softplus=True, state_batch_indices=1)
    (args, kwargs) = calls[0]
    assert [args[6].shape, args[8].shape] == [(3, 4), (3, 4)]
    assert {args[6].stride(), args[8].stride()} == {(0, 0)}
    assert args[6].dtype == torch.bfloat16
    assert kwargs == {"dt_softplus": True, "state_batch_indices": 1}
    guarded("state", x, "dt", "A", "B", "C", given, None, given, True, None)
    assert calls[1][0][6] is calls[1][0][8] is given
    assert calls[1][0][9:] == (True, None)


@pytest.mark.parametrize("kernel", ["gated_delta_rule", "fla"])
def test_a_delta_rule_without_rates_has_one_for_each_head_of_v(load, kernel):
    function = load(kernel).fused_recurrent_gated_delta_rule
    q, k, v = torch.randn(2, 3, 2, 4), torch.randn(2, 3, 2, 4), torch.randn(2, 3, 6, 5)
    want = function.__wrapped__(q, k, v, beta=torch.ones(2, 3, 6), output_final_state=True)
    for call in (function, compiled(function)):
        torch.testing.assert_close(call(q, k, v, output_final_state=True), want)
    with pytest.raises(AssertionError, match="past the end of beta"):
        function.__wrapped__(q, k, v)


def test_rates_that_are_given_stay_as_they_are():
    calls = []
    guarded = Guarded(lambda *args, **kwargs: calls.append((args, kwargs)), ["ones-beta"])
    v, beta = torch.ones(1, 2, 4, 8, dtype=torch.bfloat16), torch.ones(1)
    guarded("q", "k", v, "g", beta=beta, scale=2)
    guarded("q", "k", v, "g", None, None, None, 3)
    assert calls[0][0][6] is beta
    assert calls[0][1] == {"scale": 2}
    assert (calls[1][0][6].shape, calls[1][0][6].dtype, calls[1][0][7]) == ((1, 2, 4), torch.bfloat16, 3)


# --- what has no gradient -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "width"), [("silu", 4), ("silu_and_mul", 2)])
def test_backward_of_an_activation_raises_and_forward_writes_out(load, name, width):
    function = getattr(load("activation"), name)
    x = leaf(3, 4)
    want = torch.nn.functional.silu(x[:, :width]) * (1 if width == 4 else x[:, 2:])
    out = torch.empty(3, width)
    assert function(out, x) is out
    torch.testing.assert_close(out, want)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        out.sum().backward()
    both = compiled(lambda x: function(torch.empty(3, width), x) * 2)(x)
    torch.testing.assert_close(both, want * 2)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        both.sum().backward()
    with torch.no_grad():
        assert not function(torch.empty(3, width), x).requires_grad
    assert not function(torch.empty(3, width), x.detach()).requires_grad
    assert not function.__wrapped__(torch.empty(3, width), x).requires_grad


def test_backward_through_what_an_activation_changed_in_place_raises(load):
    x = leaf(3, 4)
    middle = x * 2
    assert load("activation").silu(middle, middle) is middle
    torch.testing.assert_close(middle, torch.nn.functional.silu(x * 2))
    with pytest.raises(NotImplementedError, match="has no gradient"):
        middle.sum().backward()


@pytest.mark.parametrize("needing", ["input", "gamma"])
def test_backward_of_a_layer_norm_raises(load, needing):
    function = load("layer_norm").dropout_add_ln_fwd
    x, gamma = torch.randn(3, 8), torch.randn(8)
    {"input": x, "gamma": gamma}[needing].requires_grad_()
    rest = (None, None, None, None, None, 0.0, 1e-5, 1.0, 0, None, False, False)
    for call in (function, compiled(function)):
        z, *others = call(x, gamma, *rest)
        torch.testing.assert_close(z, torch.nn.functional.layer_norm(x, (8,), gamma))
        assert [other is None for other in others] == [True, True, False, False]
        with pytest.raises(NotImplementedError, match="has no gradient"):
            (z + x).sum().backward()
    with torch.no_grad():
        assert not function(x, gamma, *rest)[0].requires_grad
    assert function(x.detach().T.contiguous().T, gamma.detach(), *rest)[0].shape == (3, 8)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_an_activation_of_nothing_is_not_computed(load, shape):
    kernel = load("activation")
    for function, width in ((kernel.silu, 1), (kernel.silu_and_mul, 2)):
        x, out = torch.randn(shape[0], width * shape[1]).requires_grad_(), torch.empty(shape)
        assert function(out, x) is out
        assert compiled(lambda x: function(torch.empty(shape), x))(x).shape == shape  # noqa: B023
    with pytest.raises((AssertionError, ZeroDivisionError)):
        kernel.silu.__wrapped__(torch.empty(shape), torch.empty(shape))


def test_a_layer_norm_takes_memory_that_starts_anywhere(load):
    function = load("layer_norm").dropout_add_ln_fwd
    x, gamma, beta = unaligned(3, 8), torch.randn(16)[1::2], unaligned(8)
    rest = (None, None, None, None, 0.0, 1e-5, 1.0, 0, None, False, False)
    for call in (function, compiled(function)):
        torch.testing.assert_close(call(x, gamma, beta, *rest)[0], torch.nn.functional.layer_norm(x, (8,), gamma, beta))
    with pytest.raises(AssertionError, match="misaligned"):
        function.__wrapped__(x, gamma.contiguous(), beta, *rest)


def test_what_starts_at_a_whole_place_is_not_copied():
    calls = []
    guarded = Guarded(lambda *args, **named: calls.append((args, named)), ["aligned-memory"])
    whole, part = torch.ones(8), torch.ones(9)[1:]
    guarded(whole, part, 2, named=part, other=whole)
    (first, second, number), named = calls[0]
    assert (first is whole, number, named["other"] is whole) == (True, 2, True)
    assert (second.data_ptr() % 16, named["named"].data_ptr() % 16) == (0, 0)
    assert second.tolist() == part.tolist()


# --- ReLU -----------------------------------------------------------------------------------------------------------


def unaligned(*shape: int) -> Tensor:
    found = torch.randn(torch.Size(shape).numel() + 1)[1:].view(shape)
    assert not found.numel() or found.data_ptr() % 16 == 4
    return found


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(lambda: torch.randn(3, 5), id="whole"),
        pytest.param(lambda: unaligned(3, 5), id="unaligned"),
        pytest.param(lambda: torch.randn(3, 10)[:, ::2], id="strided"),
        pytest.param(lambda: torch.randn(5, 3).T, id="transposed"),
        pytest.param(lambda: torch.randn(3, 0), id="empty"),
    ],
)
def test_relu_takes_memory_of_every_kind(load, x):
    function, x = load("relu").relu, x()
    want = torch.where(x > 0, x, 0)
    torch.testing.assert_close(function(x), want)
    for out in (torch.full_like(x, NAN), torch.full((*x.shape, 2), NAN)[..., 0], unaligned(*x.shape)):
        assert function(x, out=out) is out
        torch.testing.assert_close(out, want)
    own = x.clone() if x.is_contiguous() else x
    assert function(own, own) is own
    torch.testing.assert_close(own, want)


def test_relu_without_its_guard_is_wrong_or_ends_the_process(load):
    bare = load("relu").relu.__wrapped__
    with pytest.raises(AssertionError, match="the process ended"):
        bare(unaligned(4))
    strided = torch.tensor([1.0, NAN, 2.0, NAN])[::2]
    assert not torch.equal(bare(strided), strided)


def test_what_relu_can_take_is_not_copied():
    calls = []
    guarded = Guarded(lambda *args: calls.append(args), ["aligned"])
    x, out = torch.ones(4), torch.ones(4)
    guarded(x, out)
    assert calls[0][0] is x
    assert calls[0][1] is out


def test_backward_of_relu_raises(load):
    x = leaf(4)
    with pytest.raises(NotImplementedError, match="has no gradient"):
        load("relu").relu(x).sum().backward()


# --- deformable attention -------------------------------------------------------------------------------------------


def maps(batch: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(batch, 6, 2, 4),
        torch.tensor([[2, 3]]),
        torch.tensor([0]),
        torch.rand(batch, 5, 2, 1, 3, 2),
        torch.rand(batch, 5, 2, 1, 3),
    )


@pytest.mark.parametrize("keyword", [False, True])
def test_deformable_attention_without_a_batch_is_empty(load, keyword):
    kernel, given = load("deformable_detr"), maps(0)
    grad = torch.randn(0, 5, 8)

    rest, named = ((), {"im2col_step": 64}) if keyword else ((64,), {})

    def forward(*x):
        return kernel.ms_deform_attn_forward(*x, *rest, **named)

    for call in (forward, compiled(forward)):
        assert call(*given).shape == (0, 5, 8)
    found = kernel.ms_deform_attn_backward(*given, grad, *rest, **named)
    assert [x.shape for x in found] == [given[0].shape, given[3].shape, given[4].shape]
    with pytest.raises(ZeroDivisionError):
        kernel.ms_deform_attn_forward.__wrapped__(*given, 64)
    with pytest.raises(ZeroDivisionError):
        kernel.ms_deform_attn_backward.__wrapped__(*given, grad, 64)


def test_a_step_of_no_batch_is_refused(load):
    kernel = load("deformable_detr")
    with pytest.raises(ValueError, match="im2col_step: expected 1 or more, got 0"):
        kernel.ms_deform_attn_forward(*maps(2), 0)
    with pytest.raises(ValueError, match="im2col_step: expected 1 or more, got -1"):
        kernel.ms_deform_attn_backward(*maps(2), torch.randn(2, 5, 8), im2col_step=-1)


def test_a_batch_is_passed_on(load):
    kernel, given = load("deformable_detr"), maps(2)
    assert kernel.ms_deform_attn_forward(*given, 1).all()
    assert all(x.all() for x in kernel.ms_deform_attn_backward(*given, torch.randn(2, 5, 8), 2))


def test_deformable_attention_of_nothing_is_zeros(load):
    kernel = load("deformable_detr")
    value, shapes, starts, loc, weight = maps(2)
    without = value, shapes, starts, loc[:, :0], weight[:, :0]
    assert kernel.ms_deform_attn_forward(*without, 2).shape == (2, 0, 8)
    found = kernel.ms_deform_attn_backward(*without, torch.randn(2, 0, 8), 2)
    assert [x.shape for x in found] == [value.shape, loc[:, :0].shape, weight[:, :0].shape]
    assert not found[0].any()
    assert not kernel.ms_deform_attn_forward(value, shapes, starts, loc[..., :0, :], weight[..., :0], 2).any()
    with pytest.raises(AssertionError, match="printed"):
        kernel.ms_deform_attn_forward.__wrapped__(*without, 2)


@pytest.mark.parametrize(
    ("change", "name"), [({"S": 2**27}, "value"), ({"P": 2**28}, "sampling_loc"), ({"Q": 2**27}, "")]
)
def test_more_elements_than_an_int_counts_are_refused(load, change, name):
    kernel = load("deformable_detr")
    sizes = {"S": 6, "Q": 5, "P": 3} | change
    given = (
        torch.empty(2, sizes["S"], 2, 4, device="meta"),
        torch.tensor([[2, 3]]),
        torch.tensor([0]),
        torch.empty(2, sizes["Q"], 2, 1, sizes["P"], 2, device="meta"),
        torch.empty(2, sizes["Q"], 2, 1, sizes["P"], device="meta"),
    )
    with pytest.raises(ValueError, match=rf"{name or 'sampling_loc|the output'}: expected fewer than 2 \*\* 31"):
        kernel.ms_deform_attn_forward(*given, 1)
    with pytest.raises(ValueError, match=r"2 \*\* 31 elements"):
        kernel.ms_deform_attn_backward(*given, torch.empty(2, sizes["Q"], 8, device="meta"), 1)


# --- attention to blocks --------------------------------------------------------------------------------------------


def caches(blocks: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = 16 // dtype.itemsize
    return torch.zeros(blocks, 2, 32 // x, 8, x, dtype=dtype), torch.zeros(blocks, 2, 32, 8, dtype=dtype)


def of_blocks(query: Tensor, *, parts: bool, longest: int = 9, kind: str = "auto", **given: Tensor):
    """Arguments of attention to blocks, by position, with `out` first."""
    scratch = [torch.zeros(*query.shape[:2], 1) for _ in range(2)] + [query.new_zeros(*query.shape[:2], 1, 32)]
    found = dict(zip(("key_cache", "value_cache"), caches(), strict=True)) | given
    batch = query.shape[0]
    tables, counts = torch.zeros(batch, 2, dtype=torch.int32), torch.full((batch,), longest, dtype=torch.int32)
    rest = (2, 0.1, tables, counts, 8, longest, None, kind, torch.ones(()), torch.ones(()))
    out = torch.full(query.shape, NAN, dtype=query.dtype)
    return [out, *(scratch if parts else ()), query, found["key_cache"], found["value_cache"], *rest]


NAMES = {
    parts: tuple(
        name
        for name in inspect.signature(getattr(paged_attention, protocol).__call__).parameters
        if name != "self" and not name.startswith(("tp_", "blocksparse_"))
    )
    for parts, protocol in ((False, "PagedAttentionV1"), (True, "PagedAttentionV2"))
}


def sliced_query(dtype: torch.dtype = torch.float32) -> Tensor:
    """(3, 2, 32) behind one number in each row."""
    return torch.randn(3, 65).to(dtype)[:, 1:].view(3, 2, 32)


@pytest.mark.parametrize("by", ["position", "keyword", "both"])
@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize(
    "query",
    [
        pytest.param(lambda: torch.randn(3, 2, 32), id="whole"),
        pytest.param(sliced_query, id="sliced"),
        pytest.param(lambda: torch.randn(3, 4, 32)[:, ::2], id="heads apart"),
        pytest.param(lambda: torch.randn(3, 64)[:, :64].view(3, 2, 32)[:, :, :], id="view"),
        pytest.param(lambda: torch.randn(2, 3, 32).transpose(0, 1), id="transposed"),
    ],
)
def test_attention_to_blocks_takes_a_query_of_any_memory(load, query, parts, by):
    kernel, query = load("paged_attention"), query()
    function = kernel.paged_attention_v2 if parts else kernel.paged_attention_v1
    args = of_blocks(query, parts=parts)
    split = {"position": len(args), "keyword": 0, "both": 5 if parts else 2}[by]
    named = dict(zip(NAMES[parts][split:], args[split:], strict=True))
    for call in (function, compiled(function)):
        args[0].fill_(NAN)
        assert call(*args[:split], **named) is None
        torch.testing.assert_close(args[0], query)


def test_without_its_guards_attention_to_blocks_is_wrong(load):
    kernel = load("paged_attention")
    with pytest.raises(AssertionError, match="misaligned"):
        kernel.paged_attention_v1.__wrapped__(*of_blocks(sliced_query(), parts=False))
    with pytest.raises(AssertionError, match="a launch of nothing"):
        kernel.paged_attention_v2.__wrapped__(*of_blocks(torch.randn(2, 2, 32), parts=True, longest=0))
    args = of_blocks(torch.randn(2, 2, 32), parts=False, longest=999)
    kernel.paged_attention_v1.__wrapped__(*args)
    assert args[0].isnan().all()


def test_a_query_that_can_be_loaded_is_not_copied():
    calls = []
    guarded = Guarded(lambda *args: calls.append(args), ["whole-query", "nothing-written"])
    query = torch.randn(3, 4, 32)[:, :2]
    guarded(*of_blocks(query, parts=False))
    assert calls[0][1] is query


@pytest.mark.parametrize("parts", [False, True])
def test_caches_that_a_build_reads_wrongly_are_refused(load, parts):
    kernel = load("paged_attention")
    function = kernel.paged_attention_v2 if parts else kernel.paged_attention_v1
    query = torch.randn(3, 2, 32)
    apart = torch.zeros(6, 2, 32, 8)[::2]
    off = torch.zeros(3 * 2 * 32 * 8 + 1)[1:].view(3, 2, 32, 8)
    for values in (apart, off):
        with pytest.raises(ValueError, match="key_cache and value_cache: expected contiguous"):
            function(*of_blocks(query, parts=parts, value_cache=values))
    codes = dict(zip(("key_cache", "value_cache"), caches(dtype=torch.uint8), strict=True))
    with pytest.raises(TypeError, match="with an FP8 cache, got float32"):
        function(*of_blocks(query, parts=parts, kind="fp8", **codes))
    args = of_blocks(query.bfloat16(), parts=parts, kind="fp8", **codes)
    function(*args)
    assert torch.equal(args[0], query.bfloat16())


def test_scores_that_shared_memory_does_not_hold_are_refused(load, monkeypatch):
    from kernel_loader.guards import paged_attention as guards

    function = load("paged_attention").paged_attention_v1
    monkeypatch.setattr(guards, "_shared_memory", lambda device: 1000)
    query = torch.randn(3, 2, 32)
    most = (1000 - 32 - 128) // 4 // 8 * 8
    args = of_blocks(query, parts=False, longest=most)
    function(*args)
    assert torch.equal(args[0], query)
    with pytest.raises(ValueError, match=f"max_seq_len: {most + 1} scores need more .* call paged_attention_v2"):
        function(*of_blocks(query, parts=False, longest=most + 1))
    monkeypatch.undo()
    assert guards._shared_memory(torch.device("cpu")) is None


@pytest.mark.parametrize("parts", [False, True])
def test_attention_to_blocks_of_no_sequence_and_of_no_key(load, parts):
    kernel = load("paged_attention")
    function = kernel.paged_attention_v2 if parts else kernel.paged_attention_v1
    none = torch.randn(0, 2, 32)
    for call in (function, compiled(function)):
        assert call(*of_blocks(none, parts=parts)) is None
    if parts:
        args = of_blocks(torch.randn(3, 2, 32), parts=True, longest=0)
        for call in (function, compiled(function)):
            args[0].fill_(NAN)
            assert call(*args) is None
            assert not args[0].any()


def test_nothing_is_written_where_there_is_nothing_to_write(load):
    kernel = load("paged_attention")
    slots, ones = torch.zeros(0, dtype=torch.int64), torch.ones(())
    none, some = torch.randn(0, 2, 32), torch.randn(3, 2, 32)
    for function in (kernel.reshape_and_cache, kernel.reshape_and_cache_flash):
        for key, at in ((none, slots), (some, slots), (none, torch.tensor([1, 2]))):
            own = caches()
            assert function(key, key, *own, at, "auto", ones, ones) is None
            assert not own[0].any()
            assert (
                function(
                    key=key,
                    value=key,
                    key_cache=own[0],
                    value_cache=own[1],
                    slot_mapping=at,
                    kv_cache_dtype="auto",
                    k_scale=ones,
                    v_scale=ones,
                )
                is None
            )
        own = caches()
        function(some, some, *own, torch.tensor([1]), "auto", ones, ones)
        assert own[0].all()
        with pytest.raises(AssertionError, match="a launch of nothing"):
            function.__wrapped__(some, some, *own, slots, "auto", ones, ones)
    keys, values = caches()
    assert kernel.copy_blocks([keys], [values], torch.zeros(0, 2, dtype=torch.int64)) is None
    assert not keys.any()
    kernel.copy_blocks([keys], [values], torch.zeros(1, 2, dtype=torch.int64))
    assert keys.all()
    codes = torch.zeros(0, 2, dtype=torch.uint8)
    for call in (kernel.convert_fp8, compiled(kernel.convert_fp8)):
        assert call(codes, torch.zeros(0, 2)) is None
        assert call(output=codes, input=torch.zeros(0, 2), scale=2.0) is None
    codes = torch.zeros(1, 2, dtype=torch.uint8)
    kernel.convert_fp8(codes, torch.zeros(1, 2))
    assert codes.all()


# --- causal convolution ---------------------------------------------------------------------------------------------


def row_views(kind: str, batch: int, channels: int, length: int) -> Tensor:
    """(B, D, L) of bfloat16, in memory as told."""
    if kind == "rows":
        return torch.randn(batch, channels, length).bfloat16()
    if kind == "sliced":
        return torch.randn(batch, channels, length + 3).bfloat16()[:, :, 1:-2]
    if kind == "off":
        return torch.randn(batch * channels * length + 1).bfloat16()[1:].view(batch, channels, length)
    if kind == "channels":
        return torch.randn(batch, length, channels).bfloat16().transpose(1, 2)
    if kind == "sliced channels":
        return torch.randn(batch, length, channels + 3).bfloat16()[:, :, 1:-2].transpose(1, 2)
    assert kind == "expanded"
    return torch.randn(1, 1, 1).bfloat16().expand(batch, channels, length)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
    past = x.new_zeros(*x.shape[:2], weight.shape[1] - 1) if past is None else past
    inputs = torch.cat((past, x), -1)
    return torch.nn.functional.conv1d(inputs, weight[:, None], bias, groups=x.shape[1]), inputs[..., x.shape[2] :]


ROWS = ["rows", "sliced", "off", "channels", "sliced channels"]


@pytest.mark.parametrize("length", [1, 8, 13])
@pytest.mark.parametrize("above", [*ROWS, "expanded"])
@pytest.mark.parametrize("layout", ROWS)
def test_a_convolution_takes_rows_and_gradients_of_any_memory(load, layout, above, length):
    function = load("causal_conv1d").causal_conv1d_fn
    x = row_views(layout, 2, 8, length).requires_grad_()
    weight, bias = leaf(8, 4, dtype=torch.bfloat16), leaf(8, dtype=torch.bfloat16)
    upstream = row_views(above, 2, 8, length)
    want, _ = convolved(x, weight, bias)
    got = function(x, weight, bias)
    torch.testing.assert_close(got, want)
    found = torch.autograd.grad(got, (x, weight, bias), upstream)
    torch.testing.assert_close(found, torch.autograd.grad(want, (x, weight, bias), upstream), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("kind", ["channels", "sliced channels"])
def test_states_of_a_convolution_may_lie_anywhere(load, kind, width):
    function = load("causal_conv1d").causal_conv1d_fn
    x, past, into = (row_views(kind, 2, 8, n) for n in (5, width - 1, width - 1))
    weight, bias = leaf(8, width, dtype=torch.bfloat16), leaf(8, dtype=torch.bfloat16)
    x.requires_grad_()
    past.requires_grad_()
    want = convolved(x, weight, bias, past)
    upstream = [row_views("sliced", *y.shape) for y in want]
    grads = torch.autograd.grad(want, (x, weight, bias, past), upstream)
    for own in (None, into):
        got = function(x, weight, bias, None, past, True, own)
        torch.testing.assert_close(got, want)
        found = torch.autograd.grad(got, (x, weight, bias, past), upstream)
        torch.testing.assert_close(found, grads, rtol=2e-2, atol=2e-2)
    assert got[1].data_ptr() == into.data_ptr()
    torch.testing.assert_close(into, want[1])


def test_without_its_guard_a_convolution_fails(load):
    bare = load("causal_conv1d").causal_conv1d_fn.__wrapped__
    weight, bias = leaf(8, 4, dtype=torch.bfloat16), leaf(8, dtype=torch.bfloat16)
    for layout, length in (("sliced", 8), ("off", 8), ("sliced channels", 5)):
        with pytest.raises((AssertionError, RuntimeError), match="misaligned|multiples of 8"):
            bare(row_views(layout, 2, 8, length), weight, bias)
    y = bare(row_views("rows", 2, 8, 8), weight, bias)
    with pytest.raises(AssertionError, match="misaligned"):
        y.backward(row_views("sliced", 2, 8, 8))


def test_rows_that_can_be_loaded_are_not_copied():
    calls = []

    def function(x, *rest):
        calls.append((x, *rest))
        return x.detach()

    guarded = Guarded(function, ["aligned-rows"])
    for x in (row_views("rows", 2, 8, 8), row_views("sliced", 2, 8, 7), row_views("channels", 2, 8, 3)):
        guarded(x, "weight", activation="silu")
        assert calls[-1][0] is x
        assert calls[-1][1:] == ("weight", None, None, None, False, None, "silu")


def test_what_a_convolution_returns_may_be_changed_in_place(load):
    x = row_views("rows", 2, 8, 8).requires_grad_()
    y = load("causal_conv1d").causal_conv1d_fn(x, torch.randn(8, 4).bfloat16(), torch.randn(8).bfloat16())
    y.mul_(2).sum().backward()
    assert x.grad is not None


class ShortEnds(torch.autograd.Function):
    """silu of a causal convolution whose backward takes zeros for what is before the last stretch, if that is short."""

    @staticmethod
    def convolve(x, weight):
        padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
        return torch.nn.functional.conv1d(padded, weight[:, None], groups=len(weight))

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.silu(ShortEnds.convolve(x, weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        sums, over = ShortEnds.convolve(x, weight), x.shape[2] % 512
        if 0 < over < 4:
            sums[..., -over:] = ShortEnds.convolve(x[..., -over:], weight)
        with torch.enable_grad():
            sums = sums.detach().requires_grad_()
            (grad,) = torch.autograd.grad(torch.nn.functional.silu(sums), sums, grad)
            given = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
            return torch.autograd.grad(ShortEnds.convolve(*given), given, grad)


def short_ends(x, weight, bias=None, seq_idx=None, states=None, final=False, out=None, activation=None):
    return ShortEnds.apply(x, weight)


@pytest.mark.parametrize("length", [511, 512, 513, 515, 516, 1025])
def test_gradients_are_right_at_the_end_of_a_sequence_of_any_length(length):
    x, weight = leaf(2, 3, length), leaf(3, 4)
    upstream = torch.randn(2, 3, length)
    want = torch.nn.functional.silu(ShortEnds.convolve(x, weight))
    grads = torch.autograd.grad(want, (x, weight), upstream)
    got = Guarded(short_ends, ["whole-ends"])(x, weight, activation="silu")
    torch.testing.assert_close(got, want)
    assert got.is_contiguous()
    torch.testing.assert_close(torch.autograd.grad(got, (x, weight), upstream), grads, rtol=1e-4, atol=1e-4)
    bare = torch.autograd.grad(short_ends(x, weight), (x, weight), upstream)
    assert torch.allclose(bare[0], grads[0], rtol=1e-4, atol=1e-4) == (length % 512 not in (1, 3))


def noting(calls):
    def function(x, *rest, **named):
        calls.append(x)
        return x.detach()

    return function


def test_a_convolution_that_is_short_nowhere_or_learns_nothing_is_left_alone():
    seen = []
    guarded = Guarded(noting(seen), ["whole-ends"])
    x, weight = torch.ones(2, 3, 513), torch.ones(3, 4)
    guarded(x, weight, activation="silu")
    guarded(x.requires_grad_(), weight)
    guarded(x[..., :512], weight, activation="silu")
    guarded(x[..., :2], weight, activation="silu")
    assert [given.shape[2] for given in seen] == [513, 513, 512, 2]


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 3, 0)])
def test_a_convolution_of_nothing_is_empty_and_has_gradients_of_zeros(shape):
    seen = []
    guarded = Guarded(noting(seen), ["no-rows"])
    x, weight, bias = leaf(*shape), leaf(3, 4), leaf(3)
    y = guarded(x, weight, bias=bias)
    assert y.shape == shape
    assert y.grad_fn is not None
    for given, found in zip(
        (x, weight, bias), torch.autograd.grad(y, (x, weight, bias), torch.ones(shape)), strict=True
    ):
        assert torch.equal(found, torch.zeros_like(given))
    guarded(x, weight, bias, None, None, True)
    guarded(leaf(1, 3, 5), weight)
    assert len(seen) == 2


def test_a_step_of_nothing_may_have_tensors_in_any_place():
    seen = []
    step = Guarded(noting(seen), ["no-rows"])
    x, state, weight = torch.ones(0, 3), torch.ones(0, 3, 4), torch.ones(3, 4)
    y = step(x, state, weight, None, "silu", torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    assert y.shape == (0, 3)
    assert seen == []
