"""What `deep_gemm` is held against: the formulas of kernel_loader/bundles/deep_gemm.py, dense and in float64.

Scales are powers of two, because Blackwell's kernels know no others, and so does no product of a case differ between
architectures. N is a multiple of 8 and K of 16, as published builds want them, save in the last cases of an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, Tolerance, Work

_BF16, _F32, _F64 = torch.bfloat16, torch.float32, torch.float64
_F8: Final = torch.float8_e4m3fn
_NAN: Final = float("nan")
_NAN_CODE: Final = 127
_BLOCK: Final = 128

Quantized = tuple[Tensor, Tensor]

# ------------------------------------------------------------------------------------------------------------ formula


def _e4m3_values(device: torch.device) -> Tensor:
    """The number of each of the 256 codes, from sign, exponent and mantissa. float64."""
    numbers = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, (code & 7) / 8
        magnitude = mantissa * 2.0**-6 if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - 7)
        numbers.append(_NAN if code & 127 == _NAN_CODE else -magnitude if code > 127 else magnitude)
    return torch.tensor(numbers, dtype=_F64, device=device)


def _real(codes: Tensor, scales: Tensor, block_n: int) -> Tensor:
    n, k = codes.shape[-2:]
    values = _e4m3_values(codes.device)[codes.view(torch.uint8).long()]
    wide = scales.to(_F64).repeat_interleave(block_n, -2)[..., :n, :].repeat_interleave(_BLOCK, -1)[..., :k]
    return values * wide


def _fp8_matmul(a: Quantized, b: Quantized, d: Tensor) -> tuple[None, Tensor]:  # noqa: ARG001 - only written to
    return None, _real(*a, 1) @ _real(*b, _BLOCK).mT


def _grouped_fp8_matmul(a: Quantized, b: Quantized, d: Tensor, grouped_layout: Tensor) -> tuple[None, Tensor]:
    right = torch.zeros(d.shape, dtype=_F64, device=d.device)
    left, weights = _real(*a, 1), _real(*b, _BLOCK)
    for group in range(weights.shape[0]):
        mine = grouped_layout == group
        right[mine] = left[mine] @ weights[group].mT
    return None, right


def _per_token_cast(x: Tensor, use_ue8m0: bool, gran_k: int = 128) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    count, k = -(-x.shape[-1] // gran_k), x.shape[-1]
    runs = functional.pad(x.to(_F64), (0, count * gran_k - k)).reshape(x.shape[0], count, gran_k)
    scale = runs.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    if use_ue8m0:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    steps = torch.ldexp(torch.ones_like(runs), (torch.frexp(runs / scale).exponent - 4).clamp(min=-9))
    codes = torch.round(runs / scale / steps) * steps
    return codes.reshape(x.shape[0], count * gran_k)[:, :k], scale.squeeze(-1)


# ------------------------------------------------------------------------------------------------------------- inputs


def _codes(draw: Draw, *shape: int) -> Tensor:
    """Codes of every exponent, both zeros included."""
    code = draw.integers(0, 254, *shape)
    return (code + (code >= _NAN_CODE)).to(torch.uint8).view(_F8)


def _scales(draw: Draw, *shape: int) -> Tensor:
    return torch.ldexp(draw.put(torch.ones(shape)), draw.integers(-9, -2, *shape))


def _a(draw: Draw, m: int, k: int) -> Quantized:
    return _codes(draw, m, k), _scales(draw, m, -(-k // _BLOCK))


def _b(draw: Draw, *shape: int) -> Quantized:
    *stack, n, k = shape
    return _codes(draw, *shape), _scales(draw, *stack, -(-n // _BLOCK), -(-k // _BLOCK))


def _unwritten(draw: Draw, m: int, n: int) -> Tensor:
    return draw.put(torch.full((m, n), _NAN, dtype=_BF16))


def _dense(m: int, n: int, k: int, *, nan_row: int | None = None) -> Callable[[Draw], Inputs]:
    def make(draw: Draw) -> Inputs:
        a = _a(draw, m, k)
        if nan_row is not None:
            a[0].view(torch.uint8)[nan_row, k // 2] = _NAN_CODE
        return Inputs(a, _b(draw, n, k), _unwritten(draw, m, n))

    return make


def _into_a_part(draw: Draw) -> Inputs:
    """D is every second row, and the first columns, of something larger."""
    whole = _unwritten(draw, 10, 256)
    return Inputs(_a(draw, 5, 256), _b(draw, 128, 256), whole[::2, :128])


def _fine_scales(draw: Draw) -> Inputs:
    """Scales of weights as training leaves them, which are no powers of two; Hopper's kernels take these alone."""
    a, b = _a(draw, 5, 256), _b(draw, 128, 256)
    a = (a[0], draw.uniform(5, 2, low=1e-3, high=2e-2))
    b = (b[0], draw.uniform(1, 2, low=1e-3, high=2e-2))
    return Inputs(a, b, _unwritten(draw, 5, 128))


class _Rows(NamedTuple):
    """Rows of a block: so many of a group, then padding up to 128 (or up to `total`)."""

    group: int
    rows: int
    total: int = _BLOCK


def _layout(*blocks: _Rows) -> Tensor:
    return torch.tensor([block.group if row < block.rows else -1 for block in blocks for row in range(block.total)])


def _grouped(*blocks: _Rows, n: int = 128, k: int = 256, groups: int = 3) -> Callable[[Draw], Inputs]:
    """What stands in padding, and in d, is NaN."""

    def make(draw: Draw) -> Inputs:
        layout = draw.put(_layout(*blocks).to(torch.int32))
        m = len(layout)
        codes, scales = _a(draw, m, k)
        codes.view(torch.uint8)[layout < 0] = _NAN_CODE
        scales = scales.masked_fill((layout < 0)[:, None], _NAN)
        return Inputs((codes, scales), _b(draw, groups, n, k), _unwritten(draw, m, n), layout)

    return make


def _cast(
    m: int,
    k: int,
    *,
    ue8m0: bool = False,
    gran_k: int = 128,
    dtype: torch.dtype = _F32,
    strided: bool = False,
    zeros: bool = False,
) -> Callable[[Draw], Inputs]:
    """Elements that are a code times a power of two, a little off: so that a last digit makes no difference to codes.

    Each run has 448 in it, so that the power is its scale whatever the rounding.
    """

    def make(draw: Draw) -> Inputs:
        code = draw.integers(8, 126, m, k)  # normal numbers, whose neighbours are an eighth to a sixteenth away
        code[:, ::gran_k] = 126
        sign = draw.integers(0, 2, m, k) * 2 - 1
        values = (code.to(torch.uint8).view(_F8).to(_F32) * sign).to(dtype)
        if dtype == _F32:
            off = draw.uniform(m, k, low=-0.02, high=0.02)
            off[:, ::gran_k] = 0
            values *= 1 + off
        powers = torch.ldexp(draw.put(torch.ones(m, -(-k // gran_k))), draw.integers(-7, 3, m, -(-k // gran_k)))
        x = values * powers.repeat_interleave(gran_k, -1)[:, :k].to(dtype)
        if zeros:
            x[::2] = 0.0
        return Inputs(draw.strided(x) if strided else x, ue8m0, gran_k)

    return make


# -------------------------------------------------------------------------------------------------------------- cases

_DENSE_CASES: Final = (
    *(Case(f"{m} rows", _dense(m, 128, 256)) for m in (0, 1, 2, 63, 64, 65, 127, 128, 129, 200)),
    *(Case(f"N = {n}", _dense(5, n, 256)) for n in (0, 8, 120, 136, 264)),
    *(Case(f"K = {k}", _dense(5, 128, k)) for k in (0, 16, 112, 144, 512)),
    Case("all around the block", _dense(129, 136, 144)),
    Case("NaN in a row", _dense(5, 128, 256, nan_row=1)),
    Case("d is a part of something", _into_a_part),
    Case("scales that are no powers of two", _fine_scales),
    Case("sizes of one", _dense(1, 1, 1)),
    Case("odd sizes", _dense(3, 131, 203)),
)

_GROUPED_CASES: Final = (
    Case("no rows", _grouped()),
    Case("padding alone", _grouped(_Rows(0, 0))),
    Case("one row", _grouped(_Rows(1, 1))),
    Case("full blocks", _grouped(_Rows(0, 128), _Rows(2, 128))),
    *(Case(f"{rows} rows of a block", _grouped(_Rows(2, rows), _Rows(1, 3))) for rows in (63, 64, 65, 127)),
    Case("a group of two blocks", _grouped(_Rows(1, 128), _Rows(1, 5), _Rows(2, 9))),
    Case("groups in any order", _grouped(_Rows(2, 5), _Rows(0, 70), _Rows(1, 1))),
    Case("padding between groups", _grouped(_Rows(0, 5), _Rows(0, 0), _Rows(2, 128))),
    Case("padding in front and behind", _grouped(_Rows(0, 0), _Rows(1, 66), _Rows(0, 0), _Rows(0, 0))),
    Case("one group there is", _grouped(_Rows(0, 128), groups=1)),
    Case("N = 8", _grouped(_Rows(1, 66), n=8)),
    Case("N = 136", _grouped(_Rows(1, 66), _Rows(2, 1), n=136)),
    Case("K = 16", _grouped(_Rows(1, 66), k=16)),
    Case("K = 144", _grouped(_Rows(1, 66), _Rows(0, 2), k=144)),
    Case("a short last block", _grouped(_Rows(0, 100), _Rows(2, 7, total=7))),
    Case("a short last block of padding", _grouped(_Rows(0, 128), _Rows(0, 0, total=9))),
    Case("odd sizes", _grouped(_Rows(0, 100), n=131, k=203)),
)

_CAST_CASES: Final = (
    *(Case(f"{m} rows", _cast(m, 256)) for m in (0, 1, 127, 129)),
    *(Case(f"K = {k}", _cast(5, k)) for k in (1, 127, 129, 1000)),
    Case("powers of two", _cast(5, 384, ue8m0=True)),
    Case("powers of two, runs of 32", _cast(5, 96, ue8m0=True, gran_k=32)),
    Case("bfloat16", _cast(5, 256, dtype=_BF16)),
    Case("float16", _cast(5, 256, dtype=torch.float16)),
    Case("bfloat16, powers of two", _cast(5, 256, dtype=_BF16, ue8m0=True)),
    Case("strided", _cast(5, 256, strided=True)),
    Case("rows of zeros", _cast(5, 256, zeros=True)),
    Case("rows of zeros, powers of two", _cast(5, 256, zeros=True, ue8m0=True)),
)


# ----------------------------------------------------------------------------------------------------------- problems


def _dense_problem(draw: Draw, *, m: int, n: int, k: int) -> Inputs:
    return _dense(m, n, k)(draw)


def _grouped_problem(draw: Draw, *, rows: int, groups: int, n: int, k: int) -> Inputs:
    """So many full blocks, spread evenly over the groups."""
    blocks = rows // _BLOCK
    return _grouped(*(_Rows(block * groups // blocks, _BLOCK) for block in range(blocks)), n=n, k=k, groups=groups)(
        draw
    )


def _cast_problem(draw: Draw, *, m: int, k: int) -> Inputs:
    return Inputs(draw.normal(m, k, dtype=_BF16), False, 128)  # noqa: FBT003 - as published


def _bytes(m: int, n: int, k: int, weights: int) -> float:
    return m * k * (1 + 4 / _BLOCK) + weights * n * k * (1 + 4 / _BLOCK**2) + 2.0 * m * n


def _dense_work(*, m: int, n: int, k: int) -> Work:
    return Work(2.0 * m * n * k, _bytes(m, n, k, 1), "fp8")


def _grouped_work(*, rows: int, groups: int, n: int, k: int) -> Work:
    return Work(2.0 * rows * n * k, _bytes(rows, n, k, min(groups, rows // _BLOCK)), "fp8")


def _cast_work(*, m: int, k: int) -> Work:
    return Work(2.0 * m * k, m * k * (2 + 1 + 4 / _BLOCK), "fp32")


# DeepSeek-V3: hidden 7168, experts of 2048 whose gate and up are one matrix, 16 of 256 on a device.
_DENSE_SIZES: Final = tuple({"m": m, "n": n, "k": k} for m in (1, 128, 4096) for n, k in ((4096, 7168), (7168, 2048)))
_GROUPED_SIZES: Final = tuple(
    {"rows": rows, "groups": 16, "n": n, "k": k} for rows in (2048, 8192) for n, k in ((4096, 7168), (7168, 2048))
)

# FP8 tensor cores of Hopper add within a block with 14 bits (DeepSeek-V3 technical report, 3.3.2).
_SUM: Final = Tolerance(row=2e-3)
_FROZEN: Final[Mapping[Mode, str]] = {"backward": "nothing is differentiable"}

DEEP_GEMM_GRID: Final = (
    Entry(
        entrypoint="fp8_matmul",
        cases=_DENSE_CASES,
        formula=_fp8_matmul,
        mutates=(2,),
        tolerance=_SUM,
        skip=_FROZEN,
        problem=_dense_problem,
        sizes=_DENSE_SIZES,
        work=_dense_work,
    ),
    Entry(
        entrypoint="grouped_fp8_matmul",
        cases=_GROUPED_CASES,
        formula=_grouped_fp8_matmul,
        mutates=(2,),
        tolerance=_SUM,
        skip=_FROZEN,
        problem=_grouped_problem,
        sizes=_GROUPED_SIZES,
        work=_grouped_work,
    ),
    Entry(
        entrypoint="per_token_cast_to_fp8",
        dtypes=(torch.float8_e4m3fn, torch.float32),
        cases=_CAST_CASES,
        formula=_per_token_cast,
        # Scales within two units in the last place of float32; codes are a sixteenth apart at least, so exact.
        tolerance=Tolerance(each=2.0**-22),
        skip=_FROZEN,
        problem=_cast_problem,
        sizes=({"m": 1, "k": 7168}, {"m": 4096, "k": 7168}),
        work=_cast_work,
    ),
)
