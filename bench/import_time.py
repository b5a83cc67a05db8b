"""What importing `kernel_loader` costs, against importing the peer package `kernels`.

    python bench/import_time.py --peer PATH-OF-THE-PEER'S-PYTHON [--runs 15]

Medians over fresh interpreters, the candidates in turn. The clock runs inside, around the statement alone, so that the
interpreter's own start, ten times what is measured, does not drown it. Files are warm. `from kernel_loader import
load_kernel` is measured as well: the package finds its names when they are used.
"""

from __future__ import annotations

import statistics
import sys

from report import Report, Row, arguments, as_installed, ask, table

HEAVY = ("torch", "huggingface_hub")
OURS = "import kernel_loader"
OURS_IN_USE = "from kernel_loader import load_kernel"
THEIRS = "import kernels"

_CLOCK = """
import time
begin = time.perf_counter()
{statement}
print(time.perf_counter() - begin)
"""

# Runs in a fresh interpreter, and therefore imports nothing of its own before it has counted.
_COUNT = """
import sys
files = []
sys.addaudithook(lambda event, args: files.append(args[0]) if event == "open" else None)
before = set(sys.modules)
{statement}
print(len(set(sys.modules) - before), len(files), *(name for name in {heavy} if name in sys.modules))
"""


def import_times(candidates: dict[str, str], runs: int) -> dict[str, float]:
    """Statement -> median of seconds."""
    taken: dict[str, list[float]] = {statement: [] for statement in candidates}
    for run in range(runs + 1):
        for statement, python in candidates.items():
            seconds = float(ask(python, "-c", _CLOCK.format(statement=statement)))
            if run:  # the first one fills the page cache
                taken[statement].append(seconds)
    return {statement: statistics.median(values) for statement, values in taken.items()}


def count(python: str, statement: str) -> tuple[int, int, tuple[str, ...]]:
    """Modules that a statement imports, files that it opens, and which of the heavy packages it brings in."""
    modules, files, *heavy = ask(python, "-c", _COUNT.format(statement=statement, heavy=HEAVY)).split()
    return int(modules), int(files), tuple(heavy)


def run(peer: str, runs: int) -> Report:
    """Measure both."""
    as_installed()
    candidates = {OURS: sys.executable, OURS_IN_USE: sys.executable, THEIRS: peer}
    taken = import_times(candidates, runs)
    counted = {statement: count(python, statement) for statement, python in candidates.items()}
    ratio, ratio_in_use = taken[OURS] / taken[THEIRS], taken[OURS_IN_USE] / taken[THEIRS]
    heavy = sorted({*counted[OURS][2], *counted[OURS_IN_USE][2]})
    rows = (
        Row(f"`{OURS}` to `{THEIRS}`", f"1/{1 / ratio:.0f}", "1/5 or less", ratio <= 1 / 5),
        Row(f"`{OURS_IN_USE}` to `{THEIRS}`", f"1/{1 / ratio_in_use:.1f}"),
        Row("torch or huggingface_hub imported by ours", ", ".join(heavy) or "neither", "neither", not heavy),
    )
    details = [
        (f"`{statement}`", f"{taken[statement] * 1000:.1f}", modules, files, ", ".join(there) or "neither")
        for statement, (modules, files, there) in counted.items()
    ]
    headers = ("statement", "ms", "modules", "files opened", "torch, huggingface_hub")
    return Report(f"Import time (median of {runs})", rows, table(headers, details))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--peer", required=True, help="interpreter that has the peer")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    return run(options.peer, options.runs).emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
