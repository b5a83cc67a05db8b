"""How the results of each operation split among ranks, given how its sources do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.fusion.operation import Operation, TensorSpec
from kernel_loader.fusion.operations import (
    Cast,
    Chunk,
    Concatenate,
    Deinterleave,
    DequantizeBlockFP8,
    Interleave,
    Pad,
    Permute,
    QuantizeBlockFP8,
    Rename,
    Stack,
    Transpose,
    Unpad,
    Unstack,
)
from kernel_loader.fusion.pattern import shown

ADVICE: Final = "Correct the splits, split among fewer ranks, or leave these tensors whole."


def need(right: bool, what: str, wanted: str, given: object, advice: str) -> None:  # noqa: FBT001 - the condition
    """Refuse an argument that is not what is wanted.

    Raises:
        FusionError: it is not `right`.
    """
    if right:
        return
    text = f"a tensor {TensorSpec.of(given)}" if isinstance(given, Tensor) else shown(given)
    raise FusionError((f"{what} is {wanted}, and {text} was given",), advice)


def is_count(value: object, least: int = 0) -> bool:
    """Whether it is a whole number that is not below the least."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def are_counts(values: object, least: int = 0) -> bool:
    """Whether it is a tuple or a list of such numbers."""
    return isinstance(values, tuple | list) and all(is_count(value, least) for value in values)


def need_ranks(world_size: object) -> None:
    """Refuse what is no number of ranks.

    Raises:
        FusionError: it is none.
    """
    advice = "Pass how many ranks there are, such as world_size=8."
    need(is_count(world_size, 1), "world_size", "a whole number from 1", world_size, advice)


@dataclass(frozen=True)
class Sharding:
    """How one tensor splits among ranks.

    Attributes:
        world_size: how many ranks there are.
        dim: that it is split along, counted from the front; None where every rank has all of it.
        parts: sizes of the pieces along `dim` that are split each by itself; together they are its size.

    Raises:
        FusionError: one of them is not that.
    """

    world_size: int
    dim: int | None = None
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        need_ranks(self.world_size)
        form = "Write Sharding(2, 0, (8, 8)) for two ranks, dimension 0, and two parts of 8; Sharding(2) for all of it."
        need(self.dim is None or is_count(self.dim), "dim", "None or a whole number from 0", self.dim, form)
        right = are_counts(self.parts) and (self.dim is not None or not self.parts)
        need(right, "parts", "a tuple of sizes along dim, or empty without dim", self.parts, form)
        object.__setattr__(self, "parts", tuple(self.parts))

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a shard of a tensor of this shape.

        Raises:
            FusionError: it is no shape, the parts are not those of it, or do not divide by `world_size`.
        """
        need(are_counts(shape), "shape", "a tuple of sizes", shape, "Pass the shape of the tensor, tensor.shape.")
        shape = tuple(shape)
        if self.dim is None:
            return shape
        size = sum(self.parts)
        if not 0 <= self.dim < len(shape) or size != shape[self.dim]:
            raise FusionError((f"expected size {size} along dimension {self.dim}, got {list(shape)}",), ADVICE)
        if any(part % self.world_size for part in self.parts):
            problem = f"{self.parts} along dimension {self.dim} do not divide by {self.world_size} ranks"
            raise FusionError((problem,), ADVICE)
        return (*shape[: self.dim], shape[self.dim] // self.world_size, *shape[self.dim + 1 :])


class Traced(NamedTuple):
    """What stands for a tensor while a plan is followed."""

    spec: TensorSpec
    sharding: Sharding


def of_scales(
    sharding: Sharding, weight: TensorSpec, block_size: tuple[int, int], scales: TensorSpec | None = None
) -> Sharding:
    """How the scales of a weight split: as the weight, if each rank has whole blocks of every part."""
    dim = sharding.dim
    if len(weight.shape) < 2:
        raise FusionError((f"expected a weight of two dimensions or more for scales of blocks, got {weight}",), ADVICE)
    sides = [1] * (len(weight.shape) - 2) + list(block_size)
    expected = tuple(-(-size // side) for size, side in zip(weight.shape, sides, strict=True))
    if scales is not None and scales.shape != expected:
        raise FusionError((f"expected scales {list(expected)} for {weight}, got {scales}",), ADVICE)
    if dim is None:
        return sharding
    needed = sides[dim] * sharding.world_size
    if sharding.world_size == 1:
        return Sharding(1, dim, (expected[dim],))
    if uneven := [part for part in sharding.parts if part % needed]:
        problem = f"{uneven[0]} along dimension {dim} among {sharding.world_size} ranks is split within a block of"
        raise FusionError((f"{problem} {sides[dim]}: it takes a multiple of {needed}",), ADVICE)
    return replace(sharding, parts=tuple(part // sides[dim] for part in sharding.parts))


def split_after(operation: Operation, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    """How the results of an operation split."""
    shardings = [traced.sharding for traced in given]
    if all(sharding.dim is None for sharding in shardings):
        return shardings[:1] * len(specs)
    for kinds, rule in _RULES:
        if isinstance(operation, kinds):
            return rule(operation, given, specs)
    raise operation.refuses("replicated sources", "split ones", "Leave them whole: nothing says how it splits.")


def _unchanged(operation: Operation, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:  # noqa: ARG001
    return [traced.sharding for traced in given]


def _reordered(operation: Transpose | Permute, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:  # noqa: ARG001
    return [
        sharding
        if sharding.dim is None
        else replace(sharding, dim=operation.order(len(spec.shape)).index(sharding.dim))
        for spec, sharding in given
    ]


def _padded(operation: Pad | Unpad, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:  # noqa: ARG001
    for spec, sharding in given:
        if sharding.dim == operation.dim % len(spec.shape) and operation.size != operation.original:
            raise operation.refuses(
                f"dimension {sharding.dim} whole, where the padding is", f"{sharding.parts} among ranks"
            )
    return [sharding for _, sharding in given]


def _alike(operation: Operation, given: list[Traced]) -> Sharding:
    """The one way in which all sources split."""
    ways = {traced.sharding for traced in given}
    if len(ways) > 1:
        raise operation.refuses("sources that split alike", ", ".join(map(_spelt, (sharding for _, sharding in given))))
    return ways.pop()


def _spelt(sharding: Sharding) -> str:
    return "replicated" if sharding.dim is None else f"{sharding.parts} along dimension {sharding.dim}"


def _concatenated(operation: Concatenate, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    along = operation.dim % len(specs[0].shape)
    if any(sharding.dim != along for _, sharding in given):
        return [_alike(operation, given)]
    return [replace(given[0].sharding, parts=tuple(part for _, sharding in given for part in sharding.parts))]


def _chunked(operation: Chunk, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    ((spec, sharding),) = given
    along = operation.dim % len(spec.shape)
    if sharding.dim != along:
        return [sharding] * len(specs)
    left = list(sharding.parts)
    results = []
    for target in specs:
        parts: list[int] = []
        while left and sum(parts) < target.shape[along]:
            parts.append(left.pop(0))
        if sum(parts) != target.shape[along]:
            sizes = tuple(one.shape[along] for one in specs)
            raise operation.refuses(
                f"parts along dimension {along} that end where chunks {sizes} do",
                sharding.parts,
                f"Give the source as Sharding({sharding.world_size}, {along}, {sizes}).",
            )
        results.append(replace(sharding, parts=tuple(parts)))
    return results


def _stacked(operation: Stack, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    sharding = _alike(operation, given)
    assert sharding.dim is not None
    return [replace(sharding, dim=sharding.dim + (sharding.dim >= operation.dim % len(specs[0].shape)))]


def _unstacked(operation: Unstack, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    ((spec, sharding),) = given
    along = operation.dim % len(spec.shape)
    assert sharding.dim is not None
    if sharding.dim == along:
        raise operation.refuses(f"dimension {along} whole, which is taken apart", _spelt(sharding))
    return [replace(sharding, dim=sharding.dim - (sharding.dim > along))] * len(specs)


def _interleaved(operation: Interleave, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    sharding = _alike(operation, given)
    if sharding.dim != operation.dim % len(specs[0].shape):
        return [sharding]
    return [replace(sharding, parts=tuple(operation.parts * part for part in sharding.parts))]


def _deinterleaved(operation: Deinterleave, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    ((spec, sharding),) = given
    if sharding.dim != operation.dim % len(spec.shape):
        return [sharding] * len(specs)
    needed = operation.parts * sharding.world_size
    if any(part % needed for part in sharding.parts):
        raise operation.refuses(f"parts along dimension {sharding.dim} that are multiples of {needed}", sharding.parts)
    return [replace(sharding, parts=tuple(part // operation.parts for part in sharding.parts))] * len(specs)


def _quantized(operation: QuantizeBlockFP8, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:
    ((spec, sharding),) = given
    return [sharding, of_scales(sharding, spec, operation.block_size, specs[1])]


def _dequantized(operation: DequantizeBlockFP8, given: list[Traced], specs: list[TensorSpec]) -> list[Sharding]:  # noqa: ARG001
    codes, scales = given
    expected = of_scales(codes.sharding, codes.spec, operation.block_size)
    if scales.sharding != expected:
        raise operation.refuses(f"scales that split as {_spelt(expected)}", _spelt(scales.sharding))
    return [codes.sharding]


# Each rule takes operations of the classes beside it, which their common type cannot say.
_Rule = Callable[..., list[Sharding]]
_RULES: Final[tuple[tuple[type[Operation] | tuple[type[Operation], ...], _Rule], ...]] = (
    ((Rename, Cast), _unchanged),
    ((Transpose, Permute), _reordered),
    ((Pad, Unpad), _padded),
    (Concatenate, _concatenated),
    (Chunk, _chunked),
    (Stack, _stacked),
    (Unstack, _unstacked),
    (Interleave, _interleaved),
    (Deinterleave, _deinterleaved),
    (QuantizeBlockFP8, _quantized),
    (DequantizeBlockFP8, _dequantized),
)


def local_operation(operation: Operation, given: list[Traced], specs: list[TensorSpec]) -> Operation:
    """An operation as it is for the shards of one rank: with sizes along the split dimension as they are there."""
    if not isinstance(operation, Concatenate | Chunk) or operation.sizes is None:
        return operation
    along = operation.dim % len(specs[0].shape)
    sharding = given[0].sharding
    if sharding.dim != along:
        return operation
    return replace(operation, sizes=tuple(size // sharding.world_size for size in operation.sizes))
