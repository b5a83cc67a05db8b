"""Settings: what the environment says, read once when a loader is made, never at import."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self, cast, get_args

from kernel_loader.errors import SettingsError

logger = logging.getLogger("kernel_loader")

Fallback = Literal["reference", "error"]

PREFIX: Final = "KERNEL_LOADER_"
OVERRIDE_PREFIX: Final = f"{PREFIX}OVERRIDE_"

VARIABLES: Final = tuple(
    f"{PREFIX}{name}"
    for name in (
        "CACHE",
        "DISABLE",
        "DISABLE_MAPPING",
        "FALLBACK",
        "IGNORE_ADVISORIES",
        "LOCAL",
        "LOCK",
        "MANIFESTS",
        "OFFLINE",
        "PREFER",
        "REFRESH_AFTER",
        "STRICT",
    )
)

DAY: Final = 24 * 3600.0

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"", "0", "false", "no", "off"})

# An entry starts where a repository id and an equals sign follow a separator; a separator elsewhere belongs to a
# path, as in C:\kernels.
_REPO: Final = r"[\w.\-]+/[\w.\-]+"


def _default_cache() -> Path:
    import platformdirs

    return platformdirs.user_cache_path("kernel-loader", appauthor=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one `KernelLoader` behaves. `Settings()` is the default; `from_env` reads the environment.

    Attributes:
        fallback: what to do when a build fails ("reference" takes the slow reference, with a warning), or when none
            fits ("error" refuses the reference). None: raise on failure, take the reference where nothing fits.
        local: repository id -> a directory that stands for it: a repository, its `build/`, or one build.
        lock: a lock file: of what it names, no other bytes are loaded, and nothing that it does not name.
        manifests: directories with manifests of your own; the first that names a kernel wins.
        disable: kernels, by name, for which the reference is always taken.
        prefer: capability -> kernels, by name, that are asked before all others, the first one first.
        ignore_advisories: ids of advisories that are not heeded; "all" for every one.
        disable_mapping: `kernelize` replaces no layer.
        strict: refuse builds whose compatibility cannot be decided, instead of trying them with a warning.
        cache: directory of the store, which is read first and alone is written.
        shared: further directories of stores that others fill, read in their order. One that is not there is no error.
        offline: never ask the Hub.
        refresh_after: seconds after which a version that may have moved is asked about again.
        overrides: facts about the machine that replace what the probes find, such as `{"CUDA": "12.8"}`; an empty
            text says that the thing is absent.
    """

    fallback: Fallback | None = None
    local: Mapping[str, Path] = field(default_factory=dict)
    lock: Path | None = None
    manifests: tuple[Path, ...] = ()
    disable: frozenset[str] = frozenset()
    prefer: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignore_advisories: frozenset[str] = frozenset()
    disable_mapping: bool = False
    strict: bool = False
    cache: Path = field(default_factory=_default_cache)
    shared: tuple[Path, ...] = ()
    offline: bool = False
    refresh_after: float = DAY
    overrides: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fallback not in (None, *get_args(Fallback)):
            raise SettingsError("Settings.fallback", str(self.fallback), '"reference", "error" or None')
        given = (self.disable, self.ignore_advisories, self.manifests, self.shared, *self.prefer.values())
        if any(isinstance(value, str) for value in cast("tuple[object, ...]", given)):
            collections = "disable, ignore_advisories, manifests and shared"
            expected = f"a collection of texts for {collections}, and for each key of prefer"
            raise SettingsError("Settings", "a text", expected)
        # What a caller may write as text is a path here.
        object.__setattr__(self, "local", {repo: Path(path) for repo, path in self.local.items()})
        object.__setattr__(self, "lock", Path(self.lock).absolute() if self.lock is not None else None)
        object.__setattr__(self, "manifests", tuple(Path(path).absolute() for path in self.manifests))
        object.__setattr__(self, "disable", frozenset(self.disable))
        object.__setattr__(self, "prefer", {name: tuple(kernels) for name, kernels in self.prefer.items()})
        object.__setattr__(self, "ignore_advisories", frozenset(self.ignore_advisories))
        object.__setattr__(self, "cache", Path(self.cache).absolute())
        # Each directory once. The disk is not asked: one that does not answer must not stop what does not need it.
        _, *shared = dict.fromkeys((self.cache, *(Path(path).absolute() for path in self.shared)))
        object.__setattr__(self, "shared", tuple(shared))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read `KERNEL_LOADER_*` (and `LOCAL_KERNELS`, which users of other loaders have set).

        Raises:
            SettingsError: a variable holds something that cannot be read.
        """
        for said in unknown(environ).values():
            logger.warning("%s", said)
        cache, *shared = _paths(environ, f"{PREFIX}CACHE") or (_default_cache(),)
        return cls(
            fallback=_fallback(environ),
            # Ours is read last, so that it wins.
            local=_local(environ, "LOCAL_KERNELS", ":;") | _local(environ, f"{PREFIX}LOCAL", os.pathsep),
            lock=_path(f"{PREFIX}LOCK", environ[f"{PREFIX}LOCK"]) if environ.get(f"{PREFIX}LOCK") else None,
            manifests=_paths(environ, f"{PREFIX}MANIFESTS"),
            disable=_names(environ, f"{PREFIX}DISABLE"),
            prefer=_prefer(environ, f"{PREFIX}PREFER"),
            ignore_advisories=_names(environ, f"{PREFIX}IGNORE_ADVISORIES"),
            disable_mapping=_boolean(environ, f"{PREFIX}DISABLE_MAPPING"),
            strict=_boolean(environ, f"{PREFIX}STRICT"),
            offline=_boolean(environ, f"{PREFIX}OFFLINE") or _boolean(environ, "HF_HUB_OFFLINE"),
            refresh_after=_seconds(environ, f"{PREFIX}REFRESH_AFTER", DAY),
            cache=cache,
            shared=tuple(shared),
            overrides={
                key.removeprefix(OVERRIDE_PREFIX): value
                for key, value in environ.items()
                if key.startswith(OVERRIDE_PREFIX)
            },
        )


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are not read, most of them misspelt, and what to say of each."""
    found = {}
    for name in environ:
        if name.startswith(PREFIX) and not name.startswith(OVERRIDE_PREFIX) and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            found[name] = f"{name} is no setting{f'; did you mean {near[0]}?' if near else ''}"
    return found


def _fallback(environ: Mapping[str, str]) -> Fallback | None:
    variable = f"{PREFIX}FALLBACK"
    match environ.get(variable, "").lower():
        case "":
            return None
        case "reference":
            return "reference"
        case "error":
            return "error"
    raise SettingsError(variable, environ[variable], '"reference" or "error"')


def _names(environ: Mapping[str, str], variable: str) -> frozenset[str]:
    return frozenset(environ.get(variable, "").replace(",", " ").split())


def _prefer(environ: Mapping[str, str], variable: str) -> dict[str, tuple[str, ...]]:
    value = environ.get(variable, "")
    prefer: dict[str, tuple[str, ...]] = {}
    for entry in filter(str.strip, value.split(";")):
        capability, equals, kernels = (part.strip() for part in entry.partition("="))
        names = tuple(kernels.replace(",", " ").split())
        if not (capability and equals and names) or "=" in kernels:
            raise SettingsError(variable, value, "capability=kernel,kernel entries separated by ';'")
        if capability in prefer:
            raise SettingsError(variable, value, f"one list a capability; {capability} has two")
        prefer[capability] = names
    return prefer


def _boolean(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "")
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise SettingsError(variable, value, "1 or 0")


def _path(variable: str, value: str) -> Path:
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise SettingsError(variable, value, "a path; the home of that user is not known") from error


def _paths(environ: Mapping[str, str], variable: str) -> tuple[Path, ...]:
    return tuple(_path(variable, part) for part in environ.get(variable, "").split(os.pathsep) if part)


def _seconds(environ: Mapping[str, str], variable: str, default: float) -> float:
    value = environ.get(variable, "")
    if not value:
        return default
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd]?)", value)
    if match is None:
        raise SettingsError(variable, value, "seconds, or a number with m, h or d, such as 12h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _local(environ: Mapping[str, str], variable: str, separators: str) -> dict[str, Path]:
    value = environ.get(variable, "")
    local: dict[str, Path] = {}
    for entry in re.split(rf"[{separators}]+(?={_REPO}=)", value.strip(separators)) if value else []:
        match = re.fullmatch(rf"({_REPO})=(.+)", entry, re.DOTALL)
        if match is None:
            raise SettingsError(variable, value, f"repo=path entries separated by {separators[0]!r}")
        if match[1] in local:
            raise SettingsError(variable, value, f"one directory a repository; {match[1]} has two")
        local[match[1]] = _path(variable, match[2])
    return local
