"""The activation reference against the formulas in float64, written otherwise than there.

Sigmoids are written as tanh and tanh as a sigmoid; the normal distribution is erfc; halves are made by reshaping.
"""

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
    put_into,
    random,
)


def silu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(x / 2))


def gelu(x: Tensor) -> Tensor:
    return x / 2 * torch.erfc(-x / math.sqrt(2))


def gelu_tanh(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_quick(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(0.851 * x))


def gated(activation, *, gate=0):
    def formula(x: Tensor) -> Tensor:
        both = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
        return activation(both.select(-2, gate)) * both.select(-2, 1 - gate)

    return formula


def fatrelu_and_mul(threshold: float):
    return gated(lambda x: x * (x > threshold))


# function, layer, formula, whether it takes two halves
KERNELS = [
    pytest.param("silu_and_mul", "SiluAndMul", gated(silu), True, id="silu_and_mul"),
    pytest.param("mul_and_silu", "MulAndSilu", gated(silu, gate=1), True, id="mul_and_silu"),
    pytest.param("gelu_and_mul", "GeluAndMul", gated(gelu), True, id="gelu_and_mul"),
    pytest.param("gelu_tanh_and_mul", "GeluTanhAndMul", gated(gelu_tanh), True, id="gelu_tanh_and_mul"),
    pytest.param("fatrelu_and_mul", "FatreluAndMul", fatrelu_and_mul(0.0), True, id="fatrelu_and_mul"),
    pytest.param("gelu_fast", "FastGELU", gelu_tanh, False, id="gelu_fast"),
    pytest.param("gelu_new", "NewGELU", gelu_tanh, False, id="gelu_new"),
    pytest.param("gelu_quick", "QuickGELU", gelu_quick, False, id="gelu_quick"),
    pytest.param("gelu_tanh", "GeluTanh", gelu_tanh, False, id="gelu_tanh"),
    pytest.param("silu", "Silu", silu, False, id="silu"),
    pytest.param("gelu", "Gelu", gelu, False, id="gelu"),
]
each_kernel = pytest.mark.parametrize(("function", "layer", "formula", "halves"), KERNELS)
each_gated = pytest.mark.parametrize(("function", "layer", "formula", "halves"), [k for k in KERNELS if k.values[3]])
SHAPES = [(0, 8), (3, 0), (2,), (1, 2), (3, 14), (2, 3, 10), (257, 6)]

# 1 + erf and 1 + tanh cancel for large negative x, where float32 leaves this much of a result that is nearly 0.
CANCELLED = {F64: 1e-14, F32: 1e-5, BF16: 1e-5, F16: 1e-5}


@pytest.fixture
def activation(cpu_machine, monkeypatch):
    return load_reference("activation", monkeypatch)


def output_for(x: Tensor, halves: bool) -> Tensor:
    """Full of what no result is, so that an element which is left unwritten is seen."""
    return x.new_full((*x.shape[:-1], x.shape[-1] // 2) if halves else x.shape, math.nan)


# ---------------------------------------------------------------------------------------------------------- loading


def test_a_cpu_host_gets_the_reference_without_asking_for_it(cpu_machine):
    import kernel_loader

    assert is_shipped_reference(kernel_loader.load_kernel("activation"), "activation")


def test_the_bundle_has_what_the_published_kernel_exports(activation):
    assert {k.values[0] for k in KERNELS} | {"layers"} == {field.name for field in dataclasses.fields(type(activation))}


def test_every_layer_is_a_forward_without_a_state(activation):
    layers = layers_of(activation.layers)
    assert set(layers) == {k.values[1] for k in KERNELS}
    for layer in layers.values():
        assert members_of(layer) == FLAGS
        assert layer.can_torch_compile
        assert layer.has_backward
        assert list(inspect.signature(layer.forward).parameters) == ["self", "x"]


@each_kernel
def test_a_function_has_the_published_parameters(activation, function, layer, formula, halves):
    expected = ["out", "x", "threshold"] if function == "fatrelu_and_mul" else ["out", "x"]
    assert list(inspect.signature(getattr(activation, function)).parameters) == expected


# ----------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each_kernel
def test_function_and_layer_compute_the_formula(activation, function, layer, formula, halves, shape, dtype):
    x = random(*shape, dtype=dtype, scale=3)
    expected = formula(x.to(F64))
    out = output_for(x, halves)
    assert getattr(activation, function)(out, x) is out
    made = getattr(activation.layers, layer)()(x)
    for result in (out, made):
        assert result.dtype == dtype
        assert_near(result, expected, ulps=4, atol=CANCELLED[dtype])


@each_kernel
def test_any_strides_are_read(activation, function, layer, formula, halves):
    x = random(12, 5).T[:, ::2]
    assert not x.is_contiguous()
    out = output_for(x, halves)
    getattr(activation, function)(out, x)
    assert_near(out, formula(x), ulps=4, atol=1e-14)
    assert_near(getattr(activation.layers, layer)()(x), formula(x), ulps=4, atol=1e-14)


@each_kernel
def test_the_input_is_left_as_it_was(activation, function, layer, formula, halves):
    x = random(3, 8)
    before = x.clone()
    getattr(activation, function)(output_for(x, halves), x)
    getattr(activation.layers, layer)()(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("function", [k.values[0] for k in KERNELS if not k.values[3]])
def test_a_tensor_may_be_written_over_itself(activation, function):
    x = random(4, 6)
    expected = getattr(activation, function)(torch.empty_like(x), x)
    assert torch.equal(getattr(activation, function)(x, x), expected)


@each_gated
def test_a_gate_is_rounded_before_it_is_multiplied(activation, function, layer, formula, halves):
    x = random(64, 32, dtype=BF16)
    gate, up = x.chunk(2, dim=-1) if function != "mul_and_silu" else reversed(x.chunk(2, dim=-1))
    rounded = formula(torch.cat((gate, torch.ones_like(up)), -1).to(F64)).to(BF16)
    if function == "mul_and_silu":
        rounded = formula(torch.cat((torch.ones_like(up), gate), -1).to(F64)).to(BF16)
    once = formula(x.to(F64)).to(BF16)
    result = getattr(activation.layers, layer)()(x)
    assert torch.equal(result, rounded * up)
    assert torch.equal(once, rounded * up) == (function == "fatrelu_and_mul")  # whose gate is exact


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@each_kernel
def test_large_numbers_neither_overflow_nor_become_nan(activation, function, layer, formula, halves, dtype):
    x = torch.tensor([[-1e4, 1e4, 1.0, 1.0]], dtype=dtype, requires_grad=True)
    if function == "mul_and_silu":
        x = x.detach().roll(2, dims=-1).requires_grad_()
    y = getattr(activation.layers, layer)()(x)
    y.sum().backward()
    assert_near(y[:, :2], torch.tensor([[0.0, 1e4]], dtype=F64), ulps=1)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fatrelu_keeps_what_is_above_the_threshold_alone(activation, dtype):
    x = torch.tensor([[0.5, 0.25, 0.75, -1.0, 3.0, 3.0, 3.0, 3.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 0.0, 2.25, 0.0]], dtype=dtype)
    assert torch.equal(activation.fatrelu_and_mul(torch.empty_like(expected), x, 0.5), expected)
    assert torch.equal(activation.fatrelu_and_mul(torch.empty_like(expected), x, threshold=0.5), expected)


def test_fatrelu_does_not_round_its_threshold(activation):
    above = torch.tensor(0.1).to(BF16)  # 0.10009765625
    x = torch.stack((above, torch.ones_like(above)))
    assert activation.fatrelu_and_mul(x.new_empty(1), x, 0.1).item() == above.item()


def test_the_fatrelu_layer_reads_the_threshold_of_its_module(activation):
    model = put_into(nn.Identity(), activation.layers.FatreluAndMul)
    x = random(5, 8)
    assert_near(model(x), fatrelu_and_mul(0.0)(x))
    model.threshold = 0.5
    assert_near(model(x), fatrelu_and_mul(0.5)(x))


# -------------------------------------------------------------------------------------------------------- gradients


@each_kernel
def test_layers_have_a_gradient(activation, function, layer, formula, halves):
    x = random(3, 6).requires_grad_()
    assert torch.autograd.gradcheck(getattr(activation.layers, layer)(), (x,))


@each_kernel
def test_what_is_written_has_a_gradient(activation, function, layer, formula, halves):
    x = random(3, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: getattr(activation, function)(output_for(x.detach(), halves), x), (x,))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@each_kernel
def test_gradients_are_those_of_the_formula(activation, function, layer, formula, halves, dtype):
    x = random(4, 10, dtype=dtype)
    upstream = random(4, 5 if halves else 10, dtype=dtype, seed=1)
    narrow, wide = x.clone().requires_grad_(), x.to(F64).requires_grad_()
    (actual,) = torch.autograd.grad(getattr(activation.layers, layer)()(narrow), narrow, upstream)
    (expected,) = torch.autograd.grad(formula(wide), wide, upstream.to(F64))
    assert_near(actual, expected, ulps=4, atol=4 * torch.finfo(dtype).eps)


# ---------------------------------------------------------------------------------------------------------- compile


@each_kernel
def test_function_and_layer_compile_to_one_graph(activation, function, layer, formula, halves):
    x = random(3, 8, dtype=F32).requires_grad_()
    made = compiled(getattr(activation.layers, layer)())(x)
    assert_near(made, formula(x.to(F64)), ulps=8, atol=1e-5)
    (actual,) = torch.autograd.grad(made.sum(), x)
    wide = x.detach().to(F64).requires_grad_()
    (expected,) = torch.autograd.grad(formula(wide).sum(), wide)
    assert_near(actual, expected, ulps=8, atol=1e-5)

    out = output_for(x.detach(), halves)
    compiled(getattr(activation, function))(out, x.detach())
    assert_near(out, formula(x.detach().to(F64)), ulps=8, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- errors


@each_gated
@pytest.mark.parametrize("shape", [(), (3, 5)], ids=str)
def test_a_row_without_two_halves_is_refused(activation, function, layer, formula, halves, shape):
    x = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"x: expected shape \(\.\.\., 2 \* d\), got"):
        getattr(activation, function)(torch.zeros(shape), x)
    with pytest.raises(ValueError, match="x: expected shape"):
        getattr(activation.layers, layer)()(x)


@each_kernel
def test_an_output_of_another_shape_or_dtype_is_refused(activation, function, layer, formula, halves):
    x = random(1, 8, dtype=F32)
    out = output_for(x, halves)
    with pytest.raises(ValueError, match="out: expected shape"):
        getattr(activation, function)(out.expand(3, -1).clone(), x)
    with pytest.raises(TypeError, match=r"out: expected torch\.float32, which x has, got torch\.bfloat16"):
        getattr(activation, function)(out.to(BF16), x)
    with pytest.raises(ValueError, match="out: expected on cpu, where x is, got meta"):
        getattr(activation, function)(out.to("meta"), x)
