"""What is to be checked of which build: the grid of a kernel, its jobs, and the two bundles that are compared."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_loader import api
from kernel_loader.conformance.grid import Case, Draw, Entry, Grid, Inputs, Mode, positions_of, tensors_in
from kernel_loader.conformance.probes import PROBES, probe
from kernel_loader.conformance.subject import Finding, Subject, as_function
from kernel_loader.errors import ManifestError, RequestError
from kernel_loader.planning import spelt


class Job(NamedTuple):
    """One case in one mode, by their places in the grid, and the probes to make."""

    entry: int
    case: int
    mode: Mode
    probes: tuple[str, ...]


class Plan(NamedTuple):
    """What is to be checked; all that a process needs to know.

    Attributes:
        kernel: a registered name, with a version or revision after an @ if need be, or a bundle class.
        device: where inputs lie.
        jobs: cases in modes.
    """

    kernel: str | type
    device: str
    jobs: tuple[Job, ...]


def grid_of(kernel: str | type) -> Grid:
    """The grid that the manifest of a kernel, or the table of a bundle class, names.

    Raises:
        RequestError: it names none, or an entry of it is wrong.
        ManifestError: it cannot be imported, or is no grid.
    """
    manifest = api.default_loader().catalog.get(spelt(kernel)[0] if isinstance(kernel, str) else kernel)
    if manifest.grid is None:
        advice = 'Name a grid in its manifest: grid = "package.module:GRID". docs/conformance.md shows one.'
        raise RequestError(f"{manifest.name} has no grid to be checked over", advice)
    module, _, name = manifest.grid.partition(":")
    try:
        found: object = operator.attrgetter(name)(importlib.import_module(module))
    except RequestError:  # of an entry, whose text tells what is wrong
        raise
    except Exception as error:  # whatever a user's module raises
        raise ManifestError(manifest.file, "grid", f"{manifest.grid} cannot be imported ({error})") from error
    if not isinstance(found, (tuple, list)) or not found or not all(isinstance(entry, Entry) for entry in found):
        raise ManifestError(manifest.file, "grid", f"{manifest.grid} is no tuple of Entry")
    return found


def load(kernel: str | type, device: str) -> tuple[Any, Any]:
    """The bundle of a kernel for a device, and that of its reference; None where the first is it, or there is none."""
    cpu = "cpu" if device.partition(":")[0] == "cpu" else None
    name, version, revision = spelt(kernel) if isinstance(kernel, str) else (kernel, None, None)
    bundle = api.load_kernel(name, version=version, revision=revision, backend=cpu)
    manifest = api.default_loader().catalog.get(name)
    if api.origin(bundle).reference or manifest.reference is None:
        return bundle, None
    return bundle, api.default_loader().load_reference(name)


def trouble_with(device: str) -> str:
    """Why nothing can be computed on a device; empty if it can. After some faults it cannot any more."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except Exception as error:  # noqa: BLE001 - torch raises one or another
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def usable(device: str | None) -> torch.device:
    """The device, or what this machine computes on where none is named.

    Raises:
        RequestError: nothing can be computed there.
    """
    name = device if device is not None else default_device()
    if trouble := trouble_with(name):
        raise RequestError(f"nothing can be computed on {name} ({trouble})", "Name another device.")
    return torch.device(name)


def default_device() -> str:
    """What this machine computes on."""
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return accelerator.type if accelerator is not None else "cuda" if torch.cuda.is_available() else "cpu"


def jobs_of(
    kernel: str | type, bundle: object, grid: Grid, modes: Sequence[Mode], only: tuple[str, ...]
) -> tuple[Job, ...]:
    """The cases that are asked for, in each mode. A class of the caller's may have some of a kernel's entrypoints.

    Raises:
        RequestError: something that is asked for is not in the grid, an entrypoint of that not in the bundle, or
            nothing would be looked at.
    """
    jobs, met = [], set()
    for e, entry in enumerate(grid):
        if not has(bundle, entry.entrypoint):
            if isinstance(kernel, type):
                continue
            raise RequestError(f"the grid is of {entry.entrypoint!r}, which the bundle has not", "Correct the grid.")
        if not entry.cases:
            raise RequestError(f"the grid has no case of {entry.entrypoint}", "Add one, or take the entry out of it.")
        for c, case in enumerate(entry.cases):
            asked = {entry.entrypoint, case_id(entry, case)} & set(only)
            met |= asked
            if asked or not only:
                jobs += [Job(e, c, mode, tuple(PROBES[mode])) for mode in modes]
    if unknown := [name for name in only if name not in met]:
        raise RequestError(f"the grid has no {unknown[0]!r}", _there_is(grid, unknown[0]))
    if not jobs:
        raise RequestError("nothing would be looked at", "Name a mode, and an entrypoint that the bundle has.")
    return tuple(jobs)


def _there_is(grid: Grid, asked: str) -> str:
    """What could be meant: cases, where the entrypoint is known."""
    cases = [repr(case.name) for entry in grid if entry.entrypoint == asked.partition("/")[0] for case in entry.cases]
    if cases:
        return f"The cases of that entrypoint are {', '.join(cases)}."
    entrypoints = ", ".join(dict.fromkeys(entry.entrypoint for entry in grid))
    return f"Its entrypoints are {entrypoints}; cases come after a /."


def refuse_what_selects_nothing(jobs: Sequence[Job], grid: Grid, bundle: object) -> None:
    """Hold what entries say of arguments against those that their cases draw, before anything is called.

    Raises:
        RequestError: a case draws no `Inputs`, or `gradients` or `mutates` name what no case has as a tensor.
    """
    for e, entry in ((e, grid[e]) for e in dict.fromkeys(job.entry for job in jobs)):
        positions = positions_of(as_function(operator.attrgetter(entry.entrypoint)(bundle)), entry.formula)
        asked = {job.case for job in jobs if job.entry == e}
        left, is_sure = {*entry.gradients, *entry.mutates}, True
        for c, case in enumerate(entry.cases):
            if c not in asked and not left:
                continue
            try:
                inputs: object = case.make(Draw("cpu"))
            except Exception:  # noqa: BLE001 - a finding of the check, which draws again
                is_sure = False
                continue
            if not isinstance(inputs, Inputs):
                detail = f"{case_id(entry, case)} draws a {type(inputs).__name__}"
                raise RequestError(detail, "A case returns Inputs(...), which holds the arguments of the call.")
            left -= {key for key in left if _selects(inputs, key, positions, floats=key in entry.gradients)}
        if left and is_sure:
            wrong = next(key for key in (*entry.gradients, *entry.mutates) if key in left)
            kind, names = ("tensor of floats", "gradients") if wrong in entry.gradients else ("tensor", "mutates")
            raise RequestError(
                f"{names} of {entry.entrypoint} names the argument {wrong!r}, and no case has a {kind} there",
                "Name it by its position, 0 being the first, or by the name of its parameter.",
            )


def _selects(inputs: Inputs, key: int | str, positions: Mapping[str, int], *, floats: bool) -> bool:
    place = inputs.place(key, positions)
    if place not in inputs:
        return False
    value = inputs[place]
    if not floats:  # what is written may be a list of tensors
        return bool(tensors_in(value))
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def has(bundle: object, entrypoint: str) -> bool:
    """Whether a bundle has an entrypoint."""
    try:
        operator.attrgetter(entrypoint)(bundle)
    except AttributeError:
        return False
    return True


def case_id(entry: Entry, case: Case) -> str:
    """How a case is asked for."""
    return f"{entry.entrypoint}/{case.name}"


def findings_of(job: Job, plan: Plan, grid: Grid, bundle: Any, reference: Any) -> Iterator[Finding]:  # noqa: ANN401
    """What comes of a job, with the two bundles of `load`."""
    entry = grid[job.entry]
    find = operator.attrgetter(entry.entrypoint)
    subject = Subject(
        entry=entry,
        case=entry.cases[job.case],
        function=as_function(find(bundle)),
        reference=as_function(find(reference)) if reference is not None else None,
        device=torch.device(plan.device),
    )
    yield from probe(subject, job.mode, job.probes)
