"""Repository: content as commits, with branches and tags that point at them."""

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal

from .blob import Blob, git_object_id

Kind = Literal["kernel", "model", "dataset", "space"]
Gate = Literal["auto", "manual"]

EPOCH: Final = datetime(2026, 1, 1, tzinfo=UTC)
LFS_THRESHOLD: Final = 10 * 1024 * 1024
INITIAL: Final = {".gitattributes": b"*.so filter=lfs diff=lfs merge=lfs -text\n"}


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a listing: a file with its blob, or a directory with the id of its git tree."""

    path: str
    oid: str
    blob: Blob | None = None


@dataclass(frozen=True)
class Commit:
    """An immutable tree of files. The id is a real git commit id over the tree, the parent and a date of the depth."""

    files: Mapping[str, Blob]
    parent: "Commit | None" = None
    title: str = "Upload"

    @cached_property
    def date(self) -> datetime:
        """One minute after the parent's, so that an id depends on nothing but content and parent."""
        return EPOCH if self.parent is None else self.parent.date + timedelta(minutes=1)

    @cached_property
    def id(self) -> str:
        """40 hexadecimal digits."""
        lines = [f"tree {self.directories['']}"]
        if self.parent is not None:
            lines.append(f"parent {self.parent.id}")
        who = f"hub <hub@localhost> {int(self.date.timestamp())} +0000"
        lines += [f"author {who}", f"committer {who}", "", self.title, ""]
        return git_object_id("commit", "\n".join(lines).encode())

    @cached_property
    def directories(self) -> Mapping[str, str]:
        """The git tree id of every directory; the root is the empty path."""
        return dict(_tree_ids(self.files))

    @cached_property
    def entries(self) -> Sequence[Entry]:
        """Every file and directory but the root, depth first: a directory stands before what is in it."""
        found = [Entry(path, blob.oid, blob) for path, blob in self.files.items()]
        found += [Entry(path, oid) for path, oid in self.directories.items() if path]
        return sorted(found, key=lambda entry: entry.path.split("/"))

    def listing(self, directory: str, *, recursive: bool) -> Sequence[Entry]:
        """The entries below a directory (empty path: the root), or only those directly in it.

        Raises:
            KeyError: there is no such directory.
        """
        if directory not in self.directories:
            raise KeyError(directory)
        if recursive and not directory:
            return self.entries
        start = f"{directory}/" if directory else ""
        inside = (entry for entry in self.entries if entry.path.startswith(start))
        return [entry for entry in inside if recursive or "/" not in entry.path[len(start) :]]

    def find(self, path: str) -> Entry | None:
        """The file or directory at a path."""
        if blob := self.files.get(path):
            return Entry(path, blob.oid, blob)
        return Entry(path, self.directories[path]) if path and path in self.directories else None


def _tree_ids(files: Mapping[str, Blob]) -> Iterator[tuple[str, str]]:
    """Git's tree objects, the deepest first, because a tree holds the ids of the trees in it."""
    children: dict[str, dict[str, tuple[bytes, str]]] = {"": {}}
    for path, blob in files.items():
        directory, _, name = path.rpartition("/")
        while directory not in children:
            children[directory] = {}
            directory = directory.rpartition("/")[0]
        children[path.rpartition("/")[0]][name] = (b"100644", blob.oid)
    for directory in sorted(children, key=lambda path: (path.count("/") + bool(path), path), reverse=True):
        oid = git_object_id("tree", _tree_object(children[directory]))
        yield directory, oid
        if directory:
            parent, _, name = directory.rpartition("/")
            children[parent][name] = (b"40000", oid)


def _tree_object(children: Mapping[str, tuple[bytes, str]]) -> bytes:
    # git sorts a directory as if its name ended in a slash.
    order = sorted(children.items(), key=lambda child: (child[0] + "/" * (child[1][0] == b"40000")).encode())
    return b"".join(mode + b" " + name.encode() + b"\0" + bytes.fromhex(oid) for name, (mode, oid) in order)


class Repository:
    """A repository of the Hub. It starts with a `main` branch that holds `.gitattributes`, as those of the Hub do.

    Attributes:
        private: hidden from requests without the token of a reader.
        gated: listed for all, files only for readers; `True` is "auto".
        readers: the tokens that may read while it is private or gated; `None` is every token that the Hub knows.
        lfs_threshold: a file of at least so many bytes is LFS when it is committed.
        lfs_suffixes: and so is a file with one of these endings.
        labels: the `tags` of the repository's info, which have nothing to do with those of git.
    """

    def __init__(self, kind: Kind, repo_id: str) -> None:
        self.kind: Final = kind
        self.id: Final = repo_id
        self.private = False
        self.gated: bool | Gate = False
        self.readers: Collection[str] | None = None
        self.lfs_threshold = LFS_THRESHOLD
        self.lfs_suffixes: tuple[str, ...] = (".so",)
        self.labels: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._commits: dict[str, Commit] = {}
        self._lfs: dict[str, Blob] = {}
        self._branches: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self.commit(INITIAL, title="initial commit")

    @property
    def branches(self) -> Mapping[str, str]:
        """A copy: branch -> commit id."""
        with self._lock:
            return dict(self._branches)

    @property
    def tags(self) -> Mapping[str, str]:
        """A copy: git tag -> commit id."""
        with self._lock:
            return dict(self._tags)

    def commit(self, files: Mapping[str, bytes], *, branch: str = "main", title: str = "Upload") -> str:
        """Make `files` the whole content of a branch, which is created (without a parent) if it is new.

        Returns:
            The id of the commit; the same content on the same parent under the same title has the same id.
        """
        blobs = {path: Blob(content, lfs=self._is_lfs(path, content)) for path, content in files.items()}
        with self._lock:
            parent = self._commits.get(self._branches.get(branch, ""))
            commit = Commit(MappingProxyType(blobs), parent, title)
            self._commits[commit.id] = commit
            self._branches[branch] = commit.id
            self._lfs |= {blob.sha256: blob for blob in blobs.values() if blob.lfs}
        return commit.id

    def branch(self, name: str, commit: str) -> None:
        """Point a branch at a commit that is here."""
        with self._lock:
            self._branches[name] = self._commits[commit].id

    def tag(self, name: str, commit: str) -> None:
        """Point a git tag at a commit that is here."""
        with self._lock:
            self._tags[name] = self._commits[commit].id

    def delete_branch(self, name: str) -> None:
        """Forget a branch; its commits stay reachable by their ids."""
        with self._lock:
            del self._branches[name]

    def find(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag or a full commit id, looked for in this order."""
        with self._lock:
            commit = self._branches.get(revision) or self._tags.get(revision) or revision
            return self._commits.get(commit)

    def lfs_object(self, sha256: str) -> Blob | None:
        """An LFS file that was ever committed, by its digest."""
        with self._lock:
            return self._lfs.get(sha256)

    def _is_lfs(self, path: str, content: bytes) -> bool:
        return len(content) >= self.lfs_threshold or path.endswith(self.lfs_suffixes)
