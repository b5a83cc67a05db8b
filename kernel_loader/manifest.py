"""Manifest: what a named kernel is. The content of one TOML file in manifests/, checked."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kernel_loader.errors import ManifestError
from kernel_loader.host import BACKEND_KINDS
from kernel_loader.reading import Node
from kernel_loader.rules import NOTHING, Requires

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

_NAME: Final = r"[a-z][a-z0-9_]*"
REPO: Final = r"[\w\-][\w.\-]*/[\w\-][\w.\-]*"
_DIRECTORY: Final = r"[a-z0-9][a-z0-9\-]*"
_DOTTED: Final = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_CLASS: Final = rf"{_DOTTED}:{_DOTTED}"

_KEYS: Final = frozenset(
    {"name", "summary", "repo", "version", "revision", "backends", "bundle", "reference", "requires", "entrypoints"}
)
_SPECIFIERS: Final = {
    "cuda-capability": "cuda_capability",
    "cuda-toolkit": "cuda_toolkit",
    "driver": "driver",
    "torch": "torch",
}


class Entrypoint(NamedTuple):
    """A symbol of the kernel's module; with `call`, the value that calling it once, at load, returns."""

    symbol: str
    call: bool = False

    def __str__(self) -> str:
        return f"{self.symbol}()" if self.call else self.symbol


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A named kernel.

    Attributes:
        name: the registered name, with underscores.
        repo: repository on the Hub; None for a kernel that is only embedded.
        version: version of the repository (its branch `v<N>`); `revision` names a branch, tag or commit instead.
        backends: kinds of backend that the repository is for; empty for any.
        bundle: "module:Class" of the bundle; None makes a dataclass from the entrypoints.
        reference: directory with the reference builds, below registry/ beside the manifest or in this package.
        requires: what the kernel demands of a host beyond what its builds say.
        entrypoints: field of the bundle -> what it is bound to. Fields that are not here bind to their own name.
        file: where the manifest was read, for errors.
        is_anonymous: no manifest was written; it stands for a repository that a caller names.
    """

    name: str
    summary: str = ""
    repo: str | None = None
    version: int | None = None
    revision: str | None = None
    backends: tuple[str, ...] = ()
    bundle: str | None = None
    reference: str | None = None
    requires: Requires = NOTHING
    entrypoints: Mapping[str, Entrypoint] = field(default_factory=dict, hash=False)
    file: str = field(default="", compare=False)
    is_anonymous: bool = False

    @classmethod
    def parse(cls, text: str, file: str) -> Self:
        """Read the text of a manifest.

        Raises:
            ManifestError: not TOML, an unknown key, a missing one, or a value of the wrong form.
        """
        import tomllib

        try:
            table = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # of numbers with too many digits, only the former
            raise ManifestError(file, "", f"not TOML ({error})") from error
        return cls.from_table(table, file)

    @classmethod
    def from_table(cls, table: Mapping[str, object], file: str) -> Self:
        """Read a manifest that is already a table, as a bundle class carries it.

        Raises:
            ManifestError: an unknown key, a missing one, or a value of the wrong form.
        """
        root = Node(dict(table), lambda path, detail: ManifestError(file, path, detail))
        keys = _known(root, _KEYS)
        if "name" not in keys:
            root.error("the key name is missing")
        if "repo" not in keys and "reference" not in keys:
            root.error("a kernel needs a repo, a reference, or both")
        if "repo" not in keys and ("version" in keys or "revision" in keys):
            root.error("a version or a revision is that of a repo, and there is none")
        if "repo" in keys and ("version" in keys) == ("revision" in keys):
            root.error("a repo needs a version or a revision, and not both")
        return cls(
            name=keys["name"].text(_NAME, "a name in lower case with underscores"),
            summary=keys["summary"].text() if "summary" in keys else "",
            repo=keys["repo"].text(REPO, "a repository id (organisation/name)") if "repo" in keys else None,
            version=keys["version"].integer() if "version" in keys else None,
            revision=keys["revision"].text(r"\S+", "a branch, tag or commit") if "revision" in keys else None,
            backends=_backends(keys["backends"]) if "backends" in keys else (),
            bundle=keys["bundle"].text(_CLASS, "a class (module:Class)") if "bundle" in keys else None,
            reference=keys["reference"].text(_DIRECTORY, "a directory of registry/") if "reference" in keys else None,
            requires=_requires(keys["requires"]) if "requires" in keys else NOTHING,
            entrypoints=_entrypoints(keys["entrypoints"]) if "entrypoints" in keys else {},
            file=file,
        )


def normalise(name: str) -> str:
    """The registered form of a kernel's name: "finegrained-fp8" and "finegrained_fp8" are one."""
    return name.replace("-", "_").lower()


def _known(node: Node, names: frozenset[str]) -> dict[str, Node]:
    table = node.table()
    for key, value in table.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)  # a class may hold any key
            value.error(f"unknown key; did you mean {near[0]}?" if near else f"unknown key; there are {_listed(names)}")
    return table


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _backends(node: Node) -> tuple[str, ...]:
    for item in node.items():
        if item.text() not in BACKEND_KINDS:
            item.error(f"{item.text()!r} is not one of {', '.join(BACKEND_KINDS)}")
    return node.texts()


def _requires(node: Node) -> Requires:
    table = _known(node, frozenset(_SPECIFIERS) | {"gfx", "python"})
    specifiers = {attribute: _specifier(table[key]) for key, attribute in _SPECIFIERS.items() if key in table}
    return Requires(
        **specifiers,
        gfx=_gfx(table["gfx"]) if "gfx" in table else (),
        python=_requirements(table["python"]) if "python" in table else (),
    )


def _gfx(node: Node) -> tuple[str, ...]:
    return tuple(item.text(r"gfx[0-9a-f]+", "a gfx name, such as gfx942") for item in node.items())


def _specifier(node: Node) -> SpecifierSet:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(node.text())
    except InvalidSpecifier:
        node.error(f'{node.text()!r} is not a version specifier such as ">=8.9"')


def _requirements(node: Node) -> tuple[str, ...]:
    from packaging.requirements import InvalidRequirement, Requirement

    for item in node.items():
        try:
            Requirement(item.text())
        except InvalidRequirement as error:
            item.error(f"{item.text()!r} is not a requirement ({str(error).splitlines()[0]})")
    return node.texts()


def _entrypoints(node: Node) -> dict[str, Entrypoint]:
    found = {}
    for name, value in node.table().items():
        if not name.isidentifier() or keyword.iskeyword(name):
            value.error(f"{name!r} cannot be the name of a field")
        if isinstance(value.value, dict):
            call = _known(value, frozenset({"call"}))
            if not call:
                value.error("a table here is { call = ... }")
            found[name] = Entrypoint(call["call"].text(_DOTTED, "a dotted symbol"), call=True)
        else:
            found[name] = Entrypoint(value.text(_DOTTED, "a dotted symbol"))
    return found
