"""Lock files: which commit of a kernel repository a project loads."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kernel_loader.errors import LockError, LockMissing
from kernel_loader.reading import Node


def locked_commit(file: Path, repo_id: str) -> str:
    """The commit of a repository in a `kernels.lock`.

    Its form is `[{"dependency": {"repo-id": ...}, "lock": {"commit": ...}}]`, or `[{"repo_id": ..., "sha": ...}]`.

    Raises:
        LockMissing: there is no such file, or it does not name the repository.
        LockError: it is damaged, or names the repository twice.
    """
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise LockMissing(str(file), "there is no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise LockError(str(file), f"it cannot be read ({error})") from error
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
        raise LockMissing(str(file), f"it does not name {repo_id}")
    if len(commits) > 1 or re.fullmatch(r"[0-9a-f]{40}", commits[0]) is None:
        raise LockError(str(file), f"it has {len(commits)} entries for {repo_id}, and needs one with a commit")
    return commits[0]
