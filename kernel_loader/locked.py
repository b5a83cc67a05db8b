"""Builds as a lock names them: nobody is asked what to load, and no other bytes are taken."""

from __future__ import annotations

import json
from typing import Final

from kernel_loader.errors import IntegrityError, LockMismatch, SourceError, UnknownVersion
from kernel_loader.index import Entry
from kernel_loader.lock import Lock
from kernel_loader.published import PublishedBuilds
from kernel_loader.sources import Fetched, Listing, Request
from kernel_loader.sources.hub import RemoteFile
from kernel_loader.store import Store

_GONE: Final = (
    "Bring the build from a machine that has it (`kernel-loader export`, `import`), or take up what is there now: "
    "`kernel-loader lock --upgrade`."
)


class LockedBuilds(PublishedBuilds):
    """The source `hub`, at the commits of a lock.

    Where the lock names all builds, a build that is not in the store costs one GET a file, and nothing else. Where it
    names commits alone, that commit is listed as a revision that never moves.
    """

    def __init__(self, store: Store, lock: Lock, *, offline: bool, refresh_after: float) -> None:
        super().__init__(store, offline=offline, refresh_after=refresh_after)
        self._lock: Final = lock
        self._entries: Final[dict[Request, Entry]] = {}

    def listing(self, request: Request) -> Listing:
        """The builds that are locked.

        Raises:
            LockMissing, LockStale: the lock does not name the repository, or not at this version.
        """
        locked = self._lock.find(request)
        if locked.builds is None:
            return super().listing(Request(request.repo, revision=locked.commit))
        return Listing(request.repo, request.git_revision, tuple(locked.builds), locked.commit)

    def versions(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002 - a lock has one version
        """No others: what is not locked is not loaded."""
        return ()

    def _entry(self, listing: Listing) -> Entry:
        request = Request(listing.repo, revision=listing.revision)
        locked = self._lock.find(request)
        if locked.builds is None:
            return super()._entry(listing)
        if request not in self._entries:
            self._entries[request] = Entry(
                request=request,
                commit=locked.commit,
                names=tuple(locked.builds),
                metadata={name: json.dumps(build.metadata.document()) for name, build in locked.builds.items()},
                builds={name: build.digest for name, build in locked.builds.items()},
            )
        return self._entries[request]

    def _remember(self, entry: Entry) -> Entry:
        # The lock remembers; in the index, programs that are not locked have what they asked for.
        commits_alone = self._lock.find(entry.request).builds is None
        return super()._remember(entry) if commits_alone else entry

    def _files(self, entry: Entry, name: str) -> tuple[RemoteFile, ...]:
        builds = self._lock.find(entry.request).builds
        if builds is None:
            return super()._files(entry, name)
        return tuple(RemoteFile(file.path, file.size, "", file.sha256) for file in builds[name].files)

    def _told(self, entry: Entry, name: str) -> tuple[RemoteFile, ...] | None:
        locked = self._lock.find(entry.request).builds is not None
        return self._files(entry, name) if locked else super()._told(entry, name)

    def _download(self, entry: Entry, name: str) -> Fetched:
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return super()._download(entry, name)
        except IntegrityError as error:
            detail = f"{entry.request}, {name}: {', '.join(error.violations)}"
            raise LockMismatch(self._lock.file, detail) from error
        except (UnknownVersion, EntryNotFoundError) as error:
            detail = f"the Hub no longer has its commit {entry.commit[:12]}, or not all of {name}"
            raise SourceError(str(entry.request), detail, _GONE) from error
