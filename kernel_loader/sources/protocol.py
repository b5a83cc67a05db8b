"""What a source is: it lists the builds of a repository, reads their metadata, and brings one here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from kernel_loader.metadata import Metadata


class Request(NamedTuple):
    """A repository, at a version (its branch `v<N>`) or at a revision."""

    repo: str
    version: int | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}@{self.git_revision}" if self.git_revision else self.repo

    @property
    def git_revision(self) -> str | None:
        """The branch, tag or commit that is meant."""
        return f"v{self.version}" if self.version is not None else self.revision


class Listing(NamedTuple):
    """The builds of a repository, by name, as one source has them.

    `commit` is where the revision stood when it was asked for; None in sources that have no revisions.
    """

    repo: str
    revision: str | None
    names: tuple[str, ...]
    commit: str | None = None


class Fetched(NamedTuple):
    """A build on this machine, verified, and the digest of its content."""

    path: Path
    digest: str


class Source(Protocol):
    """A place where builds come from.

    All methods raise `SourceError` when the place does not answer as it should, and `metadata` raises `MetadataError`
    for a damaged metadata.json.
    """

    @property
    def kind(self) -> str:
        """What `Origin.source` calls it."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether asking it costs no network."""
        ...

    def listing(self, request: Request) -> Listing | None:
        """The builds of a repository; None when this place does not have it."""
        ...

    def versions(self, request: Request) -> tuple[int, ...]:
        """The versions that a repository has, oldest first; none where the place has no versions or cannot be asked."""
        ...

    def metadata(self, listing: Listing, name: str) -> Metadata:
        """What a build says of itself."""
        ...

    def fetch(self, listing: Listing, name: str) -> Fetched:
        """A build on this machine: brought here where that is needed, and verified at every call.

        Raises:
            IntegrityError: its files are not those that were published.
        """
        ...

    def measure(self, listing: Listing, name: str) -> tuple[Fetched | None, int]:
        """A build as far as it is here, and the bytes of all its files; fetches nothing."""
        ...

    def hold(self, fetched: Fetched) -> None:
        """Keep a build from being removed as long as this process lives."""
        ...
