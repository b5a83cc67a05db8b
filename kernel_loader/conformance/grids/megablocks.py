"""What `megablocks` is held against: the MLP in float64, with weights gathered for every token, and ops as loops.

Where a gate or an up lies at the limit, its gradient jumps: in half precision, gradients are looked at where nothing is
clamped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_I16, _I32, _I64 = torch.int16, torch.int32, torch.int64
_NAN: Final = float("nan")
_ALPHA, _LIMIT = 1.702, 7.0  # of GPT-OSS


# --- the layers ---------------------------------------------------------------------------------------------------


def _mixture(module: SimpleNamespace, x: Tensor) -> tuple[Tensor, Tensor]:
    router, experts = module.router, module.experts
    tokens = x.to(_F64).reshape(-1, x.shape[-1])
    logits = tokens @ router.weight.to(_F64).T + router.bias.to(_F64)
    chosen = logits.argsort(dim=1, descending=True)[:, : router.top_k]
    shares = logits.gather(1, chosen).exp()
    scores = shares / shares.sum(1, keepdim=True)
    pairs = torch.einsum("th,tkhj->tkj", tokens, experts.gate_up_proj.to(_F64)[chosen])
    gate, up = (pairs + experts.gate_up_proj_bias.to(_F64)[chosen]).unflatten(2, (-1, 2)).unbind(3)
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    hidden = (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    made = torch.einsum("tki,tkih->tkh", hidden, experts.down_proj.to(_F64)[chosen])
    made = made + experts.down_proj_bias.to(_F64)[chosen]
    return torch.einsum("tk,tkh->th", scores, made).view(x.shape), scores


def _mixture_beside_shared(module: SimpleNamespace, x: Tensor) -> tuple[Tensor, Tensor]:
    output, scores = _mixture(module, x)
    if module.shared_up_proj_weight is None:
        return output, scores
    wide = {name: value.to(_F64) for name, value in vars(module).items() if isinstance(value, Tensor)}
    inner = x.to(_F64) @ wide["shared_up_proj_weight"].T + wide.get("shared_up_proj_bias", 0.0)
    act = module.shared_activation_fn or functional.gelu
    beside = act(inner) @ wide["shared_down_proj_weight"].T + wide.get("shared_down_proj_bias", 0.0)
    share = 1 / (module.router.top_k + 1) if module.shared_expert_weighted_sum else None
    return beside + output if share is None else share * beside + (1 - share) * output, scores


class _Sizes(NamedTuple):
    """Shape of x without its last dimension, hidden, inner, experts, experts of a token, width of the shared expert."""

    lead: tuple[int, ...]
    hidden: int = 64
    inner: int = 32
    experts: int = 8
    top_k: int = 2
    shared: int = 48


def _settled_tokens(draw: Draw, size: _Sizes, weight: Tensor, bias: Tensor) -> Tensor:
    """Tokens that no rounding of a logit sends to another expert: those with the widest gaps among many."""
    count = 1
    for extent in size.lead:
        count *= extent
    many = draw.normal(16 * count, size.hidden, dtype=weight.dtype)
    if size.top_k < size.experts:
        ranked = (many.to(_F64) @ weight.to(_F64).T + bias.to(_F64)).sort(dim=1, descending=True).values
        many = many[(ranked[:, size.top_k - 1] - ranked[:, size.top_k]).argsort(descending=True)]
    return many[:count].reshape(*size.lead, size.hidden)


Change = Callable[[Draw, SimpleNamespace, Tensor], tuple[SimpleNamespace, Tensor]]


def _strided(draw: Draw, module: SimpleNamespace, x: Tensor) -> tuple[SimpleNamespace, Tensor]:
    return module, draw.strided(x)


def _idle_experts(_: Draw, module: SimpleNamespace, x: Tensor) -> tuple[SimpleNamespace, Tensor]:
    """The first two experts get everything; NaN stands in the weights of the others."""
    module.router.bias[2:] -= 100.0
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        getattr(module.experts, name)[2:] = _NAN
    return module, x


def _layer(
    size: _Sizes,
    dtype: torch.dtype = _BF16,
    change: Change | None = None,
    shared: dict[str, Any] | None = None,
    spread: float = 0.5,
) -> Callable[[Draw], Inputs]:
    """A module as a namespace, and x; gates and ups have the deviation `spread`, before their biases.

    `shared` has what `set_shared_expert_weights` takes besides weights.
    """

    def make(draw: Draw) -> Inputs:
        _, hidden, inner, experts, top_k, width = size
        normal = partial(draw.normal, dtype=dtype)
        router = SimpleNamespace(weight=normal(experts, hidden, scale=hidden**-0.5), bias=normal(experts), top_k=top_k)
        made = SimpleNamespace(
            gate_up_proj=normal(experts, hidden, 2 * inner, scale=spread * hidden**-0.5),
            gate_up_proj_bias=normal(experts, 2 * inner, scale=0.5),
            down_proj=normal(experts, inner, hidden, scale=inner**-0.5),
            down_proj_bias=normal(experts, hidden, scale=0.5),
            alpha=_ALPHA,
            limit=_LIMIT,
            num_experts=experts,
            hidden_size=hidden,
        )
        module = SimpleNamespace(router=router, experts=made, training=False)
        x = _settled_tokens(draw, size, router.weight, router.bias)
        if shared is not None:
            rest = {"weighted_sum": False, "activation_fn": None, "bias": False, **shared}
            module.shared_up_proj_weight = normal(width, hidden, scale=hidden**-0.5)
            module.shared_down_proj_weight = normal(hidden, width, scale=width**-0.5)
            module.shared_up_proj_bias = normal(width) if rest["bias"] else None
            module.shared_down_proj_bias = normal(hidden) if rest["bias"] else None
            module.shared_expert_weighted_sum = rest["weighted_sum"]
            module.shared_activation_fn = rest["activation_fn"]
        if change is not None:
            module, x = change(draw, module, x)
        return Inputs(module, x)

    return make


def _without_shared(_: Draw, module: SimpleNamespace, x: Tensor) -> tuple[SimpleNamespace, Tensor]:
    module.shared_up_proj_weight = module.shared_down_proj_weight = None
    return module, x


_ROUTED_GRADIENTS: Final = (
    1,
    "0.router.weight",
    "0.router.bias",
    "0.experts.gate_up_proj",
    "0.experts.gate_up_proj_bias",
    "0.experts.down_proj",
    "0.experts.down_proj_bias",
)
_SHARED_GRADIENTS: Final = (*_ROUTED_GRADIENTS, "0.shared_up_proj_weight", "0.shared_down_proj_weight")
_LEADS: Final = ((0,), (1,), (5,), (2, 3), (127,), (129,))


def _layer_problem(draw: Draw, *, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Inputs:
    return _layer(_Sizes((tokens,), hidden, inner, experts, top_k))(draw)


def _layer_work(*, tokens: int, hidden: int, inner: int, experts: int, top_k: int) -> Work:
    rows = tokens * top_k
    numbers = 2 * tokens * hidden + min(rows, experts) * 3 * hidden * inner
    return Work(6.0 * rows * hidden * inner, 2.0 * numbers, "bf16")


# gpt-oss-20b.
_LAYER_SIZES: Final = (
    {"tokens": 1024, "hidden": 2880, "inner": 2880, "experts": 32, "top_k": 4},
    {"tokens": 1, "hidden": 2880, "inner": 2880, "experts": 32, "top_k": 4},
)

# Half a dozen roundings to the dtype of x before there is a result, and a score that is off by the rounding of a logit.
_HALF: Final = Tolerance(row=5e-2)
_SINGLE: Final = Tolerance(row=1e-5)
# The gradient to a logit is a difference of sums over H, each of them off by a share of itself, times a score that is
# off by the rounding of its logit: what is left may be off by a good part. In float32 the same ones are held to 1e-5.
_HALF_GRADIENT: Final = Tolerance(row=0.25, least=0.6)
_SINGLE_GRADIENT: Final = Tolerance(row=1e-5, least=1e-4)


def _layer_entries(name: str) -> tuple[Entry, Entry]:
    half = Entry(
        entrypoint=f"layers.{name}",
        cases=(
            *(Case(f"x {(*lead, 64)}", _layer(_Sizes(lead))) for lead in _LEADS),
            Case("one expert of a token", _layer(_Sizes((17,), top_k=1))),
            Case("every expert of a token", _layer(_Sizes((17,), top_k=8))),
            Case("one expert there is", _layer(_Sizes((17,), experts=1, top_k=1))),
            Case("experts without a token hold NaN", _layer(_Sizes((17,)), change=_idle_experts)),
            Case("x strided", _layer(_Sizes((17,)), change=_strided)),
            Case("float16", _layer(_Sizes((17,)), _F16)),
            Case("clamped", _layer(_Sizes((17,)), spread=5.0), modes=("eager",)),
        ),
        formula=_mixture,
        gradients=_ROUTED_GRADIENTS,
        tolerance=_HALF,
        gradient_tolerance=_HALF_GRADIENT,
        skip=_NOT_COMPILED,
        problem=_layer_problem,
        sizes=_LAYER_SIZES,
        work=_layer_work,
    )
    single = Entry(
        entrypoint=half.entrypoint,
        cases=(
            Case("float32", _layer(_Sizes((17,)), _F32)),
            Case("float32, clamped", _layer(_Sizes((17,)), _F32, spread=5.0)),
            Case("float32, experts without a token hold NaN", _layer(_Sizes((17,)), _F32, _idle_experts)),
        ),
        formula=_mixture,
        gradients=_ROUTED_GRADIENTS,
        tolerance=_SINGLE,
        gradient_tolerance=_SINGLE_GRADIENT,
        skip=_NOT_COMPILED,
    )
    return half, single


_NOT_COMPILED: Final[dict[Any, str]] = {
    "compile": "how many rows an expert has may be read from the data, which breaks the graph",
    "graph": "as above",
}

_SHARED_ENTRIES: Final = (
    Entry(
        entrypoint="layers.MegaBlocksMoeMLPWithSharedExpert",
        cases=(
            *(Case(f"x {(*lead, 64)}", _layer(_Sizes(lead), shared={})) for lead in _LEADS),
            Case("weighted sum", _layer(_Sizes((17,)), shared={"weighted_sum": True})),
            Case("biases", _layer(_Sizes((17,)), shared={"bias": True})),
            Case("an activation of its own", _layer(_Sizes((17,)), shared={"activation_fn": functional.silu})),
            Case(
                "no shared expert",
                _layer(_Sizes((17,)), shared={}, change=_without_shared),
                modes=("eager", "compile", "graph"),
            ),
        ),
        formula=_mixture_beside_shared,
        gradients=_SHARED_GRADIENTS,
        tolerance=_HALF,
        gradient_tolerance=_HALF_GRADIENT,
        skip=_NOT_COMPILED,
    ),
    Entry(
        entrypoint="layers.MegaBlocksMoeMLPWithSharedExpert",
        cases=(
            Case("float32", _layer(_Sizes((17,)), _F32, shared={"bias": True})),
            Case("float32, weighted sum", _layer(_Sizes((17,)), _F32, shared={"weighted_sum": True})),
        ),
        formula=_mixture_beside_shared,
        gradients=_SHARED_GRADIENTS,
        tolerance=_SINGLE,
        gradient_tolerance=_SINGLE_GRADIENT,
        skip=_NOT_COMPILED,
    ),
)


# --- the ops ------------------------------------------------------------------------------------------------------


def _put(rows: list[list[int]], like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(rows, dtype=dtype).to(like.device)


def _running(x: Tensor, dim: int, *, exclusive: bool) -> Tensor:
    """Sums along a dimension, one slice after the other, wrapping around."""
    total, sums = torch.zeros_like(x.select(dim, 0)) if x.shape[dim] else x, []
    for part in x.unbind(dim):
        before, total = total, total + part
        sums.append(before if exclusive else total)
    return torch.stack(sums, dim) if sums else x.clone()


def _cumsum_into(x: Tensor, dim: int, out: Tensor, *, exclusive: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - written
    sums = _running(x, dim, exclusive=exclusive)
    return sums, sums


def _cumsum(x: Tensor, dim: int = -1, exclusive: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - as published
    return _running(x, dim, exclusive=exclusive)


def _histogram(x: Tensor, num_bins: int) -> Tensor:
    return torch.stack([(x == number).sum(-1, dtype=_I32) for number in range(num_bins)], dim=-1)


def _starts_and_ends(bins: Tensor) -> list[tuple[int, int]]:
    ends = bins.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _indices(padded_bins: Tensor, block_size: int, output_block_rows: int, output_block_columns: int) -> Tensor:
    rows = [[0] * output_block_columns for _ in range(output_block_rows)]
    for number, (start, end) in enumerate(_starts_and_ends(padded_bins)):
        first = number * output_block_columns
        for row in range(start // block_size, end // block_size):
            rows[row] = list(range(first, first + output_block_columns))
    return _put(rows, padded_bins, _I16).flatten()


def _replicate(x: Tensor, bins: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    result = out.clone()
    for number, (start, end) in enumerate(_starts_and_ends(bins)):
        result[:, start:end] = x[:, number : number + 1]
    result = result.to(_F64) if result.dtype.is_floating_point else result
    return result, result


def _sum_replicas(grad: Tensor, bins: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    result = torch.zeros(out.shape, dtype=_F64, device=out.device)
    for number, (start, end) in enumerate(_starts_and_ends(bins)):
        result[:, number] = grad[:, start:end].to(_F64).sum(1)
    return result, result


def _argsort(x: Tensor, end_bit: int = 32) -> tuple[Tensor, Tensor]:
    counted = min(end_bit, 8 * x.element_size())
    numbers = x.tolist()
    all_bits = counted == 8 * x.element_size()
    order = sorted(range(len(numbers)), key=lambda i: numbers[i] if all_bits else numbers[i] % 2**counted)
    where = torch.tensor(order, dtype=_I64)
    return x[where.to(x.device)], where.to(x.device, x.dtype)


def _sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001 - written
    found, where = _argsort(x, end_bit)
    return found, found, where


def _like(tensor: Tensor) -> Tensor:
    """Something to be written over."""
    return torch.full_like(tensor, _NAN if tensor.dtype.is_floating_point else -1)


def _summed(shape: tuple[int, ...], dtype: torch.dtype, dim: int, *, high: int = 100) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        x = draw.integers(-high, high, *shape, dtype=dtype)
        return Inputs(x, dim, _like(x))

    return make


def _new_sums(shape: tuple[int, ...], dtype: torch.dtype, **rest: int) -> Callable[[Draw], Inputs]:
    return lambda draw: Inputs(draw.integers(-100, 100, *shape, dtype=dtype), **rest)


def _counted(
    shape: tuple[int, ...], dtype: torch.dtype, bins: int, low: int = 0, over: int = 0
) -> Callable[[Draw], Inputs]:
    return lambda draw: Inputs(draw.integers(low, bins + over, *shape, dtype=dtype), bins)


def _bins(sizes: Sequence[int], draw: Draw) -> Tensor:
    return draw.put(torch.tensor(sizes, dtype=_I32).cumsum(0, dtype=_I32))


def _blocks(sizes: Sequence[int], columns: int, block: int = 128, *, rest: int = 0) -> Callable[[Draw], Inputs]:
    """Bins of so many blocks, and `rest` rows of blocks past them."""
    return lambda draw: Inputs(_bins([block * n for n in sizes], draw), block, sum(sizes) + rest, columns)


def _replicated(sizes: Sequence[int], batch: int, dtype: torch.dtype, *, rest: int = 0) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        shape = (batch, len(sizes))
        x = draw.normal(*shape, dtype=dtype) if dtype.is_floating_point else draw.integers(-99, 99, *shape, dtype=dtype)
        out = draw.put(torch.full((batch, sum(sizes) + rest), 7, dtype=dtype))
        return Inputs(x, _bins(sizes, draw), out)

    return make


def _replicas(sizes: Sequence[int], batch: int, dtype: torch.dtype, *, rest: int = 0) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        grad = draw.normal(batch, sum(sizes) + rest, dtype=dtype)
        grad[:, sum(sizes) :] = _NAN
        return Inputs(grad, _bins(sizes, draw), _like(draw.put(torch.zeros(batch, len(sizes), dtype=dtype))))

    return make


def _sorted(count: int, dtype: torch.dtype, end_bit: int, low: int, high: int) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        x = draw.integers(low, high, count, dtype=dtype)
        return Inputs(x, end_bit, _like(x), _like(x))

    return make


def _new_sort(count: int, dtype: torch.dtype, *rest: int, high: int = 100) -> Callable[[Draw], Inputs]:
    return lambda draw: Inputs(draw.integers(0, high, count, dtype=dtype), *rest)


_SHAPES: Final = ((1, 1), (1, 128), (3, 127), (2, 129), (1, 2049), (4, 0), (0, 4))
_INTEGERS: Final = {"int16": _I16, "int32": _I32, "int64": _I64}
_WHOLE: Final[dict[Any, str]] = {"backward": "it is about whole numbers"}

_CUMSUM_CASES: Final = (
    *(Case(f"shape {shape}", _summed(shape, _I32, 1)) for shape in _SHAPES),
    *(Case(name, _summed((3, 40), dtype, 1)) for name, dtype in _INTEGERS.items()),
    Case("a vector", _summed((40,), _I32, 0)),
    Case("sums that wrap around", _summed((2, 400), _I16, 1, high=2**15 - 1)),
    Case("along the first of two dimensions", _summed((5, 7), _I32, 0)),
)
_SORT_CASES: Final = (
    *(Case(f"{count} numbers", _sorted(count, _I32, 7, 0, 100)) for count in (0, 1, 127, 128, 129, 2049)),
    *(Case(name, _sorted(40, dtype, 7, 0, 100)) for name, dtype in _INTEGERS.items()),
    *(Case(f"{name}, all bits", _sorted(40, t, 8 * t.itemsize, -99, 99)) for name, t in _INTEGERS.items()),
    Case("fewer bits than the numbers have", _sorted(200, _I32, 3, 0, 100)),
    Case("no bits", _sorted(40, _I32, 0, 0, 100)),
)
_SIZES_OF_BINS: Final = {
    "one bin": (5,),
    "empty bins": (0, 3, 0, 0, 4, 0),
    "one element each": (1, 1, 1, 1),
    "long bins": (127, 128, 129, 300),
    "nothing in any": (0, 0, 0),
}

MEGABLOCKS_GRID: Final = (
    *_layer_entries("MegaBlocksMoeMLP"),
    *_layer_entries("CPUMegaBlocksMoeMLP"),
    *_SHARED_ENTRIES,
    *(
        Entry(
            entrypoint=f"{kind}_cumsum",
            cases=_CUMSUM_CASES,
            formula=partial(_cumsum_into, exclusive=kind == "exclusive"),
            mutates=(2,),
            skip=_WHOLE,
        )
        for kind in ("exclusive", "inclusive")
    ),
    Entry(
        entrypoint="cumsum",
        cases=(
            Case("a vector", _new_sums((40,), _I32)),
            Case("a vector, exclusive", _new_sums((40,), _I32, exclusive=True)),
            Case("a matrix", _new_sums((3, 40), _I64, dim=1)),
            Case("the last dimension of a matrix", _new_sums((3, 40), _I32)),
        ),
        formula=_cumsum,
        skip=_WHOLE,
    ),
    Entry(
        entrypoint="histogram",
        cases=(
            *(Case(f"{count} numbers", _counted((count,), _I32, 8)) for count in (0, 1, 127, 129, 4097)),
            *(Case(name, _counted((100,), dtype, 8)) for name, dtype in _INTEGERS.items()),
            Case("rows", _counted((3, 50), _I32, 8)),
            Case("one bin", _counted((50,), _I32, 1)),
            Case("more bins than numbers", _counted((50,), _I32, 300)),
            Case("numbers out of range", _counted((200,), _I32, 8, low=-3, over=3)),
        ),
        formula=_histogram,
        skip=_WHOLE,
    ),
    Entry(
        entrypoint="indices",
        cases=(
            *(Case(name, _blocks(sizes, 3)) for name, sizes in _SIZES_OF_BINS.items()),
            Case("one column", _blocks((2, 1), 1)),
            Case("more columns than a warp has threads", _blocks((2, 0, 3), 33)),
            Case("blocks of 16", _blocks((2, 0, 3), 4, 16)),
            Case("rows past the last bin", _blocks((2, 0, 3), 4, rest=2)),
        ),
        formula=_indices,
        skip=_WHOLE,
    ),
    Entry(
        entrypoint="replicate_forward",
        cases=(
            *(Case(name, _replicated(sizes, 2, _F16)) for name, sizes in _SIZES_OF_BINS.items()),
            *(Case(str(t).removeprefix("torch."), _replicated((2, 0, 3), 3, t)) for t in (_I16, _I32, _F32, _BF16)),
            Case("elements past the last bin", _replicated((2, 0, 3), 3, _F16, rest=4)),
        ),
        formula=_replicate,
        mutates=(2,),
        skip={"backward": "replicate_backward is its backward"},
    ),
    Entry(
        entrypoint="replicate_backward",
        cases=(
            *(Case(name, _replicas(sizes, 2, _F16)) for name, sizes in _SIZES_OF_BINS.items()),
            *(Case(str(t).removeprefix("torch."), _replicas((2, 0, 30), 3, t)) for t in (_BF16, _F32)),
            Case("elements past the last bin", _replicas((2, 0, 3), 3, _F16, rest=4)),
        ),
        formula=_sum_replicas,
        # A sum of some hundred numbers that are added in the dtype itself.
        tolerance=Tolerance(row=2e-2, least=1e-3),
        mutates=(2,),
        skip={"backward": "it is one"},
    ),
    Entry(entrypoint="sort", cases=_SORT_CASES, formula=_sort, mutates=(2, 3), skip=_WHOLE),
    Entry(
        entrypoint="argsort",
        cases=(
            Case("int32", _new_sort(200, _I32)),
            Case("int64", _new_sort(200, _I64)),
            Case("some bits", _new_sort(200, _I32, 5)),
        ),
        formula=_argsort,
        skip=_WHOLE,
    ),
)
