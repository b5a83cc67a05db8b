"""Files as the digests, the store and checkpoints need them: hashed, replaced whole, and made durable."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
import tempfile
from pathlib import Path


def hash_file(file: Path, algorithm: str = "sha256") -> str:
    """The base64 of the hash of a file's content."""
    with file.open("rb") as stream:
        return base64.b64encode(hashlib.file_digest(stream, algorithm).digest()).decode()


def replace_file(file: Path, content: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Put content in the place of a file by one rename, so that readers see the old or the new.

    `durable` writes the content to the disk before: after a loss of power, too, one of the two is there.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    # Beside the target, so that the rename stays on one file system.
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or what a directory lists, durable: it is there after a loss of power.

    Raises:
        OSError: the disk does not take it.
    """
    if path.is_dir() and sys.platform == "win32":
        return  # Windows makes directories durable by itself, and cannot open them
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
