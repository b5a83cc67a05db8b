"""Converted weights among the ranks of tensor parallelism: shards first or conversion first, the same comes out."""

import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

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
    Permute,
    QuantizeBlockFP8,
    Rename,
    Stack,
    Transpose,
    Unstack,
)
from kernel_loader.fusion.sharding import BlockScales, Sharding, local_converters, shard, sharding_plan, unshard
from kernel_loader.fusion.state_dict import convert_state_dict, specs_of


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def check(state_dict, converters, splits, world_size):
    """The plan of a conversion, after it held for real tensors in both orders."""
    specs = specs_of(state_dict)
    plan = sharding_plan(converters, splits, specs, world_size)
    before = sharding_plan([], splits, specs, world_size)
    local = local_converters(converters, splits, specs, world_size)
    converted = convert_state_dict(state_dict, converters)
    assert list(plan) == list(converted)
    ranks = []
    for rank in range(world_size):
        shards = {name: shard(tensor, before[name], rank) for name, tensor in state_dict.items()}
        ranks.append(convert_state_dict(shards, local))
        for name, tensor in converted.items():
            assert bits(ranks[rank][name]) == bits(shard(tensor, plan[name], rank)), name
            assert tuple(ranks[rank][name].shape) == plan[name].local(tensor.shape)
    for name, tensor in converted.items():
        assert bits(unshard([of_rank[name] for of_rank in ranks], plan[name])) == bits(tensor)
    return plan


MLP = {
    "mlp.gate.weight": random(8, 6),
    "mlp.gate.bias": random(8, seed=1),
    "mlp.up.weight": random(8, 6, seed=2),
    "mlp.up.bias": random(8, seed=3),
    "mlp.down.weight": random(6, 8, seed=4),
    "mlp.down.bias": random(6, seed=5),
    "norm.weight": random(6, seed=6),
}
SPLITS = {"mlp.gate.*": "colwise", "mlp.up.*": "colwise", "mlp.down.*": "rowwise"}


def joined(operation):
    return [
        WeightConverter([f"mlp.gate.{k}", f"mlp.up.{k}"], f"mlp.gate_up.{k}", [operation]) for k in ("weight", "bias")
    ]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gate_and_up_in_one_split_part_by_part(world_size):
    plan = check(MLP, joined(Concatenate(0)), SPLITS, world_size)
    assert plan["mlp.gate_up.weight"] == Sharding(world_size, 0, (8, 8))
    assert plan["mlp.gate_up.bias"] == Sharding(world_size, 0, (8, 8))
    assert plan["mlp.down.weight"] == Sharding(world_size, 1, (8,))
    assert plan["mlp.down.bias"] == plan["norm.weight"] == Sharding(world_size)


def test_a_split_layer_computes_what_the_whole_one_does():
    plan = sharding_plan(joined(Concatenate(0)), SPLITS, specs_of(MLP), 2)
    whole = convert_state_dict(MLP, joined(Concatenate(0)))
    x, of_ranks = random(3, 6, seed=9), []
    for rank in range(2):
        part = {name: shard(tensor, plan[name], rank) for name, tensor in whole.items()}
        gate, up = functional.linear(x, part["mlp.gate_up.weight"], part["mlp.gate_up.bias"]).chunk(2, -1)
        of_ranks.append(functional.linear(functional.silu(gate) * up, part["mlp.down.weight"]))
    gate = functional.linear(x, MLP["mlp.gate.weight"], MLP["mlp.gate.bias"])
    up = functional.linear(x, MLP["mlp.up.weight"], MLP["mlp.up.bias"])
    expected = functional.linear(functional.silu(gate) * up, MLP["mlp.down.weight"])
    torch.testing.assert_close(sum(of_ranks), expected)


def test_interleaved_gate_and_up_split_as_one():
    plan = check(MLP, joined(Interleave(0)), SPLITS, 4)
    assert plan["mlp.gate_up.weight"] == Sharding(4, 0, (16,))
    apart = [converter.inverse() for converter in joined(Interleave(0))]
    packed = convert_state_dict(MLP, joined(Interleave(0)))
    plan = check(packed, apart, {"mlp.gate_up.*": "colwise"}, 4)
    assert plan["mlp.up.bias"] == Sharding(4, 0, (8,))


def test_grouped_query_attention_splits_each_projection():
    state_dict = {"q.weight": random(8, 4), "k.weight": random(4, 4, seed=1), "v.weight": random(4, 4, seed=2)}
    qkv = WeightConverter(list(state_dict), "qkv.weight", [Concatenate(0, sizes=(8, 4, 4))])
    plan = check(state_dict, qkv, {"*.weight": "colwise"}, 4)
    assert plan == {"qkv.weight": Sharding(4, 0, (8, 4, 4))}
    packed = convert_state_dict(state_dict, qkv)
    back = check(packed, qkv.inverse(), {"qkv.weight": Sharding(4, 0, (8, 4, 4))}, 4)
    assert back["v.weight"] == Sharding(4, 0, (4,))
    message = "expected parts along dimension 0 that end where chunks (8, 4, 4) do, got (16,)"
    with pytest.raises(FusionError, match=re.escape(message)):
        check(packed, qkv.inverse(), {"qkv.weight": "colwise"}, 4)


@pytest.mark.parametrize(
    "operations", [[Concatenate(0), Stack(0), Transpose(1, 2)], [Stack(2), Concatenate(-1), Permute((2, 1, 0))]]
)
def test_experts_split_within_each(operations):
    state_dict = {f"experts.{i}.{k}": random(4, 6, seed=10 * i + ord(k)) for i in range(11) for k in "ab"}
    together = WeightConverter(["experts.*.a", "experts.*.b"], "experts.ab", operations)
    for split in ("colwise", "rowwise", "replicated"):
        plan = check(state_dict, together, {"experts.*.*": split}, 2)
        assert check(
            convert_state_dict(state_dict, together), together.inverse(), {"experts.ab": plan["experts.ab"]}, 2
        )


def test_fp8_codes_and_scales_split_between_blocks():
    state_dict = {name: tensor.to(torch.bfloat16) for name, tensor in MLP.items() if "weight" in name}
    first = WeightConverter(["mlp.gate.weight", "mlp.up.weight"], "mlp.gate_up.weight", [Concatenate(0)])
    quantize = WeightConverter("mlp.*.weight", ["mlp.*.weight", "mlp.*.scale"], [QuantizeBlockFP8((2, 4))])
    splits = {"mlp.gate.weight": "colwise", "mlp.up.weight": "colwise", "mlp.down.weight": "rowwise"}
    plan = check(state_dict, compose(first, quantize), splits, 2)
    assert plan["mlp.gate_up.weight"] == Sharding(2, 0, (8, 8))
    assert plan["mlp.gate_up.scale"] == Sharding(2, 0, (4, 4))
    assert plan["mlp.down.scale"] == Sharding(2, 1, (2,))
    message = "8 along dimension 1 among 4 ranks is split within a block of 4: it takes a multiple of 16"
    with pytest.raises(FusionError, match=re.escape(message)):
        check(state_dict, compose(first, quantize), splits, 4)


def test_scales_that_are_sources_split_as_their_weight():
    quantize = WeightConverter("*.w", ["*.w", "*.s"], [QuantizeBlockFP8((2, 2), dtype=torch.float32)])
    state_dict = convert_state_dict({"gate.w": random(8, 6), "up.w": random(8, 6, seed=1)}, quantize)
    join = [WeightConverter([f"gate.{k}", f"up.{k}"], f"both.{k}", [Concatenate(0)]) for k in "ws"]
    splits = {"*.w": "colwise", "*.s": BlockScales("*.w", (2, 2))}
    plan = check(state_dict, join, splits, 4)
    assert plan["both.s"] == Sharding(4, 0, (4, 4))
    # Three blocks for 300 rows divide among three ranks, but the ranks' rows do not end where blocks do.
    ragged = {"a.w": random(300, 2), "a.s": random(3, 1)}
    with pytest.raises(
        FusionError, match=re.escape("300 along dimension 0 among 3 ranks is split within a block of 128")
    ):
        sharding_plan([], {"a.w": "colwise", "a.s": BlockScales("a.w")}, specs_of(ragged), 3)
    with pytest.raises(FusionError, match=re.escape("expected scales [3, 1] for float32[300, 2], got float32[2, 1]")):
        sharding_plan([], {"a.w": "colwise", "a.s": BlockScales("a.w")}, specs_of(ragged | {"a.s": random(2, 1)}), 2)


def test_dequantized_weights_split_as_their_codes():
    state_dict = convert_state_dict(
        {"a.w": random(8, 6)}, WeightConverter("*.w", ["*.w", "*.s"], [QuantizeBlockFP8((2, 2), dtype=torch.float32)])
    )
    back = WeightConverter(["a.w", "a.s"], "a.w", [QuantizeBlockFP8((2, 2), dtype=torch.float32).inverse()])
    assert check(state_dict, back, {"a.w": "colwise", "a.s": BlockScales("a.w", (2, 2))}, 2)["a.w"] == Sharding(
        2, 0, (8,)
    )
    with pytest.raises(
        FusionError, match=re.escape("expected scales that split as (4,) along dimension 0, got replicated")
    ):
        check(state_dict, back, {"a.w": "colwise"}, 2)


def test_what_is_elementwise_changes_no_split():
    both = WeightConverter("*", "m.*", [Rename(), Cast(torch.float64, torch.float32), Pad(1, 6, multiple=4)])
    assert check({"a": random(8, 6)}, both, {"a": "colwise"}, 2) == {"m.a": Sharding(2, 0, (8,))}


@st.composite
def conversions(draw):
    """Operations on alike sources that all split alike."""
    world_size = draw(st.sampled_from([2, 3]))
    count, split = draw(st.integers(1, 3)), draw(st.sampled_from(["colwise", "rowwise", "replicated"]))
    dims = [draw(st.integers(-2, 1)) for _ in range(3)]
    middle = {
        "join": [Concatenate(dims[0])],
        "interleave": [Interleave(dims[0], count)],
        "stack": [Stack(dims[0])],
        "apart": [Concatenate(dims[0]), Chunk(dims[0], parts=count), Interleave(dims[1], count)],
        "unstack": [Stack(0), Transpose(1, 2), Unstack(0), Concatenate(dims[1], parts=count)],
        "rows": [Interleave(dims[0], count), Deinterleave(dims[0], count), Stack(1)],
    }
    operations = middle[draw(st.sampled_from(sorted(middle)))]
    after = draw(st.lists(st.sampled_from([Transpose(), Transpose(0, 1), Rename()]), max_size=2))
    sources = {f"s{i}": random(2 * world_size, 4 * world_size, dtype=torch.bfloat16, seed=i) for i in range(count)}
    return (
        sources,
        WeightConverter(list(sources), "t", [*operations, *after]),
        dict.fromkeys(sources, split),
        world_size,
    )


@settings(max_examples=150, deadline=None)
@given(conversions())
def test_shards_that_are_converted_are_shards_of_what_is_converted(case):
    check(*case)


def test_a_replicated_tensor_is_handed_on_and_a_shard_is_its_own():
    x = random(4, 4)
    assert shard(x, Sharding(2), 1) is x
    piece = shard(x, Sharding(2, 0, (4,)), 1)
    piece.zero_()
    assert x.equal(random(4, 4))
    assert unshard([x, x], Sharding(2)) is x
    codes = x.to(torch.float8_e4m3fn)
    assert bits(unshard([shard(codes, Sharding(2, 1, (4,)), rank) for rank in (0, 1)], Sharding(2, 1, (4,)))) == bits(
        codes
    )


SPECS = specs_of(MLP | {"step": 3})
REFUSED = {
    "nothing matches": ([], {"x.*": "colwise"}, 2, "x.* matches none of 8 names"),
    "two patterns": (
        [],
        {"norm.*": "colwise", "*.weight": "colwise"},
        2,
        "norm.weight is split twice: by norm.* and by",
    ),
    "sizes": ([], SPLITS, 3, "mlp.gate.weight: (8,) along dimension 0 do not divide by 3 ranks"),
    "no split": ([], {"norm.weight": "columns"}, 2, "'columns' is none of colwise, rowwise, replicated"),
    "other ranks": ([], {"norm.weight": Sharding(4, 0, (6,))}, 2, "is not for 2 ranks"),
    "parts": ([], {"norm.weight": Sharding(2, 0, (2, 2))}, 2, "expected size 4 along dimension 0, got [6]"),
    "no weight": ([], {"norm.weight": BlockScales("norm.w")}, 2, "its weight norm.w is not there, or not split"),
    "scales of a bias": (
        [],
        {"mlp.gate.bias": "colwise", "norm.weight": BlockScales("mlp.gate.bias")},
        2,
        "norm.weight: expected a weight of two dimensions or more for scales of blocks, got float32[8]",
    ),
    "no tensor": ([], {"step": "colwise"}, 2, "step: step splits it, and it is no tensor"),
    "scales of what is no tensor": (
        [],
        {"step": "replicated", "norm.weight": BlockScales("step")},
        2,
        "norm.weight: its weight step is no tensor",
    ),
    "mixed": (
        joined(Concatenate(0)),
        {"mlp.gate.*": "colwise"},
        2,
        "expected sources that split alike, got (8,) along dimension 0, replicated",
    ),
    "two ways": (
        joined(Interleave(0))[:1],
        {"mlp.gate.weight": "colwise", "mlp.up.weight": "rowwise"},
        2,
        "got (8,) along dimension 0, (6,) along dimension 1",
    ),
    "padding": (
        WeightConverter("norm.weight", "n", [Pad(0, 6, 8)]),
        {"norm.weight": "colwise"},
        2,
        "expected dimension 0 whole, where the padding is, got (6,) among ranks",
    ),
    "taken apart": (
        WeightConverter("mlp.down.weight", [f"d{i}" for i in range(6)], [Unstack(0)]),
        {"mlp.down.weight": "colwise"},
        2,
        "expected dimension 0 whole, which is taken apart, got (6,) along dimension 0",
    ),
    "rows of a rank": (
        WeightConverter("mlp.gate.weight", ["a", "b"], [Deinterleave(0)]),
        {"mlp.gate.weight": "colwise"},
        8,
        "expected parts along dimension 0 that are multiples of 16, got (8,)",
    ),
}


@pytest.mark.parametrize(("converters", "splits", "world_size", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_split_is_refused(converters, splits, world_size, message):
    with pytest.raises(FusionError, match=re.escape(message)):
        sharding_plan(converters, splits, SPECS, world_size)


COLWISE = {"norm.weight": "colwise"}
PLAN = {"converters": [], "splits": COLWISE, "shapes": SPECS, "world_size": 2}
SHARDING = Sharding(2, 0, (4,))
PIECE = {"tensor": random(4), "sharding": SHARDING, "rank": 0}
PIECES = {"shards": [random(2), random(2)], "sharding": SHARDING}
WRONG = [
    *[
        (called, PLAN | {name: value}, message)
        for called in (sharding_plan, local_converters)
        for name, value, message in [
            (
                "world_size",
                "2",
                "world_size is a whole number from 1, and '2' was given. Pass how many ranks there are",
            ),
            ("world_size", 2.0, "world_size is a whole number from 1, and 2.0 was given"),
            ("world_size", True, "world_size is a whole number from 1, and True was given"),
            ("world_size", 0, "world_size is a whole number from 1, and 0 was given"),
            ("splits", None, "splits is a table from patterns to how they split, and None was given. Pass splits={"),
            ("splits", ["norm.weight"], "splits is a table from patterns to how they split, and ['norm.weight'] was"),
            ("splits", {1: "colwise"}, "splits is a table from patterns to how they split, and {1: 'colwise'} was"),
            ("splits", {"norm.weight": ["colwise"]}, "splits['norm.weight'] is colwise, rowwise, replicated, a Block"),
            ("splits", {"norm.weight": 0}, "a BlockScales or a Sharding, and 0 was given"),
            ("shapes", None, "shapes is a table from names to TensorSpec, and None was given. Pass shapes=specs_of("),
            ("shapes", list(MLP), "shapes is a table from names to TensorSpec, and a value of type list was given"),
            ("shapes", (n for n in MLP), "shapes is a table from names to TensorSpec, and <generator object"),
            ("shapes", {1: SPECS["norm.weight"]}, "shapes is a table from names to TensorSpec, and {1: TensorSpec("),
            ("shapes", MLP, "shapes['mlp.gate.weight'] is a TensorSpec, and a tensor float32[8, 6] was given. Pass"),
            ("shapes", {"norm.weight": (6,)}, "shapes['norm.weight'] is a TensorSpec, and (6,) was given"),
            ("shapes", {"norm.weight": TensorSpec([6], torch.float)}, "is a TensorSpec, and TensorSpec(shape=[6]"),
            ("shapes", {"norm.weight": TensorSpec((6,), "float32")}, "is a TensorSpec, and TensorSpec(shape=(6,), dt"),
            ("converters", (c for c in ()), "is no WeightConverter, and no list of them"),
            ("converters", None, "None is no WeightConverter, and no list of them"),
        ]
    ],
    *[
        (shard, PIECE | {name: value}, message)
        for name, value, message in [
            ("rank", "0", "rank is a whole number, and '0' was given. Ranks are counted from 0."),
            ("rank", 1.0, "rank is a whole number, and 1.0 was given"),
            ("rank", False, "rank is a whole number, and False was given"),
            ("rank", -1, "there is no rank -1 of 2. Ranks are counted from 0."),
            ("rank", 2, "there is no rank 2 of 2. Ranks are counted from 0."),
            ("tensor", [1.0] * 4, "tensor is a torch.Tensor, and [1.0, 1.0, 1.0, 1.0] was given"),
            ("tensor", specs_of(MLP)["norm.weight"], "tensor is a torch.Tensor, and TensorSpec(shape=(6,)"),
            ("tensor", random(5), "expected size 4 along dimension 0, got [5]"),
            ("sharding", "colwise", "sharding is a Sharding, and 'colwise' was given. Take the one of this tensor"),
            ("sharding", {"w": SHARDING}, "sharding is a Sharding, and {'w': Sharding("),
        ]
    ],
    *[
        (unshard, PIECES | {name: value}, message)
        for name, value, message in [
            ("shards", [random(2)], "expected 2 shards, got 1. Give one of each rank."),
            ("shards", [random(2), random(3)], "size 2 along dimension 0, got float32[2], float32[3]"),
            ("shards", (x for x in PIECES["shards"]), "shards is a list of tensors, and <generator object"),
            ("shards", random(2, 2), "shards is a list of tensors, and a tensor float32[2, 2] was given. Pass a list"),
            ("shards", None, "shards is a list of tensors, and None was given"),
            ("shards", [[1.0, 2.0], [3.0, 4.0]], "shards is a list of tensors, and [[1.0, 2.0], [3.0, 4.0]] was given"),
            ("shards", dict(enumerate(PIECES["shards"])), "shards is a list of tensors, and {0: tensor("),
            ("shards", [random(2), random(2).to("meta")], "expected shards on one device, got cpu, meta. Bring them"),
            ("sharding", 2, "sharding is a Sharding, and 2 was given"),
        ]
    ],
    (
        unshard,
        {"shards": [random(2), random(3)], "sharding": Sharding(2)},
        "one shape and dtype, got float32[2], float",
    ),
    (Sharding, {"world_size": "2"}, "world_size is a whole number from 1, and '2' was given"),
    (
        Sharding,
        {"world_size": 2, "dim": "0"},
        "dim is None or a whole number from 0, and '0' was given. Write Sharding",
    ),
    (Sharding, {"world_size": 2, "dim": -1, "parts": (4,)}, "dim is None or a whole number from 0, and -1 was given"),
    (
        Sharding,
        {"world_size": 2, "dim": 0, "parts": 4},
        "parts is a tuple of sizes along dim, or empty without dim, and",
    ),
    (Sharding, {"world_size": 2, "dim": 0, "parts": (4, "4")}, "parts is a tuple of sizes along dim, or empty without"),
    (Sharding, {"world_size": 2, "parts": (4,)}, "empty without dim, and (4,) was given"),
    (BlockScales, {"of": 3}, "of is a source pattern, and 3 was given. Write BlockScales("),
    (BlockScales, {"of": "w", "block_size": 128}, "block_size is rows and columns, two whole numbers from 1, and 128"),
    (
        BlockScales,
        {"of": "w", "block_size": (0, 1)},
        "block_size is rows and columns, two whole numbers from 1, and (0",
    ),
    (SHARDING.local, {"shape": 4}, "shape is a tuple of sizes, and 4 was given. Pass the shape of the tensor"),
]


@pytest.mark.parametrize(("called", "arguments", "message"), WRONG)
def test_an_argument_of_another_kind_is_refused_by_name(called, arguments, message):
    with pytest.raises(FusionError, match=re.escape(message)):
        called(**arguments)


def test_a_list_of_parts_stands_for_a_tuple():
    assert hash(Sharding(2, 0, [2, 2])) == hash(Sharding(2, 0, (2, 2)))
    assert BlockScales("w", [2, 2]) == BlockScales("w", (2, 2))


def test_what_is_no_tensor_stays_where_nothing_splits_it():
    assert sharding_plan([], COLWISE | {"step": "replicated"}, SPECS, 2)["step"] == Sharding(2)
    assert sharding_plan([], COLWISE, SPECS, 2)["step"] == Sharding(2)


def test_groups_that_split_in_different_ways_have_no_common_converter():
    state_dict = {f"{i}.{k}": random(4, 4) for i in range(2) for k in "ab"}
    join = WeightConverter(["*.a", "*.b"], "*.ab", [Concatenate(0, sizes=(4, 4))])
    splits = {"0.*": "colwise", "1.*": "rowwise"}
    assert sharding_plan(join, splits, specs_of(state_dict), 2)["1.ab"] == Sharding(2, 1, (4,))
    with pytest.raises(FusionError, match="its groups split in different ways. Give each way a converter."):
        local_converters(join, splits, specs_of(state_dict), 2)
