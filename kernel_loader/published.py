"""Builds that are published on the Hub: what is known of them here first, and the Hub where that is not enough.

Cold: one request for the commit, one for the names below `build/`, one for each metadata.json that is tried, one for
the files of the chosen build, then one GET a file, many at once. Warm: none.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kernel_loader.digest import size_of, violations
from kernel_loader.errors import HubUnavailable, IntegrityError, NotCached, SourceError, StoreError
from kernel_loader.index import Entry, Index, parse_metadata
from kernel_loader.metadata import FILE_NAME, Metadata
from kernel_loader.sources import Fetched, Listing, Request
from kernel_loader.store import Source as Published, Store

if TYPE_CHECKING:  # a warm load needs neither
    from kernel_loader.sources.hf_cache import CachedBuild, HFCache
    from kernel_loader.sources.hub import Hub, RemoteFile

logger = logging.getLogger("kernel_loader")

PARALLEL: Final = 32


class PublishedBuilds:
    """The source `hub`: repositories on the Hub, through the index and the store.

    Args:
        store: where builds are kept.
        offline: never ask the Hub.
        refresh_after: seconds after which a version that may have moved is asked about again.
        now: the clock.
        retries: how often a refused request is tried again where nothing here can serve instead.
    """

    kind = "hub"
    is_local = False

    def __init__(
        self,
        store: Store,
        *,
        offline: bool,
        refresh_after: float,
        now: Callable[[], float] = time.time,
        retries: int = 4,
    ) -> None:
        self.index: Final = Index(store)
        self._store: Final = store
        self._offline: Final = offline
        self._refresh_after: Final = refresh_after
        self._now: Final = now
        self._retries: Final = retries
        self._listed: Final[dict[tuple[str, str, str], Future[tuple[RemoteFile, ...]]]] = {}
        self._measured: Final[dict[tuple[str, str, str], tuple[RemoteFile, ...]]] = {}
        self._leases: Final[dict[str, int | None]] = {}

    # --- what a source answers ------------------------------------------------------------------------------------

    def listing(self, request: Request) -> Listing:
        """The builds of a repository, from the index while that is fresh.

        Raises:
            NotCached: the Hub must not be asked, and nothing is known here.
            HubUnavailable, RepositoryMissing, UnknownVersion: the Hub's answer, where nothing is known here.
        """
        entry = self.index.get(request)
        if entry is None or entry.names is None or self._is_due(entry):
            entry = self._ask(request, entry)
        names = entry.names if entry.names is not None else tuple(entry.builds)
        return Listing(repo=request.repo, revision=request.git_revision, names=names, commit=entry.commit)

    def metadata(self, listing: Listing, name: str) -> Metadata:
        """What a build says of itself; asked for once."""
        entry = self._entry(listing)
        if name not in entry.metadata:
            entry = self._read_metadata(entry, name)
        return parse_metadata(entry.metadata[name], f"{entry.request}, {name}/{FILE_NAME}")

    def fetch(self, listing: Listing, name: str) -> Fetched:
        """The build in the store, verified; brought there from the Hugging Face cache or the Hub where it is not.

        A build whose files have changed on disk is fetched again where the Hub may be asked, and refused elsewhere.
        """
        entry = self._entry(listing)
        try:
            if (stored := self._stored(entry, name)) is not None:
                return stored
        except IntegrityError as error:
            if self._offline:
                raise
            logger.warning("%s: %s It is fetched again.", entry.request, error.problem)
        with self._store.lock(f"{entry.request.repo}@{entry.commit}/{name}"):
            entry = self._entry(listing)  # another process may have fetched it while this one waited
            stored = self._stored(entry, name, repair=not self._offline)
            return stored or self._adopt(entry, name) or self._download(entry, name)

    def hold(self, fetched: Fetched) -> None:
        """Keep a build from being pruned as long as this process lives."""
        if fetched.digest not in self._leases:
            self._leases[fetched.digest] = self._store.lease(fetched.path)

    def measure(self, listing: Listing, name: str) -> tuple[Fetched | None, int]:
        """A build as far as it is in the store, and the bytes of its files; asked of the Hub where it is not."""
        entry = self._entry(listing)
        with contextlib.suppress(*(() if self._offline else (IntegrityError,))):  # `fetch` brings it anew
            if (stored := self._stored(entry, name)) is not None:
                return stored, size_of(stored.path)
        if (cached := self._cached(entry, name)) is not None and self._offline:
            return None, size_of(cached.directory)
        if self._offline:
            self._not_cached(entry.request)
        files = self._measured[entry.request.repo, entry.commit, name] = self._files(entry, name)
        return None, sum(file.size for file in files)

    def known(self, listing: Listing) -> Entry:
        """What is known of a repository, at the commit that was listed."""
        return self._entry(listing)

    def versions(self, request: Request) -> tuple[int, ...]:
        """The versions of a repository, as far as the Hub can be asked."""
        if self._offline:
            return ()
        try:
            return self._hub(patient=False).versions(request)
        except SourceError:
            return ()

    def trusts(self, publisher: str) -> bool:
        """Whether the Hub marks a publisher as trusted."""
        return self._hub().trusts(publisher)

    # --- the index, and what it lacks -----------------------------------------------------------------------------

    def _is_due(self, entry: Entry) -> bool:
        return not (self._offline or entry.is_fixed) and self._now() - entry.checked >= self._refresh_after

    def _entry(self, listing: Listing) -> Entry:
        request = Request(repo=listing.repo, revision=listing.revision)
        entry = self.index.get(request)
        if entry is None or entry.commit != listing.commit:
            # The revision moved, in another process: what was listed stays what is loaded.
            return Entry(request=request, commit=listing.commit or "", names=listing.names)
        return entry

    def _ask(self, request: Request, known: Entry | None) -> Entry:
        if self._offline:
            return known or self._from_hf_cache(request) or self._not_cached(request)
        try:
            commit = self._hub(patient=known is None).commit(request)
            if known is not None and known.commit == commit and known.names is not None:
                return self._remember(known._replace(checked=self._now()))
            names = self._hub().names(request, commit)
        except HubUnavailable as error:
            answer = known or self._from_hf_cache(request)
            if answer is None:
                raise
            logger.warning("%s: what is known here serves. %s", request, error.problem)
            return answer
        return self._remember(Entry(request=request, commit=commit, names=names, checked=self._now()))

    def _remember(self, entry: Entry) -> Entry:
        # An index that cannot be written costs requests, not the load.
        with contextlib.suppress(StoreError):
            return self.index.put(entry)
        return entry

    def _read_metadata(self, entry: Entry, name: str) -> Entry:
        cached = self._cached(entry, name)
        content = cached.metadata if cached is not None else self._hub_metadata(entry, name)
        text = content.decode("utf-8", errors="replace") if content is not None else None
        parse_metadata(text, f"{entry.request}, {name}/{FILE_NAME}")
        return self._remember(entry._replace(metadata={**entry.metadata, name: text}))

    def _hub_metadata(self, entry: Entry, name: str) -> bytes | None:
        if self._offline:
            self._not_cached(entry.request)
        if not self._listed:
            # The best build by its name is nearly always the one that is fetched: its files are listed meanwhile.
            pool = ThreadPoolExecutor(1, thread_name_prefix="kernel-loader-listing")
            key = (entry.request.repo, entry.commit, name)
            self._listed[key] = pool.submit(self._hub().files, entry.request, entry.commit, name)
            pool.shutdown(wait=False)
        return self._hub().metadata(entry.request, entry.commit, name)

    def _files(self, entry: Entry, name: str) -> tuple[RemoteFile, ...]:
        key = (entry.request.repo, entry.commit, name)
        if key in self._measured:
            return self._measured[key]
        listed = self._listed.pop(key, None)
        return listed.result() if listed is not None else self._hub().files(entry.request, entry.commit, name)

    def _not_cached(self, request: Request) -> Any:  # noqa: ANN401 - never returns
        raise NotCached(str(request))

    # --- the Hugging Face cache -----------------------------------------------------------------------------------

    def _from_hf_cache(self, request: Request) -> Entry | None:
        for cache in _hf_caches():
            commit = cache.commit(request)
            names = cache.names(request, commit) if commit else ()
            if commit and names:
                return Entry(request=request, commit=commit, names=names)
        return None

    def _cached(self, entry: Entry, name: str) -> CachedBuild | None:
        for cache in _hf_caches():
            if (build := cache.build(entry.request, entry.commit, name)) is not None:
                return build
        return None

    def _adopt(self, entry: Entry, name: str) -> Fetched | None:
        """Take a build from the Hugging Face cache, when all of it is there and is what was published."""
        cached = self._cached(entry, name)
        if cached is None:
            return None
        listed = self._told(entry, name)
        with self._store.staging() as staging:
            hashes = cached.copy(staging, listed)
            if hashes is None:
                return None
            return self._publish(entry, name, staging, hashes)

    def _told(self, entry: Entry, name: str) -> tuple[RemoteFile, ...] | None:
        """What a build consists of, as far as it may be asked."""
        return None if self._offline else self._files(entry, name)

    # --- the Hub --------------------------------------------------------------------------------------------------

    def _hub(self, *, patient: bool = True) -> Hub:
        """The Hub, asked only once where something that is here can serve instead."""
        from kernel_loader.sources.hub import Hub

        return Hub(self._retries if patient else 0)

    def _download(self, entry: Entry, name: str) -> Fetched:
        if self._offline:
            self._not_cached(entry.request)
        files = self._files(entry, name)
        if not files:
            raise SourceError(f"{entry.request}, {name}", "the Hub lists no file of it", "Report it to its author.")
        with self._store.staging() as staging, _progress(entry, name, files) as tell:
            for directory in {(staging / file.path).parent for file in files}:
                directory.mkdir(parents=True, exist_ok=True)

            def bring(file: RemoteFile) -> tuple[str, str]:
                return file.path, self._bring(entry, name, file, staging / file.path, tell)

            with ThreadPoolExecutor(PARALLEL, thread_name_prefix="kernel-loader") as pool:
                futures = [pool.submit(bring, file) for file in files]
                try:
                    hashes = dict(future.result() for future in futures)
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            return self._publish(entry, name, staging, hashes)

    def _bring(self, entry: Entry, name: str, file: RemoteFile, target: Path, tell: Callable[[int], object]) -> str:
        text = entry.metadata.get(name) if file.path == FILE_NAME else None
        if text is not None and file.is_content(text.encode()):
            target.write_bytes(text.encode())  # read when the build was chosen
            return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        return self._hub().download(entry.request, entry.commit, name, file, target, tell)

    def _publish(self, entry: Entry, name: str, staging: Path, hashes: dict[str, str]) -> Fetched:
        text = (staging / FILE_NAME).read_bytes() if FILE_NAME in hashes else b"{}"
        metadata = Metadata.parse(text, f"{entry.request}, {name}/{FILE_NAME}")
        if metadata.digest is not None and (found := violations(staging, metadata.digest, hashes)):
            raise IntegrityError(f"{entry.request}, {name}", found, "Do not use it before its author has looked at it.")
        source = Published(entry.request.repo, entry.request.git_revision or "main", entry.commit, name)
        directory, digest = self._store.publish(staging, hashes, source)
        self._remember(entry._replace(builds={**entry.builds, name: digest}))
        return Fetched(path=directory, digest=digest)

    def _stored(self, entry: Entry, name: str, *, repair: bool = False) -> Fetched | None:
        digest = entry.builds.get(name)
        directory = self._store.find(digest, repair=repair) if digest is not None else None
        return Fetched(path=directory, digest=digest) if directory is not None and digest is not None else None


def _hf_caches() -> tuple[HFCache, ...]:
    from kernel_loader.sources.hf_cache import HFCache

    return HFCache.all()


@contextlib.contextmanager
def _progress(entry: Entry, name: str, files: tuple[RemoteFile, ...]) -> Iterator[Callable[[int], object]]:
    """A bar for the whole build, where a person watches and has not switched bars off."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from huggingface_hub.utils import tqdm

    total = sum(file.size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"{entry.request} {name}", leave=False) as bar:  # type: ignore[no-untyped-call]
        yield bar.update
