"""Modules of a model that is there become one, and come apart again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeVar

from torch import nn

from kernel_loader.errors import FusionError
from kernel_loader.fusion.change import Apart, apply
from kernel_loader.fusion.config import KernelConfig, need_model, refusal
from kernel_loader.fusion.draft import draft_of, layout_for, tied
from kernel_loader.fusion.fused import fused_in, holds_fused
from kernel_loader.fusion.layout import derived, itself
from kernel_loader.fusion.pattern import Site, selecting, shown

_Model = TypeVar("_Model", bound="nn.Module")

_TIED: Final = "Untie them, or fuse without the entry for them."


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
        The model; for a class, one derived from it whose instances are fused when they are made. Its `from_pretrained`
        is refused: that of the class which was given loads a model, which is fused then.

    Raises:
        FusionError: with all problems; the model is as it was.
        KernelLoaderError: as `load_module`, where a kernel cannot be had; likewise.
    """
    need_model(model, args or kwargs)
    if not isinstance(config, KernelConfig):
        raise FusionError((f"config is a KernelConfig, and {shown(config)} was given",), "Pass KernelConfig({...}).")
    if isinstance(model, type):
        config.sanitize(model, *args, **kwargs)
        return _fused_class(model, config)
    drafts, problems, others = [], dict[str, str](), list[str]()
    for sites, fusion in zip(config.sanitize(model), config.fusions, strict=True):
        layouts, names = dict[str, type[nn.Module]](), [child.name for child in fusion.children]
        fit, before = list[Site](), len(problems)
        for site in sites:
            if (layout := layout_for(model, fusion, site, layouts)) is None:
                continue
            try:
                drafts.append(draft_of(model.get_submodule(site.parent), site.children, names, layout))
                fit.append(site)
            except FusionError as error:
                where = site.parent or "the model"
                problems |= {f"{where}: {problem}": error.advice for problem in error.problems}
        if fit and len(problems) > before:
            others.append(f"To fuse {fusion} only where it fits, {selecting(fit)}.")
    problems |= dict.fromkeys(tied(model, drafts), _TIED)
    if problems:
        raise refusal(problems, "Nothing was changed.", *others)
    apply(drafts)
    return model


def unfuse(model: _Model) -> _Model:
    """Bring back the modules that `fuse` has replaced, in place, with the weights that the fused ones have now.

    Where a conversion is not exact, and the weights are still those that it gave, the original ones come back.

    Raises:
        FusionError: weights of a fused module are no longer those of its layout; it stays fused. Or it is no model.
    """
    given: object = model
    if not isinstance(given, nn.Module):
        raise FusionError(
            (f"the model is an nn.Module, and {shown(given)} was given",), "Pass the model that was fused."
        )
    # What lies in another fused module was fused after it, and comes back before it.
    while found := [(parent, fused) for _, parent, fused in fused_in(model)]:
        apart = [Apart.of(parent, fused) for parent, fused in found if not holds_fused(parent, fused)]
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
            raise FusionError((problem,), "Name children that its constructor makes.")
        draft = draft_of(self, names, names, kernel_cls)
        if problems := tied(self, [draft]):
            raise FusionError(tuple(problems), _TIED)
        apply([draft])

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

    body: dict[str, Any] = {"__init__": functools.wraps(cls.__init__)(__init__)}
    if hasattr(cls, "from_pretrained"):
        body["from_pretrained"] = classmethod(_from_pretrained)
    return derived(cls, body, (itself, cls))


def _from_pretrained(cls: type[nn.Module], /, *_: object, **__: object) -> NoReturn:
    name = cls.__qualname__
    problem = f"from_pretrained fills modules that are not there in {name} as `fuse` has made it"
    advice = (
        f"Load with the {name} that was given to `fuse`, and fuse the model: fuse({name}.from_pretrained(...), config)."
    )
    raise FusionError((problem,), advice)
