"""The deep-gemm reference build against its formula, dense and in float64."""

import dataclasses
import inspect
import math
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_loader
from kernel_loader import quantization
from kernel_loader.bundles.deep_gemm import DeepGEMM
from tests.registry.references import BF16, F16, F32, F64, compiled, is_shipped_reference, load_reference, random

F8 = torch.float8_e4m3fn
NAN = math.nan


@pytest.fixture
def gemm(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_reference("deep_gemm", monkeypatch)


def build(bundle: Any) -> Any:
    return inspect.getmodule(inspect.unwrap(bundle.fp8_matmul))


def factor(*shape: int, seed: int = 0, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Codes of every exponent, and a scale for `rows` x 128."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, shape, generator=generator) + 128 * torch.randint(0, 2, shape, generator=generator)
    *stack, m, k = shape
    scales = torch.rand((*stack, -(-m // rows), -(-k // 128)), generator=generator) * 0.02 + 0.001
    return codes.to(torch.uint8).view(F8), scales


def real(codes: Tensor, scales: Tensor, rows: int = 1) -> Tensor:
    m, k = codes.shape[-2:]
    wide = scales.to(F64).repeat_interleave(rows, -2)[..., :m, :].repeat_interleave(128, -1)[..., :k]
    return codes.to(F32).to(F64) * wide


def unwritten(m: int, n: int) -> Tensor:
    return torch.full((m, n), NAN, dtype=BF16)


def assert_product(got: Tensor, left: Tensor, right: Tensor) -> None:
    """`got` is left @ right.T within the rounding of a float32 sum and of bfloat16."""
    want, size = left @ right.mT, left.abs() @ right.mT.abs()
    bound = 1e-6 * size + 2**-8 * want.abs() + torch.finfo(BF16).tiny
    assert got.shape == want.shape
    assert ((got.to(F64) - want).abs() <= bound).all()


def test_the_manifest_binds_the_shipped_reference(gemm: Any) -> None:
    assert isinstance(gemm, DeepGEMM)
    assert is_shipped_reference(gemm, "deep-gemm")
    assert gemm.m_alignment == 128


def test_signatures_are_those_of_the_bundle(gemm: Any) -> None:
    for field in dataclasses.fields(DeepGEMM):
        promised = get_type_hints(DeepGEMM, localns={"torch": torch})[field.name]
        if promised is not int:
            wanted = [p.replace(annotation=p.empty) for p in inspect.signature(promised.__call__).parameters.values()]
            given_ = inspect.signature(getattr(gemm, field.name)).parameters.values()
            assert [p.replace(annotation=p.empty) for p in given_] == wanted[1:]


# ---------------------------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("m", [1, 5, 129])
@pytest.mark.parametrize("n", [1, 127, 128, 129])
@pytest.mark.parametrize("k", [1, 127, 128, 129, 300])
def test_dense_product_is_that_of_the_formula(gemm: Any, m: int, n: int, k: int) -> None:
    a, b, d = factor(m, k), factor(n, k, seed=1, rows=128), unwritten(m, n)
    assert gemm.fp8_matmul(a, b, d) is None
    assert_product(d, real(*a), real(*b, 128))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (3, 0, 8), (3, 8, 0), (0, 0, 0)])
def test_what_has_no_terms_is_zero(gemm: Any, m: int, n: int, k: int) -> None:
    d = unwritten(m, n)
    gemm.fp8_matmul(factor(m, k), factor(n, k, rows=128), d)
    assert torch.equal(d, torch.zeros_like(d))


def test_factors_may_be_lists_and_strided_and_d_a_part_of_something(gemm: Any) -> None:
    a, b = factor(6, 256), factor(40, 256, seed=1, rows=128)
    whole = unwritten(12, 64)
    gemm.fp8_matmul([part.mT.contiguous().mT for part in a], list(b), whole[::2, :40], compiled_dims="mnk")
    assert_product(whole[::2, :40], real(*a), real(*b, 128))
    assert whole[1::2].isnan().all()
    assert whole[:, 40:].isnan().all()


def test_nan_keeps_to_its_row(gemm: Any) -> None:
    a, b, d = factor(3, 128), factor(8, 128, rows=128), unwritten(3, 8)
    a[0].view(torch.uint8)[1, 5] = 127
    gemm.fp8_matmul(a, b, d)
    assert d.isnan().all(1).tolist() == [False, True, False]
    assert not d[[0, 2]].isnan().any()


def test_pairs_of_the_public_quantisers_multiply_back_to_the_product(gemm: Any) -> None:
    x, w = random(9, 200, dtype=F32), random(130, 200, dtype=F32, seed=1)
    d = unwritten(9, 130)
    gemm.fp8_matmul(gemm.per_token_cast_to_fp8(x, use_ue8m0=False), quantization.quantize_block_fp8(w), d)
    error = (d.to(F64) - x.to(F64) @ w.to(F64).mT).norm() / (x.to(F64) @ w.to(F64).mT).norm()
    assert error < 0.05


# -------------------------------------------------------------------------------------------------------- grouped


def layout(*blocks: tuple[int, int, int]) -> Tensor:
    """(group, its rows, rows of padding after them) of each block."""
    return torch.tensor([v for group, rows, pad in blocks for v in [group] * rows + [-1] * pad], dtype=torch.int32)


LAYOUTS = {
    "nothing": [],
    "padding alone": [(0, 0, 128)],
    "one row": [(1, 1, 0)],
    "one row and padding": [(1, 1, 127)],
    "full blocks": [(0, 128, 0), (2, 128, 0)],
    "a group of two blocks": [(1, 128, 0), (1, 3, 125), (2, 127, 1)],
    "groups in any order": [(2, 5, 123), (0, 64, 64), (2, 1, 127)],
    "a short last block": [(0, 100, 28), (1, 7, 0)],
    "a short last block of padding": [(0, 128, 0), (0, 0, 9)],
    "padding in front": [(0, 0, 128), (1, 65, 63)],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_grouped_product_is_that_of_each_row_and_padding_is_zero(gemm: Any, name: str) -> None:
    groups = layout(*LAYOUTS[name])
    m, n, k = len(groups), 72, 160
    a, b, d = factor(m, k), factor(3, n, k, seed=1, rows=128), unwritten(m, n)
    padding = groups < 0
    a[0].view(torch.uint8)[padding] = 127  # NaN: rows of padding are not read
    a[1][padding] = NAN
    assert gemm.grouped_fp8_matmul(a, b, d, groups) is None
    assert torch.equal(d[padding], torch.zeros_like(d[padding]))
    left, right = real(*a), real(*b, 128)
    for group in range(3):
        mine = groups == group
        assert_product(d[mine], left[mine], right[group])


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_layout_agrees_with_the_formula(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gemm = load_reference("deep_gemm", patch)
        rows = st.integers(0, 128)
        blocks = data.draw(st.lists(st.tuples(st.integers(0, 2), rows), max_size=3))
        groups = layout(*((group, rows, 128 - rows) for group, rows in blocks))
        n, k = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
        m, seed = len(groups), data.draw(st.integers(0, 2**31))
        a, b, d = factor(m, k, seed=seed), factor(3, n, k, seed=seed + 1, rows=128), unwritten(m, n)
        gemm.grouped_fp8_matmul(a, b, d, groups)
        left, right = real(*a), real(*b, 128)
        assert torch.equal(d[groups < 0], torch.zeros_like(d[groups < 0]))
        for group in range(3):
            assert_product(d[groups == group], left[groups == group], right[group])


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([(0, 5, 0), (1, 123, 0)], "rows 0:128, got 1 in row 5 after 0"),
        ([(0, 0, 3), (1, 125, 0)], "rows 0:128, got 1 in row 3 after -1"),
        ([(0, 128, 0), (0, 3, 4), (0, 121, 0)], "rows 128:256, got 0 in row 135 after -1"),
        ([(3, 5, 0)], "below G = 3, got 3 in row 0"),
    ],
)
def test_layouts_that_no_build_could_follow_are_refused(
    gemm: Any, blocks: list[tuple[int, int, int]], message: str
) -> None:
    groups = layout(*blocks)
    with pytest.raises(ValueError, match=f"^grouped_layout: .*{message}"):
        gemm.grouped_fp8_matmul(factor(len(groups), 8), factor(3, 8, 8, rows=128), unwritten(len(groups), 8), groups)


# ------------------------------------------------------------------------------------------------------- the cast


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize(("k", "gran"), [(256, 128), (1, 128), (127, 128), (129, 128), (70, 32), (0, 128)])
def test_cast_gives_the_scale_of_each_run_and_codes_near_what_it_divides(
    gemm: Any, dtype: torch.dtype, ue8m0: bool, k: int, gran: int
) -> None:
    x = random(5, k, dtype=dtype, scale=7.0)
    codes, scales = gemm.per_token_cast_to_fp8(x, ue8m0, gran)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (F8, (5, k), F32, (5, -(-k // gran)))
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    for row in range(5):
        for run in range(scales.shape[1]):
            part = x[row, run * gran : (run + 1) * gran].to(F32)
            scale = part.abs().max() / 448
            if ue8m0:
                scale = torch.tensor(2.0 ** math.ceil(math.log2(scale.item())))
            assert scales[row, run] == scale
            got = codes[row, run * gran : (run + 1) * gran].to(F32).to(F64)
            quotient = part.to(F64) / scale.to(F64)
            step = 2.0 ** (quotient.abs().clamp(min=2.0**-6).log2().floor() - 3)
            assert ((got - quotient).abs() <= step * 0.5001).all()


def test_cast_multiplies_by_the_reciprocal(gemm: Any) -> None:
    x = random(64, 128, dtype=F32)
    codes, scales = gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    assert torch.equal(codes.to(F32), (x * (1.0 / scales)).clamp(-448, 448).to(F8).to(F32))


def test_cast_has_a_floor_under_the_largest_element(gemm: Any) -> None:
    x = torch.tensor([[0.0] * 128, [1e-5] * 128])
    codes, scales = gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
    assert scales.flatten().tolist() == [(torch.tensor(1e-4) / 448).item()] * 2
    assert codes[0].to(F32).eq(0).all()
    assert codes[1].to(F32).eq(44).all()  # 44.8, between 44 and 48
    assert gemm.per_token_cast_to_fp8(x, use_ue8m0=True)[1].flatten().tolist() == [2.0**-22] * 2


@pytest.mark.parametrize(("bad", "ue8m0"), [(NAN, False), (math.inf, False), (NAN, True)])
def test_what_is_not_finite_spoils_its_run_and_nothing_else(gemm: Any, bad: float, ue8m0: bool) -> None:
    x = torch.ones(2, 256)
    x[0, 3] = bad
    codes, scales = gemm.per_token_cast_to_fp8(x, ue8m0)
    real_values = quantization.dequantize_token_fp8(codes, scales)
    assert real_values[0, 3].isnan()
    assert torch.equal(real_values[0, 128:], torch.ones(128))
    assert torch.equal(real_values[1], torch.ones(256))
    assert real_values[0, :128].isnan().all() or ue8m0


def test_cast_takes_any_strides(gemm: Any) -> None:
    x = random(256, 10, dtype=F32).T[::2]
    got, want = gemm.per_token_cast_to_fp8(x, True), gemm.per_token_cast_to_fp8(x.contiguous(), True)
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(got[1], want[1])


# ------------------------------------------------------------------------------------------------- wrong arguments

A, B, G, D = factor(4, 256), factor(16, 256, rows=128), factor(2, 16, 256, rows=128), torch.zeros(4, 16, dtype=BF16)
ROWS = torch.zeros(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((A[0], B, D), TypeError, "^a: .*pair.*Tensor"),
        ((A, (*B, None), D), TypeError, "^b: .*pair.*tuple"),
        ((A, (B[0], None), D), TypeError, "^b: .*pair"),
        (((A[0].float(), A[1]), B, D), TypeError, "^a: .*float8_e4m3fn.*float32"),
        ((A, (B[0].view(torch.int8), B[1]), D), TypeError, "^b: .*float8_e4m3fn.*int8"),
        (((A[0][None], A[1]), B, D), ValueError, r"^a: .*\(M, K\).*\(1, 4, 256\)"),
        ((A, (B[0][:, :128], B[1]), D), ValueError, r"^b: .*K = 256.*\(16, 128\)"),
        (((A[0], A[1].double()), B, D), TypeError, "^a: .*scales.*float32.*float64"),
        (((A[0], A[1][:, :1]), B, D), ValueError, r"^a: .*scales.*\(4, 2\).*\(4, 1\)"),
        ((A, (B[0], B[1].T), D), ValueError, r"^b: .*scales.*\(1, 2\).*\(2, 1\)"),
        ((A, B, D.float()), TypeError, "^d: .*bfloat16.*float32"),
        ((A, B, D[:3]), ValueError, r"^d: .*\(4, 16\).*\(3, 16\)"),
        ((A, B, D.T.contiguous().T), ValueError, r"^d: .*stride of 1.*\(1, 4\)"),
        ((A, (B[0], B[1].to("meta")), D), ValueError, "^b: .*cpu.*meta"),
    ],
)
def test_dense_product_refuses(gemm: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gemm.fp8_matmul(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((A, B, D, ROWS), ValueError, r"^b: .*\(G, N, K\).*\(16, 256\)"),
        ((A, (G[0][:0], G[1][:0]), D, ROWS), ValueError, "^b: .*at least one"),
        ((A, G, D, ROWS.long()), TypeError, "^grouped_layout: .*int32.*int64"),
        ((A, G, D, ROWS[:3]), ValueError, r"^grouped_layout: .*\(4,\).*\(3,\)"),
        ((A, G, D, torch.zeros(8, dtype=torch.int32)[::2]), ValueError, "^grouped_layout: .*contiguous"),
        ((A, G, D, ROWS.to("meta")), ValueError, "^grouped_layout: .*cpu.*meta"),
        ((A, G, D.float(), ROWS), TypeError, "^d: .*bfloat16"),
        ((A, (G[0], G[1][:1]), D, ROWS), ValueError, r"^b: .*scales.*\(2, 1, 2\).*\(1, 1, 2\)"),
    ],
)
def test_grouped_product_refuses(gemm: Any, arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gemm.grouped_fp8_matmul(*arguments)


@pytest.mark.parametrize(
    ("x", "gran", "error", "message"),
    [
        (torch.ones(4), 128, ValueError, r"^x: .*\(M, K\).*\(4,\)"),
        (torch.ones(4, 4, dtype=torch.int32), 128, TypeError, "^x: .*bfloat16.*int32"),
        (torch.ones(4, 4), 0, ValueError, "^gran_k: .*0"),
    ],
)
def test_cast_refuses(gemm: Any, x: Tensor, gran: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gemm.per_token_cast_to_fp8(x, False, gran)


# -------------------------------------------------------------------------------------------- compiled, and bounded


def test_a_layer_of_casts_and_products_is_one_graph(gemm: Any) -> None:
    x, b, groups = random(130, 256, dtype=BF16), factor(2, 16, 256, rows=128), layout((0, 9, 119), (1, 2, 0))

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        a = gemm.per_token_cast_to_fp8(x, use_ue8m0=False)
        dense, grouped = x.new_empty(130, 16), x.new_empty(130, 16)
        gemm.fp8_matmul(a, (b[0][0], b[1][0]), dense)
        gemm.grouped_fp8_matmul(a, b, grouped, groups)
        return dense, grouped

    for got, want in zip(compiled(layer)(x), layer(x), strict=True):
        assert torch.equal(got, want)


def test_loading_within_a_compiled_function_leaves_no_trace(gemm: Any) -> None:
    a, b, d = factor(3, 128), factor(8, 128, rows=128), unwritten(3, 8)

    def multiply(out: Tensor) -> None:
        kernel_loader.load_kernel("deep_gemm").fp8_matmul(a, b, out)

    compiled(multiply)(d)
    assert_product(d, real(*a), real(*b, 128))


def test_ops_pass_the_checks_of_torch(gemm: Any) -> None:
    ops = build(gemm).ops
    a, b, g = factor(3, 140), factor(20, 140, rows=128), factor(2, 20, 140, rows=128)
    no_schema = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # it cannot compare FP8
    cases = (
        (ops.fp8_gemm_nt.default, (*a, *b, unwritten(3, 20).nan_to_num())),
        (ops.m_grouped_fp8_gemm_nt.default, (*a, *g, unwritten(3, 20).nan_to_num(), layout((1, 2, 1)))),
        (ops.per_token_cast_to_fp8.default, (random(3, 140, dtype=F32), True, 128)),
    )
    for op, arguments in cases:
        torch.library.opcheck(op, arguments, test_utils=no_schema)


class Allocations(TorchDispatchMode):
    """Bytes of every tensor that ops make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.sizes.append(result.numel() * result.element_size())
        return result


def test_temporaries_are_bounded_whatever_the_shapes(gemm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(gemm)
    limit = 4 * 256**2
    monkeypatch.setattr(module, "MAX_TEMPORARY_BYTES", limit)
    a, b, d = factor(700, 300), factor(600, 300, rows=128), unwritten(700, 600)
    with Allocations() as made:
        module._multiply_into(d, *a, *b, 0, 700)
    assert max(made.sizes) <= limit
    assert_product(d, real(*a), real(*b, 128))
