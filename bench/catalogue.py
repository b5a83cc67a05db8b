"""How long `load_kernel` takes for each kernel of the catalogue, from the builds that its repository would have.

    python bench/catalogue.py [--repeats 5] [--latency 0.05]

A loopback Hub has all repositories, with the builds that `tests/repositories.py` gives them; every request waits
`--latency` seconds. A build has metadata.json and Python files that define the entrypoints and nothing else, so that
what is timed is ours: to resolve, fetch, verify, import and bind. Each kernel is loaded for the first of some hosts
that takes a build of it. Cold loads are in a fresh process with an empty cache, warm ones in another with what those
left; both have imported torch, and loaded a kernel, before the clock starts. Times are medians.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from report import ROOT, Report, Row, arguments, as_installed, table

sys.path.insert(0, str(ROOT))

import kernel_loader
from kernel_loader.binder import bundle_class
from kernel_loader.catalog import Catalog
from kernel_loader.loader import KernelLoader
from kernel_loader.manifest import Entrypoint
from kernel_loader.settings import Settings
from kernel_loader.testing import Hub
from kernel_loader.testing.demo import REPO_ID, publish as publish_demo
from tests.hosts import HOSTS
from tests.repositories import REPOSITORIES, Published, Repository

FUNCTION = "def {}(*_, **__):\n    return None\n"


class Load(NamedTuple):
    """One load: of which build, for which host, in how many seconds, with how many requests."""

    host: str
    build: str
    seconds: float
    requests: int = 0


def sources(repository: Repository) -> dict[str, str]:
    """Python files that define what the manifest binds."""
    manifest = Catalog(Settings()).get(repository.kernel)
    fields = (field.name for field in dataclasses.fields(bundle_class(manifest)))
    symbols = [manifest.entrypoints.get(field, Entrypoint(field)).symbol.split(".") for field in fields]
    packages = {"/".join(parts[:end]) for parts in symbols for end in range(1, len(parts))}
    files: defaultdict[str, str] = defaultdict(str, {"__init__.py": ""})
    for package in packages:
        files[f"{package}/__init__.py"] = ""
    for *package, name in symbols:
        if "/".join((*package, name)) not in packages:
            files["/".join((*package, "__init__.py"))] += FUNCTION.format(name)
    return dict(files)


def publish(hub: Hub) -> None:
    """All repositories, each with its builds."""
    publish_demo(hub, files=2)
    for repository in REPOSITORIES:
        files = sources(repository)
        content = {
            f"build/{name}/{file}": text.encode()
            for name, document in repository.builds().items()
            for file, text in (files | {"metadata.json": json.dumps(document)}).items()
        }
        hub.kernel(repository.repo).commit(content, branch=repository.branch or f"v{repository.version}")


def taker(kernel: str) -> str:
    """A host that takes a build of the repository."""
    order = ("H200", "B200", "A100", "MI300", "PVC", "Mac", "cpu")
    return next(host for host in order if KernelLoader(Settings(), HOSTS[host], (Published(),)).resolve(kernel).chosen)


def load_all(cache: Path) -> list[Load]:
    """Load every kernel, in this process."""
    import torch  # noqa: F401 - guards need it, and a program that uses kernels has it

    logging.getLogger("kernel_loader").setLevel(logging.ERROR)  # advisories would be read as results
    KernelLoader(Settings(cache=cache), HOSTS["cpu"]).load_module(REPO_ID, version=1)
    loads = []
    for repository in REPOSITORIES:
        host = taker(repository.kernel)
        loader = KernelLoader(Settings(cache=cache), HOSTS[host])
        begin = time.perf_counter()
        bundle = loader.load(repository.kernel, fallback="error")
        seconds = time.perf_counter() - begin
        loads.append(Load(host, kernel_loader.origin(bundle).variant, seconds))
    return loads


def in_fresh_process(hub: Hub, home: str) -> list[Load]:
    """The same, in a process whose caches are below `home`; with the requests of each kernel."""
    hub.requests.clear()
    environ = os.environ | hub.environ | {"HF_HOME": f"{home}/hf", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--child", f"{home}/store"]
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    paths = [request.path for request in hub.requests]
    asked = Counter(r.repo for r in REPOSITORIES for path in paths if f"/{r.repo}/" in path)
    loads = [Load(*each) for each in json.loads(done.stdout)]
    return [load._replace(requests=asked[r.repo]) for load, r in zip(loads, REPOSITORIES, strict=True)]


def measure(hub: Hub, repeats: int) -> tuple[list[list[Load]], list[list[Load]]]:
    """Cold loads, each time with caches of their own, and warm loads after them."""
    cold: list[list[Load]] = []
    warm: list[list[Load]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as home:
            cold.append(in_fresh_process(hub, home))
            warm.append(in_fresh_process(hub, home))
    return cold, warm


def milliseconds(runs: list[list[Load]]) -> list[float]:
    """The median of each kernel."""
    return [statistics.median(load.seconds for load in loads) * 1e3 for loads in zip(*runs, strict=True)]


def main() -> int:
    """Measure, print, and tell whether warm loads asked nothing."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds that every request waits")
    parser.add_argument("--child", type=Path, help="only load every kernel, with this cache")
    options = parser.parse_args()
    if options.child:
        print(json.dumps(load_all(options.child)))
        return 0
    as_installed()
    with Hub(latency=options.latency) as hub:
        publish(hub)
        cold, warm = measure(hub, options.repeats)
    first, again = milliseconds(cold), milliseconds(warm)
    asked = sum(load.requests for run in warm for load in run)
    rows = (
        Row("requests of warm loads", str(asked), "0", met=asked == 0),
        Row(f"cold load, median of {len(first)} kernels", f"{statistics.median(first):.1f} ms"),
        Row(f"warm load, median of {len(again)} kernels", f"{statistics.median(again):.1f} ms"),
    )
    details = [
        (repository.kernel, load.host, load.build, load.requests, f"{a:.1f}", f"{b:.1f}")
        for repository, load, a, b in zip(REPOSITORIES, cold[0], first, again, strict=True)
    ]
    headers = ("kernel", "host", "build", "requests", "cold, ms", "warm, ms")
    head = f"Every request waits {options.latency * 1e3:g} ms; medians of {options.repeats} fresh processes."
    return Report("Loading the catalogue", rows, f"{head}\n\n{table(headers, details)}").emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
