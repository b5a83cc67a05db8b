"""Typed access to parsed JSON and TOML, with errors that name the path to the value."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn

from kernel_loader.errors import KernelLoaderError

# TOML's own limit. Python refuses to write numbers of more than 4300 digits, in an error's text as elsewhere.
_LARGEST: Final = 2**63 - 1


class Node:
    """A value inside a document, and the way to it.

    Every reading method raises what `fail(path, detail)` returns when the value is of another type.
    """

    __slots__ = ("fail", "path", "value")

    def __init__(self, value: object, fail: Callable[[str, str], KernelLoaderError], path: str = "") -> None:
        self.value, self.fail, self.path = value, fail, path

    def error(self, detail: str) -> NoReturn:
        """Raise the document's error at this place."""
        raise self.fail(self.path, detail)

    def _expect(self, kind: type, name: str) -> Any:  # noqa: ANN401 - the type is the argument
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.error(f"{name} was expected, not {shown(self.value)}")
        return self.value

    def text(self, pattern: str | None = None, what: str = "") -> str:
        """A text, of a form where a pattern is given."""
        value: str = self._expect(str, "a text")
        if pattern is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            self.error(f"{shown(value)} is not {what}")
        return value

    def integer(self) -> int:
        """A whole number, zero or above."""
        value: int = self._expect(int, "a whole number")
        if value < 0:
            self.error(f"{shown(value)} is below zero")
        if value > _LARGEST:
            self.error("the number is too large")
        return value

    def boolean(self) -> bool:
        """True or false."""
        value: bool = self._expect(bool, "true or false")
        return value

    def items(self) -> Iterator[Node]:
        """The elements of a list."""
        for index, value in enumerate(self._expect(list, "a list")):
            yield Node(value, self.fail, f"{self.path}[{index}]")

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(item.text() for item in self.items())

    def table(self) -> dict[str, Node]:
        """A table: its keys, and a node for each value. Null counts as absent."""
        prefix = f"{self.path}." if self.path else ""
        return {
            key: Node(value, self.fail, f"{prefix}{key}")
            for key, value in self._expect(dict, "a table").items()
            if value is not None
        }


def shown(value: object) -> str:
    """A value as errors quote it: short, whatever its size or depth."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 80
    try:
        return short.repr(value)
    except ValueError:
        return "a number that is too long to write"


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of pairs that a reader of JSON has found, for `object_pairs_hook`.

    Raises:
        ValueError: a key stands twice. One reader would go by the first, another by the last.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return table
