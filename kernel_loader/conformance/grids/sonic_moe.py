"""What `sonic_moe` is held against: the formula of kernel_loader/bundles/sonic_moe.py in float64.

Every row has weights of its own here: nothing is sorted or grouped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_NAN: Final = float("nan")


class _Activation(Enum):
    """Stands for a member of the enum of whichever build is called: equal to all that have its value."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"

    def __eq__(self, other: object) -> bool:
        return getattr(other, "value", None) == self.value

    def __hash__(self) -> int:
        return hash(self.value)


# ------------------------------------------------------------------------------------------------------------ formula


def _act(gate: Tensor, activation: _Activation) -> Tensor:
    if activation is _Activation.SWIGLU:
        return gate * torch.sigmoid(gate)
    return gate * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))


def _rows(
    x: Tensor,
    scores: Tensor,
    tokens: Tensor,
    experts: Tensor,
    weights: Sequence[Tensor | None],
    activation: _Activation,
    *,
    concat_layout: bool,
) -> Tensor:
    """The sum for each token; `tokens` and `experts` (R,) hold no sentinel."""
    w1, b1, w2, b2 = (None if part is None else part.to(_F64) for part in weights)
    assert w1 is not None
    assert w2 is not None
    inner = w2.shape[1]
    # (I, 2, H, E): gate and up of each inner column.
    pairs = w1.unflatten(0, (2, inner)).transpose(0, 1) if concat_layout else w1.unflatten(0, (inner, 2))  # type: ignore[no-untyped-call]
    first = torch.einsum("rh,ighr->rig", x.to(_F64)[tokens], pairs[..., experts])
    if b1 is not None:
        bias = b1.unflatten(1, (2, inner)).mT if concat_layout else b1.unflatten(1, (inner, 2))  # type: ignore[no-untyped-call]
        first = first + bias[experts]
    second = torch.einsum("ri,hir->rh", _act(first[..., 0], activation) * first[..., 1], w2[..., experts])
    if b2 is not None:
        second = second + b2[experts]
    return torch.zeros(x.shape, dtype=_F64, device=x.device).index_add(0, tokens, scores.to(_F64)[:, None] * second)


def _frequency(experts: Tensor, count: int) -> Tensor:
    return (experts[:, None] == torch.arange(count, device=experts.device)).sum(0, dtype=torch.int32)


def _general(
    x: Tensor,
    scores: Tensor,
    tokens: Tensor,
    experts: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    count: int,
    stream_id: int,  # noqa: ARG001 - the published signature
    activation: _Activation,
    is_inference_mode_enabled: bool = False,  # noqa: ARG001, FBT001, FBT002 - the published signature
    concat_layout: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> tuple[Tensor, Tensor]:
    real = (experts < count).nonzero().squeeze(1)
    weights, ids = (w1, b1, w2, b2), experts[real].long()
    total = _rows(x, scores[real], tokens[real].long(), ids, weights, activation, concat_layout=concat_layout)
    return total, _frequency(experts, count)


def _top_k(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    top_k: int,
    stream_id: int,  # noqa: ARG001 - the published signature
    activation_type: _Activation | str = _Activation.SWIGLU,
    is_inference_mode_enabled: bool = False,  # noqa: ARG001, FBT001, FBT002 - the published signature
    is_softmax_over_topk: bool = True,  # noqa: FBT001, FBT002 - the published signature
    norm_topk_probs: bool = False,  # noqa: FBT001, FBT002 - the published signature
    concat_layout: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.to(_F64) @ router_w.to(_F64).T
    chosen = logits.argsort(dim=1, descending=True)[:, :top_k]
    share = logits.gather(1, chosen).exp()
    among_all = logits.exp().sum(1, keepdim=True)
    scores = share / (share.sum(1, keepdim=True) if is_softmax_over_topk or norm_topk_probs else among_all)
    tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(top_k)
    weights, ids, activation = (w1, b1, w2, b2), chosen.flatten(), _Activation(activation_type)
    total = _rows(x, scores.flatten(), tokens, ids, weights, activation, concat_layout=concat_layout)
    return total, logits, _frequency(ids, router_w.shape[0])


# ------------------------------------------------------------------------------------------------------------- inputs


class _Sizes(NamedTuple):
    """Tokens, hidden, inner, experts, experts of a token."""

    tokens: int
    hidden: int = 64
    inner: int = 32
    experts: int = 8
    top_k: int = 2


def _weights(draw: Draw, size: _Sizes, dtype: torch.dtype, *, bias: bool) -> tuple[Tensor | None, ...]:
    """(w1, b1, w2, b2), laid out as published builds want them: the expert first in memory, and last in the shape."""
    _, hidden, inner, experts, _ = size
    w1 = draw.normal(experts, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5).permute(1, 2, 0)
    w2 = draw.normal(experts, hidden, inner, dtype=dtype, scale=inner**-0.5).permute(1, 2, 0)
    b1 = draw.normal(experts, 2 * inner, dtype=dtype) if bias else None
    return w1, b1, w2, draw.normal(experts, hidden, dtype=dtype) if bias else None


def _triples(
    size: _Sizes,
    *,
    dtype: torch.dtype = _BF16,
    bias: bool = False,
    activation: _Activation = _Activation.SWIGLU,
    concat_layout: bool = False,
    sentinels: float = 0.0,
    past: int = 0,
    only: int | None = None,
    score_dtype: torch.dtype = _F32,
    ids_dtype: torch.dtype = torch.int32,
    strided: bool = False,
) -> Callable[[Draw], Inputs]:
    """Rows in any number a token. A share `sentinels` of them is some, `past` E, with NaN for a score."""

    def make(draw: Draw) -> Inputs:
        rows = size.tokens * size.top_k
        tokens = draw.integers(0, max(size.tokens, 1), rows).sort().values
        experts = draw.integers(0, size.experts, rows)
        if only is not None:
            experts = experts.clamp(only, only)
        scores = draw.uniform(rows, low=0.1)
        away = draw.uniform(rows) < sentinels
        experts = torch.where(away, size.experts + past, experts)
        scores = torch.where(away, _NAN, scores)
        x, weights = draw.normal(size.tokens, size.hidden, dtype=dtype), _weights(draw, size, dtype, bias=bias)
        return Inputs(
            draw.strided(x) if strided else x,
            scores.to(score_dtype),
            tokens.to(ids_dtype),
            experts.to(ids_dtype),
            *weights,
            size.experts,
            0,
            activation,
            concat_layout=concat_layout,
        )

    return make


def _settled_tokens(draw: Draw, size: _Sizes, router: Tensor, dtype: torch.dtype) -> Tensor:
    """Tokens that no rounding of a logit sends to another expert: those with the widest gaps among many."""
    many = draw.normal(16 * size.tokens, size.hidden, dtype=dtype)
    ranked = (many.to(_F64) @ router.to(_F64).T).sort(dim=1, descending=True).values
    if size.top_k == size.experts:
        return many[: size.tokens]
    gap = ranked[:, size.top_k - 1] - ranked[:, size.top_k]
    return many[gap.argsort(descending=True)[: size.tokens]].contiguous()


def _routed(
    size: _Sizes,
    *,
    dtype: torch.dtype = _BF16,
    bias: bool = False,
    **rest: Any,  # noqa: ANN401 - arguments of moe_TC_softmax_topk_layer
) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        router = draw.normal(size.experts, size.hidden, dtype=dtype, scale=size.hidden**-0.5)
        x = _settled_tokens(draw, size, router, dtype)
        return Inputs(x, router, *_weights(draw, size, dtype, bias=bias), size.top_k, 0, **rest)

    return make


_GENERAL_CASES: Final = (
    *(Case(f"{tokens} tokens", _triples(_Sizes(tokens))) for tokens in (0, 1, 7, 127, 128, 129)),
    Case("GEGLU", _triples(_Sizes(17), activation=_Activation.GEGLU)),
    Case("concat_layout", _triples(_Sizes(17), concat_layout=True)),
    Case("some sentinels", _triples(_Sizes(17), sentinels=0.5)),
    Case("sentinels past the first id that is one", _triples(_Sizes(17), sentinels=0.5, past=100)),
    Case("sentinels that 16 bits do not hold", _triples(_Sizes(17), sentinels=0.5, past=65536 - 8)),
    Case("sentinels only", _triples(_Sizes(17), sentinels=2.0)),
    Case("one expert has every row", _triples(_Sizes(70), only=3)),
    Case("one expert there is", _triples(_Sizes(17, experts=1))),
    Case("more experts than rows", _triples(_Sizes(5, experts=64))),
    Case("experts that are no multiple of 8", _triples(_Sizes(17, experts=6))),
    Case("wide", _triples(_Sizes(5, hidden=256, inner=128))),
    Case("sizes that are no multiple of 8", _triples(_Sizes(17, hidden=20, inner=11))),
    Case("float16", _triples(_Sizes(17), dtype=_F16)),
    Case("scores of bfloat16", _triples(_Sizes(17), score_dtype=_BF16)),
    Case("int64 ids", _triples(_Sizes(17), ids_dtype=torch.int64)),
    Case("x strided", _triples(_Sizes(17), strided=True)),
)
_GENERAL_BIASED: Final = (
    Case("biases", _triples(_Sizes(17), bias=True)),
    Case("biases, concat_layout", _triples(_Sizes(17), bias=True, concat_layout=True)),
    Case("biases, GEGLU", _triples(_Sizes(17), bias=True, activation=_Activation.GEGLU)),
    Case("biases, some sentinels", _triples(_Sizes(17), bias=True, sentinels=0.5)),
    Case("biases, sentinels only", _triples(_Sizes(17), bias=True, sentinels=2.0)),
)
_GENERAL_SINGLE: Final = (
    Case("float32", _triples(_Sizes(17), dtype=_F32, bias=True)),
    Case("float32, some sentinels", _triples(_Sizes(17), dtype=_F32, bias=True, sentinels=0.5)),
    Case("float32, concat_layout", _triples(_Sizes(17), dtype=_F32, bias=True, concat_layout=True)),
    Case("float32, GEGLU", _triples(_Sizes(17), dtype=_F32, bias=True, activation=_Activation.GEGLU)),
)

_OVER_ALL: Final[dict[str, Any]] = {"is_softmax_over_topk": False}
_OVER_ALL_NORMALISED: Final[dict[str, Any]] = {**_OVER_ALL, "norm_topk_probs": True}

_TOP_K_CASES: Final = (
    *(Case(f"{tokens} tokens", _routed(_Sizes(tokens))) for tokens in (0, 1, 7, 127, 128, 129)),
    *(Case(f"{k} of 8 experts", _routed(_Sizes(17, top_k=k))) for k in (1, 3, 8)),
    Case("one expert there is", _routed(_Sizes(5, experts=1, top_k=1))),
    Case("6 experts", _routed(_Sizes(17, experts=6))),
    Case("64 experts", _routed(_Sizes(17, experts=64, top_k=8))),
    Case("GEGLU", _routed(_Sizes(17), activation_type=_Activation.GEGLU)),
    Case("the value of an activation", _routed(_Sizes(17), activation_type="geglu")),
    Case("concat_layout", _routed(_Sizes(17), concat_layout=True)),
    Case("softmax over all", _routed(_Sizes(17), **_OVER_ALL)),
    Case("softmax over all, normalised", _routed(_Sizes(17), **_OVER_ALL_NORMALISED)),
    Case("normalised where it is already", _routed(_Sizes(17), norm_topk_probs=True)),
    Case("float16", _routed(_Sizes(17), dtype=_F16)),
)
_TOP_K_BIASED: Final = (
    Case("biases", _routed(_Sizes(17), bias=True)),
    Case("biases, concat_layout", _routed(_Sizes(17), bias=True, concat_layout=True)),
)
_TOP_K_SINGLE: Final = (
    Case("float32", _routed(_Sizes(17), dtype=_F32, bias=True)),
    Case("float32, softmax over all", _routed(_Sizes(17), dtype=_F32, bias=True, **_OVER_ALL)),
    Case("float32, softmax over all, normalised", _routed(_Sizes(17), dtype=_F32, bias=True, **_OVER_ALL_NORMALISED)),
)


def _general_problem(draw: Draw, *, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Inputs:
    return _triples(_Sizes(tokens, hidden, inner, experts, top_k))(draw)


def _top_k_problem(draw: Draw, *, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Inputs:
    size = _Sizes(tokens, hidden, inner, experts, top_k)
    x, router = draw.normal(tokens, hidden, dtype=_BF16), draw.normal(experts, hidden, dtype=_BF16)
    return Inputs(x, router, *_weights(draw, size, _BF16, bias=False), top_k, 0)


def _work(*, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Work:
    rows = tokens * top_k
    # An expert without a row need not be read; rows are gathered from x and summed into the result.
    numbers = 2 * tokens * hidden + min(rows, experts) * 3 * hidden * inner
    return Work(6.0 * rows * hidden * inner, 2.0 * numbers, "bf16")


# Qwen3-30B-A3B, and the published test's own.
_SIZES: Final = (
    {"tokens": 4096, "hidden": 2048, "inner": 768, "experts": 128, "top_k": 8},
    {"tokens": 8192, "hidden": 4096, "inner": 1024, "experts": 64, "top_k": 4},
    {"tokens": 16, "hidden": 2048, "inner": 768, "experts": 128, "top_k": 8},
)

# Builds round gate and up, their product and each row's result to the dtype of x, and logits before there are scores:
# for bfloat16 a logit of 3 is off by 2 ** -7, and a score by as much of itself.
_HALF: Final = Tolerance(row=4e-2)
_SINGLE: Final = Tolerance(row=1e-5)
# A row of a weight's gradient runs over the experts, one of which may have few tokens, whose terms cancel: the terms,
# which are about one here, set the measure.
_HALF_GRADIENT: Final = Tolerance(row=4e-2, least=4e-2)
_SINGLE_GRADIENT: Final = Tolerance(row=1e-5, least=1e-5)


def _entries(
    entrypoint: str,
    formula: Callable[..., Any],
    problem: Callable[..., Inputs],
    gradients: tuple[int, ...],
    biases: tuple[int, int],
    cases: tuple[Sequence[Case], Sequence[Case], Sequence[Case]],
) -> tuple[Entry, Entry, Entry]:
    """Half precision, the same with biases, which have gradients too, and float32 with biases."""
    plain, biased, single = cases
    entry = Entry(
        entrypoint=entrypoint,
        cases=plain,
        formula=formula,
        gradients=gradients,
        tolerance=_HALF,
        gradient_tolerance=_HALF_GRADIENT,
        problem=problem,
        sizes=_SIZES,
        work=_work,
    )
    with_biases = replace(entry, cases=biased, gradients=(*gradients, *biases), problem=None, sizes=())
    return (
        entry,
        with_biases,
        replace(with_biases, cases=single, tolerance=_SINGLE, gradient_tolerance=_SINGLE_GRADIENT),
    )


SONIC_MOE_GRID: Final = (
    *_entries(
        "moe_general_routing_inputs",
        _general,
        _general_problem,
        gradients=(0, 1, 4, 6),
        biases=(5, 7),
        cases=(_GENERAL_CASES, _GENERAL_BIASED, _GENERAL_SINGLE),
    ),
    *_entries(
        "moe_TC_softmax_topk_layer",
        _top_k,
        _top_k_problem,
        gradients=(0, 1, 2, 4),
        biases=(3, 5),
        cases=(_TOP_K_CASES, _TOP_K_BIASED, _TOP_K_SINGLE),
    ),
)
