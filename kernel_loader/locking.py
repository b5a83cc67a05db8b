"""Making a lock: every repository that kernels may come from, with all its builds, as the Hub has them now.

For a repository: one request for the commit, one listing of all builds, one GET for each metadata.json that differs,
and one for each small file whose sha256 nobody tells. Large files are listed with theirs, and are not fetched.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import tempfile
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

from kernel_loader.arguments import each
from kernel_loader.errors import MetadataError, NotCached, RequestError, SourceError
from kernel_loader.lock import Lock, LockedBuild, LockedFile, LockedKernel, LockedRepository, Place
from kernel_loader.manifest import Manifest
from kernel_loader.metadata import FILE_NAME, Digest, Metadata
from kernel_loader.published import PARALLEL
from kernel_loader.sources import Request
from kernel_loader.sources.hub import Hub, RemoteFile
from kernel_loader.variant import is_variant

logger = logging.getLogger("kernel_loader")

_LEFT_OUT: Final = "%s: %s is left out of the lock: %s"


class Locker:
    """Locks kernels.

    Args:
        manifests: the manifests that a text stands for: a name, a capability or a repository, as on the command line.
        admit: lets a repository's code pass, or raises `TrustError`; told whether a manifest names it.
        offline: never ask the Hub.
    """

    def __init__(
        self,
        manifests: Callable[[str], tuple[Manifest, ...]],
        admit: Callable[[Request, bool], None],
        *,
        offline: bool,
    ) -> None:
        self._manifests: Final = manifests
        self._admit: Final = admit
        self._offline: Final = offline

    def lock(self, kernels: Iterable[str], known: Lock | None = None, upgrade: Collection[str] | None = ()) -> Lock:
        """The lock of some kernels.

        Args:
            kernels: as on the command line. Kernels that are only embedded are part of this package, and of no lock.
            known: what it locks stays as it is.
            upgrade: kernels of `known` that are looked at anew, with all that they depend on; None for all of them.

        Raises:
            RequestError: a kernel to upgrade is none of them.
            TrustError: nobody has said that a repository's code may run.
            SourceError, UnknownVersion: the Hub cannot be asked, or has no such repository or version.
            UnknownKernel, ManifestError: as `load_kernel`.
        """
        asked = {locked.name: locked for text in kernels for locked in self._kernels(text)}
        anew = asked.keys() if upgrade is None else self._named(each(upgrade, "upgrade"), asked)
        queue = deque[tuple[Request, bool, bool]]()
        for kernel in asked.values():
            for place in kernel.places:
                _add(queue, place.request, new=kernel.name in anew, named="/" not in kernel.name)
        found: dict[Request, LockedRepository] = {}
        while queue:
            request, new, named = queue.popleft()
            if request in found:
                continue
            kept = None if new or known is None else _kept(known, request)
            if kept is None or kept.builds is None:
                kept = self._pin(request, kept.commit if kept is not None else None, named=named)
            found[request] = kept
            for needed in _dependencies(found[request]):
                _add(queue, needed, new=new, named=False)
        repositories = sorted(found.values(), key=lambda locked: (locked.request.repo, str(locked.request)))
        return Lock(tuple(asked[name] for name in sorted(asked)), tuple(repositories))

    def _named(self, texts: Iterable[str], asked: Collection[str]) -> set[str]:
        """The kernels that are meant, of those that were asked for."""
        names = set[str]()
        for text in texts:
            meant = {kernel.name for kernel in self._kernels(text)} & set(asked)
            if not meant:
                advice = f"There are {', '.join(asked) or 'none'}."
                raise RequestError(f"{text} is to be upgraded, and is not locked", advice)
            names |= meant
        return names

    def _kernels(self, text: str) -> Iterable[LockedKernel]:
        for manifest in self._manifests(text):
            _, at, revision = text.partition("@")
            places = (one for one in (manifest, *manifest.alternatives) if one.repo is not None)
            # Asked for by another version, or as a repository: it is spelt with it.
            name = f"{manifest.name}@{revision}" if at else manifest.name
            if locked := tuple(Place(_request(place), place.backends, place.requires) for place in places):
                yield LockedKernel(name, locked)

    # --- one repository -------------------------------------------------------------------------------------------

    def _pin(self, request: Request, commit: str | None, *, named: bool) -> LockedRepository:
        """A repository at a commit; by default at that where the Hub has it now."""
        if self._offline:
            detail = "it is not locked yet, and the Hub must not be asked (offline mode)"
            raise NotCached(str(request), detail, "Run `kernel-loader lock` where the Hub can be asked.")
        self._admit(request, named)
        hub = Hub()
        commit = commit or hub.commit(request)
        listed = {name: files for name, files in hub.builds(request, commit).items() if is_variant(name)}
        if not listed:
            raise SourceError(str(request), "it has no builds", "Check its name and version.")
        with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(PARALLEL) as pool:
            bring = _Contents(hub, request, commit, Path(directory))
            about = {name: bring.later(pool, name, _file(files, FILE_NAME)) for name, files in listed.items()}
            read: dict[str, Metadata] = {}
            for name, files in listed.items():
                metadata, wrong = _examined(files, about[name]())
                if wrong:
                    logger.warning(_LEFT_OUT, request, name, wrong)
                else:
                    read[name] = metadata
            texts = {
                (name, file.path): bring.later(pool, name, file)
                for name, metadata in read.items()
                for file in listed[name]
                if _told(file, metadata.digest) is None
            }
            builds = {}
            for name, metadata in read.items():
                hashed = (_locked(f, metadata.digest, texts.get((name, f.path))) for f in listed[name])
                build = LockedBuild.of(name, hashed, metadata)
                if build.problem:
                    logger.warning(_LEFT_OUT, request, name, build.problem)
                else:
                    builds[name] = build
        return LockedRepository(request, commit, builds)


class _Contents:
    """Files of a commit, each brought once however many builds have it."""

    def __init__(self, hub: Hub, request: Request, commit: str, directory: Path) -> None:
        self._hub, self._request, self._commit, self._directory = hub, request, commit, directory
        self._coming: dict[str, Callable[[], tuple[Path, str]]] = {}

    def later(
        self, pool: ThreadPoolExecutor, build: str, file: RemoteFile | None
    ) -> Callable[[], tuple[Path, str] | None]:
        """Where the content will be, and its sha256 in hexadecimal."""
        if file is None:
            return lambda: None
        if file.blob not in self._coming:
            self._coming[file.blob] = pool.submit(self._bring, build, file).result
        return self._coming[file.blob]

    def _bring(self, build: str, file: RemoteFile) -> tuple[Path, str]:
        target = self._directory / hashlib.sha256(file.blob.encode()).hexdigest()
        hashed = self._hub.download(self._request, self._commit, build, file, target, lambda _: None)
        return target, base64.b64decode(hashed).hex()


def _add(queue: deque[tuple[Request, bool, bool]], request: Request, *, new: bool, named: bool) -> None:
    """What is looked at anew comes first, so that nothing that depends on it too keeps the old one."""
    # The branch of a version is the version, however it was spelt.
    match = re.fullmatch(r"v(0|[1-9]\d{0,8})", request.revision or "", re.ASCII)
    request = Request(request.repo, int(match[1])) if match is not None else request
    (queue.appendleft if new else queue.append)((request, new, named))


def _kept(known: Lock, request: Request) -> LockedRepository | None:
    """Where a lock has a repository, at this version or revision; one that names none means any."""
    same = (one for one in known.repositories if one.request.repo == request.repo)
    found = next((one for one in same if one.request.git_revision in (None, request.git_revision)), None)
    return replace(found, request=request) if found is not None else None


def _request(manifest: Manifest) -> Request:
    assert manifest.repo is not None, "only asked for kernels that have one"
    return Request(manifest.repo, manifest.version, manifest.revision)


def _dependencies(locked: LockedRepository) -> Iterable[Request]:
    builds = (locked.builds or {}).values()
    needed = {Request(*dependency) for build in builds for dependency in build.metadata.kernel_depends}
    return sorted(needed, key=str)


def _file(files: Iterable[RemoteFile], path: str) -> RemoteFile | None:
    return next((file for file in files if file.path == path), None)


def _examined(files: Iterable[RemoteFile], brought: tuple[Path, str] | None) -> tuple[Metadata, str]:
    """What a build says of itself, and what is wrong with it; such a build is refused wherever it is loaded."""
    try:
        metadata = Metadata.parse(brought[0].read_bytes(), FILE_NAME) if brought is not None else Metadata()
    except MetadataError as error:
        return Metadata(), f"{FILE_NAME} cannot be read, {error.detail}"
    return metadata, _wrong(files, metadata.digest)


def _told(file: RemoteFile, digest: Digest | None) -> str | None:
    """The sha256 of a file in hexadecimal, by the listing or by its build's own digests."""
    if file.sha256 is not None:
        return file.sha256
    told = digest.files.get(file.path) if digest is not None and digest.algorithm == "sha256" else None
    return base64.b64decode(told).hex() if told is not None else None


def _locked(
    file: RemoteFile, digest: Digest | None, brought: Callable[[], tuple[Path, str] | None] | None
) -> LockedFile:
    content = brought() if brought is not None else None
    sha256 = content[1] if content is not None else _told(file, digest)
    assert sha256 is not None, "what nobody tells is brought"
    return LockedFile(file.path, file.size, sha256)


def _wrong(files: Iterable[RemoteFile], digest: Digest | None) -> str:
    """How a build differs from its own digests, as far as the listing tells."""
    if digest is None:
        return ""
    listed: Mapping[str, RemoteFile] = {file.path: file for file in files if file.path != FILE_NAME}
    if differ := sorted(listed.keys() ^ digest.files.keys()):
        return f"{differ[0]} is {'missing' if differ[0] in digest.files else 'not in its digests'}"
    if digest.algorithm == "sha256":
        for path, file in listed.items():
            if file.sha256 is not None and base64.b64decode(digest.files[path]).hex() != file.sha256:
                return f"{path} has other content than its digests say"
    return ""
