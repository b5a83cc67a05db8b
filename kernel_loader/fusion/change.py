"""Modules give way to a fused one, and come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import Composition, WeightConverter
from kernel_loader.fusion.draft import Draft
from kernel_loader.fusion.fused import FUSED, Fused, gone, put, renames, state_of
from kernel_loader.fusion.hooks import loads_converted
from kernel_loader.fusion.operation import as_bits
from kernel_loader.fusion.plan import Group, Plan, plan
from kernel_loader.fusion.state_dict import specs_of


def apply(drafts: Sequence[Draft]) -> None:
    """Put fused modules in their places: all of them, or none on an error."""
    orders = {id(one.parent): _original_names(one.parent) for one in drafts}
    done: list[tuple[Draft, Fused]] = []
    try:
        for one in drafts:
            done.append((one, _put_in_place(one, orders[id(one.parent)])))  # noqa: PERF401 - what is done, on an error
    except BaseException:
        for one, fused in reversed(done):
            Apart.of(one.parent, fused).take()
        raise
    for one, fused in done:
        for name in fused.emptied:
            one.before[name].grad = None  # it would be that of other weights when these come back


def _put_in_place(one: Draft, order: tuple[str, ...]) -> Fused:
    parent, first = one.parent, one.children[0]
    emptied: set[str] = set()
    made: dict[str, Tensor] = {name: one.before[name] for name in one.steps.kept}
    for group in one.steps.groups:
        made |= group.run(one.before) if renames(group) else _converted(group, one.before)
        if not renames(group) and all(converter.exact for converter in group.converters):
            emptied |= {*group.sources}
    for name, tensor in made.items():
        put(one.layout, name.removeprefix(f"{first}."), tensor)
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


def _links(one: Draft) -> dict[str, str]:
    """Buffers that no state dict has, and that the fused module has too."""
    ours = {id(buffer): f"{one.children[0]}.{name}" for name, buffer in state_of(one.layout, persistent=False)}
    return {
        f"{child}.{name}": ours[id(buffer)]
        for child, module in zip(one.children, one.originals, strict=True)
        for name, buffer in state_of(module, persistent=False)
        if id(buffer) in ours
    }


def _original_names(parent: nn.Module) -> tuple[str, ...]:
    """The keys of its state dict, in order; without the cost of converting, where nothing is fused yet."""
    fused = any(FUSED in vars(module) for module in parent.modules())
    return tuple(parent.state_dict()) if fused else tuple(name for name, _ in state_of(parent))


class Apart(NamedTuple):
    """How a fused module comes apart."""

    parent: nn.Module
    fused: Fused
    layout: nn.Module
    steps: Plan

    @classmethod
    def of(cls, parent: nn.Module, fused: Fused) -> Apart:
        """For what was fused into a module of `parent`.

        Raises:
            FusionError: it has weights now that the modules it was made of have not.
        """
        layout = parent.get_submodule(fused.children[0])
        now = {f"{fused.children[0]}.{name}": tensor for name, tensor in state_of(layout)}
        steps = plan(specs_of(now), fused.conversion.inverse())
        held = {
            f"{child}.{name}"
            for child, module in zip(fused.children, fused.originals, strict=True)
            for name, _ in state_of(module)
        }
        if more := [name for name in steps.targets if name not in held]:
            problem = f"the fused module has {', '.join(more)}, which the modules that it was made of have not"
            raise FusionError((problem,), "Remove or merge it first; the module stays fused.")
        return cls(parent, fused, layout, steps)

    def take(self) -> None:
        """Bring back the original modules."""
        fused, first = self.fused, self.fused.children[0]
        now = {f"{first}.{name}": tensor for name, tensor in state_of(self.layout)}
        held = {
            f"{child}.{name}": (module, name, tensor)
            for child, module in zip(fused.children, fused.originals, strict=True)
            for name, tensor in state_of(module)
        }
        same: dict[str, Tensor] = {name: now[name] for name in self.steps.kept}
        for group in self.steps.groups:
            if renames(group):
                same |= group.run(now)
            elif any(name in fused.emptied for name in group.targets) or not self._as_it_was(group, now, held):
                learns = any(now[name].requires_grad for name in group.sources)
                for name, value in group.run(now).items():
                    _refill(*held[name], value, learns=learns)
        for name, value in same.items():
            if held[name][2] is not value:
                put(*held[name][:2], value)
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
        names = dict(state_of(self.layout, persistent=False))
        stay = frozenset(id(part) for part in self.layout.modules())
        device = next((tensor.device for tensor in (*self.layout.parameters(), *self.layout.buffers())), None)
        for child, module in zip(self.fused.children, self.fused.originals, strict=True):
            for name, buffer in list(state_of(module, persistent=False)):
                link = self.fused.links.get(f"{child}.{name}", "").partition(".")[2]
                if link in names:
                    put(module, name, names[link])
                elif device is not None and buffer.device != device:
                    put(module, name, buffer.to(device))
            for name, tensor in list(state_of(module)):
                if device is not None and tensor.device != device:
                    _refill(module, name, tensor, tensor.detach().to(device), learns=tensor.requires_grad)
        for _, part in gone(self.fused.children, self.fused.originals, stay):
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
        put(module, name, nn.Parameter(value, requires_grad=learns) if is_parameter else value)
        return
    if is_parameter:
        tensor.requires_grad_(learns)
