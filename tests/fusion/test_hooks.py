"""Fused modules that load and save the layout of the modules that they were made of."""

import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import WeightConverter, compose
from kernel_loader.fusion.hooks import loads_converted
from kernel_loader.fusion.operations import Cast, Concatenate, Pad, QuantizeBlockFP8, Stack, Transpose


class Plain(nn.Module):
    """Gate, up and down, each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.up = nn.Linear(4, 6)


class Fused(nn.Module):
    """Gate and up in one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(4, 12)
        self.down = nn.Linear(6, 4)


def model(mlp):
    torch.manual_seed(0)
    return nn.ModuleDict({"embed": nn.Linear(2, 2), "mlp": mlp(), "head": nn.Linear(2, 2)})


CONVERTERS = [
    WeightConverter(["gate.weight", "up.weight"], "gate_up.weight", [Concatenate(0)]),
    WeightConverter(["gate.bias", "up.bias"], "gate_up.bias", [Concatenate(0)]),
]
ORDER = [name.removeprefix("mlp.") for name in model(Plain).state_dict() if name.startswith("mlp.")]


@pytest.fixture
def plain():
    return model(Plain).state_dict()


@pytest.fixture
def fused():
    fused = model(Fused)
    fused.conversion = loads_converted(fused.mlp, CONVERTERS, order=ORDER)
    return fused


def same(got, want):
    return list(got) == list(want) and all(got[name].equal(want[name]) for name in want)


def test_a_fused_model_loads_the_original_and_saves_it(fused, plain):
    result = fused.load_state_dict(plain)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert fused.mlp.gate_up.weight[:6].equal(plain["mlp.gate.weight"])
    assert fused.mlp.gate_up.bias[6:].equal(plain["mlp.up.bias"])
    assert same(fused.state_dict(), plain)
    assert isinstance(fused.mlp.gate_up.weight, nn.Parameter)


def test_the_module_alone_loads_and_saves_too(fused, plain):
    own = {name.removeprefix("mlp."): tensor for name, tensor in plain.items() if name.startswith("mlp.")}
    fused.mlp.load_state_dict(own)
    assert same(fused.mlp.state_dict(), own)


def test_its_own_layout_is_taken_as_well(fused, plain):
    fused.load_state_dict(plain)
    fused.conversion.remove()
    own_layout = fused.state_dict()
    assert "mlp.gate_up.weight" in own_layout
    other = model(Fused)
    loads_converted(other.mlp, CONVERTERS, order=ORDER)
    other.load_state_dict(own_layout)
    assert same(other.state_dict(), plain)


def test_a_mixture_of_both_layouts_is_taken_group_by_group(fused, plain):
    fused.load_state_dict(plain)
    mixed = dict(plain)
    mixed["mlp.gate_up.bias"] = torch.cat([mixed.pop("mlp.gate.bias"), mixed.pop("mlp.up.bias")])
    fused.load_state_dict(mixed)
    assert same(fused.state_dict(), plain)


def test_what_is_saved_does_not_change_with_the_parameters(fused, plain):
    fused.load_state_dict(plain)
    saved = fused.state_dict(keep_vars=True)
    with torch.no_grad():
        fused.mlp.gate_up.weight.zero_()
    assert saved["mlp.gate.weight"].equal(plain["mlp.gate.weight"])
    assert not saved["mlp.gate.weight"].requires_grad
    assert saved["mlp.down.weight"] is fused.mlp.down.weight


def test_missing_and_unexpected_keys_have_their_original_names(fused, plain):
    del plain["mlp.up.weight"]
    plain["mlp.other"] = torch.zeros(1)
    with pytest.raises(RuntimeError) as caught:
        fused.load_state_dict(plain)
    assert 'Missing key(s) in state_dict: "mlp.up.weight".' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "mlp.other".' in str(caught.value)
    assert "gate" not in str(caught.value)
    before = fused.mlp.gate_up.weight.detach().clone()
    result = fused.load_state_dict(plain, strict=False)
    assert result.missing_keys == ["mlp.up.weight"]
    assert result.unexpected_keys == ["mlp.other"]
    assert fused.mlp.gate_up.weight.equal(before)


def test_a_group_that_is_not_there_at_all_is_missing_in_original_names(fused):
    result = fused.load_state_dict({}, strict=False)
    expected = {"mlp.gate.weight", "mlp.gate.bias", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"}
    assert {name for name in result.missing_keys if name.startswith("mlp.")} == expected


def test_shapes_that_differ_are_told_of_the_original(fused, plain):
    plain["mlp.up.weight"] = torch.zeros(5, 4)
    plain["mlp.up.bias"] = None
    with pytest.raises(RuntimeError) as caught:
        fused.load_state_dict(plain)
    expected = (
        "size mismatch for mlp.up.weight: copying a param with shape (5, 4) from checkpoint, the shape in current"
    )
    assert expected in str(caught.value)
    assert "mlp.up.bias is to be converted, and is no tensor." in str(caught.value)
    assert "Missing" not in str(caught.value)


def test_sources_of_several_dtypes_are_cast_as_ever(fused, plain):
    plain["mlp.up.weight"] = plain["mlp.up.weight"].half()
    fused.load_state_dict(plain)
    assert same(fused.state_dict(), plain | {"mlp.up.weight": plain["mlp.up.weight"].float()})


def test_what_is_there_of_a_group_is_loaded_and_the_rest_stays(fused, plain):
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    given = {name: torch.ones_like(tensor) for name, tensor in plain.items() if name != "mlp.up.weight"}
    result = fused.load_state_dict(given, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["mlp.up.weight"], [])
    assert same(fused.state_dict(), {name: given.get(name, tensor) for name, tensor in before.items()})


def test_a_checkpoint_of_another_dtype_is_cast_as_ever(fused, plain):
    fused.load_state_dict({name: tensor.double() for name, tensor in plain.items()})
    assert same(fused.state_dict(), plain)


def test_a_model_on_the_meta_device_takes_the_tensors_themselves(plain):
    with torch.device("meta"):
        fused = model(Fused)
    loads_converted(fused.mlp, CONVERTERS, order=ORDER)
    assert fused.state_dict()["mlp.gate.weight"].is_meta
    fused.load_state_dict(plain, assign=True)
    assert same(fused.state_dict(), plain)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_converts_for_itself(fused, plain, duplicate):
    fused.load_state_dict(plain)
    other = duplicate(fused)
    fused.conversion.remove()
    with torch.no_grad():
        fused.mlp.gate_up.weight.zero_()
    assert same(other.state_dict(), plain)
    other.load_state_dict(plain)


def test_a_saved_model_loads_with_weights_only(fused, plain):
    fused.load_state_dict(plain)
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), plain)


def test_names_in_converters_may_be_those_of_the_whole_model(plain):
    fused = model(Fused)
    whole = compose(CONVERTERS).below("mlp")
    loads_converted(fused.mlp, whole, "mlp.")
    fused.load_state_dict(plain)
    assert set(fused.state_dict()) == set(plain)
    other = model(Fused)
    loads_converted(other, whole, order=list(plain))
    other.load_state_dict(plain)
    assert same(other.state_dict(), plain)


def test_a_module_that_is_there_twice_is_saved_twice(plain):
    fused = model(Fused)
    fused.mlp.also = fused.mlp.down
    loads_converted(fused.mlp, CONVERTERS)
    plain |= {f"mlp.also.{kind}": plain[f"mlp.down.{kind}"] for kind in ("weight", "bias")}
    fused.load_state_dict(plain)
    saved = fused.state_dict()
    assert set(saved) == set(plain)
    assert saved["mlp.also.weight"].data_ptr() == saved["mlp.down.weight"].data_ptr()


def test_without_an_order_it_is_that_of_the_fused_module(plain):
    fused = model(Fused)
    loads_converted(fused.mlp, CONVERTERS)
    fused.load_state_dict(plain)
    saved = fused.state_dict()
    assert set(saved) == set(plain)
    assert list(saved)[2:6] == ["mlp.gate.weight", "mlp.up.weight", "mlp.gate.bias", "mlp.up.bias"]


def test_hooks_below_hooks_convert_in_turn(plain):
    fused = model(Fused)
    loads_converted(fused.mlp, CONVERTERS)
    rename = [WeightConverter(f"ffn.*.{kind}", f"mlp.*.{kind}") for kind in ("weight", "bias")]
    loads_converted(fused, rename)
    renamed = {name.replace("mlp.", "ffn."): tensor for name, tensor in plain.items()}
    fused.load_state_dict(renamed)
    saved = fused.state_dict()
    assert set(saved) == set(renamed)
    assert all(saved[name].equal(renamed[name]) for name in renamed)


TWICE = {
    "the same": (CONVERTERS, "gate_up.weight, gate.weight, up.weight, gate_up.bias, gate.bias, up.bias"),
    "one of them": (CONVERTERS[:1], "gate_up.weight, gate.weight, up.weight"),
    "others of the same weights": (WeightConverter("joined.*", "gate_up.*"), "gate_up.weight, gate_up.bias"),
    "others from the same names": (WeightConverter("gate.*", "down.*"), "gate.weight, gate.bias"),
}


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy])
@pytest.mark.parametrize("case", TWICE)
def test_weights_that_are_converted_already_are_refused(fused, plain, case, copied):
    converters, names = TWICE[case]
    fused = copied(fused)
    with pytest.raises(FusionError, match=re.escape(f"{names} of Fused is converted already. Take that back first")):
        loads_converted(fused.mlp, converters)
    fused.load_state_dict(plain)
    assert same(fused.state_dict(), plain)


def test_other_weights_of_a_module_may_be_converted_too_and_the_same_ones_after_remove(fused, plain):
    loads_converted(fused.mlp, WeightConverter("out.*", "down.*"))
    renamed = {name.replace("down", "out"): tensor for name, tensor in plain.items()}
    fused.load_state_dict(renamed)
    assert {*fused.state_dict()} == {*renamed}
    fused.conversion.remove()
    whole = compose(CONVERTERS).below("mlp")
    conversion = loads_converted(fused.mlp, whole, "mlp.")
    assert {*fused.state_dict()} == {*renamed}
    conversion.remove()
    loads_converted(fused.mlp, CONVERTERS)
    assert {*fused.state_dict()} == {*renamed}


class Weight(nn.Module):
    """Parameters by name."""

    def __init__(self, **tensors) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def test_a_weight_that_keeps_its_name_is_told_by_its_shape_and_dtype():
    module = Weight(w=torch.zeros(2, 3))
    hooks = loads_converted(module, WeightConverter("w", "w", [Transpose()]))
    original = torch.arange(6.0).reshape(3, 2)
    module.load_state_dict({"w": original})
    assert module.w.equal(original.T)
    assert module.state_dict()["w"].equal(original)
    module.load_state_dict({"w": original.T + 1})
    assert module.w.equal(original.T + 1)
    hooks.remove()
    module = Weight(w=torch.zeros(2))
    loads_converted(module, WeightConverter("w", "w", [Cast(torch.float32, torch.float16)]))
    assert module.state_dict()["w"].dtype == torch.float16
    module.load_state_dict({"w": torch.ones(2)})
    module.load_state_dict({"w": torch.ones(2).half()})
    assert module.w.dtype == torch.float32


def test_a_square_weight_that_keeps_its_name_counts_as_the_original():
    module = Weight(w=torch.zeros(2, 2))
    loads_converted(module, WeightConverter("w", "w", [Transpose()]))
    module.load_state_dict({"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
    assert module.w.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_quantized_module_loads_and_saves_weights():
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    module = Weight(codes=torch.zeros(4, 4, dtype=torch.float8_e4m3fn), scales=torch.zeros(2, 2))
    loads_converted(module, WeightConverter("weight", ["codes", "scales"], [QuantizeBlockFP8((2, 2))]))
    module.load_state_dict({"weight": weight})
    assert (module.state_dict()["weight"] - weight).abs().max() < 0.1


def test_experts_are_reported_by_their_numbers():
    module = Weight(w1=torch.zeros(3, 2, 2))
    loads_converted(module, WeightConverter("experts.*.w1", "w1", [Stack(0)]))
    state_dict = {f"experts.{i}.w1": torch.full((2, 2), float(i)) for i in range(4)}
    result = module.load_state_dict(state_dict, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([], ["experts.3.w1"])
    assert module.w1[2].eq(2).all()
    del state_dict["experts.1.w1"]
    assert module.load_state_dict(state_dict, strict=False).missing_keys == ["experts.1.w1"]


def test_a_module_in_another_layout_is_refused_at_once():
    message = re.escape("gate_up.weight: matches none of 6 names, such as gate.weight, gate.bias, down.weight")
    plain = Plain()
    with pytest.raises(FusionError, match=message):
        loads_converted(plain, CONVERTERS)
    assert list(plain.state_dict()) == ORDER
    with pytest.raises(FusionError, match="expected size 8 along dimension 0"):
        loads_converted(Weight(w=torch.zeros(4)), WeightConverter("w", "w", [Pad(0, 2, 8)]))
