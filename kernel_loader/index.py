"""The index: what was asked of the Hub, and what it answered. It lets a build that is here be loaded with no request.

One JSON file a question (repository and revision) below `<root>/index/`, one a publisher below `<root>/publishers/`.
Files are replaced whole. What the index loses is rebuilt from the receipts of the store, or asked again. The root alone
is written; what the shared directories of a store remember counts as much.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from kernel_loader.errors import BundleError
from kernel_loader.metadata import Metadata
from kernel_loader.resources import INSTALLED
from kernel_loader.sources import Request
from kernel_loader.store import SCHEMA, Store, is_digest, read_json

if TYPE_CHECKING:  # few machines have packages of builds
    from kernel_loader.carry.contents import Bundle, BundledRepository

logger = logging.getLogger("kernel_loader")

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Entry(NamedTuple):
    """What is known of a repository at a revision.

    Attributes:
        commit: where the revision stood.
        names: all builds at that commit; None when only those in `builds` are known.
        metadata: build -> text of its metadata.json; None where it has none.
        builds: build -> digest in the store, of the builds that were fetched.
        checked: when the commit was asked for, in seconds of the epoch.
    """

    request: Request
    commit: str
    names: tuple[str, ...] | None
    metadata: Mapping[str, str | None] = _NONE
    builds: Mapping[str, str] = _NONE
    checked: float = 0.0

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is a commit, which never moves."""
        return len(revision := self.request.git_revision or "") == 40 and not revision.strip("0123456789abcdef")

    def merge(self, other: Entry | None) -> Self:
        """This answer, with what another process has learned of the same commit."""
        if other is None or other.commit != self.commit:
            return self
        return self._replace(
            names=self.names if self.names is not None else other.names,
            metadata={**other.metadata, **self.metadata},
            builds={**other.builds, **self.builds},
        )


class Index:
    """Answers by question, on disk."""

    def __init__(self, store: Store) -> None:
        self._store: Final = store

    def get(self, request: Request) -> Entry | None:
        """The answer that is remembered, or that the receipts of the store still tell.

        That of the directory where the commit was asked for last, with what the others know of the same commit.
        """
        for answers in (_remembered, self._from_receipts):
            found = [entry for home in self._store.directories if (entry := answers(home, request)) is not None]
            if found:
                newest = max(found, key=lambda entry: entry.checked)  # of equal ones the first
                return functools.reduce(Entry.merge, (entry for entry in found if entry is not newest), newest)
        return None

    def put(self, entry: Entry) -> Entry:
        """Remember an answer, together with what other processes have learned meanwhile."""
        entry = entry.merge(self.get(entry.request))
        self._store.write(
            _file(self._store.root, entry.request),
            {
                "schema": SCHEMA,
                "repo": entry.request.repo,
                "revision": entry.request.git_revision,
                "commit": entry.commit,
                "names": None if entry.names is None else list(entry.names),
                "metadata": dict(entry.metadata),
                "builds": dict(entry.builds),
                "checked": entry.checked if math.isfinite(entry.checked) else 0.0,
            },
        )
        return entry

    def publisher(self, name: str) -> tuple[bool, float] | None:
        """Whether a publisher was trusted by the Hub when it was asked last, and when that was."""
        found = [said for home in self._store.directories if (said := _said_of(home, name)) is not None]
        return max(found, key=lambda said: said[1], default=None)

    def put_publisher(self, name: str, *, trusted: bool, asked: float) -> None:
        """Remember what the Hub says of a publisher."""
        document = {"schema": SCHEMA, "publisher": name, "trusted": trusted, "asked": asked}
        self._store.write(_publisher_file(self._store.root, name), document)

    def _from_receipts(self, home: Path, request: Request) -> Entry | None:
        found: dict[str, dict[str, str]] = {}
        for stored in self._store.builds_in(home):
            for source in stored.sources:
                if source.repo == request.repo and request.git_revision in (source.revision, source.commit):
                    found.setdefault(source.commit, {})[source.variant] = stored.digest
        if not found:
            return None
        commit, builds = list(found.items())[-1]
        metadata = {name: self._stored_metadata(digest) for name, digest in builds.items()}
        return Entry(request=request, commit=commit, names=None, metadata=metadata, builds=builds)

    def _stored_metadata(self, digest: str) -> str | None:
        directory = self._store.find(digest)
        file = directory / "metadata.json" if directory else None
        return file.read_text(encoding="utf-8") if file is not None and file.is_file() else None


def _remembered(home: Path, request: Request) -> Entry | None:
    """What one directory knows of a request. An installed package knows it for as long as it is there."""
    if (package := _package(home)) is not None:
        found = next((one for one in package.repositories if (one.repo, one.revision) == _asked(request)), None)
        return entry_of(found)._replace(request=request, checked=math.inf) if found is not None else None
    document = read_json(_file(home, request))
    if document is None or document.get("repo") != request.repo or not _is_entry(document):
        return None
    return Entry(
        request=request,
        commit=document["commit"],
        names=None if document["names"] is None else tuple(document["names"]),
        metadata=document["metadata"],
        builds=document["builds"],
        checked=document["checked"],
    )


def _said_of(home: Path, publisher: str) -> tuple[bool, float] | None:
    """What one directory knows of a publisher; that of an installed package counts until the Hub is asked."""
    if (package := _package(home)) is not None:
        return (True, 0.0) if publisher in package.publishers else None
    document = read_json(_publisher_file(home, publisher))
    if document is None or document.get("publisher") != publisher or not isinstance(document.get("trusted"), bool):
        return None
    return document["trusted"], float(document.get("asked", 0.0))


def entry_of(repository: BundledRepository) -> Entry:
    """What a bundle knows of a repository."""
    request = Request(repository.repo, revision=repository.revision)
    return Entry(request, repository.commit, repository.names, repository.metadata, repository.builds)


def _asked(request: Request) -> tuple[str, str]:
    return request.repo, request.git_revision or "main"


def _package(home: Path) -> Bundle | None:
    """An installed package; a damaged one holds nothing, and is told of."""
    if home.parent.name != INSTALLED:
        return None
    from kernel_loader.carry.contents import installed

    try:
        return installed(home)
    except BundleError as error:
        _tell(str(error))
        return None


@functools.cache
def _tell(message: str) -> None:
    logger.warning("%s", message)


def _file(home: Path, request: Request) -> Path:
    return home / "index" / _file_name(f"{request.repo}@{request.git_revision}")


def _publisher_file(home: Path, name: str) -> Path:
    return home / "publishers" / f"{_readable(name)}.json"


@functools.lru_cache(maxsize=256)
def _file_name(asked: str) -> str:
    # The hash keeps apart what a file system that folds case would not.
    return f"{_readable(asked)[:80]}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json"


def _readable(text: str) -> str:
    return re.sub(r"[^\w.@\-]+", "--", text, flags=re.ASCII)


def _is_entry(document: dict[str, Any]) -> bool:
    names, metadata, builds = (document.get(key) for key in ("names", "metadata", "builds"))
    return (
        re.fullmatch(r"[0-9a-f]{40}", str(document.get("commit"))) is not None
        and isinstance(document.get("checked"), int | float)
        and isinstance(metadata, dict)
        and all(isinstance(text, str | None) for text in metadata.values())
        and isinstance(builds, dict)
        and all(is_digest(digest) for digest in builds.values())
        and (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)))
    )


def parse_metadata(text: str | None, file: str) -> Metadata:
    """The metadata that an entry remembers.

    Raises:
        MetadataError: the text is damaged.
    """
    return Metadata() if text is None else Metadata.parse(text, file)
