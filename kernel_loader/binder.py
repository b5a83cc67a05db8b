"""A module and a manifest -> a bundle: every entrypoint found and bound, or every missing one named."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import operator
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from kernel_loader.errors import KernelImportError, ManifestError, MissingEntrypoints
from kernel_loader.manifest import Entrypoint, Manifest
from kernel_loader.provenance import Origin


def bundle_class(manifest: Manifest, given: type | None = None) -> type:
    """The bundle of a kernel: the class that the caller gives or the manifest names, or one made from the entrypoints.

    Raises:
        ManifestError: the class cannot be imported, is no frozen dataclass, or the entrypoints are not its fields.
    """
    if given is None and manifest.bundle is None:
        return _made_from_entrypoints(manifest)
    cls = given if given is not None else _import_class(manifest)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ManifestError(manifest.file, "bundle", f"{name} is not a frozen dataclass")
    # A class of the caller's may take some of a registered kernel's entrypoints.
    if given is None:
        _check_fields(manifest, {f.name for f in dataclasses.fields(cls)}, name)
    return cls


def _check_fields(manifest: Manifest, fields: set[str], name: str) -> None:
    for index, candidate in enumerate((manifest, *manifest.alternatives)):
        within = f"alternatives[{index - 1}]." if index else ""
        for table, names in (("entrypoints", candidate.entrypoints), ("guards", candidate.guards)):
            for field in names:
                if field not in fields:
                    detail = f"{name} has no such field; it has {', '.join(sorted(fields))}"
                    raise ManifestError(manifest.file, f"{within}{table}.{field}", detail)


def bind(
    module: ModuleType, bundle: type, manifest: Manifest, origin: Origin, guards: Mapping[str, tuple[str, ...]]
) -> Any:  # noqa: ANN401 - any bundle
    """Make the bundle from the module's symbols. A field that has a default may lack its symbol.

    Args:
        module: of the build.
        bundle: a frozen dataclass.
        manifest: the kernel, in the repository that the build is from.
        origin: of the build, for errors.
        guards: field -> what is put around its function.

    Raises:
        MissingEntrypoints: symbols that the bundle needs are not there; all of them are named.
        KernelImportError: a symbol, or a value that is computed at load, could not be had.
        ManifestError: what should be guarded is no function, or none that a guard is for.
    """
    found: dict[str, Any] = {}
    missing: list[str] = []
    for field in (field for field in dataclasses.fields(bundle) if field.init):
        entrypoint = manifest.entrypoints.get(field.name, Entrypoint(field.name))
        try:
            found[field.name] = _symbol(module, entrypoint.symbol)
        except AttributeError:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                missing.append(field.name if entrypoint.symbol == field.name else f"{field.name} = {entrypoint}")
        except Exception as error:
            raise _failed(f"looking up {entrypoint.symbol}", error, origin) from error
        else:
            if entrypoint.call:
                found[field.name] = _call(found[field.name], entrypoint, origin)
            if field.name in guards:
                found[field.name] = _guarded(found[field.name], guards[field.name], field.name, manifest)
    if missing:
        there = sorted(name for name in vars(module) if not name.startswith("_"))
        cause = f"It has {', '.join(there) or 'no public names'}."
        raise MissingEntrypoints(origin.kernel, origin, cause, tuple(missing))
    try:
        return bundle(**found)
    except Exception as error:
        raise _failed(f"making {bundle.__qualname__}", error, origin) from error


def _symbol(module: ModuleType, symbol: str) -> Any:  # noqa: ANN401 - a kernel's own symbol
    """What a dotted symbol stands for. A package need not import the modules on its way by itself."""
    found: Any = module
    for name in symbol.split("."):
        if isinstance(found, ModuleType) and not hasattr(found, name):
            within = f"{found.__name__}.{name}"
            try:
                importlib.import_module(within)
            except ModuleNotFoundError as error:
                if error.name not in (within, found.__name__):  # something that the module needs
                    raise
        found = getattr(found, name)
    return found


def _guarded(function: object, names: tuple[str, ...], field: str, manifest: Manifest) -> object:
    if not callable(function):
        raise ManifestError(manifest.file, f"guards.{field}", f"it is a {type(function).__name__}, and no function")
    from kernel_loader.guards import Guarded, misfit  # few kernels have any

    if said := next(filter(None, (misfit(function, name) for name in names)), ""):
        raise ManifestError(manifest.file, f"guards.{field}", said)
    return Guarded(function, names)


def _call(function: Any, entrypoint: Entrypoint, origin: Origin) -> Any:  # noqa: ANN401 - a kernel's own symbol
    try:
        return function()
    except Exception as error:
        raise _failed(str(entrypoint), error, origin) from error


def _failed(what: str, error: Exception, origin: Origin) -> KernelImportError:
    return KernelImportError(origin.kernel, origin, f"{what} raised {type(error).__name__}: {error}")


def _import_class(manifest: Manifest) -> type:
    assert manifest.bundle is not None, "only called for a manifest that names a class"
    module, _, name = manifest.bundle.partition(":")
    try:
        found: object = operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever a user's module raises
        raise ManifestError(manifest.file, "bundle", f"{manifest.bundle} cannot be imported ({error})") from error
    if not isinstance(found, type):
        raise ManifestError(manifest.file, "bundle", f"{manifest.bundle} is not a class")
    return found


def _made_from_entrypoints(manifest: Manifest) -> type:
    if not manifest.entrypoints:
        raise ManifestError(manifest.file, "entrypoints", "a manifest without a bundle needs them: they are its fields")
    name = "".join(part.capitalize() for part in manifest.name.split("_"))
    _check_fields(manifest, set(manifest.entrypoints), f"the bundle {name}")
    return _make(name, tuple(manifest.entrypoints))


@functools.cache
def _make(name: str, fields: tuple[str, ...]) -> type:
    # No module holds the class by its name, so that pickle has to make it again.
    namespace = {"__reduce__": lambda self: (_remake, (name, {field: getattr(self, field) for field in fields}))}
    return dataclasses.make_dataclass(name, fields, namespace=namespace, frozen=True, kw_only=True)


def _remake(name: str, values: dict[str, Any]) -> object:
    return _make(name, tuple(values))(**values)
