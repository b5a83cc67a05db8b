"""A module and a manifest -> a bundle: every entrypoint found and bound, or every missing one named."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
from types import ModuleType
from typing import Any

from kernel_loader.errors import KernelImportError, ManifestError, MissingEntrypoints
from kernel_loader.manifest import Entrypoint, Manifest
from kernel_loader.provenance import Origin


def bundle_class(manifest: Manifest) -> type:
    """The bundle of a kernel: the class that the manifest names, or a frozen dataclass with its entrypoints as fields.

    Raises:
        ManifestError: the class cannot be imported, is no frozen dataclass, or the entrypoints are not its fields.
    """
    if manifest.bundle is None:
        return _made_from_entrypoints(manifest)
    cls = _import_class(manifest)
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ManifestError(manifest.file, "bundle", f"{manifest.bundle} is not a frozen dataclass")
    fields = {f.name for f in dataclasses.fields(cls)}
    for name in manifest.entrypoints:
        if name not in fields:
            detail = f"{manifest.bundle} has no such field; it has {', '.join(sorted(fields))}"
            raise ManifestError(manifest.file, f"entrypoints.{name}", detail)
    return cls


def bind(module: ModuleType, bundle: type, manifest: Manifest, origin: Origin) -> Any:  # noqa: ANN401 - any bundle
    """Make the bundle from the module's symbols.

    Raises:
        MissingEntrypoints: symbols that the bundle needs are not there; all of them are named.
        KernelImportError: a value that is computed at load could not be.
    """
    found: dict[str, Any] = {}
    missing: list[str] = []
    for field in dataclasses.fields(bundle):
        entrypoint = manifest.entrypoints.get(field.name, Entrypoint(field.name))
        try:
            found[field.name] = operator.attrgetter(entrypoint.symbol)(module)
        except AttributeError:
            missing.append(field.name if entrypoint.symbol == field.name else f"{field.name} = {entrypoint}")
    if missing:
        there = sorted(name for name in vars(module) if not name.startswith("_"))
        cause = f"It has {', '.join(there) or 'no public names'}."
        raise MissingEntrypoints(origin.kernel, origin, cause, tuple(missing))
    for name, entrypoint in manifest.entrypoints.items():
        if entrypoint.call:
            found[name] = _call(found[name], entrypoint, origin)
    return bundle(**found)


def _call(function: Any, entrypoint: Entrypoint, origin: Origin) -> Any:  # noqa: ANN401 - a kernel's own symbol
    try:
        return function()
    except Exception as error:
        raise KernelImportError(
            origin.kernel, origin, f"{entrypoint} raised {type(error).__name__}: {error}"
        ) from error


def _import_class(manifest: Manifest) -> type:
    assert manifest.bundle is not None, "only called for a manifest that names a class"
    module, _, name = manifest.bundle.partition(":")
    try:
        found: object = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ManifestError(manifest.file, "bundle", f"{manifest.bundle} cannot be imported ({error})") from error
    if not isinstance(found, type):
        raise ManifestError(manifest.file, "bundle", f"{manifest.bundle} is not a class")
    return found


def _made_from_entrypoints(manifest: Manifest) -> type:
    if not manifest.entrypoints:
        raise ManifestError(manifest.file, "entrypoints", "a manifest without a bundle needs them: they are its fields")
    return _make("".join(part.capitalize() for part in manifest.name.split("_")), tuple(manifest.entrypoints))


@functools.cache
def _make(name: str, fields: tuple[str, ...]) -> type:
    # No module holds the class by its name, so that pickle has to make it again.
    namespace = {"__reduce__": lambda self: (_remake, (name, {field: getattr(self, field) for field in fields}))}
    return dataclasses.make_dataclass(name, fields, namespace=namespace, frozen=True, kw_only=True)


def _remake(name: str, values: dict[str, Any]) -> object:
    return _make(name, tuple(values))(**values)
