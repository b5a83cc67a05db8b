"""What `activation` is held against: each function in float64, written so that nothing cancels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Tolerance, Work
from kernel_loader.conformance.grids.common import Change, as_it_is, strided

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_NAN: Final = float("nan")
_THRESHOLD: Final = 0.25

Function = Callable[[Tensor], Tensor]


# ------------------------------------------------------------------------------------------------------------ formula


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu(x: Tensor) -> Tensor:
    twice_phi: Tensor = torch.special.erfc(-x * math.sqrt(0.5))
    return x * twice_phi / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 is sigmoid(2 * u).
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _gelu_quick(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _fatrelu(x: Tensor, threshold: float) -> Tensor:
    return torch.where(x > threshold, x, 0.0)


def _first_gates(act: Function, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return act(gate) * up


def _second_gates(act: Function, x: Tensor) -> Tensor:
    up, gate = x.chunk(2, dim=-1)
    return up * act(gate)


def _of_function(act: Function, out: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - only written to
    value = act(x.to(_F64))
    return value, value


def _of_fatrelu(out: Tensor, x: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor]:
    return _of_function(partial(_first_gates, partial(_fatrelu, threshold=threshold)), out, x)


def _of_layer(act: Function, module: SimpleNamespace, x: Tensor) -> Tensor:  # noqa: ARG001 - it has no state
    return act(x.to(_F64))


def _of_fatrelu_layer(module: SimpleNamespace, x: Tensor) -> Tensor:
    return _first_gates(partial(_fatrelu, threshold=module.threshold), x.to(_F64))


# ------------------------------------------------------------------------------------------------------------- inputs


def _with_nan(_: Draw, x: Tensor) -> Tensor:
    x[1, ::3] = _NAN
    return x


def _with_large(_: Draw, x: Tensor) -> Tensor:
    """A row of 30 and -30 where exponentials are far from 1, and a row of zeros."""
    x[0] = torch.where(x[0] > 0, 30.0, -30.0)
    x[1] = 0.0
    return x


def _arguments(
    shape: tuple[int, ...], dtype: torch.dtype, change: Change, *, width: int, layer: bool, extra: tuple[float, ...]
) -> Callable[[Draw], Inputs]:
    """`shape` is that of the output; x is `width` times as wide. A function writes into NaN."""

    def make(draw: Draw) -> Inputs:
        x = change(draw, draw.normal(*shape[:-1], width * shape[-1], dtype=dtype, scale=2.0))
        if layer:
            return Inputs(SimpleNamespace(threshold=extra[0]) if extra else SimpleNamespace(), x)
        return Inputs(draw.put(torch.full(shape, _NAN, dtype=dtype)), x, *extra)

    return make


# Which of these it is makes no difference to torch.compile, and there are two dozen entries.
_SHAPES: Final = ((0, 64), (1, 1), (3, 7), (2, 8), (5, 127), (1, 128), (3, 129), (2, 1025), (2, 3, 24), (24,))


def _cases(*, width: int, layer: bool, extra: tuple[float, ...]) -> Iterator[Case]:
    arguments = partial(_arguments, width=width, layer=layer, extra=extra)
    for shape in (*_SHAPES, (3, 0)):
        yield Case(f"shape {shape}", arguments(shape, _BF16, as_it_is), modes=("eager", "graph", "backward"))
    yield Case("bfloat16", arguments((5, 129), _BF16, as_it_is))
    for dtype in (_F16, _F32):
        yield Case(str(dtype).removeprefix("torch."), arguments((5, 129), dtype, as_it_is))
    yield Case("x strided", arguments((5, 24), _BF16, strided))
    yield Case("NaN in a row", arguments((3, 24), _BF16, _with_nan))
    for dtype in (_BF16, _F32):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"large numbers and zeros, {name}", arguments((3, 24), dtype, _with_large))


def _problem(draw: Draw, *, tokens: int, width: int, gated: bool, layer: bool, extra: tuple[float, ...]) -> Inputs:
    return _arguments((tokens, width), _BF16, as_it_is, width=1 + gated, layer=layer, extra=extra)(draw)


def _work(*, tokens: int, width: int, gated: bool) -> Work:
    # About ten operations an element: an exponential, a division, and what is around them.
    return Work(10.0 * tokens * width, 2.0 * tokens * width * (2 + gated), "fp32")


# The MLPs of Llama-3-8B and of Qwen2.5-0.5B.
_SIZES: Final = ({"tokens": 4096, "width": 14336}, {"tokens": 4096, "width": 4864}, {"tokens": 1, "width": 14336})

# Two roundings of a gated function are one unit in the last place; where 1 + erf or 1 + tanh cancels, what float32
# leaves is some 1e-7 of x, which is up to 10 here and multiplied with as much.
_TOLERANCE: Final = Tolerance(least=1e-5)
# Published kernels round tanh, and what it is taken of, to the dtype of x: half of 2 ** -8 of x for bfloat16.
_ROUGH: Final = Tolerance(row=1e-2, least=4e-3)


def _entry(name: str, formula: Callable[..., object], tolerance: Tolerance, *, gated: bool, layer: bool) -> Entry:
    extra = (_THRESHOLD,) if "fatrelu" in name.lower() else ()
    return Entry(
        entrypoint=name,
        cases=tuple(_cases(width=1 + gated, layer=layer, extra=extra)),
        formula=formula,
        tolerance=tolerance,
        mutates=() if layer else (0,),
        skip={"backward": "published builds have none"},
        problem=partial(_problem, gated=gated, layer=layer, extra=extra),
        sizes=_SIZES,
        work=partial(_work, gated=gated),
    )


def _pair(
    function: str, layer: str, act: Function, tolerance: Tolerance = _TOLERANCE, *, gated: bool = False
) -> tuple[Entry, Entry]:
    """An activation as a function, and as a layer."""
    return (
        _entry(function, partial(_of_function, act), tolerance, gated=gated, layer=False),
        _entry(f"layers.{layer}", partial(_of_layer, act), tolerance, gated=gated, layer=True),
    )


ACTIVATION_GRID: Final = (
    *_pair("silu_and_mul", "SiluAndMul", partial(_first_gates, _silu), gated=True),
    *_pair("mul_and_silu", "MulAndSilu", partial(_second_gates, _silu), gated=True),
    *_pair("gelu_and_mul", "GeluAndMul", partial(_first_gates, _gelu), gated=True),
    *_pair("gelu_tanh_and_mul", "GeluTanhAndMul", partial(_first_gates, _gelu_tanh), gated=True),
    _entry("fatrelu_and_mul", _of_fatrelu, _TOLERANCE, gated=True, layer=False),
    _entry("layers.FatreluAndMul", _of_fatrelu_layer, _TOLERANCE, gated=True, layer=True),
    *_pair("gelu_fast", "FastGELU", _gelu_tanh, _ROUGH),
    *_pair("gelu_new", "NewGELU", _gelu_tanh, _ROUGH),
    *_pair("gelu_quick", "QuickGELU", _gelu_quick),
    *_pair("gelu_tanh", "GeluTanh", _gelu_tanh),
    *_pair("silu", "Silu", _silu),
    *_pair("gelu", "Gelu", _gelu),
)
