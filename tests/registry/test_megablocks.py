"""The megablocks reference against loops: over tokens in float64, and over elements for the ops on bins.

Nothing that says what is right is sorted, gathered or batched.
"""

import inspect
import math
from collections import Counter
from typing import get_type_hints

import pytest
import torch
from torch import Tensor, nn

from kernel_loader.bundles.megablocks import MegaBlocks
from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    FLAGS,
    assert_near,
    compiled,
    is_shipped_reference,
    layers_of,
    load_reference,
    members_of,
    put_into,
    random,
)

EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 6, 4
LAYERS = ["MegaBlocksMoeMLP", "CPUMegaBlocksMoeMLP"]
WITH_SHARED = "MegaBlocksMoeMLPWithSharedExpert"
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
    assert isinstance(megablocks, MegaBlocks)


def test_the_layers_are_those_that_are_published(megablocks):
    assert sorted(layers_of(megablocks.layers)) == sorted([*LAYERS, WITH_SHARED])


# Parameters of kernels-community/megablocks, version 1, with their defaults.
PUBLISHED = {
    "exclusive_cumsum": "x dim out",
    "inclusive_cumsum": "x dim out",
    "cumsum": "x dim=-1 exclusive=False",
    "histogram": "x num_bins",
    "indices": "padded_bins block_size output_block_rows output_block_columns",
    "replicate_forward": "x bins out",
    "replicate_backward": "grad bins out",
    "sort": "x end_bit x_out iota_out",
    "argsort": "x end_bit=32",
}


def parameters(function):
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found)


def test_the_parameters_of_ops_are_those_that_are_published(megablocks):
    hints = get_type_hints(MegaBlocks)
    for name, wanted in PUBLISHED.items():
        assert parameters(getattr(megablocks, name)) == parameters(hints[name].__call__) == wanted


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


# ----------------------------------------------------------------------------------------------- the expert beside them

WIDE = 5


class Beside:
    """Weights of a shared expert."""

    def __init__(self, dtype: torch.dtype, *, bias: bool) -> None:
        self.up, self.down = random(WIDE, HIDDEN, dtype=dtype, seed=20), random(HIDDEN, WIDE, dtype=dtype, seed=21)
        self.up_bias = random(WIDE, dtype=dtype, seed=22) if bias else None
        self.down_bias = random(HIDDEN, dtype=dtype, seed=23) if bias else None

    def give_to(self, module: nn.Module, **rest: object) -> None:
        module.set_shared_expert_weights(self.up, self.down, self.up_bias, self.down_bias, **rest)

    def __call__(self, x: Tensor, act=lambda x: x * torch.special.ndtr(x)) -> Tensor:
        wide = [None if p is None else p.to(F64) for p in (self.up, self.up_bias, self.down, self.down_bias)]
        inner = x.to(F64) @ wide[0].T + (0 if wide[1] is None else wide[1])
        return act(inner) @ wide[2].T + (0 if wide[3] is None else wide[3])


def with_shared(megablocks, dtype: torch.dtype = F64) -> nn.Module:
    module = getattr(megablocks.layers, WITH_SHARED)()
    module.router, module.experts = Router(dtype), Experts(dtype)
    return module


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_shared_expert_is_added(megablocks, dtype, bias):
    module, beside = with_shared(megablocks, dtype), Beside(dtype, bias=bias)
    beside.give_to(module)
    x = inputs(2, 5, HIDDEN, dtype=dtype, router=module.router, margin=0.2)
    output, scores = module(x)
    expected, expected_scores = mixture(x, module)
    eps = torch.finfo(dtype).eps
    assert output.dtype == scores.dtype == dtype
    assert_near(output, expected + beside(x), ulps=16, atol=64 * eps)
    assert_near(scores, expected_scores, ulps=16, atol=8 * eps)


def test_a_weighted_sum_counts_the_shared_expert_as_one(megablocks):
    module, beside = with_shared(megablocks), Beside(F64, bias=True)
    beside.give_to(module, weighted_sum=True)
    x = random(3, HIDDEN)
    expected = (beside(x) + TOP_K * mixture(x, module)[0]) / (TOP_K + 1)
    assert_near(module(x)[0], expected, ulps=64, atol=1e-12)


def test_the_shared_expert_may_have_another_activation(megablocks):
    module, beside = with_shared(megablocks), Beside(F64, bias=False)
    beside.give_to(module, activation_fn=torch.sin)
    x = random(3, HIDDEN)
    assert_near(module(x)[0], mixture(x, module)[0] + beside(x, torch.sin), ulps=64, atol=1e-12)


def test_without_shared_weights_it_is_the_mlp_alone(megablocks):
    module = with_shared(megablocks)
    x = random(3, HIDDEN)
    expected = put_into(Mlp(F64), megablocks.layers.MegaBlocksMoeMLP)(x)
    for got, want in zip(module(x), expected, strict=True):
        assert torch.equal(got, want)


def test_shared_weights_have_a_gradient(megablocks):
    module, beside = with_shared(megablocks), Beside(F64, bias=True)
    leaves = [p.requires_grad_() for p in (beside.up, beside.down, beside.up_bias, beside.down_bias)]
    beside.give_to(module)
    x = random(3, HIDDEN)
    actual = torch.autograd.grad(module(x)[0].sum(), leaves)
    expected = torch.autograd.grad(beside(x).sum(), leaves)
    for got, want in zip(actual, expected, strict=True):
        assert_near(got, want, ulps=64, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- ops on bins

INTEGERS = [torch.int16, torch.int32, torch.int64]
I32 = torch.int32


def whole(*shape: int, low: int = -50, high: int = 50, dtype: torch.dtype = I32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


def bins(*sizes: int) -> Tensor:
    return torch.tensor([sum(sizes[: i + 1]) for i in range(len(sizes))], dtype=I32)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (2, 0), (0, 3)])
def test_cumulative_sums_are_written_and_returned(megablocks, shape, dtype):
    x = whole(*shape, dtype=dtype)
    rows = x.tolist()
    for name, shift in (("exclusive_cumsum", 0), ("inclusive_cumsum", 1)):
        out = torch.full_like(x, -1)
        assert getattr(megablocks, name)(x, 1, out) is out
        assert out.tolist() == [[sum(row[: i + shift]) for i in range(len(row))] for row in rows]
        assert torch.equal(megablocks.cumsum(x, 1, name.startswith("ex")), out)


def test_cumulative_sums_of_vectors_and_along_other_dimensions(megablocks):
    x = whole(4, 3)
    assert torch.equal(megablocks.cumsum(x.T, 1).T, megablocks.cumsum(x, 0))
    assert torch.equal(megablocks.cumsum(x, exclusive=True), megablocks.cumsum(x, 1, exclusive=True))
    assert megablocks.cumsum(torch.tensor([3, 4, 5])).tolist() == [3, 7, 12]
    assert megablocks.cumsum(torch.tensor([3, 4, 5]), exclusive=True).tolist() == [0, 3, 7]


def test_cumulative_sums_wrap_around(megablocks):
    x = torch.tensor([2**15 - 1, 1, 1], dtype=torch.int16)
    assert megablocks.cumsum(x).tolist() == [2**15 - 1, -(2**15), -(2**15) + 1]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("shape", [(0,), (1,), (100,), (3, 40), (2, 0)])
def test_a_histogram_counts_what_is_in_range(megablocks, shape, dtype):
    x = whole(*shape, low=-2, high=9, dtype=dtype)
    counts = [Counter(row) for row in (x.tolist() if x.ndim == 2 else [x.tolist()])]
    expected = [[count[number] for number in range(7)] for count in counts]
    got = megablocks.histogram(x, 7)
    assert got.dtype == I32
    assert got.tolist() == (expected if x.ndim == 2 else expected[0])


def test_indices_number_the_blocks_of_each_bin(megablocks):
    got = megablocks.indices(bins(16, 0, 32), 16, 4, 3)
    assert got.dtype == torch.int16
    assert got.view(4, 3).tolist() == [[0, 1, 2], [6, 7, 8], [6, 7, 8], [0, 0, 0]]
    assert megablocks.indices(bins(), 16, 0, 3).shape == (0,)


@pytest.mark.parametrize("sizes", [(4,), (0, 3, 0, 2, 0), (0, 0), ()])
@pytest.mark.parametrize("rest", [0, 3])
@pytest.mark.parametrize("dtype", [F16, F64, torch.int16])
def test_replication_and_its_transpose(megablocks, sizes, rest, dtype):
    columns = [b for b, size in enumerate(sizes) for _ in range(size)]
    x, out = whole(2, len(sizes), dtype=dtype), torch.full((2, len(columns) + rest), 7, dtype=dtype)
    assert megablocks.replicate_forward(x, bins(*sizes), out) is out
    assert out.tolist() == [[row[b] for b in columns] + [7] * rest for row in x.tolist()]
    if dtype.is_floating_point:
        grad, sums = whole(2, len(columns) + rest, dtype=dtype, seed=1), torch.full_like(x, math.nan)
        grad[:, len(columns) :] = math.nan
        assert megablocks.replicate_backward(grad, bins(*sizes), sums) is sums
        pairs = [list(zip(columns, row, strict=False)) for row in grad.tolist()]
        assert sums.tolist() == [[sum(g for c, g in row if c == b) for b in range(len(sizes))] for row in pairs]


def test_replicas_are_added_in_float32(megablocks):
    grad, out = torch.ones(1, 4096, dtype=BF16), torch.empty(1, 1, dtype=BF16)
    assert megablocks.replicate_backward(grad, bins(4096), out).item() == 4096.0


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("bits", "low"), [(0, 0), (3, 0), (7, 0), (64, -50)])
def test_sort_orders_by_the_lowest_bits_and_keeps_the_rest_in_place(megablocks, dtype, bits, low):
    x = whole(60, low=low, high=100, dtype=dtype)
    numbers, x_out, iota_out = x.tolist(), torch.empty_like(x), torch.empty_like(x)
    assert megablocks.sort(x, bits, x_out, iota_out) is x_out
    order = sorted(range(60), key=lambda i: numbers[i] if bits == 64 else numbers[i] % 2**bits)
    assert iota_out.tolist() == order
    assert x_out.tolist() == [numbers[i] for i in order]
    assert iota_out.dtype == x_out.dtype == dtype
    assert [part.tolist() for part in megablocks.argsort(x, bits)] == [x_out.tolist(), order]


def test_ops_compile_into_one_graph(megablocks):
    x = whole(40, low=0, high=8)

    def route(x: Tensor) -> tuple[Tensor, ...]:
        found, where = megablocks.argsort(x, 3)
        ends = megablocks.cumsum(megablocks.histogram(x, 8))
        each = megablocks.replicate_forward(torch.arange(8, device=x.device)[None], ends, torch.zeros(1, 40).long())
        sums = megablocks.replicate_backward(each.float(), ends, torch.zeros(1, 8))
        return found, where, each, sums, megablocks.indices(ends, 1, 40, 2)

    for got, want in zip(compiled(route)(x), route(x), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(route(x)[0], route(x)[2][0].int())


VECTOR, MATRIX, BINS = whole(4), whole(2, 3), bins(1, 2, 0)


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"),
    [
        ("exclusive_cumsum", (VECTOR.float(), 0, VECTOR), TypeError, "^x: .*int16, int32 or int64.*float32"),
        ("inclusive_cumsum", (VECTOR, 0, VECTOR.long()), TypeError, "^out: .*int32.*int64"),
        ("inclusive_cumsum", (VECTOR, 0, VECTOR[:3]), ValueError, r"^out: .*\(4,\).*\(3,\)"),
        ("inclusive_cumsum", (VECTOR, 0, VECTOR.to("meta")), ValueError, "^out: .*cpu.*meta"),
        ("histogram", (VECTOR.float(), 3), TypeError, "^x: .*float32"),
        ("histogram", (MATRIX[None], 3), ValueError, r"^x: .*\(B, N\).*\(1, 2, 3\)"),
        ("histogram", (VECTOR, -1), ValueError, "^num_bins: .*-1"),
        ("indices", (BINS.long(), 1, 3, 1), TypeError, "^padded_bins: .*int32.*int64"),
        ("indices", (MATRIX, 1, 3, 1), ValueError, r"^padded_bins: .*\(E,\).*\(2, 3\)"),
        ("indices", (BINS, 0, 3, 1), ValueError, "^block_size: .*0"),
        ("replicate_forward", (MATRIX, BINS[:2], MATRIX), ValueError, r"^x: .*\(B, 2\).*\(2, 3\)"),
        ("replicate_forward", (MATRIX, BINS, MATRIX.long()), TypeError, "^out: .*int32.*int64"),
        ("replicate_forward", (MATRIX, BINS, VECTOR), ValueError, r"^out: .*\(2, N\).*\(4,\)"),
        ("replicate_forward", (MATRIX, BINS, MATRIX[:1]), ValueError, r"^out: .*\(2, 3\).*\(1, 3\)"),
        ("replicate_backward", (MATRIX, BINS, MATRIX), TypeError, "^grad: .*floating-point.*int32"),
        ("replicate_backward", (VECTOR.float(), BINS, MATRIX), ValueError, r"^grad: .*\(B, N\).*\(4,\)"),
        ("replicate_backward", (MATRIX.float(), BINS, MATRIX.float()[:1]), ValueError, r"^out: .*\(2, 3\)"),
        ("sort", (MATRIX, 3, MATRIX, MATRIX), ValueError, r"^x: .*\(N,\).*\(2, 3\)"),
        ("sort", (VECTOR, -1, VECTOR, VECTOR), ValueError, "^end_bit: .*-1"),
        ("sort", (VECTOR, 3, VECTOR, VECTOR.long()), TypeError, "^iota_out: .*int32.*int64"),
        ("sort", (VECTOR, 3, VECTOR[:2], VECTOR), ValueError, r"^x_out: .*\(4,\).*\(2,\)"),
    ],
)
def test_ops_refuse(megablocks, op, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(megablocks, op)(*arguments)
