"""Site: everything that a Hub knows, and its answers. No sockets here."""

import base64
import binascii
import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Final, NoReturn
from urllib.parse import parse_qs, quote, urlencode

from .answer import Answer, as_json, compressed, content, error, redirect
from .blob import Blob
from .log import Request
from .repository import Commit, Entry, Kind, Repository
from .routes import Target, lfs_path, resolve_cache_path

EXPANDED_PAGE: Final = 50
TRUE: Final = ("1", "true")


class Refusal(Exception):  # noqa: N818  # an answer, not an error of ours
    """Ends the making of an answer with another one."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.answer = answer


def refuse(status: int, message: str, code: str | None = None, **headers: str) -> NoReturn:
    """Answer with an error; underscores in the names of headers are dashes."""
    raise Refusal(error(status, message, code, {name.replace("_", "-"): value for name, value in headers.items()}))


class Site:
    """Repositories, publishers and tokens, and what the Hub's routes answer about them.

    Attributes:
        tokens: the tokens that are valid; a request with any other is refused with 401.
        page_size: most entries of one page of a listing (50 if `expand` is asked for, as on the Hub).
        cdn: LFS files are served by the second origin, not by the Hub itself.
        gzip: small text is compressed, and without Content-Length, for clients that accept it.
        resolve_cache: small files take the redirect on the same origin that huggingface.co has for them: one more
            request a file.
    """

    def __init__(self) -> None:
        self.tokens: Collection[str] = frozenset()
        self.page_size = 1000
        self.cdn = False
        self.gzip = False
        self.resolve_cache = False
        self.endpoint = ""
        self.cdn_endpoint = ""
        self._lock = threading.Lock()
        self._repositories: dict[tuple[Kind, str], Repository] = {}
        self._publishers: dict[str, bool] = {}
        self._routes: Final[Mapping[str, Callable[[Request, Target], Answer]]] = {
            "whoami": self._whoami,
            "agent-harnesses": self._agent_harnesses,
            "organization": self._organization,
            "info": self._info,
            "refs": self._refs,
            "tree": self._tree,
            "paths-info": self._paths_info,
            "resolve": self._resolve,
            "resolve-cache": self._resolve_cache,
            "redirect-target": self._redirect_target,
        }

    def repository(self, kind: Kind, repo_id: str) -> Repository:
        """The repository of this kind and name (`org/name`), created if it is new."""
        if repo_id.count("/") != 1:
            raise ValueError(f"a repository is named org/name, not {repo_id!r}")
        with self._lock:
            return self._repositories.setdefault((kind, repo_id), Repository(kind, repo_id))

    def kernel(self, repo_id: str) -> Repository:
        """The repository of type kernel of this name."""
        return self.repository("kernel", repo_id)

    def model(self, repo_id: str) -> Repository:
        """The repository of type model of this name."""
        return self.repository("model", repo_id)

    def publisher(self, name: str, *, trusted: bool) -> None:
        """Make an organisation known, with its `trustedKernelPublisher` mark. Any other is answered with 404."""
        with self._lock:
            self._publishers[name] = trusted

    def answer(self, request: Request, target: Target) -> Answer:
        """What the Hub says to a request."""
        try:
            if target.route != "redirect-target" and (token := _token(request)) and token not in self.tokens:
                refuse(401, "Invalid credentials in Authorization header")
            handler = self._routes.get(target.route)
            if handler is None or (request.method == "POST") != (target.route == "paths-info"):
                refuse(404, f"Cannot {request.method} {request.path}")
            return handler(request, target)
        except Refusal as refusal:
            return refusal.answer

    def _whoami(self, request: Request, target: Target) -> Answer:
        token = _token(request) or refuse(401, "Invalid username or password.")
        return as_json(
            {
                "type": "user",
                "id": "0" * 24,
                "name": "tester",
                "fullname": "Tester",
                "orgs": [],
                "auth": {"type": "access_token", "accessToken": {"displayName": token[:6], "role": "read"}},
            }
        )

    def _agent_harnesses(self, request: Request, target: Target) -> Answer:
        # What 2.x asks once a day and HF_HOME for its User-Agent, unless telemetry is off.
        return as_json({"standardEnvVars": [], "harnesses": {}})

    def _organization(self, request: Request, target: Target) -> Answer:
        with self._lock:
            trusted = self._publishers.get(target.name)
        if trusted is None:
            refuse(404, "This organization does not exist")
        return as_json(
            {
                "name": target.name,
                "fullname": target.name.title(),
                "avatarUrl": "",
                "type": "org",
                "isVerified": False,
                "numUsers": 1,
                "trustedKernelPublisher": trusted,
            }
        )

    def _info(self, request: Request, target: Target) -> Answer:
        repository, commit = self._commit(request, target)
        info: dict[str, object] = {
            "id": repository.id,
            "author": repository.id.partition("/")[0],
            "sha": commit.id,
            "lastModified": _date(commit.date),
            "private": repository.private,
            "gated": "auto" if repository.gated is True else repository.gated,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": list(repository.labels),
        }
        if repository.kind != "kernel":  # the Hub lists no siblings for kernels
            blobs = request.query.get("blobs", "").lower() in TRUE
            info["siblings"] = [_sibling(path, blob, blobs=blobs) for path, blob in commit.files.items()]
        return as_json(info)

    def _refs(self, request: Request, target: Target) -> Answer:
        repository = self._repository(request, target)
        refs: dict[str, list[dict[str, str]]] = {
            "branches": _ref_list("heads", repository.branches),
            "tags": _ref_list("tags", repository.tags),
            "converts": [],
        }
        if "include_prs" in request.query:
            refs["pullRequests"] = []
        return as_json(refs)

    def _tree(self, request: Request, target: Target) -> Answer:
        _, commit = self._commit(request, target)
        recursive, expand = (request.query.get(flag, "").lower() in TRUE for flag in ("recursive", "expand"))
        try:
            entries = commit.listing(target.path, recursive=recursive)
        except KeyError:
            refuse(404, f"{target.path} does not exist on {target.revision!r}", "EntryNotFound")
        limit = min(self.page_size, EXPANDED_PAGE) if expand else self.page_size
        if wanted := request.query.get("limit"):
            limit = max(1, min(limit, int(wanted))) if wanted.isdigit() else refuse(400, "Invalid limit")
        start = _offset(request.query.get("cursor"))
        headers = {}
        if start + limit < len(entries):
            query = urlencode({**request.query, "cursor": _cursor(start + limit)})
            headers["Link"] = f'<{self.endpoint}{request.path}?{query}>; rel="next"'
        return as_json(_entry_list(entries[start : start + limit], commit, expand=expand), headers=headers)

    def _paths_info(self, request: Request, target: Target) -> Answer:
        _, commit = self._commit(request, target)
        paths, expand = _wanted_paths(request)
        found = [entry for path in dict.fromkeys(paths) if (entry := commit.find(path.strip("/")))]
        return as_json(_entry_list(found, commit, expand=expand))

    def _resolve(self, request: Request, target: Target) -> Answer:
        repository, commit = self._commit(request, target, files=True)
        blob = self._blob(commit, target.path)
        linked = {
            "X-Repo-Commit": commit.id,
            "X-Linked-Size": str(blob.size),
            "X-Linked-Etag": f'"{blob.etag}"',
            "Accept-Ranges": "bytes",
        }
        if blob.lfs:
            origin = self.cdn_endpoint if self.cdn else self.endpoint
            return redirect(302, origin + lfs_path(repository.kind, repository.id, commit.id, blob.sha256), linked)
        if self.resolve_cache:
            location = resolve_cache_path(repository.kind, repository.id, commit.id, target.path)
            return redirect(307, location, {**linked, "ETag": f'"{blob.etag}"'})
        return self._file(request, commit, target.path, blob)

    def _resolve_cache(self, request: Request, target: Target) -> Answer:
        _, commit = self._commit(request, target, files=True)
        return self._file(request, commit, target.path, self._blob(commit, target.path))

    def _redirect_target(self, request: Request, target: Target) -> Answer:
        # The URL stands for a signed one: it needs no token, so that a CDN of another origin can serve it.
        with self._lock:
            repository = self._repositories.get((target.kind, target.repo_id))
        blob = repository.lfs_object(target.path) if repository else None
        if blob is None:
            refuse(404, "Not Found")
        # A client follows the own redirects of the Hub even to learn the commit; some take two ports for one origin.
        headers = {"ETag": f'"{blob.etag}"', "X-Repo-Commit": target.revision}
        return content(blob.content, headers, request.headers.get("range"))

    def _file(self, request: Request, commit: Commit, path: str, blob: Blob) -> Answer:
        name = path.rpartition("/")[2]
        headers = {
            "ETag": f'"{blob.etag}"',
            "X-Repo-Commit": commit.id,
            "Content-Disposition": f"inline; filename*=UTF-8''{quote(name)}; filename=\"{quote(name)}\";",
        }
        answer = content(blob.content, headers, request.headers.get("range"))
        wants_gzip = self.gzip and "gzip" in request.headers.get("accept-encoding", "")
        return compressed(answer) if wants_gzip else answer

    def _repository(self, request: Request, target: Target, *, files: bool = False) -> Repository:
        with self._lock:
            repository = self._repositories.get((target.kind, target.repo_id))
        token = _token(request)
        reads = (
            repository is not None
            and token is not None
            and token in (self.tokens if repository.readers is None else repository.readers)
        )
        if repository is None or (repository.private and not reads):
            # The Hub does not tell a stranger whether a private repository exists.
            if token is None:
                refuse(401, "Invalid username or password.", "RepoNotFound")
            refuse(404, "Repository not found", "RepoNotFound")
        if files and repository.gated and not reads:
            message = f"Access to {repository.kind} {repository.id} is restricted. "
            ask = "You must have access to it and be authenticated to access it. Please log in."
            if token is None:
                refuse(401, message + ask, "GatedRepo")
            refuse(403, message + "You are not in the authorized list.", "GatedRepo")
        return repository

    def _commit(self, request: Request, target: Target, *, files: bool = False) -> tuple[Repository, Commit]:
        repository = self._repository(request, target, files=files)
        commit = repository.find(target.revision)
        if commit is None:
            refuse(404, f"Invalid rev id: {target.revision}", "RevisionNotFound")
        return repository, commit

    def _blob(self, commit: Commit, path: str) -> Blob:
        return commit.files.get(path) or refuse(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.id)


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None


def _date(date: datetime) -> str:
    return date.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _cursor(offset: int) -> str:
    return base64.urlsafe_b64encode(json.dumps({"offset": offset}).encode()).decode()


def _offset(cursor: str | None) -> int:
    try:
        return int(json.loads(base64.urlsafe_b64decode(cursor))["offset"]) if cursor else 0
    except (binascii.Error, ValueError, KeyError, TypeError):
        refuse(400, "Invalid cursor")


def _wanted_paths(request: Request) -> tuple[Sequence[str], bool]:
    if request.headers.get("content-type", "").startswith("application/json"):
        document = json.loads(request.body)
        return document["paths"], bool(document.get("expand", False))
    form = parse_qs(request.body.decode(), keep_blank_values=True)
    return form.get("paths", []), form.get("expand", [""])[-1].lower() in TRUE


def _ref_list(namespace: str, refs: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "ref": f"refs/{namespace}/{name}", "targetCommit": refs[name]} for name in sorted(refs)]


def _sibling(path: str, blob: Blob, *, blobs: bool) -> dict[str, object]:
    sibling: dict[str, object] = {"rfilename": path}
    if blobs:
        sibling |= {"blobId": blob.oid, "size": blob.size}
        if blob.lfs:
            sibling["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer)}
    return sibling


def _entry_list(entries: Sequence[Entry], commit: Commit, *, expand: bool) -> list[dict[str, object]]:
    return [_entry(entry, commit, expand=expand) for entry in entries]


def _entry(entry: Entry, commit: Commit, *, expand: bool) -> dict[str, object]:
    blob = entry.blob
    shown: dict[str, object] = {
        "type": "directory" if blob is None else "file",
        "oid": entry.oid,
        "size": 0 if blob is None else blob.size,
        "path": entry.path,
    }
    if blob is not None and blob.lfs:
        shown["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer)}
    if expand:
        shown["lastCommit"] = {"id": commit.id, "title": commit.title, "date": _date(commit.date)}
    return shown
