"""What `rotary` is held against: pairs as complex numbers, multiplied by exp(i * angle) in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# ------------------------------------------------------------------------------------------------------------ formula


def _apply_rotary(
    x1: Tensor,
    x2: Tensor,
    cos: Tensor,
    sin: Tensor,
    out1: Tensor,  # noqa: ARG001 - only written to
    out2: Tensor,  # noqa: ARG001 - only written to
    conj: bool,  # noqa: FBT001 - the published signature
) -> tuple[None, Tensor, Tensor]:
    angle = torch.complex(cos.to(_F64), sin.to(_F64))
    turned = torch.complex(x1.to(_F64), x2.to(_F64)) * (angle.conj() if conj else angle)
    return None, turned.real, turned.imag


def _apply_rotary_transformers(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    half = q.shape[-1] // 2
    angle = torch.complex(cos[..., :half].to(_F64), sin[..., :half].to(_F64)).unsqueeze(unsqueeze_dim)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.complex(x[..., :half].to(_F64), x[..., half:].to(_F64)) * angle
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    return turned(q), turned(k)


def _of_layer(module: SimpleNamespace, *args: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401, ARG001 - no state
    return _apply_rotary_transformers(*args)


# ------------------------------------------------------------------------------------------------------------- inputs


def _tables(draw: Draw, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of any angles, two tensors of that shape."""
    angle = draw.uniform(*shape, low=-4.0, high=4.0)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _pairs(
    *shape: int,
    dtype: torch.dtype = _BF16,
    tables: torch.dtype | None = None,
    conj: bool = False,
    strided: bool = False,
) -> Callable[[Draw], Inputs]:
    """(batch, sequence, heads, d) for each of a pair; `strided` has them as the halves of one tensor, outputs too."""

    def make(draw: Draw) -> Inputs:
        x = draw.normal(*shape[:-1], 2 * shape[-1], dtype=dtype)
        out = torch.full_like(x, float("nan"))
        x1, x2, out1, out2 = (*x.chunk(2, dim=-1), *out.chunk(2, dim=-1))
        if not strided:
            x1, x2, out1, out2 = (part.contiguous() for part in (x1, x2, out1, out2))
        cos, sin = _tables(draw, shape[1], 1, shape[-1], dtype=tables or dtype)
        return Inputs(x1, x2, cos, sin, out1, out2, conj)

    return make


def _heads(
    batch: int,
    sequence: int,
    queries: int,
    keys: int,
    width: int,
    *,
    dtype: torch.dtype = _BF16,
    tables: torch.dtype | None = None,
    halves: int = 2,
    unsqueeze_dim: int = 1,
    strided: bool = False,
    one_table: bool = False,
    layer: bool = False,
) -> Callable[[Draw], Inputs]:
    """Queries and keys, with tables that have each angle `halves` times, for each sequence or for all alike."""

    def make(draw: Draw) -> Inputs:
        shapes = [[batch, heads, sequence, width] for heads in (queries, keys)]
        q, k = (draw.normal(*shape, dtype=dtype) for shape in shapes)
        if unsqueeze_dim == 2:
            q, k = (x.transpose(1, 2).contiguous() for x in (q, k))
        if strided:
            q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
        cos, sin = _tables(draw, 1 if one_table else batch, sequence, width // 2, dtype=tables or dtype)
        cos, sin = (torch.cat([table] * halves, dim=-1) for table in (cos, sin))
        dim = () if unsqueeze_dim == 1 else (unsqueeze_dim,)
        return Inputs(*((SimpleNamespace(),) if layer else ()), q, k, cos, sin, *dim)

    return make


_ONE_DTYPE: Final = "published builds of the layer want cos and sin in the dtype of q and k"

_PAIR_CASES: Final = (
    *(
        Case(f"shape {shape}", _pairs(*shape))
        for shape in ((1, 1, 1, 1), (2, 0, 4, 32), (1, 1, 8, 64), (2, 3, 5, 7), (1, 17, 3, 40), (2, 129, 2, 64))
    ),
    Case("turned back", _pairs(2, 5, 3, 32, conj=True)),
    Case("float16", _pairs(2, 5, 3, 32, dtype=_F16)),
    Case("float32", _pairs(2, 5, 3, 32, dtype=_F32)),
    Case("float32, turned back", _pairs(2, 5, 3, 32, dtype=_F32, conj=True)),
    Case("float32 tables", _pairs(2, 5, 3, 32, tables=_F32)),
    Case("float32 tables, the halves of a head", _pairs(2, 5, 3, 32, tables=_F32, strided=True)),
    Case("the halves of a head", _pairs(2, 5, 3, 32, strided=True)),
    Case("the halves of a head, turned back", _pairs(2, 5, 3, 32, strided=True, conj=True)),
)


def _head_cases(*, layer: bool) -> tuple[Case, ...]:
    heads = partial(_heads, layer=layer)
    return (
        *(
            Case(f"{queries} heads of queries, {keys} of keys", heads(2, 5, queries, keys, 64))
            for queries, keys in ((1, 1), (4, 4), (8, 2), (7, 1))
        ),
        *(Case(f"{tokens} tokens", heads(1, tokens, 2, 1, 64)) for tokens in (0, 1, 17, 127, 129)),
        *(Case(f"heads of {width}", heads(2, 3, 2, 1, width)) for width in (2, 6, 80, 128, 256)),
        Case("tables of half a head", heads(2, 5, 4, 2, 64, halves=1)),
        Case("one table for all sequences", heads(2, 5, 4, 2, 64, one_table=True)),
        Case("float32 tables", heads(2, 5, 4, 2, 64, tables=_F32), may_refuse=_ONE_DTYPE if layer else ""),
        Case("heads after tokens", heads(2, 5, 4, 2, 64, unsqueeze_dim=2)),
        Case("transposed", heads(2, 5, 4, 2, 64, strided=True)),
        Case("float16", heads(2, 5, 4, 2, 64, dtype=_F16)),
    )


def _single_cases(*, layer: bool) -> tuple[Case, ...]:
    heads = partial(_heads, layer=layer, dtype=_F32)
    return (
        Case("float32", heads(2, 5, 4, 2, 64)),
        Case("float32, heads of 2", heads(2, 3, 2, 1, 2)),
        Case("float32, transposed", heads(2, 5, 4, 2, 64, strided=True)),
        Case("bfloat16 tables", heads(2, 5, 4, 2, 64, tables=_BF16), may_refuse=_ONE_DTYPE if layer else ""),
    )


def _pair_problem(draw: Draw, *, tokens: int, heads: int, width: int) -> Inputs:
    return _pairs(1, tokens, heads, width // 2)(draw)


def _pair_work(*, tokens: int, heads: int, width: int) -> Work:
    return Work(3.0 * tokens * heads * width, 4.0 * tokens * heads * width + 2.0 * tokens * width, "fp32")


def _head_problem(draw: Draw, *, tokens: int, queries: int, keys: int, width: int, layer: bool = False) -> Inputs:
    return _heads(1, tokens, queries, keys, width, layer=layer)(draw)


def _head_work(*, tokens: int, queries: int, keys: int, width: int) -> Work:
    numbers = tokens * (queries + keys) * width
    return Work(3.0 * numbers, 4.0 * numbers + 4.0 * tokens * width, "fp32")


# The heads of Llama-3-8B, and of DeepSeek-V3's turned part.
_PAIR_SIZES: Final = ({"tokens": 4096, "heads": 32, "width": 128}, {"tokens": 4096, "heads": 128, "width": 64})
_HEAD_SIZES: Final = (
    {"tokens": 4096, "queries": 32, "keys": 8, "width": 128},
    {"tokens": 1, "queries": 32, "keys": 8, "width": 128},
)

# Two products of numbers up to 5, and their sum in float32, which may cancel.
_TOLERANCE: Final = Tolerance(least=1e-6)
# Autograd adds the two products of a gradient in the dtype of q: two roundings of numbers up to 4.
_HALF_GRADIENT: Final = Tolerance(least=2e-2)


def _head_entries(entrypoint: str, formula: Callable[..., Any], *, layer: bool) -> tuple[Entry, Entry]:
    """Half precision and float32, whose gradients are not equally near."""
    gradients = () if layer else (0, 1)
    skip: dict[Mode, str] = {"backward": "published builds have none that is right"} if layer else {}
    half = Entry(
        entrypoint=entrypoint,
        cases=_head_cases(layer=layer),
        formula=formula,
        gradients=gradients,
        tolerance=_TOLERANCE,
        gradient_tolerance=_HALF_GRADIENT,
        skip=skip,
        problem=partial(_head_problem, layer=layer),
        sizes=_HEAD_SIZES,
        work=_head_work,
    )
    single = Entry(
        entrypoint=entrypoint,
        cases=_single_cases(layer=layer),
        formula=formula,
        gradients=gradients,
        tolerance=_TOLERANCE,
        skip=skip,
    )
    return half, single


ROTARY_GRID: Final = (
    Entry(
        entrypoint="apply_rotary",
        cases=_PAIR_CASES,
        formula=_apply_rotary,
        tolerance=_TOLERANCE,
        mutates=(4, 5),
        skip={"backward": "it writes into its outputs"},
        problem=_pair_problem,
        sizes=_PAIR_SIZES,
        work=_pair_work,
    ),
    *_head_entries("apply_rotary_transformers", _apply_rotary_transformers, layer=False),
    *_head_entries("layers.apply_rotary_transformers", _of_layer, layer=True),
)
