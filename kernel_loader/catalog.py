"""The catalog: which named kernels there are, and where their manifests lie."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from kernel_loader.errors import ManifestError, SettingsError, UnknownKernel
from kernel_loader.manifest import Manifest, normalise
from kernel_loader.resources import data_directory
from kernel_loader.rules import Advisory
from kernel_loader.settings import PREFIX, Settings

ENTRY_POINTS: Final = "kernel_loader.manifests"
BUNDLE_ATTRIBUTE: Final = "__kernel__"

# In manifests/, and no kernels.
_ADVISORIES: Final = "advisories"
_OTHER_FILES: Final = frozenset({"layers", _ADVISORIES})


class Catalog:
    """Manifests by name.

    A directory of the user's (`KERNEL_LOADER_MANIFESTS`) comes first, so that it can replace what ships; then the
    manifests of this package; then those that installed packages offer under the entry point group
    `kernel_loader.manifests` (the name of a package whose directory holds TOML files), which can add names but not
    take over one.

    Raises:
        SettingsError: a directory of the settings is not there.
    """

    def __init__(self, settings: Settings) -> None:
        for directory in settings.manifests:
            if not os.access(directory, os.R_OK | os.X_OK) or not directory.is_dir():
                raise SettingsError(f"{PREFIX}MANIFESTS", str(directory), "directories that are there and can be read")
        self._own: Final = (*settings.manifests, data_directory("manifests"))
        self._advisories: Final[dict[str, tuple[Advisory, ...]]] = {}

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted({normalise(file.stem) for directory in self._directories() for file in _files(directory)}))

    def get(self, kernel: str | type) -> Manifest:
        """The manifest of a registered name or of a bundle class.

        Raises:
            UnknownKernel: no manifest has that name.
            ManifestError: the manifest cannot be used, or a class does not say which kernel it is for.
        """
        if isinstance(kernel, type):
            return self._of_class(kernel)
        if not isinstance(kernel, str):
            raise UnknownKernel(repr(kernel))
        name = normalise(kernel)
        for file in (file for directory in self._directories() for file in _files(directory)):
            if normalise(file.stem) == name:
                return _read(file)
        raise UnknownKernel(kernel, tuple(difflib.get_close_matches(name, self.names(), n=3)))

    def advisories(self, repo: str) -> tuple[Advisory, ...]:
        """What is publicly known of a repository, by the user's `advisories.toml` and by that of this package.

        Raises:
            ManifestError: a file cannot be read.
        """
        if repo not in self._advisories:
            # Most kernels are not spoken of, and parsing would be a good part of their load.
            spoken_of = any(repo in text for _, text in self._advisory_files)
            self._advisories[repo] = _about(repo, self._advisory_files) if spoken_of else ()
        return self._advisories[repo]

    @functools.cached_property
    def _advisory_files(self) -> tuple[tuple[str, str], ...]:
        files = (directory / f"{_ADVISORIES}.toml" for directory in self._own)
        return tuple((str(file), _text(file)) for file in files if file.is_file())

    def _of_class(self, cls: type) -> Manifest:
        where = f"{cls.__module__}:{cls.__qualname__}"
        about = getattr(cls, BUNDLE_ATTRIBUTE, None)
        if isinstance(about, str):
            return self.get(about)
        if isinstance(about, dict):
            return Manifest.from_table(about, where)
        detail = "a bundle class says which kernel it is for: a registered name, or the keys of a manifest"
        raise ManifestError(where, BUNDLE_ATTRIBUTE, detail)

    def _directories(self) -> Iterator[Path]:
        yield from self._own
        for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: (e.name, e.value)):
            yield from _package_directories(entry.value)


def _package_directories(package: str) -> Iterator[Path]:
    # find_spec runs the parents of a dotted name, but not a package at the top.
    top, *below = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # an entry point that leads nowhere takes no other names with it
    for location in (spec.submodule_search_locations if spec else None) or ():
        yield Path(location, *below)


def _files(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        for file in sorted(directory.glob("*.toml")):
            if file.is_file() and normalise(file.stem).isidentifier() and file.stem not in _OTHER_FILES:
                yield file


def _about(repo: str, files: Iterable[tuple[str, str]]) -> tuple[Advisory, ...]:
    from kernel_loader.advisories import about

    return about(repo, files)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(str(file), "", f"it cannot be read ({error})") from error


def _read(file: Path) -> Manifest:
    manifest = Manifest.parse(_text(file), str(file))
    if manifest.name != normalise(file.stem):
        raise ManifestError(str(file), "name", f"{manifest.name!r} is not the file's name")
    return manifest
