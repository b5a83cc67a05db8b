"""Manifest: what a named kernel is. The content of one TOML file in manifests/, checked."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernel_loader.errors import ManifestError
from kernel_loader.host import BACKEND_KINDS
from kernel_loader.reading import Node, shown
from kernel_loader.rules import NOTHING, Requires, is_version

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

NAME: Final = r"[a-z][a-z0-9_]*"  # of a kernel, and of a capability
FEATURE: Final = r"[a-z0-9][a-z0-9\-]*"
REPO: Final = r"[\w\-][\w.\-]*/[\w\-][\w.\-]*"
_DIRECTORY: Final = r"[a-z0-9][a-z0-9\-]*"
_DOTTED: Final = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_CLASS: Final = rf"{_DOTTED}:{_DOTTED}"

# Keys that are about one repository; an alternative has them too.
_REPOSITORY_KEYS: Final = frozenset({"repo", "version", "revision", "backends", "requires", "entrypoints", "guards"})
_KEYS: Final = _REPOSITORY_KEYS | {"name", "summary", "bundle", "reference", "grid", "capabilities", "alternatives"}
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


class Guard(NamedTuple):
    """What is put around an entrypoint of the builds of some versions of a repository; of all of them with None."""

    name: str
    versions: SpecifierSet | None = None


class Offered(NamedTuple):
    """A feature of a capability, on some kinds of backend; on all that the kernel has builds for with none."""

    feature: str
    backends: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.feature} on {' and '.join(self.backends)}" if self.backends else self.feature


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
        grid: "module:NAME" of the calls, with what each must return, that builds of the kernel are held against.
        requires: what the kernel demands of a host beyond what its builds say.
        entrypoints: field of the bundle -> what it is bound to. Fields that are not here bind to their own name.
        guards: field of the bundle -> what its function is guarded by, in builds of the repository.
        capabilities: what the kernel can do, in each of its repositories and by its reference: capability -> features.
        alternatives: the same kernel in other repositories, asked in this order where no build of this one fits.
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
    grid: str | None = None
    requires: Requires = NOTHING
    entrypoints: Mapping[str, Entrypoint] = field(default_factory=dict, hash=False)
    guards: Mapping[str, tuple[Guard, ...]] = field(default_factory=dict, hash=False)
    capabilities: Mapping[str, tuple[Offered, ...]] = field(default_factory=dict, hash=False)
    alternatives: tuple[Manifest, ...] = ()
    file: str = field(default="", compare=False)
    is_anonymous: bool = False

    @classmethod
    def parse(cls, text: str, file: str) -> Manifest:
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
    def from_table(cls, table: Mapping[str, object], file: str) -> Manifest:
        """Read a manifest that is already a table, as a bundle class carries it.

        Raises:
            ManifestError: an unknown key, a missing one, or a value of the wrong form.
        """
        root = Node(dict(table), lambda path, detail: ManifestError(file, path, detail))
        keys = known(root, _KEYS)
        if "name" not in keys:
            root.error("the key name is missing")
        if "repo" not in keys and "reference" not in keys:
            root.error("a kernel needs a repo, a reference, or both")
        for key in ("version", "revision", "guards", "alternatives"):
            if key in keys and "repo" not in keys:
                root.error(f"{key} is about a repo, and there is none")
        kernel = cls(
            name=keys["name"].text(NAME, "a name in lower case with underscores"),
            summary=keys["summary"].text() if "summary" in keys else "",
            bundle=keys["bundle"].text(_CLASS, "a class (module:Class)") if "bundle" in keys else None,
            reference=keys["reference"].text(_DIRECTORY, "a directory of registry/") if "reference" in keys else None,
            grid=keys["grid"].text(_CLASS, "an attribute of a module (module:NAME)") if "grid" in keys else None,
            capabilities=_capabilities(keys["capabilities"]) if "capabilities" in keys else {},
            file=file,
        )
        main = _in_repository(kernel, root, keys)
        others = keys["alternatives"].items() if "alternatives" in keys else ()
        # Symbols are alike in most repositories of a kernel; what else is said of one is said of it alone.
        like = replace(kernel, entrypoints=main.entrypoints)
        return replace(main, alternatives=tuple(_alternative(like, node) for node in others))

    def guards_of(self, version: int | None) -> dict[str, tuple[str, ...]]:
        """Field of the bundle -> names of its guards, for a version of the repository.

        A version that is not known may be one that needs them.
        """
        named = {
            field: tuple(guard.name for guard in guards if is_version(guard.versions, version) is not False)
            for field, guards in self.guards.items()
        }
        return {field: names for field, names in named.items() if names}

    def offers(self, capability: str, kind: str | None = None) -> tuple[str, ...]:
        """Features of a capability that the kernel has on a kind of backend; on any with None."""
        offered = self.capabilities.get(capability, ())
        return tuple(o.feature for o in offered if kind is None or not o.backends or kind in o.backends)

    def unguarded(self) -> Manifest:
        """The kernel without its guards, for callers who take the module instead of the bundle."""
        others = tuple(replace(alternative, guards={}) for alternative in self.alternatives)
        return replace(self, guards={}, alternatives=others)


def normalise(name: str) -> str:
    """The registered form of a kernel's name: "finegrained-fp8" and "finegrained_fp8" are one."""
    return name.replace("-", "_").lower()


def known(node: Node, names: frozenset[str]) -> dict[str, Node]:
    """A table that has no other keys than these.

    Raises:
        The document's error: an unknown key.
    """
    table = node.table()
    for key, value in table.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1)  # a class may hold any key
            value.error(f"unknown key; did you mean {near[0]}?" if near else f"unknown key; there are {_listed(names)}")
    return table


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _in_repository(kernel: Manifest, node: Node, keys: dict[str, Node]) -> Manifest:
    """The kernel, in the repository that a table names."""
    if "repo" in keys and ("version" in keys) == ("revision" in keys):
        node.error("a repo needs a version or a revision, and not both")
    return replace(
        kernel,
        repo=keys["repo"].text(REPO, "a repository id (organisation/name)") if "repo" in keys else None,
        version=keys["version"].integer() if "version" in keys else None,
        revision=keys["revision"].text(r"\S+", "a branch, tag or commit") if "revision" in keys else None,
        backends=read_backends(keys["backends"]) if "backends" in keys else (),
        requires=read_requires(keys["requires"]) if "requires" in keys else NOTHING,
        entrypoints=_entrypoints(keys["entrypoints"]) if "entrypoints" in keys else kernel.entrypoints,
        guards=_guards(keys["guards"]) if "guards" in keys else {},
    )


def _alternative(kernel: Manifest, node: Node) -> Manifest:
    keys = known(node, _REPOSITORY_KEYS)
    if "repo" not in keys:
        node.error("the key repo is missing")
    return _in_repository(kernel, node, keys)


def _capabilities(node: Node) -> dict[str, tuple[Offered, ...]]:
    """Whether they are known is looked at by the catalog, which has the list."""
    table = node.table()
    for name, features in table.items():
        Node(name, node.fail, features.path).text(NAME, "a name in lower case with underscores")
    return {name: tuple(_offered(item) for item in features.items()) for name, features in table.items()}


def _offered(node: Node) -> Offered:
    if not isinstance(node.value, dict):
        return Offered(node.text(FEATURE, "a name in lower case with dashes"))
    table = known(node, frozenset({"feature", "backends"}))
    if "feature" not in table or "backends" not in table:
        node.error("a table here is { feature = ..., backends = [...] }")
    name = table["feature"].text(FEATURE, "a name in lower case with dashes")
    return Offered(name, read_backends(table["backends"]))


def read_backends(node: Node) -> tuple[str, ...]:
    """Kinds of backend.

    Raises:
        The document's error: there is no such kind.
    """
    for item in node.items():
        if item.text() not in BACKEND_KINDS:
            item.error(f"{item.text()!r} is not one of {', '.join(BACKEND_KINDS)}")
    return node.texts()


def read_requires(node: Node) -> Requires:
    """What a `requires` table demands of a host.

    Raises:
        The document's error: an unknown key, or a value of the wrong form.
    """
    table = known(node, frozenset(_SPECIFIERS) | {"gfx", "python"})
    specifiers = {attribute: read_specifier(table[key]) for key, attribute in _SPECIFIERS.items() if key in table}
    return Requires(
        **specifiers,
        gfx=_gfx(table["gfx"]) if "gfx" in table else (),
        python=_requirements(table["python"]) if "python" in table else (),
    )


def requires_table(requires: Requires) -> dict[str, Any]:
    """The table that `read_requires` reads."""
    named = {key: getattr(requires, attribute) for key, attribute in _SPECIFIERS.items()}
    lists = {"gfx": list(requires.gfx), "python": list(requires.python)}
    return {key: str(value) for key, value in named.items() if value is not None} | {
        k: v for k, v in lists.items() if v
    }


def _gfx(node: Node) -> tuple[str, ...]:
    return tuple(item.text(r"gfx[0-9a-f]+", "a gfx name, such as gfx942") for item in node.items())


def read_specifier(node: Node) -> SpecifierSet:
    """A specifier of versions, such as ">=8.9".

    Raises:
        The document's error: it is none.
    """
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(node.text())
    except InvalidSpecifier:
        node.error(f'{node.text()!r} is not a version specifier such as ">=8.9"')


def _guards(node: Node) -> dict[str, tuple[Guard, ...]]:
    return {
        field: tuple(guard for item in names.items() for guard in _of_versions(item))
        for field, names in node.table().items()
    }


def _of_versions(node: Node) -> tuple[Guard, ...]:
    """The guards that a name or a table stands for."""
    if not isinstance(node.value, dict):
        return (Guard(read_guard_name(node)),)
    table = known(node, frozenset({"guard", "versions"}))
    if "guard" not in table:
        node.error("a table here is { guard = ..., versions = ... }")
    names = table["guard"].items() if isinstance(table["guard"].value, list) else (table["guard"],)
    versions = read_specifier(table["versions"]) if "versions" in table else None
    return tuple(Guard(read_guard_name(name), versions) for name in names)


def read_guard_name(node: Node) -> str:
    """The name of a guard.

    Raises:
        The document's error: there is no such guard.
    """
    from kernel_loader.guards import GUARDS  # few manifests have any

    name = node.text()
    if name not in GUARDS:
        near = difflib.get_close_matches(name, GUARDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {_listed(GUARDS)}"
        node.error(f"{shown(name)} is no guard; {meant}")
    return name


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
            call = known(value, frozenset({"call"}))
            if not call:
                value.error("a table here is { call = ... }")
            found[name] = Entrypoint(call["call"].text(_DOTTED, "a dotted symbol"), call=True)
        else:
            found[name] = Entrypoint(value.text(_DOTTED, "a dotted symbol"))
    return found
