"""The rmsnorm-mlp reference against norm and MLP in float64, and what its layout is made of."""

import pytest
import torch
from torch import nn

from kernel_loader import FusionError, make_parent_class_for_kernel_fusion, unfuse
from tests.fusion.models import GatedMLP, Norm
from tests.registry.references import BF16, F32, F64, compiled, is_shipped_reference, layers_of, load_reference, random

H, INNER = 16, 40


@pytest.fixture
def kernel(cpu_machine, monkeypatch):
    return load_reference("rmsnorm_mlp", monkeypatch)


class Parent(nn.Module):
    def __init__(self, dtype=F32, *, bias=False, norm=None, mlp=None):
        super().__init__()
        torch.manual_seed(0)
        self.RMSNorm = norm or Norm(H).to(dtype)
        self.MLP = mlp or GatedMLP(H, INNER, bias).to(dtype)


def fused(kernel, *args, **options):
    cls = make_parent_class_for_kernel_fusion(Parent, ["RMSNorm", "MLP"], kernel.layers.RMSNormMLPLayout)
    return cls(*args, **options)


def formula(parent, x):
    x = x.double()
    x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + parent.RMSNorm.variance_epsilon)
    mlp = parent.MLP.double()
    gate, up = mlp.gate_proj, mlp.up_proj
    x = parent.RMSNorm.weight.double() * x
    product = nn.functional.silu(x @ gate.weight.T + (gate.bias if gate.bias is not None else 0))
    return mlp.down_proj(product * up(x))


def test_the_kernel_loads_as_its_reference(kernel):
    assert is_shipped_reference(kernel, "rmsnorm-mlp")
    assert layers_of(kernel.layers).keys() == {"RMSNormMLP", "RMSNormMLPLayout"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "share"), [(F32, 1e-5), (BF16, 0.03)], ids=str)
@pytest.mark.parametrize("shape", [(H,), (0, H), (3, H), (2, 0, H), (2, 3, H)], ids=str)
def test_the_layer_gives_norm_and_mlp(kernel, shape, dtype, share, bias):
    x = random(*shape, dtype=dtype)
    parent = fused(kernel, dtype, bias=bias)
    result = parent.RMSNorm(x)
    assert result.dtype == dtype
    expected = formula(unfuse(parent), x)
    assert result.shape == expected.shape
    if x.numel():
        assert (result - expected).abs().max() <= share * expected.abs().max()


def test_the_gradient_is_that_of_the_formula(kernel):
    x = random(3, H, dtype=F32)
    parent = fused(kernel)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    parent.RMSNorm(ours).square().sum().backward()
    packed = parent.RMSNorm.gate_up_proj.weight.grad
    original = unfuse(parent)
    original.zero_grad()
    formula(original, theirs).square().sum().backward()
    mlp = original.MLP
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    expected = torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad])
    torch.testing.assert_close(packed.double(), expected, rtol=1e-4, atol=1e-5)


def test_rows_of_the_gate_come_first(kernel):
    parent = fused(kernel)
    packed = parent.RMSNorm.gate_up_proj.weight
    mlp = GatedMLP(H, INNER)
    parent.load_state_dict(Parent(mlp=mlp).state_dict())
    assert torch.equal(packed, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))


def test_the_layer_compiles_to_one_graph(kernel):
    parent, x = fused(kernel), random(3, H, dtype=F32)
    torch.testing.assert_close(compiled(parent.RMSNorm)(x), parent.RMSNorm(x))


class Centred(Norm):
    """As Gemma has it."""

    def forward(self, x):
        return super().forward(x) * (1 + self.weight) / self.weight


class Scaled(GatedMLP):
    def forward(self, x):
        return super().forward(x) * 0.5


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def with_part(name, part):
    mlp = GatedMLP(H, INNER)
    setattr(mlp, name, part)
    return mlp


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": Centred(H)}, "of the norm, got otherwise from Centred"),
        ({"norm": nn.LayerNorm(H, bias=False)}, "expected an RMSNorm with an epsilon, got LayerNorm"),
        ({"norm": nn.RMSNorm(H)}, "expected an RMSNorm with an epsilon, got RMSNorm"),
        ({"norm": nn.Identity()}, "no attribute 'weight'"),
        ({"mlp": Scaled(H, INNER)}, "of the MLP, got otherwise from Scaled"),
        ({"mlp": with_part("down_proj", Other(INNER, H))}, "to be nn.Linear, got Linear, Linear, Other"),
        ({"mlp": with_part("gate_proj", nn.Linear(H, 8))}, "expected gate_proj and up_proj of one shape"),
        ({"mlp": with_part("up_proj", nn.Linear(H, INNER))}, "expected gate_proj and up_proj of one shape"),
        ({"mlp": with_part("drop", nn.Dropout())}, "act_fn, got drop too"),
    ],
)
def test_modules_that_compute_something_else_are_refused(kernel, options, message):
    with pytest.raises(FusionError, match=message):
        fused(kernel, **options)


def test_norms_of_torch_with_an_epsilon_and_weights_that_were_never_written_are_taken(kernel):
    x = random(2, H, dtype=F32)
    parent = fused(kernel, norm=nn.RMSNorm(H, eps=1e-3))
    result = parent.RMSNorm(x)
    original = unfuse(parent)
    torch.testing.assert_close(result, original.MLP(original.RMSNorm(x)))
    odd = Norm(H)
    odd.weight.data.fill_(torch.nan)
    fused(kernel, norm=odd)
    fused(kernel, F64)
