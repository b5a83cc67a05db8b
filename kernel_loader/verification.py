"""Whether bytes are whole: of the embedded kernels, the store, packages, lock files and bundles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from kernel_loader.carry.archive import SUFFIX, verify_archive
from kernel_loader.digest import content_digest, is_sealed, measure, size_of
from kernel_loader.errors import IntegrityError, KernelLoaderError
from kernel_loader.lock import Lock
from kernel_loader.resources import installed_builds
from kernel_loader.settings import Settings
from kernel_loader.sources import Listing, LocalDirectories, Request, embedded
from kernel_loader.store import NAME_DIGITS, Store, Stored

_T = TypeVar("_T")


class Checked(NamedTuple):
    """Builds of one place, hashed anew.

    Attributes:
        what: the place.
        builds: how many were looked at, and `size` the bytes of those that are whole.
        violations: a line for everything that is not as it was published.
        note: what else is to be known.
    """

    what: str
    builds: int
    size: int
    violations: tuple[str, ...] = ()
    note: str = ""


def check_installation(settings: Settings) -> Iterator[Checked]:
    """The embedded kernels, every directory of the store, the lock in force, and installed packages of builds."""
    yield check_embedded()
    packages = installed_builds()
    store = Store(settings.cache, (*settings.shared, *packages))
    yield from (check_store(store, home, "package" if home in packages else "store") for home in store.directories)
    if settings.lock is not None:
        yield check_lock(settings.lock, store)


def check_file(file: Path, store: Store) -> Checked:
    """A bundle or a lock, told apart by content."""
    try:
        with file.open("rb") as stream:
            is_bundle = stream.read(2) == b"PK" or file.suffix == SUFFIX
    except OSError as error:
        return Checked(str(file), 0, 0, (f"it cannot be read ({error})",))
    return check_bundle(file) if is_bundle else check_lock(file, store)


def check_embedded(source: LocalDirectories | None = None) -> Checked:
    """The kernels that ship with the package: their digests are there, and are those of the files."""
    source = source if source is not None else embedded()
    tally = _Tally("embedded kernels")
    for repo in sorted(source.directories):
        listing = tally.look(repo, source.listing, Request(repo))
        for name in listing.names if listing is not None else ():
            tally.builds += 1
            tally.size += tally.look(f"{repo} {name}", _sealed_size, source, listing, name) or 0
    if not source.directories:
        tally.violations.append("there are none; install the package again")
    return tally.result()


def check_store(store: Store, home: Path, kind: str = "store") -> Checked:
    """Every build in a directory of the store; `kind` is how it is called."""
    tally = _Tally(f"{kind} {home}")
    known = set()
    for stored in tally.look("", lambda: tuple(store.builds_in(home))) or ():
        known.add(stored.path)
        tally.builds += 1
        tally.size += tally.look(f"{stored.path}", _stored_size, store, stored) or 0
    # A build may have lost its receipt, and is found all the same by who knows its digest.
    for directory in (path for path in _directories(home / "builds") if path not in known):
        tally.builds += 1
        tally.size += tally.look(f"{directory}", _named_size, directory) or 0
    return tally.result()


def check_lock(file: Path, store: Store) -> Checked:
    """A lock, and those of its builds that are in the store."""
    tally = _Tally(f"lock {file}")
    lock = tally.look("", Lock.read, str(file))
    if lock is None:
        return tally.result()
    named = {
        b.digest: (f"{r.request} {b.variant}", b.size) for r in lock.repositories for b in (r.builds or {}).values()
    }
    for digest, (name, size) in named.items():
        if tally.look(name, functools.partial(store.find, trust_receipt=False), digest) is not None:
            tally.builds += 1
            tally.size += size
    there = f"of {len(named)} that it names" if named else "; it names commits alone"
    return tally.result(
        f"{len(lock.kernels)} kernels, {len(lock.repositories)} repositories; builds in the store {there}"
    )


def check_bundle(file: Path) -> Checked:
    """Every byte of a bundle that is carried."""
    tally = _Tally(f"bundle {file}")
    bundle = tally.look("", verify_archive, file)
    if bundle is not None:
        tally.builds, tally.size = len(bundle.files), bundle.size
    return tally.result()


class _Tally:
    """What is being checked."""

    def __init__(self, what: str) -> None:
        self.what: Final = what
        self.builds, self.size = 0, 0
        self.violations: Final[list[str]] = []

    def look(self, name: str, look: Callable[..., _T], *given: Any) -> _T | None:  # noqa: ANN401 - what `look` takes
        """What a look at a build gives; None, and a violation, where it is not whole."""
        try:
            return look(*given)
        except IntegrityError as error:
            self.violations.extend(f"{name or error.build}: {violation}" for violation in error.violations)
        except (KernelLoaderError, OSError) as error:
            problem = error.problem if isinstance(error, KernelLoaderError) else f"it cannot be read ({error})"
            self.violations.append(f"{name}: {problem}" if name else problem)
        return None

    def result(self, note: str = "") -> Checked:
        return Checked(self.what, self.builds, self.size, tuple(self.violations), note)


def _directories(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:  # what is not there holds nothing; what cannot be read is told of where receipts are
        return []


def _sealed_size(source: LocalDirectories, listing: Listing, name: str) -> int:
    fetched, size = source.measure(listing, name)
    assert fetched is not None, "a directory has what it lists"
    if not is_sealed(fetched.path):
        raise IntegrityError(str(fetched.path), ("metadata.json is not as it was sealed",))
    return size


def _stored_size(store: Store, stored: Stored) -> int:
    store.verify(stored)
    return stored.size


def _named_size(directory: Path) -> int:
    if content_digest(measure(directory, "sha256"))[:NAME_DIGITS] != directory.name:
        raise IntegrityError(str(directory), ("its content is not what its name says",))
    return size_of(directory)
