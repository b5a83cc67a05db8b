"""Loading from the Hub, cold and warm, against the peer: time, and requests.

    python bench/hub_load.py --peer PATH-OF-THE-PEER'S-PYTHON [--repeats 5] [--latency 0.05]

One loopback Hub serves both, every request waiting `--latency` seconds. Each load is in a fresh process that has
imported torch before the clock starts, and collected what torch leaves behind: a pass of the garbage collector over its
heap takes 80 ms, and would fall to either by chance. Cold loads have empty caches. Ratios are of medians.

Times are given with the import of the package and for the call alone. The target of a cold load is for the former: the
client of the Hub is imported in our call, and with the peer's package. That of a warm load is for the call, in which
neither imports anything.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass

from report import ROOT, Report, Row, arguments, as_installed, table

sys.path.insert(0, str(ROOT))

from kernel_loader.testing import Hub
from kernel_loader.testing.demo import REPO_ID, publish

SCRIPT = """
import gc, json, time
import torch
gc.collect()
begin = time.perf_counter()
import {package}
imported = time.perf_counter()
module = {load}("{repo}", version=1)
end = time.perf_counter()
assert module.scale(2, 3) == 6
print(json.dumps([end - begin, end - imported]))
"""
OURS = SCRIPT.format(package="kernel_loader.api", load="kernel_loader.load_module", repo=REPO_ID)
PEER = SCRIPT.format(package="kernels", load="kernels.get_kernel", repo=REPO_ID)

PARTS = {"seconds": "with the import", "call": "the call alone"}


@dataclass(frozen=True, slots=True)
class Load:
    """One load: how long it took, with the import of the package and without, and what it asked."""

    seconds: float
    call: float
    requests: int
    heads: int


def load(hub: Hub, python: str, script: str, home: str) -> Load:
    """Load in a fresh process whose caches are below `home`."""
    # The peer sends no valid User-Agent where telemetry is off; both run with it, and the Hub is this machine.
    telemetry = {"HF_HUB_DISABLE_TELEMETRY": "0"}
    own = telemetry | {"HF_HOME": f"{home}/hf", "KERNEL_LOADER_CACHE": f"{home}/store", "PYTHONPATH": str(ROOT)}
    hub.requests.clear()
    done = subprocess.run(
        [python, "-c", script],
        env=os.environ | hub.environ | own,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    methods = Counter(request.method for request in hub.requests)
    return Load(*json.loads(done.stdout), sum(methods.values()), methods["HEAD"])


def measure(hub: Hub, python: str, script: str, repeats: int) -> tuple[list[Load], list[Load]]:
    """Cold loads, each with caches of its own, and a warm load after each."""
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as home:
            cold.append(load(hub, python, script, home))
            warm.append(load(hub, python, script, home))
    return cold, warm


def median(loads: list[Load], part: str) -> float:
    """Median time of a part, in seconds."""
    return statistics.median(getattr(item, part) for item in loads)


def main() -> int:
    """Measure, print, and tell whether the targets were met."""
    parser = arguments(__doc__)
    parser.add_argument("--peer", required=True, help="interpreter that has the peer")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that every request waits")
    options = parser.parse_args()
    as_installed()
    rows, details = [], []
    for files, target in ((10, {"cold": 0.5, "warm": 0.02}), (400, {"cold": 0.25, "warm": 0.02})):
        with Hub(latency=options.latency) as hub:
            publish(hub, files=files)
            ours = measure(hub, sys.executable, OURS, options.repeats)
            peer = measure(hub, options.peer, PEER, options.repeats)
        for state, mine, theirs in (("cold", ours[0], peer[0]), ("warm", ours[1], peer[1])):
            for part, aimed_at in (("seconds", "cold"), ("call", "warm")):
                ratio = median(mine, part) / median(theirs, part)
                name = f"{state} load, {files} files, {PARTS[part]}, against the peer"
                limit = target[state] if state == aimed_at else None
                aim = f"<= {limit}" if limit else ""
                rows.append(Row(name, f"{ratio:.3f}", aim, met=ratio <= limit if limit else None))
            for who, loads in (("ours", mine), ("peer", theirs)):
                requests, heads = loads[0].requests, loads[0].heads
                times = [f"{median(loads, part) * 1e3:.1f} ms" for part in PARTS]
                details.append((f"{state}, {files} files", who, *times, requests, heads))
    head = f"Every request waits {options.latency * 1e3:g} ms; medians of {options.repeats} fresh processes each."
    shown = table(("load", "who", *PARTS.values(), "requests", "of them HEAD"), details)
    return Report("Loading from the Hub", tuple(rows), f"{head}\n\n{shown}").emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
