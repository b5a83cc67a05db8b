"""Which modules of a model are meant: paths with `*` for one component, or a regular expression."""

from __future__ import annotations

import difflib
import math
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


def find_sites(patterns: Sequence[Pattern], paths: Iterable[str]) -> tuple[list[Site], dict[str, str]]:
    """Where all patterns match children of one parent, and what is wrong.

    Args:
        patterns: one for each child.
        paths: of all modules of the model, from its root.

    Returns:
        The sites in the order of the model, and the problems with what to do about them: a pattern without a match, one
        that matches two children of a parent, a parent that lacks a child, patterns that share no parent, two that
        match one module. With problems the sites are those that are whole.
    """
    paths = [path for path in paths if path]
    problems: dict[str, str] = {}
    found: list[dict[str, str]] = []  # parent -> child, for each pattern
    for pattern in patterns:
        children: dict[str, str] = {}
        for path in paths:
            if not _matches(pattern, path):
                continue
            parent, _, child = path.rpartition(".")
            if parent in children:
                both = f"{spelling(pattern)} matches both {children[parent]} and {child} of {_called(parent)}"
                problems[both] = "Write a path that matches one child of a parent."
            children.setdefault(parent, child)
        if not children:
            problems[f"{spelling(pattern)} matches no module{_nearest(pattern, paths)}"] = _correction(pattern)
        found.append(children)
    parents = [parent for parent in _ordered(found, paths) if all(parent in children for children in found)]
    if all(found) and not parents:
        there = " and ".join(f"{spelling(p)} in {_shortened(c)}" for p, c in zip(patterns, found, strict=True))
        problems[f"the children have no parent in common: {there}"] = "Write paths to children of one module."
    sites = [Site(parent, tuple(children[parent] for children in found)) for parent in parents]
    if sites:
        problems |= {
            f"{_called(parent)} has no child for {spelling(pattern)}": f"To take what is whole, {selecting(sites)}."
            for parent in _ordered(found, paths)
            for pattern, children in zip(patterns, found, strict=True)
            if parent not in children
        }
    for site in sites:
        if len({*site.children}) < len(site.children):
            problems[f"{site.paths[0]} is matched by two of the patterns"] = "Give each child a path of its own."
    return sites, problems


def spelling(pattern: Pattern) -> str:
    """A pattern as its user wrote it."""
    return pattern if isinstance(pattern, str) else f"re.compile({pattern.pattern!r})"


def shown(value: object) -> str:
    """Whatever was given, as a message shows it: not over several lines, as a model would be."""
    text = repr(value)
    return text if len(text) <= 100 and "\n" not in text else f"a value of type {type(value).__qualname__}"


def selecting(sites: Sequence[Site]) -> str:
    """How to have these sites, and no others: a regular expression for each child."""
    found = (covering(paths) for paths in zip(*(site.paths for site in sites), strict=True))
    return f"write the paths as {' and '.join(_compiled(text) for text in found)}"


def covering(paths: Sequence[str]) -> str:
    """A regular expression that matches all of these paths, and nothing else."""
    columns: list[dict[str, None]] = []
    if len({path.count(".") for path in paths}) == 1:
        columns = [dict.fromkeys(column) for column in zip(*(path.split(".") for path in paths), strict=True)]
    if math.prod(map(len, columns)) != len({*paths}):
        return "|".join(map(re.escape, paths))
    texts = ["|".join(map(re.escape, column)) for column in columns]
    return r"\.".join(f"(?:{text})" if len(column) > 1 else text for text, column in zip(texts, columns, strict=True))


def _compiled(text: str) -> str:
    return f"re.compile({text!r})" if '"' in text else f're.compile(r"{text}")'


def _correction(pattern: Pattern) -> str:
    """What to do about a pattern that matches nothing."""
    if not isinstance(pattern, str):
        return "A regular expression must match all of a path, from the root of the model."
    if re.search(r"[][(){}|+?^$\\]", pattern) and _is_regular(pattern):
        return f"Wrap a regular expression as one, {_compiled(pattern)}, which must match all of a path."
    return "Write the path from the root of the model, with * for one component."


def _is_regular(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


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
