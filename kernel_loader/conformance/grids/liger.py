"""What `liger` is held against: float64, with logits as a whole, pairs as complex numbers, and gates by sigmoids.

The projections of an MLP are halves of x, or x itself: what is looked at lies between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work
from kernel_loader.conformance.grids.common import Change, Make, as_it_is, strided, uneven, with_nan

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_EPS: Final = 1e-5
_IGNORED: Final = -100


# Which of many shapes it is makes no difference to torch.compile.
_BUT_COMPILE: Final[tuple[Mode, ...]] = ("eager", "graph", "backward")


# ----------------------------------------------------------------------------------------------------------- formulas


def _norm(module: SimpleNamespace, x: Tensor) -> Tensor:
    wide = x.to(_F64)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale: Tensor = module.weight.to(_F64) / torch.sqrt(norm * norm / x.shape[-1] + module.variance_epsilon)
    return wide * scale


def _linear(module: SimpleNamespace, x: Tensor) -> Tensor:
    product = torch.einsum("...k,nk->...n", x.to(_F64), module.weight.to(_F64))
    return product if module.bias is None else product + module.bias.to(_F64)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 is sigmoid(2 * u).
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _gated(act: Callable[[Tensor], Tensor], module: SimpleNamespace, x: Tensor) -> Tensor:
    opened: Tensor = module.down_proj(act(module.gate_proj(x.to(_F64))) * module.up_proj(x.to(_F64)))
    return opened


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    half = q.shape[-1] // 2
    angle = torch.complex(cos[..., :half].to(_F64), sin[..., :half].to(_F64)).unsqueeze(unsqueeze_dim)
    pairs = (torch.complex(x[..., :half].to(_F64), x[..., half:].to(_F64)) * angle for x in (q, k))
    to_q, to_k = (torch.cat((pair.real, pair.imag), dim=-1) for pair in pairs)
    return to_q, to_k


def _turned_by_layer(module: SimpleNamespace, *args: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401, ARG001 - no state
    return _turned(*args)


def _loss(
    logits: None,  # noqa: ARG001 - not looked at
    labels: Tensor,
    vocab_size: int,  # noqa: ARG001 - not looked at
    num_items_in_batch: int | None = None,
    ignore_index: int = _IGNORED,
    shift_labels: Tensor | None = None,
    *,
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    lm_head_bias: Tensor | None = None,
    hidden_size: int,
    final_logit_softcapping: float | None = None,
    ce_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    use_token_scaling: bool = False,
) -> Tensor:
    target = labels.roll(-1, -1) if shift_labels is None else shift_labels
    counts = target != ignore_index
    if shift_labels is None:
        counts[..., -1:] = False
    rows, target = hidden_states.to(_F64)[counts], target[counts]
    scores = rows.reshape(-1, hidden_size) @ lm_head_weight.to(_F64).T
    scores = scores if lm_head_bias is None else scores + lm_head_bias.to(_F64)
    if final_logit_softcapping is not None:
        scores = final_logit_softcapping * torch.tanh(scores / final_logit_softcapping)
    classes = scores.shape[1]
    weight = torch.ones_like(scores[:0].sum(0)) if ce_weight is None else ce_weight.to(_F64)
    goal = torch.nn.functional.one_hot(target, classes).to(_F64)
    weighted = (1 - label_smoothing) * goal * weight + label_smoothing / classes * weight
    log_shares = torch.log_softmax(scores, dim=1)
    hard = -(weighted * log_shares).sum(1)
    square = lse_square_scale * torch.logsumexp(scores, dim=1) ** 2
    if num_items_in_batch is None:
        hard, square = hard / (goal @ weight).sum(), square / max(len(target), 1)
    each = hard + square
    if use_token_scaling:
        each = each * (goal * log_shares).sum(1).exp().detach()
    return each.sum() / (num_items_in_batch or 1)


def _loss_of_layer(module: SimpleNamespace, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401, ARG001 - no state
    return _loss(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------------- inputs


def _for_norm(shape: tuple[int, ...], dtype: torch.dtype, change: Change = as_it_is) -> Make:
    def make(draw: Draw) -> Inputs:
        weight = draw.uniform(shape[-1], low=0.5, high=1.5).to(dtype)
        x = change(draw, draw.normal(*shape, dtype=dtype))
        return Inputs(SimpleNamespace(weight=weight, variance_epsilon=_EPS), x)

    return make


class _Module(SimpleNamespace):
    """What a layer's forward finds in the module that it is put into."""

    def parameters(self) -> list[Tensor]:
        """As those of nn.Module: tiled layers give them their gradients by hand."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]


def _for_linear(
    shape: tuple[int, ...], n: int, dtype: torch.dtype, change: Change = as_it_is, *, bias: bool = True
) -> Make:
    def make(draw: Draw) -> Inputs:
        x = change(draw, draw.normal(*shape, dtype=dtype))
        weight = draw.normal(n, shape[-1], dtype=dtype, scale=max(shape[-1], 1) ** -0.5)
        module = _Module(weight=weight, bias=draw.normal(n, dtype=dtype))
        if not bias:
            module.bias = None
        return Inputs(module, x)

    return make


# Copies, as what a projection returns is the layer's own.
def _first_half(x: Tensor) -> Tensor:
    return x.chunk(2, dim=-1)[0].clone()


def _second_half(x: Tensor) -> Tensor:
    return x.chunk(2, dim=-1)[1].clone()


def _itself(x: Tensor) -> Tensor:
    return x


def _for_mlp(shape: tuple[int, ...], dtype: torch.dtype, change: Change = as_it_is) -> Make:
    """`shape` is that of what is between the projections; x is twice as wide."""

    def make(draw: Draw) -> Inputs:
        module = _Module(gate_proj=_first_half, up_proj=_second_half, down_proj=_itself)
        return Inputs(module, change(draw, draw.normal(*shape[:-1], 2 * shape[-1], dtype=dtype, scale=2.0)))

    return make


def _for_rotary(
    batch: int,
    tokens: int,
    heads: tuple[int, int],
    width: int,
    *,
    dtype: torch.dtype = _F32,
    halves: int = 2,
    unsqueeze_dim: int = 1,
    transposed: bool = False,
    one_table: bool = False,
    layer: bool = False,
) -> Make:
    """Queries and keys, with tables that have each angle `halves` times, for each sequence or for all alike."""

    def make(draw: Draw) -> Inputs:
        q, k = (draw.normal(batch, tokens, number, width, dtype=dtype) for number in heads)
        if unsqueeze_dim == 1:
            q, k = (x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous() for x in (q, k))
        angle = draw.uniform(1 if one_table else batch, tokens, width // 2, low=-4.0, high=4.0)
        cos, sin = (torch.cat([table.to(dtype)] * halves, dim=-1) for table in (angle.cos(), angle.sin()))
        dim = () if unsqueeze_dim == 1 else (unsqueeze_dim,)
        return Inputs(*((SimpleNamespace(),) if layer else ()), q, k, cos, sin, *dim)

    return make


def _for_loss(
    lead: tuple[int, ...],
    classes: int,
    hidden: int,
    dtype: torch.dtype = _F32,
    *,
    layer: bool,
    ignored: str = "some",
    one_label: bool = False,
    items: int | None = None,
    ignore_index: int = _IGNORED,
    shifted: bool = False,
    bias: bool = False,
    ce_weight: bool = False,
    strided: bool = False,
    **kwargs: object,
) -> Make:
    def make(draw: Draw) -> Inputs:
        labels = draw.integers(0, 1 if one_label else classes, *lead)
        if ignored != "none":
            some = draw.uniform(*lead) < (0.3 if ignored == "some" else 2.0)
            labels = labels.masked_fill(some, ignore_index)
        states = draw.normal(*lead, hidden, dtype=dtype)
        further: dict[str, object] = {
            "hidden_states": draw.strided(states) if strided else states,
            "lm_head_weight": draw.normal(classes, hidden, dtype=dtype, scale=2 * hidden**-0.5),
            "hidden_size": hidden,
        }
        if bias:
            further["lm_head_bias"] = draw.normal(classes, dtype=dtype)
        if ce_weight:
            further["ce_weight"] = draw.uniform(classes, low=0.5, high=2.0)
        if shifted:
            further["shift_labels"] = labels
        own = (SimpleNamespace(),) if layer else ()
        return Inputs(*own, None, labels, classes, items, ignore_index, **further, **kwargs)

    return make


# -------------------------------------------------------------------------------------------------------------- cases


def _norm_cases() -> Iterator[Case]:
    shapes = ((0, 64), (1, 2), (3, 7), (5, 127), (4, 128), (3, 129), (2, 1025), (300, 8), (2, 3, 24), (24,))
    for shape in shapes:
        yield Case(f"shape {shape}", _for_norm(shape, _BF16), modes=_BUT_COMPILE)
    yield Case("bfloat16", _for_norm((5, 129), _BF16))
    yield Case("float16", _for_norm((5, 129), _F16))
    yield Case("x strided", _for_norm((5, 24), _BF16, strided))
    yield Case("NaN in a row", _for_norm((3, 24), _BF16, with_nan))


def _single_norm_cases() -> Iterator[Case]:
    # With one column there is nothing but eps in a gradient to the input, and float32 loses it.
    for shape in ((1, 2), (5, 127), (3, 129), (2, 3, 24)):
        yield Case(f"float32, shape {shape}", _for_norm(shape, _F32))
    yield Case("float32, x strided", _for_norm((5, 24), _F32, strided))
    yield Case("rows of zeros, small and large numbers", _for_norm((3, 24), _F32, uneven))


def _linear_cases(dtype: torch.dtype, *, bias: bool) -> Iterator[Case]:
    linear = partial(_for_linear, dtype=dtype, bias=bias)
    name = f"{str(dtype).removeprefix('torch.')}, {'bias' if bias else 'no bias'}"
    shapes: tuple[tuple[int, ...], ...] = ((1, 8), (3, 7), (0, 8), (17, 4), (2, 5, 4))
    for shape, n in zip(shapes, (1, 5, 4, 9, 8), strict=True) if bias else ():
        yield Case(f"{name}, shape {shape}, {n} columns", linear(shape, n), modes=_BUT_COMPILE)
    yield Case(name, linear((9, 4), 8))
    yield Case(f"{name}, strided", linear((9, 4), 8, change=strided), modes=_BUT_COMPILE)


def _mlp_cases(*, tiled: bool) -> Iterator[Case]:
    """Tiles are as many rows as x is wide."""
    usual: tuple[tuple[int, ...], ...] = ((1, 1), (3, 7), (0, 8), (5, 127), (3, 129), (2, 1025), (2, 3, 24))
    around_tiles: tuple[tuple[int, ...], ...] = ((1, 1), (3, 7), (0, 8), (8, 4), (9, 4), (40, 4), (2, 9, 4))
    for shape in around_tiles if tiled else usual:
        yield Case(f"shape {shape}", _for_mlp(shape, _BF16), modes=_BUT_COMPILE)
    yield Case("bfloat16", _for_mlp((5, 129), _BF16))
    yield Case("float32", _for_mlp((5, 129), _F32), modes=_BUT_COMPILE)
    if not tiled:
        yield Case("float16", _for_mlp((5, 129), _F16), modes=_BUT_COMPILE)
    yield Case("strided", _for_mlp((5, 24), _BF16, strided), modes=_BUT_COMPILE)


def _rotary_cases(*, layer: bool) -> Iterator[Case]:
    rotary = partial(_for_rotary, layer=layer)
    for heads in ((1, 1), (4, 4), (8, 2), (7, 1)):
        yield Case(f"{heads[0]} heads of queries, {heads[1]} of keys", rotary(2, 5, heads, 64), modes=_BUT_COMPILE)
    for tokens in (0, 1, 17):
        yield Case(f"{tokens} tokens", rotary(1, tokens, (2, 1), 64), modes=_BUT_COMPILE)
    for width in (2, 6, 80, 256):
        yield Case(f"heads of {width}", rotary(2, 3, (2, 1), width), modes=_BUT_COMPILE)
    yield Case("float32", rotary(2, 5, (4, 2), 64))
    yield Case("tables of half a head", rotary(2, 5, (4, 2), 64, halves=1))
    yield Case("one table for all sequences", rotary(2, 5, (4, 2), 64, one_table=True), modes=_BUT_COMPILE)
    yield Case("heads after tokens", rotary(2, 5, (4, 2), 64, unsqueeze_dim=2), modes=_BUT_COMPILE)
    yield Case("transposed", rotary(2, 5, (4, 2), 64, transposed=True), modes=_BUT_COMPILE)


def _half_rotary_cases(*, layer: bool) -> Iterator[Case]:
    for dtype in (_BF16, _F16):
        yield Case(str(dtype).removeprefix("torch."), _for_rotary(2, 5, (4, 2), 64, dtype=dtype, layer=layer))


def _loss_cases(*, layer: bool) -> Iterator[Case]:
    """The layer is the function once more: what tells it apart is how arguments reach it."""
    loss = partial(_for_loss, layer=layer)
    yield Case("mean", loss((2, 9), 11, 8))
    yield Case("sum", loss((2, 9), 11, 8, items=7))
    yield Case("no token counts", loss((2, 5), 11, 8, ignored="all"))
    yield Case("another label is ignored", loss((2, 9), 11, 8, ignore_index=3))
    yield Case("labels shifted already", loss((2, 9), 11, 8, shifted=True))
    smooth = partial(loss, label_smoothing=0.1, lse_square_scale=0.05, use_token_scaling=True)
    yield Case("all of it", smooth((2, 9), 11, 8, ce_weight=True, final_logit_softcapping=2.0))
    if layer:
        return
    yield Case("a vector of tokens", loss((9,), 11, 8))
    yield Case("one token, and one class", loss((1, 2), 1, 4, ignored="none"))
    yield Case("all tokens count", loss((2, 5), 11, 8, ignored="none"))
    yield Case("softcap", loss((2, 9), 11, 8, final_logit_softcapping=1.5))
    yield Case("smoothed labels", loss((2, 9), 11, 8, label_smoothing=0.2))
    yield Case("weights of classes", loss((2, 9), 11, 8, ce_weight=True))
    yield Case("weights of classes, sum", loss((2, 9), 11, 8, ce_weight=True, items=5))
    yield Case("square of the normaliser", loss((2, 9), 11, 8, lse_square_scale=0.1))
    yield Case("scaled by token", loss((2, 9), 11, 8, use_token_scaling=True))
    yield Case("more classes than a block holds", loss((1, 4), 32_771, 4))
    yield Case("more tokens than a block holds", loss((1, 1027), 5, 4))
    refuses = "published builds view hidden_states, and measure their tiles by the number of tokens"
    yield Case("no tokens", loss((2, 0), 11, 8), may_refuse=refuses)
    yield Case("strided", loss((2, 9), 11, 8, strided=True), may_refuse=refuses)


def _biased_loss_cases(*, layer: bool) -> Iterator[Case]:
    yield Case("bias", _for_loss((2, 9), 11, 8, bias=True, layer=layer))
    capped = _for_loss((2, 9), 11, 8, bias=True, items=5, final_logit_softcapping=1.5, layer=layer)
    yield Case("bias and softcap, sum", capped)


def _half_loss_cases(*, layer: bool) -> Iterator[Case]:
    for dtype in (_BF16, _F16):
        yield Case(str(dtype).removeprefix("torch."), _for_loss((2, 9), 11, 16, dtype, layer=layer))
    if not layer:
        # Where all labels are one, gradients of blocks all point the same way: sums in bfloat16 stop growing.
        many = _for_loss((1, 131_072), 4, 4, _BF16, layer=False, ignored="none", one_label=True)
        yield Case("many blocks of one label", many, ("eager", "backward"))


# ----------------------------------------------------------------------------------------------------- sizes, and work


def _norm_problem(draw: Draw, *, tokens: int, width: int) -> Inputs:
    return _for_norm((tokens, width), _BF16)(draw)


def _norm_work(*, tokens: int, width: int) -> Work:
    return Work(4.0 * tokens * width, 2.0 * width * (2 * tokens + 1), "fp32")


def _mlp_problem(draw: Draw, *, tokens: int, width: int) -> Inputs:
    return _for_mlp((tokens, width), _BF16)(draw)


def _mlp_work(*, tokens: int, width: int) -> Work:
    # About ten operations an element: an exponential, a division, and what is around them.
    return Work(10.0 * tokens * width, 6.0 * tokens * width, "fp32")


def _rotary_problem(draw: Draw, *, tokens: int, queries: int, keys: int, width: int, layer: bool = False) -> Inputs:
    return _for_rotary(1, tokens, (queries, keys), width, dtype=_BF16, layer=layer)(draw)


def _rotary_work(*, tokens: int, queries: int, keys: int, width: int) -> Work:
    numbers = tokens * (queries + keys) * width
    return Work(3.0 * numbers, 4.0 * numbers + 4.0 * tokens * width, "fp32")


def _loss_problem(draw: Draw, *, tokens: int, classes: int, hidden: int, layer: bool = False) -> Inputs:
    return _for_loss((1, tokens), classes, hidden, _BF16, layer=layer)(draw)


def _loss_work(*, tokens: int, classes: int, hidden: int) -> Work:
    return Work(2.0 * tokens * classes * hidden, 2.0 * hidden * (tokens + classes))


# Llama-3-8B and Qwen2.5-0.5B.
_NORM_SIZES: Final = ({"tokens": 4096, "width": 4096}, {"tokens": 4096, "width": 896}, {"tokens": 1, "width": 4096})
_MLP_SIZES: Final = ({"tokens": 4096, "width": 14336}, {"tokens": 4096, "width": 4864})
_ROTARY_SIZES: Final = ({"tokens": 4096, "queries": 32, "keys": 8, "width": 128},)
_LOSS_SIZES: Final = (
    {"tokens": 4096, "classes": 128_256, "hidden": 4096},
    {"tokens": 4096, "classes": 151_936, "hidden": 896},
)

# A float32 sum and half a dozen products, for numbers that are a few times as large as the row is on average.
_SINGLE: Final = Tolerance(row=2e-6)
_SINGLE_GRADIENT: Final = Tolerance(row=1e-5)
# A rounding is 2 ** -9 of its term; those of the rows of a small batch may fall the same way.
_HALF_GRADIENT: Final = Tolerance(row=1e-2)
# Two roundings of a gated function are one unit in the last place, and 1 + tanh cancels where x is up to -10.
_GATED: Final = Tolerance(least=1e-5)
# Sums in float32 may be taken as products of TF32, which keep 2 ** -11.
_PRODUCT: Final = Tolerance(row=2e-3, least=1e-5)
_HALF_PRODUCT: Final = Tolerance(row=2e-2, least=1e-3)
# Two products of numbers up to 5, and their sum, which may cancel: in float32, or each rounded to half precision.
_TURNED: Final = Tolerance(least=2e-6)
_HALF_TURNED: Final = Tolerance(least=4e-2)
_SINGLE_LOSS: Final = Tolerance(each=2e-3, least=1e-5)
# Logits are rounded to half precision, a hundredth of what they are at most here, and so is a gradient.
_HALF_LOSS: Final = Tolerance(each=1e-2)
_HALF_LOSS_GRADIENT: Final = Tolerance(row=3e-2, least=1e-3)
_BREAKS: Final[Mapping[Mode, str]] = {
    "compile": "published builds break the graph here on purpose",
    "graph": "published builds count labels on the host",
}
_NOT_COMPILED: Final[Mapping[Mode, str]] = {"compile": "published builds do not say that they can be compiled"}


def _norm_entry(cases: Iterator[Case], gradient: Tolerance, **further: Any) -> Entry:  # noqa: ANN401 - fields
    return Entry(
        entrypoint="layers.LigerRMSNorm",
        cases=tuple(cases),
        formula=_norm,
        gradients=(1, "0.weight"),
        tolerance=_SINGLE,
        gradient_tolerance=gradient,
        skip=_NOT_COMPILED,
        **further,
    )


def _mlp_entry(layer: str, act: Callable[[Tensor], Tensor], *, tiled: bool = False) -> Entry:
    return Entry(
        entrypoint=f"layers.{layer}",
        cases=tuple(_mlp_cases(tiled=tiled)),
        formula=partial(_gated, act),
        gradients=(1,),
        tolerance=_GATED,
        gradient_tolerance=_HALF_GRADIENT._replace(least=1e-5),
        problem=_mlp_problem,
        sizes=_MLP_SIZES,
        work=_mlp_work,
    )


def _rotary_entries(entrypoint: str, formula: Callable[..., Any], *, layer: bool) -> tuple[Entry, Entry]:
    gradients = (1, 2) if layer else (0, 1)
    single = Entry(
        entrypoint=entrypoint,
        cases=tuple(_rotary_cases(layer=layer)),
        formula=formula,
        gradients=gradients,
        tolerance=_TURNED,
    )
    half = Entry(
        entrypoint=entrypoint,
        cases=tuple(_half_rotary_cases(layer=layer)),
        formula=formula,
        gradients=gradients,
        tolerance=_HALF_TURNED,
        problem=partial(_rotary_problem, layer=layer),
        sizes=_ROTARY_SIZES,
        work=_rotary_work,
    )
    return single, half


def _linear_entry(dtype: torch.dtype, tolerance: Tolerance, *, bias: bool) -> Entry:
    return Entry(
        entrypoint="layers.LigerLinear",
        cases=tuple(_linear_cases(dtype, bias=bias)),
        formula=_linear,
        gradients=(1, "0.weight", "0.bias") if bias else (1, "0.weight"),
        tolerance=tolerance,
    )


def _loss_entries(entrypoint: str, formula: Callable[..., Any], *, layer: bool) -> tuple[Entry, ...]:
    weights = ("hidden_states", "lm_head_weight")
    single = Entry(
        entrypoint=entrypoint,
        cases=tuple(_loss_cases(layer=layer)),
        formula=formula,
        gradients=weights,
        tolerance=_SINGLE_LOSS,
        gradient_tolerance=_PRODUCT,
        skip=_BREAKS,
    )
    biased = Entry(
        entrypoint=entrypoint,
        cases=tuple(_biased_loss_cases(layer=layer)),
        formula=formula,
        gradients=(*weights, "lm_head_bias"),
        tolerance=_SINGLE_LOSS,
        gradient_tolerance=_PRODUCT,
        skip=_BREAKS,
    )
    half = Entry(
        entrypoint=entrypoint,
        cases=tuple(_half_loss_cases(layer=layer)),
        formula=formula,
        gradients=weights,
        tolerance=_HALF_LOSS,
        gradient_tolerance=_HALF_LOSS_GRADIENT,
        dtypes=(_F32,),
        skip=_BREAKS,
        problem=partial(_loss_problem, layer=layer),
        sizes=_LOSS_SIZES,
        work=_loss_work,
    )
    return single, biased, half


LIGER_GRID: Final = (
    _norm_entry(_norm_cases(), _HALF_GRADIENT, problem=_norm_problem, sizes=_NORM_SIZES, work=_norm_work),
    _norm_entry(_single_norm_cases(), _SINGLE_GRADIENT),
    _linear_entry(_F32, _PRODUCT, bias=True),
    _linear_entry(_F32, _PRODUCT, bias=False),
    _linear_entry(_BF16, _HALF_PRODUCT, bias=True),
    _linear_entry(_BF16, _HALF_PRODUCT, bias=False),
    _mlp_entry("LigerSwiGLUMLP", _silu),
    _mlp_entry("LigerTiledSwiGLUMLP", _silu, tiled=True),
    _mlp_entry("LigerGEGLUMLP", _gelu_tanh),
    _mlp_entry("LigerTiledGEGLUMLP", _gelu_tanh, tiled=True),
    *_rotary_entries("liger_rotary_pos_emb", _turned, layer=False),
    *_rotary_entries("layers.liger_rotary_pos_emb_layer", _turned_by_layer, layer=True),
    *_loss_entries("LigerForCausalLMLoss", _loss, layer=False),
    *_loss_entries("layers.LigerForCausalLMLossLayer", _loss_of_layer, layer=True),
)
