"""What `nvfp4_gemm` is held against: the formulas of kernel_loader/bundles/nvfp4.py, dense and in float64.

Inputs are products of codes and scales, a little off where they are to be rounded, so that no element lies near a tie,
and neither do scales: a build that takes a reciprocal for a division gets the same codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_U8: Final = torch.uint8
_GROUP: Final = 16
_FEW_ROWS: Final = 2

# ------------------------------------------------------------------------------------------------------------ formula


def _numbers(exponent_bits: int, mantissa_bits: int, device: torch.device) -> Tensor:
    """The numbers of a small format by their codes, without sign. float64."""
    bias = 2 ** (exponent_bits - 1) - 1
    numbers = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code % 2**mantissa_bits / 2**mantissa_bits
        numbers.append(mantissa * 2.0 ** (1 - bias) if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - bias))
    return torch.tensor(numbers, dtype=_F64, device=device)


def _e2m1(device: torch.device) -> Tensor:
    return _numbers(2, 1, device)


def _e4m3(device: torch.device) -> Tensor:
    return _numbers(4, 3, device)[:-1]  # the last code is NaN


def _nearest(values: Tensor, numbers: Tensor) -> Tensor:
    """The nearest number, of either sign; beyond the last the last."""
    above = torch.searchsorted(numbers, values.abs().contiguous()).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    found: Tensor = torch.where(values.abs() - low > high - values.abs(), high, low).copysign(values)
    return found


def _quantised(x: Tensor, amax: Tensor | None = None) -> Tensor:
    """What (rows, K) becomes, float64; `amax` is that of the tensor before it was rounded."""
    wide = x.to(_F64)
    if not x.numel():
        return wide
    whole = 2688 / (wide.abs().max() if amax is None else amax.to(_F64)).clamp(min=1e-12)
    groups = wide.reshape(x.shape[0], -1, _GROUP)
    scale = _nearest(groups.abs().amax(-1, keepdim=True) / 6 * whole, _e4m3(x.device))
    codes = _nearest(groups * whole / scale, _e2m1(x.device))
    return torch.where(scale == 0, 0.0, codes * scale / whole).reshape(x.shape)


def _unpacked(qweight: Tensor, scales: Tensor) -> Tensor:
    """Codes times the scales of their groups, (n, k) float64; scales are (n, k / 16), by their bits."""
    code = torch.stack((qweight & 15, qweight >> 4), dim=-1).flatten(-2).long()
    numbers = _e2m1(qweight.device)
    values = torch.cat((numbers, -numbers))[code]
    return values * _e4m3(qweight.device)[scales.long()].repeat_interleave(_GROUP, -1)


def _place_of_scale(rows: int, groups: int, device: torch.device) -> Tensor:
    """Which byte of the swizzled scales is that of each row and group, (rows, groups)."""
    r, g = torch.arange(rows, device=device)[:, None], torch.arange(groups, device=device)
    tile = r // 128 * -(-groups // 4) + g // 4
    return 512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + g % 4


def _weight(pw: SimpleNamespace) -> Tensor:
    octets = pw.sf.contiguous().view(_U8).flatten()
    scales = octets[_place_of_scale(pw.n, pw.k // _GROUP, pw.sf.device)]
    weight: Tensor = _unpacked(pw.qweight, scales) / pw.global_scale.to(_F64)
    return weight


def _gemm(pw: SimpleNamespace, x: Tensor) -> Tensor:
    rows = x.reshape(-1, pw.k)
    rounded = rows.to(_BF16).to(_F64)
    if rows.shape[0] > _FEW_ROWS or pw.sf_rowmajor is None:
        rounded = _quantised(rounded, rows.abs().max() if rows.numel() else None)
    made: Tensor = rounded @ _weight(pw).T
    return made.reshape(*x.shape[:-1], pw.n)


def _gemm_swiglu(pw: SimpleNamespace, x: Tensor) -> Tensor:
    gates, up = _gemm(pw, x).chunk(2, dim=-1)
    return functional.silu(gates) * up


def _linear(module: SimpleNamespace, x: Tensor) -> Tensor:
    weight = SimpleNamespace(
        qweight=module.weight,
        sf=module.weight_sf,
        global_scale=module.weight_global_scale,
        n=module.out_features,
        k=module.in_features,
        sf_rowmajor=getattr(module, "weight_sf_rowmajor", None),
    )
    return _gemm(weight, x)


def _mlp(module: SimpleNamespace, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).to(_BF16).to(_F64)
    weight = _unpacked(module.nvfp4_fused_qweight, module.nvfp4_fused_sf) * module.nvfp4_fused_alpha.to(_F64)[:, None]
    gates, up = (rows @ weight.T).chunk(2, dim=-1)
    opened: Tensor = functional.silu(gates) * up
    return opened.reshape(*x.shape[:-1], weight.shape[0] // 2)


def _pack(w: Tensor) -> tuple[Tensor, Tensor]:
    made = _quantised(w.to(_BF16).to(_F64))
    return made, made


def _pack_swiglu(w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor]:
    return _pack(torch.cat((w_gate, w_up)))


def _both(found: Any) -> tuple[Tensor, ...]:  # noqa: ANN401 - an object of a build, or what the formula makes
    """What a packed weight stands for, by both of its scales."""
    if isinstance(found, tuple):
        return found
    return _weight(found), _unpacked(found.qweight, found.sf_rowmajor) / found.global_scale.to(_F64)


def _quantize_reference(w: Tensor) -> Tensor:
    return _quantised(w)


def _global_scale(w: Tensor) -> Tensor:
    return (2688 / w.to(_F64).abs().max().clamp(min=1e-12)).reshape(1)


# ------------------------------------------------------------------------------------------------------------- inputs


def _parts(draw: Draw, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Packed codes and the bits of scales, (n, k / 2) and (n, k / 16) uint8.

    Each group has 6 or -6 in it, and the first one of all the scale 448, which makes global scales round.
    """
    codes = draw.integers(0, 16, n, k, dtype=_U8)
    codes[:, ::_GROUP] |= 7
    scales = draw.integers(88, 120, n, k // _GROUP, dtype=_U8)  # 16 to 240
    scales.view(-1)[:1] = 126
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def _exact(draw: Draw, n: int, k: int, power: int) -> Tensor:
    """Numbers that NVFP4 holds, and bfloat16 too, largest 2688 * 2 ** power. float64."""
    codes, scales = _parts(draw, n, k)
    return _unpacked(codes, scales) * 2.0**power


def _nearly(draw: Draw, n: int, k: int, power: int = -14) -> Tensor:
    """The same, all but the first of each group less by up to a twelfth: none is near a tie, or a new largest."""
    x = _exact(draw, n, k, power)
    off = 1 + draw.uniform(n, k, low=-1 / 12, high=0.0).to(_F64)
    off[:, ::_GROUP] = 1
    return x * off


def _packed(draw: Draw, n: int, k: int, *, rowmajor: bool = True, swiglu: bool = False) -> SimpleNamespace:
    codes, scales = _parts(draw, n, k)
    shape = (-(-n // 128) * 128, -(-k // 64))
    octets = draw.put(torch.zeros(shape[0] * shape[1] * 4, dtype=_U8))
    octets[_place_of_scale(n, k // _GROUP, octets.device)] = scales
    return SimpleNamespace(
        qweight=codes,
        sf=octets.view(torch.int32).reshape(shape),
        global_scale=draw.put(torch.tensor([2.0**14])),
        n=n,
        k=k,
        swiglu=swiglu,
        sf_rowmajor=scales if rowmajor else None,
    )


Change = Callable[[Draw, Tensor], Tensor]


def _multiply(
    *shape: int,
    n: int = 128,
    k: int = 256,
    dtype: torch.dtype = _BF16,
    rowmajor: bool = True,
    swiglu: bool = False,
    exact: bool = False,
    change: Change | None = None,
) -> Callable[[Draw], Inputs]:
    """A weight, and activations of this shape before K."""

    def make(draw: Draw) -> Inputs:
        rows = torch.Size(shape).numel()
        x = _exact(draw, rows, k, -10) if exact else _nearly(draw, rows, k, -10)
        x = x.to(dtype).reshape(*shape, k)
        return Inputs(
            _packed(draw, n, k, rowmajor=rowmajor, swiglu=swiglu), change(draw, x) if change is not None else x
        )

    return make


def _strided(draw: Draw, x: Tensor) -> Tensor:
    return draw.strided(x)


def _zeros(_: Draw, x: Tensor) -> Tensor:
    return x * 0


def _a_row_of_zeros(_: Draw, x: Tensor) -> Tensor:
    x[-1] = 0
    return x


def _linear_module(rows: int, *, rowmajor: bool = True) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        pw, x = _multiply(rows, rowmajor=rowmajor)(draw).args
        module = SimpleNamespace(
            weight=pw.qweight,
            weight_sf=pw.sf,
            weight_global_scale=pw.global_scale,
            out_features=pw.n,
            in_features=pw.k,
        )
        if rowmajor:
            module.weight_sf_rowmajor = pw.sf_rowmajor
        return Inputs(module, x)

    return make


def _itself(x: Tensor) -> Tensor:
    return x


def _mlp_module(*shape: int, n: int = 256, k: int = 256) -> Callable[[Draw], Inputs]:
    """Few rows, which go through the fused weight; what comes after it is left out."""

    def make(draw: Draw) -> Inputs:
        codes, scales = _parts(draw, n, k)
        alpha = torch.where(draw.put(torch.arange(n)) < n // 2, 2.0**-14, 2.0**-13)
        module = SimpleNamespace(
            nvfp4_fused_qweight=codes, nvfp4_fused_sf=scales, nvfp4_fused_alpha=alpha, down_proj=_itself
        )
        return Inputs(module, draw.normal(*shape, k, dtype=_BF16))

    return make


def _to_pack(n: int, k: int, *, dtype: torch.dtype = _BF16, change: Change | None = None) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        w = _nearly(draw, n, k).to(dtype)
        return Inputs(change(draw, w) if change is not None else w)

    return make


def _two_to_pack(n: int, k: int) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        # The largest of all is in either; the other one shares its scale.
        return Inputs(_nearly(draw, n, k).to(_BF16), _nearly(draw, n, k).to(_BF16))

    return make


# -------------------------------------------------------------------------------------------------------------- cases

_GEMM_CASES: Final = (
    *(Case(f"{rows} rows", _multiply(rows)) for rows in (0, 1, 2, 3, 127, 128, 129)),
    *(Case(f"{rows} rows, no scales row by row", _multiply(rows, rowmajor=False)) for rows in (1, 2, 3)),
    *(Case(f"N = {n}", _multiply(5, n=n)) for n in (32, 96, 160, 288)),
    *(Case(f"K = {k}", _multiply(5, k=k)) for k in (32, 64, 96, 160, 512)),
    *(Case(f"2 rows, K = {k}", _multiply(2, k=k)) for k in (32, 96, 160)),
    *(Case(f"2 rows, N = {n}", _multiply(2, n=n)) for n in (32, 160)),
    Case("a vector", _multiply()),
    Case("leading dimensions", _multiply(2, 3)),
    Case("an empty leading dimension", _multiply(2, 0, 3)),
    Case("what NVFP4 holds exactly", _multiply(5, exact=True)),
    Case("float16", _multiply(5, dtype=_F16)),
    Case("float32", _multiply(5, dtype=_F32)),
    Case("x strided", _multiply(5, change=_strided)),
    Case("zeros", _multiply(5, change=_zeros)),
    Case("a row of zeros", _multiply(5, change=_a_row_of_zeros)),
    # What published builds refuse.
    Case("N = 16", _multiply(5, n=16)),
    Case("K = 16", _multiply(5, k=16)),
    Case("N and K odd multiples of 16", _multiply(5, n=48, k=80)),
    Case("N no multiple of anything", _multiply(5, n=131)),
)

_SWIGLU_CASES: Final = (
    *(Case(f"{rows} rows", _multiply(rows, swiglu=True)) for rows in (0, 1, 2, 3, 129)),
    Case("leading dimensions", _multiply(2, 3, swiglu=True)),
    Case("N = 64", _multiply(5, n=64, swiglu=True)),
    Case("float32", _multiply(5, swiglu=True, dtype=_F32)),
)

_PACK_CASES: Final = (
    *(Case(f"N = {n}", _to_pack(n, 64)) for n in (1, 16, 32, 127, 128, 129, 260)),
    *(Case(f"K = {k}", _to_pack(32, k)) for k in (16, 32, 48, 64, 80, 512)),
    Case("float16", _to_pack(32, 64, dtype=_F16)),
    Case("float32", _to_pack(32, 64, dtype=_F32)),
    Case("strided", _to_pack(32, 64, change=_strided)),
    Case("a row of zeros", _to_pack(32, 64, change=_a_row_of_zeros)),
    Case("zeros", _to_pack(32, 64, change=_zeros)),
)

_QUANTIZE_CASES: Final = (
    *(Case(f"N = {n}", _to_pack(n, 64)) for n in (1, 31, 129)),
    *(Case(f"K = {k}", _to_pack(9, k)) for k in (16, 48, 512)),
    Case("float16", _to_pack(9, 64, dtype=_F16)),
    Case("float32", _to_pack(9, 64, dtype=_F32)),
    Case("a row of zeros", _to_pack(9, 64, change=_a_row_of_zeros)),
    Case("zeros", _to_pack(9, 64, change=_zeros)),
)


# ----------------------------------------------------------------------------------------------------------- problems


def _gemm_problem(draw: Draw, *, m: int, n: int, k: int) -> Inputs:
    return _multiply(m, n=n, k=k)(draw)


def _gemm_work(*, m: int, n: int, k: int) -> Work:
    return Work(2.0 * m * n * k, 2.0 * m * (n + k) + n * k * (0.5 + 1 / _GROUP), "fp8")


def _pack_problem(draw: Draw, *, n: int, k: int) -> Inputs:
    return Inputs(draw.normal(n, k, dtype=_BF16))


def _pack_work(*, n: int, k: int) -> Work:
    return Work(4.0 * n * k, n * k * (2 + 0.5 + 2 / _GROUP), "fp32")


# Llama 3.1 70B: hidden 8192, intermediate 28672.
_GEMM_SIZES: Final = tuple({"m": m, "n": 28672, "k": 8192} for m in (1, 128, 4096))

# A float32 sum that cancels, and a rounding to bfloat16, or two for the activation.
_SUM: Final = Tolerance(row=1e-3)
# Scales are float32, and what is made of them is off by a few units in the last place; codes are further apart.
_CODES: Final = Tolerance(each=2.0**-20, least=1e-30)
_FROZEN: Final[Mapping[Mode, str]] = {"backward": "nothing is differentiable"}
_AT_LOAD: Final[Mapping[Mode, str]] = {
    "backward": "nothing is differentiable",
    "compile": "weights are packed once, when a model is loaded",
    "graph": "weights are packed once, when a model is loaded",
}

NVFP4_GEMM_GRID: Final = (
    Entry(
        entrypoint="gemm",
        dtypes=(torch.bfloat16,),
        cases=_GEMM_CASES,
        formula=_gemm,
        tolerance=_SUM,
        skip=_FROZEN,
        problem=_gemm_problem,
        sizes=_GEMM_SIZES,
        work=_gemm_work,
    ),
    Entry(
        entrypoint="gemm_swiglu",
        dtypes=(torch.bfloat16,),
        cases=_SWIGLU_CASES,
        formula=_gemm_swiglu,
        tolerance=Tolerance(row=1e-2),
        skip=_FROZEN,
    ),
    Entry(
        entrypoint="pack",
        cases=_PACK_CASES,
        formula=_pack,
        canonical=_both,
        tolerance=_CODES,
        skip=_AT_LOAD,
        problem=_pack_problem,
        sizes=({"n": 28672, "k": 8192},),
        work=_pack_work,
    ),
    Entry(
        entrypoint="pack_swiglu",
        cases=tuple(Case(f"N = {n}", _two_to_pack(n, 64)) for n in (1, 16, 64, 129)),
        formula=_pack_swiglu,
        canonical=_both,
        tolerance=_CODES,
        skip=_AT_LOAD,
    ),
    Entry(
        entrypoint="quantize_reference",
        cases=_QUANTIZE_CASES,
        formula=_quantize_reference,
        tolerance=Tolerance(each=None, least=1e-20),
        skip=_AT_LOAD,
    ),
    Entry(
        entrypoint="global_scale_for",
        dtypes=(torch.float32,),
        cases=(
            Case("a matrix", _to_pack(9, 64)),
            Case("float32", _to_pack(9, 64, dtype=_F32)),
            Case("zeros", _to_pack(9, 64, change=_zeros)),
        ),
        formula=_global_scale,
        skip=_AT_LOAD,
    ),
    Entry(
        entrypoint="layers.NVFP4Linear",
        cases=(
            *(Case(f"{rows} rows", _linear_module(rows)) for rows in (1, 2, 3, 129)),
            *(Case(f"{rows} rows, no scales row by row", _linear_module(rows, rowmajor=False)) for rows in (1, 3)),
        ),
        formula=_linear,
        tolerance=_SUM,
        skip=_FROZEN,
    ),
    Entry(
        entrypoint="layers.NVFP4FusedSwiGLUMLP",
        cases=(
            Case("one row", _mlp_module(1)),
            Case("two rows", _mlp_module(2)),
            Case("a vector", _mlp_module()),
            Case("leading dimensions", _mlp_module(1, 2)),
            Case("N = 64, K = 96", _mlp_module(2, n=64, k=96)),
        ),
        formula=_mlp,
        tolerance=Tolerance(row=1e-2),
        skip=_FROZEN,
    ),
)
