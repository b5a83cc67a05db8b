"""Op namespaces: which ones the code of a build defines, and which are taken in this process.

torch keeps ops by name for the whole process. Two builds that define one namespace would overwrite each other's ops in
silence where they are written in Python, and end the process where they are compiled (`TORCH_LIBRARY` may stand once).
What a build defines is read from its files, before any of it runs, and only when a second build is imported.
"""

from __future__ import annotations

import ast
import contextlib
import mmap
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Functions of torch.library that define ops, by name ("namespace::op") or for a namespace.
_DEFINERS: Final = frozenset({"custom_op", "triton_op", "define", "Library"})

# The function that TORCH_LIBRARY(ns, m) makes, in libraries that are not stripped: its mangled name begins with its
# length. That of TORCH_LIBRARY_FRAGMENT ends with a number of its own.
_REGISTRATION: Final = rb"(\d+)((?:STABLE_)?TORCH_LIBRARY_(FRAGMENT_)?init_)(\w+)"


class NamespaceTakenError(ImportError):
    """Another build has the namespaces; nothing of this one ran."""

    def __init__(self, namespaces: tuple[str, ...], owner: str) -> None:
        super().__init__(f"op namespaces {', '.join(namespaces)} are those of {owner}, which has other content")
        self.namespaces, self.owner = namespaces, owner


class Claims:
    """Who defines which namespaces in this process."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._packages: Final[dict[str, Path]] = {}
        self._defined: Final[dict[str, frozenset[str]]] = {}

    @contextlib.contextmanager
    def claim(self, module: str, package: Path) -> Iterator[None]:
        """Hold the namespaces of a build from now on, unless the block fails.

        Args:
            module: name under which the build is imported, which carries the digest of its content.
            package: its directory.

        Raises:
            NamespaceTakenError: a build of another name defines one of them.
        """
        with self._lock:
            for other in self._packages.keys() - {module}:
                if common := self._of(module, package) & self._of(other, self._packages[other]):
                    raise NamespaceTakenError(tuple(sorted(common)), other)
            self._packages[module] = package
        try:
            yield
        except BaseException:
            self._packages.pop(module, None)
            raise

    def _of(self, module: str, package: Path) -> frozenset[str]:
        if module not in self._defined:
            self._defined[module] = defined(package)
        return self._defined[module]


CLAIMS: Final = Claims()


def defined(package: Path) -> frozenset[str]:
    """The namespaces that the files of a build define, as far as they can be read without running them.

    Read are: names that are written out in calls of torch.library; in `_ops.py`, which kernel-builder writes into each
    build, the namespace of `torch.ops`, or the kernel's name and unique id that it is put together from; and the
    symbols of compiled libraries. A namespace that is computed in another way is not seen, nor that of a stripped
    library without `_ops.py`.
    """
    found: set[str] = set()
    for file in package.rglob("*"):
        with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError):
            if file.suffix == ".py":
                found |= _in_source(file)
            elif file.suffix in (".so", ".pyd", ".dll", ".dylib"):
                found |= _in_library(file)
    return frozenset(found)


def _in_source(file: Path) -> set[str]:
    source = file.read_bytes()
    if b"torch" not in source:
        return set()
    tree = ast.parse(source)
    texts = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    found = {
        name.partition("::")[0]
        for call in calls
        if _last_name(call.func) in _DEFINERS and not _is_implementation(call)
        if (name := _text(call.args[0], texts))
    }
    if file.name != "_ops.py":
        return found
    if "kernel_name" in texts and "unique_id" in texts:
        found.add(f"_{texts['kernel_name']}_*_{texts['unique_id']}")  # the backend between is that of this machine
    return found | {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "ops"
    }


def _last_name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_implementation(call: ast.Call) -> bool:
    """Whether it is Library(ns, "IMPL"), which adds to what others define."""
    kind = call.args[1] if len(call.args) > 1 else next((k.value for k in call.keywords if k.arg == "kind"), None)
    return isinstance(kind, ast.Constant) and kind.value == "IMPL"


def _text(node: ast.expr, texts: dict[str, str]) -> str:
    """A text that is written out, or its beginning: "ns::op", NAME, f"{NAME}::{op}", NAME + "::op"."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name):
        return texts.get(node.id, "")
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, texts)
    if isinstance(node, ast.BinOp):
        return _text(node.left, texts)
    if isinstance(node, ast.JoinedStr) and node.values:
        first = _text(node.values[0], texts)
        return first if isinstance(node.values[0], ast.FormattedValue) or "::" in first else ""
    return ""


def _in_library(file: Path) -> set[str]:
    found = set()
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for match in re.finditer(_REGISTRATION, content):
            name = match[4][: max(int(match[1]) - len(match[2]), 0)].decode()
            found.add(name.rpartition("_")[0] if match[3] else name)
    return found - {""}
