"""What ails an installation: machine, settings, store, lock and kernels as they are, and what to do.

`diagnose` asks nothing of the network and imports no torch. Whatever is broken becomes a finding, and the rest is told
all the same.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

from kernel_loader import __version__
from kernel_loader.carry.contents import installed
from kernel_loader.errors import (
    KernelLoaderError,
    LockError,
    LockMissing,
    NotCached,
    SettingsError,
)
from kernel_loader.host import BACKEND_KINDS, Host
from kernel_loader.loader import KernelLoader
from kernel_loader.lock import Lock
from kernel_loader.manifest import Manifest, normalise
from kernel_loader.planning import spelt
from kernel_loader.resolver import Resolution
from kernel_loader.resources import installed_builds
from kernel_loader.rules import ALIKE, Build, Reject, device_rule, driver_rule, judge
from kernel_loader.settings import OVERRIDE_PREFIX, PREFIX, Settings, unknown
from kernel_loader.sources import LocalDirectories, Request
from kernel_loader.store import Store
from kernel_loader.variant import Variant

Severity = Literal["error", "warning", "note"]
State = Literal["ready", "reference", "to fetch", "not known", "does not load"]

# What is left on a disk that a build of some kernels would fill.
LEAST_FREE: Final = 2 * 2**30

_DISTRIBUTION: Final = "kernel-loader"
_REQUIRED: Final = ("torch", "huggingface_hub", "filelock", "platformdirs", "packaging", "click")
# What some builds need, and other packages that load kernels; told of where they are installed.
_OPTIONAL: Final = (
    "triton",
    *ALIKE["triton"],
    "apache-tvm-ffi",
    "nvidia-cutlass-dsl",
    "einops",
    "transformers",
    "kernels",
)
_FACTS: Final = ("os", "cpu", "macos", "glibc", "python", "torch", "backend", "driver", "cuda_toolkit", "devices")
_TOKENS: Final = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OF_THE_HUB: Final = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "KERNELS_CACHE")
_PROXIES: Final = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")

# Settings whose variable is not called as the field is.
_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "shared": (f"{PREFIX}CACHE",),
    "local": ("LOCAL_KERNELS", f"{PREFIX}LOCAL"),
    "offline": ("HF_HUB_OFFLINE", f"{PREFIX}OFFLINE"),
}

_SEE: Final = "see the findings"

_T = TypeVar("_T")
_D = TypeVar("_D")


class Finding(NamedTuple):
    """Something that a person should know, and what to do about it.

    An "error" makes something fail, a "warning" may, and a "note" tells of what was switched on purpose.
    """

    severity: Severity
    problem: str
    remedy: str


class Fact(NamedTuple):
    """Something of the machine: in words, and where it is from where it is overridden, or why it is unknown."""

    name: str
    value: str
    note: str = ""


class Setting(NamedTuple):
    """A setting in force, in words, and the variables that say so; none where it is the default."""

    name: str
    value: str
    variables: tuple[str, ...] = ()


class Directory(NamedTuple):
    """A directory of the store.

    Attributes:
        path: where it is.
        written: whether builds are written there; the others are read alone.
        state: "", or what is wrong: "is not there", "is no directory", "cannot be read".
        writable: whether this user may write there, or make it.
        builds: how many it has, and `size` their bytes.
        free: bytes that are free on its disk; None where that is not known.
    """

    path: Path
    written: bool
    state: str
    writable: bool
    builds: int = 0
    size: int = 0
    free: int | None = None


class Locked(NamedTuple):
    """The lock in force: how many repositories it names, and each kernel with the build that is taken here, or ""."""

    file: str
    repositories: int
    kernels: Mapping[str, str]


class Package(NamedTuple):
    """An installed package of builds: how many, and their bytes."""

    path: Path
    builds: int
    size: int


class Kernel(NamedTuple):
    """A named kernel.

    Attributes:
        name: the registered name.
        state: "ready" is here whole as far as its receipt tells; "to fetch" is known, and not here; "not known" is what
            only the Hub can tell.
        build: the variant that is taken, where one is.
        where: where a build that is ready is: "store", "package", "local directory", "Hugging Face cache", "embedded".
        why: why it is the reference, or does not load.
    """

    name: str
    state: State
    build: str = ""
    where: str = ""
    why: str = ""


class Diagnosis(NamedTuple):
    """All that was seen.

    Attributes:
        machine: what decides which builds run.
        versions: distribution -> version; "not installed" of those that are needed.
        settings: all of them.
        hub: variables that the client of the Hub reads, without credentials, and whether a token is there.
        directories: of the store, the written one first.
        lock: the one in force; None where there is none that can be read.
        packages: installed packages of builds.
        kernels: all that have names.
        findings: the most serious first.
    """

    machine: tuple[Fact, ...]
    versions: Mapping[str, str]
    settings: tuple[Setting, ...]
    hub: Mapping[str, str]
    directories: tuple[Directory, ...]
    lock: Locked | None
    packages: tuple[Package, ...]
    kernels: tuple[Kernel, ...]
    findings: tuple[Finding, ...]

    @property
    def fails(self) -> bool:
        """Whether a finding is an error."""
        return any(finding.severity == "error" for finding in self.findings)

    def to_json(self) -> str:
        """The same for programs."""
        rows = {name: [row._asdict() for row in value] for name, value in self._asdict().items() if _is_rows(value)}
        plain = {"lock": self.lock._asdict() if self.lock is not None else None}
        return json.dumps(self._asdict() | rows | plain, indent=2, default=str)


def diagnose(environ: Mapping[str, str] = os.environ, host: Host | None = None) -> Diagnosis:
    """Look at everything that decides what loads.

    Args:
        environ: the environment that settings are read from.
        host: the machine to answer for; by default this one.
    """
    return _Examination(environ, host).result()


class _Examination:
    """One look at everything, and what was found on the way."""

    def __init__(self, environ: Mapping[str, str], host: Host | None) -> None:
        self._environ: Final = environ
        self._findings: Final[dict[Finding, None]] = {}
        self._unseen: Final[dict[str, dict[str, str]]] = {}
        self._settings: Final = self._read_settings()
        nobody = Host.from_json('{"os": "", "cpu": ""}')
        self._is_here: Final = host is None
        self._host: Final = host or self._part("the machine", nobody, self._detect)
        self._lock: Final = self._part("the lock", None, self._read_lock)

    def result(self) -> Diagnosis:
        part, s = self._part, self._settings
        machine = part("the machine", (), self._machine)
        versions = part("what is installed", dict[str, str](), self._versions)
        settings = part("the settings", (), _settings_in_words, s, self._environ)
        hub = part("the settings of the Hub's client", dict[str, str](), _hub_settings, self._environ)
        store = Store(s.cache, s.shared)
        looked = (part(f"the store at {home}", None, self._directory, store, home) for home in store.directories)
        directories = tuple(directory for directory in looked if directory is not None)
        packages = part("packages of builds", (), self._packages)
        lock = part("the lock", None, self._locked)
        kernels = part("the kernels", (), self._kernels)
        self._without_locked_build(lock, kernels)
        part("the settings", None, self._switched, kernels)
        self._empty(directories, packages, kernels)
        self._tell_of_unseen()
        order: list[Severity] = ["error", "warning", "note"]
        findings = sorted(self._findings, key=lambda finding: order.index(finding.severity))
        return Diagnosis(
            machine=machine,
            versions=versions,
            settings=settings,
            hub=hub,
            directories=directories,
            lock=lock,
            packages=packages,
            kernels=kernels,
            findings=tuple(findings),
        )

    # --- findings -------------------------------------------------------------------------------------------------

    def _tell(self, severity: Severity, problem: str, remedy: str) -> None:
        self._findings[Finding(severity, problem, remedy)] = None

    def _fault(self, error: KernelLoaderError) -> None:
        self._tell("error", error.problem, error.remedy)

    def _part(self, what: str, otherwise: _D, look: Callable[..., _T], *given: Any) -> _T | _D:  # noqa: ANN401 - look's
        """What a look gives; where it fails, a finding instead."""
        try:
            return look(*given)
        except KernelLoaderError as error:
            self._fault(error)
        except Exception as error:  # noqa: BLE001 - one part that cannot be looked at takes no other with it
            self._unseen.setdefault(type(error).__name__, {})[what] = str(error)
        return otherwise

    def _tell_of_unseen(self) -> None:
        """One finding for all parts with one kind of error: what cannot be read ails every kernel."""
        for kind, parts in self._unseen.items():
            what, detail = next(iter(parts.items()))
            more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
            problem = f"Of {what}{more} not all could be seen ({kind}: {detail})."
            self._tell("error", problem, "Correct what that names; if it names nothing of yours, report this page.")

    # --- settings and machine -------------------------------------------------------------------------------------

    def _read_settings(self) -> Settings:
        """The settings, without the variables that cannot be read."""
        misspelt = unknown(self._environ)
        environ = {name: value for name, value in self._environ.items() if name not in misspelt}
        settings = None
        while settings is None:
            try:
                settings = Settings.from_env(environ)
            except SettingsError as error:
                self._fault(error)
                if environ.pop(error.variable, None) is None:
                    settings = Settings()
        for said in misspelt.values():
            ended = said if said.endswith("?") else f"{said}."
            self._tell("warning", ended, "Correct its name, or unset it: nothing reads it.")
        return settings

    def _detect(self) -> Host:
        """The machine, without overrides that cannot be read."""
        overrides = dict(self._settings.overrides)
        while True:
            try:
                return Host.detect(overrides)
            except SettingsError as error:
                self._fault(error)
                if overrides.pop(error.variable.removeprefix(OVERRIDE_PREFIX), None) is None:
                    raise

    def _machine(self) -> tuple[Fact, ...]:
        host = self._host
        names = [name for name in _FACTS if name not in _left_out(host)]
        if unknown := [name for name in names if name in host.unknown]:
            why = dict.fromkeys(filter(None, (host.provenance.get(name, "") for name in unknown)))
            because = f" ({'; '.join(why)})" if why else ""
            who = f"{OVERRIDE_PREFIX}*" if self._is_here else "the description"
            advice = f"What it decides is taken in doubt; {who} can tell it (docs/hosts.md)."
            self._tell("warning", f"Not known of the machine: {', '.join(unknown)}{because}.", advice)
        if host.torch is None and "torch" not in host.unknown:
            self._tell("error", "torch cannot be found.", "Install torch into the environment of this Python.")
        elif host.torch is not None:
            self._hardware(host)
        return tuple(_fact(host, name) for name in names)

    def _hardware(self, host: Host) -> None:
        """Whether torch can compute here, by the rules that builds for it are held against."""
        build = Build("", Variant("torch", host.backend.kind, backend_version=host.backend.version))
        against = [one for one in judge((driver_rule, device_rule), host, build) if isinstance(one, Reject)]
        for first in against[:1]:  # without a driver, no device is seen
            problem = f"torch {host.torch} is for {host.backend}, which {first.message}."
            variable = f"{OVERRIDE_PREFIX}{host.backend.kind.upper()}"
            cpu = f"Or compute on the CPU: install a torch that is for it, or set {variable} to nothing."
            self._tell("error", problem, f"{first.remedy} {cpu}")

    def _versions(self) -> dict[str, str]:
        there = {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
        for requirement in _requirements():
            name = next((name for name in _REQUIRED if name.replace("_", "-") == requirement.name), "")
            version = there.get(name)
            if not name or (version is None and name == "torch"):  # torch is looked for where Python finds it
                continue
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                here = f"{version} is installed" if version is not None else "it is not installed"
                wrong = f"{_DISTRIBUTION} needs {requirement}, and {here}."
                self._tell("error", wrong, f'Run `pip install "{requirement}"`.')
        needed = {name: there[name] or "not installed" for name in _REQUIRED}
        return {"kernel_loader": __version__} | needed | {n: v for n in _OPTIONAL if (v := there[n]) is not None}

    def _switched(self, kernels: Iterable[Kernel]) -> None:
        """Tell of what was switched on purpose, and may be forgotten."""
        s, names = self._settings, {kernel.name for kernel in kernels}
        if disabled := sorted({normalise(name) for name in s.disable} & names):
            self._tell(
                "note", f"Disabled: {', '.join(disabled)}.", f"{PREFIX}DISABLE says so; unset it to load builds."
            )
        if names and (unknown := sorted({normalise(name) for name in s.disable} - names)):
            wrong = f"{PREFIX}DISABLE names what is no kernel: {', '.join(unknown)}."
            self._tell("warning", wrong, "Correct the names; `kernel-loader list` shows all.")
        if s.disable_mapping:
            self._tell("note", "`kernelize` replaces no layer.", f"{PREFIX}DISABLE_MAPPING says so.")
        if s.ignore_advisories:
            ignored = ", ".join(sorted(s.ignore_advisories))
            self._tell("note", f"Advisories are not heeded: {ignored}.", f"{PREFIX}IGNORE_ADVISORIES says so.")
        if s.overrides and self._is_here:
            told = ", ".join(f"{OVERRIDE_PREFIX}{name}={value}" for name, value in sorted(s.overrides.items()))
            advice = "Builds are chosen for that, and not for what is here. Unset them to go by the machine."
            self._tell("note", f"The machine is not asked for all: {told}.", advice)
        for repo in s.local:
            self._part(f"the directory of {repo}", None, LocalDirectories(s.local).listing, Request(repo))

    # --- store, packages, lock ------------------------------------------------------------------------------------

    def _directory(self, store: Store, home: Path) -> Directory:
        written = home == store.root
        state, nearest = _state(home), next(path for path in (home, *home.parents) if os.path.lexists(path))
        found = Directory(home, written, state, _may(nearest, os.W_OK | os.X_OK))
        remedy = f"Correct {PREFIX}CACHE, the permissions, or the mount."
        if written and state == "is not there":
            found = found._replace(state="")  # made when it is first needed
        elif state:
            self._tell("error" if written else "warning", f"The store at {home} {state}.", remedy)
        with suppress(OSError):
            found = found._replace(free=shutil.disk_usage(nearest).free)
        if written and not found.writable and not found.state:
            severity: Severity = "warning" if self._settings.offline else "error"
            advice = f"What is there loads; to fetch, name a directory of your own first in {PREFIX}CACHE."
            self._tell(severity, f"The store at {home} cannot be written.", advice)
        elif written and found.free is not None and found.free < LEAST_FREE:
            advice = f"Run `kernel-loader cache prune`, or point {PREFIX}CACHE to another disk."
            self._tell("warning", f"The disk of the store at {home} has {found.free:,} B left.", advice)
        if state:
            return found
        builds = self._part(f"the store at {home}", (), lambda: tuple(store.builds_in(home)))
        return found._replace(builds=len(builds), size=sum(build.size for build in builds))

    def _packages(self) -> tuple[Package, ...]:
        what = "the package of builds at"
        bundles = {home: self._part(f"{what} {home}", None, installed, home) for home in installed_builds()}
        return tuple(Package(home, len(one.files), one.size) for home, one in bundles.items() if one is not None)

    def _empty(self, homes: Iterable[Directory], packages: Iterable[Package], kernels: Iterable[Kernel]) -> None:
        lacking = [kernel.name for kernel in kernels if kernel.state in ("to fetch", "not known")]
        has_builds = any(home.builds for home in homes) or any(package.builds for package in packages)
        if not self._settings.offline or not lacking or has_builds:
            return
        variables = " and ".join(_said_by("offline", self._environ))
        advice = (
            "Bring builds with `kernel-loader import BUNDLE`, or `kernel-loader prefetch` where the Hub can be asked"
            f"{f'; {variables} sets the mode' if variables else ''}."
        )
        self._tell("error", f"Offline, and no build is here: {len(lacking)} kernels cannot be loaded.", advice)

    def _read_lock(self) -> Lock | None:
        return Lock.read(str(self._settings.lock)) if self._settings.lock is not None else None

    def _locked(self) -> Locked | None:
        if self._lock is None:
            return None
        try:
            taken = {name: found.taken for name, found in self._lock.select(self._host).items()}
        except LockError:  # it names commits alone: what is there is not known
            taken = {}
        builds = {name: one.chosen.name if one is not None and one.chosen else "" for name, one in taken.items()}
        return Locked(self._lock.file, len(self._lock.repositories), builds)

    # --- kernels --------------------------------------------------------------------------------------------------

    def _kernels(self) -> tuple[Kernel, ...]:
        loader = self._loader()
        kernels = tuple(
            self._part(f"the kernel {name}", Kernel(name, "does not load", why=_SEE), self._kernel, loader, name)
            for name in (*loader.catalog.names(), *self._locked_repositories())
        )
        self._part("the capabilities", None, _ask_capabilities, loader, self._host)
        return kernels

    def _locked_repositories(self) -> Iterator[str]:
        """What the lock names that has no name of its own."""
        return (kernel.name for kernel in (self._lock.kernels if self._lock is not None else ()) if "/" in kernel.name)

    def _loader(self) -> KernelLoader:
        """A loader that asks nobody, without what cannot be read."""
        settings = replace(self._settings, lock=None, offline=True)
        while True:
            try:
                return KernelLoader(settings, self._host, lock=self._lock)
            except SettingsError as error:
                self._fault(error)
                kept = tuple(path for path in settings.manifests if str(path) != error.value)
                if kept == settings.manifests:
                    raise
                settings = replace(settings, manifests=kept)

    def _kernel(self, loader: KernelLoader, name: str) -> Kernel:
        build, (known, version, revision) = "", spelt(name)
        try:
            manifest = loader.catalog.get(known) if "/" not in known else None
            found = loader.resolve(known, version=version, revision=revision, host=self._host, partly=True)
            if found.doubt:
                return Kernel(name, "not known")
            taken = found.taken
            if taken is None or taken.chosen is None:
                return Kernel(name, "does not load", why=_why(found, manifest))
            build = taken.chosen.name
            if found.is_reference:
                if self._settings.fallback == "error":
                    return Kernel(name, "does not load", build, why=f"{PREFIX}FALLBACK=error refuses the reference")
                return Kernel(name, "reference", build, "embedded", _why(found, manifest))
            first, *_ = loader.prefetch(name, hosts=self._host, dry_run=True)
        except NotCached:
            return Kernel(name, "to fetch", build)
        except KernelLoaderError as error:
            if isinstance(error, LockMissing) and not self._is_locked(name):
                return Kernel(name, "does not load", why="not in the lock")
            self._fault(error)
            return Kernel(name, "does not load", build, why=_SEE)
        return Kernel(name, "ready", build, _where(found, taken, first.path, loader))

    def _is_locked(self, name: str) -> bool:
        return self._lock is not None and name in {normalise(kernel.name) for kernel in self._lock.kernels}

    def _without_locked_build(self, lock: Locked | None, kernels: Iterable[Kernel]) -> None:
        """Tell of what is locked, and has no build for this machine among what is locked."""
        there = {kernel.name: kernel for kernel in kernels}
        for name, build in lock.kernels.items() if lock is not None else ():
            unknown = Kernel(name, "ready" if build else "does not load")
            kernel = there.get(name if "/" in name else normalise(name), unknown)
            if kernel.state == "to fetch" and self._settings.offline:
                advice = "Bring it with `kernel-loader import BUNDLE`, or prefetch it where the Hub can be asked."
                self._tell("error", f"The lock names {name}, its build is not here, and nobody may be asked.", advice)
            if kernel.state not in ("reference", "does not load") or kernel.why == _SEE:
                continue
            severity: Severity = "warning" if kernel.state == "reference" else "error"
            then = "its slow reference is taken" if kernel.state == "reference" else "it does not load"
            why = f" ({kernel.why})" if kernel.why else ""
            advice = f"`kernel-loader explain {name}` shows what is missing; `kernel-loader lock --upgrade` may help."
            self._tell(severity, f"The lock names {name} and no build of it runs here{why}: {then}.", advice)


# --- in words -------------------------------------------------------------------------------------------------------


def _is_rows(value: object) -> bool:
    return type(value) is tuple


def _left_out(host: Host) -> set[str]:
    """Facts that decide nothing on such a machine."""
    system = {"glibc"} if host.os != "linux" else set()
    system |= {"macos"} if host.os != "darwin" else set()
    return system | ({"cuda_toolkit", "driver"} if host.backend.kind != "cuda" else set())


def _fact(host: Host, name: str) -> Fact:
    if name == "backend":
        told = {kind for kind in BACKEND_KINDS if _is_override(host.provenance.get(kind))}
        which = host.backend.kind.upper() if host.backend.kind in told else "*"
        return Fact(name, str(host.backend), f"{OVERRIDE_PREFIX}{which}" if told else "")
    source = host.provenance.get(name, "")
    if name in host.unknown:
        return Fact(name, "unknown", source)
    value = getattr(host, name)
    if name == "devices":
        counted = {device: sum(other == device for other in value) for device in dict.fromkeys(value)}
        value = ", ".join(f"{count} x {one.arch} {one.name}".strip() for one, count in counted.items()) or "none"
    elif name == "python" and host.free_threaded:
        value = f"{value}, free-threaded"
    return Fact(name, "none" if value is None else str(value), source if _is_override(source) else "")


def _is_override(source: str | None) -> bool:
    return source is not None and source.startswith(OVERRIDE_PREFIX)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Any]:
    """What this package says that it needs; nothing where it runs without being installed, or cannot be asked."""
    with suppress(ImportError):
        from packaging.requirements import Requirement

        with suppress(importlib.metadata.PackageNotFoundError):
            found = map(Requirement, importlib.metadata.requires(_DISTRIBUTION) or ())
            return [requirement for requirement in found if requirement.marker is None or requirement.marker.evaluate()]
    return []


def _settings_in_words(settings: Settings, environ: Mapping[str, str]) -> tuple[Setting, ...]:
    return tuple(
        Setting(field.name, _in_words(field.name, getattr(settings, field.name)), _said_by(field.name, environ))
        for field in fields(Settings)
    )


def _said_by(setting: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that set a setting to something else than its default."""
    if setting == "overrides":
        return (f"{OVERRIDE_PREFIX}*",) if any(name.startswith(OVERRIDE_PREFIX) for name in environ) else ()
    variables = _VARIABLES.get(setting, (f"{PREFIX}{setting.upper()}",))
    default, said = getattr(Settings(), setting), []
    for variable in (name for name in variables if name in environ):
        with suppress(SettingsError):  # which is a finding
            if getattr(Settings.from_env({variable: environ[variable]}), setting) != default:
                said.append(variable)
    return tuple(said)


def _in_words(name: str, value: object) -> str:
    if name == "refresh_after" and isinstance(value, float):
        return f"{value:g} s"
    if isinstance(value, Mapping):
        pairs = ((key, ",".join(item) if isinstance(item, tuple) else item) for key, item in value.items())
        return ", ".join(f"{key}={item}" for key, item in pairs) or "none"
    if isinstance(value, tuple | frozenset):
        return ", ".join(sorted(map(str, value)) if isinstance(value, frozenset) else map(str, value)) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)


def _hub_settings(environ: Mapping[str, str]) -> dict[str, str]:
    proxies = [name for upper in _PROXIES for name in (upper, upper.lower())]
    said = {name: _without_credentials(environ[name]) for name in (*_OF_THE_HUB, *proxies) if environ.get(name)}
    return said | {"token": _token(environ)}


def _token(environ: Mapping[str, str]) -> str:
    """Whether there is a token, and in which way."""
    for name in _TOKENS:
        if environ.get(name):
            return f"there, in {name}"
    try:
        from huggingface_hub.constants import HF_TOKEN_PATH

        return "there, in a file of the client" if Path(HF_TOKEN_PATH).is_file() else "none"
    except (ImportError, OSError):
        return "not known"


def _without_credentials(address: str) -> str:
    """An address without user, password, query and fragment. A password may hold any character, even a slash."""
    scheme, separator, rest = address.rpartition("://") if "://" in address else ("", "", address)
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{'***@' if at else ''}{re.split('[?#]', host)[0]}"


def without_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """A text without tokens of the Hub and without credentials of addresses, whoever wrote them into it."""
    for secret in (environ.get(name, "") for name in _TOKENS):
        if len(secret) > 3:
            text = text.replace(secret, "***")
    text = re.sub(r"\bhf_\w{8,}", "hf_***", text)
    text = re.sub(r"//[^\s/\"'`]*@", "//***@", text)
    return re.sub(r"[^\s/\"'`:]+:[^\s/\"'`]*@", "***@", text)


def _state(path: Path) -> str:
    """What is wrong with a directory; empty where nothing is."""
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return "is not there"
    except NotADirectoryError:
        return "is no directory"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if not is_directory:
        return "is no directory"
    return "" if _may(path, os.R_OK | os.X_OK) else "cannot be read"


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def _ask_capabilities(loader: KernelLoader, host: Host) -> None:
    from kernel_loader.capability import Wanted

    for name in loader.catalog.capabilities:
        loader.catalog.offers(Wanted(name), host.backend.kind)


def _why(found: Resolution, manifest: Manifest | None) -> str:
    """Why no build that is published fits, in a few words that many kernels share."""
    places, kind = (manifest, *manifest.alternatives) if manifest is not None else (), found.host.backend.kind
    if (
        manifest is not None
        and manifest.repo is not None
        and all(one.backends and kind not in one.backends for one in places)
    ):
        backends = dict.fromkeys(backend for one in places for backend in one.backends)
        return f"for {', '.join(sorted(backends))}, and not {kind}"
    looked = (found, *found.alternatives)
    for one in looked:
        if one.nearest is not None:
            return one.nearest.reasons[0].message
    return next((one.note for one in looked if one.note), "it has no builds")


def _where(found: Resolution, taken: Resolution, path: Path | None, loader: KernelLoader) -> str:
    if taken is found.reference:
        return "embedded"
    if taken.repo.partition("@")[0] in loader.settings.local:
        return "local directory"
    if path is None:
        return "Hugging Face cache"
    return "store" if any(path.is_relative_to(home) for home in loader.store.directories) else "package"
