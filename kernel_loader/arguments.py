"""What several functions take in one form: a list of names, where one name may stand for itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kernel_loader.errors import RequestError


def each(given: object, what: str) -> tuple[Any, ...]:
    """What was given, one by one. A text would give its letters: it is one name, as a class or a number is one item.

    Args:
        given: a collection, or a text, a class or a whole number instead of one.
        what: how the caller calls it.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(given, (str, type, int)):
        return (given,)
    if not isinstance(given, Iterable):
        raise RequestError(f"{what}={given!r} was given", "Pass a list, or one item instead of it.")
    return tuple(given)


def trusted(given: object) -> bool | tuple[str, ...]:
    """Whose code may run: all, nobody's, or that of some repositories.

    Raises:
        RequestError: it is neither a bool nor repositories, "org/name".
    """
    if isinstance(given, bool):
        return given
    found = each(given, "trust_remote_code")
    if not all(isinstance(repo, str) and "/" in repo for repo in found):
        raise RequestError(f"trust_remote_code={given!r} was given", "Pass True, False or repositories, as org/name.")
    return found
