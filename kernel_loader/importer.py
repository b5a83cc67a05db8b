"""A build directory -> a module, executed once in a process, under a name that says what its content is.

The module is `kernel_loader.loaded.<name>_<first 12 digits of its digest>`. Python's own import system does the work,
through a finder for that package: its locks make an import happen once whatever the threads, and relative imports work
at any time. Bytecode is neither read nor written: what runs is the source that was verified, and a build directory
stays as it was published.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    SourceFileLoader as _SourceFileLoader,
)
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final

from kernel_loader.errors import AbiMismatch, KernelImportError, MissingDependency, SourceError
from kernel_loader.metadata import Metadata
from kernel_loader.provenance import Origin

HOME: Final = "kernel_loader.loaded"

# How the dynamic linkers of Linux, macOS and Windows say that a library is for another machine or another torch.
_ABI_SIGNS: Final = re.compile(
    r"undefined symbol|invalid ELF header|wrong ELF class|GLIBC(XX)?_[\d.]+. not found|file too short"
    r"|incompatible architecture|mach-o file|Symbol not found|%1 is not a valid Win32 application"
    r"|specified procedure could not be found",
    re.IGNORECASE,
)


def module_name(repo: str, metadata: Metadata, digest: str) -> str:
    """The import name of a build: the kernel's name made an identifier, and what its content hashes to."""
    stem = re.sub(r"[^0-9a-z]+", "_", (metadata.name or repo.rpartition("/")[2]).lower()).strip("_")
    return f"{HOME}.{stem or 'kernel'}_{digest[:12]}"


def package_directory(build: Path, metadata: Metadata) -> Path:
    """The directory whose `__init__.py` is the kernel: the build itself, or (older) a package named as the kernel.

    Raises:
        SourceError: the build has neither.
    """
    try:
        entries = sorted(build.iterdir())
    except OSError as error:
        raise SourceError(
            str(build), f"it cannot be listed ({error})", "Bring the build back, and load again."
        ) from error
    named = [metadata.name.replace("-", "_")] if metadata.name else []
    for candidate in (build, *(build / name for name in named), *entries):
        if (candidate / "__init__.py").is_file():
            return candidate
    detail = "there is no __init__.py, neither in the build nor in a package below it"
    raise SourceError(str(build), detail, "Point to the directory of a build, such as build/torch-universal.")


def import_build(package: Path, name: str, origin: Origin) -> ModuleType:
    """Import a verified build under its name; a second call gives the same module.

    Raises:
        KernelImportError: the build's own code failed. Nothing of it is left in `sys.modules`.
    """
    FINDER.add(name, package)
    try:
        with _undone_on_failure(name):
            return importlib.import_module(name)
    except Exception as error:
        # Whatever a kernel raises at import, its caller can handle one tree of errors.
        raise _import_error(origin, error) from error


class BuildFinder:
    """Finds the builds that were added, and the modules inside them, for Python's import system."""

    def __init__(self) -> None:
        self._packages: dict[str, Path] = {}
        self.lock: Final = threading.Lock()

    def add(self, name: str, package: Path) -> None:
        """Make a package importable as `name`."""
        self._packages.setdefault(name, package)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The hook of `sys.meta_path`."""
        if not fullname.startswith(f"{HOME}."):
            return None
        if (package := self._packages.get(fullname)) is not None:
            init = package / "__init__.py"
            loader = SourceLoader(fullname, str(init))
            return spec_from_file_location(fullname, init, loader=loader, submodule_search_locations=[str(package)])
        if fullname.rpartition(".")[0] == HOME:
            return None
        return _find_inside(fullname, path or (), target)


def _find_inside(fullname: str, path: Sequence[str], target: ModuleType | None) -> ModuleSpec | None:
    details = ((ExtensionFileLoader, EXTENSION_SUFFIXES), (SourceLoader, SOURCE_SUFFIXES))
    for entry in path:
        if (spec := FileFinder(entry, *details).find_spec(fullname, target)) is not None:
            return spec
    return None


class SourceLoader(_SourceFileLoader):
    """Compiles the source at every import. Bytecode beside it may be of other content than what was verified."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the source file."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


FINDER: Final = BuildFinder()


@contextlib.contextmanager
def _undone_on_failure(name: str) -> Iterator[None]:
    """Remove what a failed import left: Python takes back the package itself, not the modules that it had imported."""
    try:
        yield
    except BaseException:
        with FINDER.lock:
            for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[loaded]
        raise


def _import_error(origin: Origin, error: Exception) -> KernelImportError:
    cause = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(HOME):
        return MissingDependency(origin.kernel, origin, cause, (error.name.partition(".")[0],))
    if isinstance(error, ImportError | OSError) and (_ABI_SIGNS.search(str(error)) or _refused_library(str(error))):
        return AbiMismatch(origin.kernel, origin, cause)
    return KernelImportError(origin.kernel, origin, cause)


def _refused_library(message: str) -> bool:
    # glibc says of a library for another CPU that there is no such file.
    match = re.match(r"(.+?): cannot open shared object file", message)
    return match is not None and Path(match[1]).is_file()
