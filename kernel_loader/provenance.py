"""Origin: where a loaded kernel is from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Origin(NamedTuple):
    """Where a loaded kernel is from, and why it is this one.

    Attributes:
        kernel: the registered name.
        source: kind of place that the build came from: "embedded", "local" or "hub".
        repo: repository id; for embedded builds, the directory below registry/.
        revision: version or revision that was asked for, such as "v4"; None where the source has no revisions.
        variant: name of the build.
        digest: sha256 over the build's files, in hexadecimal.
        path: directory of the build.
        reference: the build is the reference in plain PyTorch: an embedded one for no backend in particular.
        why: why this build was taken, for people.
        commit: where the revision stood; None where the source has no revisions.
        guards: what was put around the functions of the bundle, as "field: guard, guard".
        untrained: layers whose gradient is known to be wrong or missing, as (name, id of the advisory); "*" stands for
            all.
    """

    kernel: str
    source: str
    repo: str
    revision: str | None
    variant: str
    digest: str
    path: Path
    reference: bool
    why: str
    commit: str | None = None
    guards: tuple[str, ...] = ()
    untrained: tuple[tuple[str, str], ...] = ()

    @property
    def where(self) -> str:
        """Source, repository and revision in a few words."""
        return f"{self.source} {self.repo}" + (f"@{self.revision}" if self.revision else "")
