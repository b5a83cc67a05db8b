"""Layers that a kernel may replace: classes and functions get a name by which mappings know them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kernel_loader.errors import RequestError
from kernel_loader.layers.repository import function_layer
from kernel_loader.layers.swap import SWAPPED

if TYPE_CHECKING:
    from torch import nn

Condition = Callable[["nn.Module"], bool]
_Decorated = TypeVar("_Decorated")

# Attributes of a class. The names that the peer's decorator writes are read too: libraries that were imported with it
# stay what they are.
NAMES: Final = "_kernel_loader_names"
FUNCTIONS: Final = "_kernel_loader_functions"
FUNCTION: Final = "_kernel_loader_function"
_PEER_NAME, _PEER_CONDITION, _PEER_FUNCTIONS = "kernel_layer_name", "kernel_condition", "_kernel_funcs"


class Name(NamedTuple):
    """A name of a layer, and the condition under which a module may be replaced."""

    name: str
    condition: Condition | None = None


def use_kernel_forward_from_hub(
    layer_name: str, condition: Condition | None = None
) -> Callable[[_Decorated], _Decorated]:
    """Decorate a layer, so that `kernelize` may give it another forward.

    Args:
        layer_name: the name by which mappings know the layer.
        condition: is asked of each module; one that it refuses keeps its forward.

    Returns:
        A decorator for a subclass of `nn.Module`, or for a function, which becomes a module that is called like the
        function. `use_kernelized_func` tells `kernelize` which modules call it.

    Raises:
        RequestError: what is decorated is neither.
    """

    def decorate(target: Any) -> Any:  # noqa: ANN401 - a class or a function
        if inspect.isclass(target):
            replace_kernel_forward_from_hub(target, layer_name, condition)
            return target
        if not inspect.isfunction(target):
            detail = f"{target!r} was decorated with use_kernel_forward_from_hub"
            raise RequestError(detail, "Decorate a class that is an nn.Module, or a function.")
        cls = function_layer(target, target.__name__)
        setattr(cls, FUNCTION, True)
        setattr(cls, "__reduce_ex__", _by_name)  # noqa: B010 - as above
        replace_kernel_forward_from_hub(cls, layer_name, condition)
        return functools.update_wrapper(cls(), target)

    return decorate


def replace_kernel_forward_from_hub(cls: type, layer_name: str, condition: Condition | None = None) -> None:
    """Give a class, maybe somebody else's, a name by which mappings know it. Names that it has already stay.

    Of several names, the newest for which a mapping has a kernel counts.

    Raises:
        RequestError: it is no subclass of `nn.Module`, or the name is no text.
    """
    from torch import nn

    if not inspect.isclass(cls) or not issubclass(cls, nn.Module):
        raise RequestError(f"{cls!r} is no subclass of nn.Module", "Pass the class of a layer.")
    name: object = layer_name
    if not isinstance(name, str) or not name:
        raise RequestError(f"{layer_name!r} is no name", "Pass the text by which mappings know the layer.")
    known = vars(cls).get(NAMES, ())
    setattr(cls, NAMES, (Name(layer_name, condition), *(name for name in known if name.name != layer_name)))


def use_kernelized_func(*functions: Callable[..., Any]) -> Callable[[_Decorated], _Decorated]:
    """Decorate a module's class: it calls these functions, which `use_kernel_forward_from_hub` has decorated.

    A function is one object for all models: kernelizing one of them replaces it for all, until the last of them is
    unkernelized.

    Raises:
        RequestError: a function is not decorated.
    """
    for function in functions:
        if not names_of(type(function)).names:
            detail = f"{getattr(function, '__name__', function)!r} has no name by which mappings know it"
            raise RequestError(detail, "Decorate it with use_kernel_forward_from_hub first.")

    def decorate(cls: Any) -> Any:  # noqa: ANN401 - a class
        setattr(cls, FUNCTIONS, (*getattr(cls, FUNCTIONS, ()), *functions))
        return cls

    return decorate


class Named(NamedTuple):
    """The names of a class; `overridden` when a subclass has a forward of its own, for which they do not count."""

    names: tuple[Name, ...]
    overridden: bool = False


def names_of(cls: type) -> Named:
    """The names of a class, its own or those that it inherits along with forward."""
    overridden = False
    for base in cls.__mro__:
        own = vars(base)
        names = own.get(NAMES, ())
        if _PEER_NAME in own:
            names = (*names, Name(str(own[_PEER_NAME]), _peer_condition(base)))
        if names:
            return Named(() if overridden else names, overridden)
        overridden = overridden or ("forward" in own and SWAPPED not in own)
    return Named(())


def functions_called_by(cls: type) -> tuple[nn.Module, ...]:
    """The functions that modules of a class call, by `use_kernelized_func`."""
    functions: tuple[nn.Module, ...] = getattr(cls, FUNCTIONS, ())
    return functions


def functions_of(module: nn.Module) -> list[nn.Module]:
    """All functions that a module calls: those of its class, those of the peer's decorator, and its attributes."""
    children = (child for child in module._modules.values() if child is not None)  # noqa: SLF001 - of this module alone
    return [*functions_called_by(type(module)), *peers_functions(module), *(c for c in children if is_function(c))]


def is_function(module: nn.Module) -> bool:
    """Whether a module is a function that was decorated."""
    return getattr(type(module), FUNCTION, False)


def peers_functions(module: nn.Module) -> Iterable[nn.Module]:
    """The functions that the peer's decorator has attached to a module."""
    attached: dict[str, nn.Module] = module.__dict__.get(_PEER_FUNCTIONS, {})
    return attached.values()


def _by_name(self: nn.Module, protocol: int) -> str:  # noqa: ARG001 - as pickle calls it
    # Functions are pickled and copied by reference.
    return str(self.__dict__["__qualname__"])


def _peer_condition(cls: type) -> Condition | None:
    condition = getattr(cls, _PEER_CONDITION, None)
    return condition if callable(condition) else None
