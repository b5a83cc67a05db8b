"""Target: what a URL names. The paths are those that huggingface_hub's `hf_api` and `file_download` ask for."""

from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import quote, unquote

from .repository import Kind

KINDS: Final = {"kernels": "kernel", "models": "model", "datasets": "dataset", "spaces": "space"}
PAGES: Final = {"whoami-v2": "whoami", "agent-harnesses": "agent-harnesses"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A route and its arguments, unquoted; those that a route does not have are empty."""

    route: str
    kind: Kind = "model"
    repo_id: str = ""
    revision: str = ""
    path: str = ""
    name: str = ""


UNKNOWN: Final = Target(route="unknown")


def parse(path: str) -> Target:
    """What a quoted URL path names."""
    # Quoted slashes belong to a name (a branch `pr/1`), so the path is split before it is unquoted.
    match [unquote(segment) for segment in path.strip("/").split("/")]:
        case ["api", page] if page in PAGES:
            return Target(route=PAGES[page])
        case ["api", "organizations", name, "overview"]:
            return Target(route="organization", name=name)
        case ["api", "resolve-cache", plural, owner, name, commit, *rest] if plural in KINDS:
            return _target("resolve-cache", plural, owner, name, commit, rest)
        case ["api", plural, owner, name, *rest] if plural in KINDS:
            return _parse_api(plural, owner, name, rest)
        case ["lfs", plural, owner, name, commit, sha256] if plural in KINDS:
            return _target("redirect-target", plural, owner, name, commit, [sha256])
        case [plural, owner, name, "resolve", revision, *rest] if plural in KINDS and rest:
            return _target("resolve", plural, owner, name, revision, rest)
        case [owner, name, "resolve", revision, *rest] if rest:
            return _target("resolve", "models", owner, name, revision, rest)
    return UNKNOWN


def _parse_api(plural: str, owner: str, name: str, rest: list[str]) -> Target:
    match rest:
        case [] | ["revision", _]:
            return _target("info", plural, owner, name, rest[1] if rest else "main", [])
        case ["refs"]:
            return _target("refs", plural, owner, name, "", [])
        case [("tree" | "paths-info") as route, revision, *path]:
            return _target(route, plural, owner, name, revision, path)
    return UNKNOWN


def _target(route: str, plural: str, owner: str, name: str, revision: str, path: list[str]) -> Target:
    kind = cast("Kind", KINDS[plural])
    return Target(route=route, kind=kind, repo_id=f"{owner}/{name}", revision=revision, path="/".join(path))


def resolve_cache_path(kind: Kind, repo_id: str, commit: str, path: str) -> str:
    """Where the Hub sends a client that resolves a small file."""
    return f"/api/resolve-cache/{kind}s/{repo_id}/{commit}/{quote(path)}"


def lfs_path(kind: Kind, repo_id: str, commit: str, sha256: str) -> str:
    """Where the content of an LFS file is, on the Hub itself or on its CDN."""
    return f"/lfs/{kind}s/{repo_id}/{commit}/{sha256}"
