"""The gated-delta-rule reference against its recurrence as matrices, one head and position at a time, in float64."""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_loader.bundles.gated_delta_rule import (
    ChunkGatedDeltaRule,
    FusedRecurrentGatedDeltaRule,
    GatedDeltaRule,
)
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

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 6


@pytest.fixture
def rule(cpu_machine, monkeypatch):
    return load_reference("gated_delta_rule", monkeypatch)


# ---------------------------------------------------------------------------------------------------------- formula


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    scale: float = K**-0.5,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, HV, V) and states (B, HV, K, V). beta is (B, T, HV), or (B, T, HV, V)."""
    q, k, v, g, beta = (x.to(F64) for x in (q, k, v, g, beta))
    outputs, states = torch.zeros_like(v), []
    for b, h in torch.cartesian_prod(torch.arange(v.shape[0]), torch.arange(v.shape[2])).tolist():
        at = h // (v.shape[2] // q.shape[2])
        S = torch.zeros(q.shape[3], v.shape[3], dtype=F64) if state is None else state[b, h].to(F64)
        for t in range(v.shape[1]):
            S = g[b, t, h].exp() * S
            S = S if rows is None else torch.diag(rows[b, t, h].exp()) @ S
            S = S if columns is None else S @ torch.diag(columns[b, t, h].exp())
            key, rate = k[b, t, at], beta[b, t, h].expand(v.shape[3])
            # (I - k k^T) S for a rate of one, as in equation (10).
            S = S - torch.outer(key, key) @ S @ torch.diag(rate) + torch.outer(key, rate * v[b, t, h])
            outputs[b, t, h] = scale * S.T @ q[b, t, at]
        states.append(S)
    shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return outputs, torch.stack(states).reshape(shape) if states else v.new_zeros(shape)


def drawn(batch: int = B, length: int = T, dtype: torch.dtype = F64) -> list[Tensor]:
    """[q, k, v, g, beta]."""
    wide = F64 if dtype == F64 else F32
    return [
        random(batch, length, H, K, dtype=dtype),
        random(batch, length, H, K, dtype=dtype, seed=1, scale=0.5),
        random(batch, length, HV, V, dtype=dtype, seed=2),
        -random(batch, length, HV, dtype=wide, seed=3).abs(),
        random(batch, length, HV, dtype=wide, seed=4).sigmoid(),
    ]


STATE = random(B, HV, K, V, seed=5)
BOTH = pytest.mark.parametrize("name", ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"])


def call(rule: Any, name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **rest: Any) -> Any:
    return getattr(rule, name)(q, k, v, g=g, beta=beta, **rest)


# ---------------------------------------------------------------------------------------------------------- loading


def parameters(function: Any) -> str:
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found)


# Parameters of kernels-community/fla, version 1, with their defaults; the last four of the first are among its kwargs.
CHUNK = (
    "q k v g beta scale=None initial_state=None output_final_state=False use_qk_l2norm_in_kernel=False"
    " use_beta_sigmoid_in_kernel=False allow_neg_eigval=False state_v_first=False cu_seqlens=None cu_seqlens_cpu=None"
    " cp_context=None chunk_size=64 use_gate_in_kernel=False A_log=None dt_bias=None"
)
RECURRENT = (
    "q k v g=None gk=None gv=None beta=None scale=None initial_state=None output_final_state=False"
    " use_qk_l2norm_in_kernel=False use_gate_in_kernel=False A_log=None dt_bias=None use_beta_sigmoid_in_kernel=False"
    " allow_neg_eigval=False state_v_first=False cu_seqlens=None"
)


def test_the_kernel_loads_as_its_reference_with_the_published_parameters(rule):
    assert is_shipped_reference(rule, "gated-delta-rule")
    assert isinstance(rule, GatedDeltaRule)
    assert parameters(rule.chunk_gated_delta_rule) == parameters(ChunkGatedDeltaRule.__call__) == CHUNK
    recurrent = parameters(rule.fused_recurrent_gated_delta_rule)
    assert recurrent == parameters(FusedRecurrentGatedDeltaRule.__call__) == RECURRENT


# ------------------------------------------------------------------------------------------------------------ values


@BOTH
@pytest.mark.parametrize("length", [0, 1, 5])
@pytest.mark.parametrize("initial", [False, True])
def test_a_step_replaces_what_the_state_says_of_the_key(rule, name, length, initial):
    given, state = drawn(length=length), STATE if initial else None
    kept = STATE.clone()
    outputs, states = call(rule, name, *given, initial_state=state, output_final_state=True)
    for got, want in zip((outputs, states), expected(*given, state=state), strict=True):
        assert_near(got, want, ulps=64, atol=1e-13)
    assert torch.equal(STATE, kept)
    assert call(rule, name, *given)[1] is None


@BOTH
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_it_is_computed_in_float32_and_rounded_once(rule, name, dtype):
    given = drawn(dtype=dtype)
    outputs, states = call(rule, name, *given, initial_state=STATE.to(dtype), output_final_state=True)
    right, right_states = expected(*given, state=STATE.to(dtype))
    assert outputs.dtype == dtype
    assert states.dtype == F32
    assert_near(outputs, right, ulps=1, atol=5e-6)
    assert_near(states, right_states, ulps=64, atol=5e-6)


@BOTH
def test_flags_change_what_comes_in(rule, name):
    q, k, v, g, beta = drawn()
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    a_log, bias, raw = random(HV, seed=6), random(HV, seed=7), random(B, T, HV, seed=8)
    decay = -a_log.exp() * torch.log(1 + torch.exp(raw + bias))
    plain = -a_log.exp() * torch.log(1 + torch.exp(raw))
    gate = {"use_gate_in_kernel": True, "A_log": a_log}
    for flags, given, changed in (
        ({"scale": 0.7}, (q, k, v, g, beta), {"scale": 0.7}),
        ({"use_qk_l2norm_in_kernel": True}, (q, k, v, g, beta), {0: unit[0], 1: unit[1]}),
        (gate, (q, k, v, raw, beta), {3: plain}),
        (gate | {"dt_bias": bias}, (q, k, v, raw, beta), {3: decay}),
        ({"use_beta_sigmoid_in_kernel": True}, (q, k, v, g, raw), {4: raw.sigmoid()}),
        (
            {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
            (q, k, v, g, raw),
            {4: 2 * raw.sigmoid()},
        ),
    ):
        right = [changed.get(i, value) for i, value in enumerate(given)]
        outputs, _ = call(rule, name, *given, **flags)
        want, _ = expected(*right, scale=changed.get("scale", K**-0.5))
        assert_near(outputs, want, ulps=64, atol=1e-13)


@BOTH
def test_columns_of_states_may_come_first(rule, name):
    given = drawn()
    outputs, states = call(rule, name, *given, initial_state=STATE, output_final_state=True)
    turned = STATE.mT.contiguous()
    again, others = call(rule, name, *given, initial_state=turned, output_final_state=True, state_v_first=True)
    assert torch.equal(again, outputs)
    assert torch.equal(others, states.mT)
    assert others.is_contiguous()


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sequences_of_a_row_do_not_see_each_other(rule, name, dtype):
    given, bounds, state = drawn(1, 9), [0, 4, 4, 5, 9], random(4, HV, K, V, seed=5)
    outputs, states = call(
        rule, name, *given, cu_seqlens=torch.tensor(bounds, dtype=dtype), initial_state=state, output_final_state=True
    )
    for n, (start, end) in enumerate(pairwise(bounds)):
        want, last = expected(*(x[:, start:end] for x in given), state=state[n : n + 1])
        assert_near(outputs[:, start:end], want, ulps=64, atol=1e-13)
        assert_near(states[n : n + 1], last, ulps=64, atol=1e-13)


def test_rows_and_columns_may_decay_by_themselves(rule):
    q, k, v, g, beta = drawn()
    rows, columns = -random(B, T, HV, K, seed=6).abs(), -random(B, T, HV, V, seed=7).abs()
    none = torch.zeros_like(g)
    recurrent = rule.fused_recurrent_gated_delta_rule
    for given, right in (
        ({"g": g, "gk": rows, "gv": columns}, {"g": g, "rows": rows, "columns": columns}),
        ({"gk": rows}, {"g": none, "rows": rows}),
        ({"gv": columns}, {"g": none, "columns": columns}),
        ({}, {"g": none}),
    ):
        outputs, _ = recurrent(q, k, v, beta=beta, **given)
        assert_near(outputs, expected(q, k, v, beta=beta, **right)[0], ulps=64, atol=1e-13)


def test_rates_may_differ_by_column_or_be_left_out(rule):
    q, k, v, g, _ = drawn()
    rates = random(B, T, HV, V, seed=6).sigmoid()
    outputs, _ = rule.fused_recurrent_gated_delta_rule(q, k, v, g, beta=rates)
    assert_near(outputs, expected(q, k, v, g, rates)[0], ulps=64, atol=1e-13)
    outputs, _ = rule.fused_recurrent_gated_delta_rule(q, k, v, g)
    assert_near(outputs, expected(q, k, v, g, torch.ones_like(g))[0], ulps=64, atol=1e-13)


# --------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("packed", [False, True])
def test_everything_has_a_gradient(rule, packed):
    sizes = [(1, 3, 1, 2), (1, 3, 1, 2), (1, 3, 2, 2), (1, 3, 2), (1, 3, 2), (2 if packed else 1, 2, 2, 2), (2,), (2,)]
    leaves = [random(*size, seed=i, scale=0.7).requires_grad_() for i, size in enumerate(sizes)]
    bounds = torch.tensor([0, 1, 3]) if packed else None

    def run(*leaves: Tensor) -> Any:
        return rule.chunk_gated_delta_rule(
            *leaves[:5],
            initial_state=leaves[5],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
            cu_seqlens=bounds,
            use_gate_in_kernel=True,
            A_log=leaves[6],
            dt_bias=leaves[7],
        )

    assert torch.autograd.gradcheck(run, leaves)


def test_decays_of_rows_and_columns_have_a_gradient(rule):
    sizes = [(1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 3), (1, 2, 1), (1, 2, 1, 2), (1, 2, 1, 3), (1, 2, 1, 3)]
    leaves = [random(*size, seed=i, scale=0.7).requires_grad_() for i, size in enumerate(sizes)]
    assert torch.autograd.gradcheck(lambda *leaves: rule.fused_recurrent_gated_delta_rule(*leaves)[0], leaves)


@pytest.mark.parametrize("length", [63, 65, 129])
def test_gradients_go_through_all_stretches(rule, length):
    sizes = [(1, length, 1, 1), (1, length, 1, 1), (1, length, 1, 1), (1, length, 1), (1, length, 1)]
    leaves = [random(*size, seed=i, scale=0.5) for i, size in enumerate(sizes)]
    leaves[3] = -leaves[3].abs()
    leaves = [leaf.requires_grad_() for leaf in leaves]
    upstream = random(1, length, 1, 1, seed=9)
    got = torch.autograd.grad(rule.chunk_gated_delta_rule(*leaves)[0], leaves, upstream)
    want = torch.autograd.grad(expected(*leaves, scale=1.0)[0], leaves, upstream)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other, ulps=256, atol=1e-12)


def test_both_compile_into_one_graph(rule):
    bounds = torch.tensor([0, 2, 5])

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        q, k, v, g, beta, state = leaves
        outputs, last = rule.chunk_gated_delta_rule(
            q * 2, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=bounds
        )
        return outputs, last, rule.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0]

    results = []
    for function in (run, compiled(run)):
        leaves = [leaf.clone().requires_grad_() for leaf in (*drawn(1), STATE)]
        found = function(*leaves)
        gradients = torch.autograd.grad(sum(part.square().sum() for part in found), leaves)
        results.append([*(part.detach() for part in found), *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------------------------- errors

GOOD = dict(zip(("q", "k", "v", "g", "beta"), drawn(dtype=F32), strict=True))
ONE = torch.ones
PACKED = {name: value[:1] for name, value in GOOD.items()}


@BOTH
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": ONE(2, 5, 2)}, ValueError, r"^q: .*\(B, T, H, K\).*\(2, 5, 2\)"),
        ({"q": ONE(2, 5, 2, 3).int()}, TypeError, "^q: .*int32"),
        ({"k": ONE(2, 5, 2, 4)}, ValueError, r"^k: .*\(2, 5, 2, 3\).*\(2, 5, 2, 4\)"),
        ({"k": ONE(2, 5, 2, 3).half()}, TypeError, "^k: .*float32.*float16"),
        ({"v": ONE(2, 5, 3, 6)}, ValueError, r"^v: .*H = 2.*\(2, 5, 3, 6\)"),
        ({"v": ONE(2, 4, 4, 6)}, ValueError, r"^v: .*\(2, 5, 4, 6\).*\(2, 4, 4, 6\)"),
        ({"g": ONE(2, 5, 2)}, ValueError, r"^g: .*\(2, 5, 4\).*\(2, 5, 2\)"),
        ({"g": ONE(2, 5, 4, device="meta")}, ValueError, "^g: .*cpu.*meta"),
        ({"beta": ONE(2, 5, 4).int()}, TypeError, "^beta: .*int32"),
        ({"initial_state": ONE(2, 4, 6, 3)}, ValueError, r"^initial_state: .*\(2, 4, 3, 6\).*\(2, 4, 6, 3\)"),
        ({"allow_neg_eigval": True}, ValueError, "^allow_neg_eigval: .*use_beta_sigmoid_in_kernel"),
        ({"use_gate_in_kernel": True}, ValueError, "^A_log: .*None"),
        ({"use_gate_in_kernel": True, "A_log": ONE(2)}, ValueError, r"^A_log: .*\(4,\).*\(2,\)"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, r"^q: .*one row.*\(2, 5, 2, 3\)"),
        (PACKED | {"cu_seqlens": torch.tensor([0.0, 5.0])}, TypeError, "^cu_seqlens: .*int32.*float32"),
        (PACKED | {"cu_seqlens": torch.tensor([[0, 5]])}, ValueError, r"^cu_seqlens: .*\(N \+ 1,\).*\(1, 2\)"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 4])}, ValueError, r"^cu_seqlens: .*T = 5.*\[0, 4\]"),
        (PACKED | {"cu_seqlens": torch.tensor([0, 3, 2, 5])}, ValueError, r"^cu_seqlens: .*\[0, 3, 2, 5\]"),
    ],
)
def test_both_refuse(rule, name, change, error, message):
    with pytest.raises(error, match=message):
        call(rule, name, **(GOOD | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_size": 48}, "^chunk_size: .*16, 32 or 64.*48"),
        ({"cp_context": object()}, "^cp_context: .*None.*object"),
    ],
)
def test_the_chunked_form_refuses(rule, change, message):
    with pytest.raises(ValueError, match=message):
        rule.chunk_gated_delta_rule(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gk": ONE(2, 5, 4, 6)}, r"^gk: .*\(2, 5, 4, 3\).*\(2, 5, 4, 6\)"),
        ({"gv": ONE(2, 5, 4)}, r"^gv: .*\(2, 5, 4, 6\).*\(2, 5, 4\)"),
        ({"beta": ONE(2, 5, 4, 3)}, r"^beta: .*\(2, 5, 4, 6\).*\(2, 5, 4, 3\)"),
        ({"g": None, "use_gate_in_kernel": True, "A_log": ONE(4)}, "^g: .*use_gate_in_kernel"),
    ],
)
def test_the_recurrent_form_refuses(rule, change, message):
    with pytest.raises(ValueError, match=message):
        rule.fused_recurrent_gated_delta_rule(**(GOOD | change))


def test_keys_without_dims_say_nothing(rule):
    q, v, gate = torch.zeros(1, 3, 2, 0), torch.ones(1, 3, 2, 4), torch.zeros(1, 3, 2)
    out, states = rule.chunk_gated_delta_rule(q, q, v, gate, gate, output_final_state=True)
    assert torch.equal(out, torch.zeros_like(v))
    assert states.shape == (1, 2, 0, 4)
