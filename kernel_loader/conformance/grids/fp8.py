"""What `finegrained_fp8` is held against: the formula of kernel_loader/bundles/fp8.py, dense and in float64.

The codes of activations are float32 by definition: what lies near a tie would round elsewhere in float64. A compiled
build may divide with a last digit of its own, or multiply by the reciprocal, so that such an element would get the next
code. The inputs here hold none: every code below is the only right one, and the tolerance is that of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_E8M0: Final = getattr(torch, "float8_e8m0fnu", torch.uint8)
_E4M3_MAX: Final = 448.0
_MX_GROUP: Final = 32
_NAN: Final = float("nan")

# Elements nearer than this to where two codes meet, in steps of the code, are drawn as zeros. A quotient that is off by
# four units in the last place of float32 is off by 16 * 4 * 2 ** -23 of a step.
_MARGIN: Final = 1e-4


# ------------------------------------------------------------------------------------------------------------ formula


class _Format(NamedTuple):
    """How a pair (B, Bs) is read: the block of B that shares a scale, and whether scales of A are powers of two."""

    block_n: int
    block_k: int
    mx: bool


def _format(b: Tensor, scales: Tensor, block_size: Sequence[int] | None) -> _Format:
    n, k = b.shape[-2], b.shape[-1] * (2 if b.dtype == torch.int8 else 1)
    grouped = tuple(scales.shape) == (*b.shape[:-1], k // _MX_GROUP)
    if b.dtype == torch.int8 or (scales.dtype != _F32 and k % _MX_GROUP == 0 and grouped):
        return _Format(1, _MX_GROUP, mx=True)
    block_n, block_k = block_size or (max(n, 1), max(k, 1))
    return _Format(block_n, block_k, mx=False)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent for whole exponents within -1022 and 1023, float64, exact on every device."""
    return ((exponent.long() + 1023) << 52).view(_F64)


def _e4m3_values(device: torch.device) -> Tensor:
    """The number of each of the 256 codes, from sign, exponent and mantissa. float64."""
    code = torch.arange(256, device=device)
    exponent, mantissa = (code >> 3) & 15, (code & 7).to(_F64) / 8
    magnitude = torch.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * _power_of_two(exponent - 7))
    return torch.where((code & 127) == 127, _NAN, torch.where(code > 127, -magnitude, magnitude))


def _e2m1_values(device: torch.device) -> Tensor:
    """The number of each of the 16 codes, from sign, exponent and mantissa. float64."""
    code = torch.arange(16, device=device)
    exponent, mantissa = (code >> 1) & 3, (code & 1).to(_F64) / 2
    magnitude = torch.where(exponent == 0, mantissa, (1 + mantissa) * _power_of_two(exponent - 1))
    return torch.where(code > 7, -magnitude, magnitude)


def _scale_values(scale: Tensor) -> Tensor:
    if scale.dtype == _F32:
        return scale.to(_F64)
    exponent = scale.view(torch.uint8).long()
    return torch.where(exponent == 255, _NAN, _power_of_two(exponent - 127))


def _weight(b: Tensor, scales: Tensor, form: _Format) -> Tensor:
    """The real numbers of (..., N, K), float64."""
    if b.dtype == torch.int8:
        byte = b.view(torch.uint8).long()
        values = _e2m1_values(b.device)[torch.stack((byte & 15, byte >> 4), dim=-1)].flatten(-2)
    else:
        values = _e4m3_values(b.device)[b.view(torch.uint8).long()]
    n, k = values.shape[-2:]
    blocks = scales.reshape(*b.shape[:-2], -(-n // form.block_n), -(-k // form.block_k))
    scale = _scale_values(blocks).repeat_interleave(form.block_n, -2)[..., :n, :]
    return values * scale.repeat_interleave(form.block_k, -1)[..., :k]


def _step(magnitude: Tensor) -> Tensor:
    """How far apart the e4m3 numbers around each magnitude are: an eighth of its power of two. float64."""
    return _power_of_two((torch.frexp(magnitude).exponent - 1).clamp(-6, 8) - 3)


def _to_e4m3(values: Tensor) -> Tensor:
    """The nearest e4m3 number of each float64, ties to the even code, beyond 448 to 448."""
    magnitude = values.abs().clamp(max=_E4M3_MAX)
    step = _step(magnitude)
    return (torch.round(magnitude / step) * step).copysign(values)


def _scales(x: Tensor, run: int, *, mx: bool) -> Tensor:
    """max(abs(x)) / 448 of each run along the last dimension, (..., ceil(K / run)) float32."""
    short = -x.shape[-1] % run
    padded = functional.pad(x.to(_F32), (0, short))
    runs = padded.view(*x.shape[:-1], padded.shape[-1] // run, run)
    largest = runs.abs().amax(-1)
    scale: Tensor = largest / torch.full_like(largest, _E4M3_MAX)
    if not mx:
        return scale
    mantissa, exponent = torch.frexp(scale)
    up = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    return _power_of_two(torch.where(scale == 0, -126, up)).to(_F32)


def _quotients(x: Tensor, run: int, scale: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """What is rounded to codes, x / max(scale, floor) in float32, and the scale of each element. float64."""
    spread = scale.repeat_interleave(run, -1)[..., : x.shape[-1]]
    return (x.to(_F32) / spread.clamp(min=floor)).to(_F64), spread.to(_F64)


def _through_quantiser(a: Tensor, form: _Format, static: Tensor | None) -> Tensor:
    """What the codes of A stand for, float64; to autograd it is A itself."""
    if static is None:
        quotient, scale = _quotients(a.detach(), form.block_k, _scales(a.detach(), form.block_k, mx=form.mx), 1e-12)
    else:
        quotient, scale = _quotients(a.detach(), 1, static.to(_F32).reshape(()).expand(a.shape), 0.0)
    wide = a.to(_F64)
    return wide + (_to_e4m3(quotient) * scale - wide).detach()


def _fp8_matmul(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,  # noqa: ARG001 - rounds, which is for the tolerance
    activation_scale: Tensor | None = None,
) -> Tensor:
    form = _format(b, scales, block_size)
    return _through_quantiser(a, form, activation_scale) @ _weight(b, scales, form).mT


def _fp8_act_quant(x: Tensor, block_size: int = 128) -> tuple[Tensor, Tensor]:
    scale = _scales(x, block_size, mx=False)
    return _to_e4m3(_quotients(x, block_size, scale, 1e-12)[0]), scale.to(_F64)


def _batched_fp8_matmul(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    expert_ids: Tensor,
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,  # noqa: ARG001 - rounds, which is for the tolerance
) -> Tensor:
    form, ids = _format(b, scales, block_size), expert_ids.long()
    real = (ids < b.shape[0]).nonzero().squeeze(1)
    by_every_expert = _through_quantiser(a[real], form, None) @ _weight(b, scales, form).mT
    own = by_every_expert[ids[real], torch.arange(len(real), device=a.device)]
    return torch.zeros(a.shape[0], b.shape[-2], dtype=_F64, device=a.device).index_put((real,), own)


def _grouped_fp8_matmul(
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    offsets: Tensor,
    tokens_per_expert: Tensor,  # noqa: ARG001 - offsets say it already
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    rows = torch.arange(a.shape[0], device=a.device)
    ids = (rows[:, None] >= offsets.long()).sum(1)  # how many experts have ended, E for a sentinel
    return _batched_fp8_matmul(a, b, scales, ids, block_size, output_dtype)


# ------------------------------------------------------------------------------------------------------------- inputs


class _Mode(NamedTuple):
    """A format of weights: its codes, its scales, and the block that shares one (None for the whole matrix)."""

    codes: torch.dtype
    scales: torch.dtype
    block: tuple[int, int] | None
    mx: bool = False

    @property
    def run(self) -> int | None:
        """Elements along K that share a scale of A; None for all."""
        return _MX_GROUP if self.mx else self.block[1] if self.block else None


_E4M3: Final = torch.float8_e4m3fn
_BLOCK: Final = _Mode(_E4M3, _F32, (128, 128))
_TENSOR: Final = _Mode(_E4M3, _F32, None)
_MXFP8: Final = _Mode(_E4M3, _E8M0, (128, 128), mx=True)
_MXFP4: Final = _Mode(torch.int8, _E8M0, (128, 128), mx=True)
_MODES: Final = {
    "block": _BLOCK,
    "block, UE8M0": _BLOCK._replace(scales=_E8M0),
    "block, UE8M0 bytes": _BLOCK._replace(scales=torch.uint8),
    "block 32 x 64": _BLOCK._replace(block=(32, 64)),
    "per tensor": _TENSOR,
    "per tensor, UE8M0": _TENSOR._replace(scales=_E8M0),
    "MXFP8": _MXFP8,
    "MXFP8, bytes": _MXFP8._replace(scales=torch.uint8),
    "MXFP4": _MXFP4,
}


def _draw_weight(draw: Draw, mode: _Mode, *shape: int) -> tuple[Tensor, Tensor]:
    """(B, Bs) of (..., N, K): codes of every exponent, and scales as trained weights have them."""
    *stack, n, k = shape
    if mode.codes == torch.int8:
        codes = draw.integers(-128, 128, *stack, n, k // 2, dtype=torch.int8)
    else:
        code = draw.integers(0, 254, *stack, n, k)
        code += code >= 127  # 127 and 255 are NaN
        codes = code.to(torch.uint8).view(mode.codes)
    if mode.mx:
        scales = [*stack, n, k // _MX_GROUP]
    elif mode.block is None:
        scales = stack or [1]
    else:
        scales = [*stack, -(-n // mode.block[0]), -(-k // mode.block[1])]
    if mode.scales == _F32:
        return codes, draw.uniform(*scales, low=1e-3, high=2e-2)
    return codes, draw.integers(115, 125, *scales, dtype=torch.uint8).view(mode.scales)


def _settled(x: Tensor, run: int | None, *, mx: bool = False, static: float | None = None) -> Tensor:
    """Put zeros for what a last digit of the division could send to another code.

    Division by a power of two is exact, so that MX keeps its ties.
    """
    if mx or not x.numel():
        return x
    run = x.shape[-1] if run is None else run
    scale = _scales(x, run, mx=False) if static is None else x.new_tensor(static, dtype=_F32).expand(x.shape)
    quotient = _quotients(x, run if static is None else 1, scale, 1e-12)[0].abs().clamp(max=_E4M3_MAX)
    steps = quotient / _step(quotient)
    return torch.where((steps - steps.floor() - 0.5).abs() < _MARGIN, 0.0, x)


def _draw_activations(draw: Draw, mode: _Mode, *shape: int, dtype: torch.dtype = _BF16) -> Tensor:
    return _settled(draw.normal(*shape, dtype=dtype), mode.run, mx=mode.mx)


def _block_size(mode: _Mode) -> list[int] | None:
    return None if mode.block is None else list(mode.block)


Change = Callable[[Draw, Tensor], Tensor]


# Products come out in float32, which hides least, unless a case is about another dtype.
def _dense(
    lead: Sequence[int],
    n: int,
    k: int,
    mode: _Mode = _BLOCK,
    *,
    dtype: torch.dtype = _BF16,
    change: Change | None = None,
    output_dtype: torch.dtype | None = _F32,
) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        a = _draw_activations(draw, mode, *lead, k, dtype=dtype)
        if change is not None:
            a = change(draw, a)
        return Inputs(a, *_draw_weight(draw, mode, n, k), _block_size(mode), output_dtype)

    return make


def _strided(draw: Draw, a: Tensor) -> Tensor:
    return draw.strided(a)


def _zero_rows(_: Draw, a: Tensor) -> Tensor:
    return a.index_fill(0, a.new_tensor([0, 2], dtype=torch.int64), 0.0)


def _nan_in_a_row(_: Draw, a: Tensor) -> Tensor:
    a[1, a.shape[1] // 2] = _NAN
    return a


def _small_rows(_: Draw, a: Tensor) -> Tensor:
    """Rows whose scales lie above, around and below the floor of 1e-12."""
    return _settled(a * a.new_tensor([[1e-7], [1e-9], [1e-11], [1e-12]]), _BLOCK.run)


def _one_output(draw: Draw) -> Inputs:
    """N = 1, and all positive: with one output there is no row whose size could bound what cancels."""
    a = _settled(_draw_activations(draw, _BLOCK, 5, 256).abs(), 128)
    codes = draw.integers(1, 127, 1, 256, dtype=torch.uint8).view(_E4M3)
    return Inputs(a, codes, draw.uniform(1, 2, low=1e-3, high=2e-2), [128, 128], _F32)


def _one_scale(shape: tuple[int, ...], block_size: list[int] | None) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        b, scales = _draw_weight(draw, _TENSOR, 128, 256)
        return Inputs(_draw_activations(draw, _TENSOR, 5, 256), b, scales.reshape(shape), block_size, _F32)

    return make


def _static(value: float, mode: _Mode = _BLOCK, scale: float = 1.0) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        a = _settled(draw.normal(5, 256, dtype=_BF16, scale=scale), mode.run, static=value)
        b, scales = _draw_weight(draw, mode, 256, 256)
        return Inputs(a, b, scales, _block_size(mode), _F32, activation_scale=draw.put(torch.tensor(value)))

    return make


def _quant(
    *shape: int, block_size: int | None = None, dtype: torch.dtype = _BF16, change: Change | None = None
) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        x = _settled(draw.normal(*shape, dtype=dtype), block_size or 128)
        x = x if change is None else change(draw, x)
        return Inputs(x) if block_size is None else Inputs(x, block_size)

    return make


class _Rows(NamedTuple):
    """Which experts rows go to: so many for each, and so many sentinels after them."""

    tokens: tuple[int, ...]
    sentinels: int = 0

    @property
    def total(self) -> int:
        return sum(self.tokens) + self.sentinels


def _sorted_ids(rows: _Rows) -> Tensor:
    counts = torch.tensor([*rows.tokens, rows.sentinels])
    return torch.arange(len(rows.tokens) + 1).repeat_interleave(counts)


def _poisoned(a: Tensor, sentinel: Tensor) -> Tensor:
    """NaN wherever nothing may be read."""
    return a.masked_fill(sentinel[:, None], _NAN)


def _batched(
    rows: _Rows,
    n: int,
    k: int,
    mode: _Mode = _BLOCK,
    *,
    dtype: torch.dtype = _BF16,
    ids_dtype: torch.dtype = torch.int64,
    past: int = 0,
    change: Change | None = None,
    output_dtype: torch.dtype | None = _F32,
) -> Callable[[Draw], Inputs]:
    """Rows in any order; the ids of sentinels are E, and `past` beyond it."""

    def make(draw: Draw) -> Inputs:
        experts = len(rows.tokens)
        ids = draw.put(_sorted_ids(rows))[draw.permutation(rows.total)]
        a = _poisoned(_draw_activations(draw, mode, rows.total, k, dtype=dtype), ids >= experts)
        a = a if change is None else change(draw, a)
        ids = torch.where(ids >= experts, ids + past, ids).to(ids_dtype)
        return Inputs(a, *_draw_weight(draw, mode, experts, n, k), ids, _block_size(mode), output_dtype)

    return make


def _grouped(
    rows: _Rows,
    n: int,
    k: int,
    mode: _Mode = _BLOCK,
    *,
    dtype: torch.dtype = _BF16,
    ids_dtype: torch.dtype = torch.int32,
    change: Change | None = None,
    output_dtype: torch.dtype | None = _F32,
) -> Callable[[Draw], Inputs]:
    """Rows sorted by expert, sentinels last."""

    def make(draw: Draw) -> Inputs:
        experts = len(rows.tokens)
        a = _draw_activations(draw, mode, rows.total, k, dtype=dtype)
        a = _poisoned(a, draw.put(_sorted_ids(rows)) >= experts)
        a = a if change is None else change(draw, a)
        tokens = draw.put(torch.tensor(rows.tokens, dtype=ids_dtype))
        offsets = tokens.cumsum(0, dtype=ids_dtype)
        return Inputs(a, *_draw_weight(draw, mode, experts, n, k), offsets, tokens, _block_size(mode), output_dtype)

    return make


# -------------------------------------------------------------------------------------------------------------- cases

_DENSE_CASES: Final = (
    *(Case(name, _dense((5,), 256, 256, mode)) for name, mode in _MODES.items()),
    *(Case(f"{rows} rows", _dense((rows,), 256, 256, output_dtype=None)) for rows in (0, 1, 15, 16, 17, 127, 128, 129)),
    Case("a vector", _dense((), 256, 256)),
    Case("leading dimensions", _dense((2, 3), 256, 256)),
    Case("an empty leading dimension", _dense((2, 0, 3), 256, 256)),
    Case("N = 0", _dense((5,), 0, 256)),
    Case("N = 1", _one_output),
    Case("K = 0", _dense((5,), 256, 0)),
    Case("K = 1", _dense((5,), 256, 1)),
    Case("N, K one below the block", _dense((5,), 127, 127)),
    Case("N, K one above the block", _dense((5,), 129, 129)),
    Case("N, K no multiple of the block", _dense((5,), 160, 288)),
    Case("per tensor, N, K no multiple of anything", _dense((5,), 131, 203, _TENSOR)),
    Case("MXFP8, one group", _dense((5,), 17, 32, _MXFP8)),
    Case("MXFP8, K no multiple of 128", _dense((5,), 129, 160, _MXFP8)),
    Case("MXFP4, one group", _dense((5,), 17, 32, _MXFP4)),
    Case("MXFP4, K no multiple of 128", _dense((5,), 129, 160, _MXFP4)),
    Case("float32 scales of 32 are not MX", _dense((5,), 48, 96, _BLOCK._replace(block=(1, 32)))),
    *(
        Case(f"one scale of shape {shape}, block_size {size}", _one_scale(shape, size))
        for shape, size in (((), None), ((1, 1), None), ((1,), [128, 256]))
    ),
    Case("float16 in and out", _dense((5,), 256, 256, dtype=_F16, output_dtype=None)),
    Case("float32 in and out", _dense((5,), 256, 256, dtype=_F32, output_dtype=None)),
    Case("float32 in, bfloat16 out", _dense((5,), 256, 256, dtype=_F32, output_dtype=_BF16)),
    Case("bfloat16 in, float16 out", _dense((5,), 256, 256, output_dtype=_F16)),
    Case("A strided", _dense((5,), 256, 256, change=_strided)),
    Case("per tensor, A strided", _dense((5,), 256, 256, _TENSOR, change=_strided)),
    Case("rows of zeros", _dense((5,), 256, 256, change=_zero_rows)),
    Case("MXFP8, rows of zeros", _dense((5,), 256, 256, _MXFP8, change=_zero_rows)),
    Case("NaN in a row", _dense((5,), 256, 256, change=_nan_in_a_row)),
    Case("per tensor, NaN in a row", _dense((5,), 256, 256, _TENSOR, change=_nan_in_a_row)),
    Case("MXFP8, NaN in a row", _dense((5,), 256, 256, _MXFP8, change=_nan_in_a_row)),
    Case("rows around the floor of scales", _dense((4,), 256, 256, dtype=_F32, change=_small_rows)),
    Case("activation_scale", _static(0.011)),
    Case("activation_scale, saturating", _static(0.011, scale=8.0)),
    Case("activation_scale, per tensor", _static(0.011, _TENSOR)),
)

_QUANT_CASES: Final = (
    *(Case(f"{rows} rows", _quant(rows, 256)) for rows in (0, 1, 127, 129)),
    Case("float16", _quant(5, 256, dtype=_F16)),
    Case("float32", _quant(5, 256, dtype=_F32)),
    Case("a vector", _quant(256)),
    Case("leading dimensions", _quant(2, 3, 256)),
    Case("no columns", _quant(5, 0)),
    Case("runs of 64", _quant(5, 192, block_size=64)),
    Case("runs of 1", _quant(5, 7, block_size=1)),
    Case("one run of 4096", _quant(3, 4096, block_size=4096)),
    Case("x strided", _quant(5, 256, change=_strided)),
    Case("rows of zeros", _quant(5, 256, change=_zero_rows)),
    Case("NaN in a row", _quant(5, 256, change=_nan_in_a_row)),
    Case("rows around the floor of scales", _quant(4, 256, dtype=_F32, change=_small_rows)),
)

_MIXED: Final = _Rows((3, 0, 5, 1), sentinels=4)
_ROUTED_FORMATS: Final = ("block", "block, UE8M0", "block 32 x 64", "per tensor", "MXFP8", "MXFP8, bytes", "MXFP4")


def _routed_cases(make: Callable[..., Callable[[Draw], Inputs]]) -> tuple[Case, ...]:
    """What both kinds of routing have to do."""
    return (
        *(Case(f"{name}, with sentinels", make(_MIXED, 256, 256, _MODES[name])) for name in _ROUTED_FORMATS),
        Case("no rows", make(_Rows((0, 0, 0, 0)), 256, 256)),
        Case("one row", make(_Rows((0, 1, 0, 0)), 256, 256)),
        Case("one expert has every row", make(_Rows((0, 0, 17, 0)), 256, 256)),
        Case("one expert there is", make(_Rows((5,)), 256, 256)),
        Case("no sentinels", make(_Rows((2, 3, 1, 4)), 256, 256)),
        Case("sentinels only", make(_Rows((0, 0, 0, 0), sentinels=5), 256, 256)),
        Case("per tensor, sentinels only", make(_Rows((0, 0, 0, 0), sentinels=5), 256, 256, _TENSOR)),
        Case("MXFP8, sentinels only", make(_Rows((0, 0, 0, 0), sentinels=5), 256, 256, _MXFP8)),
        *(
            Case(
                f"{rows} rows of the first expert",
                make(_Rows((rows, 1, 0, 2), sentinels=1), 256, 256, output_dtype=None),
            )
            for rows in (15, 16, 17, 127, 128, 129)
        ),
        Case("N, K one above the block", make(_MIXED, 129, 129)),
        Case("N, K no multiple of the block", make(_MIXED, 96, 160)),
        Case("MXFP4, K no multiple of 128", make(_MIXED, 96, 160, _MXFP4)),
        Case("float16 in and out", make(_MIXED, 256, 256, dtype=_F16, output_dtype=None)),
        Case("float32 in, bfloat16 out", make(_MIXED, 256, 256, dtype=_F32, output_dtype=_BF16)),
        Case("A strided", make(_MIXED, 256, 256, change=_strided)),
        Case("rows of zeros", make(_MIXED, 256, 256, change=_zero_rows)),
        Case("NaN in a row", make(_Rows((2, 3, 1, 4)), 256, 256, change=_nan_in_a_row)),
    )


_BATCHED_CASES: Final = (
    *_routed_cases(_batched),
    Case("sentinels far past the last expert", _batched(_MIXED, 256, 256, past=100_000)),
    Case("int32 ids", _batched(_MIXED, 256, 256, ids_dtype=torch.int32)),
)

_GROUPED_CASES: Final = (
    *_routed_cases(_grouped),
    Case("int64 offsets", _grouped(_MIXED, 256, 256, ids_dtype=torch.int64)),
)


# ----------------------------------------------------------------------------------------------------------- problems

_PROBLEM_MODES: Final = {"block": _BLOCK, "tensor": _TENSOR, "mxfp8": _MXFP8, "mxfp4": _MXFP4}


def _dense_problem(draw: Draw, *, m: int, n: int, k: int, mode: str = "block") -> Inputs:
    form = _PROBLEM_MODES[mode]
    return Inputs(draw.normal(m, k, dtype=_BF16), *_draw_weight(draw, form, n, k), _block_size(form))


def _quant_problem(draw: Draw, *, m: int, k: int) -> Inputs:
    return Inputs(draw.normal(m, k, dtype=_BF16))


def _evenly(rows: int, experts: int) -> _Rows:
    return _Rows(tuple(rows // experts + (expert < rows % experts) for expert in range(experts)))


def _routed_problem(
    draw: Draw, *, rows: int, experts: int, n: int, k: int, mode: str = "block", grouped: bool
) -> Inputs:
    form, split = _PROBLEM_MODES[mode], _evenly(rows, experts)
    a, weight = draw.normal(rows, k, dtype=_BF16), _draw_weight(draw, form, experts, n, k)
    if not grouped:
        return Inputs(a, *weight, draw.put(_sorted_ids(split))[draw.permutation(rows)], _block_size(form))
    tokens = draw.put(torch.tensor(split.tokens, dtype=torch.int32))
    return Inputs(a, *weight, tokens.cumsum(0, dtype=torch.int32), tokens, _block_size(form))


def _weight_bytes(n: int, k: int, mode: str) -> float:
    per_code = 0.5 if mode == "mxfp4" else 1.0
    per_scale = {"block": 4 / 128**2, "tensor": 0.0}.get(mode, 1 / _MX_GROUP)
    return n * k * (per_code + per_scale)


def _dense_work(*, m: int, n: int, k: int, mode: str = "block") -> Work:
    return Work(2.0 * m * n * k, 2.0 * m * (n + k) + _weight_bytes(n, k, mode), "fp8")


def _quant_work(*, m: int, k: int) -> Work:
    # A division and a comparison an element, far below what the bytes cost.
    return Work(2.0 * m * k, m * k * (2 + 1 + 4 / 128), "fp32")


def _routed_work(*, rows: int, experts: int, n: int, k: int, mode: str = "block") -> Work:
    weights = min(rows, experts) * _weight_bytes(n, k, mode)  # an expert without a row need not be read
    return Work(2.0 * rows * n * k, 2.0 * rows * (n + k) + weights, "fp8")


# DeepSeek-V3: hidden 7168, a dense MLP of 18432, experts of 2048 whose gate and up are one matrix.
_DENSE_SIZES: Final = (
    {"m": 1, "n": 4096, "k": 7168},
    {"m": 128, "n": 4096, "k": 7168},
    {"m": 4096, "n": 4096, "k": 7168},
    {"m": 4096, "n": 7168, "k": 2048},
    {"m": 4096, "n": 36864, "k": 7168},
    {"m": 4096, "n": 4096, "k": 7168, "mode": "tensor"},
    {"m": 4096, "n": 4096, "k": 7168, "mode": "mxfp8"},
    {"m": 4096, "n": 4096, "k": 7168, "mode": "mxfp4"},
)
# Experts of DeepSeek-V3 on one of 16 devices (16 of 256), and those of Qwen3-30B-A3B, all on one.
_BATCHED_SIZES: Final = (
    {"rows": 8, "experts": 16, "n": 4096, "k": 7168},
    {"rows": 64, "experts": 16, "n": 4096, "k": 7168},
    {"rows": 8, "experts": 128, "n": 1536, "k": 2048},
)
_GROUPED_SIZES: Final = (
    {"rows": 4096, "experts": 16, "n": 4096, "k": 7168},
    {"rows": 4096, "experts": 16, "n": 7168, "k": 2048},
    {"rows": 32768, "experts": 128, "n": 1536, "k": 2048},
)

# FP8 tensor cores of Hopper add within a block with 14 bits (DeepSeek-V3 technical report, 3.3.2), which is 1e-4 of the
# largest term; a row of sums is some times smaller than its largest terms.
_SUM: Final = Tolerance(row=2e-3)
# A float32 sum, where what cancels may leave a hundredth of its terms.
_GRADIENT_SUM: Final = Tolerance(row=1e-4)

FINEGRAINED_FP8_GRID: Final = (
    Entry(
        entrypoint="fp8_matmul",
        cases=_DENSE_CASES,
        formula=_fp8_matmul,
        gradients=(0,),
        tolerance=_SUM,
        gradient_tolerance=_GRADIENT_SUM,
        problem=_dense_problem,
        sizes=_DENSE_SIZES,
        work=_dense_work,
    ),
    Entry(
        entrypoint="fp8_act_quant",
        dtypes=(torch.float8_e4m3fn, _F32),
        cases=_QUANT_CASES,
        formula=_fp8_act_quant,
        # Scales within two units in the last place of float32; codes are a sixteenth apart at least, so exact.
        tolerance=Tolerance(each=2.0**-22),
        skip={"backward": "neither output is differentiable"},
        problem=_quant_problem,
        sizes=({"m": 1, "k": 7168}, {"m": 4096, "k": 7168}),
        work=_quant_work,
    ),
    Entry(
        entrypoint="batched_fp8_matmul",
        cases=_BATCHED_CASES,
        formula=_batched_fp8_matmul,
        gradients=(0,),
        tolerance=_SUM,
        gradient_tolerance=_GRADIENT_SUM,
        problem=partial(_routed_problem, grouped=False),
        sizes=_BATCHED_SIZES,
        work=_routed_work,
    ),
    Entry(
        entrypoint="grouped_fp8_matmul",
        cases=_GROUPED_CASES,
        formula=_grouped_fp8_matmul,
        gradients=(0,),
        tolerance=_SUM,
        gradient_tolerance=_GRADIENT_SUM,
        problem=partial(_routed_problem, grouped=True),
        sizes=_GROUPED_SIZES,
        work=_routed_work,
    ),
)
