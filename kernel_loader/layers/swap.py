"""How a module gets another forward: its class becomes a subclass of its own, which has the kernel's.

Nothing of the module itself changes, and nothing stands between a call and the kernel: `module(x)` finds forward on the
class, as ever. Hooks, parameters, buffers, isinstance and `super()` work as before. As it is the class that differs,
copying, pickling and `train()` can be told what to do, which an attribute of the instance could not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import types
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary

from kernel_loader.errors import KernelLoaderError
from kernel_loader.layers.fit import faults, forward_for
from kernel_loader.layers.mode import Mode
from kernel_loader.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from kernel_loader.layers.repository import Repository
    from kernel_loader.provenance import Origin

logger = logging.getLogger("kernel_loader")

SWAPPED: Final = "_kernel_loader_kernel"
KEPT: Final = "_kernel_loader_kept"

DISABLED: Final = "KERNEL_LOADER_DISABLE_MAPPING is set"


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


class Classes:
    """The classes that were made; forgotten when no module is of them any more."""

    def __init__(self) -> None:
        self._lock: Final = threading.RLock()  # making one may run code of the model's, which may kernelize
        self._made: Final[WeakValueDictionary[object, type[nn.Module]]] = WeakValueDictionary()

    def swapped(self, kernel: Kernel) -> type[nn.Module]:
        """The class for modules that a kernel serves; one for each kernel and class.

        Raises:
            TypeError: the class cannot be derived from.
        """
        key = (id(kernel.base), kernel[1:])  # the class that is made keeps its base alive
        with self._lock:
            made = self._made.get(key)
            if made is None:
                made = self._made[key] = _swapped(kernel)
        return made

    def rebuilt(self, cls: type[nn.Module], kernel: Kernel | None) -> type[nn.Module]:
        """A class with another kernel, or none. Others derive from a swapped class (`fully_shard` does).

        Raises:
            TypeError: a method of a derived class calls `super()`, and would not know the class that is made anew.
        """
        own: Kernel | None = vars(cls).get(SWAPPED)
        if own is not None:
            return own.base if kernel is None else self.swapped(kernel)
        if not hasattr(cls, SWAPPED):
            return cls
        key = (id(cls), kernel)
        with self._lock:
            made = self._made.get(key)
            if made is None:
                body = _body(cls)
                if any("__class__" in getattr(getattr(v, "__code__", None), "co_freevars", ()) for v in body.values()):
                    raise TypeError(f"{cls.__qualname__} derives from a kernelized class, and calls super()")
                bases = tuple(self.rebuilt(base, kernel) for base in cls.__bases__)
                made = self._made[key] = _class(cls, bases, body | {"_kernel_loader_made_of": cls})
        return made


CLASSES: Final = Classes()


def _swapped(kernel: Kernel) -> type[nn.Module]:
    base = kernel.base
    modes = tuple(Kept(*answer) for answer in (kernel.training, kernel.inference) if answer is not None)
    body: dict[str, Any] = {
        SWAPPED: kernel,
        KEPT: (Kept(kernel.outcome, kernel.layer), modes),
        "train": _train,
        "__reduce_ex__": _reduce,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    if kernel.layer is not None:
        body["forward"] = forward_for(kernel.layer, base)
    return _class(base, (base,), body)


def _body(cls: type) -> dict[str, Any]:
    return {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}


def _class(like: type, bases: tuple[type, ...], body: dict[str, Any]) -> type[nn.Module]:
    """A class, made without telling its bases: libraries keep registers of their subclasses by name."""
    from torch import nn

    made: Any = type.__new__(type(like), like.__name__, (nn.Module,), body)
    try:
        made.__bases__ = bases
    except TypeError:  # __slots__
        made = types.new_class(like.__name__, bases, exec_body=lambda namespace: namespace.update(body))
    found: type[nn.Module] = made
    return found


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that forward is of: where parametrizations have given a module one of its own, what lies beneath."""
    cls = type(module)
    return cls.__bases__[0] if _is_parametrized(module) else cls


def _is_parametrized(module: nn.Module) -> bool:
    # Of a module that is being read from a pickle, nothing is there yet.
    return "parametrizations" in module.__dict__.get("_modules", ())


def kernel_of(module: nn.Module) -> Kernel | None:
    """What a module's class carries; None when it is as it was made."""
    found: Kernel | None = getattr(type(module), SWAPPED, None)
    return found


def base_of(module: nn.Module) -> type[nn.Module]:
    """The class of a module without any kernel."""
    cls = class_of(module)
    try:
        return CLASSES.rebuilt(cls, None)
    except TypeError:
        return cls


def is_hidden(module: nn.Module) -> bool:
    """Whether a forward on the module itself hides that of its class. accelerate's hooks do not: they call it."""
    return "forward" in module.__dict__ and not _is_kept(module)


def _is_kept(module: nn.Module) -> bool:
    kept = module.__dict__.get("_old_forward")
    if kept is None:
        return False
    static = inspect.getattr_static(type(module), "forward")
    if isinstance(static, staticmethod):
        return kept is static.__func__
    return isinstance(kept, MethodType) and kept.__self__ is module and kept.__func__ is static


def give(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module one of a class that differs from its own by forward alone."""
    is_kept = _is_kept(module)
    # A parametrized module has a class of its own, which copies of it share.
    own = _class(type(module), (cls,), _body(type(module))) if _is_parametrized(module) else cls
    object.__setattr__(module, "__class__", own)  # nn.Module's own would look whether it is a parameter
    if is_kept:
        module.__dict__["_old_forward"] = inspect.getattr_static(cls, "forward").__get__(module, cls)


# --- methods of swapped classes -------------------------------------------------------------------------------------


def _train(self: nn.Module, mode: bool = True) -> nn.Module:  # noqa: FBT001, FBT002 - as nn.Module has it
    kernel: Kernel = getattr(type(self), SWAPPED)
    kernel.base.train(self, mode)
    if kernel.training is not None:
        with contextlib.suppress(TypeError):  # of a derived class that cannot be made again
            give(self, CLASSES.rebuilt(class_of(self), kernel.in_mode(training=self.training)))
    elif self.training and Mode.INFERENCE in kernel.outcome.mode:
        _warn_of_training()
    return self


@functools.cache
def _warn_of_training() -> None:
    logger.warning(
        "a model that was kernelized for inference is set to training, and its kernels may have no backward pass. Call "
        "kernelize(model, mode=Mode.TRAINING), or pass follow_mode=True when it is kernelized."
    )


def _reduce(self: nn.Module, protocol: int) -> Any:  # noqa: ANN401 - as pickle has it
    """As the class without a kernel would be copied and pickled, and the kernel's place remembered."""
    kernel: Kernel = getattr(type(self), SWAPPED)
    reduced: Any = kernel.base.__reduce_ex__(self, protocol)
    if isinstance(reduced, str):
        return reduced  # a function, which is pickled by its name
    cls, base = type(self), base_of(self)
    function, args, *rest = reduced
    args = tuple(base if arg is cls else arg for arg in args)
    return (_restored, (base if function is cls else function, args, *getattr(cls, KEPT)), *rest)


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
        if Settings.from_env().disable_mapping:
            self.outcome = Outcome(o.layer, used=False, code="disabled", message=DISABLED, mode=o.mode)
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
    base = base_of(module)
    answers = [_fitting(part, base) for part in (kept, *modes)]
    give(module, CLASSES.swapped(Kernel(base, *answers[0], *answers[1:])))
    return module


def _fitting(kept: Kept, base: type[nn.Module]) -> Answer:
    """What was kept, unless the model's class has changed since."""
    if kept.layer is None or not (problems := faults(kept.layer, base)):
        return Answer(kept.outcome, kept.layer)
    why = f"the kernel no longer fits {base.__qualname__}: {'; '.join(problems)}"
    logger.warning("layer %s keeps its own forward: %s", kept.outcome.layer, why)
    return Answer(_lost(kept.outcome, why), None)
