"""What several tests need: a place for kernels of their own, and no traces of the default loader."""

import os

# Workers that each use all cores stand in each other's way. Before torch is imported, which reads it.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from kernel_loader import api
from kernel_loader.host import Host
from kernel_loader.loader import KernelLoader
from kernel_loader.settings import Settings
from kernel_loader.testing import Hub
from tests.builds import CPU_HOST, NO_ACCELERATOR, write_build, write_manifest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No setting of the developer's reaches a test, and no default loader outlives one."""
    for variable in [v for v in os.environ if v.startswith("KERNEL_LOADER_") or v == "LOCAL_KERNELS"]:
        monkeypatch.delenv(variable)
    # No test asks the real Hub, or sees what the developer has stored.
    monkeypatch.setenv("KERNEL_LOADER_OFFLINE", "1")
    monkeypatch.setenv("KERNEL_LOADER_CACHE", str(tmp_path_factory.getbasetemp() / "store"))
    api.reset()
    yield
    api.reset()


@pytest.fixture
def cpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default loader, here and in child processes, sees no accelerator on whatever machine tests run."""
    for variable, value in NO_ACCELERATOR.items():
        monkeypatch.setenv(variable, value)


class Workshop:
    """A directory of repositories and one of manifests, and loaders that see them."""

    def __init__(self, root: Path) -> None:
        self.root, self.manifests = root, root / "manifests"
        self.local: dict[str, Path] = {}
        self.manifests.mkdir()

    def kernel(self, name: str, **keys: object) -> Path:
        """Register a kernel and give the directory of its repository."""
        write_manifest(self.manifests, name, **({"entrypoints": {"double": "double"}} | keys))
        repository = self.root / "repositories" / name.replace("_", "-")
        repository.mkdir(parents=True, exist_ok=True)
        self.local[f"org/{repository.name}"] = repository
        return repository

    def simple(self, name: str, source: str = "def double(x):\n    return 2 * x\n", **keys: object) -> Path:
        """A kernel with one build that runs everywhere; gives the build's directory."""
        return write_build(self.kernel(name, **keys), "torch-universal", {"__init__.py": source})

    def loader(self, host: Host = CPU_HOST, **settings: object) -> KernelLoader:
        """A loader for the kernels made so far."""
        own = {"local": dict(self.local), "manifests": (self.manifests,), "cache": self.root / "store", "offline": True}
        return KernelLoader(Settings(**(own | settings)), host)


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    """Kernels of a test's own. What it loaded leaves `sys.modules`."""
    before = set(sys.modules)
    yield Workshop(tmp_path)
    for name in set(sys.modules) - before:
        if name.startswith("kernel_loader.loaded."):
            del sys.modules[name]


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs code in a fresh interpreter and gives what it prints; fails where it fails."""

    def run(code: str, *, env: Mapping[str, str] | None = None, flags: tuple[str, ...] = ()) -> str:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("KERNEL_LOADER_")}
        done = subprocess.run(
            [sys.executable, *flags, "-c", code],
            env=environ | dict(env or {}),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def unprivileged() -> Callable[[], AbstractContextManager[None]]:
    """Takes root's rights away for a while, so that permissions count; pair it with `open_path`."""

    @contextmanager
    def drop() -> Iterator[None]:
        if not hasattr(os, "geteuid"):
            pytest.skip("no user ids here")
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(user)

    return drop


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A temporary directory that every user may enter, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Without this, 2.x asks for /api/agent-harnesses once a process.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        # Read at import. Most functions take the endpoint of their HfApi; 1.x asks this one for an organisation.
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        # Connections of the client's session lead to the Hub of an earlier test.
        close_session()
        yield hub
        close_session()
