"""Whose code may run here: one gate on the one road, before anything is downloaded.

Kernels that a manifest names may run: the manifest ships with this package, or is of the user's own choice. Of other
repositories, those of publishers that the Hub marks as trusted. Anything else needs the caller's word.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kernel_loader.errors import HubUnavailable, StoreError, TrustError
from kernel_loader.index import Index
from kernel_loader.sources import Request

logger = logging.getLogger("kernel_loader")

# Anyone may open a pull request: other refs than these are code that the owner of the repository has not taken.
_OWN: Final = ("refs/heads/", "refs/tags/")


class Gate:
    """Decides whether a repository's code may run.

    A decision that was taken is kept: an outage, or offline mode, turns no yes into a no, and no no into a yes.

    Args:
        index: where decisions are kept.
        ask: asks the Hub whether it trusts a publisher; None when the Hub must not be asked.
        refresh_after: seconds after which a decision is asked for again.
    """

    def __init__(
        self,
        index: Index,
        ask: Callable[[str], bool] | None,
        refresh_after: float,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._index: Final = index
        self._ask: Final = ask
        self._refresh_after: Final = refresh_after
        self._now: Final = now

    def admit(self, request: Request, *, named: bool, allowed: bool | Collection[str] = False) -> None:
        """Let a repository's code pass, or refuse it.

        Args:
            request: the repository and its revision.
            named: a manifest names the repository.
            allowed: the caller's word for all repositories, or for those that are listed.

        Raises:
            TrustError: its code may not run here.
        """
        if is_allowed(request, allowed):
            return
        revision = request.git_revision or ""
        if revision.startswith("refs/") and not revision.startswith(_OWN):
            raise TrustError(str(request), "its revision is a proposed change, which its owner has not taken")
        if named:
            return
        trusted, why = self._publisher(_publisher_of(request))
        if not trusted:
            raise TrustError(str(request), why)

    @contextlib.contextmanager
    def deciding(self, request: Request, *, allowed: bool | Collection[str]) -> Iterator[None]:
        """As `admit` for a repository that no manifest names, decided while the block runs where the Hub is asked."""
        known = self._index.publisher(_publisher_of(request))
        if self._must_ask(known):
            with ThreadPoolExecutor(1, thread_name_prefix="kernel-loader-trust") as pool:
                decided = pool.submit(self.admit, request, named=False, allowed=allowed)
                yield
                decided.result()
        elif known is None:
            yield  # nobody can be asked: that there is nothing to trust says more
            self.admit(request, named=False, allowed=allowed)
        else:
            self.admit(request, named=False, allowed=allowed)
            yield

    def _must_ask(self, known: tuple[bool, float] | None) -> bool:
        return self._ask is not None and (known is None or self._now() - known[1] >= self._refresh_after)

    def _publisher(self, name: str) -> tuple[bool, str]:
        no = f"the Hub does not mark {name} as a trusted publisher of kernels"
        known = self._index.publisher(name)
        if known is not None and not self._must_ask(known):
            return known[0], no
        if self._ask is None:
            return False, f"whether {name} is a trusted publisher was never asked, and the Hub must not be asked now"
        try:
            trusted = self._ask(name)
        except HubUnavailable as error:
            if known is None:
                return False, f"whether {name} is a trusted publisher cannot be asked: {error.detail}"
            logger.warning("%s: the earlier answer about the publisher serves. %s", name, error.problem)
            return known[0], no
        with contextlib.suppress(StoreError):  # an index that cannot be written costs a request, no more
            self._index.put_publisher(name, trusted=trusted, asked=self._now())
        return trusted, no


def is_allowed(request: Request, allowed: bool | Collection[str]) -> bool:  # noqa: FBT001 - as callers give it
    """Whether the caller's word lets a repository's code pass."""
    return allowed if isinstance(allowed, bool) else request.repo in allowed


def _publisher_of(request: Request) -> str:
    return request.repo.partition("/")[0]
