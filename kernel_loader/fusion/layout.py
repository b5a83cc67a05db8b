"""Layouts: the classes that fused modules are of. They are found beside a kernel's layer, and take its forward."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from torch import nn

from kernel_loader.api import default_loader
from kernel_loader.errors import FusionError, KernelImportError, KernelLoaderError, NoCompatibleBuild
from kernel_loader.layers.decorator import replace_kernel_forward_from_hub
from kernel_loader.layers.fit import forward_for
from kernel_loader.layers.repository import (
    Layer,
    LayerRepository,
    LocalLayerRepository,
    Repository,
    function_layer,
)


def layer_of(repository: Repository) -> str:
    """The layer of a repository, by which `layouts` knows it."""
    return str(getattr(repository, "layer_name", repository))


def find_layout(layer: Layer, given: str | type | None, name: str) -> type[nn.Module]:
    """The layout class of a layer, with a forward.

    Args:
        layer: as it was loaded.
        given: the class, or its name in the kernel; None for `name` followed by "Layout".
        name: of the layer.

    Raises:
        FusionError: there is none.
    """
    wanted = given if given is not None else f"{name}Layout"
    spaces = _namespaces(layer.cls)
    found = wanted if isinstance(wanted, type) else next((s[wanted] for s in spaces if wanted in s), None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        there = sorted({n for space in spaces for n in space if n.endswith("Layout")})
        first = "Name one of these" if there else "Write one beside the layer (docs/fusion.md), or give a class"
        raise FusionError(
            (f"{layer.origin.where} has no layout {wanted} for {name}; there is {', '.join(there) or 'none'}",),
            f'{first} by KernelConfig(..., layouts={{"{name}": ...}}).',
        )
    return _with_forward(found, _source(layer.cls), name)


def problem_of_layout(repository: Repository, given: str | type | None, kind: str) -> dict[str, str]:
    """What is wrong with a kernel and its layout, as far as that is known without the Hub, and what to do about it."""
    if not _is_here(repository):
        return {}
    try:
        find_layout(repository.load("cpu" if kind == "cpu" else None), given, layer_of(repository))
    except (NoCompatibleBuild, KernelImportError):
        return {}  # on another machine it may be fine
    except KernelLoaderError as error:
        return {error.problem.rstrip("."): error.remedy}
    return {}


def _is_here(repository: Repository) -> bool:
    """Whether a kernel can be had without the Hub, or not at all."""
    if isinstance(repository, LocalLayerRepository):
        return True
    if not isinstance(repository, LayerRepository) or "/" in repository.repo_id:
        return False
    manifest = default_loader().catalog.find(repository.repo_id)
    return manifest is None or (manifest.repo is None and not manifest.alternatives)


def _namespaces(layer: type[nn.Module]) -> list[dict[str, Any]]:
    """Where a layout may be: the module of the layer, `layers` of the kernel, and the kernel."""
    root = sys.modules.get(".".join(layer.__module__.split(".")[:3]))
    modules = [sys.modules.get(layer.__module__), getattr(root, "layers", None), root]
    return [vars(module) for module in modules if module is not None]


# Layout, layer and its name -> the layout with that layer's forward. Loaded kernels stay as long as the process.
_WITH_FORWARD: Final[dict[tuple[type, object, str], type[nn.Module]]] = {}


def _source(layer: type[nn.Module]) -> Any:  # noqa: ANN401 - a class or a function
    """What can be pickled of a layer: the function, where it was made of one."""
    forward = inspect.getattr_static(layer, "forward")
    return forward.__func__ if isinstance(forward, staticmethod) else layer


def _with_forward(layout: type[nn.Module], source: Any, name: str) -> type[nn.Module]:  # noqa: ANN401 - as above
    if layout.forward is not nn.Module.forward:
        replace_kernel_forward_from_hub(layout, name)  # so that kernelize may choose another for a mode
        return layout
    key = (layout, source, name)
    if key not in _WITH_FORWARD:
        layer = source if isinstance(source, type) else function_layer(source, name)
        made = derived(layout, {"forward": forward_for(layer, layout)}, (_with_forward, layout, source, name))
        replace_kernel_forward_from_hub(made, name)
        _WITH_FORWARD.setdefault(key, made)
    return _WITH_FORWARD[key]


# --- classes that are made ------------------------------------------------------------------------------------------


def derived(cls: type[nn.Module], body: dict[str, Any], remake: tuple[Any, ...]) -> type[nn.Module]:
    """A class derived from another, under its name: what is saved names the class, and is to be read without this.

    Args:
        cls: the class to derive from.
        body: what it has of its own.
        remake: a function and its arguments, which give the class in the process that reads a pickle.
    """
    made: type[nn.Module]

    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:  # noqa: ANN401, N807 - as pickle has it
        reduced: Any = cls.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or type(self) is not made:
            return reduced
        function, args, *rest = reduced
        return (_new, (function, _Made(made, remake), tuple(_Itself() if arg is made else arg for arg in args)), *rest)

    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made = types.new_class(
        cls.__name__, (cls,), exec_body=lambda space: space.update({"__reduce_ex__": __reduce_ex__} | body | own)
    )
    return made


class _Itself:
    """Stands for the class that was made, in the arguments of what makes an object."""


class _Made:
    """A class that was made: copies have it, and pickles make it again."""

    def __init__(self, cls: type[nn.Module], remake: tuple[Any, ...]) -> None:
        self.cls, self._remake = cls, remake

    def __deepcopy__(self, memo: object) -> _Made:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (_made, self._remake)


def _made(remake: Callable[..., type[nn.Module]], *args: Any) -> _Made:  # noqa: ANN401 - of any class
    return _Made(remake(*args), (remake, *args))


def _new(function: Callable[..., nn.Module], made: _Made, args: tuple[Any, ...]) -> nn.Module:
    return function(*(made.cls if isinstance(arg, _Itself) else arg for arg in args))


def itself(cls: type[nn.Module]) -> type[nn.Module]:
    """The class; what remakes those that a pickle shall not need."""
    return cls
