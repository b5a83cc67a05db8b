"""Bundles on disk: written as an archive or a wheel, read with nothing believed, brought into a store."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import logging
import os
import re
import struct
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Self

from kernel_loader import __version__
from kernel_loader.carry.contents import FILE_NAME, MAX_BYTES, Bundle, BundledRepository
from kernel_loader.errors import BundleError, IntegrityError, LockMissing, RequestError
from kernel_loader.files import sync
from kernel_loader.index import Index, entry_of
from kernel_loader.lock import Lock, LockedFile
from kernel_loader.resources import INSTALLED
from kernel_loader.sources import Request
from kernel_loader.store import NAME_DIGITS, Source as Published, Store

logger = logging.getLogger("kernel_loader")

SUFFIX: Final = ".klb"

CHANGED: Final = "Nothing was written. Run `kernel-loader verify`, remove what it names, and export again."

_WHEEL: Final = r"[A-Za-z0-9]([\w.]*[A-Za-z0-9])?-[^-]+-py3-none-any\.whl"

_CHUNK: Final = 2**20

# What the reader of ZIPs raises of one that is damaged.
_DAMAGED: Final = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error)

_DATE: Final = (1980, 1, 1, 0, 0, 0)  # the first that a ZIP can name


class Imported(NamedTuple):
    """A build of a bundle: where it was published, its digest, and whether it was not here before."""

    repo: str
    revision: str
    variant: str
    digest: str
    new: bool


# --- writing --------------------------------------------------------------------------------------------------------


def write_archive(file: Path, bundle: Bundle, directories: Mapping[str, Path]) -> None:
    """Write a bundle to a file, which is replaced whole.

    Args:
        file: the archive.
        bundle: what it carries.
        directories: digest of each build -> where its files are.

    Raises:
        BundleError: the file cannot be written.
        IntegrityError: a build is no longer what it was.
    """
    with _writing(file) as archive:
        _add(archive, FILE_NAME, bundle.to_json().encode())
        _add_builds(archive, "", bundle, directories)


def write_wheel(file: Path, bundle: Bundle, directories: Mapping[str, Path]) -> None:
    """Write a bundle as a wheel, `<distribution>-<version>-py3-none-any.whl`. Once installed, its builds are found.

    Args:
        file: the wheel; its name says what pip calls it.
        bundle: as in `write_archive`.
        directories: as in `write_archive`.

    Raises:
        RequestError: the file has no name of a wheel.
        BundleError, IntegrityError: as `write_archive`.
    """
    name, version = _distribution(file.name)
    information, home = f"{name}-{version}.dist-info", f"{INSTALLED}/{name}/"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Builds of GPU kernels\n"
    form = f"Wheel-Version: 1.0\nGenerator: kernel-loader {__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record: list[tuple[str, ...]] = []
    with _writing(file) as archive:
        record.append(_add(archive, f"{home}{FILE_NAME}", bundle.to_json().encode()))
        record += _add_builds(archive, home, bundle, directories)
        record.append(_add(archive, f"{information}/METADATA", f"{about}Requires-Dist: kernel-loader\n".encode()))
        record.append(_add(archive, f"{information}/WHEEL", form.encode()))
        record.append((f"{information}/RECORD", "", ""))
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(record)  # a path may have commas in it
        _add(archive, f"{information}/RECORD", lines.getvalue().encode())


def _distribution(wheel: str) -> tuple[str, str]:
    """Name and version as the file name of a wheel for everyone has them, normalised."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    if re.fullmatch(_WHEEL, wheel, re.ASCII) is not None:
        with contextlib.suppress(InvalidWheelFilename):
            name, version, *_ = parse_wheel_filename(wheel)
            return name.replace("-", "_"), str(version)
    detail = f"{wheel!r} was given as the name of a wheel"
    raise RequestError(detail, "It is name-version-py3-none-any.whl, as in cluster_kernels-1.0-py3-none-any.whl.")


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[zipfile.ZipFile]:
    """An archive that takes its place when it is whole."""
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            yield archive
        temporary.chmod(0o644)
        sync(temporary)
        temporary.replace(file)
    except OSError as error:
        if error.errno is None:
            raise  # an error of our own tree that passes through
        raise BundleError(
            str(file), f"it cannot be written ({error})", "Free space, or name a file in a directory of yours."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _add_builds(
    archive: zipfile.ZipFile, home: str, bundle: Bundle, directories: Mapping[str, Path]
) -> list[tuple[str, ...]]:
    lines = []
    for digest in sorted(bundle.files):
        for listed in bundle.files[digest]:
            chunks = _read(directories[digest], listed)
            lines.append(_add(archive, f"{home}{_member(digest, listed)}", chunks, listed.size))
    return lines


def _add(
    archive: zipfile.ZipFile, name: str, content: bytes | Iterator[bytes], size: int | None = None
) -> tuple[str, ...]:
    """Add a member; gives its line for the RECORD of a wheel."""
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system, info.external_attr = 3, 0o100644 << 16  # of Unix, wherever it is written
    chunks = iter((content,)) if isinstance(content, bytes) else content
    info.file_size = len(content) if isinstance(content, bytes) else size or 0  # from 2 GiB on it is written otherwise
    sha256 = hashlib.sha256()
    with archive.open(info, "w") as stream:
        for chunk in chunks:
            sha256.update(chunk)
            stream.write(chunk)
    return name, f"sha256={base64.urlsafe_b64encode(sha256.digest()).decode().rstrip('=')}", str(info.file_size)


def _read(directory: Path, listed: LockedFile) -> Iterator[bytes]:
    """A file of a build in pieces.

    Raises:
        IntegrityError: it is not what it was when the bundle was gathered.
    """
    sha256, size = hashlib.sha256(), 0
    try:
        with (directory / listed.path).open("rb") as stream:
            while size <= listed.size and (chunk := stream.read(_CHUNK)):
                size += len(chunk)
                sha256.update(chunk)
                yield chunk
    except OSError as error:
        raise IntegrityError(str(directory), (f"{listed.path} cannot be read ({error})",), CHANGED) from error
    if (size, sha256.hexdigest()) != (listed.size, listed.sha256):
        raise IntegrityError(str(directory), (f"{listed.path} has other content",), CHANGED)


# --- reading --------------------------------------------------------------------------------------------------------


class Archive:
    """A bundle in a file: opened, with all that can be known without reading its builds checked.

    Raises:
        BundleError: it is no bundle, not whole, of another format, or holds what its bundle.json does not name.
    """

    def __init__(self, file: Path) -> None:
        self.file: Final = file
        try:
            self._zip: Final = zipfile.ZipFile(file)
        except OSError as error:
            advice = "Check the path, and that you may read it."
            raise BundleError(str(file), f"it cannot be read ({error.strerror or error})", advice) from error
        except _DAMAGED as error:
            raise BundleError(str(file), f"it is no bundle, or not all of one ({error})") from error
        try:
            self._members: Final = self._check_members()
            self.bundle: Final = self._manifest()
            self._check_names()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def read(self, digest: str, file: LockedFile, write: Callable[[bytes], object]) -> None:
        """Give the content of a file in pieces, to whom it is worth nothing unless this returns.

        Raises:
            BundleError: it is not what bundle.json says.
        """
        sha256 = hashlib.sha256()
        for chunk in self._content(_member(digest, file)):
            sha256.update(chunk)
            write(chunk)
        if sha256.hexdigest() != file.sha256:
            self._refuse(f"{_member(digest, file)} is not what its {FILE_NAME} says (sha256)")

    def _check_members(self) -> dict[str, zipfile.ZipInfo]:
        there = self._zip.infolist()
        members = {info.filename: info for info in there}
        if len(members) < len(there):
            self._refuse("two of its members have one name")
        room = self.file.stat().st_size
        for info in there:
            room -= info.compress_size
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                self._refuse(f"{info.filename} is compressed or encrypted, and members of a bundle are stored")
            if info.file_size != info.compress_size or room < 0:
                self._refuse(f"{info.filename} says that it is larger than what is there")
        return members

    def _manifest(self) -> Bundle:
        info = self._members.get(FILE_NAME)
        if info is None:
            advice = "A wheel is installed: `pip install --no-deps FILE`." if self.file.suffix == ".whl" else None
            self._refuse(f"it has no {FILE_NAME}", advice=advice)
        if info.file_size > MAX_BYTES:
            self._refuse(f"its {FILE_NAME} has {info.file_size:,} bytes, and more than {MAX_BYTES:,} are not read")
        return Bundle.parse(b"".join(self._content(FILE_NAME)), str(self.file))

    def _check_names(self) -> None:
        expected = {_member(digest, file): file for digest, files in self.bundle.files.items() for file in files}
        for name in sorted(expected.keys() ^ (self._members.keys() - {FILE_NAME})):
            self._refuse(f"{name!r} is {'missing' if name in expected else f'not named in its {FILE_NAME}'}")
        for name, file in expected.items():
            if self._members[name].file_size != file.size:
                self._refuse(f"{name} has {self._members[name].file_size} bytes, and its {FILE_NAME} says {file.size}")

    def _content(self, name: str) -> Iterator[bytes]:
        try:
            with self._zip.open(self._members[name]) as stream:
                yield from iter(lambda: stream.read(_CHUNK), b"")
        except (*_DAMAGED, EOFError, OSError, RuntimeError) as error:
            self._refuse(f"{name} cannot be read ({error})", error)

    def _refuse(self, detail: str, cause: Exception | None = None, advice: str | None = None) -> NoReturn:
        error = BundleError(str(self.file), detail, advice) if advice else BundleError(str(self.file), detail)
        raise error from cause


def import_archive(file: Path, store: Store, index: Index, lock: Lock | None = None) -> list[Imported]:
    """Bring all builds of a bundle into a store. Nothing of it is visible before all of it is verified.

    Args:
        file: the archive.
        store: where the builds go. Those that are there are not read again.
        index: where it is remembered what the repositories have.
        lock: what the bundle must agree with.

    Raises:
        BundleError: the bundle cannot be used.
        LockMismatch, LockMissing: a build is not as the lock has it, or of a repository that it does not name.
        StoreError: the store cannot be written.
    """
    with Archive(file) as archive:
        bundle = archive.bundle
        if lock is not None:
            _hold_to(lock, bundle)
        new = [digest for digest in bundle.files if store.find(digest, repair=True) is None]
        if new:
            _publish(archive, new, store)
    for repository in bundle.repositories:
        for variant, digest in repository.builds.items():
            store.add_source(digest, _source(repository, variant))
        _remember(index, repository)
    for publisher in bundle.publishers:
        if index.publisher(publisher) is None:
            index.put_publisher(publisher, trusted=True, asked=0.0)  # where the Hub can be asked, it is
    return [
        Imported(repository.repo, repository.revision, variant, digest, digest in new)
        for repository in bundle.repositories
        for variant, digest in repository.builds.items()
    ]


def _publish(archive: Archive, new: list[str], store: Store) -> None:
    with store.staging() as staging:
        hashes = {digest: _unpack(archive, digest, staging / digest[:NAME_DIGITS]) for digest in new}
        for repository in archive.bundle.repositories:
            for variant, digest in repository.builds.items():
                if digest in hashes:
                    store.publish(staging / digest[:NAME_DIGITS], hashes.pop(digest), _source(repository, variant))


def _source(repository: BundledRepository, variant: str) -> Published:
    return Published(repository.repo, repository.revision, repository.commit, variant)


def verify_archive(file: Path) -> Bundle:
    """Read all of a bundle, and keep nothing.

    Raises:
        BundleError: as `import_archive`.
    """
    with Archive(file) as archive:
        for digest, files in archive.bundle.files.items():
            for listed in files:
                archive.read(digest, listed, lambda _: None)
        return archive.bundle


def _hold_to(lock: Lock, bundle: Bundle) -> None:
    named = {locked.request.repo for locked in lock.repositories}
    for repository in bundle.repositories:
        if repository.repo not in named:  # also where nothing of it is carried
            raise LockMissing(lock.file, f"it does not name {repository.repo}")
        for variant, digest in repository.builds.items():
            lock.check(Request(repository.repo, revision=repository.revision), variant, digest, repository.commit)


def _unpack(archive: Archive, digest: str, target: Path) -> dict[str, str]:
    """Write a build to a directory; gives path -> base64 of its sha256."""
    hashes = {}
    for file in archive.bundle.files[digest]:
        (target / file.path).parent.mkdir(parents=True, exist_ok=True)
        with (target / file.path).open("wb") as stream:
            archive.read(digest, file, stream.write)
        hashes[file.path] = base64.b64encode(bytes.fromhex(file.sha256)).decode()
    return hashes


def _remember(index: Index, repository: BundledRepository) -> None:
    """What the bundle says holds as if the Hub had been asked now; a bundle that is imported again changes nothing."""
    entry = entry_of(repository)._replace(checked=time.time())
    there = index.get(entry.request)
    # What the receipts of the builds tell is no answer of the index yet.
    is_known = there is not None and there.names is not None and there.commit == entry.commit
    if there is None or not is_known or entry.merge(there)._replace(checked=there.checked) != there:
        index.put(entry)
    if (counts := index.get(entry.request)) is not None and counts.commit != entry.commit:
        logger.warning("%s: imported, and what an installed package brings counts before it", entry.request)


def _member(digest: str, file: LockedFile) -> str:
    return f"builds/{digest[:NAME_DIGITS]}/{file.path}"
