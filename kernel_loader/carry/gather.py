"""What a bundle carries, gathered build by build: the builds, and what a machine there must know to choose them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final

from kernel_loader.carry.archive import CHANGED
from kernel_loader.carry.contents import Bundle, BundledRepository
from kernel_loader.choice import Ask, Choice, Looked, request_of
from kernel_loader.digest import measure
from kernel_loader.errors import IntegrityError, RequestError
from kernel_loader.index import Index
from kernel_loader.lock import LockedFile, digest_of
from kernel_loader.metadata import FILE_NAME
from kernel_loader.published import PublishedBuilds
from kernel_loader.sources import Fetched, Listing

_FROM_DIRECTORY: Final = "Unset KERNEL_LOADER_LOCAL for it, or copy the directory and name it there."


class Gathered:
    """A bundle that grows.

    Attributes:
        directories: digest of each build -> where it lies.
    """

    def __init__(self, index: Index) -> None:
        self.directories: Final[dict[str, Path]] = {}
        self._index: Final = index
        self._repositories: Final[dict[tuple[str, str], BundledRepository]] = {}
        self._files: Final[dict[str, tuple[LockedFile, ...]]] = {}
        self._publishers: Final[set[str]] = set()

    def add(self, ask: Ask, choice: Choice, variant: str, fetched: Fetched, *, by_word: bool = False) -> None:
        """Add a build, with what was looked at before it was chosen. An embedded build adds that alone.

        Args:
            ask: what was asked for.
            choice: what was chosen.
            variant: the build of the repository that is carried.
            fetched: where it is.
            by_word: whether the user's word, or a lock, let its code pass: the Hub was not asked about its publisher,
                and what an earlier answer said is no part of the bundle.

        Raises:
            RequestError: it, or what was looked at, is not from the Hub, so that no commit names it; or the repository
                has moved since another of its builds was added.
            IntegrityError: the build is no longer what it was.
        """
        for looked in choice.looked:
            self._learn(looked)
        if choice.embedded:
            return
        if not by_word:
            self._publish(ask)
        key = _key(choice.listing)
        known, text = self._repositories[key], _text(fetched.path / FILE_NAME)
        self._repositories[key] = known._replace(
            metadata={**known.metadata, variant: text}, builds={**known.builds, variant: fetched.digest}
        )
        if fetched.digest not in self._files:
            self.directories[fetched.digest] = fetched.path
            self._files[fetched.digest] = _files(fetched)

    def bundle(self) -> Bundle:
        """What is carried so far."""
        repositories = tuple(self._repositories[key] for key in sorted(self._repositories))
        return Bundle(repositories, dict(self._files), tuple(sorted(self._publishers)))

    def _learn(self, looked: Looked) -> None:
        """The metadata of builds that were passed over, so that they are passed over there."""
        if looked.listing is None:
            return
        if not isinstance(looked.source, PublishedBuilds):
            raise _not_published(looked)
        entry, key = looked.source.known(looked.listing), _key(looked.listing)
        read = {verdict.name for verdict in looked.resolution.verdicts if verdict.metadata is not None}
        metadata = {name: entry.metadata[name] for name in sorted(read & entry.metadata.keys())}
        empty = BundledRepository(*key, entry.commit, looked.listing.names, {}, {})
        known = self._repositories.get(key, empty)
        if known.commit != entry.commit:
            detail = f"{entry.request} has moved from {known.commit[:12]} to {entry.commit[:12]} meanwhile"
            raise RequestError(detail, "Export again, or under a lock, where nothing moves.")
        self._repositories[key] = known._replace(metadata={**metadata, **known.metadata})

    def _publish(self, ask: Ask) -> None:
        """A publisher that the Hub trusts is trusted there, where it cannot be asked."""
        request = request_of(ask.manifest)
        publisher = request.repo.partition("/")[0] if request is not None and ask.manifest.is_anonymous else ""
        known = self._index.publisher(publisher) if publisher else None
        if known is not None and known[0]:
            self._publishers.add(publisher)


def _not_published(looked: Looked) -> RequestError:
    assert looked.source is not None, "only asked for what was listed"
    assert looked.listing is not None, "only asked for what was listed"
    if looked.source.is_local:
        return RequestError(f"{looked.listing.repo} is from a directory of this machine", _FROM_DIRECTORY)
    detail = f"{looked.listing.repo} is from the source {looked.source.kind!r}, and no commit of the Hub names it"
    return RequestError(detail, "Export with a loader that has no sources of its own.")


def _key(listing: Listing) -> tuple[str, str]:
    return listing.repo, listing.revision or "main"


def _text(file: Path) -> str | None:
    # As it is: text mode would make one kind of line end of another.
    return file.read_bytes().decode() if file.is_file() else None


def _files(fetched: Fetched) -> tuple[LockedFile, ...]:
    files = tuple(
        LockedFile(path, (fetched.path / path).stat().st_size, base64.b64decode(sha256).hex())
        for path, sha256 in sorted(measure(fetched.path, "sha256").items())
    )
    if digest_of(files) != fetched.digest:  # which sizes and times have not shown
        raise IntegrityError(str(fetched.path), ("its content is not what its name says",), CHANGED)
    return files
