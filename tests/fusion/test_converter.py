"""Converters, the plans made of them, and state dicts there and back."""

import io
import pickle
import re
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import WeightConverter, compose
from kernel_loader.fusion.operation import TensorSpec
from kernel_loader.fusion.operations import (
    Cast,
    Chunk,
    Concatenate,
    Deinterleave,
    Interleave,
    Pad,
    QuantizeBlockFP8,
    Rename,
    Stack,
    Transpose,
    Unstack,
)
from kernel_loader.fusion.plan import plan
from kernel_loader.fusion.state_dict import convert_state_dict, revert_state_dict, specs_of

GATE_UP = WeightConverter(
    ["layers.*.mlp.gate_proj.weight", "layers.*.mlp.up_proj.weight"],
    "layers.*.mlp.gate_up_proj.weight",
    [Concatenate(0)],
)
EXPERTS = WeightConverter(
    ["layers.*.experts.*.w1.weight", "layers.*.experts.*.w3.weight"],
    "layers.*.experts.gate_up_proj",
    [Concatenate(0), Stack(0)],
)
DOWN = WeightConverter("layers.*.experts.*.w2.weight", "layers.*.experts.down_proj", [Stack(0), Transpose(1, 2)])


def spec(*shape, dtype=torch.float32):
    return TensorSpec(shape, dtype)


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def llama(layers=2, dtype=torch.bfloat16):
    state_dict = {"embed.weight": random(5, 4, dtype=dtype)}
    for i in range(layers):
        for j, name in enumerate(("gate_proj", "norm", "up_proj")):
            state_dict[f"layers.{i}.mlp.{name}.weight"] = random(6, 4, dtype=dtype, seed=10 * i + j)
    return state_dict


def mixtral(layers=2, experts=12):
    """More than ten experts, so that 10 comes before 2 where numbers are ordered as text."""
    state_dict = {}
    for i in range(layers):
        for j in range(experts):
            for k, shape in enumerate([(6, 4), (4, 6), (6, 4)], 1):
                state_dict[f"layers.{i}.experts.{j}.w{k}.weight"] = random(*shape, seed=100 * i + 3 * j + k)
        state_dict[f"layers.{i}.router.weight"] = random(experts, 4, seed=i)
    return state_dict


def same(got, want):
    return list(got) == list(want) and all(bits(got[name]) == bits(want[name]) for name in want)


# --- there and back -------------------------------------------------------------------------------------------------


def test_gate_and_up_of_every_layer_become_one():
    state_dict = llama()
    converted = convert_state_dict(state_dict, GATE_UP)
    assert list(converted) == [
        "embed.weight",
        "layers.0.mlp.gate_up_proj.weight",
        "layers.0.mlp.norm.weight",
        "layers.1.mlp.gate_up_proj.weight",
        "layers.1.mlp.norm.weight",
    ]
    both = converted["layers.1.mlp.gate_up_proj.weight"]
    assert both[:6].equal(state_dict["layers.1.mlp.gate_proj.weight"])
    assert both[6:].equal(state_dict["layers.1.mlp.up_proj.weight"])
    assert same(revert_state_dict(converted, GATE_UP), state_dict)


def test_experts_are_stacked_in_the_order_of_their_numbers():
    state_dict = mixtral()
    converted = convert_state_dict(state_dict, [EXPERTS, DOWN])
    for number in range(12):
        of_expert = converted["layers.1.experts.gate_up_proj"][number]
        assert of_expert[:6].equal(state_dict[f"layers.1.experts.{number}.w1.weight"])
        assert of_expert[6:].equal(state_dict[f"layers.1.experts.{number}.w3.weight"])
        assert converted["layers.0.experts.down_proj"][number].equal(
            state_dict[f"layers.0.experts.{number}.w2.weight"].T
        )
    assert same(revert_state_dict(converted, [EXPERTS, DOWN]), state_dict)


def test_experts_that_are_stacked_first_are_the_same():
    stacked_first = WeightConverter(EXPERTS.sources, EXPERTS.targets, [Stack(0), Concatenate(1)])
    assert same(convert_state_dict(mixtral(), [stacked_first, DOWN]), convert_state_dict(mixtral(), [EXPERTS, DOWN]))


def test_the_way_back_of_a_converter_is_a_converter():
    state_dict = dict(convert_state_dict(llama(), GATE_UP))
    assert same(convert_state_dict(state_dict, GATE_UP.inverse()), revert_state_dict(state_dict, GATE_UP))
    for converter in (GATE_UP, EXPERTS, DOWN):
        assert converter.inverse().inverse() == converter
        assert pickle.loads(pickle.dumps(converter)) == converter


def test_converters_compose():
    halve = WeightConverter("layers.*.mlp.gate_up_proj.weight", "layers.*.mlp.gate_up.weight", [Transpose()])
    rename = WeightConverter("layers.*.mlp.*.weight", "blocks.*.ffn.*.weight")
    both = compose(GATE_UP, halve, [rename])
    state_dict = llama()
    converted = convert_state_dict(state_dict, both)
    assert converted["blocks.0.ffn.gate_up.weight"].shape == (4, 12)
    assert same(revert_state_dict(converted, both), state_dict)
    step_by_step = convert_state_dict(convert_state_dict(convert_state_dict(state_dict, GATE_UP), halve), rename)
    assert same(converted, step_by_step)
    assert compose(both.inverse()).inverse() == both


def test_names_may_be_exchanged_and_moved_around_in_a_composition():
    swap = [WeightConverter("a", "b", [Transpose()]), WeightConverter("b", "a")]
    join = WeightConverter(["a", "b"], "c", [Concatenate(0)])
    state_dict = {"a": random(2, 2), "b": random(2, 2, seed=1)}
    converted = convert_state_dict(state_dict, swap)
    assert converted["a"] is state_dict["b"]
    assert converted["b"].equal(state_dict["a"].T)
    both = convert_state_dict(state_dict, compose(swap, join))
    assert both["c"].equal(torch.cat([state_dict["b"], state_dict["a"].T]))
    assert same(revert_state_dict(both, compose(swap, join)), state_dict)


def test_a_composition_takes_no_more_tensors_together_than_it_must():
    rename = WeightConverter("layers.*.mlp.gate_up_proj.weight", "layers.*.mlp.packed")
    steps = plan(specs_of(llama(layers=3)), compose(GATE_UP, rename))
    assert [group.targets for group in steps.groups] == [(f"layers.{i}.mlp.packed",) for i in range(3)]
    assert steps.groups[0].converters == (GATE_UP, rename)


def test_what_has_a_conversion_mapping_stands_for_its_converters():
    class Layout:
        conversion_mapping = [GATE_UP]

    for layout in (Layout, Layout()):
        assert same(convert_state_dict(llama(), layout), convert_state_dict(llama(), GATE_UP))


def test_a_converter_can_be_set_below_a_prefix():
    state_dict = {f"model.{name}": tensor for name, tensor in llama().items()}
    converted = convert_state_dict(state_dict, GATE_UP.below("model"))
    assert "model.layers.0.mlp.gate_up_proj.weight" in converted
    assert GATE_UP.below("") is GATE_UP
    assert compose(GATE_UP).below("model") == compose(GATE_UP.below("model"))


def test_tied_tensors_stay_tied_where_they_are_renamed_or_untouched():
    embed = random(4, 4)
    state_dict = {"embed.weight": embed, "head.weight": embed, "other.weight": embed.view(16)}
    rename = WeightConverter("head.weight", "lm_head.weight", [Rename()])
    converted = convert_state_dict(state_dict, rename)
    assert converted["lm_head.weight"] is converted["embed.weight"] is embed
    assert converted["other.weight"].data_ptr() == embed.data_ptr()
    transposed = convert_state_dict(state_dict, WeightConverter("head.weight", "head.weight_t", [Transpose()]))
    assert transposed["head.weight_t"].data_ptr() != embed.data_ptr()


def test_order_and_metadata_survive_saving_between():
    model = nn.Sequential(OrderedDict(up=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), gate=nn.Linear(4, 6)))
    state_dict = model.state_dict()
    converters = [
        WeightConverter(["gate.weight", "up.weight"], "both.weight", [Interleave(0)]),
        WeightConverter(["gate.bias", "up.bias"], "both.bias", [Interleave(0)]),
    ]
    converted = convert_state_dict(state_dict, converters)
    assert list(converted)[:2] == ["both.weight", "both.bias"]
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    reverted = revert_state_dict(torch.load(file, weights_only=True), converters)
    assert same(reverted, state_dict)
    assert reverted._metadata == state_dict._metadata
    model.load_state_dict(reverted)


def test_without_the_order_sources_stand_where_their_target_was():
    converted = dict(convert_state_dict(llama(layers=1), GATE_UP))
    assert list(revert_state_dict(converted, GATE_UP)) == [
        "embed.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.norm.weight",
    ]


def test_the_given_state_dict_stays_as_it_is():
    state_dict = llama()
    before = dict(state_dict)
    copies = {name: tensor.clone() for name, tensor in state_dict.items()}
    converted = convert_state_dict(state_dict, GATE_UP)
    converted["layers.0.mlp.gate_up_proj.weight"].zero_()
    assert state_dict == before
    assert same(state_dict, copies)


def test_values_that_are_no_tensors_are_handed_on():
    state_dict = llama() | {"layers.0._extra_state": {"a": 1}}
    assert convert_state_dict(state_dict, GATE_UP)["layers.0._extra_state"] == {"a": 1}


def test_lossy_converters_say_so():
    quantize = WeightConverter("a.weight", ["a.weight", "a.weight_scale_inv"], [QuantizeBlockFP8((2, 2))])
    state_dict = {"a.weight": random(4, 4, dtype=torch.bfloat16)}
    assert not quantize.exact
    assert not compose(GATE_UP, quantize).exact
    assert GATE_UP.exact
    converted = convert_state_dict(state_dict, quantize)
    assert converted["a.weight"].dtype == torch.float8_e4m3fn
    assert converted["a.weight_scale_inv"].shape == (2, 2)
    back = revert_state_dict(converted, quantize)["a.weight"]
    assert back.dtype == torch.bfloat16
    assert (back - state_dict["a.weight"]).abs().max() < 0.1
    assert not plan(specs_of(state_dict), quantize).exact
    assert plan(
        specs_of(llama()), [GATE_UP, WeightConverter("x", "y", [Cast(torch.int8, torch.int16)], optional=True)]
    ).exact


@st.composite
def conversions(draw):
    """Converters of several kinds, all exact, and a state dict in any order that they apply to."""
    kinds = {
        "cat": (2, [Concatenate(draw(st.integers(0, 1)))]),
        "sizes": (1, [Chunk(0, sizes=(1, 3)), Concatenate(0, sizes=(1, 3)), Transpose()]),
        "mix": (2, [Interleave(-1), Transpose(), Pad(0, 12, multiple=8)]),
        "stack": (3, [Stack(1)]),
        "apart": (1, [Unstack(0), Stack(0)]),
        "twice": (2, [Concatenate(0), Deinterleave(0), Concatenate(1)]),
    }
    names = draw(st.lists(st.sampled_from(sorted(kinds)), unique=True, min_size=1))
    dtype = draw(
        st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn])
    )
    converters, state_dict = [], {"kept": torch.zeros(1)}
    for name in names:
        count, operations = kinds[name]
        experts = draw(st.booleans())
        sources = [f"m.*.{name}{i}.*.w" if experts else f"m.*.{name}{i}.w" for i in range(count)]
        if experts:
            operations = [*operations, Stack(0)] if name not in ("stack", "apart") else [Transpose(), Stack(0)]
            if name == "stack":
                operations = [Concatenate(0), *operations]
        converters.append(WeightConverter(sources, f"m.*.{name}.packed", operations))
        for layer in range(draw(st.integers(1, 2))):
            for member in range(draw(st.integers(1, 11)) if experts else 1):
                for source in sources:
                    key = source.replace("*", str(layer), 1).replace("*", str(member))
                    bytes_ = torch.randint(0, 256, (4 * 6 * dtype.itemsize,), dtype=torch.uint8)
                    state_dict[key] = bytes_.view(dtype).reshape(4, 6)
    keys = draw(st.permutations(sorted(state_dict)))
    return converters, OrderedDict((key, state_dict[key]) for key in keys)


@settings(max_examples=150, deadline=None)
@given(conversions())
def test_any_state_dict_comes_back_bit_for_bit_in_its_order(case):
    converters, state_dict = case
    converted = convert_state_dict(state_dict, converters)
    assert same(revert_state_dict(converted, converters), state_dict)
    assert specs_of(converted) == plan(specs_of(state_dict), converters).targets
    assert all(converter.inverse().inverse() == converter for converter in converters)


# --- plans ----------------------------------------------------------------------------------------------------------


def test_a_plan_looks_at_names_and_shapes_alone():
    specs = {f"layers.{i}.mlp.{name}.weight": spec(14336, 4096) for i in range(80) for name in ("gate_proj", "up_proj")}
    steps = plan(specs | {"embed": None}, GATE_UP)
    assert len(steps.groups) == 80
    assert steps.targets["layers.79.mlp.gate_up_proj.weight"] == spec(28672, 4096)
    assert steps.kept == ("embed",)
    assert steps.exact
    (sources, operations, targets) = steps.rows()[0]
    assert sources[1] == "layers.0.mlp.up_proj.weight float32[14336, 4096]"
    assert operations == ["Concatenate(dim=0, sizes=None, parts=2)"]
    assert targets == ["layers.0.mlp.gate_up_proj.weight float32[28672, 4096]"]


ONE = WeightConverter("a", "b")
PROBLEMS = {
    "taken by two": ({"a": spec(1)}, [ONE, WeightConverter("*", "c.*")], "a is taken twice: by a -> b and by * -> c.*"),
    "taken twice by one": (
        {"a.a": spec(1), "b.a": spec(1)},
        [WeightConverter(["*.a", "a.*"], "c.*", [Concatenate(0)])],
        "a.a is taken twice: by *.a, a.* -> c.* and by",
    ),
    "written twice": (
        {"a": spec(1), "c": spec(1)},
        [ONE, WeightConverter("c", "b")],
        "b is written twice: by a -> b and by c -> b",
    ),
    "written over another": ({"a": spec(1), "b": spec(1)}, [ONE], "b is written by a -> b, and is there already"),
    "a source missing": (
        {"layers.0.mlp.gate_proj.weight": spec(1)},
        [GATE_UP],
        "layers.0.mlp.up_proj.weight is not there, which layers.0.mlp.gate_proj.weight is converted with",
    ),
    "a member missing": (
        {f"layers.0.experts.{name}.weight": spec(1) for name in ("0.w1", "0.w3", "1.w3")},
        [EXPERTS],
        "layers.0.experts.1.w1.weight is not there",
    ),
    "a hole": (
        {f"layers.0.experts.{name}.weight": spec(1) for name in ("0.w2", "1.w2", "3.w2")},
        [DOWN],
        "layers.0.experts.2.w2.weight is not there, which layers.0.experts.0.w2.weight, layers.0.experts.1.w2.weight, ",
    ),
    "a hole in all sources": (
        {f"layers.0.experts.{name}.weight": spec(1) for name in ("10.w1", "10.w3", *map("{}.w1".format, range(10)))}
        | {f"layers.0.experts.{name}.w3.weight": spec(1) for name in range(1, 10) if name != 2},
        [EXPERTS],
        "layers.0.experts.0.w3.weight, layers.0.experts.2.w3.weight are not there, which",
    ),
    "the first member missing": (
        {f"layers.0.experts.{name}.w2.weight": spec(1) for name in (1, 2)},
        [DOWN],
        "layers.0.experts.0.w2.weight is not there",
    ),
    "a large hole": (
        {f"layers.0.experts.{name}.w2.weight": spec(1) for name in (0, 2, 999_999_999)},
        [DOWN],
        "layers.0.experts.6.w2.weight, layers.0.experts.7.w2.weight and 999,999,991 more are not there, which",
    ),
    "no index of a list": (
        {f"layers.0.experts.{'9' * 40}.w2.weight": spec(1)},
        [DOWN],
        f"layers.0.experts.*.w2.weight: expected members numbered 0, 1, 2, ..., got {'9' * 40}",
    ),
    "no numbers": ({"layers.0.experts.a.w2.weight": spec(1)}, [DOWN], "numbered 0, 1, 2, ..., got a"),
    "numbers written otherwise": ({"layers.0.experts.00.w2.weight": spec(1)}, [DOWN], "got 00"),
    "nothing": ({"x": spec(1), "y": spec(1)}, [ONE], "a: matches none of 2 names, such as x, y"),
    "nothing at all": ({}, [ONE], "a: matches none of 0 names"),
    "no tensor": ({"a": None}, [ONE], "a is taken by a -> b, and is no tensor"),
    "shapes": (
        {"layers.0.mlp.gate_proj.weight": spec(2, 3), "layers.0.mlp.up_proj.weight": spec(2, 4)},
        [GATE_UP],
        "layers.0.mlp.gate_proj.weight, layers.0.mlp.up_proj.weight: Concatenate(dim=0, sizes=None, parts=2): expected",
    ),
    "too many": (
        {"a": spec(3, 2)},
        [WeightConverter("a", ["b", "c"], [Unstack(0)])],
        "a -> b, c: the operations make 3 tensors of a",
    ),
    "taken on the way back": (
        {"layers.0.a": spec(1), "blocks.7.a": spec(1)},
        [WeightConverter("layers.*.a", "blocks.*.a")],
        "blocks.7.a stays, and the way back of layers.*.a -> blocks.*.a would take it",
    ),
    "taken twice on the way back": (
        {"a.x": spec(1), "b.y": spec(1)},
        [WeightConverter("a.*", "c.*"), WeightConverter("b.y", "c.y")],
        "c.y, written by b.y -> c.y, is taken twice back: by a.* -> c.* and by b.y -> c.y",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("specs", "converters", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_a_plan_with_a_problem_is_refused(specs, converters, message):
    with pytest.raises(FusionError, match=re.escape(message)) as caught:
        plan(specs, converters)
    assert str(caught.value).endswith("nothing was converted.")


def test_all_problems_are_told_at_once():
    specs = {
        "layers.0.mlp.gate_proj.weight": spec(2, 3),
        "layers.1.mlp.up_proj.weight": spec(2, 3),
        "a": spec(1),
        "b": spec(1),
    }
    with pytest.raises(FusionError) as caught:
        plan(specs, [GATE_UP, ONE, DOWN])
    assert len(caught.value.problems) == 4
    for part in ("layers.0.mlp.up_proj.weight", "layers.1.mlp.gate_proj.weight", "b is written", "w2.weight: matches"):
        assert part in str(caught.value)


def test_an_optional_converter_may_match_nothing():
    optional = WeightConverter("x.*", "y.*", optional=True)
    assert same(convert_state_dict(llama(), [GATE_UP, optional]), convert_state_dict(llama(), GATE_UP))
    assert optional.inverse().optional
    assert optional.below("m").optional


UNMADE = {
    "parts of a component": (("a.w*", "b"), "a.w* -> b: 'a.w*' is no dotted name with * for whole components"),
    "an empty component": (("a..b", "b"), "'a..b' is no dotted name"),
    "no sources": (([], "b"), "the sources are not one or more different patterns"),
    "one target twice": (("a", ["b", "b"], [Chunk(0)]), "the targets are not one or more different patterns"),
    "captures": ((["a.*", "b"], "c", [Concatenate(0)]), "the sources have not the same number of *"),
    "two more": (("a.*.*", "b", [Stack(), Stack()]), "sources and targets differ by more than one *"),
    "no stack": (("a.*", "b"), "the last * of the sources is not in the targets, which takes exactly one Stack"),
    "two stacks": (("a.*", "b", [Stack(), Stack()]), "takes exactly one Stack"),
    "no unstack": (("a", "b.*", [Stack()]), "the last * of the targets is not in the sources, which takes exactly one"),
    "counts": ((["a", "b"], ["c", "d", "e"], [Transpose()]), "the operations make 2 tensors of 2, not 3"),
    "no operation": ((["a", "b"], "c"), "the operations make 2 tensors of 2, not 1"),
    "an operation in between": (
        (["a", "b"], "c", [Interleave(0, 3)]),
        "Interleave(dim=0, parts=3): expected 3 tensors",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), UNMADE.values(), ids=UNMADE)
def test_patterns_and_operations_that_do_not_go_together_make_no_converter(arguments, message):
    with pytest.raises(FusionError, match=re.escape(message)):
        WeightConverter(*arguments)


def test_what_is_no_converter_is_refused():
    with pytest.raises(FusionError, match=re.escape("'a' is no WeightConverter")):
        plan({}, ["a"])


def test_what_an_operation_refuses_names_the_target():
    padded = WeightConverter("a", "b", [Pad(0, 2, 4)])
    with pytest.raises(FusionError, match=re.escape("a: Unpad(dim=0, original=2, size=4): expected padding of zeros")):
        revert_state_dict({"b": torch.ones(4)}, padded)


@pytest.mark.parametrize(
    "make",
    [
        lambda: WeightConverter(None, "a"),
        lambda: WeightConverter("a", [3]),
        lambda: WeightConverter("a", "b", [Transpose]),
        lambda: WeightConverter("a", "b", Transpose()),
        lambda: WeightConverter("a", "b", ["T"]),
        lambda: compose(None),
        lambda: compose("a"),
        lambda: convert_state_dict(None, [WeightConverter("a", "b")]),
        lambda: convert_state_dict({}, 3),
    ],
)
def test_what_is_of_another_type_altogether_is_refused(make):
    with pytest.raises(FusionError):
        make()
