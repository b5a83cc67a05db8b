"""`kernel-loader check` and `bench` of kernels on a GPU, as a person would call them, into a page of results.

Published builds are found through KERNEL_LOADER_LOCAL, so that no Hub is needed:

    KERNEL_LOADER_LOCAL=org/name=DIRECTORY python bench/gpu/conformance.py RESULT.md PLOTS finegrained_fp8 ...

Cases are checked side by side, as most of the time goes into compilation on the host. `bench` runs alone.
FINEGRAINED_AUTOTUNE_TRIALS=1 keeps finegrained_fp8 from trying 60 configurations of every shape in a check.
"""

import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import kernel_loader
from kernel_loader.conformance.grid import MODES
from kernel_loader.conformance.plan import case_id, grid_of

PROCESSES = 14
LIMIT = 400  # seconds


def main() -> None:
    """Check, bench, and write the page after each kernel."""
    page, plots, *kernels = sys.argv[1:]
    lines = [
        "# Published kernels through `check` and `bench`",
        "",
        ", ".join(
            [
                f"{datetime.now(UTC):%Y-%m-%d}",
                torch.cuda.get_device_name(),
                f"driver {kernel_loader.Host.detect().driver}",
                f"Python {platform.python_version()}",
                f"torch {torch.__version__}",
                f"triton {triton.__version__}",
                f"kernel_loader {kernel_loader.__version__}.",
            ]
        ),
    ]
    Path(plots).mkdir(parents=True, exist_ok=True)
    for kernel in kernels:
        lines += ["", f"## {kernel}", "", *checked(kernel), "", *measured(kernel, Path(plots) / f"{kernel}.svg")]
        Path(page).write_text("\n".join(lines) + "\n", encoding="utf-8")


def checked(kernel: str) -> list[str]:
    """A table of what `check` found, and the failures."""
    begin = time.perf_counter()
    grid = grid_of(kernel)
    names = list(dict.fromkeys(case_id(entry, case) for entry in grid for case in entry.cases))
    with ThreadPoolExecutor(PROCESSES) as pool:
        answers = list(pool.map(partial(check, kernel), [names[part::PROCESSES] for part in range(PROCESSES)]))
    found = next(answer for answer in answers if answer)
    findings = [finding for answer in answers if answer for finding in answer["findings"]]
    origin = found["origin"]
    build = f"{origin['variant']} ({origin['digest'][:12]}), against {found['against']}"
    lines = [
        f"{build}: {len(names)} cases in {time.perf_counter() - begin:.0f} s.",
        f"Guards: {'; '.join(origin['guards']) or 'none'}.",
        "",
        "| entrypoint | mode | passed | failed | skipped | largest error of what is tolerated |",
        "|---|---|---|---|---|---|",
    ]
    for entrypoint in dict.fromkeys(entry.entrypoint for entry in grid):
        for mode in MODES:
            own = [f for f in findings if (f["entrypoint"], f["mode"]) == (entrypoint, mode)]
            counts = [sum(f["status"] == status for f in own) for status in ("passed", "failed", "skipped")]
            worst = max((float(f["worst"]) for f in own if f["worst"] is not None), default=None)
            cells = [entrypoint, mode, *map(str, counts), "" if worst is None else f"{worst:.2g}"]
            lines.append(f"| {' | '.join(cells)} |")
    failed = [f for f in findings if f["status"] == "failed"]
    lines += [""] if failed else []
    lines += [f"- {f['entrypoint']}/{f['case']}, {f['mode']}, {f['probe']}: {f['detail'][:240]}" for f in failed]
    refused = {f"{f['entrypoint']}/{f['case']}": f["detail"] for f in findings if f["detail"].startswith("refused")}
    lines += ["", *(f"- {name}: {detail}" for name, detail in refused.items())] if refused else []
    lines += ["", f"{answers.count(None)} parts did not end in {LIMIT} s."] if None in answers else []
    return lines


def check(kernel: str, cases: list[str]) -> dict[str, Any] | None:
    """What `kernel-loader check --json` says of some cases; None if that took too long."""
    only = [word for case in cases for word in ("--only", case)]
    command = [sys.executable, "-m", "kernel_loader", "check", kernel, *only, "--device", "cuda", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return None
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(kernel: str, plot: Path) -> list[str]:
    """What `bench` prints, as it is."""
    done = subprocess.run(
        [sys.executable, "-m", "kernel_loader", "bench", kernel, "--plot", str(plot)],
        capture_output=True,
        text=True,
        check=False,
        env={key: value for key, value in os.environ.items() if key != "FINEGRAINED_AUTOTUNE_TRIALS"},
    )
    print(done.stdout, done.stderr, sep="\n", flush=True)
    return ["```", *(done.stdout or done.stderr).rstrip().splitlines(), "```"]


if __name__ == "__main__":
    main()
