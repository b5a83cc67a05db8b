"""Modules of a model that is there become one, and come apart again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.config import Fusion, KernelConfig
from kernel_loader.fusion.converter import Composition, WeightConverter, compose
from kernel_loader.fusion.hooks import ConvertedModule, loads_converted
from kernel_loader.fusion.layout import derived, find_layout, itself, layer_of
from kernel_loader.fusion.operation import as_bits
from kernel_loader.fusion.operations import Rename
from kernel_loader.fusion.pattern import Site
from kernel_loader.fusion.plan import Group, Plan, plan
from kernel_loader.fusion.state_dict import specs_of
from kernel_loader.layers.device import BACKENDS, kind_of
from kernel_loader.layers.repository import Layer, Repository
from kernel_loader.layers.swap import is_hidden, kernel_of

logger = logging.getLogger("kernel_loader")

_Model = TypeVar("_Model", bound="nn.Module")

# On a parent: first child -> what was fused into it.
FUSED: Final = "_kernel_loader_fused"

_ADVICE: Final = "Nothing was changed. Correct the configuration, the layout or the model."

# Where modules and parameters keep what is called at some time.
_HOOKS: Final = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_HOOKS_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass
class Fused:
    """What was fused into one module, and what brings it back.

    Attributes:
        children: names in the parent; the first is the fused module, the others are nn.Identity.
        originals: the modules that were there.
        conversion: from their weights to those of the fused module, by names in the parent.
        emptied: weights that are gone from `originals`, and come back by conversion, which is exact for them.
        links: buffers that no state dict has -> the same in the fused module, by names in the parent.
        training: the mode of the fused module when it was made.
        hooks: by which the parent speaks the original layout.
    """

    children: tuple[str, ...]
    originals: tuple[nn.Module, ...]
    conversion: Composition
    emptied: frozenset[str]
    links: dict[str, str]
    training: bool
    hooks: ConvertedModule = field(repr=False)


class _Planned(NamedTuple):
    """A fused module that is not in its place yet, and has no weights of its own."""

    parent: nn.Module
    children: tuple[str, ...]
    originals: tuple[nn.Module, ...]
    layout: nn.Module
    conversion: Composition
    before: dict[str, Tensor]
    steps: Plan


def fuse(model: nn.Module | type[nn.Module], config: KernelConfig, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Make modules of a model into kernels' modules, as a configuration says. In place, all or nothing.

    Everything is checked, loaded and planned before the first module is replaced; then weights are converted, one
    place after another. Those that are merely renamed stay the same `nn.Parameter`, so that optimisers and tied weights
    hold; gradients of the others are dropped. `state_dict` and `load_state_dict` go on in the original layout, bit for
    bit where the conversion is exact.

    Args:
        model: a model, or a class of models.
        config: its entries with tuples as keys.
        *args: what the class is constructed with, on the meta device, to find the parents. For a class alone.
        **kwargs: likewise.

    Returns:
        The model; for a class, one derived from it whose instances are fused when they are made.

    Raises:
        FusionError: with all problems; the model is as it was.
        KernelLoaderError: as `load_module`, where a kernel cannot be had; likewise.
    """
    if isinstance(model, type):
        config.sanitize(model, *args, **kwargs)
        return _fused_class(model, config)
    planned, problems = [], list[str]()
    for fusion, sites in zip(config.fusions, config.sanitize(model), strict=True):
        layouts: dict[str, type[nn.Module]] = {}
        for site in sites:
            try:
                if (one := _planned_for(model, fusion, site, layouts)) is not None:
                    planned.append(one)
            except FusionError as error:
                problems += [f"{site.parent or 'the model'}: {problem}" for problem in error.problems]
    problems += _shared(model, planned)
    if problems:
        raise FusionError(tuple(problems), _ADVICE)
    _apply(planned)
    return model


def unfuse(model: _Model) -> _Model:
    """Bring back the modules that `fuse` has replaced, in place, with the weights that the fused ones have now.

    Where a conversion is not exact, and the weights are still those that it gave, the original ones come back.

    Raises:
        FusionError: weights of a fused module are no longer those of its layout; it stays fused.
    """
    # What lies in another fused module was fused after it, and comes back before it.
    while found := [(parent, fused) for _, parent, fused in fused_in(model)]:
        apart = [_Apart.of(parent, fused) for parent, fused in found if not _holds_fused(parent, fused)]
        for one in apart:
            one.take()
    return model


def make_parent_class_for_kernel_fusion(
    parent_cls: type[nn.Module], child_names: Sequence[str], kernel_cls: type[nn.Module]
) -> type[nn.Module]:
    """A class whose modules have several children as one: the first is made of all, the others are nn.Identity.

    Args:
        parent_cls: the class to derive from. Name, module and documentation are its own.
        child_names: of children that its constructor makes.
        kernel_cls: a layout: constructed from the children, with a forward and, where weights differ, a
            `conversion_mapping` whose sources begin with the names of the children.

    Raises:
        FusionError: what was given is not that; when a module is made, that a name is no name of a child.
    """
    names = () if isinstance(child_names, str) else tuple(child_names)
    _refuse(parent_cls, names or child_names, kernel_cls)

    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - of any class
        parent_cls.__init__(self, *args, **kwargs)
        if missing := [name for name in names if self._modules.get(name) is None]:
            there = ", ".join(name for name, _ in self.named_children()) or "none"
            problem = f"{parent_cls.__qualname__} has no child {', '.join(missing)}; there is {there}"
            raise FusionError((problem,), _ADVICE)
        planned = _planned(self, names, names, kernel_cls)
        if problems := _shared(self, [planned]):
            raise FusionError(tuple(problems), _ADVICE)
        _apply([planned])

    return derived(parent_cls, {"__init__": functools.wraps(parent_cls.__init__)(__init__)}, (itself, parent_cls))


def _refuse(parent_cls: object, names: object, kernel_cls: object) -> None:
    problems = [
        f"{what} is {cls!r}, and no nn.Module class"
        for what, cls in (("parent_cls", parent_cls), ("kernel_cls", kernel_cls))
        if not isinstance(cls, type) or not issubclass(cls, nn.Module)
    ]
    if not problems and getattr(kernel_cls, "forward", None) is nn.Module.forward:
        problems.append(f"{getattr(kernel_cls, '__qualname__', kernel_cls)} has no forward")
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        problems.append(f"child_names are {names!r}, and no different names of children")
    if problems:
        raise FusionError(tuple(problems), 'Give (DecoderLayer, ["norm", "mlp"], NormMLPLayout).')


def _fused_class(cls: type[nn.Module], config: KernelConfig) -> type[nn.Module]:
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401, N807 - of any class
        cls.__init__(self, *args, **kwargs)
        fuse(self, config)

    return derived(cls, {"__init__": functools.wraps(cls.__init__)(__init__)}, (itself, cls))


# --- the plan -------------------------------------------------------------------------------------------------------


def _planned_for(model: nn.Module, fusion: Fusion, site: Site, layouts: dict[str, type[nn.Module]]) -> _Planned | None:
    """The fused module for a site; None where the configuration has no kernel for the device that it is on.

    layouts: kind of device -> the class for it, once it was loaded.
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
    return _planned(parent, site.children, [child.name for child in fusion.children], layouts[kind])


def _loaded(repository: Repository, kind: str) -> Layer:
    return repository.load("cpu" if BACKENDS.get(kind) == "cpu" else None)


def _kind(modules: Sequence[nn.Module]) -> str:
    """The kind of device that the first module with tensors is on; of the machine where they are on meta."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type != "meta":
                return kind_of(tensor.device)
    found = torch.accelerator.current_accelerator()
    return kind_of(found) if found is not None and torch.accelerator.is_available() else "cpu"


def _planned(parent: nn.Module, children: Sequence[str], names: Sequence[str], cls: type[nn.Module]) -> _Planned:
    """A module of the layout class, made of children of `parent`, and what their weights become. Changes nothing.

    names: what the layout calls the children.
    """
    originals = tuple(parent.get_submodule(name) for name in children)
    before = {
        f"{child}.{name}": tensor
        for child, module in zip(children, originals, strict=True)
        for name, tensor in _state(module)
    }
    if problems := _done_already(parent, children):
        raise FusionError(tuple(problems), _ADVICE)
    try:
        layout = cls(*originals)
    except Exception as error:  # whatever a constructor raises
        reasons = _wrapped(children, originals, frozenset())
        reasons += [f"{cls.__qualname__} cannot be made of {', '.join(children)} ({type(error).__name__}: {error})"]
        raise FusionError(tuple(reasons), _ADVICE) from error
    mapping = getattr(layout, "conversion_mapping", ())
    conversion = compose([_located(c, dict(zip(names, children, strict=True)), children[0]) for c in mapping])
    stay = frozenset(id(module) for module in layout.modules())
    problems = _wrapped(children, originals, stay) + _hooked(children, originals, stay)
    if problems:
        raise FusionError(tuple(problems), _ADVICE)
    steps = plan(specs_of(before), conversion)
    planned = _Planned(parent, tuple(children), originals, layout, conversion, before, steps)
    if problems := [*_unfit_weights(planned), *_differences(planned)]:
        raise FusionError(tuple(problems), _ADVICE)
    return planned


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


def _state(module: nn.Module, *, persistent: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a state dict has, under all their names; or the buffers that it has not."""
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if persistent:
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                yield prefix + name, parameter
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if persistent is (name not in part._non_persistent_buffers_set):  # noqa: SLF001 - nothing else tells
                yield prefix + name, buffer


def _gone(
    children: Sequence[str], originals: Sequence[nn.Module], stay: frozenset[int]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are not part of the fused one, with their paths in the parent."""
    for child, original in zip(children, originals, strict=True):
        yield from ((path, part) for path, part in original.named_modules(prefix=child) if id(part) not in stay)


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
    for path, module in _gone(children, originals, stay):
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
        for path, module in _gone(children, originals, stay)
        if any(vars(module).get(name) for name in _HOOKS) or "_hf_hook" in vars(module)
    ]


def _renames(group: Group) -> bool:
    """Whether tensors stay what they are."""
    return all(isinstance(operation, Rename) for converter in group.converters for operation in converter.operations)


def _unfit_weights(one: _Planned) -> Iterator[str]:
    """Why weights cannot be stored otherwise."""
    stay = {id(part) for part in one.layout.modules()} & {id(p) for module in one.originals for p in module.modules()}
    for group in one.steps.groups:
        sources = {name: one.before[name] for name in group.sources}
        if not _renames(group):
            if len({tensor.requires_grad for tensor in sources.values()}) > 1:
                yield f"of {', '.join(sources)}, some require grad and some do not"
            for name, tensor in sources.items():
                if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
                    yield f"{name} is a {type(tensor).__qualname__}, which converters do not know"
                if any(getattr(tensor, hooks, None) for hooks in _HOOKS_OF_TENSORS):
                    yield f"{name} has hooks, which would not be called; remove them first"
        for name in group.targets:
            owner, leaf = _owner(one.layout, name.removeprefix(f"{one.children[0]}."))
            same = owner is not None and any(tensor is getattr(owner, leaf, None) for tensor in sources.values())
            if id(owner) in stay and not (same and _renames(group)):
                yield f"{name} would be written into a module that was there before; the layout shall make one"


def _differences(one: _Planned) -> list[str]:
    """How the weights of a layout differ from what is converted for it."""
    cls, first = type(one.layout).__qualname__, one.children[0]
    wanted = {f"{first}.{name}": tensor for name, tensor in _state(one.layout)}
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
            for name, tensor in _state(one.layout, persistent=False)
            if tensor.device.type == "meta"
        ]
    return sorted(found)


def _owner(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, leaf = name.rpartition(".")
    try:
        return module.get_submodule(path), leaf
    except AttributeError:
        return None, leaf


def _shared(model: nn.Module, planned: Sequence[_Planned]) -> list[str]:
    """Weights that are stored otherwise from now on, and that something else has too."""
    places: dict[int, list[str]] = {}  # of a tensor or a module: by what holds it, however often that is there itself
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for held in (module._parameters, module._buffers, module._modules):  # noqa: SLF001 - every name of each
            for name, what in held.items():
                if what is not None:
                    places.setdefault(id(what), []).append(prefix + name)
    problems = set()
    for one in planned:
        taken = {name for group in one.steps.groups if not _renames(group) for name in group.sources}
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


# --- the change -----------------------------------------------------------------------------------------------------


def _apply(planned: Sequence[_Planned]) -> None:
    orders = {id(one.parent): _original_names(one.parent) for one in planned}
    done: list[tuple[_Planned, Fused]] = []
    try:
        for one in planned:
            done.append((one, _put_in_place(one, orders[id(one.parent)])))  # noqa: PERF401 - what is done, on an error
    except BaseException:
        for one, fused in reversed(done):
            _Apart.of(one.parent, fused).take()
        raise
    for one, fused in done:
        for name in fused.emptied:
            one.before[name].grad = None  # it would be that of other weights when these come back


def _put_in_place(one: _Planned, order: tuple[str, ...]) -> Fused:
    parent, first = one.parent, one.children[0]
    emptied: set[str] = set()
    made: dict[str, Tensor] = {name: one.before[name] for name in one.steps.kept}
    for group in one.steps.groups:
        made |= group.run(one.before) if _renames(group) else _converted(group, one.before)
        if not _renames(group) and all(converter.exact for converter in group.converters):
            emptied |= {*group.sources}
    for name, tensor in made.items():
        _put(one.layout, name.removeprefix(f"{first}."), tensor)
    kept = {id(part) for module in one.originals for part in module.modules()}
    for part in one.layout.modules():
        if id(part) not in kept:
            part.training = one.originals[0].training
    for name, module in zip(one.children, one.originals, strict=True):
        parent._modules[name] = one.layout if name == first else nn.Identity().train(module.training)  # noqa: SLF001
    try:
        hooks = loads_converted(parent, one.conversion, order=order)
    except BaseException:
        parent._modules.update(zip(one.children, one.originals, strict=True))  # noqa: SLF001
        raise
    fused = Fused(
        one.children, one.originals, one.conversion, frozenset(emptied), _links(one), one.layout.training, hooks
    )
    for name in emptied:
        one.before[name].data = one.before[name].data.new_empty(0)
    vars(parent).setdefault(FUSED, {})[first] = fused
    return fused


def _converted(group: Group, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """The targets of a group, as parameters where the sources are some."""
    sources = [before[name] for name in group.sources]
    made = group.run(before)
    if not any(isinstance(tensor, nn.Parameter) for tensor in sources):
        return made
    learns = sources[0].requires_grad
    return {
        name: nn.Parameter(tensor, requires_grad=learns and tensor.is_floating_point()) for name, tensor in made.items()
    }


def _links(one: _Planned) -> dict[str, str]:
    """Buffers that no state dict has, and that the fused module has too."""
    ours = {id(buffer): f"{one.children[0]}.{name}" for name, buffer in _state(one.layout, persistent=False)}
    return {
        f"{child}.{name}": ours[id(buffer)]
        for child, module in zip(one.children, one.originals, strict=True)
        for name, buffer in _state(module, persistent=False)
        if id(buffer) in ours
    }


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    held = owner._parameters if leaf in owner._parameters else owner._buffers  # noqa: SLF001
    held[leaf] = tensor  # type: ignore[assignment]


def _original_names(parent: nn.Module) -> tuple[str, ...]:
    """The keys of its state dict, in order; without the cost of converting, where nothing is fused yet."""
    fused = any(FUSED in vars(module) for module in parent.modules())
    return tuple(parent.state_dict()) if fused else tuple(name for name, _ in _state(parent))


def fused_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, Fused]]:
    """All that was fused in a model, with the parents and their paths."""
    for path, parent in model.named_modules():
        for fused in vars(parent).get(FUSED, {}).values():
            yield path, parent, fused


def _holds_fused(parent: nn.Module, fused: Fused) -> bool:
    return any(True for _ in fused_in(parent.get_submodule(fused.children[0])))


# --- and back -------------------------------------------------------------------------------------------------------


class _Apart(NamedTuple):
    """How a fused module comes apart."""

    parent: nn.Module
    fused: Fused
    layout: nn.Module
    steps: Plan

    @classmethod
    def of(cls, parent: nn.Module, fused: Fused) -> _Apart:
        layout = parent.get_submodule(fused.children[0])
        now = {f"{fused.children[0]}.{name}": tensor for name, tensor in _state(layout)}
        steps = plan(specs_of(now), fused.conversion.inverse())
        held = {
            f"{child}.{name}"
            for child, module in zip(fused.children, fused.originals, strict=True)
            for name, _ in _state(module)
        }
        if more := [name for name in steps.targets if name not in held]:
            problem = f"the fused module has {', '.join(more)}, which the modules that it was made of have not"
            raise FusionError((problem,), "Remove or merge it first; the module stays fused.")
        return cls(parent, fused, layout, steps)

    def take(self) -> None:
        """Bring back the original modules."""
        fused, first = self.fused, self.fused.children[0]
        now = {f"{first}.{name}": tensor for name, tensor in _state(self.layout)}
        held = {
            f"{child}.{name}": (module, name, tensor)
            for child, module in zip(fused.children, fused.originals, strict=True)
            for name, tensor in _state(module)
        }
        same: dict[str, Tensor] = {name: now[name] for name in self.steps.kept}
        for group in self.steps.groups:
            if _renames(group):
                same |= group.run(now)
            elif any(name in fused.emptied for name in group.targets) or not self._as_it_was(group, now, held):
                learns = any(now[name].requires_grad for name in group.sources)
                for name, value in group.run(now).items():
                    _refill(*held[name], value, learns=learns)
        for name, value in same.items():
            if held[name][2] is not value:
                _put(*held[name][:2], value)
        fused.hooks.remove()
        self._follow()
        self.parent._modules.update(zip(fused.children, fused.originals, strict=True))  # noqa: SLF001
        left = vars(self.parent)[FUSED]
        del left[first]
        if not left:
            del vars(self.parent)[FUSED]

    def _as_it_was(self, group: Group, now: dict[str, Tensor], held: dict[str, tuple[nn.Module, str, Tensor]]) -> bool:
        """Whether weights are still what a conversion that is not exact has made of the original ones."""
        there = {name: held[name][2] for name in group.targets}
        again = plan(specs_of(there), _without_missing(self.fused.conversion)).groups
        made = {name: tensor for one in again for name, tensor in one.run(there).items()}
        return made.keys() == {*group.sources} and all(_equal(made[name], now[name]) for name in made)

    def _follow(self) -> None:
        """The mode and device of the fused module, for what was not part of it; buffers that it has too."""
        names = dict(_state(self.layout, persistent=False))
        stay = frozenset(id(part) for part in self.layout.modules())
        device = next((tensor.device for tensor in (*self.layout.parameters(), *self.layout.buffers())), None)
        for child, module in zip(self.fused.children, self.fused.originals, strict=True):
            for name, buffer in list(_state(module, persistent=False)):
                link = self.fused.links.get(f"{child}.{name}", "").partition(".")[2]
                if link in names:
                    _put(module, name, names[link])
                elif device is not None and buffer.device != device:
                    _put(module, name, buffer.to(device))
            for name, tensor in list(_state(module)):
                if device is not None and tensor.device != device:
                    _refill(module, name, tensor, tensor.detach().to(device), learns=tensor.requires_grad)
        for _, part in _gone(self.fused.children, self.fused.originals, stay):
            if self.layout.training != self.fused.training:
                part.training = self.layout.training


def _without_missing(conversion: Composition) -> Composition:
    """The same for some of the weights: converters may match nothing."""
    return Composition(
        tuple(
            tuple(WeightConverter(c.sources, c.targets, c.operations, optional=True) for c in stage)
            for stage in conversion.stages
        )
    )


def _equal(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and not one.is_meta
        and not other.is_meta
        and torch.equal(as_bits(one.detach()), as_bits(other.detach().to(one.device)))
    )


def _refill(module: nn.Module, name: str, tensor: Tensor, value: Tensor, *, learns: bool) -> None:
    """Give a tensor of a module another value, and the module another tensor where torch does not take that."""
    is_parameter = isinstance(tensor, nn.Parameter)
    try:
        tensor.data = value
    except RuntimeError:  # on another kind of device
        _put(module, name, nn.Parameter(value, requires_grad=learns) if is_parameter else value)
        return
    if is_parameter:
        tensor.requires_grad_(learns)
