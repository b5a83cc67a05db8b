"""What machines take of kernels, with all that these depend on: to be fetched, carried, or only told."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kernel_loader.arguments import each
from kernel_loader.catalog import Catalog
from kernel_loader.choice import Ask, Choice, Chooser, Looked
from kernel_loader.host import Host
from kernel_loader.variant import is_variant

_SPELT: Final = r"(?P<name>[^@]+)@(?:(?P<version>\d{1,9})|(?P<revision>.+))"


class Prefetched(NamedTuple):
    """A build that is ready to be loaded without the network, or would be.

    Attributes:
        kernel: the registered name, or the repository.
        variant: name of the build; that of an embedded one where no published build fits.
        digest: of its content; None for one that is not here, where nothing was to be fetched.
        path: its directory; None likewise.
        reference: whether it is the reference.
        size: of all its files, in bytes.
        here: whether it was here before.
    """

    kernel: str
    variant: str
    digest: str | None
    path: Path | None
    reference: bool
    size: int
    here: bool


class Planned(NamedTuple):
    """A build that some machine takes."""

    ask: Ask
    choice: Choice
    variant: str


class Planner:
    """Plans for machines.

    Args:
        catalog: the named kernels.
        chooser: chooses builds.
        asked: what a kernel, a version and a revision ask for on a machine.
    """

    def __init__(
        self, catalog: Catalog, chooser: Chooser, asked: Callable[[str | type, int | None, str | None, Host], Ask]
    ) -> None:
        self._catalog: Final = catalog
        self._chooser: Final = chooser
        self._asked: Final = asked

    def planned(
        self, kernels: Iterable[str | type] | str | type, machines: tuple[Host, ...], *, all_variants: bool
    ) -> Iterator[Planned]:
        """The builds that machines take of kernels, and of those that these depend on."""
        for kernel, host in itertools.product(each(kernels, "kernels"), machines):
            name, version, revision = spelt(kernel) if isinstance(kernel, str) else (kernel, None, None)
            first = self._asked(name, version, revision, host)
            asks, seen = deque([first]), set[Ask]()
            while asks:
                ask = asks.popleft()
                if ask in seen:
                    continue
                seen.add(ask)
                choice = self._chooser.choose(ask, host)
                if ask is first:
                    looked = (*self._passed_over(name, ask, host, among_all=choice.reference), *choice.looked)
                    choice = choice._replace(looked=looked)
                names = choice.listing.names if all_variants and not choice.embedded else (choice.build.name,)
                for variant in filter(is_variant, names):
                    yield Planned(ask, choice, variant)
                    for needed in choice.source.metadata(choice.listing, variant).kernel_depends:
                        asks.append(self._asked(needed.repo_id, needed.version, needed.revision, host))

    def _passed_over(self, kernel: str | type, ask: Ask, host: Host, *, among_all: bool) -> tuple[Looked, ...]:
        """What was looked at of a capability's kernels before the one that serves it; for a reference, of all."""
        if isinstance(kernel, type) or "/" in kernel or self._catalog.find(kernel) is not None:
            return ()
        offers = self._catalog.offers(self._catalog.wanted(kernel), host.backend.kind)
        before = itertools.takewhile(lambda offer: among_all or offer.manifest.name != ask.manifest.name, offers)
        return tuple(one for offer in before if not offer.lacks for one in self._chooser.look(offer.manifest, host))


def measured(planned: Planned) -> Prefetched:
    """What would be prefetched."""
    ask, choice, variant = planned
    there, size = choice.source.measure(choice.listing, variant)
    path, digest = (there.path, there.digest) if there is not None else (None, None)
    return Prefetched(ask.manifest.name, variant, digest, path, choice.reference, size, there is not None)


def unneeded(planned: Planned) -> tuple[str, str, str]:
    """Why nothing is carried of an embedded build: the kernel, what is taken there, and why."""
    choice, host = planned.choice, planned.choice.looked[0].resolution.host if planned.choice.looked else None
    where = f" (a host that computes on {host.backend})" if host is not None else ""
    return planned.ask.manifest.name, f"{choice.build.name}, which is part of the package,", f"{choice.why}{where}"


def spelt(kernel: str) -> tuple[str, int | None, str | None]:
    """Name or repository, version and revision of `name`, `name@3` (a version) or `name@branch-or-commit`."""
    match = re.fullmatch(_SPELT, kernel, re.ASCII)
    if match is None:
        return kernel, None, None
    return match["name"], int(match["version"]) if match["version"] else None, match["revision"]
