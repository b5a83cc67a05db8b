"""Kernels that other kernels need, handed to them while they are imported.

A kernel asks for its dependencies with `from kernels import get_kernel_dep`, whoever loads it. Where that package is
installed, its own function is told of them; elsewhere a module of that name stands in as long as the import lasts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Final

_OFFERED: Final[ContextVar[Mapping[str, ModuleType] | None]] = ContextVar("offered", default=None)
_NAME: Final = "kernels"


@contextlib.contextmanager
def offered(dependencies: Mapping[str, ModuleType]) -> Iterator[None]:
    """Let the kernel that is imported inside find these modules, by repository id."""
    if not dependencies:
        yield
        return
    token = _OFFERED.set(dependencies)
    try:
        with _told_to_the_package(dependencies) if importlib.util.find_spec(_NAME) else _stand_in():
            yield
    finally:
        _OFFERED.reset(token)


def get_kernel_dep(repo_id: str) -> ModuleType:
    """A dependency of the kernel that is being imported, as its metadata.json names it.

    Raises:
        RuntimeError: no kernel is being imported, or this one does not name the repository.
    """
    dependencies = _OFFERED.get()
    if dependencies is None:
        raise RuntimeError("get_kernel_dep is for kernels, while they are imported")
    if repo_id not in dependencies:
        raise RuntimeError(f"{repo_id} is not among the kernel-depends of this build: {', '.join(dependencies)}")
    return dependencies[repo_id]


@contextlib.contextmanager
def _told_to_the_package(dependencies: Mapping[str, ModuleType]) -> Iterator[None]:
    from kernels.deps import use_kernel_deps

    with use_kernel_deps(dict(dependencies)):
        yield


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    module = ModuleType(_NAME, "Stands in for the package that a kernel asks for its dependencies.")
    module.get_kernel_dep = get_kernel_dep  # type: ignore[attr-defined]
    sys.modules[_NAME] = module
    try:
        yield
    finally:
        if sys.modules.get(_NAME) is module:
            del sys.modules[_NAME]
