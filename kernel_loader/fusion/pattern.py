"""Which modules of a model are meant: paths with `*` for one component, or a regular expression."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# "model.layers.*.mlp", or re.compile(...), which a path must match from end to end.
Pattern = str | re.Pattern[str]


class Site(NamedTuple):
    """A place where modules become one.

    Attributes:
        parent: path of the module that holds them; empty for the model itself.
        children: their names in it, in the order of the key.
    """

    parent: str
    children: tuple[str, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """From the root of the model."""
        return tuple(f"{self.parent}.{child}" if self.parent else child for child in self.children)


def find_sites(patterns: Sequence[Pattern], paths: Iterable[str]) -> tuple[list[Site], list[str]]:
    """Where all patterns match children of one parent, and what is wrong.

    Args:
        patterns: one for each child.
        paths: of all modules of the model, from its root.

    Returns:
        The sites in the order of the model, and the problems: a pattern without a match, one that matches two children
        of a parent, a parent that lacks a child, patterns that share no parent, two that match one module. With
        problems the sites are those that are whole.
    """
    paths = [path for path in paths if path]
    problems: list[str] = []
    found: list[dict[str, str]] = []  # parent -> child, for each pattern
    for pattern in patterns:
        children: dict[str, str] = {}
        for path in paths:
            if not _matches(pattern, path):
                continue
            parent, _, child = path.rpartition(".")
            if parent in children:
                problems.append(f"{spelling(pattern)} matches both {children[parent]} and {child} of {_called(parent)}")
            children.setdefault(parent, child)
        if not children:
            problems.append(f"{spelling(pattern)} matches no module{_nearest(pattern, paths)}")
        found.append(children)
    parents = [parent for parent in _ordered(found, paths) if all(parent in children for children in found)]
    if all(found) and not parents:
        there = " and ".join(f"{spelling(p)} in {_shortened(c)}" for p, c in zip(patterns, found, strict=True))
        problems.append(f"the children have no parent in common: {there}")
    elif all(found):
        problems += [
            f"{_called(parent)} has no child for {spelling(pattern)}"
            for parent in _ordered(found, paths)
            for pattern, children in zip(patterns, found, strict=True)
            if parent not in children
        ]
    sites = [Site(parent, tuple(children[parent] for children in found)) for parent in parents]
    for site in sites:
        if len({*site.children}) < len(site.children):
            problems.append(f"{site.paths[0]} is matched by two of the patterns")
    return sites, problems


def spelling(pattern: Pattern) -> str:
    """A pattern as its user wrote it."""
    return pattern if isinstance(pattern, str) else f"re.compile({pattern.pattern!r})"


def _matches(pattern: Pattern, path: str) -> bool:
    if isinstance(pattern, str):
        given, there = pattern.split("."), path.split(".")
        return len(given) == len(there) and all(g in ("*", t) for g, t in zip(given, there, strict=True))
    return pattern.fullmatch(path) is not None


def _ordered(found: list[dict[str, str]], paths: list[str]) -> list[str]:
    """All parents that were found, in the order of the model."""
    parents = {parent for children in found for parent in children}
    order = {path: place for place, path in enumerate(paths)}
    return sorted(parents, key=lambda parent: order.get(parent, -1))


def _called(parent: str) -> str:
    return parent or "the model"


def _shortened(children: dict[str, str]) -> str:
    first, *rest = map(_called, children)
    return f"{first} and {len(rest)} more" if rest else first


def _nearest(pattern: Pattern, paths: list[str]) -> str:
    """What is there and reads alike, numbers as `*`."""
    general = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in path.split(".")) for path in paths)
    wanted = pattern if isinstance(pattern, str) else pattern.pattern.replace("\\", "")
    close = difflib.get_close_matches(wanted, general, n=3, cutoff=0.6)
    partial = isinstance(pattern, str) and any("*" in part and part != "*" for part in pattern.split("."))
    note = ", in which * stands for a whole component" if partial else ""
    return f"{note}; there is {', '.join(close)}" if close else note
