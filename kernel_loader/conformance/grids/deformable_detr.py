"""What `deformable_detr` is held against: each pixel weighed by how far a point is from it, in float64.

Interpolation between pixels is a sum over all pixels of max(0, 1 - |x - j|) * max(0, 1 - |y - i|); autograd makes the
gradients of it. No point lies on a row or column of pixels, where a gradient jumps. In half precision, points lie where
that precision holds them and their distances to pixels exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work
from kernel_loader.conformance.grids.common import may_refuse_backward

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_STEP: Final = 64


# ------------------------------------------------------------------------------------------------------------ formula


def _nearness(point: Tensor, size: int) -> Tensor:
    """How much each of `size` pixels counts for points (...), (..., size)."""
    centres = torch.arange(size, dtype=_F64, device=point.device)
    return (1 - (point.unsqueeze(-1) * size - 0.5 - centres).abs()).clamp(min=0.0)


def _attended(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    im2col_step: int,  # noqa: ARG001 - changes no result
) -> Tensor:
    batch, queries, heads = attn_weight.shape[:3]
    total = value.new_zeros(batch, queries, heads, value.shape[3], dtype=_F64)
    for level, (height, width) in enumerate(spatial_shapes.tolist()):
        start = int(level_start_index[level])
        pixels = value[:, start : start + height * width].to(_F64).reshape(batch, height, width, heads, -1)
        x, y = sampling_loc[:, :, :, level].to(_F64).unbind(-1)
        weights = attn_weight[:, :, :, level].to(_F64)
        shares = torch.einsum("bqmp,bqmpi,bqmpj->bqmij", weights, _nearness(y, height), _nearness(x, width))
        total = total + torch.einsum("bqmij,bijmd->bqmd", shares, pixels)
    return total.flatten(2)


def _backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
    im2col_step: int,
) -> list[Tensor]:
    with torch.enable_grad():
        wide = [tensor.detach().to(_F64).requires_grad_() for tensor in (value, sampling_loc, attn_weight)]
        output = _attended(wide[0], spatial_shapes, level_start_index, wide[1], wide[2], im2col_step)
        return list(torch.autograd.grad(output, wide, grad_output.to(_F64)))


def _of_layer(
    module: SimpleNamespace,  # noqa: ARG001 - it has no state
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_spatial_shapes_list: list[tuple[int, int]],  # noqa: ARG001 - the same once more
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    return _attended(value, value_spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step)


# ------------------------------------------------------------------------------------------------------------- inputs


class _Sizes(NamedTuple):
    """Batches, queries, heads, channels of a head, points, and height and width of each map."""

    batch: int = 2
    queries: int = 5
    heads: int = 2
    channels: int = 8
    points: int = 4
    maps: tuple[tuple[int, int], ...] = ((6, 4), (3, 5), (1, 1))


Change = Callable[[Draw, Tensor], Tensor]


def _as_it_is(_: Draw, x: Tensor) -> Tensor:
    return x


def _strided(draw: Draw, x: Tensor) -> Tensor:
    return draw.strided(x)


def _arguments(
    sizes: _Sizes,
    dtype: torch.dtype = _F32,
    change: Change = _as_it_is,
    *,
    form: str,
    step: int = _STEP,
    low: float = -0.3,
    high: float = 1.3,
    gap: int = 0,
) -> Callable[[Draw], Inputs]:
    """Points lie within low and high of the side of a map; maps have `gap` rows of value before them."""

    def make(draw: Draw) -> Inputs:
        batch, queries, heads, channels, points, maps = sizes
        areas = [gap + height * width for height, width in maps]
        starts = [gap + sum(areas[:level]) for level in range(len(maps))]
        value = draw.normal(batch, sum(areas), heads, channels, dtype=dtype)
        shape = (batch, queries, heads, len(maps), points)
        if dtype == _F32:
            loc = draw.uniform(*shape, 2, low=low, high=high)
        else:
            loc = ((2 * draw.integers(-4, 20, *shape, 2) + 1) / 32).to(dtype)
        weight = draw.uniform(*shape, low=-1.0).to(dtype)
        value, loc, weight = (change(draw, x) for x in (value, loc, weight))
        shapes, starts_ = draw.put(torch.tensor(maps)), draw.put(torch.tensor(starts))
        if form == "layer":
            return Inputs(SimpleNamespace(), value, shapes, list(maps), starts_, loc, weight, step)
        if form == "backward":
            grad = draw.normal(batch, queries, heads * channels, dtype=dtype)
            return Inputs(value, shapes, starts_, loc, weight, change(draw, grad), step)
        return Inputs(value, shapes, starts_, loc, weight, step)

    return make


_HALF_MAPS: Final = ((4, 8), (8, 2))


def _cases(*, form: str) -> Iterator[Case]:
    arguments = partial(_arguments, form=form)
    refuses = "published builds of the layer take contiguous tensors" if form == "layer" else ""
    yield Case("three maps", arguments(_Sizes()))
    yield Case("points within the maps", arguments(_Sizes(), low=0.0, high=1.0))
    yield Case("points far outside", arguments(_Sizes(), low=2.0, high=9.0))
    yield Case("one of everything", arguments(_Sizes(1, 1, 1, 1, 1, ((3, 2),))))
    yield Case("a map of one row", arguments(_Sizes(maps=((1, 7),))))
    for channels in (2, 31, 33, 64, 1025, 2048):
        yield Case(f"{channels} channels", arguments(_Sizes(1, 3, 1, channels, 2, ((3, 4),))))
    yield Case("no queries", arguments(_Sizes(queries=0)))
    yield Case("rows between the maps", arguments(_Sizes(), gap=3))
    yield Case("batches one by one", arguments(_Sizes(batch=3), step=1))
    yield Case("batches by twos", arguments(_Sizes(batch=4), step=2))
    yield Case("strided", arguments(_Sizes(), _F32, _strided), may_refuse=refuses)


def _in_half(*, form: str) -> Iterator[Case]:
    for dtype in (_BF16, _F16):
        name = str(dtype).removeprefix("torch.")
        yield Case(name, _arguments(_Sizes(maps=_HALF_MAPS), dtype, form=form))
        yield Case(f"{name}, one query", _arguments(_Sizes(1, 1, 1, 16, 4, _HALF_MAPS), dtype, form=form))


def _problem(draw: Draw, *, queries: int, side: int, form: str) -> Inputs:
    maps = tuple((side >> level, side >> level) for level in range(4))
    return _arguments(_Sizes(1, queries, 8, 32, 4, maps), form=form)(draw)


def _work(*, queries: int, side: int, passes: float) -> Work:
    """A point of a channel is four products and sums, and one more by its weight; backward is twice as much."""
    pixels = sum((side >> level) ** 2 for level in range(4))
    points = queries * 8 * 4 * 4
    return Work(passes * points * 32 * 10.0, passes * 4.0 * (pixels * 256 + 3 * points + queries * 256), "fp32")


# The encoder, whose queries are all pixels, and the decoder of Deformable DETR for an image of 800 pixels.
_SIZES: Final = ({"queries": 13_294, "side": 100}, {"queries": 300, "side": 100})

# A point is known to 2 ** -24 of a side; a map of 6 pixels differs by up to 4 from one to the next.
_SINGLE: Final = Tolerance(row=1e-5, least=1e-5)
# A gradient to a point is the side of the map times a sum over channels, whose terms cancel.
_SINGLE_GRADIENT: Final = Tolerance(row=1e-5, least=2e-4)
# Sums of a few dozen terms, each rounded to 2 ** -9 of it.
_HALF: Final = Tolerance(row=3e-2, least=3e-2)

_LAYER_GRADIENTS: Final = (1, 5, 6)
_CONTIGUOUS: Final = "published builds of the layer take a contiguous gradient"
_COMPILE: Final = "published builds do not say that they can be compiled"
_FORWARD: Final[Mapping[Mode, str]] = {
    "backward": "it has a backward of its own, and the layer has both",
    "compile": _COMPILE,
}
_BACKWARD: Final[Mapping[Mode, str]] = {"backward": "it is one", "compile": _COMPILE}
_LAYER: Final[Mapping[Mode, str]] = {"compile": _COMPILE}

DEFORMABLE_DETR_GRID: Final = (
    Entry(
        entrypoint="ms_deform_attn_forward",
        cases=tuple(_cases(form="forward")),
        formula=_attended,
        tolerance=_SINGLE,
        skip=_FORWARD,
        problem=partial(_problem, form="forward"),
        sizes=_SIZES,
        work=partial(_work, passes=1.0),
    ),
    Entry(
        entrypoint="ms_deform_attn_forward",
        cases=tuple(_in_half(form="forward")),
        formula=_attended,
        tolerance=_HALF,
        skip=_FORWARD,
    ),
    Entry(
        entrypoint="ms_deform_attn_backward",
        cases=tuple(_cases(form="backward")),
        formula=_backward,
        tolerance=_SINGLE_GRADIENT,
        skip=_BACKWARD,
        problem=partial(_problem, form="backward"),
        sizes=_SIZES,
        work=partial(_work, passes=2.0),
    ),
    Entry(
        entrypoint="ms_deform_attn_backward",
        cases=tuple(_in_half(form="backward")),
        formula=_backward,
        tolerance=_HALF,
        skip=_BACKWARD,
    ),
    Entry(
        entrypoint="layers.MultiScaleDeformableAttention",
        cases=may_refuse_backward(_cases(form="layer"), _CONTIGUOUS),
        formula=_of_layer,
        gradients=_LAYER_GRADIENTS,
        skip=_LAYER,
        tolerance=_SINGLE,
        gradient_tolerance=_SINGLE_GRADIENT,
        problem=partial(_problem, form="layer"),
        sizes=_SIZES,
        work=partial(_work, passes=1.0),
    ),
    Entry(
        entrypoint="layers.MultiScaleDeformableAttention",
        cases=may_refuse_backward(_in_half(form="layer"), _CONTIGUOUS),
        formula=_of_layer,
        gradients=_LAYER_GRADIENTS,
        skip=_LAYER,
        tolerance=_HALF,
    ),
)
