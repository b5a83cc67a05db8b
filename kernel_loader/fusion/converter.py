"""Which weights become which: patterns of names, and the operations between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar, runtime_checkable

from kernel_loader.errors import FusionError
from kernel_loader.fusion.operation import Operation
from kernel_loader.fusion.operations import Stack, Unstack

T = TypeVar("T")

_FORM: Final = 'Write WeightConverter(["gate.weight", "up.weight"], "gate_up.weight", [Concatenate(0)]).'


@dataclass(frozen=True, init=False)
class WeightConverter:
    """Weights of one layout as those of another.

        WeightConverter(
            ["model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"],
            "model.layers.*.mlp.gate_up_proj.weight",
            [Concatenate(dim=0)],
        )

    A pattern is the dotted name of a tensor, in which `*` stands for one component, a number or a word. Tensors whose
    `*` are the same belong together, one of each pattern, and make one group of targets: what the sources' `*` stood
    for is put in those of the targets, in order.

    Sources may have one `*` more than targets. Their last one then runs over a list, such as experts, whose members are
    numbered from zero; `Stack` takes all members in the order of their numbers. Operations before it are done for each
    member. Targets that have one `*` more than sources are numbered likewise, by `Unstack`.

    Attributes:
        sources: patterns, in the order in which the first operation takes them; a single one may be given as a str.
        targets: patterns, in the order in which the last operation gives them.
        operations: done in turn; none where tensors only get other names.
        optional: whether it may match nothing at all.

    Raises:
        FusionError: patterns and operations that do not go together.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    optional: bool = field(default=False, kw_only=True)

    def __init__(
        self,
        sources: str | Sequence[str],
        targets: str | Sequence[str],
        operations: Sequence[Operation] = (),
        *,
        optional: bool = False,
    ) -> None:
        _refuse(sources, targets, operations)
        object.__setattr__(self, "sources", (sources,) if isinstance(sources, str) else tuple(sources))
        object.__setattr__(self, "targets", (targets,) if isinstance(targets, str) else tuple(targets))
        object.__setattr__(self, "operations", tuple(operations))
        object.__setattr__(self, "optional", optional)
        if problems := [*self._problems_of_patterns(), *self._problems_of_members()]:
            raise FusionError(tuple(f"{self}: {problem}" for problem in problems))
        object.__setattr__(self, "operations", self._bound())

    def __str__(self) -> str:
        return f"{', '.join(self.sources)} -> {', '.join(self.targets)}"

    @property
    def exact(self) -> bool:
        """Whether the way there and back leaves every bit as it was."""
        return all(operation.exact for operation in self.operations)

    @property
    def collects(self) -> bool:
        """Whether the last `*` of the sources runs over members that `Stack` takes together."""
        return self.sources[0].count("*") > self.targets[0].count("*")

    @property
    def spreads(self) -> bool:
        """Whether the last `*` of the targets numbers what `Unstack` takes apart."""
        return self.sources[0].count("*") < self.targets[0].count("*")

    def inverse(self) -> WeightConverter:
        """The way back; its inverse equals this converter."""
        operations = [operation.inverse() for operation in reversed(self.operations)]
        return WeightConverter(self.targets, self.sources, operations, optional=self.optional)

    def below(self, prefix: str) -> WeightConverter:
        """The same for a part of a model: `prefix` and a dot before all patterns; as it is where `prefix` is empty."""
        if not prefix:
            return self
        sources, targets = ([f"{prefix}.{name}" for name in names] for names in (self.sources, self.targets))
        return WeightConverter(sources, targets, self.operations, optional=self.optional)

    def flow(self, slots: list[list[T]], apply: Callable[[int, Operation, list[T]], list[T]]) -> list[list[T]]:
        """Lead whatever stands for tensors through the operations.

        Args:
            slots: for each source pattern its tensor, or its members.
            apply: what an operation, given with its position, does.

        Returns:
            For each target pattern its tensor, or its members.
        """
        for position, operation in enumerate(self.operations):
            if self._gathers(operation):
                slots = [apply(position, operation, slot) for slot in slots]
            else:
                done = [apply(position, operation, list(member)) for member in zip(*slots, strict=True)]
                slots = [list(slot) for slot in zip(*done, strict=True)]
        return slots

    def _gathers(self, operation: Operation) -> bool:
        """Whether an operation goes over the members of each pattern, instead of over the patterns."""
        return isinstance(operation, Stack | Unstack) and self.collects != self.spreads

    def _problems_of_patterns(self) -> list[str]:
        problems = []
        for role, patterns in (("sources", self.sources), ("targets", self.targets)):
            problems += [f"{p!r} is no dotted name with * for whole components" for p in patterns if not _is_pattern(p)]
            if not patterns or len(set(patterns)) < len(patterns):
                problems.append(f"the {role} are not one or more different patterns")
            elif len({pattern.count("*") for pattern in patterns}) > 1:
                problems.append(f"the {role} have not the same number of *")
        return problems

    def _problems_of_members(self) -> list[str]:
        if not self.sources or not self.targets:
            return []
        more = self.sources[0].count("*") - self.targets[0].count("*")
        if abs(more) > 1:
            return ["sources and targets differ by more than one *"]
        needed = {1: Stack, -1: Unstack}.get(more)
        count = sum(isinstance(operation, Stack | Unstack) for operation in self.operations)
        if needed and (count != 1 or not any(isinstance(operation, needed) for operation in self.operations)):
            fewer, many = ("targets", "sources") if more == 1 else ("sources", "targets")
            return [f"the last * of the {many} is not in the {fewer}, which takes exactly one {needed.__name__}"]
        return []

    def _bound(self) -> tuple[Operation, ...]:
        """The operations, told how many tensors each takes and gives."""
        there = self._counts(self.operations, len(self.sources))
        back = self._counts([operation.inverse() for operation in reversed(self.operations)], len(self.targets))
        counts = []
        for forward, backward in zip(there, reversed(back), strict=True):
            if forward is not None and backward is not None and forward != backward:
                raise FusionError(
                    (f"{self}: the operations make {there[-1]} tensors of {len(self.sources)}, not {back[0]}",)
                )
            counts.append(backward if forward is None else forward)
        return tuple(
            operation.bound(counts[position], counts[position + 1])
            for position, operation in enumerate(self.operations)
        )

    def _counts(self, operations: Sequence[Operation], first: int) -> list[int | None]:
        """How many tensors there are before each operation and after the last; None where only they themselves say."""
        counts: list[int | None] = [first]
        for operation in operations:
            count = counts[-1]
            if count is not None and not self._gathers(operation):
                try:
                    count = operation.targets(count)
                except FusionError as error:
                    raise FusionError(tuple(f"{self}: {problem}" for problem in error.problems)) from error
            counts.append(count)
        return counts


@dataclass(frozen=True)
class Composition:
    """Sets of converters, each of which takes what the one before it has made.

    The converters of one set stand side by side: no tensor is taken by two of them.
    """

    stages: tuple[tuple[WeightConverter, ...], ...]

    @property
    def exact(self) -> bool:
        """Whether the way there and back leaves every bit as it was."""
        return all(converter.exact for stage in self.stages for converter in stage)

    def inverse(self) -> Composition:
        """The way back, last set first."""
        return Composition(tuple(tuple(converter.inverse() for converter in stage) for stage in reversed(self.stages)))

    def below(self, prefix: str) -> Composition:
        """The same for a part of a model, as `WeightConverter.below`."""
        return Composition(tuple(tuple(converter.below(prefix) for converter in stage) for stage in self.stages))


@runtime_checkable
class HasConversion(Protocol):
    """What owns a list of converters, such as the layout of a fused layer."""

    @property
    def conversion_mapping(self) -> Sequence[WeightConverter]:
        """From the original layout to its own."""
        ...


Converters = WeightConverter | Composition | Sequence[WeightConverter] | HasConversion


def compose(*converters: Converters) -> Composition:
    """One conversion of several, done in the order given."""
    return Composition(tuple(stage for given in converters for stage in _stages(given)))


def _stages(converters: Converters) -> tuple[tuple[WeightConverter, ...], ...]:
    if isinstance(converters, Composition):
        return converters.stages
    if isinstance(converters, WeightConverter):
        return ((converters,),)
    if isinstance(converters, HasConversion):
        return _stages(converters.conversion_mapping)
    given: object = converters
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise FusionError((f"{given!r} is no WeightConverter, and no list of them",), _FORM)
    if strangers := [converter for converter in given if not isinstance(converter, WeightConverter)]:
        raise FusionError(
            (f"{strangers[0]!r} is no WeightConverter",), "Give converters; compose(...) does sets of them in turn."
        )
    return (tuple(converters),)


def _refuse(sources: object, targets: object, operations: object) -> None:
    """What is of another type altogether."""
    for what, given in (("sources", sources), ("targets", targets)):
        if not isinstance(given, str) and not (isinstance(given, Sequence) and all(isinstance(p, str) for p in given)):
            raise FusionError((f"the {what} of a WeightConverter are names of tensors, and not {given!r}",), _FORM)
    if not isinstance(operations, Sequence) or not all(isinstance(one, Operation) for one in operations):
        raise FusionError((f"the operations of a WeightConverter are a list of them, and not {operations!r}",), _FORM)


def _is_pattern(pattern: str) -> bool:
    return all(part == "*" or (part and "*" not in part) for part in pattern.split("."))


class Pattern:
    """A pattern of names, ready to be matched and filled in."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self._parts = pattern.split("*")
        self._regex = re.compile(r"([^.]+)".join(map(re.escape, self._parts)))

    def match(self, name: str) -> tuple[str, ...] | None:
        """What each `*` stands for in a name; None where it does not match."""
        found = self._regex.fullmatch(name)
        return found and found.groups()

    def fill(self, captures: Sequence[str]) -> str:
        """The name in which each `*` stands for the captures, in order."""
        return "".join(text for pair in zip(self._parts, (*captures, ""), strict=True) for text in pair)
