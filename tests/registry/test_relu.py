"""The relu reference against the larger of x and zero."""

import inspect

import pytest
import torch

from tests.registry.references import (
    BF16,
    DTYPES,
    F32,
    F64,
    FLAGS,
    compiled,
    is_shipped_reference,
    layers_of,
    load_reference,
    members_of,
    random,
)

SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 129)]


@pytest.fixture
def kernel(cpu_machine, monkeypatch):
    return load_reference("relu", monkeypatch)


def test_the_kernel_loads_as_its_reference(kernel):
    assert is_shipped_reference(kernel, "relu")


def test_the_published_signatures_are_kept(kernel):
    function = inspect.signature(kernel.relu).parameters
    assert list(function) == ["x", "out"]
    assert function["out"].default is None
    assert list(inspect.signature(kernel.layers.ReLU.forward).parameters) == ["self", "x"]


def test_the_layer_is_a_forward_without_a_state(kernel):
    assert layers_of(kernel.layers) == {"ReLU": kernel.layers.ReLU}
    assert members_of(kernel.layers.ReLU) == FLAGS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_function_and_layer_give_the_larger_of_x_and_zero(kernel, shape, dtype):
    x = random(*shape, dtype=dtype)
    expected = torch.maximum(x, torch.zeros_like(x))
    out = torch.full_like(x, torch.nan)
    assert kernel.relu(x, out) is out
    for result in (kernel.relu(x), kernel.layers.ReLU()(x), out):
        assert result.dtype == dtype
        assert torch.equal(result, expected)


def test_nan_and_negative_zero_give_zero(kernel):
    result = kernel.relu(torch.tensor([torch.nan, -0.0, torch.inf, -torch.inf]))
    assert torch.equal(result, torch.tensor([0.0, 0.0, torch.inf, 0.0]))
    assert not result.signbit().any()


def test_any_strides_are_read_and_written(kernel):
    x, out = random(6, 8).T[::2], torch.zeros(8, 12, dtype=F64)
    kernel.relu(x, out[::2, 1::2])
    assert torch.equal(out[::2, 1::2], x.clamp(min=0))
    assert not out[1::2].any()
    assert not out[:, ::2].any()


def test_x_may_be_written_over(kernel):
    x = random(3, 5)
    expected = x.clamp(min=0)
    assert kernel.relu(x, x) is x
    assert torch.equal(x, expected)


def test_the_gradient_is_that_of_what_is_kept(kernel):
    x = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(kernel.layers.ReLU()(x), x, torch.tensor([3.0, 4.0, 5.0]))
    assert torch.equal(gradient, torch.tensor([0.0, 0.0, 5.0]))


def test_function_and_layer_compile_to_one_graph(kernel):
    x = random(3, 8, dtype=F32)
    assert torch.equal(compiled(kernel.relu)(x), x.clamp(min=0))
    assert torch.equal(compiled(kernel.layers.ReLU())(x), x.clamp(min=0))
    out = torch.empty_like(x)
    compiled(kernel.relu)(x, out)
    assert torch.equal(out, x.clamp(min=0))


def test_whole_numbers_are_refused(kernel):
    with pytest.raises(TypeError, match=r"x: expected a float dtype, got torch\.int64"):
        kernel.relu(torch.ones(2, dtype=torch.int64))


def test_an_output_unlike_x_is_refused(kernel):
    x = random(1, 4, dtype=F32)
    with pytest.raises(ValueError, match=r"out: expected shape \(1, 4\), got \(3, 4\)"):
        kernel.relu(x, torch.empty(3, 4))
    with pytest.raises(TypeError, match=r"out: expected torch\.float32, which x has, got torch\.bfloat16"):
        kernel.relu(x, x.to(BF16))
    with pytest.raises(ValueError, match="out: expected on cpu, where x is, got meta"):
        kernel.relu(x, x.to("meta"))
