"""Converted weights among the ranks of tensor parallelism: shards first or conversion first, the same comes out."""

import re

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import WeightConverter, compose
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


SPECS = specs_of(MLP)
REFUSED = {
    "nothing matches": ([], {"x.*": "colwise"}, 2, "x.* matches none of 7 names"),
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


def test_groups_that_split_in_different_ways_have_no_common_converter():
    state_dict = {f"{i}.{k}": random(4, 4) for i in range(2) for k in "ab"}
    join = WeightConverter(["*.a", "*.b"], "*.ab", [Concatenate(0, sizes=(4, 4))])
    splits = {"0.*": "colwise", "1.*": "rowwise"}
    assert sharding_plan(join, splits, specs_of(state_dict), 2)["1.ab"] == Sharding(2, 1, (4,))
    with pytest.raises(FusionError, match="its groups split in different ways. Give each way a converter."):
        local_converters(join, splits, specs_of(state_dict), 2)


def test_shards_that_are_none_are_refused():
    sharding = Sharding(2, 0, (4,))
    for rank in (-1, 2):
        with pytest.raises(FusionError, match=re.escape(f"there is no rank {rank} of 2. Ranks are counted from 0.")):
            shard(random(4), sharding, rank)
    with pytest.raises(FusionError, match="expected 2 shards, got 1"):
        unshard([random(2)], sharding)
    with pytest.raises(FusionError, match=re.escape("size 2 along dimension 0, got float32[2], float32[3]")):
        unshard([random(2), random(3)], sharding)
    with pytest.raises(FusionError, match=re.escape("expected size 4 along dimension 0, got [5]")):
        shard(random(5), sharding, 0)
