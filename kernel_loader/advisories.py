"""Advisories: faults of particular versions of kernels that were publicly reported, as a TOML file lists them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, cast, get_args

from kernel_loader.errors import ManifestError
from kernel_loader.manifest import REPO, known, read_guard_name, read_specifier
from kernel_loader.reading import Node
from kernel_loader.rules import Advisory, Effect

FILE_NAME: Final = "advisories.toml"

_REPOSITORY: Final = "a repository id (organisation/name)"
_ID: Final = r"[a-z0-9][a-z0-9\-]*"
_SPECIFIERS: Final = ("versions", "devices", "capability", "no-cuda-toolkit")
_NEEDED: Final = frozenset({"id", "repo", "effect", "fault", "remedy", "source"})
_KEYS: Final = _NEEDED | {"when", "guard", "no-training"} | set(_SPECIFIERS)


def about(repo: str, files: Iterable[tuple[str, str]]) -> tuple[Advisory, ...]:
    """What is known of a repository.

    Args:
        repo: its id.
        files: name and text of each file. An advisory replaces one of the same id in a later file.

    Raises:
        ManifestError: a file is not TOML, or what it says of the repository cannot be read.
    """
    found: dict[str, Advisory] = {}
    for file, text in files:
        for advisory in parse(text, file, repo):
            found.setdefault(advisory.id, advisory)
    return tuple(found.values())


def parse(text: str, file: str, repo: str | None = None) -> tuple[Advisory, ...]:
    """Read the text of a file: a list of tables, `[[advisories]]`.

    Args:
        text: of the file.
        file: how errors call it.
        repo: the repository whose advisories are read; all of them where none is given.

    Raises:
        ManifestError: not TOML, an unknown key, a missing one, a value of the wrong form, or an id that stands twice.
    """
    read: dict[str, Advisory] = {}
    for node in _tables(text, file):
        if repo is not None and isinstance(node.value, dict) and node.value.get("repo") != repo:
            continue
        advisory = _advisory(node)
        if advisory.id in read:
            node.error(f"there is another advisory {advisory.id}")
        read[advisory.id] = advisory
    return tuple(read.values())


def check_repositories(text: str, file: str) -> None:
    """Hold the repository of every advisory against its form: one that is none would never be looked for.

    A file that is not TOML is told of where a kernel is loaded that it speaks of.

    Raises:
        ManifestError: an advisory names no repository.
    """
    try:
        tables = tuple(_tables(text, file))
    except ManifestError:
        return
    for node in tables:
        keys = node.table()
        if "repo" not in keys:
            node.error("the key repo is missing")
        keys["repo"].text(REPO, _REPOSITORY)


def _tables(text: str, file: str) -> Iterator[Node]:
    import tomllib

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(file, "", f"not TOML ({error})") from error
    root = Node(document, lambda path, detail: ManifestError(file, path, detail))
    keys = known(root, frozenset({"advisories"}))
    return keys["advisories"].items() if "advisories" in keys else iter(())


def _advisory(node: Node) -> Advisory:
    keys = known(node, _KEYS)
    if missing := _NEEDED - keys.keys():
        node.error(f"the key {min(missing)} is missing")
    effect = keys["effect"].text()
    if effect not in get_args(Effect):
        keys["effect"].error(f"{effect!r} is not one of {', '.join(get_args(Effect))}")
    if "no-training" in keys and effect != "warn":
        keys["no-training"].error("it goes with the effect warn: nothing of a build that is refused is taken")
    specifier = {name: read_specifier(keys[name]) for name in _SPECIFIERS if name in keys}
    return Advisory(
        id=keys["id"].text(_ID, "an id in lower case with dashes"),
        repo=keys["repo"].text(REPO, _REPOSITORY),
        effect=cast("Effect", effect),
        fault=keys["fault"].text(),
        remedy=keys["remedy"].text(r"[^a-z].*\.", "a sentence"),
        source=keys["source"].text(),
        versions=specifier.get("versions"),
        devices=specifier.get("devices"),
        capability=specifier.get("capability"),
        no_cuda_toolkit=specifier.get("no-cuda-toolkit"),
        when=keys["when"].text() if "when" in keys else "",
        guard=read_guard_name(keys["guard"]) if "guard" in keys else None,
        no_training=keys["no-training"].texts() if "no-training" in keys else (),
    )
