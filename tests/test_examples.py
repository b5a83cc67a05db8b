"""The examples do what they say."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import kernel_loader
from kernel_loader import LocalLayerRepository, Mode
from kernel_loader.quantization import dequantize_block_fp8
from tests.builds import write_build

pytestmark = pytest.mark.usefixtures("cpu_machine")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def layers():
    spec = importlib.util.spec_from_file_location("fp8_layers", EXAMPLES / "fp8_layers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def real(codes, scale):
    return dequantize_block_fp8(codes, scale, [128, 128], torch.float64)


def test_adapters_learn_on_frozen_fp8_weights(layers):
    before, after = layers.main(steps=30)
    assert after < before / 4


@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_layer_is_near_its_weights_and_passes_their_gradient(layers, bias):
    torch.manual_seed(0)
    layer = layers.FP8Linear(nn.Linear(200, 72, bias=bias))
    x = torch.randn(2, 3, 200, requires_grad=True)
    weight = real(layer.weight, layer.weight_scale_inv)
    y = layer(x)
    wanted = x.double() @ weight.T + (layer.bias.double() if bias else 0)
    assert (y - wanted).norm() < 0.05 * wanted.norm()
    upstream = torch.randn_like(y)
    y.backward(upstream)
    torch.testing.assert_close(x.grad.double(), upstream.double() @ weight, rtol=1e-4, atol=1e-5)
    assert set(dict(layer.named_parameters())) == ({"bias"} if bias else set())


def test_the_experts_add_what_each_makes_and_nothing_for_sentinels(layers):
    torch.manual_seed(0)
    experts = layers.FP8Experts(torch.randn(2, 64, 128) / 8, torch.randn(2, 128, 32) / 8)
    x = torch.randn(5, 128, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 2], [1, 0]])
    weights = torch.rand(5, 2)
    weights[index == 2] = float("nan")
    y = experts(x, index, weights)
    up, down = (
        real(experts.gate_up_proj, experts.gate_up_proj_scale_inv),
        real(experts.down_proj, experts.down_proj_scale_inv),
    )
    wanted = torch.zeros(5, 128, dtype=torch.float64)
    for t, slots in enumerate(index.tolist()):
        for j, e in enumerate(slots):
            if e < 2:
                gate, value = (up[e] @ x[t].double()).chunk(2)
                wanted[t] += weights[t, j].double() * (down[e] @ (nn.functional.silu(gate) * value))
    assert (y - wanted).norm() < 0.06 * wanted.norm()
    assert torch.equal(y[2], torch.zeros(128))
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[2].any()


def test_both_layers_compile_to_one_graph(layers):
    linear = layers.FP8Linear(nn.Linear(128, 128))
    x = torch.randn(4, 128)
    torch.compiler.reset()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x))
    experts = layers.FP8Experts(torch.randn(2, 64, 128), torch.randn(2, 128, 32))
    index, weights = torch.tensor([[0, 1]] * 4), torch.rand(4, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, index, weights), experts(x, index, weights))


def test_a_mapping_gives_the_layers_another_forward(layers, tmp_path):
    source = (
        "from torch import nn\n\n\nclass Zeros(nn.Module):\n    can_torch_compile = True\n    has_backward = True\n\n"
        "    def forward(self, x):\n        return 0 * x\n"
    )
    files = {"__init__.py": "from . import layers\n", "layers.py": source}
    write_build(tmp_path / "zeros", "torch-universal", files)
    model = nn.Sequential(layers.FP8Linear(nn.Linear(128, 128)))
    repository = LocalLayerRepository(tmp_path / "zeros", layer_name="Zeros")
    with kernel_loader.use_kernel_mapping({"FP8Linear": {"cpu": repository}}):
        kernel_loader.kernelize(model, mode=Mode.INFERENCE, device="cpu")
    assert not model(torch.randn(2, 128)).any()
