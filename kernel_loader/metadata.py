"""metadata.json of a build, in every form in which it has been published.

The oldest builds have none; then came `version` and `python-depends` alone; later `name`, `id`, `backend`, `digest` and
`provenance`, whose commits were called `sha` for a while. Keys that are not known are passed over: a newer builder may
write more.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Self, cast, get_args

from kernel_loader.errors import MetadataError
from kernel_loader.reading import Node, unique

FILE_NAME: Final = "metadata.json"

# A listing of 100,000 files with their digests is about 10 MB.
MAX_BYTES: Final = 16 * 2**20

Algorithm = Literal["sha256", "sha512"]

# What no path of a build holds, looked for in many paths at once.
_UNSAFE: Final = r"(?m)(^|/)(\.{0,2}|__pycache__)(/|$)|[\\:\x00-\x09\x0b-\x1f\ud800-\udfff]"

_REPO_ID: Final = r"[\w\-][\w.\-]*/[\w\-][\w.\-]*"


class Digest(NamedTuple):
    """What the files of a build must hash to: path relative to the build -> base64 of the hash."""

    algorithm: Algorithm
    files: Mapping[str, str]


class KernelDependency(NamedTuple):
    """Another kernel repository that a build imports, at a version or a revision."""

    repo_id: str
    version: int | None = None
    revision: str | None = None


class Metadata(NamedTuple):
    """What a build says of itself. Every field may be missing in an old build.

    Attributes:
        backend: kind of backend ("cuda"), as in `host.Backend`.
        archs: compute capabilities or gfx names that the code was compiled for.
        python_depends: requirement strings of Python packages.
        kernels_minver: least release of the `kernels` package whose build format this is.
        dirty: built from sources with uncommitted changes.
    """

    name: str | None = None
    id: str | None = None
    version: int | None = None
    license: str | None = None
    upstream: str | None = None
    source: str | None = None
    backend: str | None = None
    archs: tuple[str, ...] | None = None
    python_depends: tuple[str, ...] = ()
    kernel_depends: tuple[KernelDependency, ...] = ()
    kernels_minver: str | None = None
    digest: Digest | None = None
    dirty: bool = False

    @classmethod
    def parse(cls, text: bytes | str, file: str = FILE_NAME) -> Self:
        """Read a metadata.json.

        Args:
            text: content of the file.
            file: how errors call it.

        Raises:
            MetadataError: too large, not JSON, or a known key of the wrong type.
        """

        def fail(path: str, detail: str) -> MetadataError:
            return MetadataError(file, path, detail)

        if len(text) > MAX_BYTES:
            raise fail("", f"it has {len(text)} bytes, and more than {MAX_BYTES} are not read")
        try:
            document = json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise fail("", f"not JSON ({error})") from error
        table = Node(document, fail).table()
        texts = ("name", "id", "license", "upstream", "source")
        minver = table.get("kernels-minver")
        backend = table["backend"].table() if "backend" in table else {}
        return cls(
            **{key: table[key].text() for key in texts if key in table},
            version=table["version"].integer() if "version" in table else None,
            backend=backend["type"].text().lower() if "type" in backend else None,
            archs=backend["archs"].texts() if "archs" in backend else None,
            python_depends=table["python-depends"].texts() if "python-depends" in table else (),
            kernel_depends=_dependencies(table["kernel-depends"]) if "kernel-depends" in table else (),
            kernels_minver=minver.text(r"\d{1,9}(\.\d{1,9})*", "a version") if minver else None,
            digest=_digest(table["digest"]) if "digest" in table else None,
            dirty=_dirty(table["provenance"]) if "provenance" in table else False,
        )

    def deciding(self) -> Self:
        """What of it decides where the build runs, and under which name: all that `document` keeps."""
        return self._replace(digest=None, id=None, license=None, upstream=None, source=None, dirty=False)

    def document(self) -> dict[str, Any]:
        """What decides, as metadata.json has it: `parse` of its JSON gives `deciding`."""
        backend = {"type": self.backend, "archs": list(self.archs) if self.archs is not None else None}
        table = {
            "name": self.name,
            "version": self.version,
            "kernels-minver": self.kernels_minver,
            "backend": _there(backend),
            "python-depends": list(self.python_depends),
            "kernel-depends": [
                _there({"repo-id": needed.repo_id, "version": needed.version, "revision": needed.revision})
                for needed in self.kernel_depends
            ],
        }
        return {key: value for key, value in _there(table).items() if value not in ({}, [])}


def _there(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value is not None}


def _dependencies(node: Node) -> tuple[KernelDependency, ...]:
    found = []
    for item in node.items():
        table = item.table()
        if "repo-id" not in table or ("version" in table) == ("revision" in table):
            item.error("a dependency is a repo-id and either a version or a revision")
        found.append(
            KernelDependency(
                table["repo-id"].text(_REPO_ID, "a repository id (organisation/name)"),
                table["version"].integer() if "version" in table else None,
                table["revision"].text() if "revision" in table else None,
            )
        )
    return tuple(found)


def _digest(node: Node) -> Digest:
    table = node.table()
    if not {"algorithm", "files"} <= table.keys():
        node.error("a digest is an algorithm and files")
    algorithm = table["algorithm"].text().lower()
    if algorithm not in get_args(Algorithm):
        table["algorithm"].error(f"{algorithm!r} is not sha256 or sha512, so that nothing could be verified")
    files = {}
    for path, value in table["files"].table().items():
        if not is_safe_path(path):
            value.error("a file lies outside the build, or its name is not portable")
        files[path] = value.text()
        if not _is_hash(files[path], algorithm):
            value.error(f"not the base64 of a {algorithm}")
    return Digest(cast("Algorithm", algorithm), files)


def is_safe_path(path: str) -> bool:
    """Whether a relative path, written with slashes, stays inside its directory on every system."""
    parts = path.split("/")
    # Half a surrogate pair, which JSON can spell, is no text that a file system could store.
    unportable = re.search(r"[\\:\x00-\x1f\ud800-\udfff]", path)
    return all(part not in ("", ".", "..") for part in parts) and unportable is None


def path_problem(paths: Sequence[str]) -> str:
    """What keeps files from lying together in the directory of a build, on every system; empty for nothing."""
    if re.search(_UNSAFE, lines := "\n".join(paths)) is not None or lines.count("\n") >= len(paths):
        for path in paths:
            if not is_safe_path(path) or "__pycache__" in path.split("/"):
                return f"the file {path!r} lies outside its build, or its name is not portable"
    folded = {path.casefold(): path for path in paths}
    if len(folded) < len(paths):
        twice = next(path for path in paths if folded[path.casefold()] != path or paths.count(path) > 1)
        return f"the files {twice!r} and {folded[twice.casefold()]!r} have one name where capitals do not count"
    # With a slash that sorts before all else, what lies below a file stands right behind it.
    ordered = sorted(path.replace("/", "\0") for path in folded)
    for path, following in itertools.pairwise(ordered):
        if following.startswith(f"{path}\0"):
            return f"the file {folded[path.replace(chr(0), '/')]!r} has other files below it"
    return ""


def _is_hash(value: str, algorithm: str) -> bool:
    try:
        return len(base64.b64decode(value, validate=True)) == hashlib.new(algorithm).digest_size
    except (binascii.Error, ValueError):
        return False


def _dirty(node: Node) -> bool:
    parts = [part.table() for key, part in node.table().items() if key in ("kernel-builder", "kernel")]
    return any(part["dirty"].boolean() for part in parts if "dirty" in part)
