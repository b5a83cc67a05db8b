"""What a second `load_kernel` costs, and that 32 threads which ask at once run a kernel's `__init__` once.

    python bench/warm_call.py [--processes 5]

Executions are counted by the kernel itself: a build in a temporary directory, whose `__init__` appends a byte to a file
and then takes a while, so that all threads are there before it is done.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import tempfile
import threading
import timeit
from collections.abc import Callable
from pathlib import Path

from report import Report, Row, arguments, ask, table

from kernel_loader import KernelLoader, KernelLoaderError, Settings, load_kernel
from kernel_loader.bundles.fp8 import FineGrainedFP8

LIMIT_NS = 1000
THREADS = 32
CALLS = 100_000
REPO = "bench/counted"

_MANIFEST = f"""
name = "counted"
repo = "{REPO}"
version = 1

[entrypoints]
answer = "answer"
"""
_KERNEL = """
import time
from pathlib import Path

with Path({counter!r}).open("ab") as stream:
    stream.write(b"x")
time.sleep(0.05)


def answer():
    return 42
"""


def nanoseconds(call: Callable[[], object]) -> float:
    """Median of what one call costs, the lambda around it included."""
    return statistics.median(timeit.repeat(call, number=CALLS, repeat=7)) / CALLS * 1e9


def warm_row(what: str, call: Callable[[], object]) -> Row:
    """What a call costs after the first; one that fails has missed its target."""
    try:
        call()
    except KernelLoaderError as error:
        return Row(f"warm `{what}`", f"{type(error).__name__}: {error}", f"< {LIMIT_NS} ns", met=False)
    ns = nanoseconds(call)
    return Row(f"warm `{what}`", f"{ns:.0f} ns", f"< {LIMIT_NS} ns", ns < LIMIT_NS)


def write_kernel(home: Path) -> Path:
    """Make a kernel in `home` that counts how often it is executed; returns the file with one byte for each time."""
    counter = home / "executions"
    counter.touch()
    build = home / "repository" / "build" / "torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(_KERNEL.format(counter=str(counter)), encoding="utf-8")
    (home / "manifests").mkdir()
    (home / "manifests" / "counted.toml").write_text(_MANIFEST, encoding="utf-8")
    return counter


def storm(home: Path) -> tuple[int, int]:
    """Let all threads of this process ask for the kernel at once: objects that came back, distinct ones among them."""
    settings = Settings(local={REPO: home / "repository"}, manifests=(home / "manifests",))
    loader, gate = KernelLoader(settings), threading.Barrier(THREADS)
    loaded: list[object] = []

    def load() -> None:
        gate.wait()
        loaded.append(loader.load("counted"))

    threads = [threading.Thread(target=load) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(loaded), len({id(bundle) for bundle in loaded})


def storm_in_fresh_process() -> tuple[int, int, int]:
    """Executions of the kernel, objects that came back, distinct ones among them."""
    with tempfile.TemporaryDirectory() as home:
        counter = write_kernel(Path(home))
        came_back, distinct = json.loads(ask(sys.executable, __file__, "--storm", home))
        return counter.stat().st_size, came_back, distinct


def run(processes: int) -> Report:
    """Measure warm calls, then let threads storm the loader in fresh processes."""
    logging.getLogger("kernel_loader").setLevel(logging.ERROR)  # that the reference is taken here is no news
    calls: dict[str, Callable[[], object]] = {
        'load_kernel("finegrained_fp8")': lambda: load_kernel("finegrained_fp8"),
        "load_kernel(FineGrainedFP8)": lambda: load_kernel(FineGrainedFP8),
        'load_kernel("finegrained_fp8", version=4, backend="cpu", fallback="reference")': lambda: load_kernel(
            "finegrained_fp8", version=4, backend="cpu", fallback="reference"
        ),
    }
    rows = [warm_row(what, call) for what, call in calls.items()]
    floor = Row("a function that returns its argument", f"{nanoseconds(lambda: _same(1)):.0f} ns")
    storms = [storm_in_fresh_process() for _ in range(processes)]
    executions = {executed for executed, _, _ in storms}
    distinct = {objects for _, _, objects in storms}
    all_came_back = all(came_back == THREADS for _, came_back, _ in storms)
    rows += [
        Row(f"executions of `__init__`, {THREADS} threads at once", _spread(executions), "1", executions == {1}),
        Row("distinct objects that they got", _spread(distinct), "1", distinct == {1} and all_came_back),
    ]
    details = table(("fresh process", "executions", "objects", "distinct"), [(n, *s) for n, s in enumerate(storms, 1)])
    return Report("Warm calls, and once", (*rows, floor), details)


def _same(value: object) -> object:
    return value


def _spread(values: set[int]) -> str:
    return " to ".join(str(value) for value in sorted({min(values), max(values)}))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--storm", type=Path, help="only load the kernel in this directory, from many threads")
    options = parser.parse_args()
    if options.storm:
        print(json.dumps(storm(options.storm)))
        return 0
    return run(options.processes).emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
