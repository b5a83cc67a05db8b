"""KernelLoader: the one road from a name to a bundle.

::

    name -> manifest -> settings + host -> a source lists builds -> the resolver chooses (or the reference)
         -> trust -> fetch and verify -> import once -> bind entrypoints -> frozen bundle, with its Origin
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, get_args

from kernel_loader import probe
from kernel_loader.arguments import each, trusted
from kernel_loader.binder import bind, bundle_class
from kernel_loader.catalog import Catalog
from kernel_loader.choice import Ask, Choice, Chooser, spelt_guards
from kernel_loader.errors import KernelLoaderError, NoCompatibleBuild, RequestError
from kernel_loader.host import Host
from kernel_loader.importer import import_build, module_name, package_directory
from kernel_loader.loaded import LEDGER
from kernel_loader.manifest import REPO, Manifest
from kernel_loader.metadata import Metadata
from kernel_loader.once import Once
from kernel_loader.planning import Planned, Planner, Prefetched, measured, spelt, unneeded
from kernel_loader.provenance import Origin
from kernel_loader.published import PublishedBuilds
from kernel_loader.resolver import Resolution
from kernel_loader.resources import installed_builds
from kernel_loader.settings import Fallback, Settings
from kernel_loader.sources import Fetched, LocalDirectories, Request, Source
from kernel_loader.store import Store
from kernel_loader.trust import Gate, is_allowed

if TYPE_CHECKING:
    from kernel_loader.capability import Wanted
    from kernel_loader.carry.archive import Imported
    from kernel_loader.carry.contents import Bundle
    from kernel_loader.lock import Lock

logger = logging.getLogger("kernel_loader")


class KernelLoader:
    """Loads kernels: resolves, fetches, verifies, imports and binds them. Owns all state of doing so.

    Args:
        settings: how to behave; by default what the environment says now.
        host: the machine to choose builds for; by default this one, looked at when it is first needed.
        sources: where builds come from, the first that has a repository; by default the directories of the settings,
            then what is published on the Hub.
        lock: what may be loaded, or the path of its file; by default that of the settings, where they name one.

    Raises:
        RequestError: something is not of its type.
        SettingsError: the environment, or a directory of the settings, cannot be read.
        LockError: the lock file is not there, or is damaged.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        host: Host | None = None,
        sources: Sequence[Source] | None = None,
        lock: Lock | Path | str | None = None,
    ) -> None:
        _refuse(settings, sources)
        s = settings if settings is not None else Settings.from_env()
        self.settings: Final = s
        self.catalog: Final = Catalog(s)
        self.store: Final = Store(s.cache, (*s.shared, *installed_builds()))
        self._given_host: Final = _checked(host) if host is not None else None
        self.lock: Final = _read_lock(lock if lock is not None else s.lock)
        published = self._published()
        given = sources if sources is not None else (LocalDirectories(s.local), published)
        self._chooser: Final = Chooser(s, given, self.catalog.advisories)
        self.index: Final = published.index
        self._planner: Final = Planner(
            self.catalog,
            self._chooser,
            lambda kernel, version, revision, host: self._asked(kernel, version, revision, None, None, host),
        )
        self._gate: Final = Gate(self.index, None if s.offline else published.trusts, s.refresh_after)
        self._once: Final = Once()
        self._warned: Final[set[tuple[str, str]]] = set()

    def _published(self) -> PublishedBuilds:
        s = self.settings
        if self.lock is None:
            return PublishedBuilds(self.store, offline=s.offline, refresh_after=s.refresh_after)
        from kernel_loader.locked import LockedBuilds

        return LockedBuilds(self.store, self.lock, offline=s.offline, refresh_after=s.refresh_after)

    @functools.cached_property
    def host(self) -> Host:
        """The machine that builds are chosen for."""
        return self._given_host if self._given_host is not None else probe.detect(self.settings.overrides)

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
        """As the function `load_kernel`."""
        manifest = self.catalog.find(kernel)
        if manifest is None:
            return self._load_capability(str(kernel), version, revision, backend, fallback)
        ask = self._ask(manifest, version, revision, backend, fallback)
        # The class is imported before anything waits: its module may load the kernel itself while it is imported.
        ask = ask._replace(bundle=bundle_class(ask.manifest, kernel if isinstance(kernel, type) else None))
        return self._once.get(ask, lambda: self._load(ask), _name_of)

    def load_reference(self, kernel: str | type) -> Any:  # noqa: ANN401 - as `load`
        """The reference of a kernel as a bundle, whatever builds there are.

        Raises:
            NoCompatibleBuild: the kernel has none.
            UnknownKernel, ManifestError, KernelImportError: as `load`.
        """
        ask = self._ask(self.catalog.get(kernel), None, None, None, None)
        ask = ask._replace(bundle=bundle_class(ask.manifest, kernel if isinstance(kernel, type) else None))
        return self._bundle(ask, self._chooser.reference(ask, self.host, "it was asked for"))

    def load_module(
        self,
        repo_id: str,
        *,
        version: int | None = None,
        revision: str | None = None,
        backend: str | None = None,
        trust_remote_code: bool | Collection[str] = False,
        for_layers: bool = False,
    ) -> ModuleType:
        """As the function `load_module`.

        With `for_layers`, nothing but layers is taken of the module, by a caller who heeds `Origin.untrained`: faults
        that those tell of are not warned of.
        """
        manifest = self._manifest(repo_id) or self.catalog.get(repo_id)  # which raises what fits
        ask = self._ask(manifest, version, revision, backend, None)._replace(for_layers=for_layers)
        allowed = _allowed(trust_remote_code)
        loaded: ModuleType = self._once.get((ask, allowed), lambda: self._load_module(ask, allowed), _name_of)
        return loaded

    def resolve(
        self,
        kernel_or_repo: str | type,
        *,
        version: int | None = None,
        revision: str | None = None,
        backend: str | None = None,
        host: Host | None = None,
        partly: bool = False,
    ) -> Resolution:
        """As the function `resolve`.

        With `partly`, that a repository cannot be asked is no error: what is known is told, and `Resolution.doubt` says
        why nothing can be decided.
        """
        machine = _checked(host) if host is not None else self.host
        manifest = self._manifest(kernel_or_repo)
        if manifest is None:
            wanted = self._wanted(str(kernel_or_repo), version, revision, backend, None)
            offers = self.catalog.offers(wanted, machine.select(backend).backend.kind)
            return self._chooser.among(wanted, offers, machine, backend, self.settings.fallback, partly=partly)
        found = self._chooser.resolve(self._ask(manifest, version, revision, backend, None), machine, partly=partly)
        if found.guards and not manifest.is_anonymous:  # guards of fields that are not there would be promised
            bundle_class(manifest, kernel_or_repo if isinstance(kernel_or_repo, type) else None)
        return found

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
            ask = self._asked(kernel_or_repo, version, revision, backend, fallback, self.host)
            host = self.host.select(backend)
        except KernelLoaderError:
            return False
        with contextlib.suppress(KernelLoaderError):
            self._chooser.choose(ask, host)
            return True
        if ask.fallback == "reference" and ask.manifest.reference is not None:
            with contextlib.suppress(KernelLoaderError):
                self._chooser.reference(ask, host)
                return True
        return False

    def prefetch(
        self,
        kernels: Iterable[str | type] | str | type,
        *,
        hosts: Iterable[Host] | Host | None = None,
        all_variants: bool = False,
        trust_remote_code: bool | Collection[str] = False,
        dry_run: bool = False,
    ) -> list[Prefetched]:
        """As the function `prefetch`."""
        machines, allowed = self._machines(hosts), _allowed(trust_remote_code)
        planned = self._planner.planned(kernels, machines, all_variants=all_variants)
        builds = {(one.ask.manifest.name, one.choice.listing, one.variant): one for one in planned}
        return [measured(one) if dry_run else self._prefetched(one, allowed) for one in builds.values()]

    def export(
        self,
        kernels: Iterable[str | type] | str | type,
        file: Path | str,
        *,
        hosts: Iterable[Host] | Host | None = None,
        all_variants: bool = False,
        trust_remote_code: bool | Collection[str] = False,
        wheel: bool = False,
    ) -> Bundle:
        """Prefetch kernels, and write their builds to one file, for machines that cannot reach the Hub.

        Args:
            kernels: as in `prefetch`.
            file: the bundle (`kernels.klb`), which is replaced whole.
            hosts: as in `prefetch`.
            all_variants: as in `prefetch`.
            trust_remote_code: as in `prefetch`.
            wheel: write `<name>-<version>-py3-none-any.whl` instead, whose builds are found once it is installed.

        Returns:
            What was written. Embedded builds are part of this package, and of no bundle.

        Raises:
            RequestError: a kernel is from a directory of this machine, or the file has no name of a wheel.
            BundleError: the file cannot be written.
            Whatever `prefetch` raises.
        """
        from kernel_loader.carry.archive import write_archive, write_wheel
        from kernel_loader.carry.gather import Gathered

        allowed, gathered = _allowed(trust_remote_code), Gathered(self.index)
        for one in self._planner.planned(kernels, self._machines(hosts), all_variants=all_variants):
            self._admit(one.ask, one.choice, allowed)
            fetched, by_word = self._fetch(one.choice, one.variant), self._passes_by_word(one.choice, allowed)
            gathered.add(one.ask, one.choice, one.variant, fetched, by_word=by_word)
            if one.choice.embedded:
                logger.warning("%s: no build is carried, since %s is taken there. %s", *unneeded(one))
        (write_wheel if wheel else write_archive)(Path(file).absolute(), gathered.bundle(), gathered.directories)
        return gathered.bundle()

    def import_bundle(self, file: Path | str) -> list[Imported]:
        """Bring all builds of a bundle into the store, from where they are loaded without the network.

        Nothing of it is visible before all of it is verified; under a lock, also against that. What is here already is
        not read again.

        Raises:
            BundleError: the file is no bundle, not whole, of another format, or not what it says.
            LockMismatch, LockMissing: a build is not as the lock has it, or of a repository that it does not name.
            StoreError: the store cannot be written.
        """
        from kernel_loader.carry.archive import import_archive

        return import_archive(Path(file).absolute(), self.store, self.index, self.lock)

    def make_lock(
        self,
        kernels: Iterable[str],
        *,
        known: Lock | Path | str | None = None,
        upgrade: Collection[str] | None = (),
        trust_remote_code: bool | Collection[str] = False,
    ) -> Lock:
        """Lock kernels: their repositories with all builds, and all that those depend on.

        Args:
            kernels: as in `prefetch`, as texts.
            known: a lock, or the path of its file; what it has stays as it is.
            upgrade: names of kernels that are looked at anew all the same; None for all of them.
            trust_remote_code: as in `load_module`.

        Raises:
            RequestError: a kernel to upgrade is not among the kernels.
            TrustError: nobody has said that a repository's code may run.
            SourceError, UnknownVersion: the Hub cannot be asked, or has no such repository or version.
            UnknownKernel, ManifestError: as `load_kernel`.
        """
        from kernel_loader.locking import Locker

        allowed = _allowed(trust_remote_code)
        locker = Locker(
            self._manifests,
            lambda request, named: self._gate.admit(request, named=named, allowed=allowed),
            offline=self.settings.offline,
        )
        return locker.lock(each(kernels, "kernels"), _read_lock(known), upgrade)

    def serving(self, kernel: str, backend: str | None = None) -> str:
        """The registered name of the kernel that serves a capability here; anything else as it is.

        Raises:
            As `load`, where the kernel is chosen.
        """
        name, version, revision = spelt(kernel)
        if (version, revision) != (None, None) or self._manifest(name) is not None:
            return kernel
        return self._pick(self.catalog.wanted(name), backend, None, self.host).manifest.name

    # --- the road -------------------------------------------------------------------------------------------------

    def _manifest(self, kernel_or_repo: str | type) -> Manifest | None:
        """Of a registered name, a class or a repository; None for what may be a capability."""
        if isinstance(kernel_or_repo, str) and "/" in kernel_or_repo:
            return _of_repository(kernel_or_repo)
        return self.catalog.find(kernel_or_repo)

    def _wanted(
        self, text: str, version: int | None, revision: str | None, backend: str | None, fallback: Fallback | None
    ) -> Wanted:
        wanted = self.catalog.wanted(text)
        _check_arguments(version, revision, backend, fallback)
        if version is not None or revision is not None:
            what = "version" if version is not None else "revision"
            raise RequestError(f"a {what} of {wanted} was asked for", "Kernels have versions: ask for one by its name.")
        return wanted

    def _asked(
        self,
        kernel_or_repo: str | type,
        version: int | None,
        revision: str | None,
        backend: str | None,
        fallback: Fallback | None,
        host: Host,
    ) -> Ask:
        """What a call asks for; for a capability, the kernel that serves it on a host."""
        manifest = self._manifest(kernel_or_repo)
        if manifest is not None:
            return self._ask(manifest, version, revision, backend, fallback)
        wanted = self._wanted(str(kernel_or_repo), version, revision, backend, fallback)
        return self._pick(wanted, backend, fallback, host)

    def _pick(self, wanted: Wanted, backend: str | None, fallback: Fallback | None, host: Host) -> Ask:
        """The kernel that serves a capability."""
        agreed = fallback or self.settings.fallback
        offers = self.catalog.offers(wanted, host.select(backend).backend.kind)
        manifest, warning = self._chooser.pick(wanted, offers, host, backend, agreed)
        if warning:
            self._warn(manifest, warning)
        return Ask(manifest=manifest, backend=backend, fallback=agreed)

    def _load_capability(
        self, text: str, version: int | None, revision: str | None, backend: str | None, fallback: Fallback | None
    ) -> Any:  # noqa: ANN401 - load_kernel has the types
        from kernel_loader.capability import check_fields

        wanted = self._wanted(text, version, revision, backend, fallback)
        key = (wanted, backend, fallback)
        ask: Ask = self._once.get(key, lambda: self._pick(wanted, backend, fallback, self.host))
        ask = ask._replace(bundle=bundle_class(ask.manifest))
        assert ask.bundle is not None, "a kernel has a bundle"
        # A field with a default may lack its symbol.
        sure = [field.name for field in fields(ask.bundle) if field.default is field.default_factory is MISSING]
        check_fields(ask.manifest, self.catalog.capabilities[wanted.capability], sure)
        return self._once.get(ask, lambda: self._load(ask), _name_of)

    def _ask(
        self,
        manifest: Manifest,
        version: int | None,
        revision: str | None,
        backend: str | None,
        fallback: Fallback | None,
    ) -> Ask:
        _check_arguments(version, revision, backend, fallback)
        if version is not None or revision is not None:
            if manifest.repo is None:
                raise RequestError(f"a version of {manifest.name} was asked for", "It is embedded, and has one alone.")
            # A version is one of the first repository: those of another are numbered otherwise.
            manifest = replace(manifest, version=version, revision=revision, alternatives=())
        return Ask(manifest=manifest, backend=backend, fallback=fallback or self.settings.fallback)

    def _load(self, ask: Ask) -> Any:  # noqa: ANN401 - load_kernel has the types
        return self._load_as(ask, self._bundle)

    def _load_as(self, ask: Ask, bring: Callable[[Ask, Choice], Any]) -> Any:  # noqa: ANN401 - a bundle or a module
        """Load a named kernel; its reference where no build fits, or where one fails and the caller has agreed."""
        choice = None
        try:
            choice = self._chooser.choose(ask, self.host)
            return bring(ask, choice)
        except KernelLoaderError as error:
            has_another = ask.manifest.reference is not None and not (choice and choice.reference)
            if ask.fallback != "reference" or not has_another:
                raise
            warning, reference = f"failed, and the slow reference is used instead. {error}", None
            with contextlib.suppress(NoCompatibleBuild):
                reference = self._chooser.reference(ask, self.host, str(error), warning)
            if reference is None:
                raise
            return bring(ask, reference)

    def _load_module(self, ask: Ask, allowed: bool | frozenset[str]) -> ModuleType:  # noqa: FBT001 - as the caller's
        if not ask.manifest.is_anonymous:
            unguarded = ask._replace(manifest=ask.manifest.unguarded())
            module: ModuleType = self._load_as(unguarded, self._module)
            return module
        assert ask.request is not None, "what has no manifest is a repository"
        if ask.request.repo in self.settings.local:
            return self._import(ask, self._chooser.choose(ask, self.host))[0]
        # The Hub is asked about its publisher while its builds are listed, and has answered before one is fetched.
        with self._gate.deciding(ask.request, allowed=allowed or self._is_locked(ask.request)):
            choice = self._chooser.choose(ask, self.host)
        return self._import(ask, choice)[0]

    def _module(self, ask: Ask, choice: Choice) -> ModuleType:
        """Trust, fetch and import a build."""
        self._admit(ask, choice)
        return self._import(ask, choice)[0]

    def _bundle(self, ask: Ask, choice: Choice) -> Any:  # noqa: ANN401 - load_kernel has the types
        """Trust, fetch, import and bind a build."""
        assert ask.bundle is not None, "only asked for bundles"
        self._admit(ask, choice)
        module, origin = self._import(ask, choice)
        bundle = bind(module, ask.bundle, choice.manifest or ask.manifest, origin, _guards(ask, choice))
        LEDGER.record_bundle(bundle, origin)
        return bundle

    def _admit(self, ask: Ask, choice: Choice, allowed: bool | frozenset[str] = False) -> None:  # noqa: FBT001, FBT002
        request = choice.request
        if request is not None and not choice.source.is_local and not self._is_locked(request):
            self._gate.admit(request, named=not ask.manifest.is_anonymous, allowed=allowed)

    def _passes_by_word(self, choice: Choice, allowed: bool | frozenset[str]) -> bool:  # noqa: FBT001
        """Whether the user's word, or a lock, lets a repository's code pass, so that the Hub is not asked."""
        request = choice.request
        return request is not None and (is_allowed(request, allowed) or self._is_locked(request))

    def _import(self, ask: Ask, choice: Choice) -> tuple[ModuleType, Origin]:
        """Fetch a build, with those that it depends on, and import it once."""
        for warning in choice.warnings if ask.for_layers else (*choice.warnings, *choice.of_training):
            self._warn(ask.manifest, warning)
        metadata = choice.build.metadata
        assert metadata is not None, "a build is chosen by what its metadata says"
        fetched = self._fetch(choice, choice.build.name)
        origin = _origin(ask, choice, fetched)
        name = module_name(choice.listing.repo, metadata, fetched.digest)
        package = package_directory(fetched.path, metadata)
        module = import_build(package, name, origin, self._dependencies(metadata))
        choice.source.hold(fetched)
        LEDGER.record_module(name, origin)
        logger.debug("%s: loaded %s from %s", ask.manifest.name, origin.variant, origin.where)
        return module, origin

    def _dependencies(self, metadata: Metadata) -> dict[str, ModuleType]:
        """The kernels that a build names as its dependencies, loaded."""
        if not metadata.kernel_depends:
            return {}
        return {
            needed.repo_id: self.load_module(needed.repo_id, version=needed.version, revision=needed.revision)
            for needed in metadata.kernel_depends
        }

    def _fetch(self, choice: Choice, name: str) -> Fetched:
        """A build on this machine, verified; under a lock, the one that is locked."""
        fetched = choice.source.fetch(choice.listing, name)
        self._hold_to_lock(choice, name, fetched.digest)
        return fetched

    def _hold_to_lock(self, choice: Choice, name: str, digest: str) -> None:
        if self.lock is not None and choice.request is not None:
            self.lock.check(choice.request, name, digest, choice.listing.commit)

    def _is_locked(self, request: Request) -> bool:
        """Whether a lock has pinned the repository's code, which is its author's word for just these bytes."""
        return self.lock is not None and self.lock.names(request)

    # --- builds for other machines --------------------------------------------------------------------------------

    def _machines(self, hosts: Iterable[Host] | Host | None) -> tuple[Host, ...]:
        if hosts is None:
            return (self.host,)
        return tuple(_checked(host) for host in ((hosts,) if isinstance(hosts, Host) else each(hosts, "hosts")))

    def _prefetched(self, planned: Planned, allowed: bool | frozenset[str]) -> Prefetched:  # noqa: FBT001
        self._admit(planned.ask, planned.choice, allowed)
        known = measured(planned)
        if known.digest is not None:  # here, and verified
            self._hold_to_lock(planned.choice, planned.variant, known.digest)
            return known
        fetched = self._fetch(planned.choice, planned.variant)
        return known._replace(digest=fetched.digest, path=fetched.path)

    def _manifests(self, text: str) -> tuple[Manifest, ...]:
        """The manifests of what is asked for; for a capability, of all kernels that offer it on any machine."""
        if not isinstance(text, str):
            raise RequestError(f"{text!r} is to be locked", "Name kernels as texts, as on the command line.")
        name, version, revision = spelt(text)
        manifest = self._manifest(name)
        if manifest is not None:
            return (self._ask(manifest, version, revision, None, None).manifest,)
        wanted = self._wanted(name, version, revision, None, None)
        offers = (offer.manifest for offer in self.catalog.offers(wanted, "cpu"))
        features = frozenset(wanted.features)
        return tuple(
            m for m in offers if wanted.capability in m.capabilities and features <= {*m.offers(wanted.capability)}
        )

    def _warn(self, manifest: Manifest, message: str) -> None:
        """One warning of a kind for each kernel: a model asks in every layer. The first sentence tells the kind."""
        kind = (manifest.name, message.partition(".")[0])
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s %s", manifest.name, message)


def _read_lock(lock: object) -> Lock | None:
    if lock is None:
        return None
    from kernel_loader.lock import Lock

    if isinstance(lock, str | Path):
        return Lock.read(str(Path(lock).absolute()))
    if not isinstance(lock, Lock):
        raise RequestError(f"lock={lock!r} was given", "Pass a Lock, the path of its file, or leave it out.")
    return lock


def _check_arguments(version: object, revision: object, backend: object, fallback: object) -> None:
    if version is not None and (type(version) is not int or version < 0):
        raise RequestError(f"version={version!r} was given", "A version is a whole number, such as version=1.")
    if revision is not None and re.fullmatch(r"\S+", str(revision)) is None:
        raise RequestError(f"revision={revision!r} was given", "A revision is a branch, a tag or a commit.")
    if version is not None and revision is not None:
        raise RequestError(f"version={version} and revision={revision!r} were both given", "Pass one of them.")
    if backend is not None and not isinstance(backend, str):
        raise RequestError(f"backend={backend!r} was given", "A backend is a name, such as cpu or cuda.")
    if fallback is not None and fallback not in list(get_args(Fallback)):
        raise RequestError(f"fallback={fallback!r} was given", 'It is "reference", "error", or left out.')


def _refuse(settings: object, sources: object) -> None:
    if not isinstance(settings, Settings | None):
        raise RequestError(f"settings={settings!r} was given", "Pass Settings(...), or leave it out.")
    if sources is None:
        return
    if not isinstance(sources, Sequence) or not all(callable(getattr(one, "listing", None)) for one in sources):
        raise RequestError(f"sources={sources!r} was given", "Pass a list of sources, or leave it out.")


def _checked(host: object) -> Host:
    if not isinstance(host, Host):
        raise RequestError(f"host={host!r} was given", "Pass a Host: Host.from_json reads a description.")
    return host


def _name_of(key: Ask | tuple[Ask, object]) -> str:
    ask = key if isinstance(key, Ask) else key[0]
    return str(ask.request or ask.manifest.name)


def _of_repository(repo: str) -> Manifest:
    """A manifest for a repository that has no name here."""
    if re.fullmatch(REPO, str(repo), re.ASCII) is None:
        raise RequestError(f"{repo!r} is no repository id", "It is organisation/name.")
    return Manifest(name=repo, repo=repo, revision="main", file=repo, is_anonymous=True)


def _allowed(trust_remote_code: object) -> bool | frozenset[str]:
    given = trusted(trust_remote_code)
    return given if isinstance(given, bool) else frozenset(given)


def _guards(ask: Ask, choice: Choice) -> dict[str, tuple[str, ...]]:
    """The guards of the fields that the caller's bundle has."""
    there = {field.name for field in fields(ask.bundle)} if ask.bundle is not None else set()
    return {field: names for field, names in choice.guards.items() if field in there}


def _origin(ask: Ask, choice: Choice, fetched: Fetched) -> Origin:
    return Origin(
        kernel=ask.manifest.name,
        source=choice.source.kind,
        repo=choice.listing.repo,
        revision=choice.listing.revision,
        commit=choice.listing.commit,
        variant=choice.build.name,
        digest=fetched.digest,
        path=fetched.path,
        reference=choice.reference,
        why=choice.why,
        guards=spelt_guards(_guards(ask, choice)),
        untrained=choice.untrained,
    )
