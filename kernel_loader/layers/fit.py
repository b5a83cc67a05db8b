"""Does a kernel's layer fit the one whose forward it takes? Looked at before the first module is changed."""

from __future__ import annotations

import dis
import inspect
import types
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Final

from kernel_loader.layers.mode import Mode

if TYPE_CHECKING:
    from torch import nn

# What a class with nothing but a forward has, and the flags by which it speaks of itself.
_USUAL: Final = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__init__", "forward"}
    | {"__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__"}
    | {"__parameters__", "can_torch_compile", "has_backward"}
)
_NOTHING: Final = (lambda: None).__code__
_ABSENT: Final = object()


def faults(layer: type, base: type) -> tuple[str, ...]:
    """Why forward of `layer` cannot be that of modules of the class `base`; empty when it can."""
    from torch import nn

    if not issubclass(layer, nn.Module):
        return (f"{layer.__qualname__} is no nn.Module",)
    found = []
    if layer.__init__ is not nn.Module.__init__:
        found.append("it has a constructor, and a kernel's layer has no state of its own")
    own = {n for cls in layer.__mro__ if cls not in nn.Module.__mro__ for n in vars(cls)} - _USUAL
    extra = {n for n in own if not hasattr(nn.Module, n) or n.startswith("__")}
    if extra:
        found.append(f"it has members beside forward ({', '.join(sorted(extra))}), which modules of the model lack")
    try:
        if "__class__" in getattr(_function_of(layer), "__code__", _NOTHING).co_freevars:
            found.append("its forward calls super(), which is another class's in the model")
        return (*found, *_signature_faults(layer, base))
    except (TypeError, ValueError) as error:
        return (*found, f"its signature, or that of the original, cannot be read ({error})")


def lacking(reads: tuple[str, ...], module: nn.Module) -> tuple[str, ...]:
    """Of the names that a layer `reads`, those that a module has not and never gets.

    A name that methods of the module's class speak of may be set later, and so may any where the class answers for
    names itself.
    """
    from torch import nn

    cls = type(module)
    if cls.__getattr__ is not nn.Module.__getattr__ or cls.__getattribute__ is not object.__getattribute__:
        return ()
    there = (vars(module), module._parameters, module._buffers, module._modules)  # noqa: SLF001 - None is one that is there
    missing = [name for name in reads if not any(name in names for names in there)]
    missing = [name for name in missing if inspect.getattr_static(cls, name, _ABSENT) is _ABSENT]
    spoken_of = _names_in(cls) if missing else frozenset()
    return tuple(name for name in missing if name not in spoken_of)


def read_by(layer: type[nn.Module]) -> tuple[str, ...]:
    """Names that forward of a layer reads of its module in any call: before its first branch, and not within a try."""
    code = getattr(_function_of(layer), "__code__", None)
    if isinstance(inspect.getattr_static(layer, "forward"), staticmethod) or code is None or not code.co_argcount:
        return ()
    if code.co_exceptiontable:
        return ()
    own, found, of_self = code.co_varnames[0], [], False
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in jumps or (instruction.opname, instruction.argval) == ("STORE_FAST", own):
            break
        if of_self and instruction.opname == "STORE_ATTR":
            break  # forward sets names itself
        if of_self and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found.append(str(instruction.argval))
        last = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        of_self = instruction.opname.startswith("LOAD_FAST") and last == own
    return tuple(dict.fromkeys(found))


def _names_in(cls: type) -> frozenset[str]:
    """Names and texts in the code of the methods that a class of modules has itself."""
    from torch import nn

    members = (value for base in cls.__mro__ if base not in nn.Module.__mro__ for value in vars(base).values())
    codes = [code for member in members for code in _codes_of(member)]
    found: set[str] = set()
    for code in codes:  # grows while it is gone through
        found |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found)


def _codes_of(member: object) -> list[types.CodeType]:
    functions = [member, *(getattr(member, name, None) for name in ("__func__", "fget", "fset", "__wrapped__"))]
    codes = (getattr(function, "__code__", None) for function in functions)
    return [code for code in codes if isinstance(code, types.CodeType)]


def unsupported(layer: type, mode: Mode, untrained: str = "") -> str:
    """What of a mode a layer does not support, by what it says of itself; empty when it supports all.

    `untrained` is the advisory by which its gradient is wrong or missing, where there is one.
    """
    if Mode.TRAINING in mode and untrained:
        return f"its gradient is known to be wrong or missing (advisory {untrained})"
    if Mode.TRAINING in mode and not getattr(layer, "has_backward", True):
        return "it has no backward pass (has_backward)"
    if Mode.TORCH_COMPILE in mode and not getattr(layer, "can_torch_compile", False):
        return "it does not say that it works with torch.compile (can_torch_compile)"
    return ""


def forward_for(layer: type[nn.Module], base: type[nn.Module]) -> Any:  # noqa: ANN401 - a function or a staticmethod
    """The forward of a layer, its parameters called as in `base`, so that calls by keyword work as before.

    Only the names in the function's code object change, so that a call costs the same.
    """
    forward = inspect.getattr_static(layer, "forward")
    names = _renamed(layer, base)
    if not names:
        return forward
    renamed = _rename(_function_of(layer), names)
    return staticmethod(renamed) if isinstance(forward, staticmethod) else renamed


def _signature_faults(layer: type, base: type) -> list[str]:
    mine, theirs = _parameters(layer), _parameters(base)
    if _takes_anything(theirs):
        return []  # the original says nothing of its parameters
    return _parameter_faults(mine, theirs) or _name_faults(layer, base, mine, theirs)


def _parameter_faults(mine: list[Parameter], theirs: list[Parameter]) -> list[str]:
    """Parameters by position are held against each other in their order, those by keyword alone by their names."""
    kinds = {p.kind for p in mine}
    takes_keywords = Parameter.VAR_KEYWORD in kinds
    takes_rest = takes_keywords and Parameter.VAR_POSITIONAL in kinds
    by_position, by_keyword = _positional(mine), {p.name: p for p in mine if p.kind is Parameter.KEYWORD_ONLY}
    found, pairs = [], list(zip(by_position, _positional(theirs), strict=False))
    for wanted in _positional(theirs)[len(by_position) :]:
        if not takes_rest:
            only = "takes {} by keyword alone" if wanted.name in by_keyword else "lacks the parameter {}"
            found.append(f"it {only.format(wanted.name)}")
    further = {p.name: p for p in by_position[len(pairs) :] if p.kind is Parameter.POSITIONAL_OR_KEYWORD} | by_keyword
    for wanted in (p for p in theirs if p.kind is Parameter.KEYWORD_ONLY):
        if wanted.name in further:
            pairs.append((further[wanted.name], wanted))
        elif not takes_keywords:
            found.append(f"it lacks the parameter {wanted.name}")
    found += [
        f"it lacks the parameter {'*' if wanted.kind is Parameter.VAR_POSITIONAL else '**'}{wanted.name}"
        for wanted in theirs
        if wanted.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and wanted.kind not in kinds
    ]
    for given, wanted in pairs:
        if given.kind is Parameter.POSITIONAL_ONLY and wanted.kind is not given.kind:
            found.append(f"its parameter {given.name} is positional-only")
        elif wanted.default is not Parameter.empty and not _equal(given.default, wanted.default):
            found.append(f"its parameter {given.name} has another default than {wanted.name}")
    held = {given.name for given, _ in pairs}
    more = [p.name for p in (*by_position, *by_keyword.values()) if p.name not in held and p.default is Parameter.empty]
    return [*found, *([f"it needs more parameters: {', '.join(more)}"] if more else [])]


def _positional(parameters: list[Parameter]) -> list[Parameter]:
    return [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]


def _name_faults(layer: type, base: type, mine: list[Parameter], theirs: list[Parameter]) -> list[str]:
    names = _renamed(layer, base)
    there = f"({_listed(mine)} for {_listed(theirs)})"
    if {*names.values()} & {p.name for p in mine} or names.keys() & {p.name for p in theirs}:
        return [f"its parameters are in another order {there}"]
    if names and not _can_be_renamed(_function_of(layer), names):
        return [f"its parameters have other names {there}"]
    return []


def _renamed(layer: type, base: type) -> dict[str, str]:
    """Parameter of the layer -> what it is called in the original, where that differs."""
    theirs = _parameters(base)
    if _takes_anything(theirs):
        return {}
    pairs = zip(_positional(_parameters(layer)), _positional(theirs), strict=False)
    return {a.name: b.name for a, b in pairs if a.name != b.name and b.kind is Parameter.POSITIONAL_OR_KEYWORD}


def _parameters(cls: type) -> list[Parameter]:
    """The parameters of a forward, without self."""
    found = list(inspect.signature(_function_of(cls)).parameters.values())
    return found if isinstance(inspect.getattr_static(cls, "forward"), staticmethod) else found[1:]


def _function_of(cls: type) -> Any:  # noqa: ANN401 - whatever a class has as its forward
    forward = inspect.getattr_static(cls, "forward")
    return forward.__func__ if isinstance(forward, staticmethod) else forward


def _rename(function: types.FunctionType, names: dict[str, str]) -> types.FunctionType:
    code = function.__code__
    new = code.replace(
        co_varnames=tuple(names.get(name, name) for name in code.co_varnames),
        co_cellvars=tuple(names.get(name, name) for name in code.co_cellvars),
    )
    renamed = types.FunctionType(
        new, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    renamed.__kwdefaults__ = {names.get(k, k): v for k, v in (function.__kwdefaults__ or {}).items()} or None
    renamed.__dict__.update(function.__dict__)
    renamed.__annotations__ = {names.get(k, k): v for k, v in function.__annotations__.items()}
    renamed.__doc__, renamed.__qualname__, renamed.__module__ = (
        function.__doc__,
        function.__qualname__,
        function.__module__,
    )
    return renamed


def _can_be_renamed(function: object, names: dict[str, str]) -> bool:
    # A decorated function hides its parameters behind *args, and no two locals may have one name.
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return False
    code = function.__code__
    return not {*code.co_varnames, *code.co_freevars} & {*names.values()}


def _takes_anything(parameters: list[Parameter]) -> bool:
    return [p.kind for p in parameters] == [Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD]


def _equal(one: object, other: object) -> bool:
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except Exception:  # noqa: BLE001 - whatever a default's own comparison raises
        return False


def _listed(parameters: list[Parameter]) -> str:
    return ", ".join(p.name for p in parameters)
