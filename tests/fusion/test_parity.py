"""How far models are apart, layer by layer."""

import copy
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

from kernel_loader import RequestError, fuse, parity
from kernel_loader.fusion.difference import Difference
from tests.fusion.models import CONFIG, IDS, llama


class Gives(nn.Module):
    """Whatever `make` makes of x and a factor."""

    def __init__(self, make, factor=1.0):
        super().__init__()
        self.make, self.factor, self.inner = make, factor, nn.Identity()

    def forward(self, x, **more):
        return self.make(self.inner(x), self.factor)


class Two(NamedTuple):
    one: torch.Tensor
    other: object


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: object = None


X = torch.tensor([1.0, 2.0, -4.0])


def of(make, *factors, inputs=X):
    return parity(*(Gives(make, factor) for factor in factors), inputs)


def test_a_fused_model_is_held_against_its_original_layer_by_layer(cpu_machine):
    original = llama()
    fused = fuse(copy.deepcopy(original), CONFIG)
    found = parity(original, fused, {"ids": IDS})
    paths = [layer.module for layer in found.layers]
    assert paths[:3] == ["model.embed_tokens", "model.layers.0.input_layernorm", "model.layers.0.self_attn.o_proj.0"]
    assert {"model.layers.1", "model.layers.1.mlp", "model.layers.1.self_attn", "lm_head"} < {*paths}
    assert not any("post_attention_layernorm" in path for path in paths)
    assert found.output.largest < 1e-5
    with torch.no_grad():
        fused.model.layers[1].post_attention_layernorm.down_proj.weight.add_(0.5)
    found = parity(original, fused, IDS)
    assert found.worst.module == "model.layers.1.mlp"
    assert [line.split(":")[0] for line in str(found).splitlines()] == ["(output)", *paths]
    assert [layer.largest for layer in parity(fused, original, IDS).layers] == [x.largest for x in found.layers]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, f: x * f,
        lambda x, f: (x * f, None, "text"),
        lambda x, f: [{"a": x * f}, (), 3],
        lambda x, f: Two(x * f, {"b": [x]}),
        lambda x, f: Output(x * f),
        lambda x, f: {"indices": x.long(), "out": x * f},
    ],
)
def test_structures_are_looked_into(make):
    found = of(make, 1.0, 1.5)
    assert found.output.largest == 2.0
    assert found.output.scale == 4.0
    assert of(make, 1.0, 1.0).output.largest == 0.0


def test_differences_are_in_float64():
    assert of(lambda x, f: x * f, 1.0, 1.5).output == Difference("", 2.0, 3.5 / 3, 4.0)
    half = torch.tensor([60000.0], dtype=torch.float16)
    assert of(lambda x, f: x * f, 1.0, -1.0, inputs=half).output.largest == 120000.0


def test_nan_and_infinity_differ_from_everything_else_and_not_from_themselves():
    odd = torch.tensor([1.0, torch.nan, torch.inf])
    same = of(lambda x, f: x * f, 1.0, 2.0, inputs=odd).output
    assert [same.largest, same.scale] == [1.0, 1.0]
    nan = parity(Gives(lambda x, f: x), Gives(lambda x, f: x / 0 * 0), X)
    assert nan.output.largest != nan.output.largest
    infinite = of(lambda x, f: x / f, 1.0, 0.0).output
    assert infinite.largest == torch.inf
    assert of(lambda x, f: x * f, torch.inf, -torch.inf).output.largest == torch.inf


def test_nan_is_the_worst_layer_and_an_infinite_scale_hides_nothing():
    class Chain(nn.Module):
        def __init__(self, *makes):
            super().__init__()
            for number, make in enumerate(makes):
                self.add_module(f"m{number}", Gives(make))

        def forward(self, x):
            return [module(x) for module in self.children()]

    def plain(x, f):
        return x

    one = Chain(plain, lambda x, f: torch.cat([x, x / 0]), plain)
    assert parity(one, Chain(plain, lambda x, f: torch.cat([2 * x, x / 0]), plain), X).worst.module == "m1"
    assert parity(one, Chain(lambda x, f: 9 * x, one.m1.make, lambda x, f: x * torch.nan), X).worst.module == "m2"


def test_all_calls_of_a_module_count():
    class Twice(nn.Module):
        def __init__(self, second):
            super().__init__()
            self.inner, self.second = nn.Identity(), second

        def forward(self, x):
            return self.inner(x) + self.inner(x + self.second)

    found = parity(Twice(1.0), Twice(3.0), X)
    assert found.layers == (Difference("inner", 2.0, 1.0, 4.0),)


def test_each_model_gets_the_inputs_as_they_were():
    def changing(x, f):
        return x.mul_(2) * f

    given = X.clone()
    assert of(changing, 1.0, 1.0, inputs=given).output.largest == 0.0
    assert torch.equal(given, X)
    cache = {"x": X, "cache": [X.clone()]}

    class Caching(nn.Module):
        def forward(self, x, cache):
            cache.append(x)
            return torch.stack([*cache])

    assert parity(Caching(), Caching(), cache).output.largest == 0.0
    assert len(cache["cache"]) == 1


def test_no_hooks_are_left_even_if_a_model_fails():
    def failing(x, f):
        raise ZeroDivisionError

    model = Gives(failing)
    with pytest.raises(ZeroDivisionError):
        parity(model, model, X)
    assert not model.inner._forward_hooks


def test_gradients_and_modes_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).train()
    parity(model.eval().train(), copy.deepcopy(model), (X,))
    assert model.training
    assert model[0].weight.grad is None


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (lambda x, f: x, lambda x, f: x[:2], r"the models return \(3,\) and \(2,\)"),
        (lambda x, f: x, lambda x, f: (x, x), r"return \(3,\) and \(3,\), \(3,\)"),
        (lambda x, f: x.long(), lambda x, f: x.long(), "return no float tensors and no float tensors"),
        (lambda x, f: None, lambda x, f: x, r"return no float tensors and \(3,\)"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(one, other, message):
    with pytest.raises(RequestError, match=message):
        parity(Gives(one), Gives(other), X)


def test_empty_outputs_differ_by_nothing():
    assert of(lambda x, f: x[:0], 1.0, 2.0).output == Difference("", 0.0, 0.0, 0.0)
