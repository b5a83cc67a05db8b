"""Blob: the content of one file, under the names that git and LFS give it."""

import hashlib
from dataclasses import dataclass
from functools import cached_property


def git_object_id(kind: str, payload: bytes) -> str:
    r"""The object id of git: SHA-1 over `<kind> <length>\0<payload>`, 40 hexadecimal digits."""
    return hashlib.sha1(f"{kind} {len(payload)}\0".encode() + payload, usedforsecurity=False).hexdigest()


@dataclass(frozen=True)
class Blob:
    """One file's bytes; `lfs` says whether the repository keeps a pointer instead of them."""

    content: bytes
    lfs: bool = False

    @property
    def size(self) -> int:
        """Bytes of the content, also for an LFS file."""
        return len(self.content)

    @cached_property
    def sha256(self) -> str:
        """The LFS object id."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """The pointer file that git holds in place of an LFS file (git-lfs specification, v1)."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()

    @cached_property
    def oid(self) -> str:
        """The git blob id: of the pointer for an LFS file, of the content for any other."""
        return git_object_id("blob", self.pointer if self.lfs else self.content)

    @property
    def etag(self) -> str:
        """What the Hub uses as ETag, without quotes: the SHA-256 of an LFS file, the git blob id of any other."""
        return self.sha256 if self.lfs else self.oid
