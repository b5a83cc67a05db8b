"""The finegrained-fp8 reference build against the formula itself, written out again here in float64.

Nothing below uses the reference to say what is right: e4m3 and e2m1 are built from their bit fields and rounded to by
search, scales are found by loops over rows and blocks, and products are float64.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernel_loader
from kernel_loader.bundles.fp8 import FineGrainedFP8

BUILD = Path(__file__).parents[2] / "registry" / "finegrained-fp8" / "build" / "torch-universal"
PACKAGE = "made_up.home.finegrained_fp8_0123456789ab"

F8, F32, BF16, F16, F64 = torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.float16, torch.float64
E8M0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
NAN, INF = math.nan, math.inf


# ---------------------------------------------------------------------------------------------------------- loading


def import_build(directory: Path, name: str) -> ModuleType:
    """Import a build directory as package `name`, as a loader would."""
    spec = importlib.util.spec_from_file_location(
        name, directory / "__init__.py", submodule_search_locations=[str(directory)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forget(name: str) -> None:
    for loaded in [loaded for loaded in sys.modules if loaded == name or loaded.startswith(name + ".")]:
        del sys.modules[loaded]


@pytest.fixture(scope="module")
def build_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy: importing in place would leave __pycache__ in a build whose every file is accounted for by a digest.
    return Path(shutil.copytree(BUILD, tmp_path_factory.mktemp("build") / "torch-universal"))


@pytest.fixture(scope="module")
def fp8(build_copy: Path) -> Iterator[ModuleType]:
    yield import_build(build_copy, PACKAGE)
    forget(PACKAGE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# ----------------------------------------------------------------------------------------------- the formula, again


def e4m3_magnitude(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def e2m1_value(code: int) -> float:
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


E4M3_GRID = torch.tensor([e4m3_magnitude(code) for code in range(127)], dtype=F64)
E2M1_GRID = torch.tensor([e2m1_value(code) for code in range(16)], dtype=F64)


def to_e4m3(values: Tensor) -> Tensor:
    """The nearest e4m3 number of each float64, ties to the even code, beyond 448 to 448. float64."""
    magnitude = values.abs().nan_to_num(0.0, posinf=448.0).clamp(max=448.0)
    above = torch.bucketize(magnitude, E4M3_GRID).clamp(min=1)
    below = above - 1
    down, up = magnitude - E4M3_GRID[below], E4M3_GRID[above] - magnitude
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return torch.where(values.isnan(), NAN, E4M3_GRID[code].copysign(values))


def quantised_dequantised(A: Tensor, block_k: int, *, mx: bool = False, static: float | None = None) -> Tensor:
    """A after its quantisation, float64, by a loop over rows and blocks. (rows, K)"""
    out = torch.empty(A.shape, dtype=F64)
    for row, start in itertools.product(range(A.shape[0]), range(0, A.shape[1], block_k)):
        block = A[row, start : start + block_k].to(F32)
        # Scale and division are float32 by definition: what is near a tie would round elsewhere in float64.
        scale = block.abs().max() / 448 if static is None else torch.tensor(static)
        if mx:
            scale = torch.tensor(2.0 ** max(-126, math.ceil(math.log2(scale.item()))) if scale > 0 else 2.0**-126)
        divisor = scale.clamp(min=1e-12) if static is None else scale
        out[row, start : start + block_k] = to_e4m3((block / divisor).to(F64)) * scale.to(F64)
    return out


def real_scale(Bs: Tensor) -> Tensor:
    return Bs.to(F64) if Bs.dtype == F32 else 2.0 ** (Bs.view(torch.uint8).to(F64) - 127)


def dequantised(B: Tensor, Bs: Tensor, block_size: tuple[int, int] | None) -> Tensor:
    """One weight (N, K) as float64; `block_size` (1, 32) for MX, None for one scale."""
    if B.dtype == torch.int8:
        codes = B.view(torch.uint8).long()
        values = torch.stack((E2M1_GRID[codes % 16], E2M1_GRID[codes // 16]), dim=-1).flatten(1)
    else:
        values = B.to(F32).to(F64)
    scale = real_scale(Bs)
    if block_size is None:
        return values * scale.reshape(())
    for i, j in itertools.product(range(scale.shape[0]), range(scale.shape[1])):
        values[i * block_size[0] : (i + 1) * block_size[0], j * block_size[1] : (j + 1) * block_size[1]] *= scale[i, j]
    return values


def random_weight(*shape: int) -> Tensor:
    """Any finite e4m3 codes, so that every exponent occurs."""
    codes = torch.randint(0, 127, shape, dtype=torch.uint8) + 128 * torch.randint(0, 2, shape, dtype=torch.uint8)
    return codes.view(F8)


def random_scale(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == F32:
        return torch.rand(shape) * 0.02 + 0.001
    return torch.randint(115, 125, shape, dtype=torch.uint8).view(dtype)


def assert_product(got: Tensor, left: Tensor, right: Tensor) -> None:
    """`got` is left @ right.T within the rounding of a float32 sum and of the dtype of `got`."""
    want, size = left @ right.T, left.abs() @ right.abs().T
    bound = 1e-6 * size + torch.finfo(got.dtype).eps * want.abs() + torch.finfo(got.dtype).tiny
    assert got.shape == want.shape
    excess = ((got.to(F64) - want).abs() - bound).max().item() if got.numel() else 0.0
    assert excess <= 0, f"off by {excess} more than rounding explains"


MODES = ("block", "block-ue8m0", "block-ue8m0-bytes", "tensor", "mxfp8", "mxfp4")


def problem(mode: str, n: int, k: int, experts: int | None = None) -> tuple[Tensor, Tensor, list[int] | None, Any]:
    """(B, Bs, block_size, block as `dequantised` takes it) of a random weight."""
    stack = () if experts is None else (experts,)
    if mode == "tensor":
        return random_weight(*stack, n, k), random_scale(F32, *(stack or (1,))), None, None
    if mode.startswith("mx"):
        codes = (
            random_weight(*stack, n, k)
            if mode == "mxfp8"
            else torch.randint(-128, 128, (*stack, n, k // 2), dtype=torch.int8)
        )
        return codes, random_scale(E8M0, *stack, n, k // 32), [128, 128], (1, 32)
    dtype = {"block": F32, "block-ue8m0": E8M0, "block-ue8m0-bytes": torch.uint8}[mode]
    block = (16, 24)
    scales = (*stack, -(-n // block[0]), -(-k // block[1]))
    return random_weight(*stack, n, k), random_scale(dtype, *scales), list(block), block


def activation_block(mode: str, k: int) -> int:
    return 32 if mode.startswith("mx") else k if mode == "tensor" else 24


def quantised_for(mode: str, A: Tensor) -> Tensor:
    return quantised_dequantised(A.detach(), activation_block(mode, A.shape[1]), mx=mode.startswith("mx"))


# -------------------------------------------------------------------------------------------------- fp8_act_quant


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_quantiser_gives_the_nearest_code_and_the_scale_of_each_block(fp8: ModuleType, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 5, 48) * 7).to(dtype)
    codes, scales = fp8.fp8_act_quant(x, 16)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (F8, (3, 5, 48), F32, (3, 5, 3))
    assert torch.equal(scales, x.float().unflatten(-1, (3, 16)).abs().amax(-1) / 448)
    got = codes.to(F32).to(F64) * scales.to(F64).repeat_interleave(16, dim=-1)
    assert torch.equal(got.flatten(0, 1), quantised_dequantised(x.flatten(0, 1), 16))


def test_quantiser_has_blocks_of_128_unless_told(fp8: ModuleType) -> None:
    assert fp8.fp8_act_quant(torch.randn(2, 256))[1].shape == (2, 2)


def test_quantiser_takes_any_strides_and_returns_contiguous(fp8: ModuleType) -> None:
    x = torch.randn(32, 6, 4).permute(2, 1, 0)[:, ::2]
    codes, scales = fp8.fp8_act_quant(x, 16)
    wanted_codes, wanted_scales = fp8.fp8_act_quant(x.contiguous(), 16)
    assert codes.is_contiguous()
    assert torch.equal(codes.view(torch.uint8), wanted_codes.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


def test_quantiser_of_a_vector_and_of_nothing(fp8: ModuleType) -> None:
    assert [tuple(part.shape) for part in fp8.fp8_act_quant(torch.randn(32), 16)] == [(32,), (2,)]
    assert [tuple(part.shape) for part in fp8.fp8_act_quant(torch.randn(0, 32), 16)] == [(0, 32), (0, 2)]
    assert [tuple(part.shape) for part in fp8.fp8_act_quant(torch.randn(2, 0), 16)] == [(2, 0), (2, 0)]


def test_zeros_have_scale_zero_and_codes_zero(fp8: ModuleType) -> None:
    codes, scales = fp8.fp8_act_quant(torch.zeros(2, 16), 16)
    assert codes.float().eq(0).all()
    assert scales.eq(0).all()


def test_scale_is_floored_only_where_it_divides(fp8: ModuleType) -> None:
    codes, scales = fp8.fp8_act_quant(torch.full((1, 16), 448e-14), 16)
    assert scales.item() == pytest.approx(1e-14)
    assert codes.float()[0, 0].item() == pytest.approx(4.48, rel=1 / 16)


def test_nan_stays_nan_and_keeps_to_its_block(fp8: ModuleType) -> None:
    x = torch.ones(2, 32)
    x[0, 3] = NAN
    codes, scales = fp8.fp8_act_quant(x, 16)
    assert codes[0, 3].float().isnan()
    assert scales.isnan().tolist() == [[True, False], [False, False]]
    assert codes[1].float().eq(448).all()


def test_quantiser_outputs_carry_no_gradient(fp8: ModuleType) -> None:
    codes, scales = fp8.fp8_act_quant(torch.randn(2, 16, requires_grad=True), 16)
    assert not codes.requires_grad
    assert not scales.requires_grad


@pytest.mark.parametrize(
    ("x", "block_size", "error", "message"),
    [
        (torch.ones(2, 17), 16, ValueError, r"^x: .*multiple of 16.*\(2, 17\)"),
        (torch.ones(()), 16, ValueError, r"^x: .*\(\)"),
        (torch.ones(2, 16), 0, ValueError, "^block_size: .*positive.*0"),
        (torch.ones(2, 16, dtype=torch.int32), 16, TypeError, "^x: .*bfloat16.*int32"),
    ],
)
def test_quantiser_refuses(fp8: ModuleType, x: Tensor, block_size: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fp8.fp8_act_quant(x, block_size)


# ---------------------------------------------------------------------------------------------------------- dense


@pytest.mark.parametrize("mode", MODES)
def test_dense_product_is_that_of_the_formula(fp8: ModuleType, mode: str) -> None:
    B, Bs, block_size, block = problem(mode, 37, 96)
    A = torch.randn(5, 96)
    assert_product(fp8.matmul_2d(A, B, Bs, block_size), quantised_for(mode, A), dequantised(B, Bs, block))


@pytest.mark.parametrize("n", [15, 16, 17])
@pytest.mark.parametrize("k", [23, 24, 25, 47, 48, 49])
def test_dense_shapes_around_the_block(fp8: ModuleType, n: int, k: int) -> None:
    B, Bs, block_size, block = problem("block", n, k)
    A = torch.randn(2, k)
    assert_product(fp8.matmul_2d(A, B, Bs, block_size), quantised_for("block", A), dequantised(B, Bs, block))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("block_size", [None, [20, 30]])
def test_per_tensor_takes_every_shape_of_one_scale(
    fp8: ModuleType, shape: tuple[int, ...], block_size: list[int] | None
) -> None:
    B, Bs, A = random_weight(20, 30), torch.full(shape, 0.013), torch.randn(3, 30)
    assert_product(fp8.matmul_2d(A, B, Bs, block_size), quantised_dequantised(A, 30), dequantised(B, Bs, None))


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 3), (2, 0, 3), (2, 1, 3)])
@pytest.mark.parametrize("n", [0, 17])
def test_leading_dimensions_pass_through(fp8: ModuleType, lead: tuple[int, ...], n: int) -> None:
    B, Bs, block_size, block = problem("block", n, 49)
    A = torch.randn(*lead, 49, requires_grad=True)
    C = fp8.matmul_2d(A, B, Bs, block_size)
    assert C.shape == (*lead, n)
    assert_product(
        C.reshape(-1, n) if n else C.reshape(math.prod(lead), 0),
        quantised_for("block", A.reshape(-1, 49)),
        dequantised(B, Bs, block),
    )
    C.sum().backward()
    assert A.grad is not None
    assert A.grad.shape == A.shape


def test_product_over_no_columns_is_zero(fp8: ModuleType) -> None:
    C = fp8.matmul_2d(torch.randn(3, 0), random_weight(5, 0), torch.ones(1, 0), [16, 16])
    assert torch.equal(C, torch.zeros(3, 5))


@pytest.mark.parametrize(
    "view", [lambda x: x.permute(2, 1, 0), lambda x: x.mT[:, ::5], lambda x: x[:, :1].expand(-1, 3, -1)]
)
def test_strides_of_activations_do_not_matter(fp8: ModuleType, view: Callable[[Tensor], Tensor]) -> None:
    A = view(torch.randn(24, 24, 24))
    B, Bs, block_size, _ = problem("block", 9, 24)
    assert not A.is_contiguous()
    assert torch.equal(fp8.matmul_2d(A, B, Bs, block_size), fp8.matmul_2d(A.contiguous(), B, Bs, block_size))


def test_strides_of_weights_do_not_matter(fp8: ModuleType) -> None:
    B, Bs, block_size, _ = problem("block", 40, 48)
    A = torch.randn(2, 48)
    C = fp8.matmul_2d(A, B.t().contiguous().t(), Bs.t().contiguous().t(), block_size)
    assert torch.equal(C, fp8.matmul_2d(A, B, Bs, block_size))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("output_dtype", [None, BF16, F16, F32])
def test_result_has_the_dtype_asked_for_or_that_of_the_activations(
    fp8: ModuleType, dtype: torch.dtype, output_dtype: torch.dtype | None
) -> None:
    B, Bs, block_size, block = problem("block", 17, 49)
    A = torch.randn(3, 49).to(dtype).requires_grad_()
    C = fp8.matmul_2d(A, B, Bs, block_size, output_dtype)
    assert C.dtype == (output_dtype or dtype)
    assert_product(C, quantised_for("block", A), dequantised(B, Bs, block))
    C.float().sum().backward()
    assert A.grad is not None
    assert A.grad.dtype == dtype


def test_static_scale_replaces_the_dynamic_ones(fp8: ModuleType) -> None:
    B, Bs, block_size, block = problem("block", 17, 49)
    A = torch.randn(3, 49)
    for scale in (torch.tensor(0.011), torch.tensor([0.011])):
        C = fp8.matmul_2d(A, B, Bs, block_size, activation_scale=scale)
        assert_product(C, quantised_dequantised(A, 24, static=0.011), dequantised(B, Bs, block))


def test_static_scale_counts_in_per_tensor_mode_too(fp8: ModuleType) -> None:
    B, Bs, _, _ = problem("tensor", 17, 49)
    A = torch.randn(3, 49)
    C = fp8.matmul_2d(A, B, Bs, None, activation_scale=torch.tensor(0.02))
    assert_product(C, quantised_dequantised(A, 49, static=0.02), dequantised(B, Bs, None))


@pytest.mark.parametrize("value", [460.0, 470.0, 1e4, INF])
def test_what_is_too_large_for_a_static_scale_saturates(fp8: ModuleType, value: float) -> None:
    A, B = torch.tensor([[value], [-value]]), torch.ones(1, 1).to(F8)
    C = fp8.matmul_2d(A, B, torch.ones(1, 1), [1, 1], activation_scale=torch.tensor(1.0))
    assert C.tolist() == [[448.0], [-448.0]]


def test_nan_makes_its_row_nan_and_no_other(fp8: ModuleType) -> None:
    for mode in MODES:
        B, Bs, block_size, _ = problem(mode, 37, 96)
        A = torch.randn(3, 96)
        A[1, 50] = NAN
        assert fp8.matmul_2d(A, B, Bs, block_size).isnan().any(1).tolist() == [False, True, False]
    B, Bs, block_size, _ = problem("block", 37, 96)
    C = fp8.matmul_2d(A, B, Bs, block_size, activation_scale=torch.tensor(0.01))
    assert C.isnan().any(1).tolist() == [False, True, False]


def test_rows_of_zeros_give_zeros(fp8: ModuleType) -> None:
    for mode in MODES:
        B, Bs, block_size, _ = problem(mode, 37, 96)
        assert torch.equal(fp8.matmul_2d(torch.zeros(2, 96), B, Bs, block_size), torch.zeros(2, 37))


@pytest.mark.parametrize("mode", MODES)
def test_rows_under_the_floor_keep_their_own_scale(fp8: ModuleType, mode: str) -> None:
    B, Bs, block_size, block = problem(mode, 37, 96)
    A = torch.randn(3, 96) * torch.tensor([[1e-9], [1e-11], [1e-13]])
    assert_product(fp8.matmul_2d(A, B, Bs, block_size), quantised_for(mode, A), dequantised(B, Bs, block))


def test_ue8m0_is_decoded_at_both_ends(fp8: ModuleType) -> None:
    A, B = torch.full((1, 1), 448.0), torch.ones(1, 1).to(F8)
    for exponent, value in ((0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127), (255, NAN)):
        Bs = torch.tensor([[exponent]], dtype=torch.uint8)
        C = fp8.matmul_2d(A / 448, B, Bs, [1, 1], activation_scale=torch.tensor(1.0))
        assert C.item() == pytest.approx(value, rel=0, abs=0, nan_ok=True)


def test_mx_activation_scale_is_a_power_of_two_rounded_up(fp8: ModuleType) -> None:
    B, Bs = torch.ones(1, 32).to(F8), torch.full((1, 1), 127, dtype=torch.uint8)
    # 448 has scale 1 exactly, under which 2 ** -9 is the smallest code; 449 has scale 2, under which it is 224.5.
    for peak, other, want in ((448.0, 2.0**-9, 448.0 + 2.0**-9), (449.0, 40.0, 2 * 224.0 + 40.0)):
        A = torch.zeros(1, 32)
        A[0, 0], A[0, 1] = peak, other
        assert fp8.matmul_2d(A, B, Bs, None).item() == want


def test_mxfp4_reads_the_low_nibble_first(fp8: ModuleType) -> None:
    B = torch.zeros(1, 16, dtype=torch.int8)
    B[0, 0] = 0x72  # low 2 = 1.0, high 7 = 6.0
    A = torch.eye(32)[:3] * 448
    C = fp8.matmul_2d(A, B, torch.full((1, 1), 127, dtype=torch.uint8), None)
    assert C.flatten().tolist() == [448.0, 6 * 448.0, 0.0]


def test_float32_scales_of_32_are_not_mx(fp8: ModuleType) -> None:
    B, Bs, A = random_weight(5, 64), random_scale(F32, 5, 2), torch.randn(3, 64)
    assert_product(fp8.matmul_2d(A, B, Bs, [1, 32]), quantised_dequantised(A, 32), dequantised(B, Bs, (1, 32)))


# --------------------------------------------------------------------------------------------------------- experts


def routed_product(A_hat: Tensor, B: Tensor, Bs: Tensor, block: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """What rows of experts 0..E-1 must be, and the size of the sums behind them; sentinels stay zero."""
    want = torch.zeros(A_hat.shape[0], B.shape[1], dtype=F64)
    size = want.clone()
    for row, expert in enumerate(ids):
        if expert < B.shape[0]:
            weight = dequantised(B[expert], Bs[expert], block)
            want[row], size[row] = A_hat[row] @ weight.T, A_hat[row].abs() @ weight.abs().T
    return want, size


def assert_routed(C: Tensor, A_hat: Tensor, B: Tensor, Bs: Tensor, block: Any, ids: list[int]) -> None:
    want, size = routed_product(A_hat, B, Bs, block, ids)
    assert ((C.to(F64) - want).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("mode", MODES)
def test_batched_rows_go_through_their_experts(fp8: ModuleType, mode: str) -> None:
    B, Bs, block_size, block = problem(mode, 17, 96, experts=4)
    A, ids = torch.randn(7, 96), [3, 0, 4, 0, 3, 1000, 1]
    C = fp8.matmul_batched(A, B, Bs, torch.tensor(ids), block_size)
    assert_routed(C, quantised_for(mode, A), B, Bs, block, ids)


@pytest.mark.parametrize("mode", MODES)
def test_grouped_rows_go_through_their_experts(fp8: ModuleType, mode: str) -> None:
    B, Bs, block_size, block = problem(mode, 17, 96, experts=4)
    A, tokens = torch.randn(7, 96), torch.tensor([0, 2, 0, 3])
    C = fp8.matmul_grouped(A, B, Bs, tokens.cumsum(0), tokens, block_size)
    assert_routed(C, quantised_for(mode, A), B, Bs, block, [1, 1, 3, 3, 3, 4, 4])


@pytest.mark.parametrize("n", [15, 16, 17])
@pytest.mark.parametrize("k", [23, 25, 48, 49])
def test_expert_shapes_around_the_block(fp8: ModuleType, n: int, k: int) -> None:
    B, Bs, block_size, block = problem("block", n, k, experts=2)
    A = torch.randn(3, k)
    A_hat, tokens = quantised_for("block", A), torch.tensor([2, 1])
    assert_routed(fp8.matmul_batched(A, B, Bs, torch.tensor([0, 0, 1]), block_size), A_hat, B, Bs, block, [0, 0, 1])
    assert_routed(fp8.matmul_grouped(A, B, Bs, tokens.cumsum(0), tokens, block_size), A_hat, B, Bs, block, [0, 0, 1])


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1)])
@pytest.mark.parametrize("block_size", [None, [9, 30]])
def test_per_tensor_experts_take_both_shapes_of_scale(
    fp8: ModuleType, shape: tuple[int, ...], block_size: list[int] | None
) -> None:
    B, Bs, A = random_weight(3, 9, 30), torch.rand(shape), torch.randn(4, 30)
    A_hat, tokens = quantised_dequantised(A, 30), torch.tensor([1, 1, 2])
    assert_routed(
        fp8.matmul_batched(A, B, Bs, torch.tensor([2, 0, 1, 1]), block_size), A_hat, B, Bs, None, [2, 0, 1, 1]
    )
    C = fp8.matmul_grouped(A, B, Bs, tokens.cumsum(0), tokens, block_size)
    assert_routed(C, A_hat, B, Bs, None, [0, 1, 2, 2])


@pytest.mark.parametrize(
    "dtype",
    [
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ],
)
def test_indices_of_every_integer_dtype(fp8: ModuleType, dtype: torch.dtype) -> None:
    B, Bs, block_size, block = problem("block", 9, 24, experts=2)
    A, top = torch.randn(3, 24), torch.iinfo(dtype).max
    ids = torch.tensor([1, 0, top], dtype=dtype)
    assert_routed(fp8.matmul_batched(A, B, Bs, ids, block_size), quantised_for("block", A), B, Bs, block, [1, 0, 9])
    offsets, tokens = torch.tensor([1, 2]).to(dtype), torch.tensor([1, 1]).to(dtype)
    C = fp8.matmul_grouped(A, B, Bs, offsets, tokens, block_size)
    assert_routed(C, quantised_for("block", A), B, Bs, block, [0, 1, 9])


def call_routed(fp8: ModuleType, op: str, A: Tensor, weights: Any, ids: list[int]) -> Tensor:
    """`ids` sorted, as both ops can take them."""
    B, Bs, block_size = weights[:3]
    if op == "batched":
        result: Tensor = fp8.matmul_batched(A, B, Bs, torch.tensor(ids, dtype=torch.int64), block_size)
    else:
        tokens = torch.tensor([ids.count(expert) for expert in range(B.shape[0])], dtype=torch.int64)
        result = fp8.matmul_grouped(A, B, Bs, tokens.cumsum(0), tokens, block_size)
    return result


OPS = pytest.mark.parametrize("op", ["batched", "grouped"])


@OPS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_sentinel_rows_are_zero_and_take_no_gradient_whatever_stands_in_them(
    fp8: ModuleType, op: str, mode: str, poison: float
) -> None:
    weights = problem(mode, 17, 96, experts=2)
    A = torch.randn(4, 96)
    A[2:] = poison
    A.requires_grad_()
    C = call_routed(fp8, op, A, weights, [0, 1, 2, 7])
    assert torch.equal(C[2:], torch.zeros(2, 17))
    assert C[:2].isfinite().all()
    upstream = torch.ones_like(C)
    upstream[2:] = NAN
    C.backward(upstream)
    assert A.grad is not None
    assert torch.equal(A.grad[2:], torch.zeros(2, 96))
    assert A.grad[:2].isfinite().all()
    assert A.grad[:2].ne(0).any()


@OPS
@pytest.mark.parametrize(("rows", "ids"), [(0, []), (1, [1]), (3, [5, 5, 5]), (2, [1, 1])])
def test_no_rows_one_row_and_only_sentinels(fp8: ModuleType, op: str, rows: int, ids: list[int]) -> None:
    weights = problem("block", 17, 49, experts=2)
    A = torch.randn(rows, 49, requires_grad=True)
    C = call_routed(fp8, op, A, weights, ids)
    assert C.shape == (rows, 17)
    assert_routed(C, quantised_for("block", A), weights[0], weights[1], weights[3], ids)
    C.sum().backward()
    assert A.grad is not None
    assert A.grad.ne(0).any(1).tolist() == [expert < 2 for expert in ids]


@OPS
def test_without_experts_every_row_is_a_sentinel(fp8: ModuleType, op: str) -> None:
    weights = (random_weight(0, 17, 49), torch.ones(0, 2, 3), [16, 24], None)
    assert torch.equal(call_routed(fp8, op, torch.randn(3, 49), weights, [0, 0, 1]), torch.zeros(3, 17))


@OPS
def test_experts_take_activations_of_any_strides_and_dtype(fp8: ModuleType, op: str) -> None:
    weights = problem("block", 17, 49, experts=2)
    for dtype in (BF16, F16, F32):
        A = torch.randn(49, 8).to(dtype).t()[::2]
        C = call_routed(fp8, op, A, weights, [0, 1, 1, 2])
        assert C.dtype == dtype
        assert torch.equal(C, call_routed(fp8, op, A.contiguous(), weights, [0, 1, 1, 2]))


def test_a_row_does_not_depend_on_the_rows_beside_it(fp8: ModuleType) -> None:
    weights = problem("block", 17, 49, experts=3)
    A = torch.randn(6, 49)
    together = call_routed(fp8, "batched", A, weights, [0, 0, 1, 2, 2, 3])
    for row, expert in enumerate([0, 0, 1, 2, 2, 3]):
        alone = call_routed(fp8, "batched", A[row : row + 1], weights, [expert])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_upstream_times_the_dequantised_weight(fp8: ModuleType, mode: str) -> None:
    B, Bs, block_size, block = problem(mode, 37, 96)
    A = torch.randn(2, 3, 96, requires_grad=True)
    upstream = torch.randn(3, 2, 37).transpose(0, 1)
    fp8.matmul_2d(A, B, Bs, block_size).backward(upstream)
    assert A.grad is not None
    assert_product(A.grad.reshape(6, 96), upstream.reshape(6, 37).to(F64), dequantised(B, Bs, block).T)


@OPS
@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_experts_is_that_of_each_rows_expert(fp8: ModuleType, op: str, mode: str) -> None:
    B, Bs, block_size, block = problem(mode, 17, 96, experts=3)
    A, ids = torch.randn(4, 96, requires_grad=True), [0, 2, 2, 3]
    upstream = torch.randn(4, 17)
    call_routed(fp8, op, A, (B, Bs, block_size), ids).backward(upstream)
    assert A.grad is not None
    for row, expert in enumerate(ids[:3]):
        right = dequantised(B[expert], Bs[expert], block).T
        assert_product(A.grad[row : row + 1], upstream[row : row + 1].to(F64), right)


def test_gradient_passes_saturated_activations(fp8: ModuleType) -> None:
    A = torch.full((1, 1), 1e6, requires_grad=True)
    fp8.matmul_2d(A, torch.ones(1, 1).to(F8), torch.ones(1, 1), [1, 1], activation_scale=torch.tensor(1.0)).backward()
    assert A.grad is not None
    assert A.grad.item() == 1.0


def test_weights_and_scales_are_frozen(fp8: ModuleType) -> None:
    B, Bs, block_size, _ = problem("block", 17, 49)
    A, Bs, static = (
        torch.randn(2, 49, requires_grad=True),
        Bs.requires_grad_(),
        torch.tensor(0.1, requires_grad=True),
    )
    B.requires_grad_()
    fp8.matmul_2d(A, B, Bs, block_size, activation_scale=static).sum().backward()
    assert A.grad is not None
    assert (B.grad, Bs.grad, static.grad) == (None, None, None)
    fp8.matmul_2d(A.detach(), B, Bs, block_size).sum().backward()
    assert (B.grad, Bs.grad) == (None, None)


# ---------------------------------------------------------------------------------------------------------- errors

A2, B2, S2 = torch.ones(4, 48), torch.ones(32, 48).to(F8), torch.ones(2, 2)
A3, B3, S3 = torch.ones(4, 48), torch.ones(3, 32, 48).to(F8), torch.ones(3, 2, 2)
IDS, OFFSETS, TOKENS = torch.tensor([0, 1, 2, 2]), torch.tensor([1, 2, 4]), torch.tensor([1, 1, 2])
PACKED, EXPONENTS = torch.zeros(32, 24, dtype=torch.int8), torch.zeros(32, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"A": A2.double()}, TypeError, "^A: .*bfloat16.*float64"),
        ({"A": torch.tensor(1.0)}, ValueError, r"^A: .*\(\.\.\., K\).*\(\)"),
        ({"A": torch.ones(4, 47)}, ValueError, r"^A: .*K = 48.*\(4, 47\)"),
        ({"B": torch.ones(32, 48)}, TypeError, "^B: .*float8_e4m3fn.*float32"),
        ({"B": B2[None]}, ValueError, r"^B: .*\(N, K\).*\(1, 32, 48\)"),
        ({"Bs": S2.bfloat16()}, TypeError, "^Bs: .*float32.*bfloat16"),
        ({"Bs": S2[:1]}, ValueError, r"^Bs: .*\(2, 2\).*\(1, 2\)"),
        ({"Bs": S2.flatten()}, ValueError, r"^Bs: .*\(2, 2\).*\(4,\)"),
        ({"Bs": S2.to("meta")}, ValueError, "^Bs: .*cpu.*meta"),
        ({"A": A2.to("meta")}, ValueError, "^B: .*meta.*cpu"),
        ({"block_size": None}, ValueError, r"^Bs: .*\(1, 1\).*\(2, 2\)"),
        ({"block_size": [32, 48]}, ValueError, r"^Bs: .*\(1, 1\).*\(2, 2\)"),
        ({"block_size": [16, 24, 1]}, ValueError, r"^block_size: .*\[16, 24, 1\]"),
        ({"block_size": [16, 0]}, ValueError, r"^block_size: .*\[16, 0\]"),
        ({"block_size": 16}, TypeError, "^block_size: .*16"),
        ({"block_size": [16, 24.0]}, TypeError, "^block_size: .*24.0"),
        ({"output_dtype": torch.int32}, TypeError, "^output_dtype: .*int32"),
        ({"activation_scale": torch.tensor(1)}, TypeError, "^activation_scale: .*int64"),
        ({"activation_scale": torch.ones(2)}, ValueError, r"^activation_scale: .*\(2,\)"),
        ({"B": PACKED, "Bs": S2}, TypeError, "^Bs: .*UE8M0.*float32"),
        ({"A": torch.ones(4, 64), "B": torch.ones(32, 64).to(F8), "Bs": EXPONENTS, "activation_scale": torch.ones(1)},
         ValueError, "^activation_scale: .*MX"),
        ({"B": PACKED, "Bs": EXPONENTS}, ValueError, "^B: .*multiple of 32.*48"),
        ({"B": PACKED[:, :16], "Bs": EXPONENTS}, ValueError, r"^Bs: .*\(32, 1\).*\(32, 2\)"),
    ],
)  # fmt: skip
def test_dense_refuses(fp8: ModuleType, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"A": A2, "B": B2, "Bs": S2, "block_size": [16, 24]} | change
    with pytest.raises(error, match=message):
        fp8.matmul_2d(**arguments)


SHARED_BY_EXPERTS = [
    ({"A": A3.double()}, TypeError, "^A: .*float64"),
    ({"A": A3[None]}, ValueError, r"^A: .*\(S, K\).*\(1, 4, 48\)"),
    ({"A": torch.ones(4, 47)}, ValueError, "^A: .*K = 48"),
    ({"B": B3[0]}, ValueError, r"^B: .*\(E, N, K\).*\(32, 48\)"),
    ({"Bs": S3[:2]}, ValueError, r"^Bs: .*\(3, 2, 2\).*\(2, 2, 2\)"),
    ({"block_size": None}, ValueError, r"^Bs: .*\(3,\) or \(3, 1, 1\).*\(3, 2, 2\)"),
    ({"block_size": "16"}, TypeError, "^block_size: .*16"),
    ({"output_dtype": F64}, TypeError, "^output_dtype: .*float64"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *SHARED_BY_EXPERTS,
        ({"expert_ids": IDS.float()}, TypeError, "^expert_ids: .*integer.*float32"),
        ({"expert_ids": IDS.bool()}, TypeError, "^expert_ids: .*integer.*bool"),
        ({"expert_ids": IDS[:3]}, ValueError, r"^expert_ids: .*\(4,\).*\(3,\)"),
        ({"expert_ids": IDS[None]}, ValueError, r"^expert_ids: .*\(4,\).*\(1, 4\)"),
        ({"expert_ids": torch.tensor([0, -1, 5, -3])}, ValueError, "^expert_ids: .*-3"),
    ],
)
def test_batched_refuses(fp8: ModuleType, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"A": A3, "B": B3, "Bs": S3, "expert_ids": IDS, "block_size": [16, 24]} | change
    with pytest.raises(error, match=message):
        fp8.matmul_batched(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *SHARED_BY_EXPERTS,
        ({"offsets": OFFSETS.float()}, TypeError, "^offsets: .*integer.*float32"),
        ({"tokens_per_expert": TOKENS.float()}, TypeError, "^tokens_per_expert: .*integer.*float32"),
        ({"offsets": OFFSETS[:2]}, ValueError, r"^offsets: .*\(3,\).*\(2,\)"),
        ({"tokens_per_expert": TOKENS[:2]}, ValueError, r"^tokens_per_expert: .*\(3,\).*\(2,\)"),
        ({"offsets": torch.tensor([2, 1, 4])}, ValueError, r"^tokens_per_expert: .*expected 2 for expert 0.*got 1"),
        ({"offsets": torch.tensor([2, 1, 4]), "tokens_per_expert": torch.tensor([2, -1, 3])}, ValueError,
         r"^offsets: .*offsets\[1\].*got 1"),
        ({"offsets": torch.tensor([1, 2, 5]), "tokens_per_expert": torch.tensor([1, 1, 3])}, ValueError,
         r"^offsets: .*offsets\[2\].*S = 4.*got 5"),
        ({"offsets": torch.tensor([-1, 2, 4]), "tokens_per_expert": torch.tensor([-1, 3, 2])}, ValueError,
         r"^offsets: .*offsets\[0\].*got -1"),
        ({"tokens_per_expert": torch.tensor([1, 1, 1])}, ValueError, "^tokens_per_expert: .*2 for expert 2.*got 1"),
    ],
)  # fmt: skip
def test_grouped_refuses(fp8: ModuleType, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {
        "A": A3, "B": B3, "Bs": S3, "offsets": OFFSETS, "tokens_per_expert": TOKENS, "block_size": [16, 24]
    } | change  # fmt: skip
    with pytest.raises(error, match=message):
        fp8.matmul_grouped(**arguments)


# ----------------------------------------------------------------------------------------------- compile and dispatch


def calls(fp8: ModuleType, mode: str = "block") -> dict[str, Callable[[Tensor], Tensor]]:
    """Each op as a function of its activations (5, 96)."""
    dense, experts = problem(mode, 17, 96), problem(mode, 17, 96, experts=3)
    ids, tokens = torch.tensor([2, 0, 0, 9, 1]), torch.tensor([1, 0, 3])
    return {
        "matmul_2d": lambda A: fp8.matmul_2d(A, *dense[:3]),
        "static": lambda A: fp8.matmul_2d(A, *problem("block", 17, 96)[:3], activation_scale=torch.tensor(0.1)),
        "matmul_batched": lambda A: fp8.matmul_batched(A, experts[0], experts[1], ids, experts[2]),
        "matmul_grouped": lambda A: fp8.matmul_grouped(A, experts[0], experts[1], tokens.cumsum(0), tokens, experts[2]),
    }


@pytest.mark.parametrize("mode", ["block", "mxfp4"])
@pytest.mark.parametrize("op", ["matmul_2d", "matmul_batched", "matmul_grouped"])
def test_compiles_into_one_graph_with_the_same_result_and_gradient(fp8: ModuleType, op: str, mode: str) -> None:
    torch.compiler.reset()
    call = calls(fp8, mode)[op]

    def step(A: Tensor) -> Tensor:
        return call(A * 2).relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (step, compiled):
        A = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        C = function(A)
        C.square().sum().backward()
        results.append((C.detach(), A.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_quantiser_compiles_into_one_graph(fp8: ModuleType) -> None:
    torch.compiler.reset()
    x = torch.randn(3, 64)
    compiled = torch.compile(lambda x: fp8.fp8_act_quant(x + 1, 32), fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x), fp8.fp8_act_quant(x + 1, 32), strict=True):
        assert torch.equal(got.float(), want.float())


def test_one_graph_serves_every_number_of_rows(fp8: ModuleType) -> None:
    torch.compiler.reset()
    B, Bs, block_size, _ = problem("block", 17, 48)
    seen = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        seen.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda A: fp8.matmul_2d(A, B, Bs, block_size), fullgraph=True, dynamic=True, backend=backend
    )
    for rows in (5, 6, 11):  # equal to no other size, which dynamo would take for the same symbol
        A = torch.randn(rows, 48)
        assert torch.equal(compiled(A), fp8.matmul_2d(A, B, Bs, block_size))
    assert len(seen) == 1


# The schema check compares arguments before and after with allclose, which torch lacks for its float8 dtypes: it runs
# on packed weights with exponent bytes; the other three run on everything.
NO_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ALL_CHECKS = ("test_schema", *NO_SCHEMA)


@pytest.mark.parametrize("mode", ["block", "tensor", "mxfp4"])
def test_ops_keep_the_rules_of_the_dispatcher(fp8: ModuleType, mode: str) -> None:
    ops = getattr(torch.ops, fp8._ops.NAMESPACE)
    (B, Bs, block, _), (E, Es, _, _) = problem(mode, 17, 96), problem(mode, 17, 96, experts=3)
    if mode == "mxfp4":
        Bs, Es = Bs.view(torch.uint8), Es.view(torch.uint8)
    checks = ALL_CHECKS if mode == "mxfp4" else NO_SCHEMA
    ids, tokens = torch.tensor([2, 0, 9, 1]), torch.tensor([1, 0, 2])
    offsets = tokens.cumsum(0)
    A3, A2, grad = torch.randn(2, 3, 96), torch.randn(4, 96), torch.randn(4, 17)
    for op, arguments in (
        (ops.matmul_2d, (A3.requires_grad_(), B, Bs, block, BF16, None)),
        (ops.matmul_batched, (A2.requires_grad_(), E, Es, ids, block, None)),
        (ops.matmul_grouped, (A2, E, Es, offsets, tokens, block, None)),
        (ops.matmul_2d_backward, (grad, B, Bs, block, BF16)),
        (ops.matmul_batched_backward, (grad, E, Es, ids, block, F32)),
        (ops.matmul_grouped_backward, (grad, E, Es, offsets, tokens, block, F32)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=checks)


def test_quantiser_and_static_keep_the_rules_of_the_dispatcher(fp8: ModuleType) -> None:
    ops = getattr(torch.ops, fp8._ops.NAMESPACE)
    B, Bs, block, _ = problem("block", 17, 96)
    A = torch.randn(2, 96, requires_grad=True)
    torch.library.opcheck(ops.matmul_2d.default, (A, B, Bs, block, None, torch.tensor(0.1)), test_utils=NO_SCHEMA)
    torch.library.opcheck(ops.fp8_act_quant.default, (A, 32))


def test_ops_live_in_a_namespace_named_after_the_import(fp8: ModuleType, build_copy: Path) -> None:
    other_name = "elsewhere.finegrained-fp8_ba9876543210"
    other = import_build(build_copy, other_name)
    try:
        assert fp8._ops.NAMESPACE == "_kl_finegrained_fp8_0123456789ab"
        assert other._ops.NAMESPACE == "_kl_finegrained_fp8_ba9876543210"
        B, Bs, block_size, _ = problem("block", 17, 49)
        A = torch.randn(2, 49)
        assert torch.equal(fp8.matmul_2d(A, B, Bs, block_size), other.matmul_2d(A, B, Bs, block_size))
    finally:
        forget(other_name)


# Parameters of kernels-community/finegrained-fp8, version 4, with their defaults, and the bundle's name for each.
PUBLISHED = {
    "fp8_act_quant": ("fp8_act_quant", "x block_size=128"),
    "matmul_2d": ("fp8_matmul", "A B Bs block_size output_dtype=None activation_scale=None"),
    "matmul_batched": ("batched_fp8_matmul", "A B Bs expert_ids block_size output_dtype=None"),
    "matmul_grouped": ("grouped_fp8_matmul", "A B Bs offsets tokens_per_expert block_size output_dtype=None"),
}


def parameters(function: Callable[..., Any]) -> str:
    found = inspect.signature(function).parameters.values()
    written = (p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found if p.name != "self")
    return " ".join(written)


def test_exports_and_their_parameters_are_those_of_the_published_kernel(fp8: ModuleType) -> None:
    assert {name: parameters(getattr(fp8, name)) for name in fp8.__all__} == {
        name: wanted for name, (_, wanted) in PUBLISHED.items()
    }


def test_bundle_declares_the_parameters_of_the_published_kernel() -> None:
    hints = get_type_hints(FineGrainedFP8)
    protocols = {field.name: hints[field.name] for field in dataclasses.fields(FineGrainedFP8)}
    assert {field: parameters(protocol.__call__) for field, protocol in protocols.items()} == dict(PUBLISHED.values())


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", [10, 32])
def test_small_chunks_change_nothing(fp8: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str, side: int) -> None:
    A = torch.randn(5, 96)
    names = ("matmul_2d", "static", "matmul_batched", "matmul_grouped")

    def run() -> list[Tensor]:
        torch.manual_seed(3)
        table, results = calls(fp8, mode), []
        for name in names:
            leaf = A.clone().requires_grad_()
            torch.manual_seed(4)
            C = table[name](leaf)
            C.backward(torch.linspace(-1, 1, C.numel()).view_as(C))
            assert leaf.grad is not None
            results += [C.detach(), leaf.grad]
        codes, scales = fp8.fp8_act_quant(A, 48)
        return [*results, codes.float(), scales]

    whole = run()
    monkeypatch.setattr(fp8.tiles, "MAX_TEMPORARY_BYTES", 4 * side**2)
    for got, want in zip(run(), whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    assert torch.equal(got, want)  # scales: no sum in them, so not a bit may differ


class Allocations(TorchDispatchMode):
    """Bytes of every result that is not a view of, or written into, an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        old = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in old:
                self.sizes.append(made.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("mode", ["block", "tensor", "mxfp8", "mxfp4"])
def test_nothing_but_the_output_outgrows_the_limit(fp8: ModuleType, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    limit = 4 * 8**2
    monkeypatch.setattr(fp8.tiles, "MAX_TEMPORARY_BYTES", limit)
    B, Bs, block_size, _ = problem(mode, 40, 64)
    weights = fp8.weights.read_weights(B, Bs, block_size, experts=False)
    segments = [(0, torch.arange(20))]
    A = torch.randn(64, 10, 2).permute(2, 1, 0)  # cannot be flattened without a copy
    grad = torch.randn(20, 40)
    for run, output in (
        (lambda: fp8.tiles.multiply(A, weights, segments, F32, None), 4 * 20 * 40),
        (lambda: fp8.tiles.multiply_backward(grad, weights, segments, F32), 4 * 20 * 64),
    ):
        with Allocations() as made:
            run()
        assert [size for size in made.sizes if size > limit] == [output]


# ------------------------------------------------------------------------------------------------------ random shapes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_agrees_with_the_formula(fp8: ModuleType, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    mode = data.draw(st.sampled_from(MODES), label="mode")
    n, rows = data.draw(st.integers(2, 40), label="n"), data.draw(st.integers(0, 5), label="rows")
    k = data.draw(
        st.integers(1, 3).map(lambda groups: 32 * groups) if mode.startswith("mx") else st.integers(1, 80),
        label="k",
    )
    experts = data.draw(st.integers(1, 4), label="experts")
    ids = sorted(data.draw(st.lists(st.integers(0, experts + 1), min_size=rows, max_size=rows), label="ids"))
    B, Bs, block_size, block = problem(mode, n, k, experts=experts)
    A = torch.randn(rows, k) * 10.0 ** data.draw(st.integers(-6, 6), label="magnitude")
    A_hat = quantised_for(mode, A)
    for op in ("batched", "grouped"):
        assert_routed(call_routed(fp8, op, A, (B, Bs, block_size), ids), A_hat, B, Bs, block, ids)
    Bs0 = Bs[0]
    assert_product(fp8.matmul_2d(A, B[0], Bs0, block_size), A_hat, dequantised(B[0], Bs0, block))


def test_outputs_can_be_changed_in_place_in_training(monkeypatch):
    monkeypatch.setenv("KERNEL_LOADER_DISABLE", "finegrained_fp8")
    kernel = kernel_loader.load_kernel("finegrained_fp8")
    codes, scale = torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(1, 1)
    for shape in ((32,), (2, 32), (2, 3, 32)):
        a = torch.ones(shape, requires_grad=True)
        y = kernel.fp8_matmul(a, codes, scale, [128, 128])
        y.add_(1).sum().backward()
        assert torch.equal(a.grad, torch.full(shape, 4.0))
