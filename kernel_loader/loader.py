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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from kernel_loader import probe
from kernel_loader.arguments import each, trusted
from kernel_loader.binder import bind, bundle_class
from kernel_loader.catalog import Catalog
from kernel_loader.choice import Ask, Choice, Chooser, request_of, spelt_guards
from kernel_loader.errors import KernelLoaderError, NoCompatibleBuild, RequestError
from kernel_loader.host import Host
from kernel_loader.importer import import_build, module_name, package_directory
from kernel_loader.loaded import LEDGER
from kernel_loader.manifest import REPO, Manifest
from kernel_loader.metadata import Metadata
from kernel_loader.once import Once
from kernel_loader.provenance import Origin
from kernel_loader.published import PublishedBuilds
from kernel_loader.resolver import Resolution
from kernel_loader.settings import Fallback, Settings
from kernel_loader.sources import Fetched, LocalDirectories, Source
from kernel_loader.store import Store
from kernel_loader.trust import Gate

if TYPE_CHECKING:
    from kernel_loader.capability import Wanted

logger = logging.getLogger("kernel_loader")

_SPELT: Final = r"(?P<name>[^@]+)@(?:(?P<version>\d{1,9})|(?P<revision>.+))"


class Prefetched(NamedTuple):
    """A build that is ready to be loaded without the network.

    Attributes:
        kernel: the registered name, or the repository.
        variant: name of the build; that of an embedded one where no published build fits.
        digest: of its content.
        path: its directory.
        reference: whether it is the reference.
    """

    kernel: str
    variant: str
    digest: str
    path: Path
    reference: bool


class KernelLoader:
    """Loads kernels: resolves, fetches, verifies, imports and binds them. Owns all state of doing so.

    Args:
        settings: how to behave; by default what the environment says now.
        host: the machine to choose builds for; by default this one, looked at when it is first needed.
        sources: where builds come from, the first that has a repository; by default the directories of the settings,
            then what is published on the Hub.

    Raises:
        RequestError: something is not of its type.
        SettingsError: the environment, or a directory of the settings, cannot be read.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        host: Host | None = None,
        sources: Sequence[Source] | None = None,
    ) -> None:
        _refuse(settings, sources)
        s = settings if settings is not None else Settings.from_env()
        self.settings: Final = s
        self.catalog: Final = Catalog(s)
        self.store: Final = Store(s.cache)
        self._given_host: Final = _checked(host) if host is not None else None
        published = PublishedBuilds(self.store, offline=s.offline, refresh_after=s.refresh_after)
        given = sources if sources is not None else (LocalDirectories(s.local), published)
        self._chooser: Final = Chooser(s, given, self.catalog.advisories)
        self._gate: Final = Gate(published.index, None if s.offline else published.trusts, s.refresh_after)
        self._once: Final = Once()
        self._warned: Final[set[tuple[str, str]]] = set()

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
    ) -> list[Prefetched]:
        """As the function `prefetch`."""
        ready, allowed = [], _allowed(trust_remote_code)
        machines = _machines(hosts) if hosts is not None else (self.host,)
        for kernel in each(kernels, "kernels"):
            name, version, revision = spelt(kernel) if isinstance(kernel, str) else (kernel, None, None)
            for host in machines:
                ask = self._asked(name, version, revision, None, None, host)
                choice = self._chooser.choose(ask, host)
                names = choice.listing.names if all_variants and not choice.embedded else (choice.build.name,)
                ready += [self._prefetched(ask, choice, name, allowed) for name in names]
        return list(dict.fromkeys(ready))

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
        with self._gate.deciding(ask.request, allowed=allowed):
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
        request = request_of(choice.manifest) if choice.manifest is not None else None
        if request is not None and not choice.source.is_local:
            self._gate.admit(request, named=not ask.manifest.is_anonymous, allowed=allowed)

    def _import(self, ask: Ask, choice: Choice) -> tuple[ModuleType, Origin]:
        """Fetch a build, with those that it depends on, and import it once."""
        for warning in choice.warnings if ask.for_layers else (*choice.warnings, *choice.of_training):
            self._warn(ask.manifest, warning)
        metadata = choice.build.metadata
        assert metadata is not None, "a build is chosen by what its metadata says"
        fetched = choice.source.fetch(choice.listing, choice.build.name)
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

    def _prefetched(self, ask: Ask, choice: Choice, name: str, allowed: bool | frozenset[str]) -> Prefetched:  # noqa: FBT001
        self._admit(ask, choice, allowed)
        fetched = choice.source.fetch(choice.listing, name)
        return Prefetched(
            kernel=ask.manifest.name,
            variant=name,
            digest=fetched.digest,
            path=fetched.path,
            reference=choice.reference,
        )

    def _warn(self, manifest: Manifest, message: str) -> None:
        """One warning of a kind for each kernel: a model asks in every layer. The first sentence tells the kind."""
        kind = (manifest.name, message.partition(".")[0])
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s %s", manifest.name, message)


def spelt(kernel: str) -> tuple[str, int | None, str | None]:
    """Name or repository, version and revision of `name`, `name@3` (a version) or `name@branch-or-commit`."""
    match = re.fullmatch(_SPELT, kernel, re.ASCII)
    if match is None:
        return kernel, None, None
    return match["name"], int(match["version"]) if match["version"] else None, match["revision"]


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


def _machines(hosts: Iterable[Host] | Host) -> tuple[Host, ...]:
    return tuple(_checked(host) for host in ((hosts,) if isinstance(hosts, Host) else each(hosts, "hosts")))


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
