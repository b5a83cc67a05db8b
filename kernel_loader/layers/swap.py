"""How a module gets another forward: its class becomes a subclass of its own, which has the kernel's.

Nothing of the module itself changes, and nothing stands between a call and the kernel: `module(x)` finds forward on the
class, as ever. Hooks, parameters, buffers, isinstance and `super()` work as before. As it is the class that differs,
copying, pickling and `train()` can be told what to do, which an attribute of the instance could not.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kernel_loader.errors import KernelLoaderError
from kernel_loader.layers.fit import forward_for
from kernel_loader.layers.mode import Mode

if TYPE_CHECKING:
    from torch import nn

    from kernel_loader.layers.repository import Repository
    from kernel_loader.provenance import Origin

logger = logging.getLogger("kernel_loader")

SWAPPED: Final = "_kernel_loader_kernel"


@dataclass(frozen=True)
class Outcome:
    """What became of a layer.

    Attributes:
        layer: its name in mappings.
        used: whether a kernel has taken the place of its forward.
        code: "used", or why not, for programs.
        message: the same for people.
        mode: what was asked for.
        repository: where the kernel is from, as the mapping says.
        backend: kind of backend that it was loaded for; None for the host's own.
        origin: where it is from indeed.
    """

    layer: str
    used: bool
    code: str
    message: str
    mode: Mode
    repository: Repository | None = None
    backend: str | None = None
    origin: Origin | None = None


class Answer(NamedTuple):
    """What becomes of modules of one class on one device, and the kernel's layer where one is used."""

    outcome: Outcome
    layer: type[nn.Module] | None


class Kernel(NamedTuple):
    """What a swapped class carries: the class it was made of, and what its modules do.

    `training` and `inference` are for modules that follow the mode of their model.
    """

    base: type[nn.Module]
    outcome: Outcome
    layer: type[nn.Module] | None
    training: Answer | None = None
    inference: Answer | None = None

    def in_mode(self, *, training: bool) -> Kernel:
        """The same, in training or for inference."""
        answer = self.training if training else self.inference
        assert answer is not None, "only asked of what follows the mode"
        return self._replace(outcome=answer.outcome, layer=answer.layer)


_MAKING: Final = threading.Lock()


def swapped(kernel: Kernel) -> type[nn.Module]:
    """The class for modules that a kernel serves; one for each kernel and class."""
    with _MAKING:
        return _made(kernel)


@functools.lru_cache(maxsize=4096)
def _made(kernel: Kernel) -> type[nn.Module]:
    base = kernel.base
    body: dict[str, Any] = {
        SWAPPED: kernel,
        "train": _train,
        "__reduce_ex__": _reduce,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    if kernel.layer is not None:
        body["forward"] = forward_for(kernel.layer, base)
    return _class(base.__name__, (base,), body)


def kernel_of(module: nn.Module) -> Kernel | None:
    """What a module's class carries; None when it is as it was made."""
    found: Kernel | None = getattr(type(module), SWAPPED, None)
    return found


def base_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module without any kernel."""
    return rebuilt(type(module), None)  # type: ignore[arg-type]  # nn.Module annotates its __hash__ in its own way


@functools.lru_cache(maxsize=4096)
def rebuilt(cls: type[nn.Module], kernel: Kernel | None) -> type[nn.Module]:
    """A class with another kernel, or none. Others may have made a subclass of a swapped one (`fully_shard` does)."""
    own: Kernel | None = vars(cls).get(SWAPPED)
    if own is not None:
        return own.base if kernel is None else swapped(kernel)
    if not hasattr(cls, SWAPPED):
        return cls
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(rebuilt(base, kernel) for base in cls.__bases__)
    return _class(cls.__name__, bases, body)


def _class(name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type[nn.Module]:
    made: type[nn.Module] = types.new_class(name, bases, exec_body=lambda namespace: namespace.update(body))
    return made


def give(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module one of a class that differs from its own by forward alone."""
    before = type(module)
    object.__setattr__(module, "__class__", cls)  # nn.Module's own would look whether it is a parameter
    # accelerate's hooks call the forward that they have kept.
    kept = module.__dict__.get("_old_forward")
    if isinstance(kept, MethodType) and kept.__func__ is before.forward:
        module.__dict__["_old_forward"] = MethodType(cls.forward, module)


# --- methods of swapped classes -------------------------------------------------------------------------------------


def _train(self: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - as nn.Module has it
    kernel: Kernel = getattr(type(self), SWAPPED)
    if kernel.training is not None:
        give(self, rebuilt(type(self), kernel.in_mode(training=mode)))  # type: ignore[arg-type]  # as above
    elif mode and Mode.INFERENCE in kernel.outcome.mode:
        _warn_of_training()
    return kernel.base.train(self, mode)


@functools.cache
def _warn_of_training() -> None:
    logger.warning(
        "a model that was kernelized for inference is set to training, and its kernels may have no backward pass. Call "
        "kernelize(model, mode=Mode.TRAINING), or pass follow_mode=True when it is kernelized."
    )


def _reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
    """As the base class would be copied and pickled, and the kernel's place remembered."""
    kernel: Kernel = getattr(type(self), SWAPPED)
    reduced: Any = kernel.base.__reduce_ex__(self, protocol)
    function, args, *rest = reduced
    cls = type(self)
    args = tuple(kernel.base if arg is cls else arg for arg in args)
    modes = tuple(Kept(*answer) for answer in (kernel.training, kernel.inference) if answer is not None)
    return (_restored, (function, args, Kept(kernel.outcome, kernel.layer), modes), *rest)


class Kept:
    """An outcome and its layer, as a pickle holds them: the layer is loaded again where it is read."""

    def __init__(self, outcome: Outcome, layer: type[nn.Module] | None) -> None:
        self.outcome, self.layer = outcome, layer

    def __deepcopy__(self, memo: object) -> Kept:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"outcome": self.outcome}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.outcome, self.layer = state["outcome"], None
        o = self.outcome
        if not o.used or o.repository is None or o.origin is None:
            return
        try:
            layer = o.repository.load(o.backend)
        except KernelLoaderError as error:
            logger.warning("layer %s keeps its own forward, unlike in the process that saved it. %s", o.layer, error)
            self.outcome = _lost(o, str(error))
            return
        if layer.origin.digest != o.origin.digest:
            difference = f"it was saved with {o.origin.variant} ({o.origin.digest[:12]}), and this host takes "
            difference += f"{layer.origin.variant} ({layer.origin.digest[:12]})"
            logger.warning("layer %s keeps its own forward: %s. Kernelize the model again.", o.layer, difference)
            self.outcome = _lost(o, difference)
            return
        self.layer = layer.cls


def _lost(outcome: Outcome, why: str) -> Outcome:
    return Outcome(outcome.layer, used=False, code="not-restored", message=why, mode=outcome.mode)


def _restored(function: Any, args: tuple[Any, ...], kept: Kept, modes: tuple[Kept, ...]) -> nn.Module:  # noqa: ANN401
    module: nn.Module = function(*args)
    kernel = Kernel(type(module), kept.outcome, kept.layer, *(Answer(part.outcome, part.layer) for part in modes))
    give(module, swapped(kernel))
    return module
