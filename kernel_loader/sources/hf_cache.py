"""Builds that the Hugging Face cache holds, whoever brought them there: the client itself, or another kernel loader.

::

    <cache>/kernels--<org>--<name>/refs/<revision>                 the commit that a revision stood at
                                  /snapshots/<commit>/build/...    links into blobs/
                                  /blobs/<hash>                    git's sha1 of the content, or its sha256

The name of a blob says what it must hash to, so that each file is verified without a listing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from kernel_loader.errors import MetadataError
from kernel_loader.metadata import FILE_NAME, MAX_BYTES, Metadata, is_safe_path
from kernel_loader.sources.hub import RemoteFile, git_blob
from kernel_loader.sources.protocol import Request


class CachedBuild(NamedTuple):
    """The directory of a build in a snapshot."""

    directory: Path

    @property
    def metadata(self) -> bytes | None:
        """The metadata.json of the build; None when it has none."""
        file = self.directory / FILE_NAME
        if not file.is_file() or file.stat().st_size > MAX_BYTES:
            return None
        return file.read_bytes()

    def copy(self, target: Path, listed: tuple[RemoteFile, ...] | None) -> dict[str, str] | None:
        """Copy the build (by hard links where that works), hashing each file.

        Args:
            target: an empty directory.
            listed: what the build consists of by the Hub's listing; None to go by its own metadata.

        Returns:
            Path -> base64 of its sha256; None when the build is not whole, or a file is not what was published.
        """
        paths = {file.path for file in listed} if listed is not None else self._expected()
        if not paths:
            return None
        by_path = {file.path: file for file in listed or ()}
        hashes = {}
        for path in sorted(paths):
            file = self.directory / path
            if not is_safe_path(path) or not file.is_file():
                return None
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(file.resolve(), target / path)
            content = _Hashes.of(target / path)
            if not content.fits(by_path.get(path), file.resolve().name):
                return None
            hashes[path] = base64.b64encode(content.sha256).decode()
        return hashes

    def _expected(self) -> set[str]:
        """All files of the build by its metadata; where that lists none, those that are there."""
        try:
            digest = Metadata.parse(self.metadata or b"{}").digest
        except MetadataError:
            return set()
        if digest is not None:
            return {*digest.files, FILE_NAME}
        files = (file.relative_to(self.directory) for file in self.directory.rglob("*") if file.is_file())
        return {file.as_posix() for file in files if "__pycache__" not in file.parts and file.suffix != ".pyc"}


class HFCache(NamedTuple):
    """A cache of the Hugging Face client."""

    root: Path

    @classmethod
    def all(cls) -> tuple[HFCache, ...]:
        """The client's own cache, and that of the `kernels` package where it was put elsewhere."""
        from huggingface_hub.constants import HF_HUB_CACHE

        roots = [os.environ.get("KERNELS_CACHE"), HF_HUB_CACHE]
        # What this user may not look into holds nothing for him.
        return tuple(cls(Path(root)) for root in dict.fromkeys(roots) if root and os.access(root, os.R_OK | os.X_OK))

    def commit(self, request: Request) -> str | None:
        """The commit that a revision stood at when it was last asked for."""
        revision = request.git_revision or "main"
        if ".." in revision.split("/"):
            return None
        for repository in self._repositories(request):
            if (repository / "snapshots" / revision).is_dir():
                return revision
            reference = repository / "refs" / revision
            if reference.is_file():
                return reference.read_text(encoding="utf-8").strip()
        return None

    def names(self, request: Request, commit: str) -> tuple[str, ...]:
        """The builds of a snapshot, which may be some of those that are published."""
        for repository in self._repositories(request):
            builds = repository / "snapshots" / commit / "build"
            if builds.is_dir():
                return tuple(sorted(entry.name for entry in builds.iterdir() if entry.is_dir()))
        return ()

    def build(self, request: Request, commit: str, name: str) -> CachedBuild | None:
        """A build of a snapshot."""
        for repository in self._repositories(request):
            directory = repository / "snapshots" / commit / "build" / name
            if directory.is_dir():
                return CachedBuild(directory)
        return None

    def _repositories(self, request: Request) -> list[Path]:
        # Older clients had no type for kernels, and kept them as models.
        name = request.repo.replace("/", "--")
        return [
            self.root / f"{kind}--{name}" for kind in ("kernels", "models") if (self.root / f"{kind}--{name}").is_dir()
        ]


class _Hashes(NamedTuple):
    size: int
    sha256: bytes
    blob: str

    @classmethod
    def of(cls, file: Path) -> _Hashes:
        size = file.stat().st_size
        sha256, blob = hashlib.sha256(), git_blob(size)
        with file.open("rb") as stream:
            while chunk := stream.read(2**20):
                sha256.update(chunk)
                blob.update(chunk)
        return cls(size, sha256.digest(), blob.hexdigest())

    def fits(self, listed: RemoteFile | None, name: str) -> bool:
        """Whether the content is what the listing says, or else what the name of its blob says."""
        if listed is not None:
            return listed.is_hash(self.sha256.hex(), self.blob)
        # In a cache without links, the build's own digests decide.
        return len(name) not in (40, 64) or name in (self.blob, self.sha256.hex())


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
