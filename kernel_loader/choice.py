"""Which build is loaded for a kernel on a host: a published one that fits, or else the reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kernel_loader.errors import KernelLoaderError, NoCompatibleBuild, SourceError
from kernel_loader.host import Host
from kernel_loader.manifest import Manifest, normalise
from kernel_loader.resolver import Resolution, Verdict, resolve
from kernel_loader.settings import Fallback, Settings
from kernel_loader.sources import Listing, LocalDirectories, Request, Source, embedded

# How many other versions of a repository are looked at when nothing fits in the one that was asked for.
_OTHER_VERSIONS: Final = 5


class Ask(NamedTuple):
    """What a caller asks for, normalised: what is equal here is loaded once. `bundle` is None for a module."""

    manifest: Manifest
    bundle: type | None = None
    backend: str | None = None
    fallback: Fallback | None = None

    @property
    def request(self) -> Request | None:
        """The repository and revision that builds come from; None for a kernel that has reference builds alone."""
        m = self.manifest
        return Request(repo=m.repo, version=m.version, revision=m.revision) if m.repo else None


class Resolved(NamedTuple):
    """A resolution, and where its builds are; neither source nor listing where nothing was listed."""

    resolution: Resolution
    source: Source | None = None
    listing: Listing | None = None


class Choice(NamedTuple):
    """The build to load, why it is this one, and what the user should be warned of."""

    source: Source
    listing: Listing
    build: Verdict
    reference: bool
    why: str
    warning: str = ""


class Chooser:
    """Chooses among the builds that sources have.

    Args:
        settings: which kernels are disabled, and whether doubt is refused.
        sources: where builds come from, the first that has a repository.
    """

    def __init__(self, settings: Settings, sources: Sequence[Source]) -> None:
        self._sources: Final = tuple(sources)
        self._strict: Final = settings.strict
        self._disabled: Final = frozenset(normalise(name) for name in settings.disable)

    def choose(self, ask: Ask, host: Host) -> Choice:
        """The best build that fits, or the reference where none does.

        Raises:
            NoCompatibleBuild: nothing fits, and the reference is refused or there is none.
        """
        resolved = self.resolve(ask, host)
        if resolved.resolution.chosen is not None:
            return _of_build(resolved, ask)
        if ask.fallback == "error" or ask.manifest.reference is None:
            raise self._nothing_fits(ask, resolved)
        error = NoCompatibleBuild(resolved.resolution.repo, resolved.resolution)
        return self.reference(ask, host, error.problem, f"uses the slow reference. {error}" if ask.request else "")

    def reference(self, ask: Ask, host: Host, why: str, warning: str) -> Choice:
        """The best reference build of the kernel.

        Raises:
            NoCompatibleBuild: not even that fits.
        """
        resolved = _resolve_reference(ask.manifest, host.select(ask.backend))
        if resolved.resolution.chosen is None:
            raise NoCompatibleBuild(resolved.resolution.repo, resolved.resolution)
        return _of_build(resolved, ask)._replace(reference=True, why=why, warning=warning)

    def resolve(self, ask: Ask, host: Host) -> Resolved:
        """What fits a host, and where it is."""
        host = host.select(ask.backend)
        resolved = self._resolve_builds(ask, host)
        if resolved.resolution.chosen is not None or ask.manifest.reference is None:
            return resolved
        reference = _resolve_reference(ask.manifest, host).resolution
        return resolved._replace(resolution=resolved.resolution._replace(reference=reference))

    def _resolve_builds(self, ask: Ask, host: Host) -> Resolved:
        manifest, request = ask.manifest, ask.request
        if request is None:
            return Resolved(Resolution(manifest.name, host, note="it has reference builds alone"))
        if manifest.name in self._disabled:
            return Resolved(Resolution(str(request), host, note="it is disabled here, by KERNEL_LOADER_DISABLE"))
        excluded = bool(manifest.backends) and host.backend.kind not in manifest.backends
        # A directory that the user names is looked at all the same: it may hold more than what is published.
        for source in self._sources:
            if (source.is_local or not excluded) and (listing := source.listing(request)) is not None:
                return self._among(source, listing, ask, host)
        if excluded:
            note = f"it is for {', '.join(manifest.backends)}, and this host computes on {host.backend.kind}"
            return Resolved(Resolution(str(request), host, note=note))
        raise _nowhere(request)

    def _among(self, source: Source, listing: Listing, ask: Ask, host: Host) -> Resolved:
        resolution = resolve(
            listing.names,
            host,
            repo=str(ask.request),
            requires=ask.manifest.requires,
            read_metadata=functools.partial(source.metadata, listing),
            strict=self._strict,
        )
        return Resolved(resolution, source, listing)

    def _nothing_fits(self, ask: Ask, resolved: Resolved) -> NoCompatibleBuild:
        """The error, with the newest other version of the repository that has a build for the host."""
        resolution, request, source = resolved.resolution, ask.request, resolved.source
        error = NoCompatibleBuild(resolution.repo, resolution)
        if request is None or source is None:
            return error
        others = [version for version in source.versions(request) if version != request.version]
        for version in others[: -_OTHER_VERSIONS - 1 : -1]:
            try:
                listing = source.listing(request._replace(version=version, revision=None))
            except KernelLoaderError:
                continue
            if listing and resolve(listing.names, resolution.host, requires=ask.manifest.requires).chosen:
                return NoCompatibleBuild(resolution.repo, resolution, version)
        return error


def _of_build(resolved: Resolved, ask: Ask) -> Choice:
    build, source, listing = resolved.resolution.chosen, resolved.source, resolved.listing
    assert build is not None, "only asked for a resolution that chose"
    assert source is not None, "what is chosen is from a source"
    assert listing is not None, "what is chosen is from a listing"
    fits = sum(verdict.status == "accepted" for verdict in resolved.resolution.verdicts)
    doubts = "; ".join(reason.message for reason in build.reasons)
    warning = f"uses {build.name}, which may not run on this host: {doubts}." if doubts else ""
    said, asked = build.metadata.version if build.metadata else None, ask.manifest.version
    if source.is_local and None not in (said, asked) and said != asked:
        warning += f"uses version {said} from {source.kind} {listing.repo}, and version {asked} was asked for."
    return Choice(
        source=source,
        listing=listing,
        build=build,
        reference=False,
        why=doubts or (f"the best of {fits} builds that fit" if fits > 1 else "the only build that fits"),
        warning=warning,
    )


def _resolve_reference(manifest: Manifest, host: Host) -> Resolved:
    assert manifest.reference is not None, "only asked for kernels that have one"
    beside, repo = Path(manifest.file).parent / "registry" / manifest.reference, f"registry/{manifest.reference}"
    source = LocalDirectories({manifest.reference: beside}) if beside.is_dir() else embedded()
    listing = source.listing(Request(repo=manifest.reference))
    if listing is None:
        detail = f"the reference of {manifest.name} is neither beside its manifest nor in this package"
        raise SourceError(repo, detail, "Correct `reference` in the manifest, or put the builds there.")
    read = functools.partial(source.metadata, listing)
    return Resolved(resolve(listing.names, host, repo=repo, read_metadata=read), source, listing)


def _nowhere(request: Request) -> SourceError:
    advice = (
        f"Set KERNEL_LOADER_LOCAL={request.repo}=DIRECTORY to use builds on this machine, or accept the slow "
        'reference with fallback="reference", where the kernel has one.'
    )
    return SourceError(str(request), "no source that is configured here has this repository", advice)
