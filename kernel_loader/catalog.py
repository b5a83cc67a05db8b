"""The catalog: which named kernels there are, where their manifests lie, and which of them do one job."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kernel_loader.errors import ManifestError, RequestError, SettingsError, UnknownKernel
from kernel_loader.manifest import Manifest, normalise
from kernel_loader.resources import data_directory
from kernel_loader.rules import Advisory
from kernel_loader.settings import PREFIX, Settings

if TYPE_CHECKING:
    from kernel_loader.capability import Capability, Offer, Wanted

ENTRY_POINTS: Final = "kernel_loader.manifests"
BUNDLE_ATTRIBUTE: Final = "__kernel__"

# In manifests/, and no kernels.
_ADVISORIES: Final = "advisories"
_CAPABILITIES: Final = "capabilities"
_OTHER_FILES: Final = frozenset({"layers", _ADVISORIES, _CAPABILITIES})


class Catalog:
    """Manifests by name.

    A directory of the user's (`KERNEL_LOADER_MANIFESTS`) comes first, so that it can replace what ships; then the
    manifests of this package; then those that installed packages offer under the entry point group
    `kernel_loader.manifests` (the name of a package whose directory holds TOML files), which can add names but not
    take over one.

    Raises:
        SettingsError: a directory of the settings is not there.
    """

    def __init__(self, settings: Settings) -> None:
        for directory in settings.manifests:
            if not os.access(directory, os.R_OK | os.X_OK) or not directory.is_dir():
                raise SettingsError(f"{PREFIX}MANIFESTS", str(directory), "directories that are there and can be read")
        self._shipped: Final = data_directory("manifests")
        self._own: Final = (*settings.manifests, self._shipped)
        self._prefer: Final = settings.prefer
        self._advisories: Final[dict[str, tuple[Advisory, ...]]] = {}

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted({normalise(file.stem) for directory in self._directories() for file in _files(directory)}))

    def get(self, kernel: str | type) -> Manifest:
        """The manifest of a registered name or of a bundle class.

        Raises:
            UnknownKernel: no manifest has that name.
            RequestError: it is the name of a capability.
            ManifestError: the manifest cannot be used, or a class does not say which kernel it is for.
        """
        manifest = self.find(kernel)
        if manifest is None:
            wanted = self.wanted(str(kernel))  # or else nothing has that name
            advice = f"Name a kernel: `kernel-loader explain {wanted}` shows those that offer it."
            raise RequestError(f"{wanted} is a capability, and a kernel is needed here", advice)
        return manifest

    def find(self, kernel: str | type) -> Manifest | None:
        """As `get`; None for a text that is no registered name.

        Raises:
            RequestError: it is neither a text nor a class.
            ManifestError: as `get`.
        """
        if isinstance(kernel, type):
            return self._of_class(kernel)
        if not isinstance(kernel, str):
            raise _no_name(kernel)
        name = normalise(kernel)
        file = next((file for directory in self._directories() for file in _files(directory, name)), None)
        return self._checked(_read(file, _text(file))) if file is not None else None

    def wanted(self, text: str) -> Wanted:
        """What a text that is no registered name asks for.

        Raises:
            UnknownKernel: no capability has that name, or it has no such feature.
            RequestError: the brackets are wrong, or stand behind the name of a kernel.
            ManifestError: a `capabilities.toml` cannot be read, or gives a capability the name of a kernel.
        """
        from kernel_loader.capability import spelt

        capabilities, wanted = self.capabilities, spelt(text)
        if wrong := self._wrong_brackets(text, wanted):
            raise RequestError(f"{text!r} was given, {wrong}", "Features are asked for as in attention[varlen,sinks].")
        if wanted is None or wanted.capability not in capabilities:
            raise _unknown(text, (*self.names(), *capabilities))
        features = capabilities[wanted.capability].features
        for unknown in (feature for feature in wanted.features if feature not in features):
            near = difflib.get_close_matches(unknown, features, n=3) or sorted(features)
            raise UnknownKernel(text, tuple(str(wanted.instead(unknown, feature)) for feature in near))
        return wanted

    def _wrong_brackets(self, text: str, wanted: Wanted | None) -> str:
        """What is wrong with the brackets of a text; empty where it has none, or nothing is."""
        name, bracket, _ = text.partition("[")
        if bracket and normalise(name.strip()) in self.names():
            return f"and {name.strip()} is a kernel: capabilities alone have features"
        if wanted is None:
            return "whose brackets are not one pair at the end" if bracket or "]" in text else ""
        return "with a feature that has no name" if "" in wanted.features else ""

    def offers(self, wanted: Wanted, kind: str) -> tuple[Offer, ...]:
        """The kernels of a capability in the order in which they are asked, each with what it lacks on a backend.

        First those that the settings prefer, then those in the orders of `capabilities.toml`, then the others by name.

        Raises:
            ManifestError: a manifest that speaks of the capability cannot be used.
            SettingsError: a kernel or a capability that is preferred is not known.
        """
        from kernel_loader.capability import Offer

        capability = self.capabilities[wanted.capability]
        manifests = self._offering(capability)
        order = (*self._preferred(capability), *capability.order, *sorted(manifests))
        offers = []
        for name in dict.fromkeys(order):
            manifest = manifests.get(name) or self.find(name)
            if manifest is None:
                raise ManifestError(f"{_CAPABILITIES}.toml", f"{capability.name}.order", f"no kernel is named {name!r}")
            features = manifest.offers(capability.name, kind)
            lacks = tuple(feature for feature in wanted.features if feature not in features)
            offers.append(Offer(manifest, features, lacks if name in manifests else (capability.name,)))
        return tuple(offers)

    @functools.cached_property
    def capabilities(self) -> Mapping[str, Capability]:
        """What several kernels can do, by the `capabilities.toml` of the user and that of this package.

        Raises:
            ManifestError: a file cannot be read, or gives a capability the name of a kernel.
        """
        from kernel_loader.capability import parse, together

        files = (directory / f"{_CAPABILITIES}.toml" for directory in self._own)
        read = {str(file): parse(_text(file), str(file)) for file in files if file.is_file()}
        kernels = set(self.names())
        for where, capabilities in read.items():
            for name in sorted(kernels & capabilities.keys()):
                raise ManifestError(where, name, "a kernel has that name, so that nobody could ask for the capability")
        return together(read.values())

    def _offering(self, capability: Capability) -> dict[str, Manifest]:
        found: dict[str, Manifest] = {}
        seen: set[str] = set()
        for file in (file for directory in self._directories() for file in _files(directory)):
            name = normalise(file.stem)
            if name in seen:
                continue  # an earlier directory has it
            seen.add(name)
            # Most manifests do not speak of it, and one that cannot be read takes no others with it.
            text = _text(file)
            if capability.name in text and capability.name in (manifest := _read(file, text)).capabilities:
                found[name] = self._checked(manifest, always=True)
        return found

    def _preferred(self, capability: Capability) -> tuple[str, ...]:
        kernels = set(self.names())
        preferred: list[str] = []
        for name, names in self._prefer.items():
            if normalise(name) not in self.capabilities:
                raise SettingsError(f"{PREFIX}PREFER", name, f"lists for {', '.join(self.capabilities)}")
            for kernel in names:
                if normalise(kernel) not in kernels:
                    raise SettingsError(f"{PREFIX}PREFER", kernel, "names that `kernel-loader list` shows")
            preferred += [normalise(kernel) for kernel in names if normalise(name) == capability.name]
        return tuple(preferred)

    def _checked(self, manifest: Manifest, *, always: bool = False) -> Manifest:
        """The manifest; what it offers is known.

        What this package ships is held against its own list by a test, so that a kernel that is asked for by name costs
        no look into it.
        """
        if manifest.capabilities and (always or Path(manifest.file).parent != self._shipped):
            from kernel_loader.capability import check

            check(manifest, self.capabilities)
        return manifest

    def advisories(self, repo: str) -> tuple[Advisory, ...]:
        """What is publicly known of a repository, by the user's `advisories.toml` and by that of this package.

        Raises:
            ManifestError: a file cannot be read.
        """
        if repo not in self._advisories:
            # Most kernels are not spoken of, and parsing would be a good part of their load.
            spoken_of = any(repo in text for _, text in self._advisory_files)
            self._advisories[repo] = _about(repo, self._advisory_files) if spoken_of else ()
        return self._advisories[repo]

    @functools.cached_property
    def _advisory_files(self) -> tuple[tuple[str, str], ...]:
        files = (directory / f"{_ADVISORIES}.toml" for directory in self._own)
        texts = tuple((str(file), _text(file)) for file in files if file.is_file())
        for file, text in texts:
            if Path(file).parent != self._shipped:
                _check_repositories(text, file)
        return texts

    def _of_class(self, cls: type) -> Manifest:
        where = f"{cls.__module__}:{cls.__qualname__}"
        about = getattr(cls, BUNDLE_ATTRIBUTE, None)
        if isinstance(about, str):
            return self.get(about)
        if isinstance(about, dict):
            return Manifest.from_table(about, where)
        detail = "a bundle class says which kernel it is for: a registered name, or the keys of a manifest"
        raise ManifestError(where, BUNDLE_ATTRIBUTE, detail)

    def _directories(self) -> Iterator[Path]:
        yield from self._own
        for entry in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda e: (e.name, e.value)):
            yield from _package_directories(entry.value)


def _no_name(given: object) -> RequestError:
    detail = f"{type(given).__name__} object was given as the kernel"
    return RequestError(detail, "Pass a name, a capability, or a bundle class (no object of one).")


def _unknown(kernel: str, names: Iterable[str]) -> UnknownKernel:
    name = normalise(kernel).partition("[")[0]
    return UnknownKernel(kernel, tuple(difflib.get_close_matches(name, tuple(names), n=3)))


def _package_directories(package: str) -> Iterator[Path]:
    # find_spec runs the parents of a dotted name, but not a package at the top.
    top, *below = package.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return  # an entry point that leads nowhere takes no other names with it
    for location in (spec.submodule_search_locations if spec else None) or ():
        yield Path(location, *below)


def _files(directory: Path, name: str | None = None) -> Iterator[Path]:
    """The manifests of a directory, or of one kernel in it."""
    try:
        stems = sorted(file[:-5] for file in os.listdir(directory) if file.endswith(".toml"))  # noqa: PTH208 - quicker
    except OSError:
        return
    for stem in stems:
        normal = normalise(stem)
        if name in (None, normal) and normal.isidentifier() and stem not in _OTHER_FILES:
            file = directory / f"{stem}.toml"
            if file.is_file():
                yield file


def _about(repo: str, files: Iterable[tuple[str, str]]) -> tuple[Advisory, ...]:
    from kernel_loader.advisories import about

    return about(repo, files)


def _check_repositories(text: str, file: str) -> None:
    from kernel_loader.advisories import check_repositories

    check_repositories(text, file)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(str(file), "", f"it cannot be read ({error})") from error


def _read(file: Path, text: str) -> Manifest:
    manifest = Manifest.parse(text, str(file))
    if manifest.name != normalise(file.stem):
        raise ManifestError(str(file), "name", f"{manifest.name!r} is not the file's name")
    return manifest
