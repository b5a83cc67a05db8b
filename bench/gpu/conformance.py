"""`check` and `bench` of kernels on a GPU, into a page of results.

Published builds are found through KERNEL_LOADER_LOCAL, so that no Hub is needed:

    KERNEL_LOADER_LOCAL=org/name=DIRECTORY python bench/gpu/conformance.py RESULT.md PLOTS finegrained_fp8 ...

The page is written after each part, so that a run which is cut short leaves what came before.
FINEGRAINED_AUTOTUNE_TRIALS=1 shortens the searches of finegrained_fp8 in a check, though not those of its kernels that
try every configuration of every shape; leave it out where `bench` counts.
"""

import os
import sys
import time
from pathlib import Path

from device import machine

from kernel_loader.conformance import bench, check, report
from kernel_loader.conformance.plot import roofline


def main() -> None:
    """Check and bench each kernel."""
    page, plots, *kernels = sys.argv[1:]
    Path(plots).mkdir(parents=True, exist_ok=True)
    lines = ["# Published kernels through `check` and `bench`", "", machine()]
    for kernel in kernels:
        begin = time.perf_counter()
        # Most of the time goes into compilation on the host.
        checked = check(kernel, device="cuda", processes=max(1, (os.cpu_count() or 2) - 2))
        took = f"{time.perf_counter() - begin:.0f} s."
        lines += ["", f"## {kernel}", "", "```", *report.of_check(checked).splitlines(), "```", "", took]
        write(page, lines)
        measured = bench(kernel, device="cuda")
        lines += ["", "```", *report.of_bench(measured).splitlines(), "```"]
        (Path(plots) / f"{kernel}.svg").write_text(roofline(measured), encoding="utf-8")
        write(page, lines)


def write(page: str, lines: list[str]) -> None:
    """The page so far."""
    Path(page).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
