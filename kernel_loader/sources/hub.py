"""The Hub: what its repositories of type kernel hold. Asks, and remembers nothing.

Transfers, tokens, proxies, endpoint and retries are huggingface_hub's, through functions that its 1.x and 2.x lines
share. Each question is one request with a deadline; a file is one GET, whose content is held against the hash that the
listing gives.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import quote

from kernel_loader import __version__
from kernel_loader.errors import HubUnavailable, IntegrityError, RepositoryMissing, SourceError, UnknownVersion
from kernel_loader.metadata import FILE_NAME, MAX_BYTES, is_safe_path
from kernel_loader.sources.protocol import Request

# Seconds without a byte after which a request counts as failed.
STALL: Final = 10.0

# A build is hundreds of files at most. A listing beyond this is no build.
MAX_FILES: Final = 20_000

# Tries of one file whose body breaks off or comes out wrong; refused requests have their own, in huggingface_hub.
TRIES: Final = 3

# Files in Xet storage from this size on are left to the client; below, one GET is faster.
LARGE: Final = 32 * 2**20

_CHUNK: Final = 2**20

# The 1.x line makes a session for each of the threads that ask first, and loses all but one, with its connections.
_SESSION: Final = threading.Lock()

_Kind = TypeVar("_Kind")


class RemoteFile(NamedTuple):
    """A file of a build, as the Hub lists it.

    Attributes:
        path: relative to the build, with slashes.
        size: in bytes.
        blob: git's sha1 of the content; of the pointer, for a file in large-file storage.
        sha256: of a file in large-file storage, in hexadecimal.
        in_xet: the file is kept in Xet storage, from which the client takes it in chunks, many at once.
    """

    path: str
    size: int
    blob: str
    sha256: str | None
    in_xet: bool = False

    def is_content(self, content: bytes) -> bool:
        """Whether this is the file's content."""
        return self.is_hash(hashlib.sha256(content).hexdigest(), git_blob(len(content), content).hexdigest())

    def is_hash(self, sha256: str, blob: str) -> bool:
        """Whether content with these hashes is what is listed."""
        return sha256 == self.sha256 if self.sha256 else blob == self.blob


def git_blob(size: int, content: bytes = b"") -> hashlib._Hash:
    """The hash by which git knows a file of a size, begun with some content."""
    return hashlib.sha1(b"blob %d\0" % size + content, usedforsecurity=False)


class Hub:
    """Questions to the Hub.

    Args:
        retries: how often a refused request is tried again. Zero where a cached answer can serve instead.

    Every method raises `HubUnavailable` when no answer can be had, and `RepositoryMissing` when the Hub does not know
    the repository or does not show it to this user.
    """

    def __init__(self, retries: int = 4) -> None:
        self._retries: Final = retries

    def commit(self, request: Request) -> str:
        """The commit that a version, branch or tag stands at.

        Raises:
            UnknownVersion: the repository has no such version or revision.
        """
        revision = request.git_revision or "main"
        try:
            answer = self._json(f"api/kernels/{request.repo}/revision/{quote(revision, safe='')}", request)
        except UnknownVersion as error:
            raise UnknownVersion(request.repo, revision, self.versions(request)) from error
        except RepositoryMissing as error:
            if not self._is_model(request):
                raise
            detail = "the Hub has a repository of that name of type model, and kernels are of type kernel"
            raise RepositoryMissing(str(request), detail, _MODEL) from error
        sha = answer.get("sha")
        if not isinstance(sha, str) or re.fullmatch(r"[0-9a-f]{40}", sha) is None:
            raise self._strange(request, f"its commit is {sha!r}")
        return sha

    def versions(self, request: Request) -> tuple[int, ...]:
        """The versions that a repository has, oldest first."""
        refs = self._json(f"api/kernels/{request.repo}/refs", request)
        names = [str(branch.get("name")) for branch in refs.get("branches", ()) if isinstance(branch, dict)]
        return tuple(sorted(int(name[1:]) for name in names if re.fullmatch(r"v\d{1,9}", name)))

    def names(self, request: Request, commit: str) -> tuple[str, ...]:
        """The directories below `build/` at a commit, whatever they are called."""
        entries = self._tree(request, commit, "build", recursive=False)
        return tuple(sorted(e["path"].removeprefix("build/") for e in entries if e["type"] == "directory"))

    def files(self, request: Request, commit: str, build: str) -> tuple[RemoteFile, ...]:
        """The files of a build at a commit, bytecode left out.

        Raises:
            IntegrityError: the listing names a file outside the build, or two that a file system may not tell apart.
        """
        return self._below(request, commit, f"build/{build}").get(build, ())

    def builds(self, request: Request, commit: str) -> dict[str, tuple[RemoteFile, ...]]:
        """The files of all builds at a commit, by the names of the builds, in one listing.

        Raises:
            IntegrityError: as `files`.
        """
        return self._below(request, commit, "build")

    def _below(self, request: Request, commit: str, directory: str) -> dict[str, tuple[RemoteFile, ...]]:
        found: dict[str, list[RemoteFile]] = {}
        for entry in self._tree(request, commit, directory, recursive=True):
            if entry["type"] != "file":
                continue
            build, _, path = entry["path"].removeprefix("build/").partition("/")
            if not path and directory == "build":
                continue  # lies beside the builds
            if not entry["path"].startswith(f"{directory}/") or not is_safe_path(f"{build}/{path}"):
                raise IntegrityError(f"{request}, {directory}", (f"the Hub lists {entry['path']!r}",), _REPORT)
            if "__pycache__" not in path.split("/") and not path.endswith(".pyc"):
                found.setdefault(build, []).append(self._file(path, entry, request))
        for build, files in found.items():
            _refuse_collisions(request, build, files)
        return {build: tuple(sorted(files, key=lambda file: file.path)) for build, files in found.items()}

    def _file(self, path: str, entry: dict[str, Any], request: Request) -> RemoteFile:
        lfs = entry.get("lfs") or {}
        sha256 = lfs.get("oid") if isinstance(lfs, dict) else 0
        size, blob = entry.get("size"), entry.get("oid")
        if not (isinstance(size, int) and isinstance(blob, str) and isinstance(sha256, str | None)):
            raise self._strange(request, f"{path!r} is listed in another form than is known")
        return RemoteFile(path, size, blob, sha256, isinstance(entry.get("xetHash"), str))

    def metadata(self, request: Request, commit: str, build: str) -> bytes | None:
        """The metadata.json of a build; None when it has none.

        Raises:
            SourceError: it is larger than any that is read.
        """
        from huggingface_hub.errors import EntryNotFoundError

        content = bytearray()
        try:
            with self._stream(request, commit, f"build/{build}/{FILE_NAME}") as chunks:
                for chunk in chunks:
                    content += chunk
                    if len(content) > MAX_BYTES:
                        raise self._strange(request, f"{FILE_NAME} of {build} has more than {MAX_BYTES} bytes")
        except EntryNotFoundError:
            return None
        return bytes(content)

    def download(
        self, request: Request, commit: str, build: str, file: RemoteFile, target: Path, tell: Callable[[int], object]
    ) -> str:
        """Write a file, hashing it on the way; `tell` hears of the bytes as they come.

        Returns:
            The base64 of its sha256.

        Raises:
            IntegrityError: what arrives is not what the listing says, also when it is fetched again.
        """
        found = ""
        for _ in range(TRIES):
            try:
                if file.in_xet and file.size >= LARGE:
                    sha256, found = self._through_client(request, commit, f"build/{build}/{file.path}", file, target)
                    tell(file.size)
                else:
                    with self._stream(request, commit, f"build/{build}/{file.path}") as chunks:
                        sha256, found = _write(chunks, target, file, tell)
            except _Broken as error:
                found = str(error)
                continue
            if not found:
                return base64.b64encode(sha256).decode()
        raise IntegrityError(f"{request}, {build}", (f"{file.path}: {found}",), _REPORT)

    def trusts(self, publisher: str) -> bool:
        """Whether the Hub marks an organisation as a trusted publisher of kernels. A user is none."""
        from huggingface_hub.errors import HfHubHTTPError

        request = Request(repo=publisher)
        try:
            return (
                self._json(f"api/organizations/{quote(publisher, safe='')}/overview", request).get(
                    "trustedKernelPublisher"
                )
                is True
            )
        except RepositoryMissing as error:
            if isinstance(error.__cause__, HfHubHTTPError):
                return False
            raise

    def _is_model(self, request: Request) -> bool:
        try:
            self._json(f"api/models/{request.repo}", request)
        except SourceError:
            return False
        return True

    # --- requests -------------------------------------------------------------------------------------------------

    def _json(self, path: str, request: Request) -> dict[str, Any]:
        return self._read(self._get(f"{_endpoint()}/{path}", request), dict, request)

    def _read(self, response: Any, kind: type[_Kind], request: Request) -> _Kind:  # noqa: ANN401
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise self._strange(request, f"the Hub answers what is no JSON ({error})") from error
        if not isinstance(answer, kind):
            raise self._strange(request, "the Hub answers in another form than is known")
        return answer

    def _tree(self, request: Request, commit: str, directory: str, *, recursive: bool) -> Iterator[dict[str, Any]]:
        from huggingface_hub.errors import EntryNotFoundError

        url = f"{_endpoint()}/api/kernels/{request.repo}/tree/{commit}/{quote(directory)}"
        page: str | None = f"{url}?recursive=true" if recursive else url
        count = 0
        while page is not None:
            try:
                response = self._get(page, request)
            except EntryNotFoundError:
                return  # the directory is not there
            for entry in self._read(response, list, request):
                count += 1
                if count > MAX_FILES:
                    raise self._strange(request, f"{directory} lists more than {MAX_FILES} entries")
                if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("type", "path")):
                    raise self._strange(request, f"{directory} lists an entry in another form than is known")
                yield entry
            page = response.links.get("next", {}).get("url")

    def _get(self, url: str, request: Request) -> Any:  # noqa: ANN401 - a response of whichever httpx there is
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        with self._failures(request):
            response = http_backoff("GET", url, headers=_headers(), **self._patience())
            hf_raise_for_status(response)
            return response

    @contextlib.contextmanager
    def _stream(self, request: Request, commit: str, path: str) -> Iterator[Iterator[bytes]]:
        from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

        url = f"{_endpoint()}/kernels/{request.repo}/resolve/{commit}/{quote(path)}"
        # Asked for as it is: a body that is compressed on the way has another length than the file.
        headers = _headers() | {"Accept-Encoding": "identity"}
        with self._failures(request):
            stream = http_stream_backoff("GET", url, headers=headers, follow_redirects=True, **self._patience())
            with stream as response:
                hf_raise_for_status(response)
                yield _body(response)

    def _through_client(
        self, request: Request, commit: str, path: str, file: RemoteFile, target: Path
    ) -> tuple[bytes, str]:
        """Let the client bring a large file by its own road, Xet where that is there. Costs one HEAD more."""
        from huggingface_hub import hf_hub_download

        with tempfile.TemporaryDirectory(dir=target.parent) as directory, self._failures(request):
            brought = Path(
                hf_hub_download(
                    request.repo,
                    path,
                    repo_type="kernel",
                    revision=commit,
                    local_dir=directory,
                    endpoint=_endpoint(),
                    library_name="kernel_loader",
                )
            )
            brought.replace(target)
        with target.open("rb") as stream:
            return _check(iter(functools.partial(stream.read, _CHUNK), b""), file, lambda _: None)

    def _patience(self) -> dict[str, Any]:
        # The 1.x line does not try again when a connection is closed without an answer.
        broken = next(cls for cls in _http_error().__subclasses__() if cls.__name__ == "RequestError")
        return {"max_retries": self._retries, "timeout": STALL, "retry_on_exceptions": broken}

    @contextlib.contextmanager
    def _failures(self, request: Request) -> Iterator[None]:
        """Errors of huggingface_hub, and of whichever httpx it uses, become ours."""
        from huggingface_hub import errors
        from huggingface_hub.utils import get_session

        with _SESSION:
            get_session()
        try:
            yield
        except errors.LocalEntryNotFoundError as error:  # how the client says that it could not reach the Hub
            raise HubUnavailable(str(request), f"the Hub cannot be reached ({error})", _UNAVAILABLE) from error
        except errors.EntryNotFoundError:
            raise
        except errors.GatedRepoError as error:
            raise RepositoryMissing(str(request), "access to it is gated", _GATED) from error
        except errors.RepositoryNotFoundError as error:
            raise RepositoryMissing(str(request), "the Hub shows no such kernel repository", _MISSING) from error
        except errors.RevisionNotFoundError as error:
            raise UnknownVersion(request.repo, request.git_revision or "main", ()) from error
        except _http_error() as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in (401, 403):
                raise RepositoryMissing(str(request), f"the Hub refuses access ({status})", _GATED) from error
            if status == 404:
                raise RepositoryMissing(str(request), "the Hub does not know it", _MISSING) from error
            detail = f"the Hub answers {status}" if status else f"the Hub cannot be reached ({error})"
            raise HubUnavailable(str(request), detail, _UNAVAILABLE) from error

    def _strange(self, request: Request, detail: str) -> SourceError:
        return SourceError(str(request), detail, _REPORT)


class _Broken(Exception):  # noqa: N818 - a body that ended early is a reason to try again
    pass


_REPORT: Final = "Do not use this kernel before its author has looked at it."
_GATED: Final = "Ask for access on its page, and give a token that has it: `hf auth login`, or HF_TOKEN."
_MISSING: Final = "Check the name; for a private repository give a token (`hf auth login`, or HF_TOKEN)."
_MODEL: Final = (
    "Ask its author to publish it as a kernel, or download it and name the directory in KERNEL_LOADER_LOCAL."
)
_UNAVAILABLE: Final = (
    "Try again later; use builds on this machine with KERNEL_LOADER_LOCAL=repository=DIRECTORY; or accept the slow "
    'reference with fallback="reference", where the kernel has one.'
)


@functools.cache
def _http_error() -> type[Exception]:
    # The base of all errors of httpx, or of httpx2: huggingface_hub names neither, and its own error is one of them.
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__bases__ if base is not OSError)


def _headers() -> dict[str, str]:
    # The client's own function would also look for what runs this process, and ask the Hub about it.
    from huggingface_hub import constants, get_token

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {"User-Agent": f"kernel_loader/{__version__}"} | ({"Authorization": f"Bearer {token}"} if token else {})


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _body(response: Any) -> Iterator[bytes]:  # noqa: ANN401 - a response of whichever httpx there is
    try:
        yield from response.iter_bytes(_CHUNK)
    except _http_error() as error:
        raise _Broken(f"the transfer broke off ({error})") from error


def _write(chunks: Iterator[bytes], target: Path, file: RemoteFile, tell: Callable[[int], object]) -> tuple[bytes, str]:
    """Write the body; gives its sha256, and how it differs from the listing."""
    with target.open("wb") as stream:

        def written() -> Iterator[bytes]:
            for chunk in chunks:
                stream.write(chunk)
                yield chunk

        found = _check(written(), file, tell)
        # It must be durable before the build is published; here that costs no time, as other files are on their way.
        stream.flush()
        os.fsync(stream.fileno())
        return found


def _check(chunks: Iterator[bytes], file: RemoteFile, tell: Callable[[int], object]) -> tuple[bytes, str]:
    sha256, blob, size = hashlib.sha256(), git_blob(file.size), 0
    for chunk in chunks:
        size += len(chunk)
        if size > file.size:
            break
        sha256.update(chunk)
        blob.update(chunk)
        tell(len(chunk))
    if size == file.size and file.is_hash(sha256.hexdigest(), blob.hexdigest()):
        return sha256.digest(), ""
    tell(-min(size, file.size))
    if size > file.size:
        return b"", f"it has more than the {file.size} bytes that are listed"
    if size < file.size:
        return b"", f"it has {size} bytes, and {file.size} are listed"
    return b"", "its content is not what is listed"


def _refuse_collisions(request: Request, build: str, files: list[RemoteFile]) -> None:
    # On a file system that folds case, the second file would silently replace the first.
    seen: dict[str, str] = {}
    for file in files:
        other = seen.setdefault(file.path.casefold(), file.path)
        if other is not file.path:
            raise IntegrityError(f"{request}, {build}", (f"the Hub lists {other!r} and {file.path!r}",), _REPORT)
