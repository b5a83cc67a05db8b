"""The importable home of loaded builds, and the record of what lives in it.

A build is imported as `kernel_loader.loaded.<name>_<digest12>`. An object of such a module can be pickled: a process
that reads it imports the module by that name, and the build with that digest is looked up in the embedded registry and
in the directories of `KERNEL_LOADER_LOCAL`, and verified, before it runs.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from kernel_loader.digest import verify
from kernel_loader.errors import KernelLoaderError
from kernel_loader.importer import FINDER, HOME, module_name, package_directory
from kernel_loader.provenance import Origin
from kernel_loader.settings import Settings
from kernel_loader.sources import Listing, LocalDirectories, Request, embedded

_CHILD: Final = re.compile(rf"{re.escape(HOME)}\.(?P<stem>[0-9a-z_]+)_(?P<digest>[0-9a-f]{{12}})")


class Ledger:
    """Every module and bundle that was loaded in this process, and its origin."""

    def __init__(self) -> None:
        self._origins: dict[int, tuple[object, Origin]] = {}
        self._lock = threading.Lock()

    def record(self, loaded: object, origin: Origin) -> None:
        """Remember where an object is from. The object is kept alive, so that its id stays its own."""
        with self._lock:
            self._origins[id(loaded)] = (loaded, origin)

    def find(self, loaded: object) -> Origin | None:
        """Where an object is from; None when it was not loaded here."""
        entry = self._origins.get(id(loaded))
        return entry[1] if entry else None

    def modules(self) -> tuple[Origin, ...]:
        """The origins of all loaded modules, in the order of loading."""
        with self._lock:
            return tuple(origin for loaded, origin in self._origins.values() if isinstance(loaded, ModuleType))


LEDGER: Final = Ledger()


class Locator:
    """Finds a build that another process loaded, by the name of its module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The hook of `sys.meta_path`, asked when no build was added under that name."""
        match = _CHILD.fullmatch(fullname)
        if match is None:
            return None
        for source, listing, name in _all_builds():
            metadata = source.metadata(listing, name)
            if module_name(listing.repo, metadata, match["digest"]) != fullname:
                continue
            directory = source.fetch(listing, name)
            digest = verify(directory, metadata)
            if digest.startswith(match["digest"]):
                FINDER.add(fullname, package_directory(directory, metadata))
                return FINDER.find_spec(fullname, path, target)
        return None


def _all_builds() -> Iterator[tuple[LocalDirectories, Listing, str]]:
    for source in (embedded(), LocalDirectories(Settings.from_env().local)):
        for repo in source.directories:
            try:
                listing = source.listing(Request(repo=repo))
            except KernelLoaderError:
                continue  # a directory that is gone does not hide the build in another
            if listing is not None:
                yield from ((source, listing, name) for name in listing.names)


# First in line: Python's own finder would look inside a build in its own way, and write bytecode there.
sys.meta_path[:0] = [FINDER, Locator()]
