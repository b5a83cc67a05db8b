"""Do we choose the build that the peer package `kernels` chooses, on random machines? And where not, who is right?

Runs in one process, in an interpreter that has the peer:

    python bench/peer_agreement.py --peer PATH-OF-THE-PEER'S-PYTHON [--pairs 5000] [--seed 1]

Every difference is followed to its causes: the name in dispute is explained and taken out of the set, until both agree
about the rest. A cause that is not in `CLASSES` makes the script fail.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from report import ROOT, Report, Row, arguments, table

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # the peer's interpreter does not have us installed

from population import random_builds, random_host

from kernel_loader.host import Host, major_minor
from kernel_loader.resolver import Resolution, Verdict, resolve
from kernel_loader.rules import FREE_THREADED_ABI
from kernel_loader.variant import CPUS, OSES

UNEXPLAINED = "UNEXPLAINED"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whose choice is right by the design, and why."""

    right: str
    why: str


CLASSES = {
    "tie": Explanation(
        "ours",
        "Both builds have one sort key at the peer (a no-arch build, and a tvm-ffi build whose backend has no minor "
        "version or, as the peer reads it, 0), so that its choice follows the order of the input: with our choice "
        "put first, it chooses that. The design puts tvm-ffi before no-arch.",
    ),
    "multi-digit-minor": Explanation(
        "ours",
        "The peer's pattern takes all digits but the last as the major version: it reads cu1210 as CUDA 121.0 and "
        "refuses the build on a host with CUDA 12.10 or later. A CUDA major version has two digits.",
    ),
    "leading-zero": Explanation(
        "ours",
        "The peer reads a version with a leading zero as another spelling of a good one (torch2010 as 2.10, cu0128 "
        "as 12.8) and would then look for a directory of the good name, which is not there. The grammar has no "
        "leading zeros, so that one build has one name.",
    ),
    "foreign-platform": Explanation(
        "ours",
        "The peer takes any text for the CPU and the system, as long as it is the host's (riscv64, freebsd). The "
        "grammar knows x86_64 and aarch64; linux, darwin and windows.",
    ),
    "no-torch": Explanation(
        "ours",
        "The peer takes torch-<backend> and torch-universal on a host that has no torch. No-arch builds import "
        "torch, as their name says.",
    ),
    UNEXPLAINED: Explanation("?", "Nobody knows yet."),
}


# The others are the kind in capitals.
_BACKEND_CLASSES = {"rocm": "ROCm", "metal": "Metal", "neuron": "Neuron"}


class Peer:
    """The peer's resolver, given the facts of a host instead of those of this machine."""

    def __init__(self) -> None:
        from kernels import backends, variants
        from packaging.version import Version

        logging.getLogger("kernels").setLevel(logging.ERROR)
        self._backends: Any = backends
        self._variants: Any = variants
        self._version = Version
        self.parse = functools.cache(self._parse)

    def _parse(self, name: str) -> Any:  # noqa: ANN401 - the peer's type; None as its listing passes over bad names
        try:
            return self._variants.parse_variant(name)
        except ValueError:
            return None

    def choose(self, names: Sequence[str], host: Host) -> str | None:
        """The name of the build that the peer prefers; equal keys stay in the order of `names`."""
        from kernels.variants import _resolve_variant_for_system

        parsed = [(name, variant) for name in names if (variant := self.parse(name)) is not None]
        free_threaded = host.free_threaded and (major_minor(host.python or "") or (0, 0)) < FREE_THREADED_ABI
        # The one fact that is no parameter: the peer asks its own interpreter for it.
        with mock.patch.object(self._variants, "_is_unsupported_free_threaded_build", return_value=free_threaded):
            applicable, _ = _resolve_variant_for_system([variant for _, variant in parsed], **self._system(host))
        return next((name for name, variant in parsed if applicable and variant is applicable[0]), None)

    def _system(self, host: Host) -> dict[str, Any]:
        kind, version = host.backend.kind, host.backend.version
        backend = getattr(self._backends, _BACKEND_CLASSES.get(kind, kind.upper()))
        return {
            "selected_backend": backend(version=self._version(f"{version[0]}.{version[1]}")) if version else backend(),
            "cpu": host.cpu,
            "os": host.os,
            "torch_version": self._release(host.torch),
            "torch_cxx11_abi": host.cxx11_abi,
            "tvm_ffi_version": self._release(host.tvm_ffi),
            "macos_version": self._version(host.macos) if host.macos else None,
        }

    def _release(self, version: str | None) -> Any:  # noqa: ANN401 - packaging of the peer's interpreter
        release = major_minor(version or "")
        return self._version(f"{release[0]}.{release[1]}") if release else None


@dataclass(frozen=True, slots=True)
class Difference:
    """A pair for which the two choose differently."""

    cause: str
    host: Host
    ours: str | None
    theirs: str | None

    def __str__(self) -> str:
        torch = f"torch {self.host.torch}" if self.host.torch else "no torch"
        where = f"{self.host.os} {self.host.cpu}, {torch}, {self.host.backend}"
        return f"{where}: {self.ours or 'none'} here, {self.theirs or 'none'} there"


def compare(names: Sequence[str], host: Host, peer: Peer) -> Difference | None:
    """The difference for one pair, under the first of its causes, or under UNEXPLAINED if one of them is."""
    causes: list[str] = []
    first: tuple[str | None, str | None] = (None, None)
    left = list(names)
    while (choices := (chosen(resolution := resolve(left, host)), peer.choose(left, host)))[0] != choices[1]:
        cause, disputed = dispute(*choices, left, resolution, peer)
        first = first if causes else choices
        causes.append(cause)
        left.remove(disputed)
    if not causes:
        return None
    return Difference(UNEXPLAINED if UNEXPLAINED in causes else causes[0], host, *first)


def dispute(
    ours: str | None, theirs: str | None, names: Sequence[str], resolution: Resolution, peer: Peer
) -> tuple[str, str]:
    """Why two choices differ, and the name that it is about."""
    host = resolution.host
    if ours is not None and peer.choose([ours], host) is None:
        return refused_by_peer(ours, resolution, peer), ours
    assert theirs is not None, "the peer accepts our choice, so that it has one"
    if verdict(resolution, theirs).status != "accepted":
        return refused_by_us(theirs, resolution, peer), theirs
    if ours is not None and peer.choose([ours, *(name for name in names if name != ours)], host) == ours:
        return "tie", theirs
    return UNEXPLAINED, theirs


def refused_by_peer(name: str, resolution: Resolution, peer: Peer) -> str:
    """The class of a build that we accept and the peer does not."""
    variant, read = verdict(resolution, name).variant, peer.parse(name)
    assert variant is not None, "an accepted name is of the grammar"
    if variant.backend_version is None or read is None:
        return UNEXPLAINED
    version = read.arch.backend.version
    misread = (version.major, version.minor) != variant.backend_version
    return "multi-digit-minor" if misread and variant.backend_version[1] >= 10 else UNEXPLAINED


def refused_by_us(name: str, resolution: Resolution, peer: Peer) -> str:
    """The class of a build that the peer accepts and we do not."""
    codes = {reason.code for reason in verdict(resolution, name).reasons}
    if codes == {"torch"} and resolution.host.torch is None and peer.parse(name).framework.variant_str == "torch":
        return "no-torch"
    # Ours is no reading at all (torch2010), or one of another version (cu0128 as 1.28).
    if codes <= {"grammar", "backend-version"} and peer.parse(name).variant_str != name:
        return "leading-zero"
    if codes == {"grammar"} and (resolution.host.cpu not in CPUS or resolution.host.os not in OSES):
        return "foreign-platform"
    return UNEXPLAINED


def verdict(resolution: Resolution, name: str) -> Verdict:
    return next(v for v in resolution.verdicts if v.name == name)


def chosen(resolution: Resolution) -> str | None:
    return resolution.chosen.name if resolution.chosen else None


@dataclass(slots=True)
class Tally:
    """What was seen over all pairs."""

    pairs: int = 0
    agreed: int = 0
    agreed_on_a_build: int = 0
    by_order_here: int = 0
    by_order_there: int = 0
    hosts: Counter[str] = field(default_factory=Counter)

    def look_at(self, host: Host) -> None:
        """Count what kind of host this is."""
        self.hosts[host.backend.kind] += 1
        self.hosts["free-threaded before 3.15"] += host.free_threaded and host.python != "3.15"
        self.hosts["without torch"] += host.torch is None
        self.hosts["with tvm-ffi"] += host.tvm_ffi is not None

    def rows(self, counts: Counter[str]) -> tuple[Row, ...]:
        """What was seen, as rows; `counts` has the differences by class."""
        agreed = f"{self.agreed:,} of {self.pairs:,} ({self.agreed_on_a_build:,} on a build, the rest on none)"
        unexplained = counts[UNEXPLAINED]
        return (
            Row("same choice as the peer", agreed),
            Row("differences explained", f"{self.pairs - self.agreed - unexplained:,}"),
            Row("differences unexplained", f"{unexplained:,}", "0", unexplained == 0),
            Row(
                "choices that change with the order of the input, ours",
                f"{self.by_order_here:,}",
                "0",
                not self.by_order_here,
            ),
            Row("choices that change with the order of the input, the peer's", f"{self.by_order_there:,}"),
        )


def run(pairs: int, seed: int) -> Report:
    """Compare on `pairs` random pairs."""
    rng, peer, tally = random.Random(seed), Peer(), Tally(pairs)
    differences: list[Difference] = []
    for _ in range(pairs):
        host = random_host(rng)
        names = random_builds(rng, host, rng.randint(3, 28))
        ours, theirs = chosen(resolve(names, host)), peer.choose(names, host)
        tally.look_at(host)
        tally.agreed += ours == theirs
        tally.agreed_on_a_build += ours == theirs is not None
        tally.by_order_here += chosen(resolve(names[::-1], host)) != ours
        tally.by_order_there += peer.choose(names[::-1], host) != theirs
        if (difference := compare(names, host, peer)) is not None:
            differences.append(difference)
    counts = Counter(difference.cause for difference in differences)
    title = f"Agreement with the peer's resolver ({pairs:,} pairs, seed {seed})"
    hosts = "Hosts: " + ", ".join(f"{count:,} {kind}" for kind, count in tally.hosts.most_common()) + "."
    return Report(title, tally.rows(counts), f"{hosts}\n\n{_details(counts, differences)}")


def _details(counts: Counter[str], differences: Sequence[Difference]) -> str:
    if not differences:
        return ""
    example = {difference.cause: str(difference) for difference in reversed(differences)}
    rows = [
        (cause, count, CLASSES[cause].right, example[cause], CLASSES[cause].why)
        for cause, count in counts.most_common()
    ]
    return table(("class", "count", "right", "example", "explanation"), rows)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--peer", help="interpreter that has the peer; by default this one")
    parser.add_argument("--pairs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.peer:
        again = [options.peer, __file__, "--pairs", str(options.pairs), "--seed", str(options.seed)]
        os.execv(options.peer, [*again, *(["--json"] if options.json else [])])
    return run(options.pairs, options.seed).emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
