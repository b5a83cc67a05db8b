"""Digests of a build: what its files hash to, whether that is what was published, and sealing new ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kernel_loader.errors import IntegrityError, MetadataError, SourceError
from kernel_loader.files import hash_file, replace_file
from kernel_loader.metadata import FILE_NAME, Algorithm, Digest, Metadata, is_safe_path

_BYTECODE: Final = "__pycache__"


def verify(directory: Path, metadata: Metadata) -> str:
    """Check the files of a build against its metadata, and name its content.

    Returns:
        The content digest: sha256, in hexadecimal, over the sorted paths and hashes of all files.

    Raises:
        IntegrityError: a file is missing, not listed, or of other content than the metadata says.
        SourceError: the build cannot be read.
    """
    hashes = measure(directory, "sha256")
    if metadata.digest is not None and (found := violations(directory, metadata.digest, hashes)):
        raise IntegrityError(str(directory), found)
    return content_digest(hashes)


def violations(directory: Path, digest: Digest, sha256: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """How the files of a build differ from a digest, a line a file. metadata.json holds the digest and is not in it.

    `sha256` are the hashes of the files by that algorithm, where they are known already.
    """
    known = sha256 if digest.algorithm == "sha256" else None
    found = dict(known if known is not None else measure(directory, digest.algorithm))
    found.pop(FILE_NAME, None)
    return differences(found, digest.files)


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> tuple[str, ...]:
    """How the files of a build, path -> hash, differ from those that were published, a line a file."""
    return tuple(
        f"{path} is missing" if path not in found else
        f"{path} is not listed" if path not in expected else
        f"{path} has other content"
        for path in sorted(found.keys() | expected.keys())
        if found.get(path) != expected.get(path)
    )  # fmt: skip


def content_digest(hashes: Mapping[str, str]) -> str:
    """One digest for many files: sha256 over lines of path, NUL and hash, sorted."""
    return hashlib.sha256(
        "".join(f"{path}\0{hashes[path]}\n" for path in sorted(hashes)).encode(errors="surrogateescape")
    ).hexdigest()


def measure(directory: Path, algorithm: Algorithm) -> dict[str, str]:
    """Path (with slashes) -> base64 of the hash, for every file of a build.

    Raises:
        SourceError: a file cannot be read, or is no regular file.
    """
    try:
        return {path: hash_file(file, algorithm) for path, file in _walk(directory)}
    except OSError as error:
        raise _unreadable(directory, str(error)) from error


def size_of(directory: Path) -> int:
    """Bytes of all files of a build.

    Raises:
        SourceError: as `measure`.
    """
    try:
        return sum(file.stat().st_size for _, file in _walk(directory))
    except OSError as error:
        raise _unreadable(directory, str(error)) from error


def seal(directory: Path, algorithm: Algorithm = "sha256") -> bool:
    """Write the digests of a build's files into its metadata.json, keeping whatever else stands there.

    Returns:
        Whether the file had to change.

    Raises:
        MetadataError: the metadata.json that is there cannot be read.
        SourceError: the directory is no build, or cannot be read or written.
    """
    there, sealed = _sealed(directory, algorithm)
    if sealed != there:
        try:
            replace_file(directory / FILE_NAME, sealed, (directory / FILE_NAME).stat().st_mode)
        except OSError as error:
            raise _unreadable(directory, f"it cannot be written ({error})") from error
    return sealed != there


def is_sealed(directory: Path, algorithm: Algorithm = "sha256") -> bool:
    """Whether `seal` would change nothing.

    Raises:
        MetadataError, SourceError: as `seal`.
    """
    there, sealed = _sealed(directory, algorithm)
    return there == sealed


def _sealed(directory: Path, algorithm: Algorithm) -> tuple[bytes, bytes]:
    file = directory / FILE_NAME
    try:
        text = file.read_bytes()
    except FileNotFoundError as error:
        advice = "Write `{}` into it, or what docs/builds.md lists: every key may be missing."
        raise SourceError(str(directory), f"a build has a {FILE_NAME}, and this has none", advice) from error
    except OSError as error:
        raise _unreadable(directory, f"a build has a {FILE_NAME} ({error})") from error
    Metadata.parse(text, str(file))
    files = measure(directory, algorithm)
    del files[FILE_NAME]
    for path in files:
        if not is_safe_path(path):
            raise _unreadable(directory, f"{path!r} is no portable name for a file of a build")
    document = json.loads(text) | {"digest": {"algorithm": algorithm, "files": dict(sorted(files.items()))}}
    try:
        return text, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError as error:
        raise MetadataError(str(file), "", f"a text in it is not Unicode ({error})") from error


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    def stop(error: OSError) -> None:
        raise error  # os.walk would pass over what it cannot list

    for parent, directories, names in os.walk(directory, onerror=stop):
        # Python writes bytecode beside sources at its own times (pip does on install). It is never loaded from here.
        directories[:] = [name for name in directories if name != _BYTECODE]
        for name in directories:
            if (Path(parent) / name).is_symlink() or _is_junction(Path(parent) / name):
                raise OSError(f"{Path(parent) / name} is a link to a directory")
        for name in names:
            file = Path(parent) / name
            if not file.is_file():
                raise OSError(f"{file} is no regular file")  # reading a pipe would never end
            yield file.relative_to(directory).as_posix(), file


def _is_junction(path: Path) -> bool:
    # A kind of link that only Windows has, and that Python knows since 3.12.
    return getattr(os.path, "isjunction", lambda _: False)(path)


def _unreadable(directory: Path, detail: str) -> SourceError:
    return SourceError(str(directory), detail, "Check that the directory exists, holds a build, and can be read.")
