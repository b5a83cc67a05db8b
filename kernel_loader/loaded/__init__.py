"""The importable home of loaded builds, and the record of what lives in it.

A build is imported as `kernel_loader.loaded.<name>_<digest12>`. An object of such a module can be pickled: a process
that reads it imports the module by that name, and the build with that digest is looked up in the store, the embedded
registry and the directories of `KERNEL_LOADER_LOCAL`, and verified, before it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

from kernel_loader.errors import KernelLoaderError
from kernel_loader.importer import FINDER, HOME, module_name, package_directory
from kernel_loader.metadata import FILE_NAME, Metadata
from kernel_loader.provenance import Origin
from kernel_loader.resources import installed_builds
from kernel_loader.settings import Settings
from kernel_loader.sources import Fetched, Listing, LocalDirectories, Request, embedded
from kernel_loader.store import Store
from kernel_loader.variant import REFERENCE

_CHILD: Final = rf"{re.escape(HOME)}\.(?P<stem>[0-9a-z_]+)_(?P<digest>[0-9a-f]{{12}})"


class Ledger:
    """The origin of every module and bundle that was loaded in this process."""

    def __init__(self) -> None:
        self._bundles: dict[int, tuple[object, Origin]] = {}
        self._modules: dict[str, Origin] = {}

    def record_module(self, name: str, origin: Origin) -> None:
        """Remember where the module of that name is from."""
        self._modules[name] = origin

    def record_bundle(self, bundle: object, origin: Origin) -> None:
        """Remember where a bundle is from. It is kept alive, so that its id stays its own."""
        self._bundles[id(bundle)] = (bundle, origin)

    def find(self, loaded: object) -> Origin | None:
        """Where a bundle or a module is from; None when it was not loaded here.

        A bundle that came from another process is known by the module of its entrypoints.
        """
        if id(loaded) in self._bundles:
            return self._bundles[id(loaded)][1]
        parts = (
            [loaded] if isinstance(loaded, ModuleType) else list(vars(loaded).values()) if _is_bundle(loaded) else []
        )
        names = (getattr(part, "__module__", getattr(part, "__name__", "")) or "" for part in parts)
        return next((self._modules[root] for name in names if (root := _root(str(name))) in self._modules), None)

    def modules(self) -> tuple[Origin, ...]:
        """The origins of all modules that are loaded, in the order of loading."""
        return tuple(origin for name, origin in list(self._modules.items()) if name in sys.modules)


def _is_bundle(value: object) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "__dict__")


def _root(module: str) -> str:
    return ".".join(module.split(".")[: HOME.count(".") + 2])


LEDGER: Final = Ledger()


class Locator:
    """Finds a build that another process loaded, by the name of its module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The hook of `sys.meta_path`, asked when no build was added under that name."""
        match = re.fullmatch(_CHILD, fullname)
        if match is None:
            return None
        for metadata, origin in _builds(fullname, match["digest"]):
            if origin.digest.startswith(match["digest"]):
                FINDER.add(fullname, package_directory(origin.path, metadata))
                LEDGER.record_module(fullname, origin)
                return FINDER.find_spec(fullname, path, target)
        message = (
            f"No build with digest {match['digest']} is in the store, the embedded registry or KERNEL_LOADER_LOCAL of "
            "this process. Give it the environment of the process that loaded the kernel."
        )
        raise ModuleNotFoundError(message, name=fullname)


def _builds(fullname: str, digits: str) -> Iterator[tuple[Metadata, Origin]]:
    """Verified builds that may be the one of a module's name."""
    settings = Settings.from_env()
    store = Store(settings.cache, (*settings.shared, *installed_builds()))
    for stored in store.all():
        if stored.digest.startswith(digits) and (directory := store.find(stored.digest)) is not None:
            file = directory / FILE_NAME
            metadata = Metadata.parse(file.read_bytes()) if file.is_file() else Metadata()
            for origin in stored.sources[-1:]:
                listing = Listing(repo=origin.repo, revision=origin.revision, names=(), commit=origin.commit)
                fetched = Fetched(path=directory, digest=stored.digest)
                yield metadata, _origin("hub", listing, origin.variant, metadata, fetched)
    for source in (embedded(), LocalDirectories(settings.local)):
        for listing, name in _listed(source):
            # A build that is damaged, or gone, does not hide the one that is looked for.
            with contextlib.suppress(KernelLoaderError):
                metadata = source.metadata(listing, name)
                if module_name(listing.repo, metadata, digits) == fullname:
                    fetched = source.fetch(listing, name)
                    yield metadata, _origin(source.kind, listing, name, metadata, fetched)


def _origin(kind: str, listing: Listing, variant: str, metadata: Metadata, fetched: Fetched) -> Origin:
    return Origin(
        kernel=(metadata.name or listing.repo.rpartition("/")[2]).replace("-", "_"),
        source=kind,
        repo=listing.repo,
        revision=listing.revision,
        commit=listing.commit,
        variant=variant,
        digest=fetched.digest,
        path=fetched.path,
        reference=kind == "embedded" and variant == REFERENCE,
        why="another process loaded it, and sent an object of it",
    )


def _listed(source: LocalDirectories) -> Iterator[tuple[Listing, str]]:
    for repo in source.directories:
        with contextlib.suppress(KernelLoaderError):
            listing = source.listing(Request(repo=repo))
            if listing is not None:
                yield from ((listing, name) for name in listing.names)


# First in line: Python's own finder would look inside a build in its own way, and write bytecode there.
sys.meta_path[:0] = [FINDER, Locator()]
