"""Builds and a host -> Resolution: a verdict for every build, a total order, the choice, the nearest miss.

A pure function. Order of the input and the hash seed have no part in the choice: the key ends with the name, which is
unique within a repository.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from kernel_loader.errors import VariantError
from kernel_loader.host import Host, major_minor
from kernel_loader.metadata import Metadata
from kernel_loader.rules import (
    EFFORT,
    METADATA_RULES,
    NAME_RULES,
    NOTHING,
    REQUIRES_RULES,
    Advisory,
    Build,
    Note,
    Reason,
    Reject,
    Requires,
    Rule,
    Unknown,
    advisory_rules,
    judge,
)
from kernel_loader.variant import REFERENCE, Variant

Status = Literal["accepted", "unknown", "rejected"]

_FRAMEWORK_RANK: Final = {"torch-stable-abi": 0, "torch": 1, "tvm-ffi": 2, "noarch": 3}
_STATUS_RANK: Final = {"accepted": 0, "unknown": 1, "rejected": 2}


class Verdict(NamedTuple):
    """One build, judged.

    Attributes:
        name: the build's name.
        variant: what the name says; None where it is not of the grammar.
        status: "accepted", "unknown" (some fact is missing) or "rejected".
        reasons: everything against it.
        notes: what a person should know of it all the same.
        metadata: the build's metadata.json, read for the builds that were candidates. An accepted verdict without it
            says only that the name fits.
    """

    name: str
    variant: Variant | None
    status: Status
    reasons: tuple[Reason, ...] = ()
    metadata: Metadata | None = None
    notes: tuple[Note, ...] = ()

    @property
    def is_universal(self) -> bool:
        """Whether it is for no backend in particular. An embedded build that is, is the reference."""
        return self.variant is not None and self.variant.backend == "universal"


class Candidate(NamedTuple):
    """A kernel in the list of a capability.

    Attributes:
        kernel: its registered name.
        offers: features of the capability that it has on the host's backend.
        lacks: what the caller wants and it does not offer.
        resolution: which build of it the host would take; None where it was not looked at, since it lacks something or
            a kernel before it has a build.
    """

    kernel: str
    offers: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    resolution: Resolution | None = None

    @property
    def has_build(self) -> bool:
        """Whether a build that is no reference fits."""
        return self.resolution is not None and self.resolution.taken is not None and not self.resolution.is_reference

    @property
    def why_not(self) -> str:
        """Why it is passed over."""
        if self.lacks:
            return f"lacks {', '.join(self.lacks)}"
        if self.resolution is None:
            return "is not asked, since a kernel above has a build here"
        if self.resolution.doubt:
            return "may have a build here"
        published = (self.resolution, *self.resolution.alternatives)
        embedded = (self.resolution.reference,) if self.resolution.reference else ()
        nearest = next((found.nearest for found in (*published, *embedded) if found.nearest is not None), None)
        said = [found.note for found in published if found.note]
        if nearest is not None:
            said.append(f"the nearest is {nearest.name}: {'; '.join(reason.message for reason in nearest.reasons)}")
        return f"has no build here: {'; '.join(dict.fromkeys(said)) or 'there are none'}"


class Resolution(NamedTuple):
    """Which build of a repository a host takes, and why.

    Attributes:
        repo: where the builds are from.
        host: the machine that was resolved for.
        verdicts: every build, the best first.
        chosen: the build of this repository to take; None when none fits.
        note: why no build was looked at, where none was.
        guards: what is put around the functions of the chosen build, as "field: guard, guard".
        alternatives: the same for the kernel's other repositories, in the order in which they are asked.
        reference: the same for the kernel's embedded builds, which are looked at when nothing above is chosen.
        capability: what was asked for, where it was no kernel.
        kernel: the kernel that serves the capability, and that all of the above is about; empty when none does.
        candidates: the kernels of the capability, in the order in which they are asked.
        undecided: why nothing is chosen, where builds could not be asked for and may fit; empty otherwise.
    """

    repo: str
    host: Host
    verdicts: tuple[Verdict, ...] = ()
    chosen: Verdict | None = None
    note: str = ""
    reference: Resolution | None = None
    alternatives: tuple[Resolution, ...] = ()
    guards: tuple[str, ...] = ()
    capability: str = ""
    kernel: str = ""
    candidates: tuple[Candidate, ...] = ()
    undecided: str = ""

    @property
    def taken(self) -> Resolution | None:
        """The one whose `chosen` is loaded: this, an alternative, or that of the embedded builds; None when none is."""
        found = (self, *self.alternatives, *((self.reference,) if self.reference else ()))
        ends = (resolution for resolution in found if resolution.chosen is not None or resolution.undecided)
        first = next(ends, None)
        return first if first is not None and not first.undecided else None

    @property
    def doubt(self) -> str:
        """Why nothing can be decided, here or in an alternative; empty where something is."""
        return next((found.undecided for found in (self, *self.alternatives) if found.undecided), "")

    @property
    def is_reference(self) -> bool:
        """Whether the reference is what is loaded."""
        taken = self.taken
        return taken is not None and taken is self.reference and taken.chosen is not None and taken.chosen.is_universal

    @property
    def nearest(self) -> Verdict | None:
        """The build that needs the least change to be chosen: the easiest kind of change, then the fewest of them."""
        others = [verdict for verdict in self.verdicts if verdict.reasons and verdict is not self.chosen]
        return min(others, key=lambda verdict: _effort(verdict, self.host), default=None)

    def explain(self) -> str:
        """A table for people: each build, whether it runs on the host, and every reason why not."""
        tables = [line for resolution in (self, *self.alternatives) for line in (*resolution._table(), "")]  # noqa: SLF001 - the same class
        if self.capability:
            tables = [*self._path(), "", *(tables if self.kernel else ())]
        return "\n".join([f"On {describe(self.host)}:", "", *tables, *self._conclusion()])

    def _path(self) -> list[str]:
        width = max((len(candidate.kernel) for candidate in self.candidates), default=0)
        rows = []
        for candidate in self.candidates:
            serves = candidate.kernel == self.kernel
            mark = "→" if serves else "✗" if candidate.lacks or candidate.resolution else " "
            said = [] if candidate.has_build else [candidate.why_not]
            if serves:
                said.append("its reference serves" if self.is_reference else "has a build here")
            rows.append(f"  {mark} {candidate.kernel:{width}}  {'; '.join(said)}")
        return [
            f"{self.capability}, of the first that offers it and has a build:",
            *(rows or ["  no kernel"]),
        ]

    def _table(self) -> list[str]:
        width = max((len(v.name) for v in self.verdicts), default=0)
        rows = [line for verdict in self.verdicts for line in self._row(verdict, width)]
        return [self.repo, *(rows or [f"  {self.note or 'no builds'}"])]

    def _row(self, verdict: Verdict, width: int) -> list[str]:
        mark = "→" if verdict is self.chosen else {"accepted": "✓", "unknown": "?", "rejected": "✗"}[verdict.status]
        against = verdict.reasons or (Note("", "fits" if verdict.metadata else "its name fits", ""),)
        texts = [reason.message for reason in (*against, *verdict.notes)]
        return [
            f"  {mark} {verdict.name:{width}}  {texts[0]}",
            *(f"  {'':{width + 2}}  {text}" for text in texts[1:]),
        ]

    def _conclusion(self) -> list[str]:
        taken, lines = self.taken, []
        if taken is None or taken is self.reference:
            for resolution in (self, *self.alternatives):
                if resolution.nearest is not None:
                    which = "None fits." if resolution is self else f"None of {resolution.repo} fits."
                    remedies = " ".join(dict.fromkeys(reason.remedy for reason in resolution.nearest.reasons))
                    lines += [f"{which} Nearest: {resolution.nearest.name}. {remedies}", ""]
        if self.reference is not None:
            lines += [*self.reference._table(), ""]  # noqa: SLF001 - the same class
        if taken is None or taken.chosen is None:
            if self.candidates:
                lines.append("`kernel-loader explain` of a kernel shows its builds.")
            return [*lines, f"Chosen: {'not known' if self.doubt else 'none'}"]
        if taken is self.reference:
            whence = ", the reference" if taken.chosen.is_universal else ", embedded"
        else:
            whence = "" if taken is self else f", of {taken.repo}"
        name = f"{self.kernel}, " if self.kernel else ""
        guarded = [f"Guarded: {guards}" for guards in taken.guards]
        doubtful = [v.name for v in taken.verdicts if v.status == "unknown" and v is not taken.chosen]
        passed_over = [f"In doubt, and passed over: {', '.join(doubtful)}"] if doubtful else []
        return [*lines, f"Chosen: {name}{taken.chosen.name}{whence}", *guarded, *passed_over]

    def to_json(self) -> str:
        """The same for programs."""
        asked = {
            "capability": self.capability,
            "kernel": self.kernel or None,
            "candidates": [_document_of_candidate(candidate) for candidate in self.candidates],
        }
        document = (asked if self.capability else {}) | self._document() | {"host": json.loads(self.host.to_json())}
        return json.dumps(document, indent=2)

    def _document(self) -> dict[str, object]:
        return {
            "repo": self.repo,
            "chosen": self.chosen.name if self.chosen else None,
            "nearest": self.nearest.name if self.nearest else None,
            "note": self.note,
            "undecided": self.undecided,
            "guards": list(self.guards),
            "verdicts": [
                {
                    "name": verdict.name,
                    "status": verdict.status,
                    "reasons": [_document_of(reason) for reason in verdict.reasons],
                    "notes": [_document_of(note) for note in verdict.notes],
                }
                for verdict in self.verdicts
            ],
            "alternatives": [other._document() for other in self.alternatives],  # noqa: SLF001 - the same class
            "reference": self.reference._document() if self.reference else None,  # noqa: SLF001 - the same class
        }


def _document_of_candidate(candidate: Candidate) -> dict[str, object]:
    resolution = candidate.resolution
    return {
        "kernel": candidate.kernel,
        "offers": list(candidate.offers),
        "lacks": list(candidate.lacks),
        "why_not": "" if candidate.has_build else candidate.why_not,
        "resolution": resolution._document() if resolution else None,  # noqa: SLF001 - the same module
    }


def _document_of(reason: Reason) -> dict[str, str]:
    return {"code": reason.code, "message": reason.message, "remedy": reason.remedy}


def resolve(
    names: Iterable[str],
    host: Host,
    *,
    repo: str = "",
    version: int | None = None,
    requires: Requires = NOTHING,
    advisories: Sequence[Advisory] = (),
    read_metadata: Callable[[str], Metadata] | None = None,
    strict: bool = False,
) -> Resolution:
    """Choose the build that a host takes.

    Args:
        names: names of the builds of one repository, in any order.
        host: the machine.
        repo: how explanations call the repository.
        version: that of the repository which was asked for, where it is known.
        requires: what the kernel's manifest demands of the host.
        advisories: what is publicly known of the repository.
        read_metadata: gives the metadata of a build. Called for the best build, and for the next only when that is
            rejected by what it says. Without it, names alone decide.
        strict: never choose a build whose compatibility is unknown.

    Raises:
        Whatever `read_metadata` raises: a damaged candidate is not passed over in silence.
    """
    # The version of a repository is best told by a build itself, so that advisories are judged with its metadata.
    on_names = NAME_RULES if requires is NOTHING else NAME_RULES + REQUIRES_RULES
    on_metadata = METADATA_RULES + advisory_rules(advisories)
    if read_metadata is None:
        on_names += advisory_rules(advisories)
    verdicts = [_by_name(name, on_names, host, requires, version) for name in dict.fromkeys(names)]
    chosen = None
    for candidate in sorted((v for v in verdicts if v.status != "rejected"), key=_order):
        if chosen is not None and candidate.status == "unknown":
            break
        judged = candidate
        if read_metadata is not None:
            judged = _by_metadata(candidate, on_metadata, host, read_metadata(candidate.name), version)
        verdicts[verdicts.index(candidate)] = judged
        if judged.status == "accepted":
            chosen = judged
            break
        if judged.status == "unknown" and chosen is None and not strict:
            chosen = judged  # unless a build that is lower in the order is accepted
    return Resolution(repo, host, tuple(sorted(verdicts, key=_order)), chosen)


def said_of_all(
    host: Host, requires: Requires, advisories: Sequence[Advisory], version: int | None
) -> tuple[tuple[Reason, ...], tuple[Reason, ...]]:
    """What is known of every build of a repository, whatever builds it has.

    Returns:
        Why none can run on the host, by what the manifest demands; and what advisories say of the version.
    """
    any_build = Build("", Variant.parse(REFERENCE), requires=requires, version=version)
    against = judge(REQUIRES_RULES, host, any_build) if requires is not NOTHING else ()
    return tuple(r for r in against if isinstance(r, Reject)), judge(advisory_rules(advisories), host, any_build)


def _by_name(name: str, rules: tuple[Rule, ...], host: Host, requires: Requires, version: int | None) -> Verdict:
    try:
        variant = Variant.parse(name)
    except VariantError as error:
        return Verdict(name, None, "rejected", (Reject("grammar", error.detail, error.remedy),))
    reasons, notes = _said_by(rules, host, Build(name, variant, requires=requires, version=version))
    return Verdict(name, variant, _status(reasons), reasons, notes=notes)


def _by_metadata(
    verdict: Verdict, rules: tuple[Rule, ...], host: Host, metadata: Metadata, version: int | None
) -> Verdict:
    assert verdict.variant is not None, "a build whose name is not of the grammar is no candidate"
    found, notes = _said_by(rules, host, Build(verdict.name, verdict.variant, metadata, version=version))
    reasons = (*verdict.reasons, *found)
    return verdict._replace(status=_status(reasons), reasons=reasons, metadata=metadata, notes=notes)


def _said_by(rules: tuple[Rule, ...], host: Host, build: Build) -> tuple[tuple[Reason, ...], tuple[Note, ...]]:
    """What rules have against a build, and what they note of it."""
    said = judge(rules, host, build)
    notes = tuple([reason for reason in said if isinstance(reason, Note)])
    return tuple([reason for reason in said if not isinstance(reason, Note)]) if notes else said, notes


def _status(reasons: tuple[Reason, ...]) -> Status:
    if any(isinstance(reason, Reject) for reason in reasons):
        return "rejected"
    return "unknown" if reasons else "accepted"


def _order(verdict: Verdict) -> tuple[object, ...]:
    """Best first: what fits, by kind of build, by version of its stable ABI, by version of its backend, by name."""
    variant = verdict.variant
    if variant is None:
        return (_STATUS_RANK[verdict.status], len(_FRAMEWORK_RANK), (), (), verdict.name)
    rank = _FRAMEWORK_RANK[variant.framework]
    if variant.framework == "torch-stable-abi" and variant.framework_version is not None:
        within = _newest_first(variant.framework_version)
    elif variant.framework == "torch":
        within = (int(variant.cxx11_abi is not None),)
    else:
        within = (int(variant.backend == "universal"),)
    return (_STATUS_RANK[verdict.status], rank, within, _newest_first(variant.backend_version or ()), verdict.name)


def _newest_first(version: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-part for part in version)


def _effort(verdict: Verdict, host: Host) -> tuple[object, ...]:
    """What a build needs: the hardest change, how many changes, how far its versions are from the host's."""
    codes = [EFFORT.index(reason.code) for reason in verdict.reasons if not isinstance(reason, Unknown)]
    variant = verdict.variant
    torch = _distance(variant.framework_version if variant else None, major_minor(host.torch or ""))
    backend = _distance(variant.backend_version if variant else None, host.backend.version)
    return (max(codes, default=-1), len(codes), torch, backend, _order(verdict))


def _distance(there: tuple[int, int] | None, here: tuple[int, int] | None) -> tuple[int, int]:
    return (abs(there[0] - here[0]), abs(there[1] - here[1])) if there and here else (0, 0)


def describe(host: Host) -> str:
    """A host in one line."""
    torch = f"torch {host.torch}" if host.torch else "torch unknown" if "torch" in host.unknown else "no torch"
    parts = [f"{host.os} {host.cpu}", torch, str(host.backend)]
    if not host.torch_is_release:
        parts[1] += " (no public release; counts by its version number)"
    if host.driver:
        parts.append(f"driver {host.driver}")
    counts = {arch: sum(d.arch == arch for d in host.devices) for arch in sorted({d.arch for d in host.devices})}
    parts += [f"{count} x {arch}" for arch, count in counts.items()]
    return ", ".join(parts)
