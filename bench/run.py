"""Run every benchmark that needs no accelerator, and show one table.

    python bench/run.py --peer PATH-OF-THE-PEER'S-PYTHON [--write]

With --write the result is kept as bench/results/<date>-cpu.md.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from report import ROOT, Report, Row, ask, summary

HERE = Path(__file__).parent
PACKAGES = ("torch", "kernels", "kernel-loader")

_VERSIONS = """
import importlib.metadata, platform, sys
there = {d.name.lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
print(", ".join([f"Python {platform.python_version()}", *(f"{n} {there[n]}" for n in sys.argv[1:] if n in there)]))
"""


def run_script(name: str, *options: str) -> Report:
    """Run a benchmark in a process of its own. One that breaks has missed its target."""
    done = subprocess.run(
        [sys.executable, str(HERE / name), "--json", *options], cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True
    )
    try:
        return Report.from_json(done.stdout)
    except ValueError:
        return Report(name, (Row(f"{name} ended", f"with status {done.returncode} and no report", "0", met=False),))


def machine() -> str:
    """CPU model, cores and system. No names that belong to somebody."""
    file = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*:\s*(.+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    load = f", load average {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    model = match[1] if match else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores, {platform.system()}{load}"


def page(reports: Sequence[Report], peer: str, where: str) -> str:
    """All reports as one Markdown page, the summary first."""
    rows = [row for report in reports for row in report.rows]
    facts = (
        f"- Date: {today()}",
        f"- Machine: {where}",
        f"- Ours: {ask(sys.executable, '-c', _VERSIONS, *PACKAGES)}",
        f"- Peer: {ask(peer, '-c', _VERSIONS, *PACKAGES)}",
    )
    details = [f"## {report.title}\n\n{report.details}" for report in reports if report.details]
    return "\n\n".join(["# Benchmarks without an accelerator", "\n".join(facts), summary(rows), *details]) + "\n"


def today() -> str:
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="interpreter that has the peer")
    parser.add_argument("--write", action="store_true", help="keep the result in bench/results/")
    options = parser.parse_args()
    where = machine()
    reports = (
        run_script("peer_agreement.py", "--peer", options.peer),
        run_script("import_time.py", "--peer", options.peer),
        run_script("resolve_speed.py"),
        run_script("warm_call.py"),
        run_script("hub_load.py", "--peer", options.peer),
        run_script("kernelize.py", "--peer", options.peer),
        run_script("layers_agreement.py", "--peer", options.peer),
    )
    text = page(reports, options.peer, where)
    print(text)
    if options.write:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"{today()}-cpu.md").write_text(text, encoding="utf-8")
    return 0 if all(report.met for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
