"""Typed access to parsed JSON and TOML, with errors that name the path to the value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from kernel_loader.errors import KernelLoaderError


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
            self.error(f"{name} was expected, not {_shown(self.value)}")
        return self.value

    def text(self, pattern: str | None = None, what: str = "") -> str:
        """A text, of a form where a pattern is given."""
        value: str = self._expect(str, "a text")
        if pattern is not None and re.fullmatch(pattern, value, re.ASCII) is None:
            self.error(f"{_shown(value)} is not {what}")
        return value

    def integer(self) -> int:
        """A whole number, zero or above."""
        value: int = self._expect(int, "a whole number")
        if value < 0:
            self.error(f"{value} is below zero")
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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
