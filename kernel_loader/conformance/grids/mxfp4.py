"""What `mxfp4` is held against: the formulas of kernel_loader/bundles/mxfp4.py, dense and in float64.

The product and the activation are called through `MXFP4.plain`, which makes the objects of a build out of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_I32: Final = torch.int32
_NAN: Final = float("nan")
_GROUP: Final = 32

# GPT-OSS.
_ALPHA, _LIMIT = 1.702, 7.0

# ------------------------------------------------------------------------------------------------------------ formula


def _weight(codes: Tensor, scales: Tensor) -> Tensor:
    """The real numbers of (E, N, K), float64."""
    code = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    scale = torch.ldexp(torch.ones(scales.shape, dtype=_F64, device=codes.device), scales.int() - 127)
    return _e2m1_values(codes.device)[code] * scale.repeat_interleave(_GROUP, -1)


def _e2m1_values(device: torch.device) -> Tensor:
    """The number of each of the 16 codes, from sign, exponent and mantissa. float64."""
    numbers = []
    for code in range(16):
        exponent, mantissa = code >> 1 & 3, (code & 1) / 2
        magnitude = mantissa if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - 1)
        numbers.append(-magnitude if code > 7 else magnitude)
    return torch.tensor(numbers, dtype=_F64, device=device)


def _activated(a: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, linear = a[..., 0::2], a[..., 1::2]
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    opened: Tensor = gate / (1 + torch.exp(-alpha * gate)) * (linear + 1)
    return opened


def _matmul(
    x: Tensor,
    weight: tuple[Tensor, Tensor],
    bias: Tensor | None,
    expt_hist: Tensor,
    route_at: Tensor,
    place_of: Tensor,
    k: int,
    *,
    gather: bool = False,
    scatter: bool = False,
    gammas: Tensor | None = None,
    swiglu: tuple[float, float | None] | None = None,
    out_dtype: torch.dtype | None = None,  # noqa: ARG001 - rounds, which is for the tolerance
) -> Tensor:
    expert = torch.arange(len(expt_hist), device=x.device).repeat_interleave(expt_hist.long())
    real = len(expert)
    row = route_at[:real].long() // k if gather else torch.arange(real, device=x.device)
    wide, weights = x.to(_F64), _weight(*weight)
    made = torch.cat([wide[row[expert == e]] @ weights[e].T for e in range(len(expt_hist))])
    if bias is not None:
        made = made + bias.to(_F64)[expert]
    if swiglu is not None:
        made = _activated(made, *swiglu)
    if gammas is not None:
        made = made * gammas.to(_F64)[:real, None]
    # One row more, of zeros, for routes without a place.
    places = torch.zeros(len(route_at) + 1, made.shape[1], dtype=_F64, device=x.device)
    places[:real] = made
    return places[place_of.long()].reshape(-1, k, made.shape[1]).sum(1) if scatter else places[:-1]


def _swiglu(a: Tensor, alpha: float, limit: float | None, expt_hist: Tensor | None = None) -> Tensor:
    made = _activated(a.to(_F64), alpha, limit)
    if expt_hist is not None:
        made[int(expt_hist.sum()) :] = 0.0
    return made


def _routing(logits: Tensor, n_expts_act: int, sm_first: bool = False) -> tuple[Tensor, ...]:  # noqa: FBT001, FBT002
    """Weights of places, places of each expert, and the two indices twice; by a matrix of who comes before whom."""
    rows, experts = logits.shape
    wide, index = logits.to(_F64), torch.arange(experts, device=logits.device)
    before = (wide[:, None] > wide[:, :, None]) | ((wide[:, None] == wide[:, :, None]) & (index < index[:, None]))
    chosen = before.sum(-1) < n_expts_act
    weights = torch.softmax(wide if sm_first else wide.masked_fill(~chosen, float("-inf")), dim=1)
    route_of = chosen.cumsum(1) - 1 + torch.arange(rows, device=logits.device)[:, None] * n_expts_act
    in_order = chosen.T.nonzero()  # by expert, then by row
    route_at = route_of[in_order[:, 1], in_order[:, 0]]
    place_of = torch.argsort(route_at)
    gates = weights[in_order[:, 1], in_order[:, 0]]
    places = [part.to(_I32) for part in (route_at, place_of)]
    return gates, chosen.sum(0).to(_I32), *places, *places


def _parts(found: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - objects of a build, or what the formula makes
    if isinstance(found[0], Tensor):
        return tuple(found)
    data, gather, scatter = found
    return data.gate_scal, data.expt_hist, gather.src_indx, gather.dst_indx, scatter.dst_indx, scatter.src_indx


# ------------------------------------------------------------------------------------------------------------- inputs


def _draw_weight(draw: Draw, experts: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes of every kind, and exponents as trained weights have them."""
    codes = draw.integers(0, 256, experts, n, k // 2, dtype=torch.uint8)
    return codes, draw.integers(117, 123, experts, n, k // _GROUP, dtype=torch.uint8)


def _routes(draw: Draw, experts: int, rows: int, k: int, *, foreign: float, only: int | None) -> tuple[Tensor, ...]:
    """Places of each expert, and the two indices. A share of the routes goes to experts elsewhere."""
    score = draw.uniform(rows, experts + k).cpu()
    score[:, experts:] -= 1.0 - foreign
    if only is not None:
        score[:, :experts] -= 4.0
        score[:, only] += 8.0
    expert = score.argsort(dim=1, descending=True)[:, :k].sort(dim=1).values.clamp(max=experts).flatten()
    order = torch.argsort(expert, stable=True)
    hist = torch.bincount(expert, minlength=experts + 1)[:experts]
    real = int(hist.sum())
    route_at, place_of = torch.full((rows * k,), -1), torch.full((rows * k,), -1)
    route_at[:real] = order[:real]
    place_of[order[:real]] = torch.arange(real)
    return tuple(draw.put(part.to(_I32)) for part in (hist, route_at, place_of))


def _multiply(
    rows: int,
    n: int,
    k: int,
    *,
    experts: int = 8,
    choices: int = 4,
    dtype: torch.dtype = _BF16,
    foreign: float = 0.0,
    only: int | None = None,
    bias: bool = True,
    gammas: bool = False,
    strided: bool = False,
    **how: Any,  # noqa: ANN401 - arguments of Plain.matmul
) -> Callable[[Draw], Inputs]:
    """NaN in rows, places and weights that nothing comes of."""

    def make(draw: Draw) -> Inputs:
        hist, route_at, place_of = _routes(draw, experts, rows, choices, foreign=foreign, only=only)
        real = int(hist.sum())
        x = draw.normal(rows if how.get("gather") else rows * choices, k, dtype=dtype)
        if how.get("gather"):
            unused = torch.ones(rows, dtype=torch.bool, device=x.device)
            unused[route_at[:real].long() // choices] = False
            x[unused] = _NAN
        else:
            x[real:] = _NAN
        gates = draw.uniform(rows * choices, low=0.1)
        gates[real:] = _NAN
        return Inputs(
            draw.strided(x) if strided else x,
            _draw_weight(draw, experts, n, k),
            draw.normal(experts, n) if bias else None,
            hist,
            route_at,
            place_of,
            choices,
            gammas=gates if gammas else None,
            **how,
        )

    return make


def _activate(
    *shape: int, limit: float | None = _LIMIT, dtype: torch.dtype = _BF16, hist: tuple[int, ...] | None = None
) -> Callable[[Draw], Inputs]:
    """With `hist`, NaN in the places of no expert."""

    def make(draw: Draw) -> Inputs:
        a = draw.normal(*shape, dtype=dtype, scale=4.0)
        if hist is None:
            return Inputs(a, _ALPHA, limit)
        a[sum(hist) :] = _NAN
        return Inputs(a, _ALPHA, limit, draw.put(torch.tensor(hist, dtype=_I32)))

    return make


def _route(
    rows: int, experts: int, k: int, *, dtype: torch.dtype = _BF16, ties: bool = False, sm_first: bool = False
) -> Callable[[Draw], Inputs]:
    """Logits an eighth apart, exact in every dtype; with `ties`, of two values."""

    def make(draw: Draw) -> Inputs:
        if ties:
            return Inputs(draw.integers(0, 2, rows, experts).to(dtype), k)
        order = torch.stack([draw.permutation(experts) for _ in range(rows)]) if rows else torch.zeros(0, experts)
        logits = draw.put(order / 8.0 - 4.0).to(dtype)
        return Inputs(logits, k, True) if sm_first else Inputs(logits, k)  # noqa: FBT003 - as published

    return make


# -------------------------------------------------------------------------------------------------------------- cases

_GATHER: Final[dict[str, Any]] = {"gather": True}
_SCATTER: Final[dict[str, Any]] = {"scatter": True, "gammas": True}
_ACT: Final[dict[str, Any]] = {"gather": True, "swiglu": (_ALPHA, _LIMIT)}

_WHOLE: Final = "K is a multiple of 64, N of 16"

_MATMUL_CASES: Final = (
    *(Case(f"gathered, {rows} rows", _multiply(rows, 128, 128, **_GATHER)) for rows in (0, 1, 2, 15, 16, 17, 65, 129)),
    *(Case(f"scattered, {rows} rows", _multiply(rows, 128, 128, **_SCATTER)) for rows in (0, 1, 2, 33, 65)),
    *(Case(f"activated, {rows} rows", _multiply(rows, 256, 128, **_ACT)) for rows in (1, 33)),
    *(Case(f"gathered, N = {n}", _multiply(9, n, 128, **_GATHER)) for n in (16, 112, 144)),
    *(Case(f"activated, N = {n}", _multiply(9, n, 128, **_ACT)) for n in (32, 224, 288)),
    *(Case(f"gathered, K = {k}", _multiply(9, 128, k, **_GATHER)) for k in (64, 192, 512)),
    *(Case(f"scattered, K = {k}", _multiply(9, 128, k, **_SCATTER)) for k in (64, 192)),
    *(Case(f"gathered, K = {k}", _multiply(9, 128, k, **_GATHER), may_refuse=_WHOLE) for k in (32, 96, 160)),
    *(Case(f"scattered, K = {k}", _multiply(9, 128, k, **_SCATTER), may_refuse=_WHOLE) for k in (32, 96, 160)),
    *(
        Case(f"{name}, one route a row", _multiply(9, 128, 128, choices=1, **how))
        for name, how in (("gathered", _GATHER), ("scattered", _SCATTER), ("activated", _ACT))
    ),
    *(
        Case(f"{name}, half of the routes elsewhere", _multiply(17, 128, 128, foreign=0.5, **how))
        for name, how in (("gathered", _GATHER), ("scattered", _SCATTER), ("activated", _ACT))
    ),
    *(
        Case(f"{name}, every route elsewhere", _multiply(9, 128, 128, foreign=3.0, **how))
        for name, how in (("gathered", _GATHER), ("scattered", _SCATTER), ("activated", _ACT))
    ),
    Case("one route a row, half elsewhere", _multiply(17, 128, 128, choices=1, foreign=0.5, **_SCATTER)),
    Case("every row to one expert", _multiply(33, 128, 128, only=5, choices=1, **_GATHER)),
    Case("two experts there are", _multiply(17, 128, 128, experts=2, choices=2, **_GATHER)),
    Case("gathered and scattered", _multiply(17, 128, 128, gather=True, **_SCATTER)),
    Case("no bias", _multiply(9, 128, 128, bias=False, **_GATHER)),
    Case("no weights of routes", _multiply(9, 128, 128, scatter=True)),
    Case("neither gathered nor scattered", _multiply(9, 128, 128)),
    Case("no limit", _multiply(9, 128, 128, gather=True, swiglu=(_ALPHA, None))),
    Case("float32 out", _multiply(9, 128, 128, out_dtype=_F32, **_GATHER)),
    Case("x strided", _multiply(9, 128, 128, strided=True, **_GATHER)),
    Case("float16", _multiply(9, 128, 128, dtype=_F16, **_GATHER), may_refuse="it is for bfloat16"),
    Case("float32", _multiply(9, 128, 128, dtype=_F32, **_GATHER), may_refuse="it is for bfloat16"),
    Case("three routes a row", _multiply(9, 128, 128, choices=3, **_SCATTER), may_refuse="k is a power of two"),
    Case("N = 1", _multiply(9, 1, 32, bias=False, choices=1, **_GATHER), may_refuse=_WHOLE),
    Case("N = 17", _multiply(9, 17, 64, **_GATHER), may_refuse=_WHOLE),
)

_SWIGLU_CASES: Final = (
    *(Case(f"{rows} rows", _activate(rows, 256)) for rows in (0, 1, 31, 33, 129)),
    *(Case(f"{n} columns", _activate(5, 2 * n)) for n in (1, 127, 129, 300)),
    Case("no limit", _activate(5, 256, limit=None)),
    Case("a limit that bites", _activate(5, 256, limit=0.5)),
    Case("leading dimensions", _activate(2, 3, 256)),
    Case("float16", _activate(5, 256, dtype=_F16)),
    Case("float32", _activate(5, 256, dtype=_F32)),
    Case("places of no expert", _activate(40, 256, hist=(3, 0, 17))),
    Case("no place of any expert", _activate(40, 256, hist=(0, 0, 0))),
    Case("every place of some expert", _activate(20, 256, hist=(3, 0, 17))),
)

_ROUTING_CASES: Final = (
    *(Case(f"{rows} rows", _route(rows, 32, 4)) for rows in (0, 1, 2, 31, 33, 129)),
    *(Case(f"{experts} experts", _route(9, experts, 4)) for experts in (4, 8, 31, 33, 128)),
    *(Case(f"{k} routes", _route(9, 32, k)) for k in (1, 2, 8, 32)),
    Case("ties", _route(33, 32, 4, ties=True)),
    Case("softmax first", _route(33, 32, 4, sm_first=True, dtype=_F32)),
    Case("float16", _route(9, 32, 4, dtype=_F16)),
    Case("float32", _route(9, 32, 4, dtype=_F32)),
    Case("one expert", _route(9, 1, 1)),
)


# ----------------------------------------------------------------------------------------------------------- problems


def _up_problem(draw: Draw, *, rows: int, experts: int, choices: int, n: int, k: int) -> Inputs:
    return _multiply(rows, n, k, experts=experts, choices=choices, **_ACT)(draw)


def _up_work(*, rows: int, experts: int, choices: int, n: int, k: int) -> Work:
    places = rows * choices
    weights = min(places, experts) * n * k * (0.5 + 1 / _GROUP)  # an expert without a row need not be read
    return Work(2.0 * places * n * k, 2.0 * (rows * k + places * n / 2) + weights, "bf16")


def _swiglu_problem(draw: Draw, *, m: int, n: int) -> Inputs:
    return _activate(m, 2 * n)(draw)


def _swiglu_work(*, m: int, n: int) -> Work:
    return Work(8.0 * m * n, 2.0 * m * 3 * n, "fp32")


def _routing_problem(draw: Draw, *, rows: int, experts: int, k: int) -> Inputs:
    return Inputs(draw.normal(rows, experts, dtype=_BF16), k)


def _routing_work(*, rows: int, experts: int, k: int) -> Work:
    return Work(1.0 * rows * experts, rows * (2.0 * experts + k * (2 + 4 + 4)), "fp32")


# The experts of GPT-OSS 20B (32) and 120B (128): gates and what they open, of hidden and intermediate 2880.
_UP_SIZES: Final = tuple(
    {"rows": rows, "experts": experts, "choices": 4, "n": 5760, "k": 2880}
    for experts in (32, 128)
    for rows in (1, 128, 4096)
)

# Places are rounded to bfloat16 before they are added up; sums over K cancel.
_SUM: Final = Tolerance(row=1e-2)
_FROZEN: Final = "nothing is differentiable"
_FROM_PYTHON: Final = "published builds make their kernels from Python, call by call"
_SKIP: Final[Mapping[Mode, str]] = {"backward": _FROZEN, "compile": _FROM_PYTHON}

MXFP4_GRID: Final = (
    Entry(
        entrypoint="plain.matmul",
        cases=_MATMUL_CASES,
        formula=_matmul,
        tolerance=_SUM,
        skip=_SKIP,
        problem=_up_problem,
        prepare=lambda kernel, inputs: inputs.call(kernel.plain.prepared),
        sizes=_UP_SIZES,
        work=_up_work,
    ),
    Entry(
        entrypoint="plain.swiglu",
        cases=_SWIGLU_CASES,
        formula=_swiglu,
        tolerance=Tolerance(row=1e-6),
        skip=_SKIP,
        problem=_swiglu_problem,
        sizes=({"m": 4, "n": 2880}, {"m": 16384, "n": 2880}),
        work=_swiglu_work,
    ),
    Entry(
        entrypoint="routing",
        cases=_ROUTING_CASES,
        formula=_routing,
        canonical=_parts,
        tolerance=Tolerance(each=2.0**-7, least=1e-6),  # weights are in the dtype of the logits
        skip=_SKIP,
        problem=_routing_problem,
        sizes=({"rows": 1, "experts": 128, "k": 4}, {"rows": 4096, "experts": 128, "k": 4}),
        work=_routing_work,
    ),
)
