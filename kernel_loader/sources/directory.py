"""Builds in directories of this machine: kernels that ship with the package, and a developer's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from kernel_loader.digest import size_of, verify
from kernel_loader.errors import IntegrityError, SourceError, VariantError
from kernel_loader.metadata import FILE_NAME, MAX_BYTES, Metadata
from kernel_loader.resources import data_directory
from kernel_loader.sources.protocol import Fetched, Listing, Request
from kernel_loader.variant import NOARCH, Variant, is_variant

EMBEDDED: Final = "embedded"


class LocalDirectories:
    """Repository id -> a directory that stands for it.

    The directory is a repository (with `build/` in it), a directory of builds, or a single build.
    """

    is_local = True

    def __init__(self, directories: Mapping[str, Path], kind: str = "local") -> None:
        # Late imports look for the directory again, wherever the process has gone meanwhile.
        self.directories: Final = {repo: path.absolute() for repo, path in directories.items()}
        self.kind: Final = kind

    def listing(self, request: Request) -> Listing | None:
        """The builds in the directory, whatever version is asked for: the directory stands for all of them."""
        root = self.directories.get(request.repo)
        if root is None:
            return None
        return Listing(repo=request.repo, revision=None, names=tuple(sorted(self._builds(root))))

    def versions(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002 - a directory is one version
        """No versions: a directory stands for whichever is asked for."""
        return ()

    def metadata(self, listing: Listing, name: str) -> Metadata:
        """Read metadata.json of a build. A build without one says nothing of itself."""
        file = self._directory(listing, name) / FILE_NAME
        if file.exists() and not file.is_file():
            raise self._failed(file, "it is no regular file")
        try:
            with file.open("rb") as stream:
                text = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return Metadata()
        except OSError as error:
            raise self._failed(file, str(error)) from error
        return Metadata.parse(text, str(file))

    def fetch(self, listing: Listing, name: str) -> Fetched:
        """The build where it lies, verified."""
        directory, metadata = self._directory(listing, name), self.metadata(listing, name)
        if self.kind == EMBEDDED and metadata.digest is None:
            raise IntegrityError(str(directory), (f"{FILE_NAME} lists no digests",), "Install the package again.")
        return Fetched(path=directory, digest=verify(directory, metadata))

    def measure(self, listing: Listing, name: str) -> tuple[Fetched | None, int]:
        """The build, and the bytes of its files."""
        fetched = self.fetch(listing, name)
        return fetched, size_of(fetched.path)

    def hold(self, fetched: Fetched) -> None:
        """Do nothing: what lies in the directories is the user's."""

    def _directory(self, listing: Listing, name: str) -> Path:
        directory = self._builds(self.directories[listing.repo]).get(name)
        if directory is None:
            raise self._failed(self.directories[listing.repo], f"the build {name} is gone")
        return directory

    def _builds(self, root: Path) -> dict[str, Path]:
        try:
            if (root / FILE_NAME).is_file() or (root / "__init__.py").is_file():
                return {self._name_of(root): root}
            home = root / "build" if (root / "build").is_dir() else root
            builds = {entry.name: entry for entry in home.iterdir() if entry.is_dir() and entry.name[0] != "."}
        except OSError as error:
            raise self._failed(root, error.strerror or str(error)) from error
        if not any(is_variant(name) for name in builds):
            raise self._failed(root, f"there are no builds in it (build/<variant>/){_not_understood(builds)}")
        return builds

    def _name_of(self, build: Path) -> str:
        """The variant of a single build. In a directory of another name, its metadata says which backend it is for."""
        name = build.resolve().name
        if is_variant(name):
            return name
        file = build / FILE_NAME
        if any(build.rglob("*.so")) or any(build.rglob("*.pyd")):
            raise self._failed(build, "it holds compiled code, and its name is no build variant that says for what")
        backend = Metadata.parse(file.read_bytes(), str(file)).backend if file.is_file() else None
        noarch = "npu" if backend == "cann" else backend
        return f"torch-{noarch if noarch in NOARCH else 'universal'}"

    def _failed(self, path: Path, detail: str) -> SourceError:
        advice = "Correct the directory in KERNEL_LOADER_LOCAL or LOCAL_KERNELS."
        return SourceError(str(path), detail, advice)


def _not_understood(names: Iterable[str]) -> str:
    """What keeps the first directory from being a build, whose name may be misspelt; empty where there is none."""
    for name in sorted(names):
        try:
            Variant.parse(name)
        except VariantError as error:
            return f"; {name} is no build variant: {error.detail}"
    return ""


def embedded() -> LocalDirectories:
    """The kernels that ship with the package: registry/<name>/build/<variant>/."""
    root = data_directory("registry")
    repositories = {entry.name: entry for entry in root.iterdir() if entry.is_dir()} if root.is_dir() else {}
    return LocalDirectories(repositories, EMBEDDED)
