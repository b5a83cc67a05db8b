"""What calls take: the first time, in steady state, against the reference, and against the roof of the device."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_loader import api
from kernel_loader.arguments import each
from kernel_loader.conformance.grid import Draw, Entry, Inputs, Work, positions_of, tensors_in
from kernel_loader.conformance.plan import grid_of, has, load, usable
from kernel_loader.conformance.roof import Roof, called, measure_roof, seconds, wall_seconds
from kernel_loader.conformance.subject import as_function
from kernel_loader.errors import RequestError
from kernel_loader.provenance import Origin

Sizes = Mapping[str, Any]


class Timing(NamedTuple):
    """What one problem took, in seconds.

    Attributes:
        entrypoint: of the bundle.
        sizes: of the problem.
        first: the first call in this process: compilation just in time and tuning are in it.
        steady: median of later calls.
        reference: the same of the reference; None if that is what was measured.
        roof: the least that the device needs for the work; None where the grid does not tell the work.
        work: of the problem.
    """

    entrypoint: str
    sizes: Sizes
    first: float
    steady: float
    reference: float | None
    roof: float | None
    work: Work | None


class Measured(NamedTuple):
    """What `bench` measured.

    Attributes:
        kernel: its name.
        device: where it computed.
        origin: of the build.
        roof: of the device.
        timings: one for each problem.
    """

    kernel: str
    device: str
    origin: Origin
    roof: Roof
    timings: tuple[Timing, ...]


def bench(
    kernel: str | type,
    *,
    device: str | None = None,
    only: Iterable[str] | str = (),
    sizes: Sequence[Sizes] = (),
    watch: Callable[[Timing], None] | None = None,
) -> Measured:
    """Time the entrypoints of a kernel on the problems that its grid names.

    Args:
        kernel: as for `check`.
        device: as for `check`.
        only: entrypoints; all if empty.
        sizes: problems instead of the grid's.
        watch: told of each timing when it is there.

    Raises:
        RequestError: the kernel has no grid, or the grid names no problems for what was asked, or not of these sizes.
        As `load_kernel`.
    """
    only, grid = frozenset(each(only, "only")), grid_of(kernel)
    if unknown := only - {entry.entrypoint for entry in grid}:
        known = ", ".join(dict.fromkeys(entry.entrypoint for entry in grid))
        raise RequestError(f"the grid has no entrypoint {min(unknown)!r}", f"It has {known}.")
    entries = [e for e in grid if e.problem and (e.sizes or sizes) and (not only or e.entrypoint in only)]
    if not entries or only - {entry.entrypoint for entry in entries}:
        missing = ", ".join(sorted(only - {entry.entrypoint for entry in entries})) or "any entrypoint"
        raise RequestError(f"the grid names no problems for {missing}", "Give its entry `problem` and `sizes`.")
    where = usable(device)
    problems = [(entry, one) for entry in entries for one in sizes or entry.sizes]
    bundle, reference = load(kernel, str(where))
    roof = measure_roof(where, {work.peak for entry, one in problems if (work := work_of(entry, one))})
    timings = []
    for entry, one in problems:
        timings.append(_timing(entry, one, bundle, reference, where, roof))
        if watch is not None:
            watch(timings[-1])
    origin = api.origin(bundle)
    return Measured(origin.kernel, f"{where} ({called(where)})", origin, roof, tuple(timings))


def prewarm(
    bundle: object, shapes: Mapping[str, Sequence[Sizes | Inputs]], *, device: str | None = None, backward: bool = False
) -> list[tuple[str, Sizes | Inputs, float]]:
    """Pay the cost of first calls now: compilation just in time, and tuning for a shape.

    Args:
        bundle: what `load_kernel` returned.
        shapes: entrypoint -> problems. Each is a mapping of the sizes that the kernel's grid names, such as
            {"m": 4096, "n": 7168, "k": 2048}, or `Inputs` that hold the arguments themselves.
        device: where inputs of sizes are drawn; by default what this machine computes on.
        backward: whether gradients are computed too, where the grid names any.

    Returns:
        Entrypoint, problem and seconds of each call, in order.

    Raises:
        RequestError: the bundle was not loaded here, or its grid has no such entrypoint or sizes. Nothing was called.
    """
    origin = api.origin(bundle)
    given: object = shapes
    if not isinstance(given, Mapping):
        advice = 'It is a table of entrypoint -> problems: {"fp8_matmul": [{"m": 16, "n": 4096, "k": 7168}]}.'
        raise RequestError(f"shapes={given!r} was given", advice)
    where = usable(device)
    ready = []
    for entrypoint, problems in shapes.items():
        if not has(bundle, entrypoint):
            raise RequestError(f"{type(bundle).__name__} has no {entrypoint!r}", "Name one of its entrypoints.")
        if not isinstance(problems, (list, tuple)):
            raise RequestError(f"the problems of {entrypoint} are {problems!r}", "Pass a list of sizes or Inputs.")
        function = as_function(operator.attrgetter(entrypoint)(bundle))
        gradients = _entry(bundle, origin, entrypoint).gradients if backward else ()
        for problem in problems:
            given = isinstance(problem, Inputs)
            inputs = problem if given else draw(_entry(bundle, origin, entrypoint), problem, where)
            ready.append((entrypoint, problem, functools.partial(_first, function, inputs, gradients, where)))
    return [(entrypoint, problem, first()) for entrypoint, problem, first in ready]


def _timing(
    entry: Entry,
    sizes: Sizes,
    bundle: object,
    reference: object | None,
    device: torch.device,
    roof: Roof,
) -> Timing:
    inputs = draw(entry, sizes, device)
    with torch.no_grad():
        call = _call(entry, bundle, inputs)
        first = wall_seconds(call, device)
        steady = seconds(call, device)
        other = seconds(_call(entry, reference, inputs), device) if reference is not None else None
    work = work_of(entry, sizes)
    return Timing(entry.entrypoint, sizes, first, steady, other, roof.seconds(work) if work else None, work)


def _call(entry: Entry, bundle: object, inputs: Inputs) -> Callable[[], Any]:
    """The call of a problem, with what is not timed done."""
    if entry.prepare is not None:
        return entry.prepare(bundle, inputs)
    function = as_function(operator.attrgetter(entry.entrypoint)(bundle))
    return lambda: inputs.call(function)


def _first(function: Callable[..., Any], inputs: Inputs, gradients: Sequence[int | str], device: torch.device) -> float:
    if not gradients:
        with torch.no_grad():
            return wall_seconds(lambda: inputs.call(function), device)
    leaves = inputs.replace(
        inputs.tensors(gradients, positions_of(function)), lambda value: value.detach().clone().requires_grad_()
    )

    def both_ways() -> None:
        outputs: list[Tensor] = [tensor for tensor in tensors_in(leaves.call(function)) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    return wall_seconds(both_ways, device)


def work_of(entry: Entry, sizes: Sizes) -> Work | None:
    """What a problem has to do at least; None where the entry does not tell.

    Raises:
        RequestError: the entry has no problem of these sizes.
    """
    try:
        return entry.work(**sizes) if entry.work else None
    except TypeError as error:
        raise _no_problem(entry, sizes, error) from error


def draw(entry: Entry, sizes: Sizes, device: torch.device) -> Inputs:
    """The problem of an entry for some sizes.

    Raises:
        RequestError: it has none, or not of these sizes.
    """
    if entry.problem is None:
        what = f"the grid names no sizes for {entry.entrypoint}"
        raise RequestError(what, "Pass Inputs that hold the arguments themselves.")
    try:
        return entry.problem(Draw(device), **sizes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _no_problem(entry, sizes, error) from error


def _no_problem(entry: Entry, sizes: Sizes, error: Exception) -> RequestError:
    known = ", ".join(entry.sizes[0]) if entry.sizes else "not told"
    what = f"{dict(sizes)} is no problem for {entry.entrypoint} ({str(error).partition(chr(10))[0]})"
    return RequestError(what, f"Its sizes: {known}. Name the entrypoint, where others have other sizes (--only).")


def _entry(bundle: object, origin: Origin, entrypoint: str) -> Entry:
    grid = grid_of(type(bundle) if hasattr(bundle, "__kernel__") else origin.kernel)
    for entry in grid:
        if entry.entrypoint == entrypoint:
            return entry
    known = ", ".join(entry.entrypoint for entry in grid)
    raise RequestError(f"the grid of {origin.kernel} has no {entrypoint!r}", f"It has {known}.")
