"""Which build is loaded for a kernel on a host: a published one that fits, or else one that is embedded."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kernel_loader.errors import HubUnavailable, KernelLoaderError, NoCompatibleBuild, NotCached, SourceError
from kernel_loader.host import Host
from kernel_loader.manifest import Manifest, normalise
from kernel_loader.resolver import Candidate, Resolution, Verdict, resolve, said_of_all
from kernel_loader.rules import Advisory, version_of
from kernel_loader.settings import Fallback, Settings
from kernel_loader.sources import Listing, LocalDirectories, Request, Source, embedded
from kernel_loader.variant import REFERENCE

if TYPE_CHECKING:
    from kernel_loader.capability import Offer, Wanted

# How many other versions of a repository are looked at when nothing fits in the one that was asked for.
_OTHER_VERSIONS: Final = 5

# What KERNEL_LOADER_IGNORE_ADVISORIES calls every advisory.
_ALL: Final = "all"


class Ask(NamedTuple):
    """What a caller asks for, normalised: what is equal here is loaded once.

    `bundle` is None for a module, of which with `for_layers` nothing but layers is taken.
    """

    manifest: Manifest
    bundle: type | None = None
    backend: str | None = None
    fallback: Fallback | None = None
    for_layers: bool = False

    @property
    def request(self) -> Request | None:
        """The repository and revision that are asked first; None for a kernel that is only embedded."""
        return request_of(self.manifest)


class Looked(NamedTuple):
    """What was found in one place: neither source nor listing where nothing was listed.

    `manifest` is the kernel in that repository; None for the embedded builds.
    """

    resolution: Resolution
    manifest: Manifest | None = None
    source: Source | None = None
    listing: Listing | None = None


class Choice(NamedTuple):
    """The build to load, why it is this one, and what the user should be warned of.

    Attributes:
        manifest: the kernel in the repository that the build is from; None for an embedded build.
        warnings: sentences whose subject is the kernel.
        of_training: the same of faults that keep layers out of training, where only layers are taken.
        looked: what was found in each repository that was looked at before this build was chosen.
    """

    source: Source
    listing: Listing
    build: Verdict
    manifest: Manifest | None
    why: str
    warnings: tuple[str, ...] = ()
    of_training: tuple[str, ...] = ()
    looked: tuple[Looked, ...] = ()

    @property
    def request(self) -> Request | None:
        """The repository and revision that the build is from; None for an embedded build."""
        return request_of(self.manifest) if self.manifest is not None else None

    @property
    def embedded(self) -> bool:
        """Whether the build lies in a registry, beside the manifest or in this package."""
        return self.manifest is None

    @property
    def reference(self) -> bool:
        """Whether it is the reference: an embedded build for no backend in particular."""
        return self.embedded and self.build.is_universal

    @property
    def untrained(self) -> tuple[tuple[str, str], ...]:
        """As `Origin.untrained`."""
        return tuple(pair for note in self.build.notes for pair in note.untrained)

    @property
    def guards(self) -> Mapping[str, tuple[str, ...]]:
        """Field of the bundle -> names of its guards. Embedded builds keep what a bundle promises."""
        return _guards(self.manifest, self.build)


class Chooser:
    """Chooses among the builds that sources have.

    Args:
        settings: which kernels are disabled, which advisories are not heeded, and whether doubt is refused.
        sources: where builds come from, the first that has a repository.
        advisories: what is publicly known of a repository.
    """

    def __init__(
        self, settings: Settings, sources: Sequence[Source], advisories: Callable[[str], Sequence[Advisory]]
    ) -> None:
        self._sources: Final = tuple(sources)
        self._advisories: Final = advisories
        self._ignored: Final = settings.ignore_advisories
        self._strict: Final = settings.strict
        self._disabled: Final = frozenset(normalise(name) for name in settings.disable)

    def choose(self, ask: Ask, host: Host) -> Choice:
        """The best build that fits: of the repository, of the first alternative that has one, or embedded.

        Raises:
            NoCompatibleBuild: nothing fits, or only the reference, and that is refused.
        """
        host = host.select(ask.backend)
        looked = self.look(ask.manifest, host)
        if looked[-1].resolution.chosen is not None:
            return _choice(looked[-1])._replace(looked=tuple(looked))
        resolution = _together(looked)
        if ask.manifest.reference is None:
            raise self._nothing_fits(ask, looked[0], resolution)
        found = self._look_embedded(ask.manifest, host)
        # What a kernel without a repository has is embedded, and its reference is no surprise where it has no more.
        is_all = ask.request is None and ask.manifest.name not in self._disabled
        if is_all:
            resolution = _without_reference(found.resolution)
        taken = _choice(found) if found.resolution.chosen is not None else None
        choice = taken._replace(looked=tuple(looked)) if taken is not None else None
        if choice is None or (choice.reference and ask.fallback == "error"):
            raise self._nothing_fits(ask, looked[0], resolution)
        if is_all and not (choice.reference and resolution.verdicts):
            return choice
        error = NoCompatibleBuild(resolution.repo, resolution)
        warnings = (f"uses the slow reference. {error}",) if choice.reference else choice.warnings
        return choice._replace(why=error.problem, warnings=warnings)

    def reference(self, ask: Ask, host: Host, why: str = "", warning: str = "") -> Choice:
        """The reference of the kernel, whatever else fits.

        Raises:
            NoCompatibleBuild: it does not fit, or there is none.
        """
        if ask.manifest.reference is None:
            raise NoCompatibleBuild(ask.manifest.name, Resolution(ask.manifest.name, host, note="it has no reference"))
        found = self._look_embedded(ask.manifest, host.select(ask.backend), only_reference=True)
        if found.resolution.chosen is None:
            raise NoCompatibleBuild(found.resolution.repo, found.resolution)
        return _choice(found)._replace(why=why, warnings=(warning,) if warning else ())

    def resolve(self, ask: Ask, host: Host, *, partly: bool = False) -> Resolution:
        """What fits a host. With `partly`, a repository that cannot be asked leaves the rest to be told.

        Raises:
            SourceError: a repository cannot be asked, unless `partly`.
        """
        host = host.select(ask.backend)
        looked = self.look(ask.manifest, host, partly=partly)
        doubt = looked[-1].resolution.undecided
        if doubt and ask.fallback == "reference" and ask.manifest.reference is not None:
            # As `load` has it: what cannot be had leaves the reference.
            looked[-1] = looked[-1]._replace(resolution=looked[-1].resolution._replace(undecided=""))
        resolution = _together(looked)
        if looked[-1].resolution.chosen is None and ask.manifest.reference is not None:
            resolution = resolution._replace(reference=self._look_embedded(ask.manifest, host).resolution)
        # What the first repository made needless to ask is shown all the same.
        why = "it is asked where no build above fits" if doubt else "it is not asked, since a build above fits"
        unasked = [
            Resolution(str(request_of(other)), host, note=why) for other in ask.manifest.alternatives[len(looked) - 1 :]
        ]
        return resolution._replace(alternatives=(*resolution.alternatives, *unasked))

    def among(
        self,
        wanted: Wanted,
        offers: Sequence[Offer],
        host: Host,
        backend: str | None,
        fallback: Fallback | None = None,
        *,
        partly: bool = False,
    ) -> Resolution:
        """Which kernel serves a capability, and what of it fits a host.

        The first that offers what is wanted and has a build; only where none has, the first whose reference fits.

        Args:
            wanted: the capability, and features of it.
            offers: its kernels, in the order in which they are asked.
            host: the machine.
            backend: as in `Ask`.
            fallback: as in `Ask`; it counts with `partly`, where a kernel cannot be asked.
            partly: as in `resolve`.
        """
        candidates: list[Candidate] = []
        for offer in offers:
            candidate = Candidate(offer.manifest.name, offer.features, offer.lacks)
            if not offer.lacks and not any(earlier.has_build for earlier in candidates):
                found = self.resolve(Ask(offer.manifest, backend=backend), host, partly=partly)
                candidate = candidate._replace(resolution=found)
            candidates.append(candidate)
        doubts = (candidate.resolution.doubt for candidate in candidates if candidate.resolution is not None)
        if doubt := next(filter(None, doubts), ""):  # it may have a build, and is before all that have one
            other = _with_reference(offers) if fallback == "reference" else None
            if other is None:
                return _nothing_serves(wanted, candidates, host.select(backend))._replace(undecided=doubt)
            known = self.resolve(Ask(other, backend=backend, fallback=fallback), host, partly=True)
            return known._replace(capability=str(wanted), kernel=other.name, candidates=tuple(candidates))
        able = [found for found in candidates if found.resolution is not None and found.resolution.taken is not None]
        serves = next((found for found in able if found.has_build), able[0] if able else None)
        if serves is None or serves.resolution is None:
            return _nothing_serves(wanted, candidates, host.select(backend))
        return serves.resolution._replace(capability=str(wanted), kernel=serves.kernel, candidates=tuple(candidates))

    def pick(
        self, wanted: Wanted, offers: Sequence[Offer], host: Host, backend: str | None, fallback: Fallback | None
    ) -> tuple[Manifest, str]:
        """The kernel of `among`, and what the user should be warned of, where anything.

        Raises:
            NoCompatibleBuild: none serves, or only by its reference, and that is refused.
            SourceError: a repository cannot be asked, and the caller has not agreed to a reference. Which kernel runs
                does not depend on the network.
        """
        able = {offer.manifest.name: offer.manifest for offer in offers if not offer.lacks}
        try:
            found = self.among(wanted, offers, host, backend)
        except KernelLoaderError as error:
            other = _with_reference(offers)
            if fallback != "reference" or other is None:
                raise
            return other, f"is taken for {wanted}, whose kernels could not all be asked. {error}"
        if not found.kernel or (found.is_reference and fallback == "error"):
            raise NoCompatibleBuild(str(wanted), _nothing_serves(wanted, found.candidates, found.host))
        return able[found.kernel], ""

    def look(self, manifest: Manifest, host: Host, *, partly: bool = False) -> list[Looked]:
        """The kernel's repositories in their order, up to the first that has a build which fits. At least one."""
        looked: list[Looked] = []
        for candidate in (manifest, *manifest.alternatives):
            looked.append(self._look_at(candidate, host, partly=partly))
            if looked[-1].resolution.chosen is not None or looked[-1].resolution.undecided:
                break
        return looked

    def _look_at(self, manifest: Manifest, host: Host, *, partly: bool = False) -> Looked:
        request = request_of(manifest)
        resolution = Resolution(str(request or manifest.name), host)
        if manifest.name in self._disabled:
            return Looked(resolution._replace(note="it is disabled here, by KERNEL_LOADER_DISABLE"), manifest)
        if request is None:
            return Looked(resolution._replace(note="it is embedded here, and has no repository"), manifest)
        excluded = bool(manifest.backends) and host.backend.kind not in manifest.backends
        # A directory that the user names is looked at all the same: it may hold more than what is published.
        for source in self._sources:
            if not source.is_local and excluded:
                continue
            try:
                listing = source.listing(request)
            except (NotCached, HubUnavailable) as error:
                refused, noted = said_of_all(host, manifest.requires, self._heeded(manifest), manifest.version)
                if refused:
                    note = f"whatever builds it has, {'; '.join(reason.message for reason in refused)}"
                    return Looked(resolution._replace(note=note), manifest)
                if not partly:
                    raise
                known = "".join(f"; {reason.message}" for reason in noted)
                note = f"its builds are unknown: {error.detail}{known}"
                return Looked(resolution._replace(note=note, undecided=str(error)), manifest)
            if listing is not None:
                return self._among(source, listing, manifest, host)
        if excluded:
            note = f"it is for {', '.join(manifest.backends)}, and this host computes on {host.backend.kind}"
            return Looked(resolution._replace(note=note), manifest)
        raise _nowhere(request)

    def _among(self, source: Source, listing: Listing, manifest: Manifest, host: Host) -> Looked:
        resolution = resolve(
            listing.names,
            host,
            repo=str(request_of(manifest)),
            version=manifest.version,
            requires=manifest.requires,
            advisories=self._heeded(manifest),
            read_metadata=functools.partial(source.metadata, listing),
            strict=self._strict,
        )
        guards = _guards(manifest, resolution.chosen) if resolution.chosen is not None else {}
        return Looked(resolution._replace(guards=spelt_guards(guards)), manifest, source, listing)

    def _heeded(self, manifest: Manifest) -> tuple[Advisory, ...]:
        """What is publicly known of a repository, with what overrules it here."""
        advisories = self._advisories(manifest.repo) if manifest.repo is not None else ()
        return tuple(self._with_overrules(advisory, manifest) for advisory in advisories)

    def _with_overrules(self, advisory: Advisory, manifest: Manifest) -> Advisory:
        is_ignored = bool(self._ignored & {advisory.id, _ALL})
        guards = (guard for guards in manifest.guards.values() for guard in guards)
        return advisory._replace(
            overruled="ignored by KERNEL_LOADER_IGNORE_ADVISORIES" if is_ignored else "",
            mended=tuple(guard.versions for guard in guards if guard.name == advisory.guard),
        )

    def _look_embedded(self, manifest: Manifest, host: Host, *, only_reference: bool = False) -> Looked:
        """The embedded builds; for a kernel that is disabled the reference alone."""
        assert manifest.reference is not None, "only asked for kernels that have one"
        beside, repo = Path(manifest.file).parent / "registry" / manifest.reference, f"registry/{manifest.reference}"
        source = LocalDirectories({manifest.reference: beside}) if beside.is_dir() else embedded()
        listing = source.listing(Request(repo=manifest.reference))
        if listing is None:
            detail = f"the reference of {manifest.name} is neither beside its manifest nor in this package"
            raise SourceError(repo, detail, "Correct `reference` in the manifest, or put the builds there.")
        names = listing.names
        if only_reference or manifest.name in self._disabled:
            names = tuple(name for name in names if name == REFERENCE)
        read = functools.partial(source.metadata, listing)
        resolution = resolve(names, host, repo=repo, read_metadata=read, strict=self._strict)
        return Looked(resolution, None, source, listing)

    def _nothing_fits(self, ask: Ask, first: Looked, resolution: Resolution) -> NoCompatibleBuild:
        """The error, with the newest other version of the repository that has a build for the host."""
        request, source = ask.request, first.source
        error = NoCompatibleBuild(resolution.repo, resolution)
        if request is None or source is None:
            return error
        others = [version for version in source.versions(request) if version != request.version]
        advisories = self._heeded(ask.manifest)
        for version in others[: -_OTHER_VERSIONS - 1 : -1]:
            try:
                listing = source.listing(request._replace(version=version, revision=None))
            except KernelLoaderError:
                continue
            if listing is None:
                continue
            host, requires = resolution.host, ask.manifest.requires
            if resolve(listing.names, host, version=version, requires=requires, advisories=advisories).chosen:
                return NoCompatibleBuild(resolution.repo, resolution, version)
        return error


def request_of(manifest: Manifest) -> Request | None:
    """The repository of a manifest, at its version or revision; None where it has none."""
    m = manifest
    return Request(repo=m.repo, version=m.version, revision=m.revision) if m.repo is not None else None


def spelt_guards(guards: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Guards as people read them: "field: guard, guard"."""
    return tuple(f"{field}: {', '.join(names)}" for field, names in guards.items())


def _nothing_serves(wanted: Wanted, candidates: Sequence[Candidate], host: Host) -> Resolution:
    """A resolution without builds, that says of each kernel of a capability why it is passed over."""
    said = []
    for candidate in candidates:
        offers = f" (it offers {', '.join(candidate.offers)})" if candidate.lacks and candidate.offers else ""
        said.append(f"{candidate.kernel} {candidate.why_not}{offers}")
    note = "; ".join(said) or "no kernel offers it"
    return Resolution(str(wanted), host, note=note, capability=str(wanted), candidates=tuple(candidates))


def _with_reference(offers: Sequence[Offer]) -> Manifest | None:
    """The kernel that serves a capability where not all could be asked, and the caller has agreed to a reference."""
    able = (offer.manifest for offer in offers if not offer.lacks)
    return next((manifest for manifest in able if manifest.reference is not None), None)


def _guards(manifest: Manifest | None, build: Verdict) -> Mapping[str, tuple[str, ...]]:
    return manifest.guards_of(version_of(build.metadata, manifest.version)) if manifest is not None else {}


def _together(looked: Sequence[Looked]) -> Resolution:
    """One resolution: of the first repository, with the others as its alternatives."""
    first, *others = (found.resolution for found in looked)
    return first._replace(alternatives=tuple(others))


def _without_reference(resolution: Resolution) -> Resolution:
    """The embedded builds that a kernel without a repository has for particular backends."""
    own = tuple(verdict for verdict in resolution.verdicts if not verdict.is_universal)
    return resolution._replace(verdicts=own, chosen=None, note="it has the slow reference alone")


def _choice(looked: Looked) -> Choice:
    build, source, listing = looked.resolution.chosen, looked.source, looked.listing
    assert build is not None, "only asked for a resolution that chose"
    assert source is not None, "what is chosen is from a source"
    assert listing is not None, "what is chosen is from a listing"
    fits = sum(verdict.status == "accepted" for verdict in looked.resolution.verdicts)
    doubts = "; ".join(reason.message for reason in build.reasons)
    warnings = [f"uses {build.name}, which may not run on this host: {doubts}."] if doubts else []
    said, asked = build.metadata.version if build.metadata else None, looked.manifest and looked.manifest.version
    if source.is_local and None not in (said, asked) and said != asked:
        warnings.append(f"uses version {said} from {source.kind} {listing.repo}, and version {asked} was asked for.")
    # The first sentence tells one warning from another.
    told = {note: f"has a {note.message}. {note.remedy}" for note in build.notes if note.code == "advisory"}
    return Choice(
        source=source,
        listing=listing,
        build=build,
        manifest=looked.manifest,
        why=doubts or (f"the best of {fits} builds that fit" if fits > 1 else "the only build that fits"),
        warnings=(*warnings, *(text for note, text in told.items() if not note.untrained)),
        of_training=tuple(text for note, text in told.items() if note.untrained),
    )


def _nowhere(request: Request) -> SourceError:
    advice = (
        f"Set KERNEL_LOADER_LOCAL={request.repo}=DIRECTORY to use builds on this machine, or accept the slow "
        'reference with fallback="reference", where the kernel has one.'
    )
    return SourceError(str(request), "no source that is configured here has this repository", advice)
