"""Quantisers against tables of their codes, built here from bit fields in float64, and rounding by search in these."""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kernel_loader import quantization as q

F64, F32, BF16, F16, F8, U8 = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.uint8,
)
NAN, INF = math.nan, math.inf


# ------------------------------------------------------------------------------------------- the formats, again


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a code of 1 + exponent_bits + mantissa_bits bits, all of them finite."""
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa = code % 2**mantissa_bits
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    fraction = mantissa / 2**mantissa_bits
    magnitude = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
    return -magnitude if code >> (exponent_bits + mantissa_bits) else magnitude


E4M3 = [NAN if code & 127 == 127 else minifloat(code, 4, 3) for code in range(256)]
E2M1 = [minifloat(code, 2, 1) for code in range(16)]
E8M0 = [NAN if code == 255 else 2.0 ** (code - 127) for code in range(256)]


def nearest(value: float, table: Sequence[float], sign: int) -> int:
    """The code of the nearest number, ties to the even code; `sign` is the bit of the sign."""
    if math.isnan(value):
        return 0 if sign == 8 else 127
    finite = [number for number in table[:sign] if not math.isnan(number)]
    magnitude = min(abs(value), max(finite))
    code = min(range(len(finite)), key=lambda c: (abs(finite[c] - magnitude), c % 2))
    return code | (sign if math.copysign(1, value) < 0 else 0)


def around(numbers: Sequence[float]) -> list[float]:
    """The numbers, the points halfway between neighbours, and what float32 has on both sides of all these."""
    points = [*numbers, *(low + (high - low) / 2 for low, high in itertools.pairwise(numbers))]
    exact = torch.tensor(points, dtype=F32)
    sides = [torch.nextafter(exact, torch.tensor(to)) for to in (-INF, INF)]
    return [sign * value for part in (exact, *sides) for value in part.tolist() for sign in (1.0, -1.0)]


SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 2.0**-149, 3e38, -3e38, INF, -INF, NAN]


def same(got: Tensor, want: Tensor) -> bool:
    """Bit for bit, whatever the NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if not got.dtype.is_floating_point:
        return torch.equal(got, want)
    got, want = got.to(F32), want.to(F32)
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(
        got.nan_to_num().view(torch.int32), want.nan_to_num().view(torch.int32)
    )


# -------------------------------------------------------------------------------------------------------- codes


def test_every_e4m3_code_has_its_value_and_comes_back() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(U8)
    values = q.decode_e4m3(codes)
    assert same(values, torch.tensor(E4M3, dtype=F32))
    assert same(q.decode_e4m3(codes.view(F8)), values)
    finite = ~values.isnan()
    assert torch.equal(q.encode_e4m3(values).view(U8)[finite], codes[finite])
    assert q.encode_e4m3(values)[~finite].to(F32).isnan().all()


def test_every_e2m1_code_has_its_value_and_comes_back() -> None:
    codes = torch.arange(16).to(U8)
    assert same(q.decode_e2m1(codes), torch.tensor(E2M1, dtype=F32))
    assert torch.equal(q.encode_e2m1(q.decode_e2m1(codes)), codes)
    assert same(q.decode_e2m1(codes | 0xF0), q.decode_e2m1(codes))


def test_every_e8m0_code_has_its_value_and_comes_back() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(U8)
    values = q.decode_e8m0(codes)
    assert same(values, torch.tensor(E8M0, dtype=F64).to(F32))
    assert torch.equal(q.encode_e8m0(values, "up"), codes)
    assert torch.equal(q.encode_e8m0(values, "down"), codes)
    if hasattr(torch, "float8_e8m0fnu"):
        assert same(q.decode_e8m0(codes.view(torch.float8_e8m0fnu)), values)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_e4m3_is_the_nearest_code_with_ties_to_even_and_saturates(dtype: torch.dtype) -> None:
    x = torch.tensor([*around(E4M3[:127]), *SPECIAL, 464.0, 480.0, -1e4]).to(dtype)
    want = [nearest(value, E4M3, 128) for value in x.tolist()]
    got = q.encode_e4m3(x).view(U8).tolist()
    assert [code & 127 if math.isnan(v) else code for code, v in zip(got, x.tolist(), strict=True)] == want


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_e2m1_is_the_nearest_code_with_ties_to_even_and_saturates(dtype: torch.dtype) -> None:
    x = torch.tensor([*around(E2M1[:8]), *SPECIAL, 7.0, 8.0, -1e4]).to(dtype)
    assert q.encode_e2m1(x).tolist() == [nearest(value, E2M1, 8) for value in x.tolist()]


def test_e8m0_rounds_up_or_down_to_a_power_of_two() -> None:
    scales = torch.tensor([1.0, 1.5, 0.75, 3.0, 2.0**127, 3e38, 2.0**-127, 2.0**-126 * 0.75, 2.0**-149, 0.0])
    assert q.encode_e8m0(scales, "down").tolist() == [127, 127, 126, 128, 254, 254, 0, 0, 0, 0]
    assert q.encode_e8m0(scales, "up").tolist() == [127, 128, 127, 129, 254, 254, 0, 1, 0, 0]
    assert q.encode_e8m0(torch.tensor([NAN, INF])).tolist() == [255, 255]


def test_the_first_code_of_a_byte_is_in_its_low_bits() -> None:
    assert q.pack_e2m1(torch.tensor([[1, 2, 15, 0]], dtype=U8)).tolist() == [[0x21, 0x0F]]
    packed = torch.arange(256, dtype=torch.int32).to(U8).view(2, 128)
    assert torch.equal(q.pack_e2m1(q.unpack_e2m1(packed)), packed)
    assert torch.equal(q.unpack_e2m1(packed.view(torch.int8)), q.unpack_e2m1(packed))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: q.encode_e4m3(torch.ones(2, dtype=torch.int32)), TypeError, "^x: .*floating-point.*int32"),
        (lambda: q.encode_e2m1(torch.ones(2, dtype=U8)), TypeError, "^x: .*uint8"),
        (lambda: q.encode_e8m0(torch.ones(2, dtype=U8)), TypeError, "^scales: .*uint8"),
        (lambda: q.encode_e8m0(torch.ones(2), "nearest"), ValueError, '^rounding: .*"down" or "up".*nearest'),
        (lambda: q.decode_e4m3(torch.ones(2)), TypeError, "^codes: .*float8_e4m3fn or uint8.*float32"),
        (lambda: q.decode_e2m1(torch.ones(2)), TypeError, "^codes: expected uint8"),
        (lambda: q.decode_e8m0(torch.ones(2)), TypeError, "^codes: .*uint8"),
        (lambda: q.pack_e2m1(torch.zeros(3, dtype=U8)), ValueError, r"^codes: .*even.*\(3,\)"),
        (lambda: q.pack_e2m1(torch.zeros(4)), TypeError, "^codes: .*float32"),
        (lambda: q.unpack_e2m1(torch.zeros(4)), TypeError, "^packed: .*float32"),
        (lambda: q.unpack_e2m1(torch.zeros((), dtype=U8)), ValueError, r"^packed: .*\(\)"),
    ],
)
def test_codes_refuse(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


# --------------------------------------------------------------------------------- what a format holds, it keeps


def bits(codes: Tensor) -> Tensor:
    return codes.view(U8)


def narrow(data: st.DataObject, significant: int, low: int, high: int) -> float:
    """A float32 of few significant bits."""
    mantissa = data.draw(st.integers(2 ** (significant - 1), 2**significant - 1))
    return mantissa * 2.0 ** (data.draw(st.integers(low, high)) - significant + 1)


def random_codes(data: st.DataObject, table: Sequence[float], *shape: int) -> Tensor:
    """Finite codes of any value, uint8."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    finite = torch.tensor([code for code, value in enumerate(table) if not math.isnan(value)], dtype=U8)
    return finite[torch.randint(len(finite), shape, generator=generator)]


def put_a_large_one(data: st.DataObject, codes: Tensor, largest: Sequence[int], sign: int) -> None:
    """Make one element of a run one of the largest codes, of either sign."""
    where = data.draw(st.integers(0, codes.numel() - 1))
    codes.view(-1)[where] = data.draw(st.sampled_from(largest)) | data.draw(st.sampled_from([0, sign]))


LEADING = st.sampled_from([(), (1,), (3,), (2, 2)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_block_fp8_keeps_what_it_can_represent(data: st.DataObject) -> None:
    leading = data.draw(LEADING)
    n, k = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 11))
    bn, bk = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    ue8m0 = data.draw(st.booleans())
    codes = random_codes(data, E4M3, *leading, n, k)
    scales = torch.empty(*leading, -(-n // bn), -(-k // bk))
    want = torch.empty(*leading, n, k, dtype=F64)
    for at in itertools.product(*(range(size) for size in scales.shape)):
        *matrix, i, j = at
        block = (*matrix, slice(i * bn, (i + 1) * bn), slice(j * bk, (j + 1) * bk))
        run = codes[block].contiguous()
        put_a_large_one(data, run, [119, 120, 126] if ue8m0 else [126], 128)  # 240, 256 and 448
        codes[block] = run
        scales[at] = narrow(data, 1 if ue8m0 else 20, -117, 110)
        want[block] = q.decode_e4m3(run).to(F64) * scales[at].item()
    w = want.to(F32)
    assert torch.equal(w.to(F64), want)
    got = q.quantize_block_fp8(w, (bn, bk), ue8m0=ue8m0)
    assert torch.equal(bits(got[0]), codes)
    assert torch.equal(got[1], scales)
    assert same(q.dequantize_block_fp8(*got, (bn, bk)), w)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_token_fp8_keeps_what_it_can_represent(data: st.DataObject) -> None:
    leading, k, size = data.draw(LEADING), data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    codes = random_codes(data, E4M3, *leading, k)
    scales = torch.empty(*leading, -(-k // size))
    want = torch.empty(*leading, k, dtype=F64)
    for at in itertools.product(*(range(count) for count in scales.shape)):
        group = (*at[:-1], slice(at[-1] * size, (at[-1] + 1) * size))
        run = codes[group].clone()
        put_a_large_one(data, run, [126], 128)
        codes[group] = run
        scales[at] = narrow(data, 20, -117, 110)
        want[group] = q.decode_e4m3(run).to(F64) * scales[at].item()
    got = q.quantize_token_fp8(want.to(F32), size)
    assert torch.equal(bits(got[0]), codes)
    assert torch.equal(got[1], scales)
    assert same(q.dequantize_token_fp8(*got, size), want.to(F32))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("element", ["fp8", "fp4"])
def test_mx_keeps_what_it_can_represent(data: st.DataObject, element: str) -> None:
    table, sign = (E4M3, 128) if element == "fp8" else (E2M1, 8)
    rounding = data.draw(st.sampled_from(["down", "up"]))
    leading, k = data.draw(LEADING), 2 * data.draw(st.integers(1, 40))
    codes = random_codes(data, table, *leading, k)
    scales = torch.empty(*leading, -(-k // 32), dtype=U8)
    for at in itertools.product(*(range(count) for count in scales.shape)):
        group = (*at[:-1], slice(at[-1] * 32, (at[-1] + 1) * 32))
        run = codes[group].clone()
        put_a_large_one(data, run, [120, 123, 126] if element == "fp8" else [6, 7], sign)
        codes[group] = run
        scales[at] = data.draw(st.integers(0, 246 if element == "fp8" else 252))
    values = torch.tensor(table, dtype=F64)[codes.long()]
    w = (values * torch.tensor(E8M0, dtype=F64)[scales.long()].repeat_interleave(32, -1)[..., :k]).to(F32)
    if element == "fp8":
        got = q.quantize_mxfp8(w, rounding)
        assert torch.equal(bits(got[0]), codes)
        assert same(q.dequantize_mxfp8(*got), w)
    else:
        got = q.quantize_mxfp4(w, rounding)
        assert torch.equal(q.unpack_e2m1(got[0]), codes)
        assert same(q.dequantize_mxfp4(*got), w)
    assert torch.equal(got[1], scales)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nvfp4_keeps_what_it_can_represent(data: st.DataObject) -> None:
    leading, k = data.draw(LEADING), 2 * data.draw(st.integers(1, 30))
    codes = random_codes(data, E2M1, *leading, k)
    scales = torch.empty(*leading, -(-k // 16), dtype=U8)
    for at in itertools.product(*(range(count) for count in scales.shape)):
        group = (*at[:-1], slice(at[-1] * 16, (at[-1] + 1) * 16))
        run = codes[group].clone()
        put_a_large_one(data, run, [7], 8)
        codes[group] = run
        scales[at] = data.draw(st.integers(1, 126))
    scales.view(-1)[data.draw(st.integers(0, scales.numel() - 1))] = 126
    global_scale = narrow(data, 17, -100, 100)
    real = torch.tensor(E4M3, dtype=F64)[scales.long()].repeat_interleave(16, -1)[..., :k]
    w = (torch.tensor(E2M1, dtype=F64)[codes.long()] * real * global_scale).to(F32)
    got = q.quantize_nvfp4(w)
    assert torch.equal(q.unpack_e2m1(got.codes), codes)
    assert torch.equal(bits(got.scales), scales)
    assert got.global_scale.item() == global_scale
    assert same(q.dequantize_nvfp4(*got), w)


Format = tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[..., Tensor], tuple[int, int]]

# Quantiser, dequantiser, and the rows and columns that share a scale.
FORMATS: dict[str, Format] = {
    "block": (
        lambda w: q.quantize_block_fp8(w, (4, 8)),
        lambda *p, **k: q.dequantize_block_fp8(*p, (4, 8), **k),
        (4, 8),
    ),
    "block-ue8m0": (
        lambda w: q.quantize_block_fp8(w, (4, 8), ue8m0=True),
        lambda *p, **k: q.dequantize_block_fp8(*p, (4, 8), **k),
        (4, 8),
    ),
    "token": (lambda w: q.quantize_token_fp8(w, 8), lambda *p, **k: q.dequantize_token_fp8(*p, 8, **k), (1, 8)),
    "mxfp8": (q.quantize_mxfp8, q.dequantize_mxfp8, (1, 32)),
    "mxfp4": (q.quantize_mxfp4, q.dequantize_mxfp4, (1, 32)),
    "nvfp4": (q.quantize_nvfp4, q.dequantize_nvfp4, (1, 16)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_keep_their_signs(name: str) -> None:
    quantize, dequantize, _ = FORMATS[name]
    w = torch.zeros(8, 64)
    w[::2, ::3] = -0.0
    assert same(dequantize(*quantize(w)), w)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_makes_its_block_nan_and_nothing_else(name: str, bad: float) -> None:
    quantize, dequantize, (rows, columns) = FORMATS[name]
    torch.manual_seed(0)
    w = torch.randn(12, 96)
    clean = dequantize(*quantize(w))
    w[5, 40] = bad
    spoilt = torch.zeros(12, 96, dtype=torch.bool)
    row, column = 5 // rows * rows, 40 // columns * columns
    spoilt[row : row + rows, column : column + columns] = True
    got = dequantize(*quantize(w))
    assert torch.equal(got.isnan(), spoilt)
    assert same(got[~spoilt], clean[~spoilt])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [F64, BF16, F16])
def test_other_dtypes_are_taken_as_float32_and_given_back_on_demand(name: str, dtype: torch.dtype) -> None:
    quantize, dequantize, _ = FORMATS[name]
    torch.manual_seed(0)
    w = torch.randn(2, 8, 64).to(dtype)
    got = quantize(w)
    for part, want in zip(got, quantize(w.to(F32)), strict=True):
        assert same(part, want)
    assert same(dequantize(*got, dtype=dtype), dequantize(*got).to(dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_strides_do_not_matter_and_results_are_contiguous(name: str) -> None:
    quantize, dequantize, _ = FORMATS[name]
    torch.manual_seed(0)
    w = torch.randn(64, 9, 2).permute(2, 1, 0)[:, ::2]
    assert not w.is_contiguous()
    got, want = quantize(w), quantize(w.contiguous())
    assert all(same(part, other) for part, other in zip(got, want, strict=True))
    assert got[0].is_contiguous()
    back = dequantize(*(part.mT.contiguous().mT if part.ndim > 1 else part for part in got))
    assert back.is_contiguous()
    assert same(back, dequantize(*got))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64), (0, 0)])
def test_nothing_is_quantised_to_nothing(name: str, shape: tuple[int, ...]) -> None:
    quantize, dequantize, _ = FORMATS[name]
    got = quantize(torch.empty(shape))
    assert dequantize(*got).shape == shape


@pytest.mark.parametrize("name", FORMATS)
def test_every_matrix_of_a_stack_is_quantised_alone(name: str) -> None:
    quantize, dequantize, _ = FORMATS[name]
    torch.manual_seed(0)
    w = torch.randn(3, 8, 64)
    w[0, 0, 0] = w[1, 0, 0] = w[2, 0, 0] = 9.0  # the same largest element, so that NVFP4's global scale is too
    stacked = dequantize(*quantize(w))
    for matrix, alone in zip(stacked, w, strict=True):
        assert same(matrix, dequantize(*quantize(alone)))


@pytest.mark.parametrize("name", FORMATS)
def test_no_gradient_flows(name: str) -> None:
    parts = FORMATS[name][0](torch.ones(4, 32, requires_grad=True))
    assert not any(part.requires_grad for part in parts)


# ----------------------------------------------------------------------------------------------------- formulas


def real_scale(name: str, parts: Sequence[Tensor], shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The scale of each element, float64."""
    scale = parts[1]
    if name.startswith("mx"):
        scale = torch.tensor(E8M0, dtype=F64)[scale.long()]
    elif name == "nvfp4":
        scale = torch.tensor(E4M3, dtype=F64)[bits(scale).long()] * parts[2].to(F64)
    wide = scale.to(F64).repeat_interleave(block[1], -1)
    if name.startswith("block"):
        wide = wide.repeat_interleave(block[0], -2)
    return wide[..., : shape[-2], : shape[-1]]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_codes_are_the_nearest_to_what_is_divided_by_its_scale(name: str, size: float) -> None:
    quantize, dequantize, block = FORMATS[name]
    torch.manual_seed(0)
    w = torch.randn(2, 7, 74) * size
    parts = quantize(w)
    scale = real_scale(name, parts, w.shape, block)
    table, sign = (E2M1, 8) if name.endswith("fp4") else (E4M3, 128)
    # The quotient is float32 by definition: what is near a tie would round elsewhere in float64.
    codes = [nearest(value, table, sign) for value in (w / scale.to(F32)).flatten().tolist()]
    want = torch.tensor(table, dtype=F64)[torch.tensor(codes)].view(w.shape) * scale
    torch.testing.assert_close(dequantize(*parts).to(F64), want, rtol=2**-23, atol=0)


@pytest.mark.parametrize("rounding", ["down", "up"])
@pytest.mark.parametrize(("name", "largest"), [("mxfp8", 448.0), ("mxfp4", 6.0)])
def test_mx_scale_is_that_of_the_specification(name: str, largest: float, rounding: str) -> None:
    quantize = {"mxfp8": q.quantize_mxfp8, "mxfp4": q.quantize_mxfp4}[name]
    amax = torch.tensor([largest, largest * (1 + 2**-20), largest * (1 - 2**-20), largest / 1.4, 1.0, 1.99, 2.0])
    w = torch.zeros(len(amax), 32)
    w[:, 3] = -amax
    exponents = []
    for value in amax.tolist():
        if rounding == "down":
            exponents.append(math.floor(math.log2(value)) - math.floor(math.log2(largest)))
        else:
            exponents.append(next(e for e in range(-40, 40) if value <= largest * 2.0**e))
    assert (quantize(w, rounding)[1].flatten().int() - 127).tolist() == exponents


def test_mx_scales_stay_within_their_range() -> None:
    w = torch.zeros(3, 32)
    w[1, 0], w[2, 0] = 2.0**-149, torch.finfo(F32).max
    for quantize, top in ((q.quantize_mxfp8, 8), (q.quantize_mxfp4, 2)):
        assert quantize(w)[1].flatten().tolist() == [0, 0, 254 - top]


def test_block_scale_is_the_largest_over_448() -> None:
    w = torch.tensor([[1.0, -7.0], [3.0, 0.5]])
    assert q.quantize_block_fp8(w, (2, 1))[1].tolist() == [[(torch.tensor(3.0) / 448).item(), 7 / 448]]
    assert q.quantize_block_fp8(w, (2, 1), ue8m0=True)[1].tolist() == [[2.0**-7, 2.0**-6]]


def test_nvfp4_has_two_levels_of_scales() -> None:
    w = torch.full((1, 32), 3.0)
    w[0, 16:] = 672.0
    got = q.quantize_nvfp4(w)
    assert got.global_scale.item() == 0.25  # 672 / (448 * 6)
    assert got.scales.to(F32).tolist() == [[2.0, 448.0]]  # 3 / 6 / 0.25
    assert same(q.dequantize_nvfp4(*got), w)
    assert same(q.dequantize_nvfp4(got.codes, bits(got.scales), got.global_scale.view(1, 1)), w)


def test_an_nvfp4_group_too_small_for_a_scale_becomes_zeros() -> None:
    w = torch.full((1, 32), 2688.0)
    w[0, 16:] = -(2.0**-9)
    got = q.dequantize_nvfp4(*q.quantize_nvfp4(w))[0, 16:]
    assert same(got, torch.full((16,), -0.0))


# ------------------------------------------------------------------------------------------------------ refusals

CODES8, CODES4 = torch.zeros(4, 32, dtype=F8), torch.zeros(4, 16, dtype=U8)
ONE = torch.ones(())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: q.quantize_block_fp8(torch.ones(4)), ValueError, r"^w: .*\(\.\.\., N, K\).*\(4,\)"),
        (lambda: q.quantize_block_fp8(torch.ones(4, 4, dtype=U8)), TypeError, "^w: .*uint8"),
        (lambda: q.quantize_block_fp8(torch.ones(4, 4), (0, 1)), ValueError, r"^block_size: .*\[0, 1\]"),
        (lambda: q.quantize_block_fp8(torch.ones(4, 4), (4,)), ValueError, r"^block_size: .*\[4\]"),
        (lambda: q.dequantize_block_fp8(CODES4, ONE), TypeError, "^codes: expected float8_e4m3fn.*uint8"),
        (lambda: q.dequantize_block_fp8(CODES8[0], ONE), ValueError, r"^codes: .*\(32,\)"),
        (lambda: q.dequantize_block_fp8(CODES8, torch.ones(2, 1)), ValueError, r"^scales: .*\(1, 1\).*\(2, 1\)"),
        (
            lambda: q.dequantize_block_fp8(CODES8, torch.ones(1, 1).bool()),
            TypeError,
            "^scales: .*float32 or u.*bool",
        ),
        (lambda: q.quantize_token_fp8(torch.ones(())), ValueError, r"^x: .*\(\)"),
        (lambda: q.quantize_token_fp8(torch.ones(4), 0), ValueError, "^group_size: .*0"),
        (lambda: q.dequantize_token_fp8(CODES8, torch.ones(4, 2)), ValueError, r"^scales: .*\(4, 1\).*\(4, 2\)"),
        (lambda: q.dequantize_token_fp8(CODES8, torch.ones(4, 1, device="meta")), ValueError, "^scales: .*cpu.*meta"),
        (lambda: q.quantize_mxfp8(torch.ones(4), "nearest"), ValueError, "^rounding: .*nearest"),
        (lambda: q.dequantize_mxfp8(CODES8, torch.ones(4, 1)), TypeError, "^scales: .*uint8.*float32"),
        (lambda: q.quantize_mxfp4(torch.ones(3)), ValueError, r"^x: .*even.*\(3,\)"),
        (lambda: q.quantize_mxfp4(torch.ones(4, dtype=torch.int8)), TypeError, "^x: .*int8"),
        (lambda: q.dequantize_mxfp4(CODES4, torch.ones(4, 2, dtype=U8)), ValueError, r"^scales: .*\(4, 1\)"),
        (lambda: q.quantize_nvfp4(torch.ones(3)), ValueError, r"^x: .*even.*\(3,\)"),
        (lambda: q.dequantize_nvfp4(CODES4, torch.ones(4, 1, dtype=U8), ONE), ValueError, r"^scales: .*\(4, 2\)"),
        (
            lambda: q.dequantize_nvfp4(CODES4, torch.ones(4, 2, dtype=U8), torch.ones(2)),
            ValueError,
            r"^global_scale: .*one element.*\(2,\)",
        ),
        (lambda: q.dequantize_nvfp4(CODES4, torch.ones(4, 2, dtype=U8), ONE.double()), TypeError, "^global_scale"),
        (
            lambda: q.dequantize_nvfp4(CODES4, torch.ones(4, 2), ONE),
            TypeError,
            "^scales: .*e4m3fn or uint8.*float32",
        ),
    ],
)
def test_quantisers_refuse(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
