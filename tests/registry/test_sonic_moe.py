"""The sonic-moe reference against a loop over rows in float64: one token, one expert, one vector at a time."""

import inspect
import math
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor

from kernel_loader.bundles.sonic_moe import GeneralRouting, SonicMoE, TopKRouting
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

TOKENS, HIDDEN, INNER, EXPERTS = 5, 6, 4, 3
NAN = math.nan


@pytest.fixture
def sonic(cpu_machine, monkeypatch):
    return load_reference("sonic_moe", monkeypatch)


# ---------------------------------------------------------------------------------------------------------- formula


def gelu_tanh(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(x / 2))


ACTS = {"swiglu": silu, "geglu": gelu_tanh}


def weights(dtype: torch.dtype = F64, *, bias: bool = True, experts: int = EXPERTS) -> list[Tensor | None]:
    """[w1, b1, w2, b2], with leaves of their own."""
    made = [
        random(2 * INNER, HIDDEN, experts, dtype=dtype, seed=10),
        random(experts, 2 * INNER, dtype=dtype, seed=11),
        random(HIDDEN, INNER, experts, dtype=dtype, seed=12),
        random(experts, HIDDEN, dtype=dtype, seed=13),
    ]
    return [part if bias or i % 2 == 0 else None for i, part in enumerate(made)]


def expert(x: Tensor, e: int, parts: list[Tensor | None], act: str, *, concat: bool) -> Tensor:
    """What one expert makes of one token, (H,) float64."""
    w1, b1, w2, b2 = (None if part is None else part.to(F64) for part in parts)
    hidden = []
    for i in range(INNER):
        g, u = (i, INNER + i) if concat else (2 * i, 2 * i + 1)
        gate, up = (w1[row, :, e] @ x + (0 if b1 is None else b1[e, row]) for row in (g, u))
        hidden.append(ACTS[act](gate) * up)
    return w2[:, :, e] @ torch.stack(hidden) + (0 if b2 is None else b2[e])


def total(
    x: Tensor,
    scores: Tensor,
    tokens: list[int],
    experts: list[int],
    parts: list[Tensor | None],
    act: str = "swiglu",
    *,
    concat: bool = False,
) -> Tensor:
    rows = [torch.zeros(HIDDEN, dtype=F64) for _ in range(x.shape[0])]
    for r, (t, e) in enumerate(zip(tokens, experts, strict=True)):
        if e < parts[2].shape[2]:
            rows[t] = rows[t] + scores[r].to(F64) * expert(x[t].to(F64), e, parts, act, concat=concat)
    return torch.stack(rows) if rows else x.to(F64)


TRIPLES = ([0, 0, 0, 1, 3, 3], [0, 2, 2, 1, 0, 1])
WITH_SENTINELS = ([0, 0, 1, 1, 2, 4], [0, 3, 1, 70000, 2, 3])


def call(
    sonic: Any,
    x: Tensor,
    scores: Tensor,
    triples: tuple[list[int], list[int]],
    parts: list[Tensor | None],
    act: Any = "swiglu",
    **rest: Any,
) -> tuple[Tensor, Tensor]:
    tokens, experts = (torch.tensor(ids, dtype=torch.int32) for ids in triples)
    return sonic.moe_general_routing_inputs(x, scores, tokens, experts, *parts, parts[2].shape[2], 0, act, **rest)


# ---------------------------------------------------------------------------------------------------------- loading


def test_the_kernel_loads_as_its_reference(sonic):
    assert is_shipped_reference(sonic, "sonic-moe")
    assert isinstance(sonic, SonicMoE)


def test_the_enum_is_that_of_published_builds(sonic):
    members = {member.name: member.value for member in sonic.ActivationType}
    values = ["swiglu", "geglu", "reglu", "relu_sq", "relu", "gelu", "silu"]
    assert members == {value.upper(): value for value in values}
    assert sonic.ActivationType("geglu") is sonic.ActivationType.GEGLU


# Parameters of kernels-community/sonic-moe, version 2, with their defaults.
GENERAL = (
    "x router_scores token_indices expert_indices w1 b1 w2 b2 E stream_id activation_type"
    " is_inference_mode_enabled=False concat_layout=False"
)
TOP_K = (
    "x router_w w1 b1 w2 b2 K stream_id activation_type=... is_inference_mode_enabled=False is_softmax_over_topk=True"
    " norm_topk_probs=False concat_layout=False"
)


def parameters(function: Any) -> str:
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    shown = {p.name: "..." if p.name == "activation_type" else p.default for p in found}
    return " ".join(p.name if p.default is p.empty else f"{p.name}={shown[p.name]}" for p in found)


def test_parameters_are_those_of_published_builds(sonic):
    assert parameters(sonic.moe_general_routing_inputs) == parameters(GeneralRouting.__call__) == GENERAL
    assert parameters(sonic.moe_TC_softmax_topk_layer) == parameters(TopKRouting.__call__) == TOP_K
    assert set(get_type_hints(SonicMoE)) >= {
        "moe_general_routing_inputs",
        "moe_TC_softmax_topk_layer",
        "ActivationType",
    }


# ------------------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize("act", ["swiglu", "geglu"])
@pytest.mark.parametrize("concat", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_each_token_gets_the_weighted_sum_of_its_rows(sonic, act, concat, bias):
    x, scores, parts = random(TOKENS, HIDDEN), random(6, seed=1), weights(bias=bias)
    output, frequency = call(sonic, x, scores, TRIPLES, parts, sonic.ActivationType(act), concat_layout=concat)
    assert_near(output, total(x, scores, *TRIPLES, parts, act, concat=concat), ulps=64, atol=1e-12)
    assert torch.equal(frequency, torch.tensor([2, 2, 2], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_it_is_computed_in_float32_and_rounded_once(sonic, dtype):
    x, scores, parts = random(TOKENS, HIDDEN, dtype=dtype), random(6, dtype=F32, seed=1), weights(dtype)
    output, _ = call(sonic, x, scores, TRIPLES, parts)
    assert output.dtype == dtype
    assert_near(output, total(x, scores, *TRIPLES, parts), ulps=1, atol=2e-5)


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
def test_scores_of_any_dtype(sonic, dtype):
    x, scores, parts = random(TOKENS, HIDDEN, dtype=F32), random(6, dtype=dtype, seed=1), weights(F32)
    assert_near(call(sonic, x, scores, TRIPLES, parts)[0], total(x, scores, *TRIPLES, parts), ulps=64, atol=2e-5)


def test_sentinels_leave_no_trace(sonic):
    x, scores, parts = random(TOKENS, HIDDEN), random(6, seed=1), weights()
    scores[[1, 3, 5]] = NAN
    x[4] = NAN  # has no row but that of a sentinel
    leaves = [leaf.requires_grad_() for leaf in (x, scores, *parts)]
    output, frequency = call(sonic, x, scores, WITH_SENTINELS, parts)
    assert torch.equal(frequency, torch.tensor([1, 1, 1], dtype=torch.int32))
    assert output.isfinite().all()
    assert not output[3:].any()
    assert_near(output.detach(), total(x, scores, *WITH_SENTINELS, parts).detach(), ulps=64, atol=1e-12)
    upstream = torch.ones_like(output)
    upstream[3:] = NAN  # of tokens that no expert here has
    gradients = torch.autograd.grad(output, leaves, upstream)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert gradients[1].ne(0).tolist() == [True, False, True, False, True, False]
    assert not gradients[0][3:].any()


def test_sentinels_alone_give_zeros(sonic):
    x, scores, parts = random(TOKENS, HIDDEN), torch.full((2,), NAN, dtype=F64), weights()
    output, frequency = call(sonic, x, scores, ([0, 3], [3, 9]), parts)
    assert torch.equal(output, torch.zeros(TOKENS, HIDDEN, dtype=F64))
    assert not frequency.any()


def test_no_rows_and_no_tokens(sonic):
    parts = [part.requires_grad_() for part in weights()]
    none = ([], [])
    for count in (0, TOKENS):
        x = random(count, HIDDEN).requires_grad_()
        output, frequency = call(sonic, x, torch.empty(0, dtype=F64), none, parts)
        assert output.shape == (count, HIDDEN)
        assert not output.any()
        assert frequency.tolist() == [0] * EXPERTS
        assert not any(gradient.any() for gradient in torch.autograd.grad(output.sum(), [x, *parts]))


def test_experts_without_rows_are_not_read(sonic):
    parts = weights()
    for part in parts:
        (part.select(-1, 2) if part.ndim == 3 else part[2]).fill_(NAN)
    x, scores = random(TOKENS, HIDDEN), random(3, seed=1)
    leaves = [part.requires_grad_() for part in parts]
    output, _ = call(sonic, x, scores, ([0, 1, 2], [0, 1, 0]), parts)
    assert output.isfinite().all()
    for gradient in torch.autograd.grad(output.sum(), leaves):
        assert gradient.isfinite().all()
        assert not (gradient.select(-1, 2) if gradient.ndim == 3 else gradient[2]).any()


def test_weights_and_tokens_of_any_strides(sonic):
    x, scores, parts = random(TOKENS, HIDDEN), random(6, seed=1), weights()
    expected, _ = call(sonic, x, scores, TRIPLES, parts)
    laid_out = [p.permute(2, 0, 1).contiguous().permute(1, 2, 0) if p.ndim == 3 else p.T.contiguous().T for p in parts]
    assert not any(part.is_contiguous() for part in laid_out)
    output, _ = call(sonic, x.T.contiguous().T, scores, TRIPLES, laid_out)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected)


def test_activations_of_another_build_count_by_their_value(sonic):
    class Other:
        value = "geglu"

    x, scores, parts = random(TOKENS, HIDDEN), random(6, seed=1), weights()
    expected, _ = call(sonic, x, scores, TRIPLES, parts, sonic.ActivationType.GEGLU)
    assert torch.equal(call(sonic, x, scores, TRIPLES, parts, Other())[0], expected)


# ------------------------------------------------------------------------------------------------------------ router


def routed(
    x: Tensor, router_w: Tensor, top_k: int, *, over_topk: bool, norm: bool
) -> tuple[Tensor, list[int], list[int]]:
    scores, tokens, experts = [], [], []
    for t, token in enumerate(x.to(F64)):
        logits = [(row.to(F64) * token).sum() for row in router_w]
        best = sorted(range(len(logits)), key=lambda e: -logits[e].item())[:top_k]
        share = [logits[e].exp() for e in best]
        whole = sum(share) if over_topk or norm else sum(logit.exp() for logit in logits)
        scores += [part / whole for part in share]
        tokens += [t] * top_k
        experts += best
    return torch.stack(scores), tokens, experts


ROUTERS = pytest.mark.parametrize(
    "router",
    [
        {},
        {"norm_topk_probs": True},
        {"is_softmax_over_topk": False},
        {"is_softmax_over_topk": False, "norm_topk_probs": True},
    ],
    ids=["topk", "topk-norm", "all", "all-norm"],
)


@ROUTERS
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_the_router_sends_each_token_to_its_best_experts(sonic, router, top_k):
    x, router_w, parts = random(TOKENS, HIDDEN), random(EXPERTS, HIDDEN, seed=2), weights()
    output, logits, frequency = sonic.moe_TC_softmax_topk_layer(x, router_w, *parts, top_k, 0, **router)
    over_topk, norm = router.get("is_softmax_over_topk", True), router.get("norm_topk_probs", False)
    scores, tokens, experts = routed(x, router_w, top_k, over_topk=over_topk, norm=norm)
    assert_near(output, total(x, scores, tokens, experts, parts), ulps=64, atol=1e-12)
    assert_near(logits, x @ router_w.T, ulps=64, atol=1e-13)
    assert frequency.tolist() == [experts.count(e) for e in range(EXPERTS)]
    assert frequency.dtype == torch.int32


def test_the_router_of_no_tokens(sonic):
    parts = weights(F32)
    results = sonic.moe_TC_softmax_topk_layer(torch.empty(0, HIDDEN), random(EXPERTS, HIDDEN, dtype=F32), *parts, 2, 0)
    assert [tuple(result.shape) for result in results] == [(0, HIDDEN), (0, EXPERTS), (EXPERTS,)]


# -------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("act", ["swiglu", "geglu"])
@pytest.mark.parametrize("concat", [False, True])
def test_everything_has_a_gradient(sonic, act, concat):
    x, scores, parts = random(TOKENS, HIDDEN), random(6, seed=1), weights()

    def run(x: Tensor, scores: Tensor, *parts: Tensor) -> Tensor:
        return call(sonic, x, scores, WITH_SENTINELS, list(parts), act, concat_layout=concat)[0]

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in (x, scores, *parts)])


def test_gradients_without_biases_are_those_of_the_formula(sonic):
    x, scores, parts = random(TOKENS, HIDDEN), random(6, seed=1), weights(bias=False)
    leaves = [x.requires_grad_(), scores.requires_grad_(), parts[0].requires_grad_(), parts[2].requires_grad_()]
    upstream = random(TOKENS, HIDDEN, seed=3)
    actual = torch.autograd.grad(call(sonic, x, scores, TRIPLES, parts)[0], leaves, upstream)
    expected = torch.autograd.grad(total(x, scores, *TRIPLES, parts), leaves, upstream)
    for got, want in zip(actual, expected, strict=True):
        assert_near(got, want, ulps=64, atol=1e-12)


@ROUTERS
def test_the_router_has_a_gradient_through_scores_and_logits(sonic, router):
    x, router_w, parts = random(TOKENS, HIDDEN), random(EXPERTS, HIDDEN, seed=2), weights()

    def run(x: Tensor, router_w: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return sonic.moe_TC_softmax_topk_layer(x, router_w, *parts, 2, 0, **router)[:2]

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in (x, router_w, *parts)])


def test_inference_keeps_nothing_for_a_backward(sonic):
    x, scores, parts = random(TOKENS, HIDDEN).requires_grad_(), random(6, seed=1), weights()
    output, _ = call(sonic, x, scores, TRIPLES, parts, is_inference_mode_enabled=True)
    assert not output.requires_grad
    router_w = random(EXPERTS, HIDDEN, seed=2).requires_grad_()
    output, logits, _ = sonic.moe_TC_softmax_topk_layer(x, router_w, *parts, 2, 0, is_inference_mode_enabled=True)
    assert not output.requires_grad
    assert logits.requires_grad


# ---------------------------------------------------------------------------------------------------------- compile


@pytest.mark.parametrize("bias", [False, True])
def test_compiles_into_one_graph_with_the_same_result_and_gradient(sonic, bias):
    x, router_w = random(TOKENS, HIDDEN), random(EXPERTS, HIDDEN, seed=2)
    parts = weights(bias=bias)

    def step(x: Tensor, router_w: Tensor, *leaves: Tensor) -> Tensor:
        rest = list(leaves) if bias else [leaves[0], None, leaves[1], None]
        output, _, frequency = sonic.moe_TC_softmax_topk_layer(x * 2, router_w, *rest, 2, 0)
        return output.square().sum() + frequency.sum()

    results = []
    for function in (step, compiled(step)):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, router_w, *(p for p in parts if p is not None))]
        value = function(*leaves)
        results.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


# ----------------------------------------------------------------------------------------------------------- errors

X, W1, B1, W2, B2 = (
    torch.ones(2, 6), torch.ones(8, 6, 3), torch.ones(3, 8), torch.ones(6, 4, 3), torch.ones(3, 6),
)  # fmt: skip
GOOD = {
    "x": X, "router_scores": torch.ones(2), "token_indices": torch.tensor([0, 1]),
    "expert_indices": torch.tensor([0, 2]), "w1": W1, "b1": B1, "w2": W2, "b2": B2, "E": 3, "stream_id": 0,
    "activation_type": "swiglu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X.int()}, TypeError, "^x: .*bfloat16.*int32"),
        ({"x": X[0]}, ValueError, r"^x: .*\(T, H\).*\(6,\)"),
        ({"x": torch.ones(2, 5)}, ValueError, r"^w2: .*H = 5.*\(6, 4, 3\)"),
        ({"w1": W1.double()}, TypeError, "^w1: .*float32.*float64"),
        ({"w1": W1[:7]}, ValueError, r"^w1: .*\(8, 6, 3\).*\(7, 6, 3\)"),
        ({"w1": W1.to("meta")}, ValueError, "^w1: .*cpu.*meta"),
        ({"w2": W2[..., 0]}, ValueError, r"^w2: .*\(H, I, E\).*\(6, 4\)"),
        ({"w2": W2.int()}, TypeError, "^w2: .*int32"),
        ({"b1": B1[:2]}, ValueError, r"^b1: .*\(3, 8\).*\(2, 8\)"),
        ({"b2": B2.T}, ValueError, r"^b2: .*\(3, 6\).*\(6, 3\)"),
        ({"b1": None}, ValueError, "^b2: .*b1"),
        ({"b2": None}, ValueError, "^b2: .*b1"),
        ({"E": 4}, ValueError, "^E: .*3.*4"),
        ({"router_scores": torch.ones(2, 1)}, ValueError, r"^router_scores: .*\(R,\).*\(2, 1\)"),
        ({"router_scores": torch.ones(2).int()}, TypeError, "^router_scores: .*int32"),
        ({"token_indices": torch.tensor([0])}, ValueError, r"^token_indices: .*\(2,\).*\(1,\)"),
        ({"token_indices": torch.ones(2)}, TypeError, "^token_indices: .*int32 or int64.*float32"),
        ({"token_indices": torch.tensor([1, 0])}, ValueError, "^token_indices: .*ascending"),
        ({"token_indices": torch.tensor([0, 2])}, ValueError, "^token_indices: .*T = 2.*2"),
        ({"token_indices": torch.tensor([-1, 0])}, ValueError, "^token_indices: .*got -1"),
        ({"expert_indices": torch.tensor([0, -2])}, ValueError, "^expert_indices: .*-2"),
        ({"expert_indices": torch.tensor([0, 1], device="meta")}, ValueError, "^expert_indices: .*cpu.*meta"),
        ({"activation_type": "relu"}, ValueError, "^activation_type: .*swiglu, geglu.*relu"),
        ({"activation_type": 3}, TypeError, "^activation_type: .*3"),
    ],
)
def test_general_routing_refuses(sonic, change, error, message):
    with pytest.raises(error, match=message):
        sonic.moe_general_routing_inputs(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"router_w": torch.ones(4, 6)}, ValueError, r"^router_w: .*\(3, 6\).*\(4, 6\)"),
        ({"router_w": torch.ones(3, 6).double()}, TypeError, "^router_w: .*float32.*float64"),
        ({"K": 0}, ValueError, "^K: .*E = 3.*0"),
        ({"K": 4}, ValueError, "^K: .*E = 3.*4"),
        ({"activation_type": "reglu"}, ValueError, "^activation_type: .*reglu"),
    ],
)
def test_the_router_refuses(sonic, change, error, message):
    good = {"x": X, "router_w": torch.ones(3, 6), "w1": W1, "b1": B1, "w2": W2, "b2": B2, "K": 2, "stream_id": 0}
    with pytest.raises(error, match=message):
        sonic.moe_TC_softmax_topk_layer(**(good | change))
