"""Lock files: which commit of each kernel repository a project loads, and what every build there consists of.

`kernel-loader.lock` is TOML, and docs/lock.md has its form: `[[kernel]]` says what was asked for and which repositories
it may come from, `[[repository]]` where each of those stands, with all its builds. The `kernels.lock` of the `kernels`
package, in JSON, names commits alone, and is read too.

Nothing here asks anybody: a lock is a value, and what a host takes of it is computed.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Self

from kernel_loader.digest import content_digest
from kernel_loader.errors import (
    LockError,
    LockMismatch,
    LockMissing,
    LockStale,
    MetadataError,
    RequestError,
    VariantError,
)
from kernel_loader.host import Host
from kernel_loader.manifest import REPO, known, read_backends, read_requires, requires_table
from kernel_loader.metadata import Metadata, path_problem
from kernel_loader.reading import Node
from kernel_loader.resolver import Resolution, resolve
from kernel_loader.rules import NOTHING, Requires
from kernel_loader.sources import Request
from kernel_loader.variant import Variant

FILE_NAME: Final = "kernel-loader.lock"
PEERS_FILE_NAME: Final = "kernels.lock"
SCHEMA: Final = 1

# A lock of a hundred repositories with forty builds each is about 15 MB.
MAX_BYTES: Final = 64 * 2**20

_HEAD: Final = "# Written by `kernel-loader lock`. Keep it under version control; do not edit it.\n"
COMMIT: Final = r"[0-9a-f]{40}"
DIGEST: Final = r"[0-9a-f]{64}"
_UNSPOKEN: Final = r"'''|\x7f"  # what a literal text of TOML cannot hold
_FILE: Final = rf"(?ma)^({DIGEST}) (0|[1-9]\d{{0,15}}) (.+)$"


class LockedFile(NamedTuple):
    """A file of a build: path relative to the build, size in bytes, sha256 in hexadecimal."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LockedBuild:
    """A build of a locked repository.

    Attributes:
        variant: its name.
        digest: of its content, as in `Origin.digest`.
        files: all of them, sorted by path.
        metadata: what its metadata.json says, as far as that decides where it runs.
    """

    variant: str
    digest: str
    files: tuple[LockedFile, ...]
    metadata: Metadata

    @classmethod
    def of(cls, variant: str, files: Iterable[LockedFile], metadata: Metadata) -> Self:
        """The build that consists of these files."""
        by_path = tuple(sorted(files))
        return cls(variant, digest_of(by_path), by_path, metadata.deciding())

    @property
    def size(self) -> int:
        """Bytes of all its files."""
        return sum(file.size for file in self.files)

    @property
    def problem(self) -> str:
        """What keeps it out of a lock file; empty for nothing."""
        paths = [file.path for file in self.files]
        if not paths:
            return "it has no files"
        if unspoken := next((path for path in paths if re.search(_UNSPOKEN, path)), None):
            return f"a lock cannot name the file {unspoken!r}"
        if re.search(r"[\ud800-\udfff]", json.dumps(self.metadata.document(), ensure_ascii=False)):
            return "its metadata holds a text that is not Unicode"
        return path_problem(paths)


@dataclass(frozen=True, slots=True)
class LockedRepository:
    """Where a repository stands.

    Attributes:
        request: the repository, and the version or revision that was asked for; neither in a lock that names commits
            alone, where any is meant.
        commit: 40 hexadecimal digits.
        builds: all of them by name; None in a lock that names commits alone.
    """

    request: Request
    commit: str
    builds: Mapping[str, LockedBuild] | None = field(default=None, hash=False)

    def answers(self, request: Request) -> bool:
        """Whether this is what a request means."""
        mine, asked = self.request.git_revision, request.git_revision
        return self.request.repo == request.repo and (mine is None or asked in (mine, self.commit))


class Place(NamedTuple):
    """A repository that a locked kernel may come from, and what its manifest demands there."""

    request: Request
    backends: tuple[str, ...] = ()
    requires: Requires = NOTHING


@dataclass(frozen=True, slots=True)
class LockedKernel:
    """What was asked for: a registered name, or a repository as on the command line ("org/name@3").

    `places` are its repositories in the order in which they are asked.
    """

    name: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Lock:
    """What a project loads.

    Attributes:
        kernels: what was asked for, by name; nothing in a lock of the `kernels` package.
        repositories: those of all kernels, and those that their builds depend on, by name and revision.
        file: how errors call it.
    """

    kernels: tuple[LockedKernel, ...] = ()
    repositories: tuple[LockedRepository, ...] = ()
    file: str = field(default=FILE_NAME, compare=False)

    # --- reading and writing --------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, text: bytes | str, file: str = FILE_NAME) -> Lock:
        """Read the text of a lock file of either form.

        Raises:
            LockError: it is damaged, of another schema, or says two things of one repository.
        """
        if len(text) > MAX_BYTES:
            raise LockError(file, f"it has {len(text):,} bytes, and more than {MAX_BYTES:,} are not read")
        try:
            decoded = text.decode() if isinstance(text, bytes) else text
        except UnicodeDecodeError as error:
            raise LockError(file, f"not UTF-8 ({error})") from error
        # A list of tables in JSON; "[[" is how TOML begins one.
        is_json = re.match(r"\s*\[\s*[{\]]", decoded) is not None
        lock = _read_json(decoded, file) if is_json else _read_toml(decoded, file)
        _refuse_twice(lock)
        return lock

    @classmethod
    def read(cls, file: str) -> Lock:
        """Read a lock file.

        Raises:
            LockMissing: it is not there.
            LockError: as `parse`, or it cannot be read.
        """
        try:
            with open(file, "rb") as stream:  # noqa: PTH123 - this module knows no file system but this
                return cls.parse(stream.read(MAX_BYTES + 1), file)
        except FileNotFoundError as error:
            raise LockMissing(file, "there is no such file") from error
        except OSError as error:
            raise LockError(file, f"it cannot be read ({error})") from error

    @classmethod
    def for_package(cls, package: str) -> Lock:
        """The lock that travels in an installed package: `kernel-loader.lock` among its modules.

        Where there is none, the `kernels.lock` that the `kernels` package puts beside the distribution's metadata.
        The package is not imported, and is named by its caller: nobody's stack is looked at.

        Raises:
            RequestError: the name is no text.
            LockMissing: the package is not installed, or has no lock.
            LockError: as `parse`.
        """
        from importlib import metadata

        if not isinstance(package, str):
            raise RequestError(f"package={package!r} was given", 'Pass the name that is imported, as "mypackage".')
        try:
            spec = find_spec(package) if re.fullmatch(r"\w+", package) else None
        except ValueError:  # a module that no finder has found, as the script that runs
            spec = None
        directories = list((spec.submodule_search_locations if spec else None) or ())
        for directory in directories:
            try:
                return cls.read(f"{directory}/{FILE_NAME}")
            except LockMissing:
                continue
        try:
            text = metadata.distribution(package).read_text(PEERS_FILE_NAME) if package else None
        except metadata.PackageNotFoundError:
            text = None
        if text is not None:
            return cls.parse(text, f"{package}, {PEERS_FILE_NAME}")
        if directories:
            raise LockMissing(f"{directories[0]}/{FILE_NAME}", f"the package {package} has none")
        raise LockMissing(FILE_NAME, f"no package {package!r} is installed")

    def to_toml(self) -> str:
        """The text of the file: the same for equal locks, and little of it changes where little has.

        Raises:
            LockError: the lock names commits alone, or holds what no lock file can.
        """
        lines = [f"{_HEAD}schema = {SCHEMA}\n"]
        lines += (_kernel_lines(kernel) for kernel in self.kernels)
        for repository in self.repositories:
            lines.append(_repository_lines(repository, self.file))
        text = "\n".join(lines)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise LockError(self.file, f"it holds a text that is not Unicode ({error})") from error
        return text

    # --- asking ---------------------------------------------------------------------------------------------------

    def find(self, request: Request) -> LockedRepository:
        """Where a repository stands.

        Raises:
            LockStale: the lock has another version or revision of it.
            LockMissing: the lock does not name it.
        """
        same = [locked for locked in self.repositories if locked.request.repo == request.repo]
        for locked in same:
            if locked.answers(request):
                return locked
        if same:
            there = ", ".join(str(locked.request.git_revision) for locked in same)
            raise LockStale(self.file, f"it has {request.repo} at {there}, and {request.git_revision} is asked for")
        raise LockMissing(self.file, f"it does not name {request}")

    def names(self, request: Request) -> bool:
        """Whether `find` has an answer."""
        return any(locked.answers(request) for locked in self.repositories)

    def commit(self, repo: str) -> str:
        """The one commit of a repository.

        Raises:
            LockMissing: the lock does not name it.
            LockError: the lock has several versions of it.
        """
        commits = {locked.commit for locked in self.repositories if locked.request.repo == repo}
        if not commits:
            raise LockMissing(self.file, f"it does not name {repo}")
        if len(commits) > 1:
            raise LockError(self.file, f"it has {repo} at {len(commits)} commits, and one is asked for")
        return commits.pop()

    def check(self, request: Request, variant: str, digest: str, commit: str | None) -> None:
        """Hold a build that is about to be imported against the lock.

        Raises:
            LockMismatch: its bytes are not those that are locked.
            LockMissing, LockStale: as `find`.
        """
        locked = self.find(request)
        build = locked.builds.get(variant) if locked.builds is not None else None
        if build.digest == digest if build is not None else locked.builds is None and locked.commit == commit:
            return
        raise LockMismatch(self.file, f"{request}, {variant}: the build at hand ({digest[:12]}) is not what is locked")

    def select(self, host: Host) -> dict[str, Resolution]:
        """What a host takes of each kernel, computed from the lock alone: by name, as `kernels` has them.

        Advisories, the settings of a loader, and the reference builds that ship with the package are not heeded:
        `KernelLoader(lock=...).resolve(name, host=host)` heeds them.

        Raises:
            LockError: the lock names commits alone, so that what is there is not known.
        """
        if not self.kernels and self.repositories:
            raise LockError(self.file, f"it names commits alone; run `kernel-loader lock` for a {FILE_NAME}")
        return {kernel.name: self._select(kernel, host) for kernel in self.kernels}

    def _select(self, kernel: LockedKernel, host: Host) -> Resolution:
        looked: list[Resolution] = []
        for place in kernel.places:
            if place.backends and host.backend.kind not in place.backends:
                note = f"it is for {', '.join(place.backends)}, and this host computes on {host.backend.kind}"
                looked.append(Resolution(str(place.request), host, note=note))
                continue
            builds = self.find(place.request).builds or {}
            looked.append(
                resolve(
                    builds,
                    host,
                    repo=str(place.request),
                    version=place.request.version,
                    requires=place.requires,
                    read_metadata=functools.partial(_metadata_of, builds),
                )
            )
            if looked[-1].chosen is not None:
                break
        return looked[0]._replace(alternatives=tuple(looked[1:]))


# --- our own form ---------------------------------------------------------------------------------------------------


def _read_toml(text: str, file: str) -> Lock:
    import tomllib

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise LockError(file, f"not TOML ({error})") from error
    root = Node(document, lambda path, detail: LockError(f"{file}, {path}" if path else file, detail))
    table = root.table()
    if "schema" not in table:
        root.error("the key schema is missing, so that this is no lock file")
    if (schema := table["schema"].integer()) != SCHEMA:
        table["schema"].error(f"it is of schema {schema}, and this release reads {SCHEMA}")
    keys = known(root, frozenset({"schema", "kernel", "repository"}))
    return Lock(
        kernels=tuple(_read_kernel(node) for node in keys["kernel"].items()) if "kernel" in keys else (),
        repositories=tuple(map(_read_repository, keys["repository"].items())) if "repository" in keys else (),
        file=file,
    )


def _needed(node: Node, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Node]:
    table = known(node, frozenset({*required, *optional}))
    for key in required:
        if key not in table:
            node.error(f"the key {key} is missing")
    return table


def _read_kernel(node: Node) -> LockedKernel:
    table = _needed(node, ("name", "from"))
    places = tuple(map(_read_place, table["from"].items()))
    if not places:
        table["from"].error("a kernel comes from a repository")
    return LockedKernel(table["name"].text(), places)


def _read_place(node: Node) -> Place:
    table = _needed(node, ("repo",), ("version", "revision", "backends", "requires"))
    return Place(
        _read_request(node, table),
        read_backends(table["backends"]) if "backends" in table else (),
        read_requires(table["requires"]) if "requires" in table else NOTHING,
    )


def _read_request(node: Node, table: Mapping[str, Node]) -> Request:
    if ("version" in table) == ("revision" in table):
        node.error("a repo has a version or a revision, and not both")
    return Request(
        repo=table["repo"].text(REPO, "a repository id (organisation/name)"),
        version=table["version"].integer() if "version" in table else None,
        revision=table["revision"].text(r"\S+", "a branch, tag or commit") if "revision" in table else None,
    )


def _read_repository(node: Node) -> LockedRepository:
    table = _needed(node, ("repo", "commit"), ("version", "revision", "build"))
    builds: dict[str, LockedBuild] = {}
    for item in table["build"].items() if "build" in table else ():
        build = _read_build(item)
        if build.variant in builds:
            item.error(f"{build.variant} is listed twice")
        builds[build.variant] = build
    commit = table["commit"].text(COMMIT, "a commit (40 hexadecimal digits)")
    return LockedRepository(_read_request(node, table), commit, builds)


def _read_build(node: Node) -> LockedBuild:
    table = _needed(node, ("variant", "digest", "files"), ("metadata",))
    variant = table["variant"].text()
    try:
        Variant.parse(variant)
    except VariantError as error:
        table["variant"].error(error.detail)
    files = _read_files(table["files"])
    digest = table["digest"].text(DIGEST, "a sha256 in hexadecimal")
    if digest_of(files) != digest:
        table["digest"].error("it is not the digest of the files that are listed")
    about = table["metadata"].value if "metadata" in table else {}
    try:
        metadata = Metadata.parse(json.dumps(about), table["metadata"].path if "metadata" in table else "")
    except (MetadataError, TypeError, ValueError) as error:
        table["metadata"].error(str(error))
    return LockedBuild(variant, digest, files, metadata)


def _read_files(node: Node) -> tuple[LockedFile, ...]:
    text = node.text()
    files = [LockedFile(path, int(size), sha256) for sha256, size, path in re.findall(_FILE, text)]
    lines = text.removesuffix("\n").split("\n")
    if len(files) != len(lines):
        wrong = next(line for line in lines if re.fullmatch(_FILE, line) is None)
        node.error(f"{wrong[:120]!r} is no line of sha256, size and path")
    if problem := path_problem([file.path for file in files]):
        node.error(problem)
    return tuple(sorted(files))


def _kernel_lines(kernel: LockedKernel) -> str:
    places = "".join(f"    {_toml(_place_table(place))},\n" for place in kernel.places)
    return f"[[kernel]]\nname = {_toml(kernel.name)}\nfrom = [\n{places}]\n"


def _place_table(place: Place) -> dict[str, Any]:
    table = _request_table(place.request)
    if place.backends:
        table["backends"] = list(place.backends)
    return table | ({"requires": requires_table(place.requires)} if place.requires != NOTHING else {})


def _request_table(request: Request) -> dict[str, Any]:
    at = {"version": request.version} if request.version is not None else {"revision": request.git_revision or "main"}
    return {"repo": request.repo, **at}


def _repository_lines(repository: LockedRepository, file: str) -> str:
    if repository.builds is None:
        raise LockError(file, f"it names commits alone; run `kernel-loader lock` for a {FILE_NAME}")
    table = _request_table(repository.request) | {"commit": repository.commit}
    head = "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
    builds = (_build_lines(repository.builds[variant], file) for variant in sorted(repository.builds))
    return "\n".join([f"[[repository]]\n{head}", *builds])


def _build_lines(build: LockedBuild, file: str) -> str:
    if build.problem:
        raise LockError(file, f"{build.variant} cannot be written: {build.problem}")
    files = "".join(f"{locked.sha256} {locked.size} {locked.path}\n" for locked in build.files)
    about = build.metadata.document()
    metadata = f"metadata = {_toml(about)}\n" if about else ""
    head = f"variant = {_toml(build.variant)}\ndigest = {_toml(build.digest)}\n{metadata}"
    return f"[[repository.build]]\n{head}files = '''\n{files}'''\n"


def _toml(value: Any) -> str:  # noqa: ANN401 - of TOML's types, on one line
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # A text of JSON is one of TOML, but for one character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_\-]+", key) else _toml(key)


# --- the form of the kernels package --------------------------------------------------------------------------------


def _read_json(text: str, file: str) -> Lock:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LockError(file, f"not JSON ({error})") from error
    root = Node(document, lambda path, detail: LockError(f"{file}, {path}", detail))
    return Lock(repositories=tuple(map(_read_entry, root.items())), file=file)


def _read_entry(node: Node) -> LockedRepository:
    parts = node.table()
    if "repo_id" in parts:  # as older releases write it
        parts = {"repo-id": parts["repo_id"]} | ({"commit": parts["sha"]} if "sha" in parts else {})
    elif {"dependency", "lock"} <= parts.keys():
        parts = parts["dependency"].table() | parts["lock"].table()
    else:
        node.error("an entry has a dependency and a lock")
    for key in ("repo-id", "commit"):
        if key not in parts:
            node.error(f"the key {key} is missing")
    version = parts["version"].integer() if "version" in parts else None
    request = Request(parts["repo-id"].text(REPO, "a repository id (organisation/name)"), version)
    return LockedRepository(request, parts["commit"].text(COMMIT, "a commit (40 hexadecimal digits)"))


# --- both -----------------------------------------------------------------------------------------------------------


def _refuse_twice(lock: Lock) -> None:
    for what, names in (
        ("kernel", [kernel.name for kernel in lock.kernels]),
        ("repository", [str(locked.request) for locked in lock.repositories]),
    ):
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise LockError(lock.file, f"the {what} {twice} has two entries")
    for kernel in lock.kernels:
        for place in kernel.places:
            if not lock.names(place.request):
                raise LockError(lock.file, f"{kernel.name} comes from {place.request}, which has no entry")


def _metadata_of(builds: Mapping[str, LockedBuild], name: str) -> Metadata:
    return builds[name].metadata


def digest_of(files: Iterable[LockedFile]) -> str:
    """The digest of the build that consists of these files."""
    return content_digest({file.path: base64.b64encode(bytes.fromhex(file.sha256)).decode() for file in files})
