"""Guards: what a bundle promises and a published build is known not to keep is mended, once, at load.

A manifest names the guards of each function, by the versions of the repository that need them. They are put around the
function in an order of their own, which is that of `GUARDS`, and nothing is put around a function that needs none. No
guard makes the host wait for the device, save in backward where its description says so.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

# Name -> where the guard is, from the function outwards. The modules import torch, and are imported when a guard is
# put around something.
GUARDS: Final = {
    "current-device": "calls",
    "aligned-memory": "calls",
    "contiguous": "calls",
    "whole-tiles": "fp8",
    "zero-tail": "calls",
    "zero-sentinels": "calls",
    "zero-negative-groups": "calls",
    "zero-places": "mxfp4",
    "whole-weights": "mxfp4",
    "static-scale": "fp8",
    "float-scale": "fp8",
    "wide-indices": "fp8",
    "nan-scale": "fp8",
    "vector": "fp8",
    "empty": "calls",
    "empty-batch": "deformable_detr",
    "int-sizes": "deformable_detr",
    "aligned": "relu",
    "whole-query": "paged_attention",
    "short-scores": "paged_attention",
    "no-keys": "paged_attention",
    "no-elements": "calls",
    "nothing-written": "calls",
    "aligned-rows": "causal_conv1d",
    "whole-ends": "causal_conv1d",
    "no-rows": "causal_conv1d",
    "step-terms": "optional",
    "ones-beta": "optional",
    "pair-dtype": "rotary",
    "table-dtype": "rotary",
    "table-batch": "rotary",
    "left-alone": "rotary",
    "heads-dimension": "rotary",
    "input-gradient": "gradient",
    "sink-gradient": "attention",
    "packed-gradient": "attention",
    "turn-gradient": "rotary",
    "refuse-gradient": "refusal",
    "no-gradient": "calls",
}


class Guarded:
    """A function behind guards. It is called, named and documented as without them, and pickles where it does.

    Attributes:
        __wrapped__: the function itself.
        guards: names of its guards, from the function outwards.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any], guards: Iterable[str]) -> None:
        functools.update_wrapper(self, function)
        chosen = frozenset(guards)
        self.guards = tuple(name for name in GUARDS if name in chosen)
        self._call = function
        for name in self.guards:
            self._call = functools.partial(_find(name), self._call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with what its guards do before and after."""
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Guarded):
            return NotImplemented
        return self.guards == other.guards and bool(self.__wrapped__ == other.__wrapped__)

    def __hash__(self) -> int:
        return hash((self.__wrapped__, self.guards))

    def __repr__(self) -> str:
        return f"<{self.__wrapped__!r} behind {', '.join(self.guards)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Guarded, (self.__wrapped__, self.guards)


def misfit(function: Callable[..., Any], name: str) -> str:
    """Why a guard cannot be put around a function, as far as signatures tell; empty where nothing does.

    A guard passes on what it takes: a function that takes fewer arguments would fail in every call.
    """
    try:
        theirs = inspect.signature(function).parameters.values()
        guards = list(inspect.signature(_find(name)).parameters.values())[1:]  # behind the function itself
    except (TypeError, ValueError):  # what is written in C may have none
        return ""
    kinds = {parameter.kind for parameter in theirs}
    needed = [p for p in guards if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    there = [p for p in theirs if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_POSITIONAL in kinds or len(there) >= len(needed):
        return ""
    takes = ", ".join(p.name for p in there) or "none"
    return f"{name} is for functions of {', '.join(p.name for p in needed)}, and this one takes {takes}"


def _find(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f"kernel_loader.guards.{GUARDS[name]}")
    found: Callable[..., Any] = getattr(module, name.replace("-", "_"))
    return found
