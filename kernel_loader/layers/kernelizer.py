"""kernelize: layers of a model get the forward of kernels. Planned and loaded first, then changed all at once."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from kernel_loader.errors import KernelizeError, KernelLoaderError, RequestError
from kernel_loader.layers.decorator import Name, functions_of, is_function, names_of
from kernel_loader.layers.device import BACKENDS, capability_of
from kernel_loader.layers.fit import faults, lacking, read_by, unsupported
from kernel_loader.layers.mapping import Found, KernelMapping, Missing, current_mapping
from kernel_loader.layers.mode import KernelizeFallback, Mode
from kernel_loader.layers.model import Known, Place, given_place, named_layers, refuse_no_module
from kernel_loader.layers.repository import Layer, Repository
from kernel_loader.layers.swap import (
    CLASSES,
    DISABLED,
    SWAPPED,
    Answer,
    Kernel,
    Outcome,
    base_of,
    class_of,
    give,
    is_hidden,
    kernel_of,
)
from kernel_loader.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("kernel_loader")

_Model = TypeVar("_Model", bound="nn.Module")

# Why a layer that has a name keeps its forward, on the module itself: the class of such a module is not touched.
REASON: Final = "_kernel_loader_reason"


class Decision(NamedTuple):
    """What becomes of modules of one class in one place: the class that they get, and why."""

    outcome: Outcome
    cls: type[nn.Module]


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
    _refuse(model, mode, use_fallback)
    allowed = KernelizeFallback.ALL if use_fallback is True else use_fallback or KernelizeFallback.NONE
    planner = _Planner(current_mapping(), allowed, mode, follow_mode=follow_mode)
    callers: list[tuple[nn.Module, nn.Module]] = []
    named = named_layers(model, given_place(device), callers)
    plan = [(module, planner.decide(module, place, known)) for module, place, known in named]
    if not any(decision.outcome.used or decision.cls is not base_of(module) for module, decision in plan):
        _nothing(planner.outcomes(), strict=strict)
    _apply(plan)
    CALLERS.joined(callers)
    for line in sorted(f"layer {o.layer} takes {o.repository} ({o.message})" for o in planner.outcomes() if o.used):
        logger.info("%s", line)
    return model


def unkernelize(model: _Model) -> _Model:
    """Give all layers of a model, and the functions that it calls, their own forward back, exactly.

    A function stays replaced as long as another model was kernelized with it.

    Raises:
        RequestError: it is no model.
    """
    refuse_no_module(model)
    changed = False
    for module in model.modules():
        if not is_function(module) or module is model:
            changed |= _restore(module)
        for function in functions_of(module):
            if CALLERS.left(function, module):
                changed |= _restore(function)
    if changed:
        _forget_compiled()
    return model


# --- the plan -----------------------------------------------------------------------------------------------------


def _refuse(model: object, mode: object, use_fallback: object) -> None:
    refuse_no_module(model)
    if not isinstance(use_fallback, bool | KernelizeFallback):
        raise RequestError(f"use_fallback={use_fallback!r} was given", "Pass True, False or a KernelizeFallback.")
    if not isinstance(mode, Mode):
        raise RequestError(f"mode={mode!r} was given", "Pass Mode.INFERENCE or Mode.TRAINING.")
    _ = mode.tried  # raises for modes that are for mappings alone


def _both(mode: Mode) -> tuple[Mode, Mode]:
    compiled = mode & Mode.TORCH_COMPILE
    return (Mode.TRAINING | compiled, Mode.INFERENCE | compiled) if compiled else (Mode.TRAINING, Mode.INFERENCE)


class _Planner:
    """Decides for each class and place once, whatever the number of modules."""

    def __init__(self, mapping: KernelMapping, allowed: KernelizeFallback, mode: Mode, *, follow_mode: bool) -> None:
        self._mapping: Final = mapping
        self._allowed: Final = allowed
        self._mode: Final = mode
        self._modes: Final = _both(mode) if follow_mode else ()
        self._disabled: Final = Settings.from_env().disable_mapping
        self._decisions: Final[dict[object, Decision]] = {}
        self._layers: Final[dict[tuple[Repository, str | None], Layer | KernelLoaderError]] = {}
        self._reads: Final[dict[Kernel, tuple[str, ...]]] = {}

    def decide(self, module: nn.Module, place: Place | None, known: Known) -> Decision:
        """What becomes of a module, which is not changed yet."""
        names, obstacle = known.names, known.scripted
        if known.has_conditions:
            names = tuple([name for name in names if self._holds(name, module)])
        if obstacle is None and is_hidden(module):
            kernel = kernel_of(module)
            if kernel is not None:
                return Decision(kernel.outcome, known.cls)  # what hides it calls the kernel, and goes on doing so
            obstacle = _WRAPPED
        follows = bool(self._modes) and not known.is_function
        key = (known.cls, place, names, obstacle, module.training if follows else None)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions[key] = self._decide(module, names, obstacle, place, follows=follows)
        missing = self._lacking(decision, module)
        if not missing:
            return decision
        other = self._decisions.get((key, missing))
        if other is None:
            base, taken = base_of(module), decision.outcome.repository
            message = f"{taken} does not fit {base.__qualname__}: its forward reads {', '.join(missing)} of the module"
            misfit = Missing("misfit", f"{message}, which has no such thing", KernelizeFallback.CANNOT_LOAD)
            other = Decision(self._fallback(misfit, names[0].name, base, self._mode).outcome, base)
            self._decisions[key, missing] = other
        return other

    def _lacking(self, decision: Decision, module: nn.Module) -> tuple[str, ...]:
        """What the layers of a decision read and a module has not: modules of one class may differ in it."""
        kernel: Kernel | None = vars(decision.cls).get(SWAPPED)
        if kernel is None:
            return ()
        reads = self._reads.get(kernel)
        if reads is None:
            answers = (answer.layer for answer in (kernel.training, kernel.inference) if answer is not None)
            layers = dict.fromkeys(layer for layer in (kernel.layer, *answers) if layer is not None)
            reads = self._reads[kernel] = tuple(dict.fromkeys(name for layer in layers for name in read_by(layer)))
        return lacking(reads, module)

    def _holds(self, name: Name, module: nn.Module) -> bool:
        try:
            return name.condition is None or bool(name.condition(module))
        except Exception as error:
            message = f"its condition raised {type(error).__name__}: {error}"
            if KernelizeFallback.CANNOT_LOAD not in self._allowed:
                raise KernelizeError(name.name, "condition", message, "Correct the condition.") from error
            logger.warning("layer %s keeps its own forward: %s", name.name, message)
            return False

    def outcomes(self) -> set[Outcome]:
        """All that was decided."""
        return {decision.outcome for decision in self._decisions.values()}

    def _decide(
        self,
        module: nn.Module,
        names: tuple[Name, ...],
        obstacle: tuple[str, str] | None,
        place: Place | None,
        *,
        follows: bool,
    ) -> Decision:
        base = base_of(module)
        modes = self._modes if follows else (self._mode,)
        answers = [self._answer(base, names, obstacle, place, mode) for mode in modes]
        outcome, layer = answers[0 if module.training or not follows else 1]
        if all(answer.layer is None for answer in answers):
            return Decision(outcome, base)
        try:
            return Decision(outcome, CLASSES.swapped(Kernel(base, outcome, layer, *(answers if follows else ()))))
        except TypeError as error:
            missing = Missing("misfit", f"{base.__qualname__}: {error}", KernelizeFallback.CANNOT_LOAD)
            return Decision(self._fallback(missing, names[0].name, base, self._mode).outcome, base)

    def _answer(
        self,
        cls: type[nn.Module],
        names: tuple[Name, ...],
        obstacle: tuple[str, str] | None,
        place: Place | None,
        mode: Mode,
    ) -> Answer:
        named = names_of(cls)
        if named.overridden:
            return _kept(_first(cls), "overridden", f"{cls.__qualname__} has a forward of its own", mode)
        if not names:
            return _kept(named.names[0].name, "condition", "its condition refuses this module", mode)
        if self._disabled:
            return _kept(names[0].name, "disabled", DISABLED, mode)
        if obstacle is not None:
            return self._fallback(Missing(*obstacle, KernelizeFallback.CANNOT_LOAD), names[0].name, cls, mode)
        return self._choose(cls, names, place, mode)

    def _choose(self, cls: type[nn.Module], names: tuple[Name, ...], place: Place | None, mode: Mode) -> Answer:
        if place is None or place.kind == "meta":
            message = "nothing tells on which device it computes; pass device= to kernelize"
            return self._fallback(Missing("no-device", message, KernelizeFallback.NO_DEVICE), names[0].name, cls, mode)
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
            self._layers[key] = _loaded(*key)
        layer = self._layers[key]
        if isinstance(layer, KernelLoaderError):
            if KernelizeFallback.CANNOT_LOAD not in self._allowed:
                raise layer
            logger.warning("layer %s keeps its own forward. %s", name, layer)
            return _kept(name, "cannot-load", str(layer), mode)
        lacks = (unsupported(layer.cls, asked, layer.untrained) for asked in (found.mode, mode))
        if missing := next(filter(None, lacks), ""):
            message = f"{found.repository} is not for {mode}: {missing}"
            return self._fallback(Missing("no-mode", message, KernelizeFallback.NO_COMPATIBLE_MODE), name, cls, mode)
        if problems := faults(layer.cls, cls):
            message = f"{found.repository} does not fit {cls.__qualname__}: {'; '.join(problems)}"
            return self._fallback(Missing("misfit", message, KernelizeFallback.CANNOT_LOAD), name, cls, mode)
        message = f"{layer.origin.where}, {layer.origin.variant}"
        outcome = Outcome(name, True, "used", message, mode, found.repository, key[1], layer.origin)  # noqa: FBT003
        return Answer(outcome, layer.cls)

    def _fallback(self, missing: Missing, name: str, cls: type[nn.Module], mode: Mode) -> Answer:
        if missing.allowed_by not in self._allowed:
            first = _ADVICE.get(missing.code, "Add it to the mapping (register_kernel_mapping)")
            advice = f"{first}, or let layers keep their forward (use_fallback)."
            raise KernelizeError(f"{name} ({cls.__qualname__})", missing.code, missing.message, advice)
        if missing.code == "misfit":
            logger.warning("layer %s keeps its own forward: %s", name, missing.message)
        return _kept(name, missing.code, missing.message, mode)


# What to do first where a layer may not keep its forward, and the mapping has an entry for it.
_ADVICE: Final = {
    "misfit": "Name a layer that fits in the mapping (register_kernel_mapping)",
    "wrapped": "Kernelize the model before it is wrapped",
}


def _loaded(repository: Repository, backend: str | None) -> Layer | KernelLoaderError:
    try:
        return repository.load(backend)
    except KernelLoaderError as error:
        return error
    except Exception as error:  # noqa: BLE001 - whatever a repository of the user's own raises
        said = KernelizeError(
            str(repository), "cannot-load", f"{type(error).__name__}: {error}", "Correct the mapping."
        )
        said.__cause__ = error
        return said


def _kept(name: str, code: str, message: str, mode: Mode) -> Answer:
    return Answer(Outcome(name, False, code, message, mode), None)  # noqa: FBT003


def _first(cls: type) -> str:
    """The name that a class would have, did it not override forward."""
    return next((named.names[0].name for base in cls.__mro__ if (named := names_of(base)).names), cls.__qualname__)


# What keeps the forward of a module from being replaced.
_WRAPPED: Final = ("wrapped", "its forward is wrapped on the module itself; kernelize the model before it is wrapped")


def _nothing(outcomes: set[Outcome], *, strict: bool) -> None:
    reasons = sorted(f"{outcome.layer}: {outcome.message}" for outcome in outcomes)
    detail = "; ".join(reasons[:5]).rstrip(".") or "the model has no layer that mappings could know by a name"
    if strict:
        raise KernelizeError("(all)", "nothing-replaced", f"not one was replaced ({detail})", _NOTHING)
    logger.warning("kernelize replaced no layer. %s. %s", detail, _NOTHING)


# --- the change ---------------------------------------------------------------------------------------------------

_NOTHING: Final = "kernelize_report(model) lists every layer with its reason."


def _apply(plan: list[tuple[nn.Module, Decision]]) -> None:
    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for module, decision in plan:
            if decision.cls is not type(module) and decision.cls is not (cls := class_of(module)):
                changed.append((module, cls))
                give(module, decision.cls)
            if not decision.outcome.used and kernel_of(module) is None:
                module.__dict__[REASON] = decision.outcome
            else:
                module.__dict__.pop(REASON, None)
    except BaseException:
        for module, cls in changed:
            give(module, cls)
        raise
    if changed:
        _forget_compiled()


def _forget_compiled() -> None:
    """Let torch.compile look again: that of torch 2.11 does not notice that the class of a module has changed.

    It forgets everything that was compiled in the process, as nothing tells what the modules were compiled into.
    """
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


class Callers:
    """Which modules were kernelized together with a function that they call: it is one object for all of them."""

    def __init__(self) -> None:
        self._of: Final[WeakKeyDictionary[nn.Module, WeakSet[nn.Module]]] = WeakKeyDictionary()

    def joined(self, pairs: list[tuple[nn.Module, nn.Module]]) -> None:
        """Modules were kernelized together with functions: pairs of function and caller."""
        for function, caller in pairs:
            self._of.setdefault(function, WeakSet()).add(caller)

    def left(self, function: nn.Module, caller: nn.Module) -> bool:
        """One module is unkernelized. Returns whether it was the last."""
        callers = self._of.get(function, WeakSet())
        callers.discard(caller)
        return not callers


CALLERS: Final = Callers()


def _restore(module: nn.Module) -> bool:
    """Give a module its own forward back; tells whether it had another."""
    module.__dict__.pop(REASON, None)
    if kernel_of(module) is None:
        return False
    base = base_of(module)
    if is_hidden(module) or hasattr(base, SWAPPED):
        logger.warning(
            "%s keeps its kernel: it was wrapped after it was kernelized. Unwrap it first.", base.__qualname__
        )
        return False
    give(module, base)
    return True
