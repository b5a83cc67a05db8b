"""What `rmsnorm` is held against: the norm in float64, and the gradients that autograd makes of it.

Builds round what the weight multiplies to the dtype of the input, the formula does not. An output hardly shows it,
being rounded itself; a gradient to the weight adds up as many such roundings as there are rows, so that half precision
has an entry of its own, with a tolerance of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Tolerance, Work
from kernel_loader.conformance.grids.common import Change, Make, as_it_is, strided, uneven, with_nan

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_EPS: Final = 1e-5


# ------------------------------------------------------------------------------------------------------------ formula


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(_F64)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return weight.to(_F64) * wide / torch.sqrt(norm * norm / x.shape[-1] + eps)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    output: Tensor,  # noqa: ARG001 - a build may make use of it
    rstd: Tensor,  # noqa: ARG001 - as above
    eps: float,
    input_requires_grad: bool = True,  # noqa: FBT001, FBT002 - the published signature
    weight_requires_grad: bool = True,  # noqa: FBT001, FBT002 - the published signature
) -> tuple[Tensor | None, Tensor | None]:
    with torch.enable_grad():
        wide, scale = x.to(_F64).requires_grad_(), weight.to(_F64).requires_grad_()
        to_input, to_weight = torch.autograd.grad(_normalised(wide, scale, eps), (wide, scale), grad.to(_F64))
    return to_input if input_requires_grad else None, to_weight if weight_requires_grad else None


def _of_layer(module: SimpleNamespace, x: Tensor) -> Tensor:
    return _normalised(x, module.weight, module.variance_epsilon)


# ------------------------------------------------------------------------------------------------------------- inputs

Shape = tuple[int, ...]


def _drawn(draw: Draw, shape: Shape, dtype: torch.dtype, change: Change = as_it_is) -> tuple[Tensor, Tensor]:
    weight = draw.uniform(shape[-1], low=0.5, high=1.5).to(dtype)
    return change(draw, draw.normal(*shape, dtype=dtype)), weight


def _for_forward(shape: Shape, dtype: torch.dtype, change: Change = as_it_is) -> Make:
    return lambda draw: Inputs(*_drawn(draw, shape, dtype, change), _EPS)


def _for_layer(shape: Shape, dtype: torch.dtype, change: Change = as_it_is) -> Make:
    def make(draw: Draw) -> Inputs:
        x, weight = _drawn(draw, shape, dtype, change)
        return Inputs(SimpleNamespace(weight=weight, variance_epsilon=_EPS), x)

    return make


def _for_backward(shape: Shape, dtype: torch.dtype, change: Change = as_it_is, *flags: bool) -> Make:
    def make(draw: Draw) -> Inputs:
        x, weight = _drawn(draw, shape, dtype, change)
        output = _normalised(x, weight, _EPS).to(dtype)
        rstd = torch.rsqrt(x.to(_F64).square().mean(-1) + _EPS).to(_F32)
        return Inputs(draw.normal(*shape, dtype=dtype), x, weight, output, rstd, _EPS, *flags)

    return make


# With one column there is nothing but eps in a gradient to the input, and float32 loses it.
_SHAPES: Final = ((0, 64), (1, 2), (1, 64), (3, 7), (5, 127), (4, 128), (3, 129), (2, 1025), (2, 3, 24), (24,))


def _in_half(make: Callable[..., Make]) -> Iterator[Case]:
    for shape in _SHAPES:
        yield Case(f"shape {shape}", make(shape, _BF16))
    yield Case("float16", make((5, 129), _F16))
    yield Case("x strided", make((5, 24), _BF16, strided))
    yield Case("NaN in a row", make((3, 24), _BF16, with_nan))


def _in_single(make: Callable[..., Make]) -> Iterator[Case]:
    for shape in ((1, 2), (5, 127), (3, 129), (2, 3, 24)):
        yield Case(f"float32, shape {shape}", make(shape, _F32))
    yield Case("float32, x strided", make((5, 24), _F32, strided))
    yield Case("rows of zeros, small and large numbers", make((3, 24), _F32, uneven))


def _forward_problem(draw: Draw, *, tokens: int, width: int) -> Inputs:
    return _for_forward((tokens, width), _BF16)(draw)


def _backward_problem(draw: Draw, *, tokens: int, width: int) -> Inputs:
    return _for_backward((tokens, width), _BF16)(draw)


def _layer_problem(draw: Draw, *, tokens: int, width: int) -> Inputs:
    return _for_layer((tokens, width), _BF16)(draw)


def _forward_work(*, tokens: int, width: int) -> Work:
    return Work(4.0 * tokens * width, 2.0 * width * (2 * tokens + 1), "fp32")


def _backward_work(*, tokens: int, width: int) -> Work:
    return Work(10.0 * tokens * width, 2.0 * width * (3 * tokens + 2), "fp32")


# Llama-3-8B, DeepSeek-V3, Qwen2.5-0.5B.
_SIZES: Final = (
    {"tokens": 4096, "width": 4096},
    {"tokens": 4096, "width": 7168},
    {"tokens": 4096, "width": 896},
    {"tokens": 1, "width": 4096},
)

# A float32 sum and half a dozen products, for numbers that are a few times as large as the row is on average.
_SINGLE: Final = Tolerance(row=2e-6)
_SINGLE_GRADIENT: Final = Tolerance(row=1e-5)
# A rounding is 2 ** -9 of its term; those of the rows of a small batch may fall the same way.
_HALF_GRADIENT: Final = Tolerance(row=1e-2)

RMSNORM_GRID: Final = (
    Entry(
        entrypoint="apply_rms_norm",
        cases=(*_in_half(_for_forward), *_in_single(_for_forward), Case("one column", _for_forward((3, 1), _F32))),
        formula=_normalised,
        tolerance=_SINGLE,
        skip={"backward": "it has a backward of its own, and the layer has both"},
        problem=_forward_problem,
        sizes=_SIZES,
        work=_forward_work,
    ),
    Entry(
        entrypoint="apply_rms_norm_backward",
        cases=(
            *_in_half(_for_backward),
            Case("input alone", _for_backward((5, 24), _BF16, as_it_is, True, False)),  # noqa: FBT003 - as published
            Case("weight alone", _for_backward((5, 24), _BF16, as_it_is, False, True)),  # noqa: FBT003 - as published
        ),
        formula=_backward,
        tolerance=_HALF_GRADIENT,
        skip={"backward": "it is one"},
        problem=_backward_problem,
        sizes=_SIZES,
        work=_backward_work,
    ),
    Entry(
        entrypoint="apply_rms_norm_backward",
        cases=tuple(_in_single(_for_backward)),
        formula=_backward,
        tolerance=_SINGLE_GRADIENT,
        skip={"backward": "it is one"},
    ),
    Entry(
        entrypoint="layers.RMSNorm",
        cases=tuple(_in_half(_for_layer)),
        formula=_of_layer,
        gradients=(1, "0.weight"),
        tolerance=_SINGLE,
        gradient_tolerance=_HALF_GRADIENT,
        problem=_layer_problem,
        sizes=_SIZES,
        work=_forward_work,
    ),
    Entry(
        entrypoint="layers.RMSNorm",
        cases=tuple(_in_single(_for_layer)),
        formula=_of_layer,
        gradients=(1, "0.weight"),
        tolerance=_SINGLE,
        gradient_tolerance=_SINGLE_GRADIENT,
    ),
)
