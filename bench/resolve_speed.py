"""How long choosing among 1,000 builds takes, and that neither the order of the input nor the hash seed changes it.

python bench/resolve_speed.py [--builds 1000] [--runs 30]
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace

from population import random_builds
from report import Report, Row, arguments, ask, table

from kernel_loader.host import Host, HostDevice
from kernel_loader.resolver import resolve

LIMIT_MS = 50
SHUFFLES = 50
HASH_SEEDS = ("0", "1", "2", "42", "4294967295")
HOST = Host(
    os="linux",
    cpu="x86_64",
    glibc="2.39",
    python="3.12",
    torch="2.11.0",
    cxx11_abi=True,
    cuda="12.9",
    driver="590.44.01",
    devices=(HostDevice(arch="9.0"),),
    tvm_ffi="0.1.6",
)


def mixed(count: int) -> list[str]:
    """Names as repositories have them: for this host and others, some of no grammar."""
    rng = random.Random(7)
    names: set[str] = set()
    while len(names) < count:
        names.update(random_builds(rng, HOST, count))
    return sorted(names)[:: len(names) // count][:count]


def accepted(count: int) -> list[str]:
    """Names that all fit `host_for_all`, whose CUDA has a minor version above every one of them."""
    return [f"torch-stable-abi2{index % 10}-cu12{index // 10}-x86_64-linux" for index in range(count)]


def rejected(count: int) -> list[str]:
    """Names that each fail several rules: another system, another CPU, another CUDA."""
    return [f"torch2{index % 10}-cxx98-cu13{index // 10}-aarch64-windows" for index in range(count)]


def milliseconds(names: list[str], host: Host, runs: int) -> list[float]:
    """What single resolutions take."""
    taken = []
    for _ in range(runs):
        begin = time.perf_counter()
        resolve(names, host)
        taken.append((time.perf_counter() - begin) * 1000)
    return taken


def choice(names: Iterable[str], host: Host = HOST) -> str:
    """What is chosen from names in whatever order they come."""
    resolution = resolve(names, host)
    return resolution.chosen.name if resolution.chosen else "none"


def choices_by_order(names: list[str]) -> set[str]:
    """The choices over many orders of the input; one, if order has no part in it."""
    rng = random.Random(0)
    return {choice(rng.sample(names, len(names))) for _ in range(SHUFFLES)}


def choices_by_hash_seed(count: int) -> set[str]:
    """The choices from a set of names in processes with different hash seeds."""
    arguments = (__file__, "--builds", str(count), "--choice")
    return {ask(sys.executable, *arguments, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in HASH_SEEDS}


def run(count: int, runs: int) -> Report:
    """Measure all three sets."""
    cases = {
        "all accepted": (accepted(count), replace(HOST, cuda=f"12.{count}")),
        "mixed": (mixed(count), HOST),
        "all rejected": (rejected(count), HOST),
    }
    rows, details = [], []
    for what, (names, host) in cases.items():
        taken = milliseconds(names, host, runs)
        median = statistics.median(taken)
        fit = sum(verdict.status == "accepted" for verdict in resolve(names, host).verdicts)
        rows.append(
            Row(
                f"resolve() of {len(names):,} builds, {what}", f"{median:.1f} ms", f"< {LIMIT_MS} ms", median < LIMIT_MS
            )
        )
        details.append((what, len(names), fit, f"{min(taken):.1f}", choice(names, host)))
    names = cases["mixed"][0]
    by_order, by_seed = choices_by_order(names), choices_by_hash_seed(count)
    rows += [
        Row(f"choices over {SHUFFLES} orders of the input", str(len(by_order)), "1", len(by_order) == 1),
        Row(f"choices over {len(HASH_SEEDS)} hash seeds", str(len(by_seed)), "1", by_seed == by_order),
    ]
    headers = ("set", "builds", "accepted", "fastest, ms", "chosen")
    return Report(f"Speed of resolving (median of {runs})", tuple(rows), table(headers, details))


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--builds", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--choice", action="store_true", help="only print what is chosen from a set of names")
    options = parser.parse_args()
    if options.choice:
        print(choice(set(mixed(options.builds))))
        return 0
    return run(options.builds, options.runs).emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
