"""What `layer_norm` is held against: rows picked by loops, and norms of vectors, in float64. Dropout is left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work
from kernel_loader.conformance.grids.common import Change, Make, as_it_is, off_by_one, strided, uneven, with_nan

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_I32: Final = torch.int32
_EPS: Final = 1e-5


# ------------------------------------------------------------------------------------------------------------ formula


def _normalised(x: Tensor, weight: Tensor, epsilon: float, *, rms: bool) -> tuple[Tensor, Tensor]:
    """The norm of x (..., H), and what it was multiplied with, (...)."""
    wide = x.to(_F64)
    wide = wide if rms else wide - wide.sum(-1, keepdim=True) / x.shape[-1]
    norm = torch.linalg.vector_norm(wide, dim=-1)
    factor = 1 / torch.sqrt(norm * norm / x.shape[-1] + epsilon)
    return weight.to(_F64) * wide * factor.unsqueeze(-1), factor


def _forward(
    input: Tensor,  # noqa: A002 - the published name
    gamma: Tensor,
    beta: Tensor | None,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    z_subset: Tensor | None,
    dropout_p: float,  # noqa: ARG001 - zero
    epsilon: float,
    rowscale_const: float,
    z_numrows: int,
    gen: None,  # noqa: ARG001 - nothing is random
    residual_in_fp32: bool,  # noqa: FBT001 - the published signature
    is_rms_norm: bool,  # noqa: FBT001 - the published signature
) -> list[Tensor | None]:
    x = input.to(_F64)
    if x0_subset is not None:
        nothing = torch.zeros_like(x[:1]).squeeze(0) if len(x) else x.new_zeros(x.shape[1])
        x = torch.stack([rowscale_const * x[place - 1] if place else nothing for place in x0_subset.tolist()])
    elif rowscale is not None:
        x = torch.einsum("rh,r->rh", x, rowscale.to(_F64))
    x = x if colscale is None else torch.einsum("rh,h->rh", x, colscale.to(_F64))
    made, rsigma = _normalised(x, gamma, epsilon, rms=is_rms_norm)
    made = made if beta is None else made + beta.to(_F64)
    z = made
    if z_subset is not None:
        z = torch.zeros_like(made[:0]).new_zeros(z_numrows, made.shape[1])
        for row, place in enumerate(z_subset.tolist()):
            if place:
                z[place - 1] = made[row]
    kept = rowscale is not None or colscale is not None or x0_subset is not None
    kept = kept or (residual_in_fp32 and input.dtype != _F32)
    return [z, x if kept else None, None, x.sum(1) / x.shape[1], rsigma]


def _of_layer(module: SimpleNamespace, x: Tensor, *, rms: bool) -> Tensor:
    return _normalised(x, module.weight, module.variance_epsilon, rms=rms)[0]


# ------------------------------------------------------------------------------------------------------------- inputs


def _far_from_zero(_: Draw, x: Tensor) -> Tensor:
    return x + 8


class _Extras(NamedTuple):
    """What there is besides rows and a weight; subsets as lists of numbers."""

    beta: bool = False
    rowscale: bool = False
    colscale: bool = False
    x0_subset: tuple[int, ...] | None = None
    z_subset: tuple[int, ...] | None = None
    z_numrows: int = 0
    residual_in_fp32: bool = False


def _rows(
    shape: tuple[int, int],
    dtype: torch.dtype = _BF16,
    change: Change = as_it_is,
    extras: _Extras = _Extras(),  # noqa: B008 - it never changes
    *,
    rms: bool,
    weights: torch.dtype | None = None,
    vectors: Change = as_it_is,
) -> Make:
    def make(draw: Draw) -> Inputs:
        def vector(size: int, kind: torch.dtype) -> Tensor:
            return vectors(draw, draw.uniform(size, low=0.5, high=1.5).to(kind))

        def subset(places: tuple[int, ...] | None) -> Tensor | None:
            return None if places is None else draw.put(torch.tensor(places, dtype=_I32))

        x, kind = change(draw, draw.normal(*shape, dtype=dtype)), weights or dtype
        return Inputs(
            x,
            vector(shape[1], kind),
            vector(shape[1], kind) if extras.beta else None,
            vector(shape[0], dtype) if extras.rowscale else None,
            vector(shape[1], kind) if extras.colscale else None,
            subset(extras.x0_subset),
            subset(extras.z_subset),
            0.0,
            _EPS,
            1.5,
            extras.z_numrows,
            None,
            extras.residual_in_fp32,
            rms,
        )

    return make


def _module(
    shape: tuple[int, ...],
    dtype: torch.dtype = _BF16,
    change: Change = as_it_is,
    *,
    weights: torch.dtype | None = None,
) -> Make:
    def make(draw: Draw) -> Inputs:
        weight = draw.uniform(shape[-1], low=0.5, high=1.5).to(weights or dtype)
        x = change(draw, draw.normal(*shape, dtype=dtype))
        return Inputs(SimpleNamespace(weight=weight, variance_epsilon=_EPS), x)

    return make


_WIDTHS: Final = "published builds take widths that are multiples of 8, at most 8192"
_SUBSETS: Final = _Extras(x0_subset=(3, 0, 1, 5), z_subset=(2, 1, 0, 3), z_numrows=3)


def _function_cases(*, rms: bool) -> Iterator[Case]:
    norm = "RMS norm" if rms else "layer norm"
    rows = partial(_rows, rms=rms)

    def case(name: str, make: Make, may_refuse: str = "") -> Case:
        return Case(f"{norm}, {name}", make, may_refuse=may_refuse)

    for shape in ((0, 64), (1, 8), (3, 120), (4, 256), (3, 264), (2, 1032), (300, 8)):
        yield case(f"shape {shape}", rows(shape))
    for width in (1, 7, 129):
        yield case(f"{width} columns", rows((3, width), _F32), _WIDTHS)
    yield case("float16", rows((5, 136), _F16))
    yield case("float32", rows((5, 136), _F32))
    yield case("float32 weights", rows((5, 136), weights=_F32))
    yield case("strided", rows((5, 24), _BF16, strided))
    yield case("sliced", rows((5, 24), _BF16, off_by_one))
    yield case("one row behind one number", rows((1, 24), _BF16, off_by_one))
    yield case("weights strided", rows((5, 24), _BF16, vectors=strided, extras=_Extras(beta=True, colscale=True)))
    yield case("weights sliced", rows((5, 24), _BF16, vectors=off_by_one, extras=_Extras(beta=True, colscale=True)))
    yield case("NaN in a row", rows((3, 24), _BF16, with_nan))
    yield case("rows of zeros, small and large numbers", rows((3, 24), _F32, uneven))
    yield case("far from zero", rows((3, 24), _F32, _far_from_zero))
    yield case("beta", rows((5, 24), extras=_Extras(beta=True)))
    yield case("scales", rows((5, 24), extras=_Extras(rowscale=True, colscale=True)))
    scales = _Extras(beta=True, rowscale=True, colscale=True)
    yield case("scales and float32 weights", rows((5, 24), extras=scales, weights=_F32))
    yield case("x in float32", rows((5, 24), extras=_Extras(residual_in_fp32=True)))
    yield case("x in float32, scaled", rows((5, 24), extras=_Extras(colscale=True, residual_in_fp32=True)))
    yield case("x of float32 in float32", rows((5, 24), _F32, extras=_Extras(residual_in_fp32=True)))
    yield case("subsets of rows", rows((5, 24), extras=_SUBSETS))
    yield case("subsets of rows, scales", rows((5, 24), extras=_SUBSETS._replace(beta=True, colscale=True)))


def _layer_cases() -> Iterator[Case]:
    for shape in ((0, 64), (1, 8), (3, 120), (4, 256), (3, 264), (2, 1032), (2, 3, 24)):
        yield Case(f"shape {shape}", _module(shape))
    yield Case("a vector", _module((24,)), may_refuse="published builds of the layers take two dimensions or more")
    yield Case("7 columns", _module((3, 7)), may_refuse=_WIDTHS)
    yield Case("float16", _module((5, 136), _F16))
    yield Case("float32", _module((5, 136), _F32))
    yield Case("float32 weights", _module((5, 136), weights=_F32))
    refuses = "published builds of the layers view their input as contiguous rows"
    yield Case("strided", _module((5, 24), _BF16, strided), may_refuse=refuses)
    yield Case("NaN in a row", _module((3, 24), _BF16, with_nan))


def _function_problem(draw: Draw, *, tokens: int, width: int, rms: bool) -> Inputs:
    return _rows((tokens, width), rms=rms)(draw)


def _layer_problem(draw: Draw, *, tokens: int, width: int) -> Inputs:
    return _module((tokens, width))(draw)


def _work(*, tokens: int, width: int) -> Work:
    return Work(6.0 * tokens * width, 2.0 * width * (2 * tokens + 1), "fp32")


# Phi-1.5, Llama-3-8B and BERT.
_SIZES: Final = (
    {"tokens": 4096, "width": 2048},
    {"tokens": 4096, "width": 4096},
    {"tokens": 4096, "width": 768},
    {"tokens": 1, "width": 4096},
)

# A float32 sum and half a dozen products, where numbers lie up to ten deviations from zero.
_TOLERANCE: Final = Tolerance(row=5e-6)
_ONLY_EAGER: Final[Mapping[Mode, str]] = {
    "backward": "published builds have none",
    "compile": "published builds do not say that they can be compiled",
}


def _function(*, rms: bool) -> Entry:
    return Entry(
        entrypoint="dropout_add_ln_fwd",
        cases=tuple(_function_cases(rms=rms)),
        formula=_forward,
        tolerance=_TOLERANCE,
        dtypes=(_F32,),
        skip=_ONLY_EAGER,
        problem=partial(_function_problem, rms=rms),
        sizes=_SIZES,
        work=_work,
    )


def _layer(name: str, *, rms: bool) -> Entry:
    return Entry(
        entrypoint=f"layers.{name}",
        cases=tuple(_layer_cases()),
        formula=partial(_of_layer, rms=rms),
        tolerance=_TOLERANCE,
        skip=_ONLY_EAGER,
        problem=_layer_problem,
        sizes=_SIZES,
        work=_work,
    )


LAYER_NORM_GRID: Final = (
    _function(rms=False),
    _function(rms=True),
    _layer("LayerNorm", rms=False),
    _layer("LlamaRMSNorm", rms=True),
)
