"""Jobs in processes of their own: what ends one, or leaves its device unusable, is a finding, and the rest goes on."""

from __future__ import annotations

import enum
import logging
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from kernel_loader.conformance.grid import Grid
from kernel_loader.conformance.plan import Job, Plan, findings_of, grid_of, load, trouble_with, usable
from kernel_loader.conformance.subject import Finding
from kernel_loader.errors import RequestError

# Seconds for a process to load the kernel, and to end.
_START: Final = 300.0
_PATIENCE: Final = 10.0


class _Sign(enum.Enum):
    READY = enum.auto()  # the kernel is loaded
    OF_JOB = enum.auto()  # a job is done
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
    """Findings from other processes, the next of which goes on behind what ended the last one."""
    jobs = plan.jobs
    context = multiprocessing.get_context("spawn")
    while jobs and not stop.is_set():
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, plan._replace(jobs=jobs)), daemon=True)
        process.start()
        living.add(process)
        if stop.is_set():  # whoever set it may have looked before
            process.kill()
        theirs.close()
        try:
            _await_start(ours, process)
            jobs = yield from _received(ours, jobs, grid, deadline, process)
            process.join(0 if jobs else _PATIENCE)
        finally:
            living.discard(process)
            process.kill()
            process.join(_PATIENCE)  # a call of a driver may not let it end
            ours.close()


def _await_start(ours: Connection, process: Any) -> None:  # noqa: ANN401 - of multiprocessing
    """Wait until the process has loaded the kernel.

    Raises:
        RequestError: it cannot.
    """
    try:
        message = ours.recv() if ours.poll(_START) else f"it was not ready after {_START:.0f} s"
    except EOFError:
        process.join(_PATIENCE)
        message = f"it ended ({_exit(process.exitcode)}) before it was ready"
    if message is not _Sign.READY:
        raise RequestError(
            f"a process of the check could not start: {message}", "`--processes 0` works in this process."
        )


def _received(
    ours: Connection,
    jobs: tuple[Job, ...],
    grid: Grid,
    deadline: float,
    process: Any,  # noqa: ANN401 - of multiprocessing
) -> Generator[Finding, None, tuple[Job, ...]]:
    """What one process finds; returns what is left to be done."""
    for number, job in enumerate(jobs):
        left = list(job.probes)
        end = time.monotonic() + deadline
        while (message := _next(ours, end, deadline, process)) is not _Sign.OF_JOB:
            if isinstance(message, Finding):
                left.remove(message.probe)
                yield message
                continue
            if isinstance(message, str):
                entry = grid[job.entry]
                at = left.pop(0) if left else "end"
                yield Finding(entry.entrypoint, entry.cases[job.case].name, job.mode, at, "failed", message)
            # What comes after a crash may be right. A hang would take its time again.
            again = (job._replace(probes=tuple(left)),) if left and time.monotonic() < end else ()
            return again + jobs[number + 1 :]
    return ()


def _next(ours: Connection, end: float, deadline: float, process: Any) -> object:  # noqa: ANN401
    """The next message of a process, or why there is none."""
    try:
        if ours.poll(max(0.0, end - time.monotonic())):
            return ours.recv()
    except EOFError:
        process.join(_PATIENCE)
        return f"the process ended ({_exit(process.exitcode)})"
    return f"it was not done after {deadline:g} s"


def _exit(code: int | None) -> str:
    if code is None:
        return "it closed its pipe, and goes on"
    return f"signal {-code}" if code < 0 else f"status {code}"


def _serve(connection: Connection, plan: Plan) -> None:
    """Work through a plan, sending findings and signs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    os.dup2(2, 1)  # what a kernel prints is no answer
    logging.getLogger("kernel_loader").setLevel(logging.ERROR)  # the other process has said it
    try:
        usable(plan.device)
        grid = grid_of(plan.kernel)
        bundle, reference = load(plan.kernel, plan.device)
    except Exception as error:  # noqa: BLE001 - raised again in the other process
        connection.send(str(error))
        return
    connection.send(_Sign.READY)
    for job in plan.jobs:
        for finding in findings_of(job, plan, grid, bundle, reference):
            connection.send(finding)
            if finding.status != "passed" and trouble_with(plan.device):
                connection.send(_Sign.OF_DEVICE)
                return
        connection.send(_Sign.OF_JOB)
