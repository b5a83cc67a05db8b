"""Lock files: which commit of a kernel repository a project loads."""

from __future__ import annotations

import json
import re

from kernel_loader.errors import LockError, LockMissing
from kernel_loader.reading import Node


def locked_commit(text: bytes | str, file: str, repo_id: str) -> str:
    """The commit of a repository in the text of a `kernels.lock`, which errors call `file`.

    Its form is `[{"dependency": {"repo-id": ...}, "lock": {"commit": ...}}]`, or `[{"repo_id": ..., "sha": ...}]`.

    Raises:
        LockMissing: it does not name the repository.
        LockError: it is damaged, or names the repository twice.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LockError(file, f"not JSON ({error})") from error
    commits = []
    for entry in Node(document, lambda path, detail: LockError(f"{file}, {path}", detail)).items():
        parts = entry.table()
        if "repo_id" in parts:  # as older releases of the peer write it
            name, commit = parts["repo_id"].text(), parts["sha"].text() if "sha" in parts else ""
        elif {"dependency", "lock"} <= parts.keys():
            dependency, lock = parts["dependency"].table(), parts["lock"].table()
            name = dependency["repo-id"].text() if "repo-id" in dependency else ""
            commit = lock["commit"].text() if "commit" in lock else ""
        else:
            entry.error("an entry has a dependency and a lock")
        if name == repo_id:
            commits.append(commit)
    if not commits:
        raise LockMissing(file, f"it does not name {repo_id}")
    if len(commits) > 1 or re.fullmatch(r"[0-9a-f]{40}", commits[0]) is None:
        raise LockError(file, f"it has {len(commits)} entries for {repo_id}, and needs one with a commit")
    return commits[0]
