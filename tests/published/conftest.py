"""A Hub with a kernel on it, and loaders and processes that ask it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from kernel_loader.host import Host
from kernel_loader.loader import KernelLoader
from kernel_loader.settings import Settings
from kernel_loader.testing import Hub
from tests.builds import CPU_HOST, NO_ACCELERATOR

REPO = "org/kernel"


@pytest.fixture(autouse=True)
def own_hf_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The Hugging Face cache of each test is its own."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))


def files(count: int = 10, variant: str = "torch-universal", value: int = 1) -> dict[str, bytes]:
    """A build of so many files, metadata.json and __init__.py among them."""
    build = {
        "__init__.py": f"value = {value}\ndef double(x): return {value + 1} * x\n".encode(),
        "metadata.json": b'{"name": "kernel", "version": 1, "python-depends": []}',
    } | {f"part{i}.py": f"part = {i}\n".encode() for i in range(count - 2)}
    return {f"build/{variant}/{name}": content for name, content in build.items()}


class Site:
    """A Hub, a store, and those who load from the one into the other."""

    def __init__(self, hub: Hub, root: Path) -> None:
        self.hub, self.root, self.store = hub, root, root / "store"
        self.manifests = root / "manifests"
        self.manifests.mkdir()
        (self.manifests / "kernel.toml").write_text(
            f'name = "kernel"\nrepo = "{REPO}"\nversion = 1\n[entrypoints]\ndouble = "double"\nvalue = "value"\n'
        )
        self.kernel = hub.kernel(REPO)
        self.publish()

    def publish(self, content: dict[str, bytes] | None = None, branch: str = "v1") -> str:
        """Replace what stands on a branch; gives the commit."""
        return self.kernel.commit(content if content is not None else files(), branch=branch)

    def loader(self, host: Host = CPU_HOST, **settings: object) -> KernelLoader:
        """A loader as a new process would have it."""
        return KernelLoader(Settings(**({"cache": self.store, "manifests": (self.manifests,)} | settings)), host)

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of a process that loads from here."""
        own = {"KERNEL_LOADER_CACHE": str(self.store), "KERNEL_LOADER_MANIFESTS": str(self.manifests)}
        lifted = {"KERNEL_LOADER_OFFLINE": "0", "HF_HOME": str(self.root / "hf")}
        host = NO_ACCELERATOR | {"KERNEL_LOADER_OVERRIDE_TORCH": "2.13.0"}  # torch itself is not needed
        return os.environ | self.hub.environ | own | lifted | host | more

    def start(self, script: str, **environ: str) -> subprocess.Popen[str]:
        """A process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", script],
            env=self.environ(**environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, **environ: str) -> str:
        """What a process of its own prints; it must succeed."""
        process = self.start(script, **environ)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out

    def gets(self) -> int:
        """How many files were asked for."""
        return sum(count for (_, route), count in self.hub.counts().items() if route == "resolve")

    def tree(self) -> dict[str, tuple[int, int, bytes]]:
        """Everything in the store, to tell whether something was written."""
        return {
            str(file.relative_to(self.store)): (file.stat().st_mtime_ns, file.stat().st_ino, file.read_bytes())
            for file in self.store.rglob("*")
            if file.is_file()
        }

    def build(self) -> Path:
        """The one build in the store."""
        (build,) = (self.store / "builds").iterdir()
        return build


@pytest.fixture
def site(hub: Hub, tmp_path: Path) -> Iterator[Site]:
    before = set(sys.modules)
    yield Site(hub, tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("kernel_loader.loaded."):
            del sys.modules[name]
