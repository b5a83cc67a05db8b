"""What `moe_experts` is held against: the formula of kernel_loader/bundles/moe.py, slot by slot and in float64.

Where a routing weight, a hidden row or an upstream gradient must leave no trace, NaN stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_E4M3: Final = torch.float8_e4m3fn
_E8M0: Final = getattr(torch, "float8_e8m0fnu", torch.uint8)
_E4M3_MAX: Final = 448.0
_NAN: Final = float("nan")

# Those of GPT-OSS.
_ALPHA: Final = 1.702
_LIMIT: Final = 7.0


# ------------------------------------------------------------------------------------------------------------ formula


def _swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x / (1 + torch.exp(-alpha * x))


def _gelu(x: Tensor) -> Tensor:
    twice_phi: Tensor = torch.special.erfc(-x * math.sqrt(0.5))
    return x * twice_phi / 2


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 is sigmoid(2 * u).
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


_FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "silu": _swish,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
}


def _to_e4m3(values: Tensor) -> Tensor:
    """The nearest e4m3 number of each float64, ties to the even code, beyond 448 to 448."""
    magnitude = values.abs().clamp(max=_E4M3_MAX)
    exponent = (torch.frexp(magnitude).exponent - 1).clamp(min=-6)
    step = torch.ldexp(torch.ones_like(magnitude), exponent - 3)
    return (torch.round(magnitude / step) * step).copysign(values)


def _through_quantiser(x: Tensor, run: int) -> Tensor:
    """What the codes of x (S, K) stand for, in runs of K, float64; to autograd it is x itself."""
    values = x.detach().to(_F32)
    padded = functional.pad(values, (0, -values.shape[-1] % run))
    largest = padded.view(len(padded), padded.shape[1] // run, run).abs().amax(-1)
    scale = (largest / torch.full_like(largest, _E4M3_MAX)).repeat_interleave(run, -1)[:, : values.shape[1]]
    seen = _to_e4m3((values / scale.clamp(min=1e-12)).to(_F64)) * scale.to(_F64)
    wide = x.to(_F64)
    return wide + (seen - wide).detach()


def _matrices(weight: Tensor, scale: Tensor | None, block_size: Sequence[int] | None) -> Tensor:
    """The weights as they count, float64."""
    if scale is None or block_size is None:
        return weight.to(_F64)
    real = scale.to(_F64) if scale.dtype == _F32 else torch.exp2(scale.view(torch.uint8).to(_F64) - 127)
    rows = torch.arange(weight.shape[1], device=weight.device) // block_size[0]
    columns = torch.arange(weight.shape[2], device=weight.device) // block_size[1]
    return weight.to(_F32).to(_F64) * real[:, rows][:, :, columns]


def _experts_forward(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    gate_up_proj_scale: Tensor | None = None,
    down_proj_scale: Tensor | None = None,
    block_size: Sequence[int] | None = None,
    activation: str = "silu",
    alpha: float = _ALPHA,
    limit: float | None = None,
    has_gate: bool = True,
    is_concatenated: bool = True,
    is_transposed: bool = False,
) -> Tensor:
    first = _matrices(gate_up_proj, gate_up_proj_scale, block_size)
    second = _matrices(down_proj, down_proj_scale, block_size)
    if is_transposed:
        first, second = first.mT, second.mT
    ids = top_k_index.to(torch.int64)
    token, slot = ((ids >= 0) & (ids < first.shape[0])).nonzero(as_tuple=True)
    expert = ids[token, slot]

    def product(x: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        seen = x if block_size is None else _through_quantiser(x, block_size[1])
        y = torch.einsum("sk,snk->sn", seen.to(_F64), matrices[expert])
        return y if bias is None else y + bias[expert].to(_F64)

    z = product(hidden_states[token], first, gate_up_proj_bias)
    if has_gate:
        z = z if is_concatenated else torch.cat((z[:, 0::2], z[:, 1::2]), 1)
        gate, up = z.chunk(2, dim=1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        h = _swish(gate, alpha) * (up + 1) if activation == "swiglu_oai" else _FUNCTIONS[activation](gate) * up
    else:
        h = _FUNCTIONS[activation](z)
    if block_size is not None:  # what is quantised has the dtype of the hidden states
        h = h + (h.to(hidden_states.dtype).to(_F64) - h).detach()
    y = product(h, second, down_proj_bias) * top_k_weights[token, slot].to(_F64)[:, None]
    zeros = torch.zeros(hidden_states.shape, dtype=_F64, device=hidden_states.device)
    return zeros.index_put((token,), y, accumulate=True)


# ------------------------------------------------------------------------------------------------------------- inputs


class _Shape(NamedTuple):
    """The sizes of a problem: tokens, slots of each, experts, hidden and intermediate size."""

    tokens: int = 20
    slots: int = 2
    experts: int = 3
    hidden: int = 64
    intermediate: int = 48


Change = Callable[[Draw, Inputs], Inputs]


def _case(
    name: str,
    *,
    dtype: torch.dtype = _BF16,
    route: Callable[[Draw, _Shape], Tensor] | None = None,
    routing_dtype: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    blocks: tuple[int, int] | None = None,
    scales: torch.dtype = _F32,
    change: Change | None = None,
    modes: tuple[Mode, ...] = ("eager", "compile", "graph", "backward"),
    shape: _Shape | None = None,
    **options: Any,  # noqa: ANN401 - of experts_forward
) -> Case:
    """A call with these options. Two of seven ids are sentinels unless `route` says otherwise."""
    sizes = _Shape() if shape is None else shape

    def make(draw: Draw) -> Inputs:
        index = (_some_sentinels if route is None else route)(draw, sizes)
        real = (index >= 0) & (index < sizes.experts)
        hidden = draw.normal(sizes.tokens, sizes.hidden, dtype=dtype)
        hidden = hidden.masked_fill(~real.any(1, keepdim=True), _NAN)
        routing = draw.uniform(*index.shape, dtype=routing_dtype or dtype, low=0.1).masked_fill(~real, _NAN)
        width = sizes.intermediate * (2 if options.get("has_gate", True) else 1)
        turned = bool(options.get("is_transposed", False))
        first, first_scale = _draw_weight(draw, (sizes.experts, width, sizes.hidden), dtype, blocks, scales, turned)
        second, second_scale = _draw_weight(
            draw, (sizes.experts, sizes.hidden, sizes.intermediate), dtype, blocks, scales, turned
        )
        more: dict[str, Any] = dict(options)
        if blocks is not None:
            more |= {"gate_up_proj_scale": first_scale, "down_proj_scale": second_scale, "block_size": list(blocks)}
        if bias is not None:
            more["gate_up_proj_bias"] = draw.normal(sizes.experts, width, dtype=bias)
            more["down_proj_bias"] = draw.normal(sizes.experts, sizes.hidden, dtype=bias)
        inputs = Inputs(hidden, index, routing, first, second, **more)
        return inputs if change is None else change(draw, inputs)

    return Case(name, make, modes)


def _draw_weight(
    draw: Draw,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    blocks: tuple[int, int] | None,
    scales: torch.dtype,
    turned: bool,  # noqa: FBT001 - one caller
) -> tuple[Tensor, Tensor | None]:
    """(E, N, K), or (E, K, N) if turned, of a size that keeps rows as large as they were; and scales if FP8."""
    experts, n, k = shape
    size = max(k, 1) ** -0.5
    if blocks is None:
        return draw.normal(experts, *((k, n) if turned else (n, k)), dtype=dtype, scale=size), None
    code = draw.integers(0, 254, experts, n, k)
    code += code >= 127  # 127 and 255 are NaN
    count = (experts, -(-n // blocks[0]), -(-k // blocks[1]))
    # The mean square of an e4m3 code is about 120 ** 2.
    if scales == _F32:
        scale = draw.uniform(*count, low=size / 240, high=size / 60)
    else:
        least = 127 + round(math.log2(size / 240))
        scale = draw.integers(least, least + 3, *count, dtype=torch.uint8).view(scales)
    return code.to(torch.uint8).view(_E4M3), scale


def _some_sentinels(draw: Draw, shape: _Shape) -> Tensor:
    """Any experts; of seven ids two are E or E + 1; the last token has sentinels alone."""
    index = draw.integers(0, max(shape.experts, 1), shape.tokens, shape.slots)
    dice = draw.integers(0, 7, shape.tokens, shape.slots)
    index = torch.where(dice < 2, shape.experts + dice, index)
    index[-1:] = shape.experts
    return index


def _no_sentinels(draw: Draw, shape: _Shape) -> Tensor:
    return draw.integers(0, shape.experts, shape.tokens, shape.slots)


def _only_sentinels(draw: Draw, shape: _Shape) -> Tensor:
    return draw.integers(shape.experts, shape.experts + 5, shape.tokens, shape.slots)


def _to(expert: int) -> Callable[[Draw, _Shape], Tensor]:
    """All slots to one expert."""
    return lambda draw, shape: draw.put(torch.full((shape.tokens, shape.slots), expert))


def _ids_of(dtype: torch.dtype) -> Callable[[Draw, _Shape], Tensor]:
    return lambda draw, shape: _some_sentinels(draw, shape).to(dtype)


def _negative_sentinels(draw: Draw, shape: _Shape) -> Tensor:
    index = _some_sentinels(draw, shape)
    return torch.where(index >= shape.experts, shape.experts - 1 - index, index)  # -1 and -2


def _extreme_sentinels(draw: Draw, shape: _Shape) -> Tensor:
    index = _some_sentinels(draw, shape)
    limits = torch.iinfo(torch.int64)
    return torch.where(index > shape.experts, limits.max, torch.where(index == shape.experts, limits.min, index))


def _strided(draw: Draw, inputs: Inputs) -> Inputs:
    """Every tensor takes every second element of a larger one."""
    return inputs.map(draw.strided)


def _exchanged(_: Draw, inputs: Inputs) -> Inputs:
    """Weights whose memory is that of the other layout."""
    return inputs.replace((3, 4), lambda weight: weight.mT.contiguous().mT)


def _shifted(_: Draw, inputs: Inputs) -> Inputs:
    """Tensors that begin one element after where memory is aligned."""

    def shift(tensor: Tensor) -> Tensor:
        room = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
        return room.copy_(tensor)

    return inputs.replace((0, 2, 3, 4), shift)


def _nan_in_a_row(draw: Draw, inputs: Inputs) -> Inputs:
    """NaN and infinity in tokens that count: they spoil their own rows alone."""
    hidden, index = inputs[0].clone(), inputs[1].clone()
    index[1], index[2] = 0, 1
    hidden[1], hidden[2] = draw.normal(2, hidden.shape[1], dtype=hidden.dtype)
    hidden[1, 3] = _NAN
    routing = torch.where(inputs[2].isnan() & (index < inputs[3].shape[0]), 0.5, inputs[2])
    routing[2, 0] = float("inf")
    return Inputs(hidden, index, routing, *inputs.args[3:], **inputs.kwargs)


def _coarse(_: Draw, inputs: Inputs) -> Inputs:
    """Gate and up are multiples of a quarter, which are not rounded.

    Where an activation has a kink, a last digit of them decides between two gradients.
    """
    inputs = inputs.replace((0,), lambda hidden: hidden.clamp(-1, 1).round())
    inputs = inputs.replace((3,), lambda weight: (weight * weight.shape[2] ** 0.5).clamp(-1, 1).round() / 4)
    return inputs.replace(inputs.tensors(("gate_up_proj_bias",)), lambda bias: (bias * 4).round() / 4)


def _exact(_: Draw, inputs: Inputs) -> Inputs:
    """Hidden states of 0 and 1.75, and codes of 0 and 1: without a gate every sum is exact, and so all codes alike."""
    inputs = inputs.replace((0,), lambda hidden: hidden.clamp(-1, 1).round() * 1.75)
    return inputs.replace((3,), lambda codes: (codes.to(_F32) / 200).clamp(-1, 1).round().to(_E4M3))


def _zero_rows(_: Draw, inputs: Inputs) -> Inputs:
    """Hidden rows of zeros: their scale is zero too."""
    return inputs.replace((0,), lambda hidden: hidden.index_fill(0, hidden.new_tensor([0, 2], dtype=torch.int64), 0))


# -------------------------------------------------------------------------------------------------------------- cases

# Rows of one expert around the heights of tiles: with one slot each, all to the same expert.
_HEIGHTS: Final = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
_WIDTHS: Final = ((1, 1), (7, 5), (63, 65), (64, 64), (65, 63), (127, 129), (128, 128), (129, 127), (256, 136))
_GPT_OSS: Final[dict[str, Any]] = {
    "activation": "swiglu_oai",
    "alpha": _ALPHA,
    "limit": _LIMIT,
    "is_concatenated": False,
    "is_transposed": True,
}

_PLAIN_CASES: Final = (
    _case("some sentinels"),
    _case("float16", dtype=_F16),
    _case("routing weights in float32", routing_dtype=_F32),
    *(_case(f"{rows} rows of one expert", route=_to(1), shape=_Shape(tokens=rows, slots=1)) for rows in _HEIGHTS),
    *(_case(f"hidden {h}, intermediate {i}", shape=_Shape(hidden=h, intermediate=i)) for h, i in _WIDTHS),
    _case("no sentinels", route=_no_sentinels),
    _case("only sentinels", route=_only_sentinels),
    _case("negative sentinels", route=_negative_sentinels),
    _case("sentinels at the ends of int64", route=_extreme_sentinels),
    *(_case(f"ids of {str(ids)[6:]}", route=_ids_of(ids)) for ids in (torch.uint8, torch.int16, torch.int32)),
    _case("every slot the same expert", route=_to(2)),
    _case("one slot", shape=_Shape(slots=1)),
    _case("eight slots", shape=_Shape(slots=8)),
    _case("no slots", shape=_Shape(slots=0)),
    _case("no experts", shape=_Shape(experts=0), route=_only_sentinels),
    _case("one expert", shape=_Shape(experts=1)),
    _case("more experts than rows", shape=_Shape(experts=130, hidden=16, intermediate=8)),
    _case("200 rows each of 3 experts", shape=_Shape(tokens=300), route=_no_sentinels),
    _case("hidden 0", shape=_Shape(hidden=0)),
    _case("intermediate 0", shape=_Shape(intermediate=0)),
    _case("strided", change=_strided),
    _case("weights in the memory of the other layout", change=_exchanged),
    _case("transposed weights in the memory of the other layout", change=_exchanged, is_transposed=True),
    _case("memory that is not aligned", change=_shifted),
    _case("NaN and infinity in rows that count", change=_nan_in_a_row, modes=("eager", "compile", "graph")),
    *(_case(name, activation=name) for name in ("gelu", "gelu_tanh", "relu2", "swiglu_oai")),
    _case("relu", activation="relu", change=_coarse),
    _case("silu, limit", activation="silu", limit=0.6, change=_coarse),
    _case("swiglu_oai, limit, alpha", activation="swiglu_oai", limit=0.7, alpha=1.1, change=_coarse),
    *(_case(f"{name}, no gate", activation=name, has_gate=False) for name in ("silu", "gelu", "relu2")),
    _case("interleaved", is_concatenated=False),
    _case("transposed", is_transposed=True),
    _case("transposed, no gate", is_transposed=True, has_gate=False),
    _case("transposed, hidden 65, intermediate 63", is_transposed=True, shape=_Shape(hidden=65, intermediate=63)),
)
_BIAS_CASES: Final = (
    _case("biases", bias=_BF16),
    _case("float32 biases", bias=_F32),
    _case("biases, no gate", bias=_BF16, has_gate=False, activation="relu", change=_coarse),
    _case("biases, only sentinels", bias=_BF16, route=_only_sentinels),
    _case("biases, one expert of three", bias=_BF16, route=_to(1)),
    _case("biases, hidden 65, intermediate 63", bias=_BF16, shape=_Shape(hidden=65, intermediate=63)),
    _case("GPT-OSS", bias=_BF16, **_GPT_OSS),
    _case("GPT-OSS, 200 rows each", bias=_BF16, shape=_Shape(tokens=300, intermediate=64), **_GPT_OSS),
    _case("GPT-OSS, float16", dtype=_F16, bias=_F16, **_GPT_OSS),
    _case("GPT-OSS, strided", bias=_BF16, change=_strided, **_GPT_OSS),
)
_F32_CASES: Final = (
    _case("float32", dtype=_F32, bias=_F32),
    _case("float32, no sentinels, 150 rows each", dtype=_F32, bias=_F32, shape=_Shape(tokens=225), route=_no_sentinels),
    _case("float32, hidden 127, intermediate 129", dtype=_F32, bias=_F32, shape=_Shape(hidden=127, intermediate=129)),
    _case("float32, GPT-OSS", dtype=_F32, bias=_F32, **_GPT_OSS),
    _case("float32, no gate", dtype=_F32, bias=_F32, activation="gelu", has_gate=False),
)
_BLOCK: Final = (128, 128)
_TWO_BLOCKS: Final = _Shape(hidden=256, intermediate=128)
_FP8_CASES: Final = (
    _case("FP8", blocks=_BLOCK, shape=_TWO_BLOCKS),
    _case("FP8, UE8M0", blocks=_BLOCK, scales=_E8M0, shape=_TWO_BLOCKS),
    _case("FP8, UE8M0 bytes", blocks=_BLOCK, scales=torch.uint8, shape=_TWO_BLOCKS),
    _case("FP8, float16", dtype=_F16, blocks=_BLOCK, shape=_TWO_BLOCKS),
    _case("FP8, float32", dtype=_F32, blocks=_BLOCK, shape=_TWO_BLOCKS),
    _case("FP8, blocks of 32 x 64", blocks=(32, 64), shape=_TWO_BLOCKS),
    _case("FP8, blocks of 24 x 40", blocks=(24, 40), shape=_Shape(hidden=80, intermediate=60)),
    _case("FP8, sizes no multiple of the block", blocks=_BLOCK, shape=_Shape(hidden=160, intermediate=144)),
    _case("FP8, sizes below the block", blocks=_BLOCK, shape=_Shape(hidden=48, intermediate=31)),
    _case("FP8, 150 rows each", blocks=_BLOCK, shape=_TWO_BLOCKS._replace(tokens=225), route=_no_sentinels),
    _case("FP8, only sentinels", blocks=_BLOCK, shape=_TWO_BLOCKS, route=_only_sentinels),
    _case("FP8, rows of zeros", blocks=_BLOCK, shape=_TWO_BLOCKS, change=_zero_rows),
    _case("FP8, strided", blocks=_BLOCK, shape=_TWO_BLOCKS, change=_strided),
    _case("FP8, biases", blocks=_BLOCK, bias=_BF16, shape=_TWO_BLOCKS),
    _case("FP8, interleaved", blocks=_BLOCK, is_concatenated=False, shape=_TWO_BLOCKS),
    _case("FP8, no gate", blocks=_BLOCK, has_gate=False, activation="relu2", shape=_TWO_BLOCKS),
    _case("FP8, no tokens", blocks=_BLOCK, shape=_TWO_BLOCKS._replace(tokens=0)),
)

_EXACT_FP8_CASES: Final = (
    _case(
        "FP8, exact sums",
        blocks=_BLOCK,
        scales=_E8M0,
        has_gate=False,
        activation="relu",
        change=_exact,
        shape=_TWO_BLOCKS,
    ),
)


def _only_backward(case: Case) -> Case:
    return case._replace(name=f"routing weights: {case.name}", modes=("backward",))


# ------------------------------------------------------------------------------------------------------------ problems


def _problem(
    draw: Draw,
    *,
    tokens: int,
    slots: int = 8,
    experts: int = 128,
    hidden: int = 2048,
    intermediate: int = 768,
    real: float = 1.0,
) -> Inputs:
    """Rows to experts evenly, as bf16; a share of the slots is real and the others are sentinels."""
    count = tokens * slots
    index = draw.permutation(count) % experts
    index = torch.where(draw.permutation(count) < round(real * count), index, experts).view(tokens, slots)
    # One expert's weights in memory of its own for each: to draw them all takes the CPU minutes.
    first = draw.normal(2 * intermediate, hidden, dtype=_BF16, scale=hidden**-0.5).repeat(experts, 1, 1)
    second = draw.normal(hidden, intermediate, dtype=_BF16, scale=intermediate**-0.5).repeat(experts, 1, 1)
    routing = draw.uniform(tokens, slots, dtype=_BF16)
    return Inputs(draw.normal(tokens, hidden, dtype=_BF16), index, routing, first, second)


def _work(
    *,
    tokens: int,
    slots: int = 8,
    experts: int = 128,
    hidden: int = 2048,
    intermediate: int = 768,
    real: float = 1.0,
) -> Work:
    rows = round(real * tokens * slots)
    weights = min(rows, experts) * 3 * hidden * intermediate
    return Work(6.0 * rows * hidden * intermediate, 2.0 * (weights + 2 * tokens * hidden), "bf16")


_SIZES: Final = (
    {"tokens": 1},
    {"tokens": 64},
    {"tokens": 4096},
    {"tokens": 4096, "real": 0.125},
)

# ---------------------------------------------------------------------------------------------------------------- grid

# h and y are rounded, and z may be: three roundings of half a unit in the last place, and four deviations of their sum.
_ROUNDED: Final = Tolerance(row=0.03)
# An element of a gradient can be much smaller than the terms that it is the sum of; they are about 1 here.
_ROUNDED_GRADIENT: Final = Tolerance(row=0.05, least=0.05)
_F32_SUM: Final = Tolerance(row=1e-5)
_F32_GRADIENT: Final = Tolerance(row=1e-5, least=1e-5)
# A last digit of h can give it the next code, and that of the largest can give every other of its run another.
_QUANTISED: Final = Tolerance(row=0.2)
_QUANTISED_GRADIENT: Final = Tolerance(row=0.05, least=0.05)

_entry = partial(Entry, entrypoint="experts_forward", formula=_experts_forward)
_BIASES: Final = ("gate_up_proj_bias", "down_proj_bias")

MOE_EXPERTS_GRID: Final = (
    _entry(
        cases=_PLAIN_CASES,
        gradients=(0, 3, 4),
        tolerance=_ROUNDED,
        gradient_tolerance=_ROUNDED_GRADIENT,
        problem=_problem,
        sizes=_SIZES,
        work=_work,
    ),
    _entry(cases=_BIAS_CASES, gradients=(0, 3, 4, *_BIASES), tolerance=_ROUNDED, gradient_tolerance=_ROUNDED_GRADIENT),
    _entry(cases=_F32_CASES, gradients=(0, 3, 4, *_BIASES), tolerance=_F32_SUM, gradient_tolerance=_F32_GRADIENT),
    _entry(cases=_FP8_CASES, gradients=(0,), tolerance=_QUANTISED, gradient_tolerance=_QUANTISED_GRADIENT),
    _entry(cases=_EXACT_FP8_CASES, gradients=(0,), tolerance=Tolerance(row=0.01), gradient_tolerance=_ROUNDED_GRADIENT),
    # The gradient of a routing weight is a sum over H that may cancel, of which a token has only k.
    _entry(
        cases=tuple(map(_only_backward, (*_PLAIN_CASES, *_BIAS_CASES))),
        gradients=(2,),
        gradient_tolerance=Tolerance(row=0.05, least=0.3),
    ),
    _entry(
        cases=tuple(map(_only_backward, _FP8_CASES)), gradients=(2,), gradient_tolerance=Tolerance(row=0.2, least=1.0)
    ),
    _entry(
        cases=tuple(map(_only_backward, _F32_CASES)), gradients=(2,), gradient_tolerance=Tolerance(row=1e-5, least=1e-4)
    ),
)
