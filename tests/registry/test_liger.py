"""The liger reference against torch's own losses and norms, and formulas written otherwise, in float64."""

import inspect
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.registry.references import (
    BF16,
    DTYPES,
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

EPS = 1e-5
MLPS = ["LigerSwiGLUMLP", "LigerGEGLUMLP", "LigerTiledSwiGLUMLP", "LigerTiledGEGLUMLP"]
each_mlp = pytest.mark.parametrize("name", MLPS)


class Norm(nn.Module):
    """A model's own norm, whose forward is taken away."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight), EPS


class MLP(nn.Module):
    """A model's own gated MLP, (..., hidden) -> (..., hidden), whose forward is taken away."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False, dtype=dtype) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False, dtype=dtype)
        for seed, weight in enumerate(self.parameters()):
            weight.data = random(*weight.shape, dtype=dtype, seed=seed)


def gate(name: str, x: Tensor) -> Tensor:
    """silu by an exponential, or gelu_tanh with 1 + tanh(u) = 2 / (1 + exp(-2 * u))."""
    u = x if "SwiGLU" in name else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x / (1 + torch.exp(-u))


def turned(x: Tensor, angles: Tensor, sign: float = 1.0) -> Tensor:
    """Heads (B, heads, T, D) turned by angles (B, T, D / 2), as complex numbers."""
    half = x.shape[-1] // 2
    pairs = torch.complex(x[..., :half].to(F64), x[..., half:].to(F64)) * torch.exp(sign * 1j * angles.unsqueeze(1))
    return torch.cat((pairs.real, pairs.imag), dim=-1)


@pytest.fixture
def liger(cpu_machine, monkeypatch):
    return load_reference("liger", monkeypatch)


@pytest.fixture(params=["function", "layer"])
def rotary(liger, request):
    return liger.liger_rotary_pos_emb if request.param == "function" else liger.layers.liger_rotary_pos_emb_layer()


@pytest.fixture(params=["function", "layer"])
def loss(liger, request):
    return liger.LigerForCausalLMLoss if request.param == "function" else liger.layers.LigerForCausalLMLossLayer()


def test_the_kernel_loads_as_its_reference(liger):
    assert is_shipped_reference(liger, "liger-kernels")


def test_layers_are_forwards_without_a_state(liger):
    layers = layers_of(liger.layers)
    assert set(layers) == {
        "LigerRMSNorm", "LigerLinear", *MLPS, "liger_rotary_pos_emb_layer", "LigerForCausalLMLossLayer",
    }  # fmt: skip
    for layer in layers.values():
        assert members_of(layer) == FLAGS
        assert layer.can_torch_compile
        assert layer.has_backward


def test_the_published_signatures_are_kept(liger):
    def parameters(function):
        return {name: p.default for name, p in inspect.signature(function).parameters.items() if name != "self"}

    empty = inspect.Parameter.empty
    assert parameters(liger.LigerForCausalLMLoss) == parameters(liger.layers.LigerForCausalLMLossLayer.forward) == {
        "logits": empty, "labels": empty, "vocab_size": empty, "num_items_in_batch": None, "ignore_index": -100,
        "shift_labels": None, "hidden_states": None, "lm_head_weight": None, "lm_head_bias": None, "kwargs": empty,
    }  # fmt: skip
    assert parameters(liger.liger_rotary_pos_emb) == parameters(liger.layers.liger_rotary_pos_emb_layer.forward)
    assert parameters(liger.liger_rotary_pos_emb) == {
        "q": empty, "k": empty, "cos": empty, "sin": empty, "unsqueeze_dim": 1,
    }  # fmt: skip
    assert list(parameters(liger.layers.LigerRMSNorm.forward)) == ["hidden_states"]
    assert list(parameters(liger.layers.LigerLinear.forward)) == ["input"]
    assert all(list(parameters(getattr(liger.layers, name).forward)) == ["x"] for name in MLPS)
    assert liger.LigerForCausalLMLoss.can_torch_compile
    assert liger.liger_rotary_pos_emb.can_torch_compile


# ------------------------------------------------------------------------------------------------------------- norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (7,), (1, 1), (2, 3, 129)], ids=str)
def test_the_norm_is_that_of_torch(liger, shape, dtype):
    x, weight = random(*shape, dtype=dtype, scale=3), random(shape[-1], dtype=dtype, seed=1)
    result = put_into(Norm(weight), liger.layers.LigerRMSNorm)(x)
    assert result.dtype == dtype
    assert_near(result, functional.rms_norm(x.to(F64), shape[-1:], weight.to(F64), EPS), ulps=4)


def test_what_the_weight_multiplies_is_rounded_and_the_result_has_the_dtype_of_x(liger):
    x = torch.tensor([1.0, 7.0], dtype=BF16).repeat(128)  # of root mean square 5
    weight = 1 + torch.arange(256) / 128
    module = put_into(Norm(weight), liger.layers.LigerRMSNorm)
    module.variance_epsilon = 0.0
    exact = torch.tensor([0.2, 1.4], dtype=F64).repeat(128)
    assert torch.equal(module(x), (exact.to(BF16) * weight).to(BF16))
    assert not torch.equal(module(x), (exact * weight.to(F64)).to(BF16))


def test_the_norm_has_a_gradient(liger):
    module = put_into(Norm(random(5, seed=1)), liger.layers.LigerRMSNorm)

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(module, {"weight": weight}, x)

    assert torch.autograd.gradcheck(run, (random(2, 3, 5).requires_grad_(), random(5, seed=1).requires_grad_()))


def test_a_weight_of_another_width_is_refused(liger):
    with pytest.raises(ValueError, match=r"weight: expected shape \(8,\), got \(1,\)"):
        put_into(Norm(torch.ones(1)), liger.layers.LigerRMSNorm)(torch.ones(2, 8))


# ----------------------------------------------------------------------------------------------- linear, gated MLPs


@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_layer_multiplies_and_adds(liger, bias):
    module = nn.Linear(5, 3, bias=bias, dtype=F64)
    x = random(2, 4, 5).requires_grad_()
    expected = torch.einsum("btk,nk->btn", x, module.weight) + (module.bias if bias else 0)
    result = put_into(module, liger.layers.LigerLinear)(x)
    assert_near(result, expected, ulps=8, atol=1e-14)
    assert torch.autograd.gradcheck(module, (x,))


@pytest.mark.parametrize("dtype", DTYPES)
@each_mlp
def test_mlps_gate_what_goes_up(liger, name, dtype):
    module = MLP(4, 7, dtype)
    module.down_proj = nn.Identity()
    x = random(2, 5, 4, dtype=dtype, scale=3)
    opened, up = module.gate_proj(x).detach().to(F64), module.up_proj(x).detach().to(F64)
    result = put_into(module, getattr(liger.layers, name))(x)
    assert result.dtype == dtype
    assert_near(result, gate(name, opened) * up, ulps=4, atol=1e-14 if dtype == F64 else 1e-4)


@each_mlp
def test_mlps_have_a_gradient(liger, name):
    module = put_into(MLP(3, 4, F64), getattr(liger.layers, name))
    weights = dict(module.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(weights, values, strict=True)), x)

    inputs = (random(2, 3, seed=9), *(weight.detach().clone() for weight in weights.values()))
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


# ----------------------------------------------------------------------------------------------------------- rotary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(2, 4, 2, 5, 8), (1, 3, 1, 1, 2), (1, 2, 2, 0, 4)], ids=str)
def test_queries_and_keys_are_turned(rotary, sizes, dtype):
    batch, heads, key_heads, tokens, width = sizes
    q, k = (random(batch, n, tokens, width, dtype=dtype, seed=n) for n in (heads, key_heads))
    angles = random(batch, tokens, width // 2, scale=3, seed=7)
    cos, sin = angles.cos(), angles.sin()
    results = rotary(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for x, result in zip((q, k), results, strict=True):
        assert result.dtype == dtype
        assert_near(result, turned(x, angles), ulps=1, atol=16 * torch.finfo(F64 if dtype == F64 else F32).eps)


def test_right_halves_of_the_tables_are_not_read(rotary):
    q, k, angles = random(1, 2, 3, 4), random(1, 1, 3, 4, seed=1), random(1, 3, 2, seed=2)
    nothing = torch.full_like(angles, torch.nan)
    expected = rotary(q, k, angles.cos(), angles.sin())
    results = rotary(q, k, torch.cat((angles.cos(), nothing), -1), torch.cat((angles.sin(), nothing), -1))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_one_table_serves_all_sequences_and_heads_may_come_after_tokens(rotary):
    q, k, angles = random(2, 3, 4, 8), random(2, 1, 4, 8, seed=1), random(1, 4, 4, seed=2)
    results = rotary(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin(), unsqueeze_dim=2)
    for x, result in zip((q, k), results, strict=True):
        assert_near(result.transpose(1, 2), turned(x, angles), atol=1e-14)


def test_the_inputs_are_left_as_they_were(rotary):
    q, k, angles = random(1, 3, 2, 4).transpose(1, 2), random(1, 2, 1, 4), random(1, 3, 2)
    before = q.clone(), k.clone()
    rotary(q, k[:, :, :1].expand(1, 2, 3, 4), angles.cos(), angles.sin())
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_the_gradient_turns_back(rotary):
    q, k, angles = random(1, 2, 3, 4).requires_grad_(), random(1, 1, 3, 4, seed=1), random(1, 3, 2, seed=2)
    upstream = random(1, 2, 3, 4, seed=3)
    (to_q,) = torch.autograd.grad(rotary(q, k, angles.cos(), angles.sin())[0], q, upstream)
    assert_near(to_q, turned(upstream, angles, -1.0), atol=1e-14)


def test_heads_and_tables_of_other_widths_are_refused(rotary):
    table = random(1, 2, 4)
    with pytest.raises(ValueError, match=r"k: expected shape \(\.\.\., D\) with D even, got \(1, 1, 2, 7\)"):
        rotary(random(1, 1, 2, 8), random(1, 1, 2, 7), table, table)
    with pytest.raises(ValueError, match="sin: expected last dimension 8 or 4, got 3"):
        rotary(random(1, 1, 2, 8), random(1, 1, 2, 8), table, table[..., :3])


# ------------------------------------------------------------------------------------------------------------- loss


def problem(*lead: int, classes=7, hidden=4, dtype=F64, ignored=0.3):
    """Labels, and the rest of what the loss takes by name."""
    labels = torch.randint(classes, lead, generator=torch.Generator().manual_seed(0))
    labels[random(*lead, seed=5).abs() < ignored] = -100
    return labels, {
        "hidden_states": random(*lead, hidden, dtype=dtype),
        "lm_head_weight": random(classes, hidden, dtype=dtype, seed=1),
        "hidden_size": hidden,
    }


def logits_of(given) -> Tensor:
    """All logits, (tokens, V), in float64."""
    bias = given.get("lm_head_bias")
    product = given["hidden_states"].to(F64).flatten(0, -2) @ given["lm_head_weight"].to(F64).T
    return product if bias is None else product + bias.to(F64)


def next_ones(labels: Tensor) -> Tensor:
    """The labels of each token, (tokens,)."""
    return torch.cat((labels[..., 1:], torch.full_like(labels[..., :1], -100)), -1).flatten()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_loss_is_the_cross_entropy_of_the_next_tokens(loss, dtype):
    labels, given = problem(2, 9, dtype=dtype)
    result = loss(None, labels, 7, **given)
    assert result.dtype == (F64 if dtype == F64 else F32)
    assert_near(result, functional.cross_entropy(logits_of(given), next_ones(labels)), ulps=8)


def test_a_sum_is_divided_by_the_number_of_items(loss):
    labels, given = problem(2, 9)
    expected = functional.cross_entropy(logits_of(given), next_ones(labels), reduction="sum") / 5
    assert_near(loss(None, labels, 7, 5, **given), expected, ulps=8)
    assert_near(loss(None, labels, 7, torch.tensor(5), **given), expected, ulps=8)


def test_shifted_labels_are_taken_as_they_are_and_another_label_may_be_ignored(loss):
    labels, given = problem(3, 5, ignored=0.0)
    expected = functional.cross_entropy(logits_of(given), labels.flatten(), ignore_index=2)
    assert_near(loss(None, None, 7, ignore_index=2, shift_labels=labels, **given), expected, ulps=8)


def test_a_bias_weights_of_classes_and_smoothed_labels_are_those_of_torch(loss):
    labels, given = problem(2, 9)
    given["lm_head_bias"], weights = random(7, seed=2), random(7, seed=3).exp()
    further = {"ce_weight": weights, "label_smoothing": 0.2}
    terms = {"weight": weights, "label_smoothing": 0.2}
    logits, target = logits_of(given), next_ones(labels)
    assert_near(loss(None, labels, 7, **given, **further), functional.cross_entropy(logits, target, **terms), ulps=16)
    expected = functional.cross_entropy(logits, target, **terms, reduction="sum") / 3
    assert_near(loss(None, labels, 7, 3, **given, **further), expected, ulps=16)


def test_logits_are_capped_the_normaliser_is_squared_and_tokens_are_scaled(loss):
    labels, given = problem(2, 9)
    logits, target = 1.5 * torch.tanh(logits_of(given) / 1.5), next_ones(labels)
    each = functional.cross_entropy(logits, target, reduction="none")
    counts = target != -100
    assert_near(loss(None, labels, 7, **given, final_logit_softcapping=1.5), each[counts].mean(), ulps=8)
    squares = logits.logsumexp(1)[counts].square() * 0.3
    more = {"final_logit_softcapping": 1.5, "lse_square_scale": 0.3}
    assert_near(loss(None, labels, 7, **given, **more), (each[counts] + squares).mean(), ulps=8)
    scaled = (each[counts] + squares) * (-each[counts]).exp()
    assert_near(loss(None, labels, 7, **given, **more, use_token_scaling=True), scaled.mean(), ulps=8)


def test_no_gradient_goes_through_the_scaling(loss):
    labels, given = problem(2, 5)
    states = given["hidden_states"].requires_grad_()
    (actual,) = torch.autograd.grad(loss(None, labels, 7, **given, use_token_scaling=True), states)
    target = next_ones(labels)
    each = functional.cross_entropy(logits_of(given), target, reduction="none")
    (expected,) = torch.autograd.grad((each * (-each).exp().detach())[target != -100].mean(), states)
    assert_near(actual, expected, atol=1e-14)


@pytest.mark.parametrize("lead", [(2, 0), (0, 3), (2, 4)], ids=str)
def test_without_a_token_that_counts_loss_and_gradients_are_zero(loss, lead):
    labels, given = problem(*lead, ignored=99.0)
    leaves = [given[name].requires_grad_() for name in ("hidden_states", "lm_head_weight")]
    result = loss(None, labels, 7, **given, ce_weight=torch.ones(7), label_smoothing=0.1, lse_square_scale=0.1)
    assert result.item() == 0
    for gradient in torch.autograd.grad(result, leaves):
        assert not gradient.any()


def test_tokens_are_added_up_over_blocks(loss):
    labels, given = problem(1, 1030, classes=3, hidden=2)
    leaves = [given[name].requires_grad_() for name in ("hidden_states", "lm_head_weight")]
    result, expected = (
        loss(None, labels, 3, **given),
        functional.cross_entropy(logits_of(given), next_ones(labels)),
    )
    assert_near(result, expected, ulps=64)
    for got, want in zip(torch.autograd.grad(result, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert_near(got, want, atol=1e-14)


def test_logits_of_all_tokens_are_never_kept(liger):
    labels, given = problem(1, 2048, classes=64, hidden=2, dtype=F32)
    given["hidden_states"].requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        liger.LigerForCausalLMLoss(None, labels, 64, **given)
    assert max(kept, default=0) < 512 * 64


def test_the_loss_has_a_gradient(loss):
    labels, given = problem(1, 4)
    weights = random(7, seed=3).exp()

    def run(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        further = {
            "ce_weight": weights,
            "label_smoothing": 0.1,
            "lse_square_scale": 0.2,
            "final_logit_softcapping": 2.0,
        }
        head = {"hidden_states": states, "lm_head_weight": weight, "lm_head_bias": bias, "hidden_size": 4}
        return loss(None, labels, 7, **head, **further)

    inputs = given["hidden_states"], given["lm_head_weight"], random(7, seed=2)
    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in inputs])


def test_what_models_pass_besides_is_not_looked_at(loss):
    labels, given = problem(2, 9)
    expected = loss(None, labels, 7, **given)
    assert torch.equal(loss(torch.ones(1), labels, -1, **given, accum_dtype=F32, nonsense=1), expected)


def test_what_is_needed_must_be_there(loss):
    labels, given = problem(2, 3)
    for name in given:
        with pytest.raises(ValueError, match="hidden_states, lm_head_weight and hidden_size: expected all of them"):
            loss(None, labels, 7, **{key: value for key, value in given.items() if key != name})
    with pytest.raises(ValueError, match="return_z_loss: expected False"):
        loss(None, labels, 7, **given, return_z_loss=True)


def test_arguments_that_do_not_belong_together_are_refused(loss):
    labels, given = problem(2, 3)

    def refused(error, message, labels=labels, **changes):
        with pytest.raises(error, match=message):
            loss(None, labels, 7, **(given | changes))

    refused(
        TypeError, r"hidden_states: expected a float dtype, got torch\.int64", hidden_states=torch.ones(2, 3, 4).long()
    )
    refused(TypeError, r"labels: expected torch\.int64, got torch\.int32", labels=labels.int())
    refused(TypeError, r"lm_head_weight: expected torch\.float64, which hidden_states have, got torch\.float16",
            lm_head_weight=torch.ones(7, 4, dtype=F16))  # fmt: skip
    refused(TypeError, r"ce_weight: expected a float dtype, got torch\.int64", ce_weight=torch.ones(7).long())
    refused(ValueError, r"hidden_states: expected shape \(\.\.\., 8\), got \(2, 3, 4\)", hidden_size=8)
    refused(ValueError, r"labels: expected shape \(2, 3\), got \(1, 3\)", labels=labels[:1])
    refused(ValueError, r"shift_labels: expected shape \(2, 3\), got \(2, 1\)", shift_labels=labels[:, :1])
    refused(ValueError, r"lm_head_weight: expected shape \(V, 4\), got \(7, 1\)", lm_head_weight=random(7, 1))
    refused(ValueError, r"lm_head_bias: expected shape \(7,\), got \(1,\)", lm_head_bias=random(1))


# ---------------------------------------------------------------------------------------------------------- compile


def test_layers_compile_to_one_graph(liger):
    x = random(3, 4, dtype=F32)
    modules = [
        put_into(Norm(random(4, dtype=F32)), liger.layers.LigerRMSNorm),
        put_into(nn.Linear(4, 3), liger.layers.LigerLinear),
        put_into(MLP(4, 5, F32), liger.layers.LigerTiledSwiGLUMLP),
        put_into(MLP(4, 5, F32), liger.layers.LigerTiledGEGLUMLP),
    ]
    for module in modules:
        torch.testing.assert_close(compiled(module)(x), module(x))


def test_functions_compile_to_one_graph_with_their_gradients(liger):
    q, angles = random(1, 2, 3, 4, dtype=F32), random(1, 3, 2, seed=1)
    made = compiled(liger.liger_rotary_pos_emb)(q, q, angles.cos().to(F32), angles.sin().to(F32))
    assert_near(made[0], turned(q, angles), atol=1e-6)
    labels, given = problem(2, 5, dtype=F32)
    leaves = [given[name].requires_grad_() for name in ("hidden_states", "lm_head_weight")]
    made = compiled(liger.LigerForCausalLMLoss)(None, labels, 7, **given, label_smoothing=0.1)
    expected = liger.LigerForCausalLMLoss(None, labels, 7, **given, label_smoothing=0.1)
    torch.testing.assert_close(made, expected)
    for got, want in zip(torch.autograd.grad(made, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_of_blocks_are_added_up_before_they_are_rounded(liger):
    labels = torch.zeros(1, 131_072, dtype=torch.int64)
    hidden = (random(1, 131_072, 4) + 1).to(BF16)
    leaves = [torch.zeros(8, 4, dtype=BF16).requires_grad_(), torch.zeros(8, dtype=BF16).requires_grad_()]
    made = liger.LigerForCausalLMLoss(
        None, labels, 8, hidden_states=hidden, lm_head_weight=leaves[0], lm_head_bias=leaves[1], hidden_size=4
    )
    wide = [x.detach().to(F64).requires_grad_() for x in leaves]
    logits = hidden[0, :-1].to(F64) @ wide[0].T + wide[1]
    expected = functional.cross_entropy(logits, labels[0, 1:])
    for got, want in zip(torch.autograd.grad(made, leaves), torch.autograd.grad(expected, wide), strict=True):
        assert_near(got, want, ulps=1)
