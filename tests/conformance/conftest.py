"""A kernel that a test writes, with its grid, for the default loader of this process and of others."""

import os
from pathlib import Path

import pytest

from kernel_loader import api


@pytest.fixture
def kernel(workshop, cpu_machine, monkeypatch):
    """Register the kernel `routed` with a source."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))

    def register(source: str, **keys: object) -> str:
        grid = {"grid": "tests.conformance.routed:GRID"}
        workshop.simple("routed", source, **(grid | {"entrypoints": {"routed": "routed"}} | keys))
        monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(workshop.manifests))
        local = (f"{repo}={path}" for repo, path in workshop.local.items())
        monkeypatch.setenv("KERNEL_LOADER_LOCAL", os.pathsep.join(local))
        api.reset()
        return "routed"

    return register
