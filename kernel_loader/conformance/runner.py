"""`check`: a kernel through its grid."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from kernel_loader import api
from kernel_loader.arguments import each
from kernel_loader.conformance.grid import MODES, Grid, Mode
from kernel_loader.conformance.plan import (
    Plan,
    default_device,
    findings_of,
    grid_of,
    jobs_of,
    load,
    refuse_what_selects_nothing,
    usable,
)
from kernel_loader.conformance.processes import isolated
from kernel_loader.conformance.subject import Finding
from kernel_loader.errors import RequestError
from kernel_loader.provenance import Origin

# Seconds that one case may take in one mode. Kernels that tune themselves take up to half a minute a shape.
_DEADLINE: Final = 600.0

# A clock takes no longer.
_LONGEST: Final = 1e6


class Checked(NamedTuple):
    """What came of a check.

    Attributes:
        kernel: as it was asked for, or module:Class of its bundle.
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
    modes: Iterable[Mode] | Mode = MODES,
    only: Iterable[str] | str = (),
    deadline: float = _DEADLINE,
    processes: int = 1,
    watch: Callable[[Finding], None] | None = None,
) -> Checked:
    """Hold the build that would be loaded for a kernel against its reference, over the grid of its manifest.

    A build that is the reference is held against the formulas of the grid, and gradients always are.

    Args:
        kernel: a registered name, "name@version", "name@revision", or a bundle class.
        device: where inputs lie, such as "cuda"; by default what this machine computes on. "cpu" loads what a machine
            without an accelerator would.
        modes: some of "eager", "compile", "graph" (CUDA graphs) and "backward", or one of them.
        only: entrypoints ("fp8_matmul") or cases of them ("fp8_matmul/one row"), or one of these; all if empty.
        deadline: seconds that one case may take in one mode.
        processes: how many other processes work at a time, one being started again after a case that ends it or its
            device. 0 works in this one.
        watch: told of each finding when it is there.

    Raises:
        RequestError: the kernel has no grid, what was asked for is not in it, nothing would be looked at, or an entry
            of the grid is wrong.
        As `load_kernel`.
    """
    grid = grid_of(kernel)
    modes, only = each(modes, "modes"), each(only, "only")
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise RequestError(f"there is no mode {unknown[0]!r}", f"There are {', '.join(MODES)}.")
    device = device if device is not None else default_device()
    if processes < 0 or not deadline > 0:
        raise RequestError(f"processes={processes} and deadline={deadline} were given", "Neither is below zero.")
    if not processes:
        usable(device)
    bundle, reference = load(kernel, device)
    plan = Plan(kernel, device, jobs_of(kernel, bundle, grid, modes, only))
    refuse_what_selects_nothing(plan.jobs, grid, bundle)
    origin = api.origin(bundle)
    here = (finding for job in plan.jobs for finding in findings_of(job, plan, grid, bundle, reference))
    findings = []
    for finding in isolated(plan, grid, min(deadline, _LONGEST), processes) if processes else here:
        findings.append(finding)
        if watch is not None:
            watch(finding)
    findings.sort(key=_in_the_order_of(plan, grid))
    against = "formulas" if reference is None else "its reference"
    return Checked(spelling(kernel), device, origin, against, tuple(findings))


def spelling(kernel: str | type) -> str:
    """How a kernel is asked for on the command line."""
    return kernel if isinstance(kernel, str) else f"{kernel.__module__}:{kernel.__qualname__}"


def _in_the_order_of(plan: Plan, grid: Grid) -> Callable[[Finding], int]:
    """The place of a finding's job among those that were planned."""
    names = ((grid[job.entry], job) for job in plan.jobs)
    places = {(entry.entrypoint, entry.cases[job.case].name, job.mode): at for at, (entry, job) in enumerate(names)}
    return lambda finding: places[finding.entrypoint, finding.case, finding.mode]
