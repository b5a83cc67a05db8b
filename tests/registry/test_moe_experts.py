"""The moe_experts reference against loops over slots in float64, and the Triton build against the grid, on a GPU.

What is right is computed one slot at a time, with matrices that are plain whatever the layout under test.
"""

import ast
import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import kernel_loader
from kernel_loader.bundles.moe import ExpertsForward, MoEExperts
from kernel_loader.conformance.grids.moe import MOE_EXPERTS_GRID
from kernel_loader.conformance.runner import check
from tests.builds import H200
from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    REGISTRY,
    compiled,
    is_shipped_reference,
    load_reference,
    random,
)

BUILDS = REGISTRY / "moe-experts" / "build"
E, T, K, H, I = 4, 9, 2, 6, 5  # noqa: E741 - as the bundle calls them
LAYOUTS = [(gate, joined, turned) for gate in (True, False) for joined in (True, False) for turned in (True, False)]
NAN, INF = math.nan, math.inf
IDS = torch.tensor([[0, 1], [1, 0], [3, 3], [E, 0], [1, E + 9], [E, E], [0, 3], [-1, 1], [3, -7]])
REAL = (IDS >= 0) & (IDS < E)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> ExpertsForward:
    return load_reference("moe_experts", monkeypatch).experts_forward


@pytest.fixture
def on_gpu() -> ExpertsForward:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return kernel_loader.load_kernel("moe_experts").experts_forward


class Weights:
    """Plain weights in float64 that float32 holds exactly, and how a layout has them."""

    def __init__(self, *, has_gate: bool = True, experts: int = E, hidden: int = H, intermediate: int = I) -> None:
        self.gate = random(experts, intermediate, hidden, dtype=F32, seed=1).to(F64) if has_gate else None
        self.up = random(experts, intermediate, hidden, dtype=F32, seed=2).to(F64)
        self.down = random(experts, hidden, intermediate, dtype=F32, seed=3).to(F64)
        self.gate_bias = random(experts, intermediate, dtype=F32, seed=4).to(F64) if has_gate else None
        self.up_bias = random(experts, intermediate, dtype=F32, seed=5).to(F64)
        self.down_bias = random(experts, hidden, dtype=F32, seed=6).to(F64)

    def leaves(self) -> dict[str, Tensor]:
        return {name: leaf.requires_grad_() for name, leaf in vars(self).items() if leaf is not None}

    def laid_out(self, gate: Tensor | None, up: Tensor, down: Tensor, joined: bool, turned: bool) -> list[Tensor]:
        """gate_up_proj and down_proj, of weights or of their gradients."""
        both = up if gate is None else torch.cat((gate, up), 1) if joined else torch.stack((gate, up), 2).flatten(1, 2)
        return [both.mT, down.mT] if turned else [both, down]


def by_slots(weights: Weights, x: Tensor, ids: Tensor, routing: Tensor, activation: Any, *, bias: bool) -> Tensor:
    """One slot after the other."""
    rows = []
    for token in range(len(ids)):
        row = torch.zeros(x.shape[1], dtype=F64)
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            if 0 <= e < len(weights.up):
                up = weights.up[e] @ x[token] + (weights.up_bias[e] if bias else 0)
                if weights.gate is None:
                    h = activation(up)
                else:
                    h = activation(weights.gate[e] @ x[token] + (weights.gate_bias[e] if bias else 0), up)
                row = row + routing[token, slot] * (weights.down[e] @ h + (weights.down_bias[e] if bias else 0))
        rows.append(row)
    return torch.stack(rows)


def silu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return gate * torch.sigmoid(gate) * (1 if up is None else up)


def arguments(dtype: torch.dtype = F32, **weights: Any) -> list[Tensor]:
    """Hidden states, ids, routing weights, gate_up_proj and down_proj, plainly laid out."""
    w = Weights(**weights)
    x = random(T, w.up.shape[2], dtype=dtype, seed=7)
    routing = random(T, K, dtype=dtype, seed=8)
    return [x, IDS, routing, *(t.to(dtype) for t in w.laid_out(w.gate, w.up, w.down, True, False))]


def assert_close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.to(F64), want, rtol=tolerance, atol=tolerance * float(want.abs().max() + 1e-30))


# ----------------------------------------------------------------------------------------------------------- layouts


def test_without_a_gpu_the_reference_is_the_build(cpu_machine: None) -> None:
    bundle = kernel_loader.load_kernel(MoEExperts)
    assert isinstance(bundle, MoEExperts)
    assert is_shipped_reference(bundle, "moe-experts")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("has_gate", "joined", "turned"), LAYOUTS)
def test_every_layout_gives_the_same_layer_and_gradients(experts, has_gate, joined, turned, bias):
    weights = Weights(has_gate=has_gate)
    leaves = weights.leaves()
    x, routing = random(T, H, dtype=F32, seed=7), random(T, K, dtype=F32, seed=8)
    right_x, right_routing = (t.to(F64).requires_grad_() for t in (x, routing))
    want = by_slots(weights, right_x, IDS, right_routing, silu, bias=bias)
    upstream = random(T, H, dtype=F32, seed=9)
    want.backward(upstream.to(F64))

    def made(gate, up, down):
        return [t.detach().to(F32).contiguous() for t in weights.laid_out(gate, up, down, joined, turned)]

    first, second = (t.requires_grad_() for t in made(weights.gate, weights.up, weights.down))
    biases = {}
    if bias:
        joint, _ = Weights.laid_out(
            weights,
            *(b if b is None else b.detach()[..., None] for b in (weights.gate_bias, weights.up_bias)),
            weights.down.detach(),
            joined,
            False,
        )
        biases["gate_up_proj_bias"] = joint[..., 0].to(F32).requires_grad_()
        biases["down_proj_bias"] = weights.down_bias.detach().to(F32).requires_grad_()
    x, routing = x.requires_grad_(), routing.requires_grad_()
    options = {"has_gate": has_gate, "is_concatenated": joined, "is_transposed": turned}
    got = experts(x, IDS, routing, first, second, **biases, **options)
    assert got.dtype == F32
    assert got.is_contiguous()
    assert_close(got, want.detach())
    got.backward(upstream)
    assert_close(x.grad, right_x.grad)
    assert_close(routing.grad, right_routing.grad)
    to_gate = None if weights.gate is None else leaves["gate"].grad
    to_first, to_second = weights.laid_out(to_gate, leaves["up"].grad, leaves["down"].grad, joined, turned)
    assert_close(first.grad, to_first)
    assert_close(second.grad, to_second)
    if bias:
        parts = [None if b is None else b.grad[..., None] for b in (weights.gate_bias, weights.up_bias)]
        assert_close(biases["gate_up_proj_bias"].grad, weights.laid_out(*parts, weights.down, joined, False)[0][..., 0])
        assert_close(biases["down_proj_bias"].grad, weights.down_bias.grad)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_half_precision_rounds_rows_of_experts_and_the_sum(experts, dtype):
    x, ids, routing, first, second = arguments(dtype, hidden=64, intermediate=32)
    plain = Weights(hidden=64, intermediate=32)
    plain.gate, plain.up = (t.to(F64) for t in first.chunk(2, dim=1))
    plain.down = second.to(F64)
    want = by_slots(plain, x.to(F64), ids, routing.to(F64), silu, bias=False)
    error = (experts(x, ids, routing, first, second).to(F64) - want).norm() / want.norm()
    assert error < 2 * torch.finfo(dtype).eps


def test_rows_are_summed_in_float32_and_rounded_once(experts):
    # One element wide: the experts give 256, 1 and 1, and 256 + 1 is 256 in bfloat16.
    first = torch.tensor([256.0, 1.0, 1.0], dtype=BF16).view(3, 1, 1)
    ones = torch.ones(3, 1, 1, dtype=BF16)
    x, ids, routing = torch.ones(1, 1, dtype=BF16), torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=BF16)
    assert experts(x, ids, routing, first, ones, activation="relu", has_gate=False).item() == 258


def test_routing_weights_count_in_float32(experts):
    first, second = torch.ones(1, 1, 1, dtype=BF16), torch.full((1, 1, 1), 256.0, dtype=BF16)
    routing = torch.tensor([[1.0 + 2**-8]])  # 1 in bfloat16; the product is 257, and its sum with 1 is 258
    x, ids = torch.ones(1, 1, dtype=BF16), torch.tensor([[0, 0]])
    routing = torch.tensor([[1.0 + 2**-8, 2**-8]])
    assert experts(x, ids, routing, first, second, activation="relu", has_gate=False).item() == 258


# -------------------------------------------------------------------------------------------------------- activations

POINTS = (-30.0, -3.0, -0.5, 0.0, 0.25, 2.0, 30.0)


def one_number(experts: ExpertsForward, gate: float, up: float, **options: Any) -> float:
    """What the activation makes of a gate and an up."""
    first = torch.tensor([gate, up]).view(1, 2, 1)
    one = torch.ones(1, 1)
    return experts(one, torch.zeros(1, 1, dtype=torch.int64), one, first, torch.ones(1, 1, 1), **options).item()


FORMULAS = {
    "silu": lambda g: g / (1 + math.exp(-g)),
    "gelu": lambda g: g * math.erfc(-g / math.sqrt(2)) / 2,
    "gelu_tanh": lambda g: g / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))),
    "relu": lambda g: max(g, 0.0),
    "relu2": lambda g: max(g, 0.0) ** 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_are_their_formulas(experts, name):
    for gate in POINTS:
        want = FORMULAS[name](gate) * 1.5
        assert one_number(experts, gate, 1.5, activation=name) == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_the_activation_of_gpt_oss_has_alpha_and_limit(experts):
    def want(gate: float, up: float, alpha: float = 1.702, limit: float = INF) -> float:
        gate, up = min(gate, limit), max(min(up, limit), -limit)
        return gate / (1 + math.exp(-alpha * gate)) * (up + 1)

    for gate in POINTS:
        for up in (-9.0, 0.5, 9.0):
            got = one_number(experts, gate, up, activation="swiglu_oai")
            assert got == pytest.approx(want(gate, up), rel=1e-5, abs=1e-6)
            got = one_number(experts, gate, up, activation="swiglu_oai", alpha=0.5, limit=7.0)
            assert got == pytest.approx(want(gate, up, 0.5, 7.0), rel=1e-5, abs=1e-6)


def test_a_limit_clamps_the_gate_from_above_and_the_up_on_both_sides(experts):
    silu_of_2 = 2 / (1 + math.exp(-2))
    assert one_number(experts, 5.0, 1.0, limit=2.0) == pytest.approx(silu_of_2)
    assert one_number(experts, -5.0, 1.0, limit=2.0) == pytest.approx(-5 / (1 + math.exp(5)))
    assert one_number(experts, 1.0, 5.0, limit=2.0) == pytest.approx(2 / (1 + math.exp(-1)))
    assert one_number(experts, 1.0, -5.0, limit=2.0) == pytest.approx(-2 / (1 + math.exp(-1)))


# ---------------------------------------------------------------------------------------------------------- sentinels


@pytest.mark.parametrize("poison", [NAN, INF])
def test_sentinels_leave_no_trace_forward_or_backward(experts, poison):
    x, ids, routing, first, second = arguments()
    upstream = random(T, H, dtype=F32, seed=9)
    nobody = ~REAL.any(1)
    assert nobody.any()

    def run(x, routing, upstream):
        leaves = [t.clone().requires_grad_() for t in (x, routing, first, second)]
        out = experts(leaves[0], ids, *leaves[1:])
        return out.detach(), *torch.autograd.grad(out, leaves, upstream)

    clean = run(x, routing.masked_fill(~REAL, 1.0), upstream)
    spoilt = run(
        x.masked_fill(nobody[:, None], poison),
        routing.masked_fill(~REAL, poison),
        upstream.masked_fill(nobody[:, None], poison),
    )
    assert all(torch.equal(a, b) for a, b in zip(clean, spoilt, strict=True))
    out, to_x, to_routing, *_ = spoilt
    assert not out[nobody].any()
    assert not to_x[nobody].any()
    assert not to_routing[~REAL].any()


@pytest.mark.parametrize("sentinel", [E, E + 1, -1, 2**31, -(2**40), torch.iinfo(torch.int64).max])
def test_every_id_outside_is_a_sentinel(experts, sentinel):
    x, _, routing, first, second = arguments()
    assert not experts(x, torch.full((T, K), sentinel), routing, first, second).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint64])
def test_ids_may_have_any_integer_dtype(experts, dtype):
    x, _, routing, first, second = arguments()
    ids = IDS.clamp(min=0)
    assert torch.equal(experts(x, ids.to(dtype), routing, first, second), experts(x, ids, routing, first, second))


def test_an_expert_without_rows_gets_gradients_of_zero(experts):
    x, ids, routing, first, second = arguments()
    biases = {
        "gate_up_proj_bias": torch.ones(E, 2 * I, requires_grad=True),
        "down_proj_bias": torch.ones(E, H, requires_grad=True),
    }
    experts(x, ids, routing, first.requires_grad_(), second.requires_grad_(), **biases).sum().backward()
    for leaf in (first, second, *biases.values()):
        assert not leaf.grad[2].any()  # nobody asks for expert 2
        assert leaf.grad[1].any()


@pytest.mark.parametrize("empty", ["tokens", "slots", "experts", "hidden", "intermediate"])
def test_every_size_may_be_zero(experts, empty):
    size = dict.fromkeys(("tokens", "slots", "experts", "hidden", "intermediate"), 3) | {empty: 0}
    tokens, slots, count, hidden, intermediate = size.values()
    leaves = [
        torch.ones(tokens, hidden),
        torch.ones(tokens, slots),
        torch.ones(count, 2 * intermediate, hidden),
        torch.ones(count, hidden, intermediate),
    ]
    x, routing, first, second = (leaf.requires_grad_() for leaf in leaves)
    bias = torch.ones(count, hidden)
    out = experts(x, torch.zeros(tokens, slots, dtype=torch.int64), routing, first, second, down_proj_bias=bias)
    want = slots if empty == "intermediate" else 0
    assert torch.equal(out, torch.full((tokens, hidden), float(want)))
    out.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in (x, routing, first, second))


# ---------------------------------------------------------------------------------------------------------------- FP8


def fp8_weight(n: int, k: int, block: tuple[int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they stand for in float64."""
    codes = random(E, n, k, dtype=F32, scale=50, seed=seed).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-9, -5, (E, -(-n // block[0]), -(-k // block[1])), generator=torch.manual_seed(seed))
    real = codes.to(F64)
    for i in range(n):
        for j in range(k):
            real[:, i, j] *= scale[:, i // block[0], j // block[1]]
    return codes, scale, real


def test_fp8_weights_meet_rows_that_are_quantised_in_front_of_both_products(experts):
    block, hidden, intermediate = (4, 8), 20, 12
    first, first_scale, first_real = fp8_weight(2 * intermediate, hidden, block, 1)
    second, second_scale, second_real = fp8_weight(hidden, intermediate, block, 2)
    x, routing = random(T, hidden, dtype=BF16, seed=7), random(T, K, dtype=BF16, seed=8)

    def quantised(row: Tensor) -> Tensor:
        parts = []
        for part in row.float().split(block[1]):
            scale = part.abs().max() / 448
            parts.append((part / scale).to(torch.float8_e4m3fn).to(F64) * scale.to(F64))
        return torch.cat(parts)

    want = torch.zeros(T, hidden, dtype=F64)
    for token, slot in REAL.nonzero().tolist():
        e = int(IDS[token, slot])
        gate, up = (first_real[e] @ quantised(x[token])).chunk(2)
        y = second_real[e] @ quantised(silu(gate, up).to(BF16))
        want[token] += routing[token, slot].to(F64) * y.to(BF16).to(F64)
    scales = {"gate_up_proj_scale": first_scale, "down_proj_scale": second_scale, "block_size": list(block)}
    got = experts(x, IDS, routing, first, second, **scales)
    assert_close(got, want, torch.finfo(BF16).eps)
    exponents = {
        name: (torch.log2(value) + 127).to(torch.uint8) if isinstance(value, Tensor) else value
        for name, value in scales.items()
    }
    assert torch.equal(experts(x, IDS, routing, first, second, **exponents), got)


def test_gradients_go_straight_through_the_quantisers_and_not_to_fp8_weights(experts):
    block = (4, 8)
    first, first_scale, first_real = fp8_weight(2 * I, H, block, 1)
    second, second_scale, second_real = fp8_weight(H, I, block, 2)
    x = torch.zeros(T, H)
    # Numbers that are codes already, with 448 among them: the quantiser changes nothing.
    x[:] = torch.tensor([448.0, 2.0, -1.0, 0.5, -32.0, 4.0]) / 2**10
    leaf, routing = x.clone().requires_grad_(), random(T, K, dtype=F32, seed=8)
    options = {"gate_up_proj_scale": first_scale, "down_proj_scale": second_scale, "block_size": list(block)}
    experts(leaf, IDS, routing, first, second, has_gate=True, **options).sum().backward()
    plain = Weights()
    plain.gate, plain.up = first_real.chunk(2, dim=1)
    plain.down = second_real
    right = x.to(F64).requires_grad_()
    by_slots(plain, right, IDS, routing.to(F64), silu, bias=False).sum().backward()
    assert_close(leaf.grad, right.grad)
    assert first.grad is None


# -------------------------------------------------------------------------------------------------------- wrong input


def fp8_arguments(**changes: Any) -> dict[str, Any]:
    given = {
        "gate_up_proj": torch.zeros(E, 2 * I, H).to(torch.float8_e4m3fn),
        "down_proj": torch.zeros(E, H, I).to(torch.float8_e4m3fn),
        "gate_up_proj_scale": torch.ones(E, 3, 2),
        "down_proj_scale": torch.ones(E, 2, 2),
        "block_size": [4, 4],
    }
    return given | changes


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"hidden_states": torch.zeros(T, H, dtype=F64)},
        TypeError,
        "hidden_states: expected bfloat16, float16 or float32",
    ),
    ({"hidden_states": torch.zeros(T)}, ValueError, r"hidden_states: expected shape \(T, H\), got \(9,\)"),
    ({"top_k_index": IDS.float()}, TypeError, "top_k_index: expected an integer dtype, got torch.float32"),
    ({"top_k_index": IDS[:-1]}, ValueError, r"top_k_index: expected shape \(T, k\) with T = 9, got \(8, 2\)"),
    ({"top_k_weights": torch.zeros(T, K, dtype=F64)}, TypeError, "top_k_weights: expected bfloat16"),
    ({"top_k_weights": torch.zeros(T, 3)}, ValueError, r"top_k_weights: expected shape \(9, 2\), that of top_k_index"),
    ({"gate_up_proj": torch.zeros(E, 2 * I, H, dtype=BF16)}, TypeError, "gate_up_proj: expected torch.float32, that"),
    ({"gate_up_proj": torch.zeros(E, 2 * I, 7)}, ValueError, r"gate_up_proj: expected shape \(E, 2I, H\) with H = 6"),
    ({"gate_up_proj": torch.zeros(E, 9, H)}, ValueError, r"gate_up_proj: expected shape \(E, 2I, H\), an even 2I"),
    ({"is_transposed": True}, ValueError, r"gate_up_proj: expected shape \(E, H, 2I\) with H = 6, got \(4, 10, 6\)"),
    ({"down_proj": torch.zeros(E, H, I, dtype=BF16)}, TypeError, "down_proj: expected torch.float32"),
    ({"down_proj": torch.zeros(E, I, H)}, ValueError, r"down_proj: expected shape \(4, 6, 5\) to match gate_up_proj"),
    (
        {"gate_up_proj_bias": torch.zeros(E, I)},
        ValueError,
        r"gate_up_proj_bias: expected shape \(4, 10\), got \(4, 5\)",
    ),
    ({"down_proj_bias": torch.zeros(E, H, dtype=F64)}, TypeError, "down_proj_bias: expected bfloat16"),
    ({"down_proj_bias": torch.zeros(E, H, device="meta")}, ValueError, "down_proj_bias: expected on cpu, where"),
    ({"activation": "swish"}, ValueError, "activation: expected one of silu, gelu, .* got 'swish'"),
    ({"limit": -1.0}, ValueError, "limit: expected None or a number not below zero, got -1.0"),
    ({"limit": NAN}, ValueError, "limit: expected None or a number not below zero, got nan"),
    ({"has_gate": False, "activation": "swiglu_oai"}, ValueError, "activation: expected one that needs no gate"),
    ({"has_gate": False, "limit": 1.0}, ValueError, "limit: expected None with has_gate=False, got 1.0"),
    ({"block_size": [4, 4]}, ValueError, r"block_size: expected None, as the weights are not FP8, got \[4, 4\]"),
    (
        {"down_proj_scale": torch.ones(E, 2, 2)},
        ValueError,
        "down_proj_scale: expected None, as the weights are not FP8",
    ),
    (fp8_arguments(block_size=None), ValueError, r"block_size: expected \[bn, bk\] with FP8 weights, got None"),
    (fp8_arguments(block_size=4), TypeError, "block_size: expected a list of two ints, got 4"),
    (fp8_arguments(block_size=[4]), ValueError, r"block_size: expected two positive numbers \[bn, bk\], got \[4\]"),
    (fp8_arguments(down_proj_scale=None), ValueError, r"down_proj_scale: expected shape \(4, 2, 2\) with FP8"),
    (fp8_arguments(down_proj_scale=torch.ones(E, 2)), ValueError, r"down_proj_scale: expected shape \(4, 2, 2\), got"),
    (fp8_arguments(down_proj_scale=torch.ones(E, 2, 2, dtype=BF16)), TypeError, "down_proj_scale: expected float32"),
    (
        fp8_arguments(gate_up_proj=torch.zeros(E, H, 2 * I).to(torch.float8_e4m3fn), is_transposed=True)
        | {"down_proj": torch.zeros(E, I, H).to(torch.float8_e4m3fn)},
        ValueError,
        "is_transposed: expected False with FP8 weights, got True",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_wrong_input_is_named(experts, change, error, message):
    names = ("hidden_states", "top_k_index", "top_k_weights", "gate_up_proj", "down_proj")
    given = dict(zip(names, arguments(), strict=True))
    with pytest.raises(error, match=f"^{message}"):
        experts(**(given | change))


# ------------------------------------------------------------------------------------------- torch.compile and the rest


@pytest.mark.parametrize("fp8", [False, True])
def test_compiles_to_one_graph_forward_and_backward(experts, fp8):
    x, ids, routing, first, second = arguments()
    options = {}
    if fp8:
        given = fp8_arguments()
        first, second = given.pop("gate_up_proj"), given.pop("down_proj")
        options = given

    def step(function):
        leaf = x.clone().requires_grad_()
        out = function(leaf, ids, routing, first, second, **options)
        out.square().sum().backward()
        return out.detach(), leaf.grad

    assert all(torch.equal(a, b) for a, b in zip(step(experts), step(compiled(experts)), strict=True))


def test_strides_do_not_matter(experts):
    given = arguments()
    spread = [torch.stack((t, torch.full_like(t, 7)), -1)[..., 0] for t in given]
    assert not any(t.is_contiguous() for t in spread)
    torch.testing.assert_close(experts(*spread), experts(*given))


def test_builds_and_the_bundle_have_the_same_parameters() -> None:
    wanted = list(inspect.signature(ExpertsForward.__call__).parameters.values())[1:]
    for build in ("torch-universal", "torch-cuda"):
        tree = ast.parse((BUILDS / build / "experts.py").read_text())
        (function,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "experts_forward"]
        positional, named = function.args.args, function.args.kwonlyargs
        defaults = [ast.literal_eval(value) for value in function.args.kw_defaults]
        assert [a.arg for a in (*positional, *named)] == [p.name for p in wanted]
        assert defaults == [p.default for p in wanted if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("file", ["arguments.py", "_ops.py"])
def test_builds_check_arguments_alike(file):
    assert (BUILDS / "torch-cuda" / file).read_text() == (BUILDS / "torch-universal" / file).read_text()


@pytest.mark.parametrize(
    ("triton", "arch", "build"),
    [
        ("3.6.0", "9.0", "torch-cuda"),
        ("3.4.0", "8.0", "torch-cuda"),
        ("3.6.0", "12.0", "torch-cuda"),
        ("3.3.1", "9.0", "torch-universal"),
        (None, "9.0", "torch-universal"),
        ("3.6.0", "7.5", "torch-universal"),
    ],
)
def test_the_triton_build_is_for_gpus_from_capability_8_on(triton, arch, build):
    devices = tuple(device._replace(arch=arch) for device in H200.devices)
    host = replace(H200, devices=devices, packages={"triton": triton} if triton else {})
    assert kernel_loader.resolve("moe_experts", host=host).reference.chosen.name == build


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # where there are no tokens, nothing is launched
@pytest.mark.parametrize("mode", ["eager", "graph", "backward"])
def test_the_triton_build_is_right_over_the_grid(on_gpu, mode):
    assert kernel_loader.origin(kernel_loader.load_kernel("moe_experts")).variant == "torch-cuda"
    checked = check("moe_experts", device="cuda", modes=(mode,), processes=0)
    assert checked.failed == ()
    assert any(finding.status == "passed" for finding in checked.findings)


@pytest.mark.needs_cuda
def test_the_triton_build_compiles_to_one_graph(on_gpu):
    (plain, *_, fp8) = [entry.cases[0].name for entry in MOE_EXPERTS_GRID[:4]]
    names = [f"experts_forward/{name}" for name in (plain, "GPT-OSS", fp8)]
    assert check("moe_experts", device="cuda", modes=("compile",), only=names, processes=0).failed == ()


def on_device(dtype: torch.dtype = BF16, tokens: int = 700) -> list[Tensor]:
    """A problem with tall and short tiles, and half of the slots sentinels."""
    x = random(tokens, 256, dtype=dtype, seed=1)
    ids = torch.randint(0, 16, (tokens, 4), generator=torch.manual_seed(2))
    routing = random(tokens, 4, dtype=dtype, seed=3)
    first = random(8, 2 * 384, 256, dtype=dtype, scale=1 / 16, seed=4)
    second = random(8, 256, 384, dtype=dtype, scale=1 / 16, seed=5)
    return [t.cuda() for t in (x, ids, routing, first, second)]


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device_forward_or_backward(on_gpu):
    x, ids, routing, first, second = on_device()
    leaves = [t.requires_grad_() for t in (x, routing, first, second)]

    def step():
        return torch.autograd.grad(on_gpu(x, ids, routing, first, second).sum(), leaves)

    step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.needs_cuda
def test_the_same_call_gives_the_same_bits(on_gpu):
    x, ids, routing, first, second = on_device()
    leaves = [t.requires_grad_() for t in (x, routing, first, second)]

    def step():
        out = on_gpu(x, ids, routing, first, second)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    once = step()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(once, step(), strict=True))


@pytest.mark.needs_cuda
def test_float32_is_exact_unless_the_user_allows_tf32(on_gpu):
    given = on_device(F32)
    exact = [t.double() if t.is_floating_point() else t for t in given]
    want = torch.zeros_like(exact[0])
    x, ids, routing, first, second = exact
    for token, slot in (ids < 8).nonzero().tolist():
        gate, up = (first[ids[token, slot]] @ x[token]).chunk(2)
        want[token] += routing[token, slot] * (second[ids[token, slot]] @ silu(gate, up))

    def error():
        return ((on_gpu(*given).double() - want).norm() / want.norm()).item()

    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert error() < 1e-6
        torch.backends.cuda.matmul.allow_tf32 = True
        assert 1e-5 < error() < 5e-3  # two products of operands with 11 significant bits
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.needs_cuda
@pytest.mark.parametrize("tokens", [1, 40, 700])
def test_outputs_equal_those_of_transformers(on_gpu, tokens):
    moe = pytest.importorskip("transformers.integrations.moe")
    x, ids, routing, first, second = on_device(tokens=tokens)
    layer = torch.nn.Module()
    layer.num_experts, layer.has_gate, layer.has_bias, layer.is_transposed = 8, True, False, False
    layer.gate_up_proj, layer.down_proj, layer.act_fn = first, second, functional.silu
    layer._apply_gate = lambda z: moe._default_apply_gate(layer, z)
    want = moe.grouped_mm_experts_forward(layer, x, ids, routing)
    got = on_gpu(x, ids, routing, first, second)
    assert (got.float() - want.float()).norm() <= 0.01 * want.float().norm()  # one token may have sentinels alone


@pytest.mark.needs_cuda
def test_tensors_on_the_cpu_are_refused_by_name(on_gpu):
    with pytest.raises(ValueError, match="hidden_states: expected on a CUDA device, got cpu"):
        on_gpu(*arguments())


@pytest.mark.needs_cuda
def test_a_call_under_no_grad_and_one_that_learns_agree(on_gpu):
    given = on_device()
    with torch.no_grad():
        plain = on_gpu(*given)
    assert torch.equal(plain, on_gpu(given[0].requires_grad_(), *given[1:]).detach())


def test_autocast_changes_nothing(monkeypatch):
    """The dtypes are those that the bundle promises, as in compiled kernels, which know nothing of autocast."""
    monkeypatch.setenv("KERNEL_LOADER_DISABLE", "moe_experts")
    kernel = kernel_loader.load_kernel("moe_experts")
    x = torch.randn(5, 16, requires_grad=True)
    arguments = (torch.arange(10).view(5, 2) % 3, torch.rand(5, 2), torch.randn(3, 16, 16), torch.randn(3, 16, 8))
    plain = kernel.experts_forward(x, *arguments)
    (gradient,) = torch.autograd.grad(plain.sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = kernel.experts_forward(x, *arguments)
        (again,) = torch.autograd.grad(cast.sum(), x)
    assert torch.equal(cast, plain)
    assert torch.equal(again, gradient)
