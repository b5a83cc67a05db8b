"""A fact: a value, where it came from, and whether it could be found out at all."""

from __future__ import annotations

from typing import Any, NamedTuple, Self


class Fact(NamedTuple):
    """One answer of the machine. With `known` false, `source` says why there is none."""

    value: Any
    source: str
    known: bool = True

    @classmethod
    def unknown(cls, why: str) -> Self:
        """The answer of a probe that could not find out."""
        return cls(None, why, known=False)
