"""The store: builds on disk, one directory for each content.

::

    <root>/builds/<first 32 digits of the digest>/    the files of a build as they were published
    <root>/receipts/<the same>.json                   what they hashed to, and how each looked then: size, time, inode
    <root>/staging/<host>-<process>-<random>/         where a build is written before it has its name
    <root>/locks/                                     so that processes do not fetch the same thing twice

A build gets its name by one rename, when all of it is written and durable: a crash at any instant leaves nothing of it,
or all. Reading writes nothing, so that a complete store works read-only. Correctness rests on no lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

from kernel_loader.digest import content_digest, differences
from kernel_loader.errors import IntegrityError, StoreError
from kernel_loader.files import hash_file, replace_file, sync

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

_AGAIN: Final = "Remove the directory, or run `kernel-loader cache prune`, and load again: it is then fetched anew."


class Source(NamedTuple):
    """Where a stored build was published."""

    repo: str
    revision: str
    commit: str
    variant: str


class Stored(NamedTuple):
    """A build in the store: its directory, digest, where it is from, its bytes, and when its files were last read.

    Reading writes nothing here, so that the last use is what the file system remembers: seconds of the epoch, often
    no finer than a day.
    """

    path: Path
    digest: str
    sources: tuple[Source, ...]
    size: int
    last_use: float


class Store:
    """Builds by the digest of their content.

    Methods raise `StoreError` when the disk is full, cannot be written, or cannot be read.
    """

    def __init__(self, root: Path, lock_seconds: float = LOCK_SECONDS) -> None:
        self.root: Final = root
        self._lock_seconds: Final = lock_seconds

    # --- reading --------------------------------------------------------------------------------------------------

    def find(self, digest: str, *, trust_receipt: bool = True) -> Path | None:
        """The directory of a build, verified; None when it is not here.

        Files that look as they did when they were hashed are not read again, unless the receipt is not to be trusted.

        Raises:
            IntegrityError: a file is missing, extra, or of other content.
        """
        directory = self._builds / digest[:NAME_DIGITS]
        if not directory.is_dir():
            return None
        try:
            self._verify(directory, digest, trust_receipt=trust_receipt)
        except OSError as error:
            if isinstance(error, IntegrityError):
                raise
            raise StoreError(str(directory), f"it cannot be read ({error})", "Check its permissions.") from error
        return directory

    def all(self) -> tuple[Stored, ...]:
        """Every build that has a receipt, by digest."""
        found = []
        for file in sorted(self._receipts.glob("*.json")) if self._receipts.is_dir() else []:
            receipt = _read_receipt(file)
            directory = self._builds / file.stem
            if receipt is not None and directory.is_dir():
                sources = tuple(Source(**source) for source in receipt["sources"])
                size = sum(entry["size"] for entry in receipt["files"].values())
                last_use = max((status.st_atime for _, status in _walk(directory)), default=0.0)
                found.append(Stored(directory, receipt["digest"], sources, size, last_use))
        return tuple(found)

    def _verify(self, directory: Path, digest: str, *, trust_receipt: bool) -> None:
        receipt = _read_receipt(self._receipt(digest))
        known: dict[str, Any] = receipt["files"] if receipt and receipt["digest"] == digest else {}
        there = dict(_walk(directory))
        hashes, changed = {}, not known
        for path, status in there.items():
            entry = known.get(path)
            if trust_receipt and entry is not None and _looks(status) == tuple(map(entry.get, _LOOKS)):
                hashes[path] = entry["sha256"]
            else:
                hashes[path], changed = hash_file(directory / path), True
        if hashes.keys() != known.keys() or changed:
            self._compare(directory, digest, hashes, known)
            self._refresh_receipt(digest, hashes, there, receipt)

    def _compare(self, directory: Path, digest: str, hashes: Mapping[str, str], known: Mapping[str, Any]) -> None:
        if content_digest(hashes) == digest:
            return
        expected = {path: entry["sha256"] for path, entry in known.items()}
        found = differences(hashes, expected) or ("its content is not what its name says",)
        raise IntegrityError(str(directory), found, _AGAIN)

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
        target = self._builds / digest[:NAME_DIGITS]
        with self._writing():
            self._builds.mkdir(parents=True, exist_ok=True)
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
            sync(self._builds)
            receipt = _read_receipt(self._receipt(digest)) or {"sources": []}
            receipt["sources"] = _with_source(receipt["sources"], source)
            self._write_receipt(digest, hashes, dict(_walk(target)), receipt["sources"])
        return target, digest

    def remove(self, digest: str, *, in_use: bool = False) -> bool:
        """Remove a build, unless a live process on this machine has it loaded. Returns whether it is gone.

        `in_use` removes it even then: a damaged build serves nobody.
        """
        with self._writing():
            if not in_use and not self._unused(digest):
                return False
            directory = self._builds / digest[:NAME_DIGITS]
            # Renamed first: a reader sees all of a build or none.
            with self.staging() as staging:
                if directory.is_dir():
                    directory.rename(staging / "removed")
                self._receipt(digest).unlink(missing_ok=True)
        return True

    # --- leases: a build that a process has loaded is not removed under it -----------------------------------------

    def lease(self, digest: str) -> int | None:
        """Hold a build for the life of this process: a shared lock on its directory, which writes nothing.

        Returns the file descriptor that holds it; None where the system has no such locks (there, files that are in
        use cannot be removed anyway).
        """
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            descriptor = os.open(self._builds / digest[:NAME_DIGITS], os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return descriptor
        return None

    def _unused(self, digest: str) -> bool:
        with contextlib.suppress(ImportError, FileNotFoundError):
            import fcntl

            descriptor = os.open(self._builds / digest[:NAME_DIGITS], os.O_RDONLY | os.O_CLOEXEC)
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
        except (Timeout, OSError, NotImplementedError) as error:
            whose = read_json(owner) or {}
            by = f"process {whose.get('process')} on {whose.get('host')}" if whose else "another process"
            logger.warning(
                "waited %g s for %s, which is fetching %s, and fetch it as well (%s)",
                self._lock_seconds, by, key, type(error).__name__,
            )  # fmt: skip
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
    def _builds(self) -> Path:
        return self.root / "builds"

    @property
    def _receipts(self) -> Path:
        return self.root / "receipts"

    @property
    def _staging(self) -> Path:
        return self.root / "staging"

    @property
    def _locks(self) -> Path:
        return self.root / "locks"

    def _receipt(self, digest: str) -> Path:
        return self._receipts / f"{digest[:NAME_DIGITS]}.json"

    def _write_receipt(
        self, digest: str, hashes: Mapping[str, str], there: Mapping[str, os.stat_result], sources: list[dict[str, str]]
    ) -> None:
        files = {
            path: {"sha256": hashes[path]} | dict(zip(_LOOKS, _looks(there[path]), strict=True)) for path in hashes
        }
        document = {"schema": SCHEMA, "digest": digest, "sources": sources, "files": files}
        self.write(self._receipt(digest), document)

    def _refresh_receipt(
        self, digest: str, hashes: Mapping[str, str], there: Mapping[str, os.stat_result], old: dict[str, Any] | None
    ) -> None:
        # Files were copied or touched and are right all the same. A store that cannot be written hashes them again.
        with contextlib.suppress(StoreError):
            self._write_receipt(digest, hashes, there, old["sources"] if old else [])

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
                detail, advice = f"it cannot be written ({error})", "Point KERNEL_LOADER_CACHE to a place of your own."
            else:
                detail, advice = str(error), "Check the disk, or point KERNEL_LOADER_CACHE to another."
            raise StoreError(str(self.root), detail, advice) from error

    def _sweep(self) -> None:
        """Remove what crashed processes left in staging."""
        with contextlib.suppress(OSError):
            for directory in list(self._staging.iterdir()) if self._staging.is_dir() else []:
                if _is_left_behind(directory):
                    shutil.rmtree(directory, ignore_errors=True)


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
    new = {field: getattr(source, field) for field in ("repo", "revision", "commit", "variant")}
    return [old for old in sources if old != new] + [new]


def _looks(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


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
                raise IntegrityError(str(directory), (f"{path} is no regular file",), _AGAIN)


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
        isinstance(document.get("digest"), str)
        and isinstance(sources, list)
        and all(isinstance(source, dict) and source.keys() == set(Source._fields) for source in sources)
        and isinstance(files, dict)
        and all(
            isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and isinstance(entry.get("size"), int)
            for entry in files.values()
        )
    )
    return document if is_receipt else None
