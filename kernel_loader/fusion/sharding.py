"""How converted weights split among the ranks of tensor parallelism, as their sources do.

A layer that is split `colwise` has rows of its weight (out, in) on each rank, and of its bias; one that is split
`rowwise` has columns, and the whole bias; as in the plans of transformers and of
torch.distributed.tensor.parallel. What is packed of several sources is split part by part: with gate and up in one
tensor, a rank has its rows of gate, and then its rows of up.

What a plan says holds in either order: shards that are converted on each rank, by `local_converters`, are the shards of
the converted tensors, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import Composition, Converters, Pattern, WeightConverter, compose
from kernel_loader.fusion.operation import Operation, TensorSpec, moved
from kernel_loader.fusion.plan import Plan, Specs, Step, plan
from kernel_loader.fusion.split import (
    ADVICE,
    Sharding,
    Traced,
    are_counts,
    local_operation,
    need,
    need_ranks,
    of_scales,
    split_after,
)

__all__ = ["BlockScales", "Sharding", "Split", "local_converters", "shard", "sharding_plan", "unshard"]

Split = Literal["colwise", "rowwise", "replicated"]


@dataclass(frozen=True)
class BlockScales:
    """Scales of a block-quantised weight as sources: they split as the weight does, if that is between blocks.

    Attributes:
        of: the source pattern of the weight, whose `*` are those of the scales' pattern.
        block_size: rows and columns of the weight that share a scale.

    Raises:
        FusionError: one of them is not that.
    """

    of: str
    block_size: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        form = 'Write BlockScales("*.weight", (128, 128)).'
        need(isinstance(self.of, str), "of", "a source pattern", self.of, form)
        right = are_counts(self.block_size, 1) and len(self.block_size) == 2
        need(right, "block_size", "rows and columns, two whole numbers from 1", self.block_size, form)
        object.__setattr__(self, "block_size", tuple(self.block_size))


def sharding_plan(
    converters: Converters,
    splits: Mapping[str, Split | BlockScales | Sharding],
    shapes: Specs,
    world_size: int,
) -> dict[str, Sharding]:
    """How every tensor splits after a conversion.

    Args:
        converters: from the layout of `shapes` to another.
        splits: pattern of names in `shapes` -> how these split; all others are replicated. A source that is itself
            packed needs a `Sharding` with its parts.
        shapes: of all tensors before the conversion, as `specs_of` gives them.
        world_size: how many ranks there are.

    Raises:
        FusionError: an argument is of another kind; or, with a line for every problem: a pattern that matches nothing,
            sizes that do not divide by `world_size`, scales that would be split within a block, sources that split in
            ways which cannot be joined.
    """
    before = _of_sources(splits, shapes, world_size)
    steps = plan(shapes, converters)
    after = {name: before[name] for name in steps.kept}
    for name, (_, sharding) in _traced(steps, before)[0].items():
        after[name] = sharding
    return {name: after[name] for name in steps.targets}


def local_converters(
    converters: Converters,
    splits: Mapping[str, Split | BlockScales | Sharding],
    shapes: Specs,
    world_size: int,
) -> Composition:
    """The converters for the shards of one rank: the same, with sizes as they are there.

    Raises:
        FusionError: as `sharding_plan`; or one converter has sources that split in different ways.
    """
    before = _of_sources(splits, shapes, world_size)
    local = _traced(plan(shapes, converters), before)[1]
    return Composition(
        tuple(tuple(_localised(converter, local) for converter in stage) for stage in compose(converters).stages)
    )


def shard(tensor: Tensor, sharding: Sharding, rank: int) -> Tensor:
    """What a rank has of a tensor: contiguous and its own memory; the tensor itself where that is replicated.

    Raises:
        FusionError: an argument is of another kind, the tensor does not split like this, or there is no such rank.
    """
    need(isinstance(tensor, Tensor), "tensor", "a torch.Tensor", tensor, "Pass one tensor.")
    _need_sharding(sharding)
    need(type(rank) is int, "rank", "a whole number", rank, "Ranks are counted from 0.")
    if not 0 <= rank < sharding.world_size:
        raise FusionError((f"there is no rank {rank} of {sharding.world_size}",), "Ranks are counted from 0.")
    sharding.local(tensor.shape)
    if (dim := sharding.dim) is None:
        return tensor
    sizes = [part // sharding.world_size for part in sharding.parts]

    def mine(bits: list[Tensor]) -> list[Tensor]:
        parts = torch.split(bits[0], list(sharding.parts), dim)
        return [torch.cat([p.narrow(dim, rank * size, size) for p, size in zip(parts, sizes, strict=True)], dim)]

    return moved([tensor], mine)[0]


def unshard(shards: Sequence[Tensor], sharding: Sharding) -> Tensor:
    """The tensor, of what the ranks have of it, in their order; the first of them where it is replicated.

    Raises:
        FusionError: an argument is of another kind, not one shard a rank, they are not shards of one tensor that splits
            like this, or not on one device.
    """
    advice = "Pass a list of what the ranks have, in their order."
    need(_are_tensors(shards), "shards", "a list of tensors", shards, advice)
    _need_sharding(sharding)
    if len(shards) != sharding.world_size:
        raise FusionError((f"expected {sharding.world_size} shards, got {len(shards)}",), "Give one of each rank.")
    dim, sizes = sharding.dim, [part // sharding.world_size for part in sharding.parts]
    kinds = {TensorSpec.of(tensor) for tensor in shards}
    if len(kinds) > 1 or (dim is not None and (shards[0].ndim <= dim or shards[0].shape[dim] != sum(sizes))):
        along = "" if dim is None else f" with size {sum(sizes)} along dimension {dim}"
        got = ", ".join(str(TensorSpec.of(tensor)) for tensor in shards)
        raise FusionError(
            (f"expected shards of one shape and dtype{along}, got {got}",),
            "Give the shards that `shard` made with this sharding.",
        )
    if dim is None:
        return shards[0]
    if len(devices := {str(tensor.device) for tensor in shards}) > 1:
        problem = f"expected shards on one device, got {', '.join(sorted(devices))}"
        raise FusionError((problem,), "Bring them to one device.")

    def whole(bits: list[Tensor]) -> list[Tensor]:
        of_rank = [torch.split(part, sizes, dim) for part in bits]
        return [torch.cat([pieces[i] for i in range(len(sizes)) for pieces in of_rank], dim)]

    return moved(shards, whole)[0]


def _need_sharding(sharding: object) -> None:
    advice = "Take the one of this tensor from what `sharding_plan` gives."
    need(isinstance(sharding, Sharding), "sharding", "a Sharding", sharding, advice)


def _of_sources(
    splits: Mapping[str, Split | BlockScales | Sharding], shapes: Specs, world_size: int
) -> dict[str, Sharding]:
    """How each tensor splits before a conversion."""
    form = 'Pass splits={"*.q_proj.weight": "colwise"}, or splits={} where nothing is split.'
    need(_is_table(splits), "splits", "a table from patterns to how they split", splits, form)
    for text, split in splits.items():
        kinds = "colwise, rowwise, replicated, a BlockScales or a Sharding"
        need(isinstance(split, str | BlockScales | Sharding), f"splits[{text!r}]", kinds, split, form)
    form = "Pass shapes=specs_of(state_dict)."
    need(_is_table(shapes), "shapes", "a table from names to TensorSpec", shapes, form)
    for name, spec in shapes.items():
        need(_is_spec(spec), f"shapes[{name!r}]", "a TensorSpec", spec, form)
    need_ranks(world_size)
    patterns = {text: Pattern(text) for text in splits}
    found: dict[str, Sharding] = {}
    problems: list[str] = []
    unmatched = dict.fromkeys(splits)
    for name, spec in shapes.items():
        matches = [(text, captures) for text, p in patterns.items() if (captures := p.match(name)) is not None]
        if len(matches) > 1:
            problems.append(f"{name} is split twice: by {' and by '.join(text for text, _ in matches)}")
        for text, captures in matches:
            unmatched.pop(text, None)
            try:
                found[name] = _of_source(splits, text, captures, shapes, spec, world_size)
                if spec is not None:
                    found[name].local(spec.shape)
            except FusionError as error:
                problems += [f"{name}: {problem}" for problem in error.problems]
    problems += [f"{text} matches none of {len(shapes)} names" for text in unmatched]
    if problems:
        raise FusionError(tuple(problems), ADVICE)
    return {name: found.get(name, Sharding(world_size)) for name in shapes}


def _are_tensors(values: object) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, Tensor) for value in values)


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_spec(spec: object) -> bool:
    if not isinstance(spec, TensorSpec):
        return spec is None
    shape, dtype = cast("tuple[object, object]", spec)
    return isinstance(shape, tuple) and are_counts(shape) and isinstance(dtype, torch.dtype)


def _of_source(
    splits: Mapping[str, Split | BlockScales | Sharding],
    pattern: str,
    captures: Sequence[str],
    shapes: Specs,
    spec: TensorSpec | None,
    world_size: int,
) -> Sharding:
    split = splits[pattern]
    if split == "replicated":
        return Sharding(world_size)
    if spec is None:
        raise FusionError((f"{pattern} splits it, and it is no tensor",), ADVICE)
    if isinstance(split, BlockScales):
        weight = Pattern(split.of).fill(captures) if split.of.count("*") == len(captures) else split.of
        if isinstance(splits.get(split.of, split), BlockScales) or weight not in shapes:
            raise FusionError((f"its weight {weight} is not there, or not split",), "Split the weight, too.")
        if (of := shapes[weight]) is None:
            raise FusionError((f"its weight {weight} is no tensor",), ADVICE)
        of_weight = _of_source(splits, split.of, captures, shapes, of, world_size)
        return of_scales(of_weight, of, split.block_size, spec)
    if isinstance(split, Sharding):
        if split.world_size != world_size:
            raise FusionError((f"{split} is not for {world_size} ranks",), ADVICE)
        return split
    if split not in ("colwise", "rowwise"):
        raise FusionError((f"{split!r} is none of colwise, rowwise, replicated",), ADVICE)
    ndim = len(spec.shape)
    if ndim == 0 or (split == "rowwise" and ndim == 1):
        return Sharding(world_size)
    dim = max(ndim - 2, 0) if split == "colwise" else ndim - 1
    return Sharding(world_size, dim, (spec.shape[dim],))


def _traced(
    steps: Plan, before: Mapping[str, Sharding]
) -> tuple[dict[str, Traced], dict[tuple[WeightConverter, int], set[Operation]]]:
    """How the targets of a plan split, and the operations of its converters as they are for shards."""
    local: dict[tuple[WeightConverter, int], set[Operation]] = {}
    problems: list[str] = []

    def follow(step: Step, position: int, operation: Operation, given: list[Traced]) -> list[Traced]:
        specs = operation.shapes([traced.spec for traced in given])
        after = split_after(operation, given, specs)
        for spec, sharding in zip(specs, after, strict=True):
            sharding.local(spec.shape)
        local.setdefault((step.converter, position), set()).add(local_operation(operation, given, specs))
        return [Traced(spec, sharding) for spec, sharding in zip(specs, after, strict=True)]

    traced: dict[str, Traced] = {}
    for group in steps.groups:
        given = {
            name: Traced(spec, before[name]) for name in group.sources if (spec := steps.sources[name]) is not None
        }
        try:
            traced |= group.flow(given, follow)
        except FusionError as error:
            problems += [f"{', '.join(group.targets[:3])}: {problem}" for problem in error.problems]
    if problems:
        raise FusionError(tuple(problems), ADVICE)
    return traced, local


def _localised(
    converter: WeightConverter, local: Mapping[tuple[WeightConverter, int], set[Operation]]
) -> WeightConverter:
    operations: list[Operation] = []
    for position, operation in enumerate(converter.operations):
        found = local.get((converter, position), {operation})
        if len(found) > 1:
            raise FusionError((f"{converter}: its groups split in different ways",), "Give each way a converter.")
        operations += found
    return WeightConverter(converter.sources, converter.targets, operations, optional=converter.optional)
