"""What several grids share: changes of an input, and cases of builds that torch.compile makes no single graph of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Inputs, Mode

Make = Callable[[Draw], Inputs]
Change = Callable[[Draw, Tensor], Tensor]

_UNCOMPILED: Final[tuple[Mode, ...]] = ("eager", "graph", "backward")


def as_it_is(_: Draw, x: Tensor) -> Tensor:
    """No change."""
    return x


def strided(draw: Draw, x: Tensor) -> Tensor:
    """Not contiguous."""
    return draw.strided(x)


def with_nan(_: Draw, x: Tensor) -> Tensor:
    """One NaN, in the second row."""
    x[1, 3] = float("nan")
    return x


def uneven(_: Draw, x: Tensor) -> Tensor:
    """Rows of zeros, of numbers whose squares are far below eps, and of numbers whose squares no float16 holds."""
    return x * x.new_tensor([[0.0], [1e-4], [1e4]])


def uncompiled(name: str, make: Make, may_refuse: str = "") -> Case:
    """A case of a build which makes no single graph: in the other modes."""
    return Case(name, make, _UNCOMPILED, may_refuse)


def compiled(name: str, make: Make) -> Case:
    """The same as one graph, which such a build may refuse."""
    return Case(f"{name}, compiled", make, ("compile",), "torch.compile makes no single graph of it")


def may_refuse_backward(cases: Iterable[Case], why: str) -> tuple[Case, ...]:
    """The same cases, with backward apart, which a published build may refuse."""
    split = []
    for case in cases:
        forward = tuple(mode for mode in case.modes if mode != "backward")
        split.append(case._replace(modes=forward))
        if forward != case.modes:
            split.append(Case(f"{case.name}, backward", case.make, ("backward",), case.may_refuse or why))
    return tuple(split)


def off_by_one(_: Draw, x: Tensor) -> Tensor:
    """Equal values, (..., N), from the second element on of rows that hold three more."""
    wide = torch.ones((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype, device=x.device)[..., 1:-2]
    return wide.copy_(x)
