"""Settings: what the environment says, read once when a loader is made, never at import."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, Self

from kernel_loader.errors import SettingsError

Fallback = Literal["reference", "error"]

PREFIX: Final = "KERNEL_LOADER_"
OVERRIDE_PREFIX: Final = f"{PREFIX}OVERRIDE_"

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"", "0", "false", "no", "off"})

# An entry starts where a repository id and an equals sign follow a separator; a separator elsewhere belongs to a
# path, as in C:\kernels.
_REPO: Final = r"[\w.\-]+/[\w.\-]+"
_LOCAL_ENTRY: Final = re.compile(rf"({_REPO})=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one `KernelLoader` behaves. `Settings()` is the default; `from_env` reads the environment.

    Attributes:
        fallback: what to do when a build fails ("reference" takes the slow reference, with a warning), or when none
            fits ("error" refuses the reference). None: raise on failure, take the reference where nothing fits.
        local: repository id -> a directory that stands for it: a repository, its `build/`, or one build.
        manifests: directories with manifests of your own; the first that names a kernel wins.
        disable: kernels, by name, for which the reference is always taken.
        strict: refuse builds whose compatibility cannot be decided, instead of trying them with a warning.
        overrides: facts about the machine that replace what the probes find, such as `{"CUDA": "12.8"}`; an empty
            text says that the thing is absent.
    """

    fallback: Fallback | None = None
    local: Mapping[str, Path] = field(default_factory=dict)
    manifests: tuple[Path, ...] = ()
    disable: frozenset[str] = frozenset()
    strict: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read `KERNEL_LOADER_*` (and `LOCAL_KERNELS`, which users of other loaders have set).

        Raises:
            SettingsError: a variable holds something that cannot be read.
        """
        return cls(
            fallback=_fallback(environ),
            # Ours is read last, so that it wins.
            local=_local(environ, "LOCAL_KERNELS", ":;") | _local(environ, f"{PREFIX}LOCAL", os.pathsep),
            manifests=tuple(Path(p).expanduser() for p in environ.get(f"{PREFIX}MANIFESTS", "").split(os.pathsep) if p),
            disable=frozenset(re.findall(r"[^\s,]+", environ.get(f"{PREFIX}DISABLE", ""))),
            strict=_boolean(environ, f"{PREFIX}STRICT"),
            overrides={
                key.removeprefix(OVERRIDE_PREFIX): value
                for key, value in environ.items()
                if key.startswith(OVERRIDE_PREFIX)
            },
        )


def _fallback(environ: Mapping[str, str]) -> Fallback | None:
    variable = f"{PREFIX}FALLBACK"
    match environ.get(variable, ""):
        case "":
            return None
        case "reference":
            return "reference"
        case "error":
            return "error"
        case value:
            raise SettingsError(variable, value, '"reference" or "error"')


def _boolean(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "")
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise SettingsError(variable, value, "1 or 0")


def _local(environ: Mapping[str, str], variable: str, separators: str) -> dict[str, Path]:
    value = environ.get(variable, "")
    local: dict[str, Path] = {}
    for entry in re.split(rf"[{separators}]+(?={_REPO}=)", value.strip(separators)) if value else []:
        match = _LOCAL_ENTRY.fullmatch(entry)
        if match is None:
            raise SettingsError(variable, value, f"repo=path entries separated by {separators[0]!r}")
        local[match[1]] = Path(match[2]).expanduser()
    return local
