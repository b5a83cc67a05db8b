"""The qkv-packed reference against the attention modules that it is made of."""

import copy

import pytest
import torch
from torch import nn

from kernel_loader import FusionError, make_parent_class_for_kernel_fusion
from tests.fusion.models import Attention
from tests.registry.references import BF16, F32, F64, compiled, is_shipped_reference, layers_of, load_reference, random

H = 16


@pytest.fixture
def kernel(cpu_machine, monkeypatch):
    return load_reference("qkv_packed", monkeypatch)


class Parent(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.Attention = attention


def fused(kernel, attention):
    cls = make_parent_class_for_kernel_fusion(Parent, ["Attention"], kernel.layers.PackedQKVLayout)
    return cls(copy.deepcopy(attention)).Attention


def made(cls=Attention, dtype=F32, **options):
    torch.manual_seed(0)
    return cls(H, **options).to(dtype)


def products(monkeypatch):
    """The widths of all products of nn.Linear from now on."""
    widths, forward = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: (widths.append(self.out_features), forward(self, x))[1])
    return widths


def test_the_kernel_loads_as_its_reference(kernel):
    assert is_shipped_reference(kernel, "qkv-packed")
    assert layers_of(kernel.layers).keys() == {"PackedQKV", "PackedQKVLayout"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(5, H), (2, 5, H), (2, 1, H), (0, 5, H)], ids=str)
def test_the_layer_gives_what_the_attention_gives(kernel, shape, dtype, bias):
    attention = made(dtype=dtype, bias=bias)
    x = random(*shape, dtype=dtype)
    torch.testing.assert_close(fused(kernel, attention)(x), attention(x))
    mask = torch.full((shape[-2], shape[-2]), -torch.inf, dtype=dtype).triu(1)
    torch.testing.assert_close(fused(kernel, attention)(hidden_states=x, mask=mask), attention(x, mask))


def test_there_is_one_product_for_the_three(kernel, monkeypatch):
    layer = fused(kernel, made())
    widths = products(monkeypatch)
    layer(random(5, H, dtype=F32))
    assert widths == [32, 16]


def test_gradients_are_those_of_the_projections(kernel):
    attention = made(dtype=F64, bias=True)
    layer, x = fused(kernel, attention), random(2, 5, H)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(ours)[0].square().sum().backward()
    attention(theirs)[0].square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)
    for kind in ("weight", "bias"):
        expected = torch.cat([getattr(getattr(attention, f"{name}_proj"), kind).grad for name in "qkv"])
        torch.testing.assert_close(getattr(layer.qkv_proj, kind).grad, expected)


def test_the_layer_compiles_to_one_graph(kernel):
    layer, x = fused(kernel, made()), random(5, H, dtype=F32)
    torch.testing.assert_close(compiled(layer)(x), layer(x))


class Cross(Attention):
    """Keys and values of something else."""

    def forward(self, hidden_states, other):
        q, k, v = self.q_proj(hidden_states), self.k_proj(other), self.v_proj(other)
        return q.sum(-1) + k.sum(-1) * v.square().sum(-1)


class InPlace(Attention):
    def forward(self, hidden_states):
        q = self.q_proj(hidden_states)
        q *= self.scaling
        return q.sum() + self.k_proj(hidden_states).square().sum() + self.v_proj(hidden_states).sum()


class Prepared(Attention):
    """Projections of what it makes of its input, under another name."""

    @property
    def doubled(self):
        return 2 * self.scaling

    def forward(self, x):
        x = x.flatten(0, -2) * self.doubled
        assert self.q_proj.out_features == H
        assert self.q_proj.in_features == H
        assert self.q_proj.bias is None
        return super_free(self, x)


def super_free(self, x):
    return self.q_proj(x).sum(-1) * self.k_proj(x).sum(-1) + self.v_proj(x).sum(-1)


class Counting(Attention):
    calls = 0

    def forward(self, hidden_states):
        self.calls = self.calls + 1
        self.seen += 1
        return self.v_proj(hidden_states) * self.calls


@pytest.mark.parametrize("cls", [Cross, InPlace, Prepared, Counting])
def test_a_forward_may_use_its_projections_as_it_likes(kernel, cls):
    attention = made(cls)
    layer = fused(kernel, attention)
    x = random(2, 5, H, dtype=F32)
    more = (random(2, 5, H, dtype=F32, seed=1),) if cls is Cross else ()
    for _ in range(2):
        torch.testing.assert_close(layer(x, *more), attention(x, *more))
    assert torch.equal(layer.seen, attention.seen)


class Super(Attention):
    def forward(self, hidden_states):
        return super().forward(hidden_states)


class Quantized(nn.Linear):
    def forward(self, x):
        return super().forward(x).round()


def with_part(name, part):
    attention = made()
    setattr(attention, name, part)
    return attention


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (nn.Linear(2, 2), "has no attribute 'q_proj'"),
        (made(Super), r"expected a forward that does not call super\(\), got that of Super"),
        (with_part("k_proj", Quantized(H, 8)), "to be nn.Linear, got Linear, Quantized, Linear"),
        (with_part("k_proj", nn.Linear(H, 8)), "all with a bias or none"),
        (with_part("k_proj", nn.Linear(8, 8, bias=False)), "expected projections of one width"),
        (with_part("qkv_proj", nn.Linear(8, 8)), "expected no qkv_proj in the attention"),
        (with_part("packed_sizes", 3), "expected no packed_sizes in the attention"),
    ],
)
def test_modules_that_cannot_be_packed_are_refused(kernel, attention, message):
    with pytest.raises(FusionError, match=message):
        fused(kernel, attention)


def test_everything_else_of_the_module_stays(kernel):
    attention = made()
    layer = fused(kernel, attention)
    assert [name for name, _ in layer.named_children()] == ["o_proj", "qkv_proj"]
    assert layer._parameters.keys() == {"sinks", "absent"}
    assert layer.absent is None
    assert [layer.head_dim, layer.training] == [attention.head_dim, attention.training]
    assert layer._non_persistent_buffers_set == {"inv_freq"}
    assert list(layer.state_dict()) == ["sinks", "seen", "o_proj.0.weight", "o_proj.0.bias", "qkv_proj.weight"]
