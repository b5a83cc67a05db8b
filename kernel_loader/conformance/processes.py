"""Jobs in processes of their own: what ends one, or leaves its device unusable, is a finding, and the rest goes on."""

from __future__ import annotations

import enum
import logging
import multiprocessing
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from kernel_loader.conformance.grid import Grid
from kernel_loader.conformance.plan import Job, Plan, findings_of, grid_of, load
from kernel_loader.conformance.probes import PROBES, Finding

# Seconds for a process that is done to end by itself.
_FAREWELL: Final = 10.0


class _End(enum.Enum):
    OF_JOB = enum.auto()
    OF_DEVICE = enum.auto()  # it answers no more, so that this process can find nothing else


def isolated(plan: Plan, grid: Grid, deadline: float, processes: int) -> Iterator[Finding]:
    """Findings from other processes, as they come.

    Args:
        plan: what is to be checked.
        grid: of the kernel.
        deadline: seconds that a job may take.
        processes: how many work at a time. All modes of a case are in one, where kernels compile and tune once.
    """
    cases = list(dict.fromkeys((job.entry, job.case) for job in plan.jobs))
    parts = [frozenset(cases[part::processes]) for part in range(processes)]
    plans = [plan._replace(jobs=tuple(job for job in plan.jobs if (job.entry, job.case) in part)) for part in parts]
    found: queue.SimpleQueue[Finding | BaseException | None] = queue.SimpleQueue()
    stop, living = threading.Event(), set[Any]()

    def work(own: Plan) -> None:
        try:
            for finding in _in_turn(own, grid, deadline, stop, living):
                found.put(finding)
            found.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again where findings are taken
            found.put(error)

    for own in plans:
        threading.Thread(target=work, args=(own,), daemon=True).start()
    working = len(plans)
    try:
        while working:
            item = found.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                working -= 1
            else:
                yield item
    finally:  # the caller wants no more, or something failed
        stop.set()
        for process in tuple(living):
            process.kill()


def _in_turn(plan: Plan, grid: Grid, deadline: float, stop: threading.Event, living: set[Any]) -> Iterator[Finding]:
    """Findings from other processes, the next of which goes on after the job that ended the last one."""
    jobs = plan.jobs
    context = multiprocessing.get_context("spawn")
    while jobs and not stop.is_set():
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, plan._replace(jobs=jobs)), daemon=True)
        process.start()
        living.add(process)
        theirs.close()
        try:
            done = yield from _received(ours, jobs, grid, deadline, process)
            process.join(_FAREWELL if done == len(jobs) else 0)
        finally:
            living.discard(process)
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
        for finding in findings_of(job, plan, grid, bundle, reference):
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
