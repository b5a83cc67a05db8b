"""The rmsnorm reference against the formula in float64, written with vector norms instead of means."""

import dataclasses
import inspect
import math

import pytest
import torch
from torch import Tensor, nn

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
    module_of,
    put_into,
    random,
)

EPS = 1e-5
SHAPES = [(0, 8), (7,), (1, 1), (1, 16), (3, 5), (2, 3, 129), (2, 0, 4)]


def reciprocal(x: Tensor, eps: float = EPS) -> Tensor:
    """1 / sqrt(mean(x ** 2) + eps), (..., H) -> (...)."""
    norm = torch.linalg.vector_norm(x, dim=-1)
    return math.sqrt(x.shape[-1]) / torch.hypot(norm, torch.full_like(norm, math.sqrt(x.shape[-1] * eps)))


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return torch.einsum("...h,...,h->...h", x, reciprocal(x, eps), weight)


class Norm(nn.Module):
    """A model's own norm, whose forward is taken away."""

    def __init__(self, weight: Tensor, eps: float = EPS) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight), eps


@pytest.fixture
def rmsnorm(cpu_machine, monkeypatch):
    return load_reference("rmsnorm", monkeypatch)


def test_the_kernel_loads_as_its_reference(rmsnorm):
    assert is_shipped_reference(rmsnorm, "rmsnorm")
    assert {field.name for field in dataclasses.fields(type(rmsnorm))} == {
        "layers",
        "apply_rms_norm",
        "apply_rms_norm_backward",
    }


def test_the_published_signatures_are_kept(rmsnorm):
    backward = inspect.signature(rmsnorm.apply_rms_norm_backward).parameters
    assert list(backward) == [
        "grad_output", "input", "weight", "output", "rstd", "eps", "input_requires_grad", "weight_requires_grad",
    ]  # fmt: skip
    assert list(inspect.signature(rmsnorm.apply_rms_norm).parameters) == ["input", "weight", "eps"]


def test_the_layer_is_a_forward_without_a_state(rmsnorm):
    assert layers_of(rmsnorm.layers) == {"RMSNorm": rmsnorm.layers.RMSNorm}
    layer = rmsnorm.layers.RMSNorm
    assert members_of(layer) == FLAGS
    assert layer.can_torch_compile
    assert layer.has_backward
    assert list(inspect.signature(layer.forward).parameters) == ["self", "hidden_states"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_functions_and_layer_compute_the_formula(rmsnorm, shape, dtype):
    x, weight = random(*shape, dtype=dtype, scale=3), random(shape[-1], dtype=dtype, seed=1)
    expected = norm(x.to(F64), weight.to(F64))
    output, rstd = module_of(rmsnorm).apply_rms_norm_forward(x, weight, EPS)
    layer = put_into(Norm(weight), rmsnorm.layers.RMSNorm)
    for result in (output, rmsnorm.apply_rms_norm(x, weight, EPS), layer(x)):
        assert result.dtype == dtype
        assert_near(result, expected, ulps=4)
    assert rstd.dtype == (F64 if dtype == F64 else F32)
    assert_near(rstd, reciprocal(x.to(F64)), ulps=4)


def test_epsilon_keeps_a_row_of_zeros_at_zero(rmsnorm):
    x = torch.zeros(2, 8)
    assert torch.equal(rmsnorm.apply_rms_norm(x, torch.ones(8), EPS), x)


def test_epsilon_is_under_the_root(rmsnorm):
    x = torch.full((1, 4), 3.0, dtype=F64)
    assert_near(rmsnorm.apply_rms_norm(x, torch.ones(4, dtype=F64), 16.0), torch.full((1, 4), 0.6, dtype=F64))


def test_squares_of_half_precision_do_not_overflow(rmsnorm):
    x = torch.tensor([[6e4, -6e4]], dtype=F16)
    assert torch.equal(rmsnorm.apply_rms_norm(x, torch.ones(2, dtype=F16), EPS), torch.tensor([[1.0, -1.0]]).to(F16))


def test_what_the_weight_multiplies_is_rounded_first(rmsnorm):
    x = torch.tensor([1.0, 7.0], dtype=BF16).repeat(128)  # of root mean square 5
    weight = (1 + torch.arange(256) / 128).to(BF16)
    exact = torch.tensor([0.2, 1.4], dtype=F64).repeat(128)
    result = rmsnorm.apply_rms_norm(x, weight, 0.0)
    assert torch.equal(result, exact.to(BF16) * weight)
    assert not torch.equal(result, (exact * weight.to(F64)).to(BF16))


def test_a_wider_weight_widens_the_output(rmsnorm):
    x, weight = random(3, 8, dtype=BF16), random(8, dtype=F32, seed=1)
    result = rmsnorm.apply_rms_norm(x, weight, EPS)
    assert result.dtype == F32
    rounded = norm(x.to(F64), torch.ones(8, dtype=F64)).to(BF16)
    assert torch.equal(result, rounded * weight)


def test_any_strides_are_read(rmsnorm):
    x, weight = random(8, 6).T[:, ::2], random(8, seed=1)[::2]
    assert_near(rmsnorm.apply_rms_norm(x, weight, EPS), norm(x, weight), ulps=8)


def test_the_layer_has_a_gradient(rmsnorm):
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, x)

    layer = put_into(Norm(random(5, seed=1)), rmsnorm.layers.RMSNorm)
    assert torch.autograd.gradcheck(run, (random(2, 3, 5).requires_grad_(), random(5, seed=1).requires_grad_()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_backward_gives_the_gradients_of_the_formula(rmsnorm, shape, dtype):
    x, weight, upstream = (
        random(*s, dtype=dtype, seed=seed) for seed, s in enumerate((shape, shape[-1:], shape), start=2)
    )
    output, rstd = module_of(rmsnorm).apply_rms_norm_forward(x, weight, EPS)
    to_x, to_weight = rmsnorm.apply_rms_norm_backward(upstream, x, weight, output, rstd, EPS)
    wide_x, wide_weight = x.to(F64).requires_grad_(), weight.to(F64).requires_grad_()
    expected = torch.autograd.grad(norm(wide_x, wide_weight), (wide_x, wide_weight), upstream.to(F64))
    for actual, want in zip((to_x, to_weight), expected, strict=True):
        assert actual.dtype == dtype
        # Terms of either sign are added, so that an error is in proportion to them and not to their sum.
        assert_near(actual, want, ulps=4, atol=8 * torch.finfo(dtype).eps)


def test_only_the_gradients_that_are_asked_for_are_made(rmsnorm):
    x, weight, upstream = random(3, 5), random(5, seed=1), random(3, 5, seed=2)
    output, rstd = module_of(rmsnorm).apply_rms_norm_forward(x, weight, EPS)
    arguments = (upstream, x, weight, output, rstd, EPS)
    to_x, to_weight = rmsnorm.apply_rms_norm_backward(*arguments)
    only_x = rmsnorm.apply_rms_norm_backward(*arguments, weight_requires_grad=False)
    only_weight = rmsnorm.apply_rms_norm_backward(*arguments, input_requires_grad=False)
    assert torch.equal(only_x[0], to_x)
    assert only_x[1] is None
    assert only_weight[0] is None
    assert torch.equal(only_weight[1], to_weight)


def test_functions_and_layer_compile_to_one_graph(rmsnorm):
    x, weight = random(3, 8, dtype=F32).requires_grad_(), random(8, dtype=F32, seed=1)
    output = compiled(put_into(Norm(weight), rmsnorm.layers.RMSNorm))(x)
    wide = x.detach().to(F64).requires_grad_()
    expected = norm(wide, weight.to(F64))
    assert_near(output, expected, ulps=8)
    upstream = random(3, 8, dtype=F32, seed=2)
    (to_x,) = torch.autograd.grad(output, x, upstream)
    (want,) = torch.autograd.grad(expected, wide, upstream.to(F64))
    assert_near(to_x, want, ulps=8, atol=1e-6)

    x = x.detach()
    output, rstd = compiled(module_of(rmsnorm).apply_rms_norm_forward)(x, weight, EPS)
    assert_near(output, expected.detach(), ulps=8)
    to_x, _ = compiled(rmsnorm.apply_rms_norm_backward)(upstream, x, weight, output, rstd, EPS)
    assert_near(to_x, want, ulps=8, atol=1e-6)
