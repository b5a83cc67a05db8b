"""Serve a demo repository: `python -m kernel_loader.testing --latency 0.05 --files 400`.

The first line printed is the endpoint. It serves until it is interrupted or terminated, and then prints how many
requests it had, as JSON: {"GET tree": 1, ...}.
"""

import argparse
import json
import signal
import threading

from . import demo
from .hub import Hub


def main() -> None:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(
        prog="python -m kernel_loader.testing", description="A loopback Hub with a demo repository."
    )
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that every request waits")
    parser.add_argument("--files", type=int, default=10, help="files of the one build (at least 2)")
    parser.add_argument("--size", type=int, default=1000, help="bytes of a file")
    parser.add_argument("--repo", default=demo.REPO_ID, help="name of the repository (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    arguments = parser.parse_args()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with Hub(latency=arguments.latency, port=arguments.port) as hub:
        demo.publish(hub, files=arguments.files, size=arguments.size, repo_id=arguments.repo)
        print(hub.endpoint, flush=True)
        stopped.wait()
        counts = {f"{method} {route}": count for (method, route), count in sorted(hub.counts().items())}
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
