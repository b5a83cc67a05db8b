"""Op namespaces: which ones the code of a build defines, and which are taken in this process.

torch keeps ops by name for the whole process. Two builds that define one namespace would overwrite each other's ops in
silence where they are written in Python, and end the process where they are compiled (`TORCH_LIBRARY` may stand once).
What a build defines is read from its files, before any of it runs, and only when a second build is imported.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import mmap
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# Functions of torch.library that define ops, by name ("namespace::op") or for a namespace.
_DEFINERS: Final = frozenset({"custom_op", "triton_op", "define"})
_LIBRARY: Final = "Library"

# The function that TORCH_LIBRARY(ns, m) makes, in libraries that are not stripped: its mangled name begins with its
# length. That of TORCH_LIBRARY_FRAGMENT ends with a number of its own.
_REGISTRATION: Final = rb"(\d{1,4})((?:STABLE_)?TORCH_LIBRARY_(FRAGMENT_)?init_)(\w+)"
_MARK: Final = b"TORCH_LIBRARY_"


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
        """Hold the namespaces of a build from now on. What has begun to run keeps them: its ops may be there already.

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
        yield

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
    texts, names = _constants(tree), _imported(tree)
    found = {
        namespace
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and (namespace := _defined_by(call, names, texts))
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


def _constants(tree: ast.Module) -> dict[str, str]:
    """Names of texts that are assigned as they are."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value.value, str):
                found |= {target.id: node.value.value for target in targets if isinstance(target, ast.Name)}
    return found


def _imported(tree: ast.Module) -> dict[str, str]:
    """Name in this file -> what it was called where it is from."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.asname: alias.name for node in imports for alias in node.names if alias.asname}


def _defined_by(call: ast.Call, names: dict[str, str], texts: dict[str, str]) -> str:
    """The namespace in which a call defines ops; empty when it defines none."""
    last = _last_name(call.func)
    function = names.get(last, last)
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    arguments = dict(zip(("ns", "kind"), call.args, strict=False)) | given
    if function == _LIBRARY:
        kind = arguments.get("kind")
        # Library(ns, "IMPL") adds to what others define.
        is_implementation = isinstance(kind, ast.Constant) and kind.value == "IMPL"
        return "" if is_implementation or "ns" not in arguments else _text(arguments["ns"], texts)
    name = _text(call.args[0] if call.args else given.get("name", given.get("qualname")), texts)
    return name.partition("::")[0] if function in _DEFINERS and "::" in name else ""


def _text(node: ast.expr | None, texts: dict[str, str]) -> str:
    """A text that is written out, or its beginning: "ns::op", NAME, f"{NAME}::{op}", NAME + "::op"."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.Name):
        return texts.get(node.id, "")
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, texts)
    if isinstance(node, ast.BinOp):
        return _text(node.left, texts) + _text(node.right, texts)
    if isinstance(node, ast.JoinedStr):
        parts = [_text(part, texts) for part in node.values]
        known = list(itertools.takewhile(bool, parts))  # what comes after a part that is computed tells nothing
        return "".join(known) if "::" in "".join(known) else ""
    return ""


def _in_library(file: Path) -> set[str]:
    found, at = set(), 0
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # The mark is looked for as memory is searched, a thousand times faster than by the pattern.
        while (at := content.find(_MARK, at)) >= 0:
            match = re.search(_REGISTRATION, content[max(at - 16, 0) : at + 300])
            at += len(_MARK)
            if match is not None:
                name = match[4][: max(int(match[1]) - len(match[2]), 0)].decode()
                found.add(name.rpartition("_")[0] if match[3] else name)
    return found - {""}
