"""The megablocks reference against a loop over tokens in float64: nothing is sorted, gathered or batched."""

import inspect
import math

import pytest
import torch
from torch import Tensor, nn

from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    FLAGS,
    assert_near,
    is_shipped_reference,
    layers_of,
    load_reference,
    members_of,
    put_into,
    random,
)

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 6, 4
LAYERS = ["MegaBlocksMoeMLP", "CPUMegaBlocksMoeMLP"]
SHAPES = [(0, 6), (2, 0, 6), (6,), (1, 1, 6), (3, 6), (2, 5, 6)]


class Router(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k = TOP_K
        self.weight = nn.Parameter(random(EXPERTS, HIDDEN, dtype=dtype, seed=10))
        self.bias = nn.Parameter(random(EXPERTS, dtype=dtype, seed=11))


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.alpha, self.limit = 1.702, 1.5  # GPT-OSS has 7.0; at this one, many of the numbers here are clamped
        self.gate_up_proj = nn.Parameter(random(EXPERTS, HIDDEN, 2 * INNER, dtype=dtype, seed=12))
        self.gate_up_proj_bias = nn.Parameter(random(EXPERTS, 2 * INNER, dtype=dtype, seed=13))
        self.down_proj = nn.Parameter(random(EXPERTS, INNER, HIDDEN, dtype=dtype, seed=14))
        self.down_proj_bias = nn.Parameter(random(EXPERTS, HIDDEN, dtype=dtype, seed=15))


class Mlp(nn.Module):
    """The MLP of a model, whose forward is taken away."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router, self.experts = Router(dtype), Experts(dtype)


def chosen(token: Tensor, router: Router) -> list[tuple[int, Tensor]]:
    """The experts of one token and their scores, by exponentials over those chosen."""
    logits = [(router.weight[e].to(F64) * token).sum() + router.bias[e].to(F64) for e in range(EXPERTS)]
    best = sorted(range(EXPERTS), key=lambda e: -logits[e].item())[:TOP_K]
    total = sum(logits[e].exp() for e in best)
    return [(e, logits[e].exp() / total) for e in best]


def gap(token: Tensor, router: Router) -> float:
    """How far the last expert that is chosen is from the first that is not."""
    logits = (router.weight.to(F64) @ token + router.bias.to(F64)).sort(descending=True).values
    return (logits[TOP_K - 1] - logits[TOP_K]).item()


def expert(token: Tensor, experts: Experts, e: int) -> Tensor:
    columns = token @ experts.gate_up_proj[e].to(F64) + experts.gate_up_proj_bias[e].to(F64)
    gate, up = columns.reshape(INNER, 2).T
    limit = torch.tensor(experts.limit, dtype=F64)
    gate, up = torch.minimum(gate, limit), torch.maximum(torch.minimum(up, limit), -limit)
    swish = gate / 2 * (1 + torch.tanh(experts.alpha * gate / 2))
    return ((1 + up) * swish) @ experts.down_proj[e].to(F64) + experts.down_proj_bias[e].to(F64)


def mixture(x: Tensor, model: Mlp) -> tuple[Tensor, Tensor]:
    tokens, outputs, scores = x.to(F64).reshape(-1, HIDDEN), [], []
    for token in tokens:
        picked = chosen(token, model.router)
        outputs.append(sum(score * expert(token, model.experts, e) for e, score in picked))
        scores.append(torch.stack([score for _, score in picked]))
    if not outputs:
        return torch.empty(x.shape, dtype=F64), torch.empty(0, TOP_K, dtype=F64)
    return torch.stack(outputs).reshape(x.shape), torch.stack(scores)


@pytest.fixture
def megablocks(cpu_machine, monkeypatch):
    return load_reference("megablocks", monkeypatch)


@pytest.fixture(params=LAYERS)
def layer(megablocks, request):
    return getattr(megablocks.layers, request.param)


def inputs(*shape: int, dtype: torch.dtype, router: Router, margin: float) -> Tensor:
    """Tokens that rounding sends to no other expert."""
    x = torch.empty(math.prod(shape[:-1]), HIDDEN, dtype=dtype)
    seeds = iter(range(100, 1000))
    for row in range(len(x)):
        x[row] = next(t for s in seeds if gap((t := random(HIDDEN, dtype=dtype, seed=s)).to(F64), router) > margin)
    return x.reshape(shape)


# ---------------------------------------------------------------------------------------------------------- loading


def test_the_kernel_loads_as_its_reference(megablocks):
    assert is_shipped_reference(megablocks, "megablocks")
    assert set(type(megablocks).__dataclass_fields__) == {"layers"}


def test_the_layers_are_those_that_are_published(megablocks):
    assert sorted(layers_of(megablocks.layers)) == sorted(LAYERS)


def test_every_layer_is_a_forward_without_a_state(layer):
    assert members_of(layer) == FLAGS
    assert not layer.can_torch_compile
    assert layer.has_backward
    assert list(inspect.signature(layer.forward).parameters) == ["self", "x"]


# ----------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_token_gets_the_weighted_sum_of_its_experts(layer, shape, dtype):
    model = Mlp(dtype)
    x = inputs(*shape, dtype=dtype, router=model.router, margin=0.2)
    output, scores = put_into(model, layer)(x)
    expected, expected_scores = mixture(x, model)
    assert output.dtype == scores.dtype == dtype
    # Products of numbers up to about 10 are added in the dtype, and rounded at each of half a dozen steps.
    eps = torch.finfo(dtype).eps
    assert_near(output, expected, ulps=16, atol=32 * eps)
    assert_near(scores, expected_scores, ulps=16, atol=8 * eps)


def test_what_is_compared_here_is_clamped_in_places_and_not_in_others():
    model = Mlp(F64)
    x = inputs(2, 5, HIDDEN, dtype=F64, router=model.router, margin=0.2).reshape(-1, HIDDEN)
    columns = x @ model.experts.gate_up_proj[0] + model.experts.gate_up_proj_bias[0]
    limit = model.experts.limit
    assert 0.1 < (columns.abs() > limit).double().mean() < 0.9
    assert (columns[:, 0::2] < -limit).any()  # a gate is not clamped from below


def test_scores_are_the_largest_first_and_sum_to_one(layer):
    model = put_into(Mlp(F64), layer)
    _, scores = model(random(4, 3, HIDDEN))
    assert scores.shape == (12, TOP_K)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    assert_near(scores.sum(-1), torch.ones(12, dtype=F64))


def test_one_expert_alone_gets_all_of_a_token(layer):
    model = put_into(Mlp(F64), layer)
    model.router.top_k = 1
    x = random(3, HIDDEN)
    output, scores = model(x)
    assert torch.equal(scores, torch.ones(3, 1, dtype=F64))
    for row in range(3):
        best = (model.router.weight @ x[row] + model.router.bias).argmax().item()
        assert_near(output[row], expert(x[row], model.experts, best), ulps=64, atol=1e-13)


def test_experts_without_a_token_change_nothing(layer):
    model = put_into(Mlp(F64), layer)
    with torch.no_grad():
        model.router.bias[:2] = 100.0  # the first two take everything
        model.experts.gate_up_proj[2:] = math.nan
        model.experts.down_proj_bias[2:] = math.nan
    x = random(4, HIDDEN)
    output, _ = model(x)
    assert_near(output, mixture(x, model)[0], ulps=64, atol=1e-13)


def test_any_strides_are_read(layer):
    model = put_into(Mlp(F64), layer)
    x = random(HIDDEN, 3, 2).permute(2, 1, 0)
    assert not x.is_contiguous()
    assert_near(model(x)[0], mixture(x, model)[0], ulps=64, atol=1e-13)


# -------------------------------------------------------------------------------------------------------- gradients


def test_tokens_router_and_experts_have_a_gradient(layer):
    model = put_into(Mlp(F64), layer)
    x = inputs(3, HIDDEN, dtype=F64, router=model.router, margin=0.2).requires_grad_()
    names = [name for name, _ in model.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), x)

    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_gradients_are_those_of_the_formula_and_zero_for_idle_experts(layer):
    model = put_into(Mlp(F64), layer)
    with torch.no_grad():
        model.router.bias[4] = -100.0
    x = random(3, HIDDEN).requires_grad_()
    variables = [x, *model.parameters()]
    upstream = random(3, HIDDEN, seed=1)
    actual = torch.autograd.grad(model(x)[0], variables, upstream)
    expected = torch.autograd.grad(mixture(x, model)[0], variables, upstream)
    for got, want in zip(actual, expected, strict=True):
        assert_near(got, want, ulps=64, atol=1e-12)
    assert not actual[3][4].any()  # gate_up_proj


def test_no_token_gives_zero_gradients(layer):
    model = put_into(Mlp(F32), layer)
    output, _ = model(torch.empty(0, HIDDEN))
    output.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_compiled_model_computes_the_same_with_a_break_in_its_graph(layer):
    torch.compiler.reset()
    model = put_into(Mlp(F32), layer)
    x = random(4, HIDDEN, dtype=F32)
    with torch.no_grad():  # where a graph breaks, Dynamo asks tensors for a gradient and warns that it did
        output, scores = torch.compile(model, backend="aot_eager")(x)
        expected, expected_scores = model(x)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(scores, expected_scores)
