"""What `relu` is held against: x clamped in float64, NaN counting as zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_NAN: Final = float("nan")


# ------------------------------------------------------------------------------------------------------------ formula


def _rectified(x: Tensor) -> Tensor:
    wide = x.to(_F64)
    return wide.masked_fill(wide.isnan(), 0.0).clamp(min=0.0)


def _into(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - only written to
    return _rectified(x), _rectified(x)


def _of_layer(module: SimpleNamespace, x: Tensor) -> Tensor:  # noqa: ARG001 - it has no state
    return _rectified(x)


# ------------------------------------------------------------------------------------------------------------- inputs

Change = Callable[[Draw, Tensor], Tensor]


def _as_it_is(_: Draw, x: Tensor) -> Tensor:
    return x


def _strided(draw: Draw, x: Tensor) -> Tensor:
    return draw.strided(x)


def _special(_: Draw, x: Tensor) -> Tensor:
    """NaN, infinities, zeros of either sign, and the smallest numbers of either sign."""
    tiny = torch.finfo(x.dtype).tiny
    x[0, :7] = x.new_tensor([_NAN, float("inf"), -float("inf"), 0.0, -0.0, tiny, -tiny])
    return x


def _arguments(shape: tuple[int, ...], dtype: torch.dtype, change: Change, *, form: str) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        x = change(draw, draw.normal(*shape, dtype=dtype))
        if form == "layer":
            return Inputs(SimpleNamespace(), x)
        return Inputs(x, draw.put(torch.full(shape, _NAN, dtype=dtype))) if form == "out" else Inputs(x)

    return make


_ONLY_SOME: Final = "published builds take contiguous float32 tensors that are not empty"


def _cases(*, form: str) -> Iterator[Case]:
    arguments = partial(_arguments, form=form)
    full: tuple[tuple[int, ...], ...] = ((1,), (7,), (1, 1), (3, 127), (2, 1024), (2, 1025), (2, 3, 24))
    empty: tuple[tuple[int, ...], ...] = ((0, 8), (), (3, 0))
    for shape in full:
        yield Case(f"shape {shape}", arguments(shape, _F32, _as_it_is))
    yield Case("what is no common number", arguments((2, 9), _F32, _special), modes=("eager", "graph"))
    for dtype in (_BF16, _F16):
        yield Case(str(dtype).removeprefix("torch."), arguments((5, 9), dtype, _as_it_is), may_refuse=_ONLY_SOME)
    yield Case("strided", arguments((5, 9), _F32, _strided), may_refuse=_ONLY_SOME)
    for shape in empty:
        yield Case(f"shape {shape}", arguments(shape, _F32, _as_it_is), may_refuse=_ONLY_SOME)


def _problem(draw: Draw, *, tokens: int, width: int, form: str) -> Inputs:
    return _arguments((tokens, width), _F32, _as_it_is, form=form)(draw)


def _work(*, tokens: int, width: int) -> Work:
    return Work(1.0 * tokens * width, 8.0 * tokens * width, "fp32")


_SIZES: Final = ({"tokens": 4096, "width": 14336}, {"tokens": 1, "width": 14336})
_ONLY_EAGER: Final[Mapping[Mode, str]] = {
    "backward": "published builds have none",
    "compile": "published builds do not say that they can be compiled",
}

RELU_GRID: Final = (
    Entry(
        entrypoint="relu",
        cases=tuple(_cases(form="new")),
        formula=_rectified,
        skip=_ONLY_EAGER,
        problem=partial(_problem, form="new"),
        sizes=_SIZES,
        work=_work,
    ),
    Entry(
        entrypoint="relu",
        cases=tuple(case._replace(name=f"into out: {case.name}") for case in _cases(form="out")),
        formula=_into,
        mutates=(1,),
        skip=_ONLY_EAGER,
    ),
    Entry(
        entrypoint="layers.ReLU",
        cases=tuple(_cases(form="layer")),
        formula=_of_layer,
        skip=_ONLY_EAGER,
        problem=partial(_problem, form="layer"),
        sizes=_SIZES,
        work=_work,
    ),
)
