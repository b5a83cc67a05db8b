"""What a model consists of: modules that have a name in mappings, functions that they call, and where they compute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernel_loader.errors import RequestError
from kernel_loader.layers.decorator import FUNCTION, Name, functions_called_by, names_of, peers_functions
from kernel_loader.layers.device import Device, kind_of
from kernel_loader.layers.swap import class_of

if TYPE_CHECKING:
    import torch
    from torch import nn

_SCRIPTED: Final = ("scripted", "it is a TorchScript module, whose code is fixed")


class Place(NamedTuple):
    """Where a module computes: a kind of device, and which one; None for the current one."""

    kind: str
    ordinal: int | None


class Known(NamedTuple):
    """What is looked up once for each class of modules."""

    cls: type[nn.Module]
    names: tuple[Name, ...]
    has_name: bool
    has_conditions: bool
    functions: tuple[nn.Module, ...]
    scripted: tuple[str, str] | None
    is_function: bool


def refuse_no_module(model: object) -> None:
    """Raise where something is given as a model and is none.

    Raises:
        RequestError: it is no nn.Module.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        raise RequestError(f"{type(model).__name__} object was given as the model", "Pass an nn.Module.")


def named_layers(
    model: nn.Module, given: Place | None, callers: list[tuple[nn.Module, nn.Module]]
) -> Iterator[tuple[nn.Module, Place | None, Known]]:
    """The modules that have a name in mappings, and the functions that they call; each once, with its place.

    Functions and their callers are added to `callers`.
    """
    modules, parents = _tree(model)
    places = [given] * len(modules) if given is not None else _places(modules, parents)
    classes: dict[type[nn.Module], Known] = {}
    functions: set[int] = set()
    for module, place, parent in zip(modules, places, parents, strict=True):
        cls = type(module)
        known = classes.get(cls) or classes.setdefault(cls, _known(class_of(module)))
        if known.has_name:
            functions.add(id(module))
            if known.is_function and parent >= 0:
                callers.append((module, modules[parent]))
            yield module, place, known
        for function in (*known.functions, *peers_functions(module)):
            callers.append((function, module))
            if id(function) not in functions:
                functions.add(id(function))
                yield function, place, _known(class_of(function))


def _known(cls: type[nn.Module]) -> Known:
    import torch

    named = names_of(cls)
    conditions = any(name.condition is not None for name in named.names)
    scripted = _SCRIPTED if issubclass(cls, torch.jit.ScriptModule) else None
    has_name = bool(named.names) or named.overridden
    function = getattr(cls, FUNCTION, False)
    return Known(cls, named.names, has_name, conditions, functions_called_by(cls), scripted, function)


def _tree(model: nn.Module) -> tuple[list[nn.Module], list[int]]:
    """All modules of a model, each once and after the one around it, and the position of that one; -1 for the model."""
    modules, parents, seen = [model], [-1], {id(model)}
    for position, module in enumerate(modules):
        for child in module._modules.values():  # noqa: SLF001 - named_modules() makes a path for each, at thrice the time
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
                parents.append(position)
    return modules, parents


def _places(modules: list[nn.Module], parents: list[int]) -> list[Place | None]:
    """Where each module computes: by its own tensors, else those below it, else those of the modules around it."""
    known: dict[object, Place] = {}
    places: list[Place | None] = [_own_place(module, known) for module in modules]
    below = list(places)
    for position in range(len(modules) - 1, 0, -1):
        if below[position] is not None and places[parents[position]] is None:
            below[parents[position]] = below[position]  # the first child, as the last one that writes
    for position in range(1, len(modules)):
        if below[position] is None:
            below[position] = below[parents[position]]
    return below


def _own_place(module: nn.Module, known: dict[object, Place]) -> Place | None:
    # accelerate moves the parameters of such a module to this device when it is called.
    device: Any = getattr(module.__dict__.get("_hf_hook"), "execution_device", None)
    if device is None:
        tensors = itertools.chain(module._parameters.values(), module._buffers.values())  # noqa: SLF001 - as above
        device = next((tensor.device for tensor in tensors if tensor is not None), None)
    if device is None:
        return None
    if device not in known:
        known[device] = _place(device)
    return known[device]


def _place(device: str | int | torch.device) -> Place:
    import torch

    device = torch.device(device)
    return Place(kind_of(device), device.index)


def given_place(device: str | torch.device | None) -> Place | None:
    """The place that a caller names; None where none is named.

    Raises:
        RequestError: there is no such kind of device.
    """
    import torch

    if device is None:
        return None
    if isinstance(device, torch.device):
        return _place(device)
    if not isinstance(device, str):
        raise RequestError(f"device={device!r} was given", "A device is a kind, such as cuda, or a torch.device.")
    kind, _, index = device.partition(":")
    Device(kind)  # refuses what is no kind of device
    if index and not index.isdecimal():
        raise RequestError(f"device={device!r} was given", "A device is a kind, such as cuda, or cuda:1.")
    return Place(kind, int(index) if index else None)
