"""The store: builds on disk, one directory for each content.

::

    <root>/builds/<first 32 digits of the digest>/    the files of a build as they were published
    <root>/receipts/<the same>.json                   what they hashed to, and how each looked then: size, time, inode
    <root>/staging/<host>-<process>-<random>/         where a build is written before it has its name
    <root>/locks/                                     so that processes do not fetch the same thing twice

Behind the root there may be shared directories of the same layout, which others fill: they are read, and never written.
Where a receipt there does not hold for this machine, the root keeps one that does, `<the same>.<directory>.json`.

A build gets its name by one rename, when all of it is written and durable: a crash at any instant leaves nothing of it,
or all. Reading writes nothing, so that a complete store works read-only. Correctness rests on no lock.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from kernel_loader.digest import content_digest, differences
from kernel_loader.errors import BundleError, IntegrityError, StoreError
from kernel_loader.files import hash_file, replace_file, sync
from kernel_loader.resources import INSTALLED

logger = logging.getLogger("kernel_loader")

SCHEMA: Final = 1

# Digits of a digest in the name of its directory: enough that no two contents meet, short enough for Windows' paths.
NAME_DIGITS: Final = 32

# Seconds to wait for another process that fetches the same build. Beyond, it is fetched twice.
LOCK_SECONDS: Final = 600.0

# Seconds after which a staging directory of another machine counts as left behind.
STALE_SECONDS: Final = 24 * 3600.0

# What a receipt says of a file, beside its hash.
_LOOKS: Final = ("size", "mtime_ns", "inode")

_INSTALL: Final = (
    "Install the package that brought it again. Where the Hub may be asked, a load fetches a copy of its own."
)
_AGAIN: Final = "Fetch it anew (`kernel-loader prefetch`), or import the bundle that brought it again."
_SHARED: Final = (
    "Tell whoever fills that store to remove the directory and to prefetch the kernel again. Where the Hub may be "
    "asked, a load fetches a copy of its own."
)


class Source(NamedTuple):
    """Where a stored build was published."""

    repo: str
    revision: str
    commit: str
    variant: str


class Stored(NamedTuple):
    """A build in the store: its directory, digest, where it is from, and its bytes."""

    path: Path
    digest: str
    sources: tuple[Source, ...]
    size: int

    @property
    def last_use(self) -> float:
        """When a file of it was last read, in seconds of the epoch.

        Reading writes nothing here, so that it is what the file system remembers, often no finer than a day.
        """
        return _last_use(self.path)

    @property
    def home(self) -> Path:
        """The directory of the store that has it."""
        return self.path.parents[1]


class Store:
    """Builds by the digest of their content.

    Methods raise `StoreError` when the disk is full, cannot be written, or cannot be read.

    Args:
        root: the directory that is read first, and alone is written.
        shared: directories that are read after it, in their order. One that is not there holds nothing.
        lock_seconds: how long to wait for another process that fetches the same build.
    """

    def __init__(self, root: Path, shared: Iterable[Path] = (), lock_seconds: float = LOCK_SECONDS) -> None:
        self.root: Final = root
        self.directories: Final = (root, *shared)
        self._lock_seconds: Final = lock_seconds

    # --- reading --------------------------------------------------------------------------------------------------

    def find(self, digest: str, *, trust_receipt: bool = True, repair: bool = False) -> Path | None:
        """The directory of a build, verified: that of the first directory that has it. None when it is not here.

        Files that look as they did when they were hashed are not read again, unless the receipt is not to be trusted.

        Args:
            digest: the digest of its content.
            trust_receipt: whether a receipt may stand for hashing.
            repair: remove a damaged build of the root, and pass over that of a shared directory.

        Raises:
            IntegrityError: a file is missing, extra, or of other content.
        """
        for home in self.directories:
            try:
                if (directory := self._find_in(home, digest, trust_receipt=trust_receipt)) is not None:
                    return directory
            except IntegrityError:
                if not repair:
                    raise
                if home == self.root:
                    self.remove(digest, in_use=True)
        return None

    def verify(self, stored: Stored) -> None:
        """Hash all files of a build, in whichever of the directories it is.

        Raises:
            IntegrityError: a file is missing, extra, or of other content.
        """
        self._find_in(stored.home, stored.digest, trust_receipt=False)

    def all(self) -> tuple[Stored, ...]:
        """Every build that has a receipt, by directory and digest."""
        found: list[Stored] = []
        for home in self.directories:
            with contextlib.suppress(BundleError):  # of a damaged package, which `verify` tells of
                found += self.builds_in(home)
        return tuple(found)

    def builds_in(self, home: Path) -> Iterator[Stored]:
        """The builds of one of the directories that have a receipt there, by digest; all of an installed package."""
        if home.parent.name == INSTALLED:
            yield from _in_package(home)
        for file in _json_files(home / "receipts"):
            directory = home / "builds" / file.stem
            if _is_there(directory) and (receipt := _read_receipt(file)) is not None:
                sources = tuple(Source(**source) for source in receipt["sources"])
                size = sum(entry["size"] for entry in receipt["files"].values())
                yield Stored(directory, receipt["digest"], sources, size)

    def _find_in(self, home: Path, digest: str, *, trust_receipt: bool) -> Path | None:
        directory, identity = _build(home, digest), None
        try:
            if (identity := _identity(directory)) is None:
                return None
            self._verify(home, digest, trust_receipt=trust_receipt)
        except OSError as error:
            if identity is not None and _is_replaced(directory, identity):  # by whoever fills a shared directory
                return self._find_in(home, digest, trust_receipt=trust_receipt)
            if isinstance(error, IntegrityError):
                advice = _AGAIN if home == self.root else _SHARED if home.parent.name != INSTALLED else _INSTALL
                raise IntegrityError(str(directory), error.violations, advice) from None
            raise _unreadable(directory, error) from error
        return directory

    def _verify(self, home: Path, digest: str, *, trust_receipt: bool) -> None:
        directory = _build(home, digest)
        there = dict(_walk(directory))
        known: list[Mapping[str, Any]] = []
        sources: list[dict[str, str]] = []
        for place in (places := self._receipts_of(home, digest)):
            receipt = _read_receipt(place)
            if receipt is not None and receipt["digest"] == digest:
                if trust_receipt and _holds(receipt["files"], there):
                    return
                known.append(receipt["files"])
                sources = receipt["sources"]
        hashes = {
            path: _known_hash(known if trust_receipt else (), path, status) or hash_file(directory / path)
            for path, status in there.items()
        }
        if content_digest(hashes) != digest:
            expected = {path: entry["sha256"] for path, entry in known[0].items()} if known else _promised(home, digest)
            found = differences(hashes, expected) or ("its content is not what its name says",)
            raise IntegrityError(str(directory), found)
        if (files := _files(hashes, there)) not in known:
            # Files were copied or touched and are right all the same. Where nothing can be written, each load hashes.
            with contextlib.suppress(StoreError):
                self._write_receipt(places[-1], digest, files, sources)

    def _receipts_of(self, home: Path, digest: str) -> tuple[Path, ...]:
        """Where it is written how a build looks; the last one may be written anew."""
        own = _receipt(home, digest)
        if home == self.root:
            return (own,)
        name = f"{own.stem}.{hashlib.sha256(os.fsencode(home)).hexdigest()[:8]}.json"
        return own, self.root / "receipts" / name

    # --- writing --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private directory on the store's file system. What is in it at the end is removed."""
        self._sweep()
        with self._writing():
            self._staging.mkdir(parents=True, exist_ok=True)
            directory = self._staging / f"{socket.gethostname()}-{os.getpid()}-{os.urandom(8).hex()}"
            directory.mkdir(mode=0o700)
        try:
            with self._writing():
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def publish(self, staged: Path, hashes: Mapping[str, str], source: Source) -> tuple[Path, str]:
        """Give a staged build its name: all of it is made durable first, then renamed once.

        Args:
            staged: the build, in a directory of `staging`.
            hashes: path -> base64 of the sha256 of what was written there.
            source: where it was published.

        Returns:
            Its directory and its digest. When another process was faster, the directory is that of the other, which
            has the same content.
        """
        digest = content_digest(hashes)
        target = _build(self.root, digest)
        with self._writing():
            target.parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(16) as pool:  # a disk makes many files durable at once about as fast as one
                list(pool.map(sync, [staged / path for path in hashes]))
            for directory in [staged, *(d for d in staged.rglob("*") if d.is_dir())]:
                sync(directory)
            staged.chmod(0o755)
            try:
                staged.rename(target)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) and not target.is_dir():
                    raise
            sync(target.parent)
            place = _receipt(self.root, digest)
            sources = (_read_receipt(place) or {"sources": []})["sources"]
            self._write_receipt(place, digest, _files(hashes, dict(_walk(target))), _with_source(sources, source))
        return target, digest

    def add_source(self, digest: str, source: Source) -> None:
        """Remember that a build of the root was published in one more place. Another directory's is left as it is."""
        place = _receipt(self.root, digest)
        receipt = _read_receipt(place)
        if receipt is not None and source not in (Source(**known) for known in receipt["sources"]):
            self._write_receipt(place, digest, receipt["files"], _with_source(receipt["sources"], source))

    def remove(self, digest: str, *, in_use: bool = False) -> bool:
        """Remove a build of the root, unless a live process on this machine has it loaded. Returns whether it is gone.

        `in_use` removes it even then: a damaged build serves nobody.
        """
        with self._writing():
            if not in_use and not self._unused(digest):
                return False
            directory = _build(self.root, digest)
            # Renamed first: a reader sees all of a build or none.
            with self.staging() as staging:
                if directory.is_dir():
                    directory.rename(staging / "removed")
                _receipt(self.root, digest).unlink(missing_ok=True)
        return True

    # --- leases: a build that a process has loaded is not removed under it -----------------------------------------

    @staticmethod
    def lease(directory: Path) -> int | None:
        """Hold a build for the life of this process: a shared lock on its directory, which writes nothing.

        Returns the file descriptor that holds it; None where the system, or the file system, has no such locks.
        """
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return descriptor
        return None

    def _unused(self, digest: str) -> bool:
        with contextlib.suppress(ImportError, FileNotFoundError):
            import fcntl

            descriptor = os.open(_build(self.root, digest), os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
            finally:
                os.close(descriptor)
        return True

    # --- one process fetches, the others wait ------------------------------------------------------------------------

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Keep other processes from fetching the same thing. Gives up waiting after a deadline, and says for whom.

        A lock that cannot be had, or that lies (some network file systems), costs a second download and nothing else.
        """
        from filelock import FileLock, Timeout

        name = hashlib.sha256(key.encode()).hexdigest()[:NAME_DIGITS]
        with self._writing():
            self._locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._locks / f"{name}.lock")
        owner = self._locks / f"{name}.owner"
        try:
            lock.acquire(timeout=self._lock_seconds, poll_interval=0.05)
        except Timeout:
            whose = read_json(owner) or {}
            by = f"process {whose.get('process')} on {whose.get('host')}" if whose else "another process"
            logger.warning(
                "waited %g s for %s, which is fetching %s, and fetch it as well", self._lock_seconds, by, key
            )
            yield
            return
        except (OSError, NotImplementedError) as error:
            logger.warning("%s is fetched without a lock, which cannot be had here (%s)", key, error)
            yield
            return
        try:
            with contextlib.suppress(StoreError):
                self.write(owner, {"process": os.getpid(), "host": socket.gethostname(), "what": key})
            yield
        finally:
            owner.unlink(missing_ok=True)
            lock.release()

    def write(self, file: Path, document: Mapping[str, Any]) -> None:
        """Replace a JSON file of the store: readers see the old one or the new one.

        It is not made durable. What a loss of power takes of it counts as absent, and is asked for or hashed again.
        """
        with self._writing():
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(document, indent=1, sort_keys=True).encode(), durable=False)

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _staging(self) -> Path:
        return self.root / "staging"

    @property
    def _locks(self) -> Path:
        return self.root / "locks"

    def _write_receipt(
        self, place: Path, digest: str, files: Mapping[str, Any], sources: Sequence[Mapping[str, str]]
    ) -> None:
        self.write(place, {"schema": SCHEMA, "digest": digest, "sources": sources, "files": files})

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if error.errno is None:
                raise  # an error of our own tree that passes through
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                detail, advice = "there is no space left", "Free space, or point KERNEL_LOADER_CACHE to another disk."
            elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                detail = f"it cannot be written ({error})"
                advice = "Name a directory of your own first in KERNEL_LOADER_CACHE; those behind it are read too."
            else:
                detail, advice = str(error), "Check the disk, or point KERNEL_LOADER_CACHE to another."
            raise StoreError(str(self.root), detail, advice) from error

    def _sweep(self) -> None:
        """Remove what crashed processes left in staging."""
        with contextlib.suppress(OSError):
            for directory in list(self._staging.iterdir()) if self._staging.is_dir() else []:
                if _is_left_behind(directory):
                    shutil.rmtree(directory, ignore_errors=True)


def _promised(home: Path, digest: str) -> dict[str, str]:
    """What an installed package says that the files of a build hash to; nothing of other directories."""
    from kernel_loader.carry.contents import installed

    with contextlib.suppress(BundleError):
        package = installed(home)
        files = package.files.get(digest, ()) if package is not None else ()
        return {file.path: base64.b64encode(bytes.fromhex(file.sha256)).decode() for file in files}
    return {}


def _in_package(home: Path) -> Iterator[Stored]:
    from kernel_loader.carry.contents import installed

    package = installed(home)
    if package is None:
        return
    for digest, files in sorted(package.files.items()):
        directory = _build(home, digest)
        sources = tuple(
            Source(one.repo, one.revision, one.commit, variant)
            for one in package.repositories
            for variant, published in one.builds.items()
            if published == digest
        )
        yield Stored(directory, digest, sources, sum(file.size for file in files))


def _build(home: Path, digest: str) -> Path:
    return home / "builds" / digest[:NAME_DIGITS]


def _receipt(home: Path, digest: str) -> Path:
    return home / "receipts" / f"{digest[:NAME_DIGITS]}.json"


def _json_files(directory: Path) -> list[Path]:
    try:
        return sorted(file for file in directory.iterdir() if file.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: OSError) -> StoreError:
    advice = "Check its permissions, and that its file system is mounted."
    return StoreError(str(directory), f"it cannot be read ({error})", advice)


def _is_there(directory: Path) -> bool:
    try:
        return _identity(directory) is not None
    except OSError as error:
        raise _unreadable(directory, error) from error


def _identity(directory: Path) -> tuple[int, int] | None:
    """What tells a directory from another that takes its name; None where there is none."""
    try:
        status = directory.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (status.st_ino, status.st_ctime_ns) if stat.S_ISDIR(status.st_mode) else None


def _is_replaced(directory: Path, identity: tuple[int, int]) -> bool:
    try:
        return _identity(directory) != identity
    except OSError:
        return False


def _is_left_behind(directory: Path) -> bool:
    host, _, rest = directory.name.rpartition("-")[0].rpartition("-")
    if host == socket.gethostname() and rest.isdecimal() and sys.platform != "win32":
        return not _is_alive(int(rest))
    with contextlib.suppress(OSError):
        return time.time() - directory.stat().st_mtime > STALE_SECONDS
    return False


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is another user's
    return True


def _with_source(sources: list[dict[str, str]], source: Source) -> list[dict[str, str]]:
    new = source._asdict()
    return [old for old in sources if old != new] + [new]


def _looks(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def _files(hashes: Mapping[str, str], there: Mapping[str, os.stat_result]) -> dict[str, Any]:
    """What a receipt says of files."""
    return {path: {"sha256": hashes[path]} | dict(zip(_LOOKS, _looks(there[path]), strict=True)) for path in hashes}


def _is_as(entry: Mapping[str, Any], status: os.stat_result) -> bool:
    return _looks(status) == tuple(map(entry.get, _LOOKS))


def _holds(files: Mapping[str, Any], there: Mapping[str, os.stat_result]) -> bool:
    """Whether all files look as a receipt says."""
    return files.keys() == there.keys() and all(_is_as(files[path], status) for path, status in there.items())


def _known_hash(receipts: Sequence[Mapping[str, Any]], path: str, status: os.stat_result) -> str | None:
    found = (files[path] for files in receipts if path in files and _is_as(files[path], status))
    return next((entry["sha256"] for entry in found), None)


def _last_use(directory: Path) -> float:
    latest = 0.0
    with contextlib.suppress(OSError):  # damaged, or removed meanwhile
        for _, status in _walk(directory):
            latest = max(latest, status.st_atime)
    return latest


def _walk(directory: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Path and status of every file. A link, or anything that is no file, is an error: nothing outside is read."""
    with os.scandir(directory) as entries:
        for entry in entries:
            path = f"{prefix}{entry.name}"
            if entry.is_file(follow_symlinks=False):
                yield path, entry.stat(follow_symlinks=False)
            elif entry.is_dir(follow_symlinks=False):
                if entry.name != "__pycache__":
                    yield from _walk(Path(entry.path), f"{path}/")
            else:
                raise IntegrityError(str(directory), (f"{path} is no regular file",))


def is_digest(value: object) -> bool:
    """Whether a value names content: it is part of a path."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def read_json(file: Path) -> dict[str, Any] | None:
    """A file of the store; None when it is not there, half-written by something else, or of another schema."""
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("schema", SCHEMA) == SCHEMA else None


def _read_receipt(file: Path) -> dict[str, Any] | None:
    """A receipt, unless it says something else than a receipt does."""
    document = read_json(file) or {}
    sources, files = document.get("sources"), document.get("files")
    is_receipt = (
        is_digest(document.get("digest"))
        and isinstance(sources, list)
        and all(isinstance(source, dict) and source.keys() == set(Source._fields) for source in sources)
        and isinstance(files, dict)
        and all(
            isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("size"), int)
            for entry in files.values()
        )
    )
    return document if is_receipt else None
