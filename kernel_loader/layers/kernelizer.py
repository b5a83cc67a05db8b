"""kernelize: layers of a model get the forward of kernels. Planned and loaded first, then changed all at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from kernel_loader.errors import KernelizeError, KernelLoaderError, RequestError
from kernel_loader.layers.decorator import Name, functions_of, names_of
from kernel_loader.layers.device import BACKENDS, Device, capability_of, kind_of
from kernel_loader.layers.fit import faults, unsupported
from kernel_loader.layers.mapping import Found, KernelMapping, Missing, current_mapping
from kernel_loader.layers.mode import KernelizeFallback, Mode
from kernel_loader.layers.repository import Layer, Repository
from kernel_loader.layers.swap import Answer, Kernel, Outcome, base_of, give, kernel_of, swapped
from kernel_loader.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("kernel_loader")

_Model = TypeVar("_Model", bound="nn.Module")

# Why a layer that has a name keeps its forward, on the module itself: the class of such a module is not touched.
REASON: Final = "_kernel_loader_reason"


class Place(NamedTuple):
    """Where a module computes: a kind of device, and which one; None for the current one."""

    kind: str
    ordinal: int | None


class Target(NamedTuple):
    """A module that has a name in mappings."""

    path: str
    module: nn.Module
    place: Place | None


class Step(NamedTuple):
    """What is done with one module: its new class is made of `kernel`; None gives it its own class back."""

    target: Target
    answer: Answer
    kernel: Kernel | None


def kernelize(
    model: _Model,
    *,
    mode: Mode,
    device: str | torch.device | None = None,
    use_fallback: bool | KernelizeFallback = True,
    strict: bool = False,
    follow_mode: bool = False,
) -> _Model:
    """Give the layers of a model the forward of kernels, in place. Doing it again, for another mode too, is fine.

    Layers are those whose class `use_kernel_forward_from_hub` or `replace_kernel_forward_from_hub` has named, and the
    functions of `use_kernelized_func`. Which kernel a layer takes, the mapping says (`register_kernel_mapping`). All
    kernels are loaded and held against the layers before the first is replaced.

    Args:
        model: any module; wrappers (DistributedDataParallel, torch.compile) are looked into.
        mode: Mode.INFERENCE or Mode.TRAINING, with `| Mode.TORCH_COMPILE` inside torch.compile.
        device: kind of device ("cuda") for all layers. By default each layer's own: that of its parameters, or of those
            beside it.
        use_fallback: True lets a layer keep its forward whatever the reason, a failure of loading included; False
            raises; or the cases in which it may.
        strict: raise when not a single layer was replaced, which otherwise is a warning.
        follow_mode: layers change over when `model.train()` or `model.eval()` is called; both kinds are loaded now.

    Returns:
        The model. `kernelize_report` tells what became of each layer.

    Raises:
        RequestError: layers are not kernelized for that mode, or there is no such device.
        KernelizeError: a layer has no kernel and may not keep its forward; the model is as it was.
        KernelLoaderError: as `load_module`, where a failure of loading is not covered.
    """
    _refuse(mode)
    allowed = KernelizeFallback.ALL if use_fallback is True else use_fallback or KernelizeFallback.NONE
    planner = _Planner(current_mapping(), allowed)
    plan = []
    for target in _targets(model, _given(device)):
        answer = planner.answer(target, mode)
        modes = _both(mode) if follow_mode else ()
        plan.append(Step(target, answer, _kernel(target, answer, [planner.answer(target, other) for other in modes])))
    if all(step.kernel is None for step in plan):
        _nothing(plan, strict=strict)
    _apply(plan)
    CALLERS.joined(model)
    planner.tell()
    return model


def unkernelize(model: _Model) -> _Model:
    """Give all layers of a model, and the functions that it calls, their own forward back, exactly.

    A function stays replaced as long as another model was kernelized with it.
    """
    for module in model.modules():
        _restore(module)
        for function in functions_of(module):
            if CALLERS.left(function, module):
                _restore(function)
    return model


# --- the plan -----------------------------------------------------------------------------------------------------


def _refuse(mode: object) -> None:
    if not isinstance(mode, Mode):
        raise RequestError(f"mode={mode!r} was given", "Pass Mode.INFERENCE or Mode.TRAINING.")
    _ = mode.tried  # raises for modes that are for mappings alone


def _both(mode: Mode) -> tuple[Mode, Mode]:
    compiled = mode & Mode.TORCH_COMPILE
    return (Mode.TRAINING | compiled, Mode.INFERENCE | compiled) if compiled else (Mode.TRAINING, Mode.INFERENCE)


class _Planner:
    """Answers for each class and device once, whatever the number of modules."""

    def __init__(self, mapping: KernelMapping, allowed: KernelizeFallback) -> None:
        self._mapping: Final = mapping
        self._allowed: Final = allowed
        self._disabled: Final = Settings.from_env().disable_mapping
        self._answers: Final[dict[object, Answer]] = {}
        self._layers: Final[dict[tuple[Repository, str | None], Layer | KernelLoaderError]] = {}

    def answer(self, target: Target, mode: Mode) -> Answer:
        cls = base_of(target.module)
        named = names_of(cls)
        if named.overridden:
            return _kept(_first(cls), "overridden", f"{cls.__qualname__} has a forward of its own", mode)
        names = [name for name in named.names if name.condition is None or name.condition(target.module)]
        if not names:
            return _kept(named.names[0].name, "condition", "its condition refuses this module", mode)
        if (obstacle := _obstacle(target.module)) is not None:
            return self._fallback(Missing(*obstacle, KernelizeFallback.CANNOT_LOAD), names[0].name, cls, mode)
        key = (cls, tuple(name.name for name in names), target.place, mode)
        if key not in self._answers:
            self._answers[key] = self._choose(cls, names, target.place, mode)
        return self._answers[key]

    def _choose(self, cls: type[nn.Module], names: list[Name], place: Place | None, mode: Mode) -> Answer:
        first = names[0].name
        if self._disabled:
            return _kept(first, "disabled", "KERNEL_LOADER_DISABLE_MAPPING is set", mode)
        if place is None or place.kind == "meta":
            message = "nothing tells on which device it computes; pass device= to kernelize"
            return self._fallback(Missing("no-device", message, KernelizeFallback.NO_DEVICE), first, cls, mode)
        capability = capability_of(*place)
        found = [(n.name, self._mapping.select(n.name, place.kind, capability, mode)) for n in names]
        name, choice = next(((n, f) for n, f in found if isinstance(f, Found)), found[0])
        if isinstance(choice, Missing):
            return self._fallback(choice, name, cls, mode)
        return self._load(cls, name, choice, place, mode)

    def _load(self, cls: type[nn.Module], name: str, found: Found, place: Place, mode: Mode) -> Answer:
        backend = BACKENDS.get(place.kind)
        key = (found.repository, "cpu" if backend == "cpu" else None)
        if key not in self._layers:
            try:
                self._layers[key] = key[0].load(key[1])
            except KernelLoaderError as error:
                self._layers[key] = error
        layer = self._layers[key]
        if isinstance(layer, KernelLoaderError):
            if KernelizeFallback.CANNOT_LOAD not in self._allowed:
                raise layer
            logger.warning("layer %s keeps its own forward. %s", name, layer)
            return _kept(name, "cannot-load", str(layer), mode)
        if missing := unsupported(layer.cls, found.mode | mode if found.mode is not Mode.FALLBACK else mode):
            message = f"{found.repository} is not for {mode}: {missing}"
            return self._fallback(Missing("no-mode", message, KernelizeFallback.NO_COMPATIBLE_MODE), name, cls, mode)
        if problems := faults(layer.cls, cls):
            message = f"{found.repository} does not fit {cls.__qualname__}: {'; '.join(problems)}"
            logger.warning("layer %s keeps its own forward: %s", name, message)
            return self._fallback(Missing("misfit", message, KernelizeFallback.CANNOT_LOAD), name, cls, mode)
        message = f"{layer.origin.where}, {layer.origin.variant}"
        outcome = Outcome(name, True, "used", message, mode, found.repository, key[1], layer.origin)  # noqa: FBT003
        return Answer(outcome, layer.cls)

    def _fallback(self, missing: Missing, name: str, cls: type[nn.Module], mode: Mode) -> Answer:
        if missing.allowed_by not in self._allowed:
            advice = "Add it to the mapping (register_kernel_mapping), or let layers keep their forward (use_fallback)."
            raise KernelizeError(f"{name} ({cls.__qualname__})", missing.code, missing.message, advice)
        return _kept(name, missing.code, missing.message, mode)

    def tell(self) -> None:
        """One line for each kernel that is used."""
        outcomes = {answer.outcome for answer in self._answers.values() if answer.outcome.used}
        for line in sorted(f"layer {o.layer} takes {o.repository} ({o.message})" for o in outcomes):
            logger.info("%s", line)


def _kept(name: str, code: str, message: str, mode: Mode) -> Answer:
    return Answer(Outcome(name, False, code, message, mode), None)  # noqa: FBT003


def _first(cls: type) -> str:
    """The name that a class would have, did it not override forward."""
    return next((named.names[0].name for base in cls.__mro__ if (named := names_of(base)).names), cls.__qualname__)


def _obstacle(module: nn.Module) -> tuple[str, str] | None:
    """What keeps a module's forward from being replaced at all."""
    import torch

    if isinstance(module, torch.jit.ScriptModule):
        return "scripted", "it is a TorchScript module, whose code is fixed"
    if "forward" in module.__dict__ and not callable(module.__dict__.get("_old_forward")):
        return "wrapped", "its forward is wrapped on the module itself; kernelize the model before it is wrapped"
    return None


def _kernel(target: Target, answer: Answer, modes: list[Answer]) -> Kernel | None:
    base = base_of(target.module)
    if not modes:
        return Kernel(base, answer.outcome, answer.layer) if answer.layer is not None else None
    training, inference = modes
    if training.layer is None and inference.layer is None:
        return None
    now = training if target.module.training else inference
    return Kernel(base, now.outcome, now.layer, training, inference)


def _nothing(plan: list[Step], *, strict: bool) -> None:
    reasons = dict.fromkeys(f"{step.answer.outcome.layer}: {step.answer.outcome.message}" for step in plan)
    detail = "; ".join(list(reasons)[:5]).rstrip(".") or "the model has no layer that mappings could know by a name"
    if strict:
        raise KernelizeError("(all)", "nothing-replaced", f"not one was replaced ({detail})", _NOTHING)
    logger.warning("kernelize replaced no layer. %s. %s", detail, _NOTHING)


_NOTHING: Final = "kernelize_report(model) lists every layer with its reason."


# --- the change ---------------------------------------------------------------------------------------------------


def _apply(plan: list[Step]) -> None:
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for target, answer, kernel in plan:
            module = target.module
            changed.append((module, type(module)))
            give(module, swapped(kernel) if kernel is not None else base_of(module))
            if kernel is None:
                module.__dict__[REASON] = answer.outcome
            else:
                module.__dict__.pop(REASON, None)
    except BaseException:
        for module, cls in changed:
            give(module, cls)
        raise


class Callers:
    """Which modules were kernelized together with a function that they call: it is one object for all of them."""

    def __init__(self) -> None:
        self._of: Final[WeakKeyDictionary[nn.Module, WeakSet[nn.Module]]] = WeakKeyDictionary()

    def joined(self, model: nn.Module) -> None:
        """All modules of a model were kernelized."""
        for module in model.modules():
            for function in functions_of(module):
                self._of.setdefault(function, WeakSet()).add(module)

    def left(self, function: nn.Module, caller: nn.Module) -> bool:
        """One module is unkernelized. Returns whether it was the last."""
        callers = self._of.get(function, WeakSet())
        callers.discard(caller)
        return not callers


CALLERS: Final = Callers()


def _restore(module: nn.Module) -> None:
    kernel = kernel_of(module)
    if kernel is not None:
        give(module, kernel.base)
    module.__dict__.pop(REASON, None)


# --- what a model consists of ---------------------------------------------------------------------------------------


def _targets(model: nn.Module, given: Place | None) -> Iterator[Target]:
    modules = list(model.named_modules())
    places = _places(modules) if given is None else None
    named: dict[type, bool] = {}
    seen: set[int] = set()
    for path, module in modules:
        here = [(path, module), *((f"{path}.{type(f).__name__}".lstrip("."), f) for f in functions_of(module))]
        for where, layer in here:
            cls = base_of(layer)
            if cls not in named:
                found = names_of(cls)
                named[cls] = bool(found.names) or found.overridden
            if named[cls] and id(layer) not in seen:
                seen.add(id(layer))
                yield Target(where, layer, given if places is None else places(path))


def _places(modules: list[tuple[str, nn.Module]]) -> Callable[[str], Place | None]:
    """Where each module computes: by its own tensors, those below it, or those of the modules around it."""
    found: dict[str, Place] = {}
    for path, module in reversed(modules):
        own = _own_place(module) or found.get(path)
        if own is not None:
            found[path] = own
            if path:
                found[path.rpartition(".")[0]] = own  # the first child, as the last one that writes

    def place(path: str) -> Place | None:
        while path and path not in found:
            path = path.rpartition(".")[0]
        return found.get(path)

    return place


def _own_place(module: nn.Module) -> Place | None:
    # accelerate moves the parameters of such a module to this device when it is called.
    hook: Any = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        import torch

        return _place(torch.device(device))
    for tensors in (module._parameters, module._buffers):  # noqa: SLF001 - their own iterators are ten times slower
        for tensor in tensors.values():
            if tensor is not None:
                return _place(tensor.device)
    return None


def _place(device: torch.device) -> Place:
    return Place(kind_of(device), device.index)


def _given(device: str | torch.device | None) -> Place | None:
    if device is None:
        return None
    if not isinstance(device, str):
        return _place(device)
    kind, _, index = device.partition(":")
    Device(kind)  # refuses what is no kind of device
    if index and not index.isdecimal():
        raise RequestError(f"device={device!r} was given", "A device is a kind, such as cuda, or cuda:1.")
    return Place(kind, int(index) if index else None)
