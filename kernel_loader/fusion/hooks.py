"""A fused module that is loaded from, and saved in, the layout of the modules that it was made of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.converter import Composition, Converters, compose
from kernel_loader.fusion.operation import TensorSpec
from kernel_loader.fusion.plan import Group, Plan, plan
from kernel_loader.fusion.state_dict import specs_of


class _Incompatible(Protocol):
    """What torch hands to a hook after loading: lists that it may change."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class _Removable(Protocol):
    def remove(self) -> None: ...


class _Absent(NamedTuple):
    """A group that could not be loaded: the names that torch will miss, and what to report instead."""

    targets: tuple[str, ...]
    report: tuple[str, ...]


def loads_converted(
    module: nn.Module, converters: Converters, prefix: str = "", *, order: Sequence[str] = ()
) -> ConvertedModule:
    """Make a module speak the original layout in `load_state_dict` and `state_dict`, its own and its parents'.

    Loading takes the original names or those of the module, group by group; where both are called the same, it takes
    tensors for converted only if their shapes and dtypes fit nothing else. Of a group that is there in part, the rest
    stays as it is, if its conversion is exact; otherwise all of it does. Missing and unexpected keys, and shapes that
    differ, are reported in original names. `state_dict` gives the original layout. What is converted is a copy there:
    it does not change with the parameters, and does not require grad whatever `keep_vars` says.

    Args:
        module: with parameters and buffers in the layout that converters lead to.
        converters: from the original layout to that.
        prefix: what the names in the converters have before those of the module, with its dot: "model.layers.0.mlp.".
        order: original names (with `prefix`), in the order in which `state_dict` shall give them.

    Returns:
        What takes this back: `remove()`.

    Raises:
        FusionError: the module's weights are not what the converters lead to, or are converted already.
    """
    converted = ConvertedModule(compose(converters), prefix, tuple(order))
    names = converted.names_in(module)
    others = {name for one in _conversions_of(module) for name in one.names_in(module)}
    if twice := [name for name in names if name in others]:
        problem = f"{', '.join(twice)} of {type(module).__qualname__} is converted already"
        raise FusionError((problem,), "Take that back first, by remove() of what `loads_converted` has returned.")
    converted.hook_to(module)
    return converted


class ConvertedModule:
    """The hooks of one module. They hold no module, so that a copy of one converts for itself."""

    def __init__(self, converters: Composition, prefix: str, order: tuple[str, ...]) -> None:
        self._converters, self._prefix, self._order = converters, prefix, order
        self._absent: list[_Absent] = []
        self._handles: list[_Removable] = []

    def hook_to(self, module: nn.Module) -> None:
        """Register the hooks."""
        self._handles = [
            module.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(self._after_load),  # type: ignore[no-untyped-call]
            # torch sets an attribute on it, which a method does not take.
            module.register_state_dict_post_hook(partial(self._after_save)),  # type: ignore[no-untyped-call]
        ]

    def remove(self) -> None:
        """Let the module speak its own layout again."""
        while self._handles:
            self._handles.pop().remove()

    def names_in(self, module: nn.Module) -> tuple[str, ...]:
        """What is converted, by names in either layout of a module."""
        groups = self._plans(module)[2].groups
        return self._local([name for group in groups for name in dict.fromkeys((*group.targets, *group.sources))], "")

    def _plans(self, module: nn.Module) -> tuple[dict[str, Any], Plan, Plan]:
        """What a module has, the way from that to the original layout, and the way there."""
        own: dict[str, Any] = OrderedDict()
        # Not `module.state_dict`, which would come back here; this is the part of it that modules may override.
        module._save_to_state_dict(own, "", keep_vars=False)  # noqa: SLF001
        for name, child in module._modules.items():  # noqa: SLF001 - named_children leaves out what is there twice
            if child is not None:
                child.state_dict(destination=own, prefix=f"{name}.")
        own = {self._prefix + name: value for name, value in own.items()}
        back = plan(specs_of(own), self._converters.inverse())
        return own, back, plan(back.targets, self._converters)

    def _before_load(
        self,
        module: nn.Module,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],  # noqa: ARG002 - torch's signature, here and below
        strict: bool,  # noqa: ARG002, FBT001
        missing_keys: list[str],  # noqa: ARG002
        unexpected_keys: list[str],  # noqa: ARG002
        error_msgs: list[str],
    ) -> None:
        own, back, steps = self._plans(module)
        found = {self._prefix + key[len(prefix) :]: state_dict[key] for key in state_dict if key.startswith(prefix)}
        self._absent = []
        made: dict[str, Tensor] = {}
        for group in steps.groups:
            if _is_converted(group, steps, found):
                continue
            there = {name: _fitting(found[name], steps.sources[name]) for name in group.sources if name in found}
            for key in self._local(tuple(there), prefix):
                del state_dict[key]
            missing = tuple(name for name in group.sources if name not in there)
            wrong = [
                text
                for (name, tensor), key in zip(there.items(), self._local(tuple(there), prefix), strict=True)
                if (text := _misfit(key, tensor, steps.sources[name]))
            ]
            error_msgs += wrong
            if missing and there and not wrong and all(converter.exact for converter in group.converters):
                # What is not there stays as it is, and is missing all the same.
                original = next(one for one in back.groups if {*missing} <= {*one.targets}).run(own)
                device = next(iter(there.values())).device
                there |= {name: original[name].to(device) for name in missing}
                self._absent.append(_Absent((), self._local(missing, prefix)))
            elif missing or wrong:
                self._absent.append(_Absent(self._local(group.targets, prefix), self._local(missing, prefix)))
                continue
            try:
                made |= group.run(there)
            except FusionError as error:
                error_msgs.append(str(error))
                self._absent.append(_Absent(self._local(group.targets, prefix), ()))
        state_dict |= {self._local([name], prefix)[0]: tensor for name, tensor in made.items()}

    def _after_load(self, module: nn.Module, incompatible: _Incompatible) -> None:  # noqa: ARG002
        for targets, report in self._absent:
            kept = [key for key in incompatible.missing_keys if key not in targets]
            incompatible.missing_keys[:] = [*kept, *report]
        self._absent = []

    def _after_save(
        self,
        module: nn.Module,  # noqa: ARG002
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],  # noqa: ARG002
    ) -> None:
        own = {self._prefix + key[len(prefix) :]: state_dict[key] for key in state_dict if key.startswith(prefix)}
        steps = plan(specs_of(own), self._converters.inverse())
        original: dict[str, Any] = {name: own[name] for name in steps.kept}
        for group in steps.groups:
            original |= group.run(own)
        for name in own:
            del state_dict[self._local([name], prefix)[0]]
        names = self._order if set(self._order) == original.keys() else tuple(steps.targets)
        state_dict |= {self._local([name], prefix)[0]: original[name] for name in names}

    def _local(self, names: Sequence[str], prefix: str) -> tuple[str, ...]:
        """Names in the converters as those of a state dict in which the module has a prefix."""
        return tuple(prefix + name.removeprefix(self._prefix) for name in names)


def _conversions_of(module: nn.Module) -> list[ConvertedModule]:
    """Those that a module has: its own hooks tell, which copies have and `remove` takes away."""
    owners = (getattr(hook, "__self__", None) for hook in module._load_state_dict_post_hooks.values())  # noqa: SLF001
    return [owner for owner in owners if isinstance(owner, ConvertedModule)]


def _is_converted(group: Group, steps: Plan, found: Mapping[str, Any]) -> bool:
    """Whether a state dict has a group as the module has it."""
    if any(name not in found for name in group.targets):
        return False
    if any(name not in found for name in group.sources):
        return not any(name in found for name in group.sources if name not in group.targets)
    specs = specs_of(found)
    as_source = all(specs[name] == steps.sources[name] for name in group.sources)
    return not as_source and all(specs[name] == steps.targets[name] for name in group.targets)


def _fitting(tensor: object, expected: TensorSpec | None) -> Any:  # noqa: ANN401 - as the state dict has it
    """In the dtype that it would be copied to, so that tensors of one group have one."""
    if isinstance(tensor, Tensor) and expected is not None and tensor.dtype != expected.dtype:
        return tensor.to(expected.dtype)
    return tensor


def _misfit(key: str, tensor: object, expected: TensorSpec | None) -> str:
    """What torch would say of a shape that differs; empty where it does not."""
    if not isinstance(tensor, Tensor):
        return f"{key} is to be converted, and is no tensor."
    if expected is None or tuple(tensor.shape) == expected.shape:
        return ""
    return (
        f"size mismatch for {key}: copying a param with shape {tuple(tensor.shape)} from checkpoint, "
        f"the shape in current model is {expected.shape}."
    )
