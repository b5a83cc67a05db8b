"""Capability: what several kernels can do, which of them do it, and in which order they are asked.

`capabilities.toml` lists capabilities and their features; a manifest says which of them its kernel offers. Callers ask
as for the extras of a package: `attention[varlen,sinks]`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kernel_loader.errors import ManifestError
from kernel_loader.manifest import FEATURE, NAME, Manifest, known, normalise
from kernel_loader.reading import Node

FILE_NAME: Final = "capabilities.toml"

_SPELT: Final = r"\s*(?P<name>[^\[\]\s]+)\s*(?:\[(?P<features>[^\[\]]*)\]\s*)?"
_KEYS: Final = frozenset({"summary", "entrypoints", "order", "features"})
_FEATURE_KEYS: Final = frozenset({"meaning", "entrypoints"})


class Wanted(NamedTuple):
    """What a caller asks for, normalised: a capability, and features of it, sorted."""

    capability: str
    features: tuple[str, ...] = ()

    def instead(self, unknown: str, feature: str) -> Wanted:
        """The same with one feature in the place of another."""
        return self._replace(features=tuple(sorted({*self.features, feature} - {unknown})))

    def __str__(self) -> str:
        return f"{self.capability}[{','.join(self.features)}]" if self.features else self.capability


class Feature(NamedTuple):
    """What some kernels of a capability can do, and others cannot.

    Attributes:
        meaning: in a line.
        entrypoints: fields that the bundle of each kernel with the feature has.
    """

    meaning: str
    entrypoints: tuple[str, ...] = ()


class Capability(NamedTuple):
    """What several kernels can do.

    Attributes:
        summary: in a line.
        entrypoints: fields that the bundle of each of its kernels has.
        features: by name.
        order: kernels that are asked first, the first one first.
    """

    name: str
    summary: str
    entrypoints: tuple[str, ...]
    features: Mapping[str, Feature]
    order: tuple[str, ...]

    def promised_by(self, manifest: Manifest) -> frozenset[str]:
        """Fields that the bundle of a kernel has, for what it offers of this."""
        features = (self.features[name].entrypoints for name in manifest.offers(self.name))
        return frozenset(self.entrypoints).union(*features)


class Offer(NamedTuple):
    """A kernel in the list of a capability, on one kind of backend.

    Attributes:
        features: what it offers there.
        lacks: what it lacks there of what a caller wants: features, or the capability.
    """

    manifest: Manifest
    features: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


def spelt(text: str) -> Wanted | None:
    """What a text asks for; None where it is not of the form `capability` or `capability[feature,feature]`."""
    match = re.fullmatch(_SPELT, text, re.ASCII)
    if match is None:
        return None
    names = [name.strip() for name in match["features"].split(",")] if (match["features"] or "").strip() else []
    features = {name.replace("_", "-").lower() for name in names}
    return Wanted(normalise(match["name"]), tuple(sorted(features)))


def parse(text: str, file: str) -> dict[str, Capability]:
    """Read the text of a file: a table for each capability.

    Raises:
        ManifestError: not TOML, an unknown key, or a value of the wrong form.
    """
    import tomllib

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(file, "", f"not TOML ({error})") from error
    root = Node(document, lambda path, detail: ManifestError(file, path, detail))
    return {name: _capability(name, node) for name, node in root.table().items()}


def together(files: Iterable[Mapping[str, Capability]]) -> dict[str, Capability]:
    """The capabilities of several files, the first of which counts most.

    A capability that several files have is one: with the features of all of them and the orders one after another. What
    two files say otherwise of the same thing is taken from the first that says it.
    """
    found: dict[str, Capability] = {}
    for capabilities in files:
        for name, later in capabilities.items():
            first = found.get(name, later)
            found[name] = Capability(
                name=name,
                summary=first.summary or later.summary,
                entrypoints=first.entrypoints or later.entrypoints,
                features={**later.features, **first.features},
                order=tuple(dict.fromkeys((*first.order, *later.order))),
            )
    return found


def check(manifest: Manifest, capabilities: Mapping[str, Capability]) -> None:
    """Hold what a manifest says that its kernel offers against what there is.

    Fields of a bundle class are looked at when it is imported; those of a bundle that is made from entrypoints here.

    Raises:
        ManifestError: there is no such capability or feature, or the kernel lacks entrypoints that it then has.
    """
    for name, features in manifest.capabilities.items():
        path = f"capabilities.{name}"
        if name not in capabilities:
            raise ManifestError(manifest.file, path, f"there is no such capability; {_meant(name, capabilities)}")
        capability = capabilities[name]
        for index, offered in enumerate(features):
            if offered.feature not in capability.features:
                detail = f"{name} has no feature {offered.feature!r}; {_meant(offered.feature, capability.features)}"
                raise ManifestError(manifest.file, f"{path}[{index}]", detail)
        if manifest.bundle is None:
            for candidate in (manifest, *manifest.alternatives):
                check_fields(manifest, capability, candidate.entrypoints)


def check_fields(manifest: Manifest, capability: Capability, fields: Iterable[str]) -> None:
    """Hold the fields of a kernel's bundle against what it offers of a capability.

    Raises:
        ManifestError: some are missing; all of them are named.
    """
    if missing := sorted(capability.promised_by(manifest) - set(fields)):
        detail = f"a kernel that offers this has the entrypoints {', '.join(missing)}, and {manifest.name} has not"
        raise ManifestError(manifest.file, f"capabilities.{capability.name}", detail)


def _capability(name: str, node: Node) -> Capability:
    Node(name, node.fail, node.path).text(NAME, "a name in lower case with underscores")
    keys = known(node, _KEYS)
    features = keys["features"].table() if "features" in keys else {}
    return Capability(
        name=name,
        summary=keys["summary"].text() if "summary" in keys else "",
        entrypoints=_fields(keys["entrypoints"]) if "entrypoints" in keys else (),
        features={feature: _feature(feature, about) for feature, about in features.items()},
        order=tuple(item.text(NAME, "the name of a kernel") for item in keys["order"].items())
        if "order" in keys
        else (),
    )


def _feature(name: str, node: Node) -> Feature:
    Node(name, node.fail, node.path).text(FEATURE, "a name in lower case with dashes")
    if isinstance(node.value, str):
        return Feature(node.text())
    keys = known(node, _FEATURE_KEYS)
    if "meaning" not in keys:
        node.error("the key meaning is missing")
    return Feature(keys["meaning"].text(), _fields(keys["entrypoints"]) if "entrypoints" in keys else ())


def _fields(node: Node) -> tuple[str, ...]:
    return tuple(item.text(r"[A-Za-z_]\w*", "the name of a field") for item in node.items())


def _meant(name: str, names: Iterable[str]) -> str:
    there = sorted(names)
    near = difflib.get_close_matches(name, there, n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(there) or 'none'}"
