"""What a kernel is held against: a grid of calls, and a formula that says what each must return.

A grid is a tuple of entries, one an entrypoint. The manifest of a kernel names it (`grid = "package.module:GRID"`); so
does the table of a bundle class of one's own.

    GRID = (
        Entry(
            entrypoint="scale_rows",
            formula=lambda x, s: x.double() * s.double()[:, None],
            cases=(Case("one row", lambda draw: Inputs(draw.normal(1, 64), draw.normal(1))),),
            gradients=(0,),
        ),
    )
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from kernel_loader.arguments import each
from kernel_loader.errors import RequestError

Mode = Literal["eager", "compile", "graph", "backward"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

_NONE: Final[Mapping[str, int]] = MappingProxyType({})


class Inputs:
    """The arguments of one call.

    Attributes:
        args: by position. Those of the parameters that builds may call otherwise belong here.
        kwargs: by name.
    """

    __slots__ = ("args", "kwargs")

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - whatever an entrypoint takes
        self.args = args
        self.kwargs = kwargs

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same arguments with every tensor changed, those within tuples, lists and namespaces too."""
        args = [map_tensors(value, change) for value in self.args]
        return Inputs(*args, **{name: map_tensors(value, change) for name, value in self.kwargs.items()})

    def replace(self, keys: Sequence[int | str], change: Callable[[Any], Any]) -> Inputs:
        """The same arguments with some of them changed. "0.weight" is what the first one, a namespace, holds.

        Raises:
            KeyError: there is no such argument.
        """
        if missing := [key for key in keys if key not in self]:
            raise KeyError(missing[0])
        args = (_replaced(value, (index, str(index)), keys, change) for index, value in enumerate(self.args))
        kwargs = {name: _replaced(value, (name, name), keys, change) for name, value in self.kwargs.items()}
        return Inputs(*args, **kwargs)

    def call(self, function: Callable[..., Any]) -> Any:  # noqa: ANN401 - whatever an entrypoint returns
        """What the function returns for these arguments."""
        return function(*self.args, **self.kwargs)

    def __contains__(self, key: int | str) -> bool:
        try:
            self[key]
        except (IndexError, KeyError, AttributeError):
            return False
        return True

    def place(self, key: int | str, positions: Mapping[str, int]) -> int | str:
        """The key of an argument by the name of its parameter, which may be given by position.

        Args:
            key: of an argument, or of what a namespace holds: 1, "scale", "0.weight", "module.weight".
            positions: parameter -> its position, as `positions_of` gives them.
        """
        if isinstance(key, int):
            return key
        first, dot, attribute = key.partition(".")
        if first in self.kwargs or positions.get(first, len(self.args)) >= len(self.args):
            return key
        return f"{positions[first]}.{attribute}" if dot else positions[first]

    def tensors(self, keys: Sequence[int | str], positions: Mapping[str, int] = _NONE) -> tuple[int | str, ...]:
        """Those of the keys under which there is a tensor: an argument may be left out, or None."""
        places = dict.fromkeys(self.place(key, positions) for key in keys)
        return tuple(key for key in places if key in self and isinstance(self[key], Tensor))

    def __getitem__(self, key: int | str) -> Any:  # noqa: ANN401 - one of the arguments
        if isinstance(key, int):
            return self.args[key]
        first, _, attribute = key.partition(".")
        value = self.args[int(first)] if first.isdigit() else self.kwargs[first]
        return operator.attrgetter(attribute)(value) if attribute else value


class Draw:
    """Numbers for inputs, the same for a seed on every device: they are drawn on the CPU and moved.

    Args:
        device: where the inputs shall lie.
        seed: of the numbers.
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self.device: Final = torch.device(device)
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal numbers with mean 0 and deviation `scale`."""
        return self.put((torch.randn(shape, generator=self._generator) * scale).to(dtype))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float32, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Numbers within low and high."""
        return self.put((torch.rand(shape, generator=self._generator) * (high - low) + low).to(dtype))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers, low included and high not."""
        return self.put(torch.randint(low, high, shape, generator=self._generator).to(dtype))

    def permutation(self, n: int) -> Tensor:
        """0 .. n - 1 in some order, (n,) int64."""
        return self.put(torch.randperm(n, generator=self._generator))

    def put(self, tensor: Tensor) -> Tensor:
        """The tensor where the inputs lie."""
        return tensor.to(self.device)

    def strided(self, tensor: Tensor) -> Tensor:
        """Equal values, (..., N), not contiguous: every second row and column of a larger tensor, the rest all ones."""
        if tensor.ndim == 0:
            return tensor
        shape = [2 * size for size in tensor.shape[-2:]]
        nbytes = tensor.element_size()
        large = torch.full((*tensor.shape[:-2], *shape[:-1], shape[-1] * nbytes), 255, dtype=torch.uint8)
        view = large.view(tensor.dtype).to(tensor.device)[..., ::2]
        view = view[..., ::2, :] if tensor.ndim > 1 else view
        view.copy_(tensor)
        return view


class Case(NamedTuple):
    """One call.

    Attributes:
        name: unique among the cases of its entry; what is particular about it.
        make: draws the arguments.
        modes: in which it is tried; a case of what only some builds take may leave out some.
        may_refuse: why a published build may raise for this call, as the bundle says; empty if it may not. To return
            something wrong is a failure all the same.
    """

    name: str
    make: Callable[[Draw], Inputs]
    modes: tuple[Mode, ...] = MODES
    may_refuse: str = ""


class Tolerance(NamedTuple):
    """How far an element may be from what is right: |got - want| <= row * rms(row of want) + each * |want| + least.

    A row runs along the last dimension. Sums that cancel are as far off as their terms are large, so that the row, not
    the element, sets the measure.

    Attributes:
        row: share of the root mean square of the row.
        each: share of the element itself; None for two units in the last place of the dtype of the output.
        least: absolute.
    """

    row: float = 0.0
    each: float | None = None
    least: float = 0.0


EXACT_TO_THE_DTYPE: Final = Tolerance()


class Work(NamedTuple):
    """What a call has to do at least, for a roofline.

    Attributes:
        flops: floating-point operations, a multiply-add counting as two.
        nbytes: bytes that must be read or written.
        peak: the arithmetic, "fp8", "bf16", "fp16" or "fp32"; for another, only bytes set the roof.
    """

    flops: float
    nbytes: float
    peak: str = "bf16"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What an entrypoint is held against.

    Attributes:
        entrypoint: the field of the bundle; dotted for what lies within one ("layers.RMSNorm").
        cases: the calls.
        formula: what is right, independent of every build: called like the entrypoint, returns the same structure in
            float64 (or as it is, for integers). Where `gradients` are named, autograd differentiates it.
        gradients: arguments that get a gradient, by position or by the name of their parameter; "0.weight" is what the
            first one holds, which for a layer is the namespace that stands for its module. Each is a tensor of floats
            in some case at least.
        tolerance: of outputs.
        gradient_tolerance: of gradients.
        mutates: arguments that the entrypoint writes, named as in `gradients`. The formula returns a tuple: what the
            entrypoint returns, then what these shall hold.
        dtypes: of outputs, besides those that arguments have or are.
        canonical: brings an output into a form that can be compared, where several are right.
        skip: a mode that the entrypoint does not promise -> why.
        problem: draws the arguments for named sizes, for `bench` and `prewarm`.
        sizes: what `bench` measures: arguments of `problem`.
        prepare: (bundle, inputs) -> a call without arguments, for builds that want arguments in a form of their own:
            `bench` makes the form once, outside of the time. None calls the entrypoint with the inputs.
        work: of a problem of these sizes.

    Raises:
        RequestError: something is not of its form, two cases have one name, or there is no such mode.
    """

    entrypoint: str
    cases: Sequence[Case]
    formula: Callable[..., Any]
    gradients: tuple[int | str, ...] = ()
    tolerance: Tolerance = EXACT_TO_THE_DTYPE
    gradient_tolerance: Tolerance | None = None
    mutates: tuple[int | str, ...] = ()
    dtypes: Sequence[torch.dtype] = ()
    canonical: Callable[[Any], Any] | None = None
    skip: Mapping[Mode, str] = field(default_factory=dict)
    problem: Callable[..., Inputs] | None = None
    sizes: Sequence[Mapping[str, Any]] = ()
    prepare: Callable[[Any, Inputs], Callable[[], Any]] | None = None
    work: Callable[..., Work] | None = None

    def __post_init__(self) -> None:
        for name in ("gradients", "mutates"):
            object.__setattr__(self, name, each(getattr(self, name), name))
        if wrong := _wrong_in(self):
            raise RequestError(
                f"the entry of {self.entrypoint} has {wrong}", "Correct the grid; docs/conformance.md shows one."
            )
        names = [case.name for case in self.cases]
        if doubled := [name for name in names if names.count(name) > 1]:
            raise RequestError(f"{self.entrypoint} has two cases {doubled[0]!r}", "Name each otherwise.")
        for mode in (*self.skip, *(mode for case in self.cases for mode in case.modes)):
            if mode not in MODES:
                raise RequestError(f"{self.entrypoint}: there is no mode {mode!r}", f"There are {', '.join(MODES)}.")


Grid = Sequence[Entry]


def positions_of(*functions: Callable[..., Any] | None) -> dict[str, int]:
    """Parameter -> its position, as far as signatures tell: those of the first function count most."""
    found: dict[str, int] = {}
    for function in functions:
        try:
            parameters = inspect.signature(function).parameters.values() if function is not None else ()
        except (TypeError, ValueError):  # what is written in C may have none
            continue
        for at, parameter in enumerate(parameters):
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                found.setdefault(parameter.name, at)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401 - any structure
    """A structure of tuples, lists, dicts, namespaces and inputs with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Inputs):
        return value.map(change)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, SimpleNamespace):
        return type(value)(**map_tensors(vars(value), change))
    return value


def tensors_in(value: Any) -> list[Tensor]:  # noqa: ANN401 - any structure
    """The tensors of a structure, in order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, keep)
    return found


def _wrong_in(entry: Entry) -> str:
    """What of an entry is not of its form; empty if nothing."""
    given: Any = entry  # a grid need not be typed
    if isinstance(given.cases, (str, Case)) or not isinstance(given.cases, Sequence):
        return f"cases={given.cases!r}, which is no list of Case"
    if bad := [case for case in given.cases if not _is_case(case)]:
        return f"the case {bad[0]!r}; it is Case(name, function that draws Inputs)"
    if not callable(given.formula):
        return f"formula={given.formula!r}, which is no function"
    if bad := [key for key in (*given.gradients, *given.mutates) if not isinstance(key, (int, str))]:
        return f"the argument {bad[0]!r}; one is named by its position or by its parameter"
    optional = () if given.gradient_tolerance is None else ("gradient_tolerance",)
    for name in ("tolerance", *optional):
        if not _is_tolerance(getattr(given, name)):
            return f"{name}={getattr(given, name)!r}; it is a Tolerance of numbers that are not below zero"
    return ""


def _is_case(given: Any) -> bool:  # noqa: ANN401 - a grid need not be typed
    is_case = isinstance(given, Case)
    return is_case and isinstance(given.name, str) and callable(given.make)


def _is_tolerance(given: object) -> bool:
    if not isinstance(given, Tolerance):
        return False
    return all(_is_tolerable(part) for part in (given.row, 0 if given.each is None else given.each, given.least))


def _is_tolerable(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value >= 0


def _replaced(
    value: Any,  # noqa: ANN401 - an argument
    names: tuple[int | str, str],
    keys: Sequence[int | str],
    change: Callable[[Any], Any],
) -> Any:  # noqa: ANN401
    """The argument changed if a key is one of its names, or with what it holds under a longer name changed."""
    if any(name in keys for name in names):
        return change(value)
    if not isinstance(value, SimpleNamespace):
        return value
    longer = {key: f"{names[1]}.{key}" for key in vars(value)}
    return type(value)(**{k: _replaced(vars(value)[k], (n, n), keys, change) for k, n in longer.items()})
