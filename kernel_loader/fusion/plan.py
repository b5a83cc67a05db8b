"""What converters will do to the weights of a model, known before any tensor is touched."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar

from torch import Tensor

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import Converters, Pattern, WeightConverter, compose
from kernel_loader.fusion.operation import Operation, TensorSpec
from kernel_loader.fusion.operations import Rename

T = TypeVar("T")

Specs = Mapping[str, TensorSpec | None]
"""Names of a state dict in its order, with shape and dtype; None for a value that is no tensor."""

_NUMBER: Final = re.compile("0|[1-9][0-9]{0,8}")

# Names in one problem.
_SHOWN: Final = 6


@dataclass(frozen=True)
class Step:
    """One converter on the tensors that belong together.

    Attributes:
        converter: whose operations they go through.
        sources: for each source pattern the name of its tensor, or those of its members.
        targets: for each target pattern likewise.
    """

    converter: WeightConverter
    sources: tuple[tuple[str, ...], ...]
    targets: tuple[tuple[str, ...], ...]

    def flow(self, values: Mapping[str, T], apply: Callable[[int, Operation, list[T]], list[T]]) -> dict[str, T]:
        """What the operations make of the values of the sources, by the names of the targets."""
        slots = self.converter.flow([[values[name] for name in names] for names in self.sources], apply)
        return {
            name: value
            for names, slot in zip(self.targets, slots, strict=True)
            for name, value in zip(names, slot, strict=True)
        }


@dataclass(frozen=True)
class Group:
    """Tensors that are converted together, and nothing else is needed for it.

    Attributes:
        stages: steps by the set of converters that they come from, first to last.
        sources: names of the tensors that are taken.
        targets: names of those that are made.
    """

    stages: tuple[tuple[Step, ...], ...]
    sources: tuple[str, ...]
    targets: tuple[str, ...]

    @property
    def converters(self) -> tuple[WeightConverter, ...]:
        """Those that take part, in the order in which they do."""
        return tuple(dict.fromkeys(step.converter for stage in self.stages for step in stage))

    def flow(self, values: Mapping[str, T], apply: Callable[[Step, int, Operation, list[T]], list[T]]) -> dict[str, T]:
        """What all steps make of the values of the sources, by the names of the targets."""
        values = dict(values)
        for stage in self.stages:
            # All that the steps of a stage take is out of the way before any of them writes: they may exchange names.
            taken = {name: values.pop(name) for step in stage for names in step.sources for name in names}
            for step in stage:
                values |= step.flow(taken, _of(step, apply))
        return values

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The targets, made of the sources.

        Raises:
            FusionError: an operation does not take what it is given.
        """
        try:
            return self.flow({name: tensors[name] for name in self.sources}, lambda _, __, op, given: op.apply(given))
        except FusionError as error:
            problems = tuple(f"{', '.join(self.targets[:3])}: {problem}" for problem in error.problems)
            raise FusionError(problems, error.advice) from error


def _of(
    step: Step, apply: Callable[[Step, int, Operation, list[T]], list[T]]
) -> Callable[[int, Operation, list[T]], list[T]]:
    return lambda position, operation, given: apply(step, position, operation, given)


@dataclass(frozen=True)
class Plan:
    """What becomes of every tensor of a state dict.

    Attributes:
        sources: what there is before, in order.
        targets: what there is afterwards, in order: targets stand where the first source of their group stood.
        groups: what is converted; all other tensors stay as they are.
        exact: whether the way back brings back every bit.
    """

    sources: Specs
    targets: Specs
    groups: tuple[Group, ...]
    exact: bool
    group_of: Mapping[str, Group] = field(repr=False)

    @property
    def kept(self) -> tuple[str, ...]:
        """Names that nothing is done to."""
        return tuple(name for name in self.targets if name not in self.group_of)

    def rows(self) -> list[tuple[list[str], list[str], list[str]]]:
        """For each group, as text: its sources with their specs, the operations, its targets with theirs."""
        return [
            (
                [f"{name} {self.sources[name]}" for name in group.sources],
                [str(op) for converter in group.converters for op in converter.operations or (Rename(),)],
                [f"{name} {self.targets[name]}" for name in group.targets],
            )
            for group in self.groups
        ]


def plan(specs: Specs, converters: Converters) -> Plan:
    """What converters will make of a state dict. Pure: it looks at names, shapes and dtypes.

    A conversion must have a way back. So names that stay must not look like targets, for the way back would take them,
    and what a `*` collects must be numbered 0, 1, 2, ...

    Args:
        specs: the names of the state dict in its order, with shapes and dtypes; None for what is no tensor.
        converters: one, several that stand side by side, or a composition of such sets.

    Raises:
        FusionError: with a line for every problem: tensors that two converters take, targets that are written twice or
            over a tensor that stays, groups that lack a source, converters that match nothing, shapes and dtypes that
            an operation does not take.
    """
    composition = compose(converters)
    current, stages = dict(specs), []
    for converters_of_stage in composition.stages:
        stage = _Stage(current, converters_of_stage)
        # What comes after a stage with problems would only repeat them.
        if stage.problems:
            raise FusionError(tuple(stage.problems))
        stages.append(stage.steps)
        current = stage.results()
    groups = _linked(stages)
    group_of = {name: group for group in groups for name in group.targets}
    exact = all(converter.exact for group in groups for converter in group.converters)
    return Plan(dict(specs), current, groups, exact, group_of)


class _Index:
    """Patterns of several converters, found by a name."""

    def __init__(self, patterns: Sequence[Sequence[Pattern]]) -> None:
        # By the number of components, as a * never stands for two.
        self._by_length: dict[int, list[tuple[int, int, Pattern]]] = defaultdict(list)
        for converter, of_converter in enumerate(patterns):
            for position, pattern in enumerate(of_converter):
                self._by_length[pattern.text.count(".")].append((converter, position, pattern))

    def find(self, name: str) -> list[tuple[int, int, tuple[str, ...]]]:
        """(converter, pattern, captures) of all that match."""
        candidates = self._by_length.get(name.count("."), ())
        matches = ((converter, position, pattern.match(name)) for converter, position, pattern in candidates)
        return [(converter, position, found) for converter, position, found in matches if found is not None]


class _Stage:
    """Converters that stand side by side, on one state dict."""

    def __init__(self, specs: Specs, converters: tuple[WeightConverter, ...]) -> None:
        self._specs, self._converters = specs, converters
        self._source_patterns = [[Pattern(text) for text in converter.sources] for converter in converters]
        self._target_patterns = [[Pattern(text) for text in converter.targets] for converter in converters]
        self.problems: list[str] = []
        self.steps: list[Step] = []
        self._made: dict[str, TensorSpec] = {}
        self._writer: dict[str, int] = {}
        self._step_of: dict[str, Step] = {}  # by the names of sources
        self._take()
        self._look_back()

    def results(self) -> dict[str, TensorSpec | None]:
        """What there is afterwards, in order."""
        after: dict[str, TensorSpec | None] = {}
        for name, spec in self._specs.items():
            step = self._step_of.get(name)
            if step is None:
                after[name] = spec
            elif step.targets[0][0] not in after:
                # Member by member, as the layers of a model write them.
                after |= {target: self._made[target] for member in zip(*step.targets, strict=True) for target in member}
        return after

    def _take(self) -> None:
        """Find the groups of every converter, and what they make."""
        found: list[dict[tuple[str, ...], list[dict[str, str]]]] = [{} for _ in self._converters]
        index = _Index(self._source_patterns)
        for name, spec in self._specs.items():
            matches = index.find(name)
            if len(matches) > 1:
                takers = " and by ".join(str(self._converters[number]) for number, *_ in matches)
                self.problems.append(f"{name} is taken twice: by {takers}")
            if matches and spec is None:
                self.problems.append(f"{name} is taken by {self._converters[matches[0][0]]}, and is no tensor")
            for number, position, captures in matches:
                converter = self._converters[number]
                key, member = (captures[:-1], captures[-1]) if converter.collects else (captures, "0")
                slots = found[number].setdefault(key, [{} for _ in converter.sources])
                slots[position][member] = name
        for number, (converter, groups) in enumerate(zip(self._converters, found, strict=True)):
            if not groups and not converter.optional:
                self.problems.append(
                    f"{', '.join(converter.sources)}: matches none of {len(self._specs)} names{_some(self._specs)}"
                )
            for key, slots in groups.items():
                self._group(number, key, slots)

    def _group(self, number: int, key: tuple[str, ...], slots: list[dict[str, str]]) -> None:
        converter = self._converters[number]
        if strange := {member: None for slot in slots for member in slot if not _NUMBER.fullmatch(member)}:
            name = self._source_patterns[number][0].fill((*key, "*"))
            listed = _listed(strange, len(strange))
            self.problems.append(f"{name}: expected members numbered 0, 1, 2, ..., got {listed}")
            return
        # A range, as a number may be large and all before it a hole.
        members = range(1 + max(int(member) for slot in slots for member in slot))
        if count := len(members) * len(slots) - sum(map(len, slots)):
            missing = (
                pattern.fill((*key, str(member)) if converter.collects else key)
                for member in members
                for pattern, slot in zip(self._source_patterns[number], slots, strict=True)
                if str(member) not in slot
            )
            there = [name for slot in slots for name in slot.values()][:3]
            self.problems.append(
                f"{_listed(missing, count)} {_are(count)} not there, "
                f"which {', '.join(there)} {_are(len(there))} converted with"
            )
            return
        names = tuple(tuple(slot[str(member)] for member in members) for slot in slots)
        self._make(number, key, names)

    def _make(self, number: int, key: tuple[str, ...], names: tuple[tuple[str, ...], ...]) -> None:
        converter = self._converters[number]
        specs = [[spec for name in slot if (spec := self._specs[name]) is not None] for slot in names]
        if [len(slot) for slot in specs] != [len(slot) for slot in names]:
            return  # one is no tensor, which is said already
        try:
            made = converter.flow(specs, lambda _, operation, given: operation.shapes(given))
        except FusionError as error:
            self.problems += [f"{', '.join(slot[0] for slot in names)}: {problem}" for problem in error.problems]
            return
        if len(made) != len(converter.targets):
            self.problems.append(f"{converter}: the operations make {len(made)} tensors of {', '.join(names[0])}")
            return
        targets = tuple(
            tuple(pattern.fill((*key, str(member)) if converter.spreads else key) for member in range(len(slot)))
            for pattern, slot in zip(self._target_patterns[number], made, strict=True)
        )
        step = Step(converter, names, targets)
        self.steps.append(step)
        self._step_of |= {name: step for slot in names for name in slot}
        for slot, slot_specs in zip(targets, made, strict=True):
            for target, spec in zip(slot, slot_specs, strict=True):
                if target in self._made:
                    writers = f"{self._converters[self._writer[target]]} and by {converter}"
                    self.problems.append(f"{target} is written twice: by {writers}")
                self._made[target], self._writer[target] = spec, number

    def _look_back(self) -> None:
        """Whether the way back would take what was made, and nothing else."""
        index = _Index(self._target_patterns)
        for name in self._specs:
            if name in self._step_of:
                continue
            matches = index.find(name)
            if name in self._made:
                self.problems.append(
                    f"{name} is written by {self._converters[self._writer[name]]}, and is there already"
                )
            elif matches and not self.problems:
                converter = self._converters[matches[0][0]]
                self.problems.append(f"{name} stays, and the way back of {converter} would take it")
        for name, writer in self._writer.items():
            matches = index.find(name)
            if len(matches) > 1:
                others = " and by ".join(str(self._converters[number]) for number, *_ in matches)
                self.problems.append(f"{name}, written by {self._converters[writer]}, is taken twice back: by {others}")


def _some(names: Iterable[str]) -> str:
    shown = list(names)[:3]
    return f", such as {', '.join(shown)}" if shown else ""


def _listed(names: Iterable[str], count: int) -> str:
    """The first few of so many names, and how many more there are."""
    more = f" and {count - _SHOWN:,} more" if count > _SHOWN else ""
    return f"{', '.join(islice(names, _SHOWN))}{more}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _linked(stages: Sequence[Sequence[Step]]) -> tuple[Group, ...]:
    """Steps that hand tensors to each other, as one group."""
    numbered = [(number, step) for number, steps in enumerate(stages) for step in steps]
    parent = list(range(len(numbered)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    maker: dict[str, int] = {}
    position = 0
    for steps in stages:
        made: dict[str, int] = {}
        for step in steps:
            for name in _names(step.sources):
                if name in maker:
                    parent[root(position)] = root(maker.pop(name))
            made |= dict.fromkeys(_names(step.targets), position)
            position += 1
        maker |= made
    together: dict[int, list[tuple[int, Step]]] = defaultdict(list)
    for i, pair in enumerate(numbered):
        together[root(i)].append(pair)
    return tuple(_group_of(pairs, len(stages)) for pairs in together.values())


def _group_of(pairs: list[tuple[int, Step]], count: int) -> Group:
    stages = tuple(tuple(step for number, step in pairs if number == stage) for stage in range(count))
    sources: list[str] = []
    there: dict[str, None] = {}
    for stage in stages:
        needed = [name for step in stage for name in _names(step.sources)]
        sources += [name for name in needed if name not in there]
        for name in needed:
            there.pop(name, None)
        there |= dict.fromkeys(name for step in stage for name in _names(step.targets))
    return Group(tuple(stage for stage in stages if stage), tuple(sources), tuple(there))


def _names(slots: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Member by member."""
    return tuple(name for member in zip(*slots, strict=True) for name in member)
