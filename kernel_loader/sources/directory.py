"""Builds in directories of this machine: kernels that ship with the package, and a developer's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_loader.errors import SourceError, VariantError
from kernel_loader.metadata import FILE_NAME, MAX_BYTES, Metadata
from kernel_loader.resources import data_directory
from kernel_loader.sources.protocol import Listing, Request
from kernel_loader.variant import NOARCH, Variant


@dataclass(frozen=True, slots=True)
class LocalDirectories:
    """Repository id -> a directory that stands for it.

    The directory is a repository (with `build/` in it), a directory of builds, or a single build.
    """

    directories: Mapping[str, Path]
    kind: str = "local"
    is_local: bool = True

    def listing(self, request: Request) -> Listing | None:
        """The builds in the directory, whatever version is asked for: the directory stands for all of them."""
        root = self.directories.get(request.repo)
        if root is None:
            return None
        return Listing(repo=request.repo, revision=None, names=tuple(sorted(self._builds(root))))

    def metadata(self, listing: Listing, name: str) -> Metadata:
        """Read metadata.json of a build. A build without one says nothing of itself."""
        file = self.fetch(listing, name) / FILE_NAME
        try:
            with file.open("rb") as stream:
                text = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return Metadata()
        except OSError as error:
            raise self._failed(file, str(error)) from error
        return Metadata.parse(text, str(file))

    def fetch(self, listing: Listing, name: str) -> Path:
        """The directory of a build. Nothing has to be brought."""
        directory = self._builds(self.directories[listing.repo]).get(name)
        if directory is None:
            raise self._failed(self.directories[listing.repo], f"the build {name} is gone")
        return directory

    def _builds(self, root: Path) -> dict[str, Path]:
        try:
            if (root / FILE_NAME).is_file() or (root / "__init__.py").is_file():
                return {self._name_of(root): root}
            home = root / "build" if (root / "build").is_dir() else root
            return {entry.name: entry for entry in home.iterdir() if entry.is_dir() and entry.name[0] != "."}
        except OSError as error:
            raise self._failed(root, str(error)) from error

    def _name_of(self, build: Path) -> str:
        """The variant of a single build. In a directory of another name, its metadata says which backend it is for."""
        try:
            return str(Variant.parse(build.resolve().name))
        except VariantError:
            file = build / FILE_NAME
            backend = Metadata.parse(file.read_bytes(), str(file)).backend if file.is_file() else None
            return f"torch-{backend if backend in NOARCH else 'universal'}"

    def _failed(self, path: Path, detail: str) -> SourceError:
        advice = "Correct the directory (KERNEL_LOADER_LOCAL or LOCAL_KERNELS where you set one), or install again."
        return SourceError(str(path), detail, advice)


def embedded() -> LocalDirectories:
    """The kernels that ship with the package: registry/<name>/build/<variant>/."""
    root = data_directory("registry")
    repositories = {entry.name: entry for entry in root.iterdir() if entry.is_dir()} if root.is_dir() else {}
    return LocalDirectories(repositories, "embedded")
