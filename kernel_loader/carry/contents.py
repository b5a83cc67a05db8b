"""What a bundle says of itself: `bundle.json`, the manifest of builds that are carried to another machine.

The same file is in an archive (`kernels.klb`) and in an installed package. docs/sealed.md has its form. It holds what
the index knows of each repository, so that a host there chooses as a host here, and what every file must hash to.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kernel_loader.errors import BundleError, MetadataError, VariantError
from kernel_loader.lock import COMMIT, DIGEST, LockedFile, digest_of
from kernel_loader.manifest import REPO, known
from kernel_loader.metadata import FILE_NAME as METADATA, Metadata, path_problem
from kernel_loader.reading import Node, unique
from kernel_loader.resources import INSTALLED
from kernel_loader.variant import Variant

FILE_NAME: Final = "bundle.json"
SCHEMA: Final = 1

# A bundle of a thousand builds with a hundred files each is about 15 MB.
MAX_BYTES: Final = 64 * 2**20

_TEXT: Final = r"[^\ud800-\udfff]*"  # half a surrogate pair, which JSON can spell, is no text
_NEWER: Final = "Import it with the release of kernel-loader that made it, or make it again with this one."


class BundledRepository(NamedTuple):
    """A repository as far as a bundle knows it.

    Attributes:
        repo: repository id.
        revision: branch, tag or commit that was asked for, such as "v4".
        commit: where it stood.
        names: all builds at that commit, carried or not.
        metadata: build -> text of its metadata.json, of those that were read to choose; None where it has none.
        builds: build -> digest of its content, of those that are carried.
    """

    repo: str
    revision: str
    commit: str
    names: tuple[str, ...]
    metadata: Mapping[str, str | None]
    builds: Mapping[str, str]


class Bundle(NamedTuple):
    """What is carried.

    Attributes:
        repositories: by repository and revision.
        files: digest of a build -> its files, sorted by path. Two repositories may have one build.
        publishers: those that the Hub marks as trusted, of repositories that no manifest names.
    """

    repositories: tuple[BundledRepository, ...]
    files: Mapping[str, tuple[LockedFile, ...]]
    publishers: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: bytes | str, file: str = FILE_NAME) -> Bundle:
        """Read a bundle.json; `file` is how errors call the bundle.

        Raises:
            BundleError: it is damaged, of another schema, names a file outside its build, or says what nobody needs.
        """
        try:
            document = json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise BundleError(file, f"its {FILE_NAME} is no JSON ({error})") from error
        root = Node(document, lambda path, detail: BundleError(file, f"{FILE_NAME}, {path}: {detail}"))
        table = root.table()
        schema = table["schema"].integer() if "schema" in table else root.error("it has no schema")
        if schema != SCHEMA:
            age = "a newer" if schema > SCHEMA else "an older"
            raise BundleError(file, f"it is of {age} format ({schema}; this release reads {SCHEMA})", _NEWER)
        known(root, frozenset({"schema", "repositories", "builds", "publishers"}))
        files = {digest: _files(digest, node) for digest, node in _of(root, "builds").table().items()}
        repositories = tuple(_repository(node) for node in _of(root, "repositories").items())
        for repository in repositories:
            for variant, digest in repository.builds.items():
                if digest not in files:
                    root.error(f"the build {variant} of {repository.repo} is not among its builds")
                if not _speaks_of(repository.metadata.get(variant), files[digest]):
                    root.error(f"the metadata of {variant} of {repository.repo} is not its {METADATA}")
        publishers = _of(root, "publishers").texts()
        _refuse_needless(root, repositories, files, publishers)
        return cls(repositories, files, publishers)

    def to_json(self) -> str:
        """The text of bundle.json: the same for equal bundles."""
        document = {
            "schema": SCHEMA,
            "repositories": [
                repository._asdict() | {"names": sorted(repository.names)} for repository in self.repositories
            ],
            "builds": {
                digest: {file.path: {"size": file.size, "sha256": file.sha256} for file in files}
                for digest, files in self.files.items()
            },
            "publishers": sorted(self.publishers),
        }
        return json.dumps(document, indent=1, sort_keys=True) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for files in self.files.values() for file in files)


def installed(home: Path) -> Bundle | None:
    """What a package of builds carries in its directory; None for any other directory.

    Raises:
        BundleError: its bundle.json is damaged.
    """
    if home.parent.name != INSTALLED:
        return None
    try:
        changed = (home / FILE_NAME).stat().st_mtime_ns
    except OSError:
        return None
    return _read(home / FILE_NAME, changed)


@functools.lru_cache(maxsize=64)
def _read(file: Path, changed: int) -> Bundle:  # noqa: ARG001 - part of the key
    return Bundle.parse(file.read_bytes(), str(file))


def _of(node: Node, key: str) -> Node:
    table = node.table()
    return table[key] if key in table else node.error(f"the key {key} is missing")


def _repository(node: Node) -> BundledRepository:
    known(node, frozenset(BundledRepository._fields))
    names = _of(node, "names").texts()
    repo = _of(node, "repo").text(REPO, "a repository id (organisation/name)")
    metadata: dict[str, str | None] = {}
    texts = _of(node, "metadata")
    texts.table()
    for name, text in texts.value.items():  # type: ignore[attr-defined]  # null says that there is none
        item = Node(text, node.fail, f"{texts.path}.{name}")
        metadata[name] = None if text is None else item.text(_TEXT, "Unicode")
        try:
            Metadata.parse(metadata[name] or "{}", name)
        except MetadataError as error:
            texts.error(str(error))
    builds = {name: item.text(DIGEST, "a sha256 in hexadecimal") for name, item in _of(node, "builds").table().items()}
    if unlisted := sorted((metadata.keys() | builds.keys()) - set(names)):
        node.error(f"{unlisted[0]!r} is not among the names of {repo}")
    for name in builds:
        try:
            Variant.parse(name)
        except VariantError as error:
            node.error(f"{name!r} is no build: {error.detail}")
    return BundledRepository(
        repo,
        _of(node, "revision").text(r"[^\s\ud800-\udfff]+", "a branch, tag or commit"),
        _of(node, "commit").text(COMMIT, "a commit (40 hexadecimal digits)"),
        names,
        metadata,
        builds,
    )


def _files(digest: str, node: Node) -> tuple[LockedFile, ...]:
    files = []
    for path, item in node.table().items():
        sha256 = _of(item, "sha256").text(DIGEST, "a sha256 in hexadecimal")
        files.append(LockedFile(path, _of(item, "size").integer(), sha256))
    if not files:
        node.error("a build has files")
    if problem := path_problem([file.path for file in files]):
        node.error(problem)
    if digest_of(files) != digest:
        node.error("its name is not the digest of its files")
    return tuple(sorted(files))


def _refuse_needless(
    root: Node, repositories: Sequence[BundledRepository], files: Iterable[str], publishers: Iterable[str]
) -> None:
    """What is there is there once, and is of use to a repository that is there."""
    keys = [(repository.repo, repository.revision) for repository in repositories]
    if len(set(keys)) < len(keys):
        repo, revision = next(key for key in keys if keys.count(key) > 1)
        root.error(f"{repo}@{revision} is there twice")
    if needless := sorted(set(files) - {digest for one in repositories for digest in one.builds.values()}):
        root.error(f"the build {needless[0][:12]} is of no repository")
    if strangers := sorted(set(publishers) - {repo.partition("/")[0] for repo, _ in keys}):
        root.error(f"the publisher {strangers[0]!r} has no repository here")


def _speaks_of(text: str | None, files: Iterable[LockedFile]) -> bool:
    """Whether what decided is what the build itself says."""
    told = {file.sha256 for file in files if file.path == METADATA}
    return told == (set() if text is None else {hashlib.sha256(text.encode()).hexdigest()})
