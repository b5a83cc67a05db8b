"""Where a converted checkpoint goes: the directory, the one beside it where it is made, and what can go wrong there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kernel_loader.errors import FusionError

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_PERMIT: Final = "Give a directory that can be written, or make this one so."
CHANGE: Final = "Give another directory."
_ADVICE: Final[Mapping[int | None, str]] = {
    **dict.fromkeys(_NO_ROOM, "Make room there."),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _PERMIT),
    **dict.fromkeys((errno.ENOTDIR, errno.ENAMETOOLONG), CHANGE),
    **dict.fromkeys((errno.EEXIST, errno.ENOTEMPTY), "Remove what is there."),
    errno.EFBIG: "Where the file system takes no such file, begin anew with a smaller max_shard_size "
    "(--max-shard-size). Otherwise let the process write larger files (ulimit -f).",
}


class Place(NamedTuple):
    """Where a conversion goes, and the directory beside it where all is until it is whole."""

    out: Path
    private: Path

    @classmethod
    def of(cls, out: Path | str) -> Place:
        """The place whose result is `out`."""
        out = Path(out).absolute()
        return cls(out, out.with_name(f".{out.name}.partial"))

    @property
    def content(self) -> Path:
        """What becomes `out`."""
        return self.private / "content"

    @property
    def journal(self) -> Path:
        """Which conversion it is, and which shards are finished."""
        return self.private / "journal.json"

    @property
    def lock(self) -> Path:
        """Held by the process that converts."""
        return self.private / "lock"

    def expect_free(self) -> None:
        """Refuse to replace anything but an empty directory."""
        with writing(self.out, self):
            if self.out.is_symlink() or (self.out.exists() and not (self.out.is_dir() and not any(self.out.iterdir()))):
                raise FusionError((f"{self.out} is there already",), "Give another directory, or remove that one.")
        if os.path.ismount(self.out):
            problem = f"{self.out} is where a disk is mounted, which nothing can be put in the place of"
            raise FusionError((problem,), "Give a directory in it.")

    def expect_writable(self) -> None:
        """Refuse where no directory can be made, or another process is converting."""
        with writing(self.private, self), contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(self.private.lstat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        for directory in {nearest(self.private), nearest(self.out.parent)}:
            if not os.access(directory, os.W_OK | os.X_OK):
                raise FusionError((f"nothing can be written in {directory}",), _PERMIT)
        if self.lock.exists():
            with alone(self):
                pass

    def goes_on(self) -> str:
        """What to say after an error of what is here already."""
        if not os.path.isdir(self.private):  # noqa: PTH112 - of any name, also of one that is too long
            return ""
        return f" Then the same command goes on where it stopped: what is finished is kept in {self.private}."


def nearest(path: Path) -> Path:
    """The path, or the directory nearest above it that is there."""
    return next(at for at in (path, *path.parents) if at.exists() or at == at.parent)


def space(directory: Path, kept: Collection[Path]) -> int:
    """Bytes of the disk that a directory takes, some of its files apart."""
    size = 0
    for at, _, names in os.walk(directory):
        for file in {Path(at) / name for name in names}.difference(kept):
            with contextlib.suppress(FileNotFoundError):
                status = file.lstat()
                # What was written out of order has holes.
                size += status.st_blocks * 512 if hasattr(status, "st_blocks") else status.st_size
    return size


@contextlib.contextmanager
def alone(place: Place) -> Iterator[None]:
    """Nobody else converts into `out`, as long as the lock lives with its process."""
    from filelock import FileLock, Timeout

    lock = FileLock(place.lock)
    with writing(place.lock, place):
        place.private.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            problem = f"another process is converting into {place.out}"
            raise FusionError((problem,), "Let it finish, or give another directory.") from error
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def writing(path: Path, place: Place, size: int = 0) -> Iterator[None]:
    """Say of an error which file it is, how large, and what becomes of the rest."""
    try:
        yield
    except OSError as error:
        raise unwritten(path, place, error, size) from error


def unwritten(path: Path, place: Place, error: OSError, size: int) -> FusionError:
    """What to raise of a file that could not be written."""
    numbers = [f"{size:,} bytes wanted"] if size else []
    if error.errno in _NO_ROOM:
        numbers.append(f"{shutil.disk_usage(nearest(place.private)).free:,} free")
    said = ": ".join(filter(None, (error.strerror or str(error), ", ".join(numbers))))
    return FusionError(
        (f"{path} cannot be written ({said})",), _ADVICE.get(error.errno, "Check that disk.") + place.goes_on()
    )


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say of an error which file of the source it is."""
    try:
        yield
    except OSError as error:
        problem = f"{error.filename or path} cannot be read ({error.strerror or error})"
        raise FusionError((problem,), "Make it readable, or bring the checkpoint here again, whole.") from error
