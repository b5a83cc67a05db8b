"""What a model would be with modules fused, and why it cannot be. Nothing is changed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from kernel_loader.errors import FusionError, KernelImportError
from kernel_loader.fusion.config import Fusion, refusal
from kernel_loader.fusion.converter import Composition, WeightConverter, compose
from kernel_loader.fusion.fused import FUSED, gone, renames, state_of
from kernel_loader.fusion.layout import find_layout, layer_of
from kernel_loader.fusion.pattern import Site
from kernel_loader.fusion.plan import Plan, plan
from kernel_loader.fusion.state_dict import specs_of
from kernel_loader.layers.device import BACKENDS, kind_of
from kernel_loader.layers.repository import Layer, LocalLayerRepository, Repository
from kernel_loader.layers.swap import is_hidden, kernel_of

logger = logging.getLogger("kernel_loader")

_FIRST: Final = "Do that to the model first, and fuse it then."
_LAYOUT: Final = "Correct the layout: what its constructor makes, or its conversion_mapping."
_LIST: Final = "It is a list of WeightConverter, as an attribute of the layout or of its class."

# Where modules and parameters keep what is called at some time.
_HOOKS: Final = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_HOOKS_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Draft(NamedTuple):
    """A fused module that is not in its place yet, and has no weights of its own."""

    parent: nn.Module
    children: tuple[str, ...]
    originals: tuple[nn.Module, ...]
    layout: nn.Module
    conversion: Composition
    before: dict[str, Tensor]
    steps: Plan


def layout_for(
    model: nn.Module, fusion: Fusion, site: Site, layouts: dict[str, type[nn.Module]]
) -> type[nn.Module] | None:
    """The layout for a site; None where the configuration has no kernel for the device that it is on.

    layouts: kind of device -> the class for it, once it was loaded.

    Raises:
        FusionError: the kernel has none, or is in a directory of this machine and cannot be imported.
        KernelLoaderError: as `load_module`, where another kernel cannot be had.
    """
    parent = model.get_submodule(site.parent)
    kind = _kind([*(parent.get_submodule(name) for name in site.children), parent, model])
    if kind not in fusion.repositories:
        there, where = ", ".join(fusion.repositories), site.parent or "the model"
        logger.warning("%s: %s is not fused on %s; the configuration is for %s", where, fusion, kind, there)
        return None
    if kind not in layouts:
        repository = fusion.repositories[kind]
        layouts[kind] = find_layout(_loaded(repository, kind), fusion.layouts.get(kind), layer_of(repository))
    return layouts[kind]


def _loaded(repository: Repository, kind: str) -> Layer:
    try:
        return repository.load("cpu" if BACKENDS.get(kind) == "cpu" else None)
    except KernelImportError as error:
        # The advice for others is of versions and fallbacks, which a directory has not.
        if type(error) is not KernelImportError or not isinstance(repository, LocalLayerRepository):
            raise
        advice = f"Correct the kernel in {repository.repo_path}, or name another directory. Nothing was changed."
        raise FusionError((error.problem.rstrip("."),), advice) from error


def _kind(modules: Sequence[nn.Module]) -> str:
    """The kind of device that the first module with tensors is on; of the machine where they are on meta."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type != "meta":
                return kind_of(tensor.device)
    found = torch.accelerator.current_accelerator()
    return kind_of(found) if found is not None and torch.accelerator.is_available() else "cpu"


def draft_of(parent: nn.Module, children: Sequence[str], names: Sequence[str], cls: type[nn.Module]) -> Draft:
    """A module of the layout class, made of children of `parent`, and what their weights become. Changes nothing.

    names: what the layout calls the children.
    """
    originals = tuple(parent.get_submodule(name) for name in children)
    before = {
        f"{child}.{name}": tensor
        for child, module in zip(children, originals, strict=True)
        for name, tensor in state_of(module)
    }
    if problems := _done_already(parent, children):
        raise FusionError(tuple(problems), _FIRST)
    try:
        layout = cls(*originals)
    except Exception as error:  # whatever a constructor raises
        reason = f"{cls.__qualname__} cannot be made of {', '.join(children)} ({type(error).__name__}: {error})"
        wrapped = _wrapped(children, originals, frozenset())
        advice = _FIRST if wrapped else "Fuse only modules that the layout is for, or correct its constructor."
        raise FusionError((*wrapped, reason), advice) from error
    located = dict(zip(names, children, strict=True))
    conversion = compose([_located(converter, located, children[0]) for converter in _mapping_of(layout)])
    stay = frozenset(id(module) for module in layout.modules())
    problems = _wrapped(children, originals, stay) + _hooked(children, originals, stay)
    if problems:
        raise FusionError(tuple(problems), _FIRST)
    steps = plan(specs_of(before), conversion)
    draft = Draft(parent, tuple(children), originals, layout, conversion, before, steps)
    if unfit := dict(_unfit_weights(draft)) | dict.fromkeys(_differences(draft), _LAYOUT):
        raise refusal(unfit)
    return draft


def _mapping_of(layout: nn.Module) -> Sequence[WeightConverter]:
    """The converters of a layout; none where it has none."""
    name, cls = "conversion_mapping", type(layout).__qualname__
    if name not in vars(layout) and not hasattr(type(layout), name):
        return ()
    try:
        mapping = getattr(layout, name)
        found = tuple(mapping)
    except Exception as error:  # of a property, or of what is no list
        raise FusionError((f"{cls}.{name} cannot be read ({type(error).__name__}: {error})",), _LIST) from error
    if strangers := [one for one in found if not isinstance(one, WeightConverter)]:
        raise FusionError((f"{cls}.{name} has {strangers[0]!r}, which is no WeightConverter",), _LIST)
    return found


def _located(converter: WeightConverter, names: dict[str, str], first: str) -> WeightConverter:
    """A converter of a layout by names in the parent: `MLP.up_proj.weight` is `mlp.up_proj.weight` there."""

    def source(pattern: str) -> str:
        head, dot, rest = pattern.partition(".")
        return names.get(head, head) + dot + rest

    return WeightConverter(
        [source(pattern) for pattern in converter.sources],
        [f"{first}.{pattern}" for pattern in converter.targets],
        converter.operations,
        optional=converter.optional,
    )


def _done_already(parent: nn.Module, children: Sequence[str]) -> list[str]:
    taken = {name for fused in vars(parent).get(FUSED, {}).values() for name in fused.children}
    problems = [f"{name} is fused already; call unfuse first" for name in children if name in taken]
    for name in children:
        for path, part in parent.get_submodule(name).named_modules(prefix=name):
            if vars(part).get(FUSED):
                problems.append(f"{path} has modules that are fused already; call unfuse first")
    return problems


def _wrapped(children: Sequence[str], originals: Sequence[nn.Module], stay: frozenset[int]) -> list[str]:
    """What has been put around modules that are gone, and would no longer be there."""
    problems = []
    for path, module in gone(children, originals, stay):
        if kernel_of(module) is not None:
            problems.append(f"{path} is kernelized; call unkernelize first, and kernelize afterwards")
        if "base_layer" in module._modules:  # noqa: SLF001 - as adapters wrap what they adapt
            problems.append(f"{path} has an adapter; merge or remove it first")
        if "parametrizations" in module._modules:  # noqa: SLF001 - nn.utils.parametrize
            problems.append(f"{path} is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first")
        if is_hidden(module):
            problems.append(f"{path} has a forward of its own on the module; remove it first")
    return problems


def _hooked(children: Sequence[str], originals: Sequence[nn.Module], stay: frozenset[int]) -> list[str]:
    """Hooks of modules that are gone."""
    return [
        f"{path} has hooks, which would not be called; remove them first"
        for path, module in gone(children, originals, stay)
        if any(vars(module).get(name) for name in _HOOKS) or "_hf_hook" in vars(module)
    ]


def _unfit_weights(one: Draft) -> Iterator[tuple[str, str]]:
    """Why weights cannot be stored otherwise, and what to do about it."""
    stay = {id(part) for part in one.layout.modules()} & {id(p) for module in one.originals for p in module.modules()}
    for group in one.steps.groups:
        sources = {name: one.before[name] for name in group.sources}
        if not renames(group):
            if len({tensor.requires_grad for tensor in sources.values()}) > 1:
                mixed = f"of {', '.join(sources)}, some require grad and some do not"
                yield mixed, "Let all weights that become one require grad, or none of them."
            for name, tensor in sources.items():
                if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                    unknown = f"{name} is a {type(tensor).__qualname__}, which converters do not know"
                    yield unknown, "Fuse the model before its weights are wrapped or quantised."
                if any(getattr(tensor, hooks, None) for hooks in _HOOKS_OF_TENSORS):
                    yield f"{name} has hooks, which would not be called; remove them first", _FIRST
        for name in group.targets:
            owner, leaf = _owner(one.layout, name.removeprefix(f"{one.children[0]}."))
            same = owner is not None and any(tensor is getattr(owner, leaf, None) for tensor in sources.values())
            if id(owner) in stay and not (same and renames(group)):
                yield f"{name} would be written into a module that was there before; the layout shall make one", _LAYOUT


def _differences(one: Draft) -> list[str]:
    """How the weights of a layout differ from what is converted for it."""
    cls, first = type(one.layout).__qualname__, one.children[0]
    wanted = {f"{first}.{name}": tensor for name, tensor in state_of(one.layout)}
    given = {name: spec.shape for name, spec in one.steps.targets.items() if spec is not None}
    kept = {name for name in one.steps.kept if name not in wanted}
    found = [f"the conversion_mapping of {cls} says nothing of {name}" for name in kept]
    found += [f"{cls} has {name}, which no converter gives it" for name in wanted.keys() - given.keys()]
    found += [f"a converter gives {name}, which {cls} has not" for name in given.keys() - wanted.keys() - kept]
    for name in wanted.keys() & given.keys():
        if wanted[name].shape != given[name]:
            found.append(f"a converter gives {name} in the shape {given[name]} for {tuple(wanted[name].shape)}")
    if any(tensor.device.type != "meta" for tensor in one.before.values()):
        found += [
            f"{cls} has {first}.{name} on meta, which no state dict has and nothing fills"
            for name, tensor in state_of(one.layout, persistent=False)
            if tensor.device.type == "meta"
        ]
    return sorted(found)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError:
        return None, leaf


def tied(model: nn.Module, drafts: Sequence[Draft]) -> list[str]:
    """Weights that are stored otherwise from now on, and that something else has too."""
    places: dict[int, list[str]] = {}  # of a tensor or a module: by what holds it, however often that is there itself
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for held in (module._parameters, module._buffers, module._modules):  # noqa: SLF001 - every name of each
            for name, what in held.items():
                if what is not None:
                    places.setdefault(id(what), []).append(prefix + name)
    problems = set()
    for one in drafts:
        taken = {name for group in one.steps.groups if not renames(group) for name in group.sources}
        for name in taken:
            for holder in (*_above(name), name):
                what = one.before[name] if holder == name else one.parent.get_submodule(holder)
                if len(names := places.get(id(what), ())) > 1:
                    problems.add(f"{holder} is tied ({', '.join(names)}), and would be stored twice")
    return sorted(problems)


def _above(name: str) -> list[str]:
    """The modules that a tensor lies in, from the child of the parent on."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: count + 1]) for count in range(len(parts))]
