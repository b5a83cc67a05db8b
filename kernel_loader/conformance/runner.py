"""A kernel through its grid, in a process of its own: what ends the process, or spoils its device, is a finding."""

from __future__ import annotations

import enum
import importlib
import logging
import multiprocessing
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import torch

from kernel_loader import api
from kernel_loader.conformance.grid import MODES, Case, Entry, Grid, Mode
from kernel_loader.conformance.probes import PROBES, Finding, Subject, as_function, probe
from kernel_loader.errors import ManifestError, RequestError
from kernel_loader.loader import KernelLoader, spelt
from kernel_loader.provenance import Origin
from kernel_loader.settings import Settings

# Seconds that one case may take in one mode. Kernels that tune themselves take up to half a minute a shape.
_DEADLINE: Final = 600.0

# Seconds for a process that is done to end by itself.
_FAREWELL: Final = 10.0


class Job(NamedTuple):
    """One case in one mode."""

    entry: int
    case: int
    mode: Mode


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


class Checked(NamedTuple):
    """What came of a check.

    Attributes:
        kernel: its name.
        device: where inputs lay.
        origin: of the build that was checked.
        against: what it was held against: "its reference", or "formulas" where it is the reference itself.
        findings: one for each probe.
    """

    kernel: str
    device: str
    origin: Origin
    against: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that failed."""
        return tuple(finding for finding in self.findings if finding.status == "failed")


def check(
    kernel: str | type,
    *,
    device: str | None = None,
    modes: Iterable[Mode] = MODES,
    only: Iterable[str] = (),
    deadline: float = _DEADLINE,
    isolated: bool = True,
    watch: Callable[[Finding], None] | None = None,
) -> Checked:
    """Hold the build that would be loaded for a kernel against its reference, over the grid of its manifest.

    A build that is the reference is held against the formulas of the grid, and gradients always are.

    Args:
        kernel: a registered name, "name@version", "name@revision", or a bundle class.
        device: where inputs lie, such as "cuda"; by default what this machine computes on. "cpu" loads what a machine
            without an accelerator would.
        modes: "eager", "compile", "graph" (CUDA graphs) and "backward".
        only: entrypoints ("fp8_matmul") or cases of them ("fp8_matmul/one row"); all if empty.
        deadline: seconds that one case may take in one mode.
        isolated: work in another process, which is started again after a case that ends it or its device.
        watch: told of each finding when it is there.

    Raises:
        RequestError: the kernel has no grid, or what was asked for is not in it.
        As `load_kernel`.
    """
    grid = grid_of(kernel)
    modes = tuple(modes)
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise RequestError(f"there is no mode {unknown[0]!r}", f"There are {', '.join(MODES)}.")
    device = device if device is not None else default_device()
    plan = Plan(kernel, device, _jobs(grid, modes, tuple(only)))
    bundle, reference = load(kernel, device)
    origin = api.origin(bundle)
    findings = []
    for finding in _isolated(plan, grid, deadline) if isolated else _findings(plan, grid, bundle, reference):
        findings.append(finding)
        if watch is not None:
            watch(finding)
    against = "formulas" if reference is None else "its reference"
    return Checked(origin.kernel, device, origin, against, tuple(findings))


def grid_of(kernel: str | type) -> Grid:
    """The grid that the manifest of a kernel, or the table of a bundle class, names.

    Raises:
        RequestError: it names none.
        ManifestError: it cannot be imported, or is no grid.
    """
    manifest = api.default_loader().catalog.get(spelt(kernel)[0] if isinstance(kernel, str) else kernel)
    if manifest.grid is None:
        advice = 'Name a grid in its manifest: grid = "package.module:GRID". docs/conformance.md shows one.'
        raise RequestError(f"{manifest.name} has no grid to be checked over", advice)
    module, _, name = manifest.grid.partition(":")
    try:
        grid: Grid = operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever a user's module raises
        raise ManifestError(manifest.file, "grid", f"{manifest.grid} cannot be imported ({error})") from error
    if not grid or not all(isinstance(entry, Entry) for entry in grid):
        raise ManifestError(manifest.file, "grid", f"{manifest.grid} is no sequence of Entry")
    return grid


def load(kernel: str | type, device: str) -> tuple[Any, Any]:
    """The bundle of a kernel for a device, and that of its reference; None where the first is it, or there is none."""
    cpu = "cpu" if device.partition(":")[0] == "cpu" else None
    name, version, revision = spelt(kernel) if isinstance(kernel, str) else (kernel, None, None)
    bundle = api.load_kernel(name, version=version, revision=revision, backend=cpu)
    manifest = api.default_loader().catalog.get(name)
    if api.origin(bundle).reference or manifest.reference is None:
        return bundle, None
    settings = Settings.from_env()
    settings = replace(settings, disable=frozenset({*settings.disable, manifest.name}))
    return bundle, KernelLoader(settings).load(name, backend="cpu")


def default_device() -> str:
    """What this machine computes on."""
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return accelerator.type if accelerator is not None else "cuda" if torch.cuda.is_available() else "cpu"


def _jobs(grid: Grid, modes: Sequence[Mode], only: tuple[str, ...]) -> tuple[Job, ...]:
    jobs, met = [], set()
    for e, entry in enumerate(grid):
        for c, case in enumerate(entry.cases):
            asked = {entry.entrypoint, case_id(entry, case)} & set(only)
            met |= asked
            if asked or not only:
                jobs += [Job(e, c, mode) for mode in modes]
    if unknown := [name for name in only if name not in met]:
        entrypoints = ", ".join(entry.entrypoint for entry in grid)
        raise RequestError(
            f"the grid has no {unknown[0]!r}", f"Its entrypoints are {entrypoints}; cases come after a /."
        )
    return tuple(jobs)


def case_id(entry: Entry, case: Case) -> str:
    """How a case is asked for."""
    return f"{entry.entrypoint}/{case.name}"


# --- in this process ----------------------------------------------------------------------------------------------


def _findings(plan: Plan, grid: Grid, bundle: Any, reference: Any) -> Iterator[Finding]:  # noqa: ANN401 - any bundle
    for job in plan.jobs:
        yield from _of_job(job, plan, grid, bundle, reference)


def _of_job(job: Job, plan: Plan, grid: Grid, bundle: Any, reference: Any) -> Iterator[Finding]:  # noqa: ANN401
    entry = grid[job.entry]
    find = operator.attrgetter(entry.entrypoint)
    subject = Subject(
        entry=entry,
        case=entry.cases[job.case],
        function=as_function(find(bundle)),
        reference=as_function(find(reference)) if reference is not None else None,
        device=torch.device(plan.device),
    )
    yield from probe(subject, job.mode)


# --- in another ---------------------------------------------------------------------------------------------------


class _End(enum.Enum):
    OF_JOB = enum.auto()
    OF_DEVICE = enum.auto()  # it answers no more, so that this process can find nothing else


def _isolated(plan: Plan, grid: Grid, deadline: float) -> Iterator[Finding]:
    """Findings from other processes, the next of which goes on after the job that ended the last one."""
    jobs = plan.jobs
    context = multiprocessing.get_context("spawn")
    while jobs:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, plan._replace(jobs=jobs)), daemon=True)
        process.start()
        theirs.close()
        try:
            done = yield from _received(ours, jobs, grid, deadline, process)
            process.join(_FAREWELL if done == len(jobs) else 0)
        finally:
            process.kill()
            process.join()
            ours.close()
        jobs = jobs[done:]


def _received(
    ours: Connection,
    jobs: Sequence[Job],
    grid: Grid,
    deadline: float,
    process: Any,  # noqa: ANN401 - of multiprocessing
) -> Generator[Finding, None, int]:
    """What one process finds; returns how many jobs are done with."""
    for number, job in enumerate(jobs):
        probes = [*PROBES[job.mode], "end"]
        while True:
            try:
                message = ours.recv() if ours.poll(deadline) else f"nothing came for {deadline:.0f} s"
            except EOFError:
                process.join()
                message = f"the process ended ({_exit(process.exitcode)})"
            if message is _End.OF_JOB:
                break
            if isinstance(message, Finding):
                probes.remove(message.probe)
                yield message
                continue
            if isinstance(message, str):
                entry = grid[job.entry]
                yield Finding(entry.entrypoint, entry.cases[job.case].name, job.mode, probes[0], "failed", message)
            return number + 1
    return len(jobs)


def _exit(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"status {code}"


def _serve(connection: Connection, plan: Plan) -> None:
    """Work through a plan, sending findings and what ends them."""
    logging.getLogger("kernel_loader").setLevel(logging.ERROR)  # the other process has said it
    grid = grid_of(plan.kernel)
    bundle, reference = load(plan.kernel, plan.device)
    for job in plan.jobs:
        for finding in _of_job(job, plan, grid, bundle, reference):
            connection.send(finding)
            if finding.status == "failed" and not _usable(plan.device):
                connection.send(_End.OF_DEVICE)
                return
        connection.send(_End.OF_JOB)


def _usable(device: str) -> bool:
    """Whether the device still answers: after some faults it does not, whatever is asked of it."""
    try:
        torch.zeros(1, device=device).add_(1).item()
    except RuntimeError:
        return False
    return True
