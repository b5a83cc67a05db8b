"""KernelLoader: the one road from a name to a bundle, and the module-level functions over a default one.

::

    name -> manifest -> settings + host -> a source lists builds -> the resolver chooses (or the reference)
         -> fetch -> verify -> import once -> bind entrypoints -> frozen bundle, with its Origin
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, get_args, overload

from kernel_loader import sources as places
from kernel_loader.binder import bind, bundle_class
from kernel_loader.catalog import Catalog
from kernel_loader.digest import verify
from kernel_loader.errors import KernelLoaderError, NoCompatibleBuild, RequestError, SourceError
from kernel_loader.host import Host
from kernel_loader.importer import import_build, module_name, package_directory
from kernel_loader.loaded import LEDGER
from kernel_loader.manifest import Manifest, normalise
from kernel_loader.provenance import Origin
from kernel_loader.resolver import Resolution, Verdict, resolve as choose
from kernel_loader.settings import Fallback, Settings
from kernel_loader.sources import Listing, LocalDirectories, Request, Source

if TYPE_CHECKING:
    from kernel_loader.bundles.fp8 import FineGrainedFP8

logger = logging.getLogger("kernel_loader")

_Bundle = TypeVar("_Bundle")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """The arguments of a load, normalised: what is equal here is loaded once."""

    manifest: Manifest
    backend: str | None
    fallback: Fallback | None

    @property
    def request(self) -> Request | None:
        m = self.manifest
        return Request(repo=m.repo, version=m.version, revision=m.revision) if m.repo else None


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A resolution, and where its builds are; neither source nor listing where nothing was listed."""

    resolution: Resolution
    source: Source | None = None
    listing: Listing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """The build to load."""

    resolved: _Resolved
    build: Verdict
    reference: bool
    why: str
    warning: str = ""


def _reference(resolved: _Resolved, why: str, warning: str) -> _Choice:
    build = resolved.resolution.chosen
    if build is None:
        raise NoCompatibleBuild(resolved.resolution.repo, resolved.resolution)
    return _Choice(resolved=resolved, build=build, reference=True, why=why, warning=warning)


def _nowhere(request: Request) -> SourceError:
    advice = (
        f"Set KERNEL_LOADER_LOCAL={request.repo}=DIRECTORY to use builds on this machine, or accept the slow "
        'reference with fallback="reference".'
    )
    return SourceError(str(request), "no source that is configured here has this repository", advice)


class KernelLoader:
    """Loads kernels: resolves, fetches, verifies, imports and binds them. Owns all state of doing so.

    Args:
        settings: how to behave; by default what the environment says now.
        host: the machine to choose builds for; by default this one, looked at when it is first needed.
        sources: where builds come from, the first that has a repository; by default the directories of the settings.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        host: Host | None = None,
        sources: Sequence[Source] | None = None,
    ) -> None:
        self.settings: Final = settings if settings is not None else Settings.from_env()
        self.catalog: Final = Catalog(self.settings)
        self._given_host: Final = host
        self._sources: Final = tuple(sources) if sources is not None else (LocalDirectories(self.settings.local),)
        self._load_once: Final = functools.cache(self._load)
        self._disabled: Final = frozenset(normalise(name) for name in self.settings.disable)
        self._lock: Final = threading.Lock()
        self._locks: Final[dict[_Ask, threading.RLock]] = {}
        self._warned: Final[set[str]] = set()

    @functools.cached_property
    def host(self) -> Host:
        """The machine that builds are chosen for."""
        return self._given_host if self._given_host is not None else Host.detect(self.settings.overrides)

    # --- the public questions -------------------------------------------------------------------------------------

    def load(
        self,
        kernel: str | type,
        *,
        version: int | None = None,
        revision: str | None = None,
        backend: str | None = None,
        fallback: Fallback | None = None,
    ) -> Any:  # noqa: ANN401 - load_kernel has the types
        """As `load_kernel`."""
        ask = self._ask(kernel, version, revision, backend, fallback)
        # functools.cache keeps successes and forgets failures; alone it would let threads that come at the same time
        # load at the same time.
        with self._lock:
            lock = self._locks.setdefault(ask, threading.RLock())
        with lock:
            return self._load_once(ask)

    def resolve(
        self,
        kernel_or_repo: str | type,
        *,
        version: int | None = None,
        revision: str | None = None,
        backend: str | None = None,
        host: Host | None = None,
    ) -> Resolution:
        """As the function `resolve`."""
        ask = self._ask(kernel_or_repo, version, revision, backend, None, repositories=True)
        return self._resolve(ask, host if host is not None else self.host).resolution

    def can_load(
        self,
        kernel_or_repo: str | type,
        *,
        version: int | None = None,
        revision: str | None = None,
        backend: str | None = None,
        fallback: Fallback | None = None,
    ) -> bool:
        """As the function `can_load`."""
        try:
            ask = self._ask(kernel_or_repo, version, revision, backend, fallback, repositories=True)
            self._choose(ask)
        except KernelLoaderError:
            return False
        return True

    # --- the road -------------------------------------------------------------------------------------------------

    def _ask(
        self,
        kernel: str | type,
        version: int | None,
        revision: str | None,
        backend: str | None,
        fallback: Fallback | None,
        *,
        repositories: bool = False,
    ) -> _Ask:
        if version is not None and revision is not None:
            raise RequestError(f"version={version} and revision={revision!r} were both given", "Pass one of them.")
        if fallback is not None and fallback not in get_args(Fallback):
            raise RequestError(f"fallback={fallback!r} was given", 'It is "reference", "error", or left out.')
        if repositories and isinstance(kernel, str) and "/" in kernel:
            manifest = Manifest.from_table({"name": "repository", "repo": kernel, "revision": "main"}, kernel)
        else:
            manifest = self.catalog.get(kernel)
        if version is not None or revision is not None:
            manifest = replace(manifest, version=version, revision=revision)
        return _Ask(manifest=manifest, backend=backend, fallback=fallback or self.settings.fallback)

    def _load(self, ask: _Ask) -> Any:  # noqa: ANN401 - load_kernel has the types
        try:
            return self._bring(ask.manifest, self._choose(ask))
        except NoCompatibleBuild:
            raise
        except KernelLoaderError as error:
            if ask.fallback != "reference" or ask.manifest.reference is None:
                raise
            warning = f"failed, and the slow reference is used instead. {error}"
            resolved = self._resolve_reference(ask.manifest, self.host.select(ask.backend))
            return self._bring(ask.manifest, _reference(resolved, str(error), warning))

    def _choose(self, ask: _Ask) -> _Choice:
        """The build to load: the best that fits, or the reference where none does."""
        manifest = ask.manifest
        resolved = self._resolve(ask, self.host)
        chosen = resolved.resolution.chosen
        if chosen is not None:
            fits = sum(verdict.status == "accepted" for verdict in resolved.resolution.verdicts)
            why = f"the best of {fits} builds that fit" if fits > 1 else "the only build that fits"
            doubts = "; ".join(reason.message for reason in chosen.reasons)
            warning = f"uses {chosen.name}, which may not run on this host: {doubts}." if doubts else ""
            return _Choice(resolved=resolved, build=chosen, reference=False, why=doubts or why, warning=warning)
        error = NoCompatibleBuild(resolved.resolution.repo, resolved.resolution)
        if ask.fallback == "error" or manifest.reference is None:
            raise error
        reference = self._resolve_reference(manifest, resolved.resolution.host)
        return _reference(reference, error.problem, f"uses the slow reference. {error}" if manifest.repo else "")

    def _resolve(self, ask: _Ask, host: Host) -> _Resolved:
        """What fits a host, and where it is."""
        manifest, host = ask.manifest, host.select(ask.backend)
        resolved = self._resolve_builds(ask, host)
        if resolved.resolution.chosen is not None or manifest.reference is None:
            return resolved
        reference = self._resolve_reference(manifest, host).resolution
        return replace(resolved, resolution=replace(resolved.resolution, reference=reference))

    def _resolve_builds(self, ask: _Ask, host: Host) -> _Resolved:
        manifest, request = ask.manifest, ask.request
        if request is None:
            return _Resolved(Resolution(manifest.name, host, note="it has reference builds alone"))
        if manifest.name in self._disabled:
            return _Resolved(Resolution(str(request), host, note="it is disabled by KERNEL_LOADER_DISABLE"))
        excluded = bool(manifest.backends) and host.backend.kind not in manifest.backends
        # A directory that the user names is looked at all the same: it may hold more than what is published.
        found = self._find(request, [source for source in self._sources if source.is_local or not excluded])
        if found is None and excluded:
            note = f"it is for {', '.join(manifest.backends)}, and this host computes on {host.backend.kind}"
            return _Resolved(Resolution(str(request), host, note=note))
        if found is None:
            raise _nowhere(request)
        source, listing = found
        resolution = choose(
            listing.names,
            host,
            repo=str(request),
            requires=manifest.requires,
            read_metadata=functools.partial(source.metadata, listing),
            strict=self.settings.strict,
        )
        return _Resolved(resolution, source, listing)

    def _find(self, request: Request, sources: Sequence[Source]) -> tuple[Source, Listing] | None:
        for source in sources:
            if (listing := source.listing(request)) is not None:
                return source, listing
        return None

    def _resolve_reference(self, manifest: Manifest, host: Host) -> _Resolved:
        assert manifest.reference is not None, "only asked for kernels that have one"
        source = places.embedded()
        listing = source.listing(Request(repo=manifest.reference))
        if listing is None:
            advice = "The package is incomplete: install it again."
            raise SourceError(
                f"registry/{manifest.reference}", f"the reference of {manifest.name} is not there", advice
            )
        read = functools.partial(source.metadata, listing)
        repo = f"registry/{manifest.reference}"
        return _Resolved(choose(listing.names, host, repo=repo, read_metadata=read), source, listing)

    def _bring(self, manifest: Manifest, choice: _Choice) -> Any:  # noqa: ANN401 - load_kernel has the types
        """Fetch, verify, import and bind a build."""
        if choice.warning:
            self._warn(manifest, choice.warning)
        cls = bundle_class(manifest)
        source, listing, metadata = choice.resolved.source, choice.resolved.listing, choice.build.metadata
        assert source is not None, "a build is chosen from a source"
        assert listing is not None, "a build is chosen from a listing"
        assert metadata is not None, "a build is chosen by what its metadata says"
        directory = source.fetch(listing, choice.build.name)
        digest = verify(directory, metadata)
        origin = Origin(
            kernel=manifest.name,
            source=source.kind,
            repo=listing.repo,
            revision=listing.revision,
            variant=choice.build.name,
            digest=digest,
            path=directory,
            reference=choice.reference,
            why=choice.why,
        )
        name = module_name(listing.repo, metadata, digest)
        module = import_build(package_directory(directory, metadata), name, origin)
        bundle = bind(module, cls, manifest, origin)
        LEDGER.record(module, origin)
        LEDGER.record(bundle, origin)
        logger.debug("%s: loaded %s from %s", manifest.name, origin.variant, origin.where)
        return bundle

    def _warn(self, manifest: Manifest, message: str) -> None:
        """One warning a kernel: a model that asks in every layer says it once."""
        if manifest.name not in self._warned:
            self._warned.add(manifest.name)
            logger.warning("%s %s", manifest.name, message)


# --- module-level functions over a default loader -----------------------------------------------------------------

# torch.compile traces load_kernel. What it can read is a plain dict, and what it can leave alone is a step that is
# marked constant; so the bundles of the default loader lie in a dict of the module, and nothing else does.
_BUNDLES: Final[dict[tuple[object, ...], Any]] = {}
_DEFAULT: Final[list[KernelLoader]] = []
_DEFAULT_LOCK: Final = threading.Lock()


def default_loader() -> KernelLoader:
    """The loader behind the module-level functions, made from the environment when it is first needed."""
    with _DEFAULT_LOCK:
        if not _DEFAULT:
            _DEFAULT.append(KernelLoader())
        return _DEFAULT[0]


def reset() -> None:
    """Forget the default loader: the next call reads the environment and looks at the machine again.

    Modules that were imported stay imported.
    """
    with _DEFAULT_LOCK:
        _DEFAULT.clear()
        _BUNDLES.clear()


def _load_bundle(key: tuple[Any, ...]) -> bool:
    if key not in _BUNDLES:
        kernel, version, revision, backend, fallback = key
        loaded = default_loader().load(kernel, version=version, revision=revision, backend=backend, fallback=fallback)
        _BUNDLES[key] = loaded
    return True


# What torch._dynamo.assume_constant_result sets, without importing torch.
_load_bundle._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - Dynamo reads this name


@overload
def load_kernel(
    kernel: Literal["finegrained_fp8", "finegrained-fp8"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> FineGrainedFP8: ...
@overload
def load_kernel(
    kernel: type[_Bundle],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> _Bundle: ...
@overload
def load_kernel(
    kernel: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Any: ...  # noqa: ANN401 - a kernel that only the user's manifests know
def load_kernel(
    kernel: str | type,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Any:
    """Load a named kernel: the build that fits this machine, verified and imported once, as a frozen dataclass.

    Threads that ask at the same time get one object, and the kernel's code runs once. Works inside `torch.compile`,
    cold and warm, without a graph break.

    Args:
        kernel: a registered name ("finegrained_fp8" and "finegrained-fp8" are the same) or a bundle class.
        version: version of the kernel's repository, instead of the manifest's.
        revision: branch, tag or commit, instead of a version.
        backend: "cpu", or the backend of this machine's torch, which is also the default.
        fallback: "reference" takes the slow reference, with a warning, when a build fits but cannot be had or fails;
            "error" refuses the reference even where no build fits. By default failures raise, and where nothing fits
            the reference is the best build there is.

    Raises:
        UnknownKernel: no manifest has that name.
        NoCompatibleBuild: no build fits, and the reference is refused or there is none.
        SourceError, IntegrityError, KernelImportError: a build fits and could not be had, or failed.
        MissingEntrypoints: the build lacks symbols; all of them are named.
        ManifestError, MetadataError, RequestError, SettingsError: something that was written cannot be read.
    """
    key = (kernel, version, revision, backend, fallback)
    _load_bundle(key)
    return _BUNDLES[key]


def resolve(
    kernel_or_repo: str | type,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    host: Host | None = None,
) -> Resolution:
    """Which build of a kernel a machine would take, and why. May list builds and read metadata; never fetches one.

    Args:
        kernel_or_repo: a registered name, a bundle class, or a repository id ("org/name").
        version: as in `load_kernel`.
        revision: as in `load_kernel`.
        backend: as in `load_kernel`.
        host: the machine; this one by default.

    Raises:
        As `load_kernel`, apart from what only loading can raise. That nothing fits is an answer, not an error.
    """
    return default_loader().resolve(kernel_or_repo, version=version, revision=revision, backend=backend, host=host)


def can_load(
    kernel_or_repo: str | type,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> bool:
    """Whether a build, or under the same rules the reference, fits this machine. Never fetches, imports, or raises.

    With `fallback="error"` the reference does not count.
    """
    return default_loader().can_load(
        kernel_or_repo, version=version, revision=revision, backend=backend, fallback=fallback
    )


def origin(loaded: object) -> Origin:
    """Where a bundle, or the module of a kernel, is from.

    Raises:
        RequestError: the object was not loaded by this package.
    """
    found = LEDGER.find(loaded)
    if found is None:
        detail = f"{type(loaded).__name__} object was not loaded by kernel_loader"
        raise RequestError(detail, "Pass what load_kernel returned.")
    return found


def loaded_kernels() -> tuple[Origin, ...]:
    """The origin of every build that is loaded in this process, in the order of loading."""
    return LEDGER.modules()
