"""A build directory -> a module, executed once in a process, under a name that says what its content is.

The module is `kernel_loader.loaded.<name>_<first 12 digits of its digest>`. Python's own import system does the work,
through a finder for that package: its locks make an import happen once whatever the threads, and relative imports work
at any time. Bytecode is neither read nor written: what runs is the source that was verified, and a build directory
stays as it was published.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
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

from kernel_loader import elf
from kernel_loader.dependencies import offered
from kernel_loader.errors import (
    AbiMismatch,
    KernelImportError,
    KernelLoaderError,
    MissingDependency,
    OpNamespaceTaken,
    SourceError,
)
from kernel_loader.metadata import Metadata
from kernel_loader.op_namespaces import CLAIMS, NamespaceTakenError
from kernel_loader.provenance import Origin

HOME: Final = "kernel_loader.loaded"

# How the dynamic linkers of Linux, macOS and Windows say that a library is for another machine or another torch.
_ABI_SIGNS: Final = (
    r"undefined symbol|wrong ELF class|GLIBC(XX)?_[\d.]+. not found"
    r"|incompatible architecture|mach-o file|Symbol not found|%1 is not a valid Win32 application"
    r"|specified procedure could not be found"
)


def module_name(repo: str, metadata: Metadata, digest: str) -> str:
    """The import name of a build: the kernel's name made an identifier, and what its content hashes to."""
    stem = re.sub(r"[^0-9a-z]+", "_", (metadata.name or repo.rpartition("/")[2]).lower()).strip("_")
    return f"{HOME}.{stem or 'kernel'}_{digest[:12]}"


def package_directory(build: Path, metadata: Metadata) -> Path:
    """The directory whose `__init__.py` is the kernel: the build itself, or (older) the one package inside it.

    Raises:
        SourceError: the build has neither, or several packages and none of its own name.
    """
    if (build / "__init__.py").is_file():
        return build
    try:
        # A directory that is no identifier (__pycache__ is passed over, too) is not verified as a package.
        inside = {
            entry.name: entry
            for entry in sorted(build.iterdir())
            if entry.name.isidentifier() and entry.name != "__pycache__" and (entry / "__init__.py").is_file()
        }
    except OSError as error:
        raise SourceError(
            str(build), f"it cannot be listed ({error})", "Bring the build back, and load again."
        ) from error
    named = (metadata.name or "").replace("-", "_")
    if named in inside:
        return inside[named]
    if len(inside) != 1:
        found = f"several packages ({', '.join(inside)})" if inside else "no __init__.py, nor a package below it"
        raise SourceError(str(build), f"it has {found}", "A build is one package, with its __init__.py at the top.")
    return next(iter(inside.values()))


def import_build(
    package: Path, name: str, origin: Origin, dependencies: Mapping[str, ModuleType] | None = None
) -> ModuleType:
    """Import a verified build under its name; a second call gives the same module.

    Args:
        package: the directory whose `__init__.py` is the kernel.
        name: its import name, by `module_name`.
        origin: where it is from, for errors.
        dependencies: repository id -> module of each kernel that this one asks for while it is imported.

    Raises:
        KernelImportError: the build's own code failed. Nothing of it is left in `sys.modules`.
    """
    _refuse_unloadable(package, origin)
    FINDER.add(name, package)
    try:
        with offered(dependencies or {}):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # Whatever a kernel raises at import, its caller can handle one tree of errors.
        raise _import_error(origin, error) from error


def _refuse_unloadable(package: Path, origin: Origin) -> None:
    if sys.platform != "linux":
        return
    try:
        for parent, _, files in os.walk(package):
            for library in sorted(file for file in files if file.endswith(".so")):
                if (fault := elf.fault(Path(parent, library), platform.machine())) is not None:
                    raise AbiMismatch(origin.kernel, origin, f"{library}: {fault}")
    except OSError as error:
        if isinstance(error, KernelLoaderError):
            raise
        raise SourceError(
            str(package), f"it cannot be read ({error})", "Bring the build back, and load again."
        ) from error


class BuildFinder:
    """Finds the builds that were added, and the modules inside them, for Python's import system."""

    def __init__(self) -> None:
        self._packages: dict[str, Path] = {}

    def add(self, name: str, package: Path) -> None:
        """Make a package importable as `name`, unless it is imported already."""
        if name not in sys.modules:
            self._packages[name] = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The hook of `sys.meta_path`."""
        if not fullname.startswith(f"{HOME}."):
            return None
        if (package := self._packages.get(fullname)) is not None:
            init = package / "__init__.py"
            loader = PackageLoader(fullname, str(init))
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


class PackageLoader(SourceLoader):
    """Runs the `__init__.py` of a build; when that fails, takes back the modules that it had imported.

    Python takes back the package itself. Doing the rest here, under the package's import lock, means that no other
    thread is in the middle of importing them.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Execute the package, unless it defines ops under a namespace that another build has taken."""
        try:
            with CLAIMS.claim(module.__name__, Path(self.path).parent):
                super().exec_module(module)
        except BaseException:
            for name in list(sys.modules):
                if name.startswith(f"{module.__name__}."):
                    sys.modules.pop(name, None)
            raise


FINDER: Final = BuildFinder()


def _import_error(origin: Origin, error: BaseException) -> KernelImportError:
    if isinstance(error, NamespaceTakenError):
        return OpNamespaceTaken(origin.kernel, origin, str(error), error.namespaces)
    cause = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith(HOME):
        package = error.name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            return MissingDependency(origin.kernel, origin, cause, (package,))
    if isinstance(error, ImportError | OSError) and re.search(_ABI_SIGNS, str(error), re.IGNORECASE):
        return AbiMismatch(origin.kernel, origin, cause)
    return KernelImportError(origin.kernel, origin, cause)
