"""The nvfp4-gemm reference build against its format, built from bit fields, and its formulas in float64."""

import dataclasses
import inspect
import math
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_loader import quantization
from kernel_loader.bundles import nvfp4 as promises
from kernel_loader.bundles.nvfp4 import NVFP4GEMM
from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    FLAGS,
    compiled,
    is_shipped_reference,
    load_reference,
    members_of,
    put_into,
    random,
)

U8, I32 = torch.uint8, torch.int32


@pytest.fixture
def nvfp4(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_reference("nvfp4_gemm", monkeypatch)


def module(bundle: Any, name: str) -> Any:
    found = inspect.getmodule(bundle.gemm)
    assert found is not None
    return found if name == "gemm" else inspect.getmodule(getattr(found, name))


# ------------------------------------------------------------------------------------------------- the format, again


def minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    bias = 2 ** (exponent_bits - 1) - 1
    fraction = code % 2**mantissa_bits / 2**mantissa_bits
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    return fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)


E2M1 = torch.tensor([minifloat(code, 2, 1) for code in range(8)], dtype=F64)
E4M3 = torch.tensor([minifloat(code, 4, 3) for code in range(127)], dtype=F64)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The nearest number of a table, ties to the even code, beyond it to its last. float64."""
    magnitude = values.to(F64).abs().clamp(max=table[-1].item())
    above = torch.bucketize(magnitude, table).clamp(min=1)
    down, up = magnitude - table[above - 1], table[above] - magnitude
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    return table[code].copysign(values.to(F64))


def quantised(x: Tensor, over_all: Tensor | None = None) -> Tensor:
    """What x becomes, float64. What is rounded to codes is float32 by definition."""
    x = x.to(F32)
    amax = (x if over_all is None else over_all.to(F32)).abs().max().clamp(min=1e-12)
    whole = torch.tensor(2688.0) / amax
    out = torch.zeros(x.shape, dtype=F64)
    for start in range(0, x.shape[1], 16):
        group = x[:, start : start + 16]
        scale = nearest(group.abs().amax(1) / torch.tensor(6.0) * whole, E4M3).unsqueeze(1)
        factor = torch.where(scale == 0, 0.0, whole / scale.to(F32))
        out[:, start : start + 16] = nearest(group * factor, E2M1) * scale / whole.to(F64)
    return out


def real(pw: Any) -> Tensor:
    """A packed weight as its attributes say it, by loops over rows and groups; float64."""
    out = torch.zeros(pw.n, pw.k, dtype=F64)
    octets = pw.sf.contiguous().view(U8).flatten()
    for row in range(pw.n):
        for group in range(pw.k // 16):
            tile, i, j = row // 128 * pw.sf.shape[1] + group // 4, row % 128 // 32, row % 32
            scale = E4M3[int(octets[512 * tile + 16 * j + 4 * i + group % 4])]
            if pw.sf_rowmajor is not None:
                assert E4M3[int(pw.sf_rowmajor[row, group])] == scale
            for k in range(16 * group, 16 * group + 16):
                code = int(pw.qweight[row, k // 2]) >> (4 * (k % 2)) & 15
                out[row, k] = (E2M1[code & 7] * scale).copysign(torch.tensor(-1.0 if code & 8 else 1.0, dtype=F64))
    return out / pw.global_scale.to(F64)


def assert_product(got: Tensor, left: Tensor, right: Tensor) -> None:
    """`got` is left @ right.T within the rounding of a float32 sum and of bfloat16."""
    want, size = left @ right.T, left.abs() @ right.abs().T
    assert got.dtype == BF16
    assert got.shape == want.shape
    assert ((got.to(F64) - want).abs() <= 2e-6 * size + 2**-8 * want.abs() + 1e-30).all()


def test_the_manifest_binds_the_shipped_reference(nvfp4: Any) -> None:
    assert isinstance(nvfp4, NVFP4GEMM)
    assert is_shipped_reference(nvfp4, "nvfp4-gemm")


def test_signatures_are_those_of_the_bundle(nvfp4: Any) -> None:
    hints = get_type_hints(NVFP4GEMM, vars(promises) | {"torch": torch, "nn": nn})
    for field in dataclasses.fields(NVFP4GEMM):
        if field.name == "layers":
            continue
        wanted = list(inspect.signature(hints[field.name].__call__).parameters.values())[1:]
        given_ = inspect.signature(getattr(nvfp4, field.name)).parameters.values()
        assert [(p.name, p.kind) for p in given_] == [(p.name, p.kind) for p in wanted]
        assert all(g.default == w.default for g, w in zip(given_, wanted, strict=True) if w.default is not ...)


# ------------------------------------------------------------------------------------------------------------- pack


@pytest.mark.parametrize(
    ("rows", "cols", "shape"), [(1, 64, (128, 1)), (6656, 19968, (6656, 312)), (130, 80, (256, 2))]
)
def test_swizzled_shapes(nvfp4: Any, rows: int, cols: int, shape: tuple[int, int]) -> None:
    assert nvfp4.swizzled_sf_shape(rows, cols) == shape


@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (5, 32), (33, 80), (130, 16)])
def test_a_packed_weight_is_what_the_formula_says(nvfp4: Any, dtype: torch.dtype, n: int, k: int) -> None:
    w = random(n, k, dtype=dtype, scale=0.02)
    pw = nvfp4.pack(w)
    assert (pw.n, pw.k, pw.swiglu) == (n, k, False)
    assert (pw.qweight.dtype, pw.qweight.shape) == (U8, (n, k // 2))
    assert (pw.sf.dtype, pw.sf.shape) == (I32, nvfp4.swizzled_sf_shape(n, k))
    assert (pw.sf_rowmajor.dtype, pw.sf_rowmajor.shape) == (U8, (n, k // 16))
    assert (pw.global_scale.dtype, pw.global_scale.shape) == (F32, (1,))
    torch.testing.assert_close(real(pw), quantised(w.to(BF16)), rtol=1e-6, atol=0)


def test_ties_go_to_the_even_code(nvfp4: Any) -> None:
    w = torch.zeros(1, 16)
    w[0, 0] = 2688.0  # so that both scales are round
    w[0, 1:8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * 448
    want = torch.tensor([6, 0, 1, 1, 2, 2, 4, 4]).to(F64) * 448
    assert torch.equal(real(nvfp4.pack(w))[0, :8], want)
    assert torch.equal(nvfp4.quantize_reference(w)[0, :8].to(F64), want)


def test_zeros_and_groups_too_small_for_a_scale_are_zeros(nvfp4: Any) -> None:
    assert real(nvfp4.pack(torch.zeros(2, 16))).eq(0).all()
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 16] = 2688.0, 2.0**-9
    assert real(nvfp4.pack(w))[0, 16:].eq(0).all()
    assert nvfp4.quantize_reference(w)[0, 16:].eq(0).all()


def test_padding_of_scales_is_zero(nvfp4: Any) -> None:
    pw = nvfp4.pack(torch.ones(1, 16))
    assert pw.sf.view(U8).ne(0).sum() == 1


def test_two_weights_are_packed_as_one(nvfp4: Any) -> None:
    gate, up = random(3, 32, dtype=F32), random(3, 32, dtype=F32, seed=1, scale=4.0)
    pw = nvfp4.pack_swiglu(gate, up)
    assert (pw.n, pw.swiglu) == (6, True)
    torch.testing.assert_close(real(pw), quantised(torch.cat([gate, up]).to(BF16)), rtol=1e-6, atol=0)


def test_a_packed_weight_moves_whole(nvfp4: Any) -> None:
    pw = nvfp4.pack(torch.ones(2, 16), swiglu=True)
    moved = pw.to("meta")
    assert {t.device.type for t in (moved.qweight, moved.sf, moved.global_scale, moved.sf_rowmajor)} == {"meta"}
    assert (moved.n, moved.k, moved.swiglu) == (2, 16, True)
    assert dataclasses.replace(pw, sf_rowmajor=None).to("meta").sf_rowmajor is None
    assert nvfp4.pack(torch.ones(2, 16), device="meta").qweight.device.type == "meta"


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_quantize_reference_is_the_formula(nvfp4: Any, dtype: torch.dtype) -> None:
    w = random(9, 48, dtype=dtype)
    got = nvfp4.quantize_reference(w)
    assert got.dtype == dtype
    torch.testing.assert_close(got.to(F64), quantised(w), rtol=torch.finfo(dtype).eps, atol=0)
    assert nvfp4.quantize_reference(torch.ones(0, 16)).shape == (0, 16)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 9), groups=st.integers(1, 4))
def test_what_the_public_quantiser_makes_is_kept(seed: int, n: int, groups: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        nvfp4 = load_reference("nvfp4_gemm", patch)
        w = quantization.dequantize_nvfp4(*quantization.quantize_nvfp4(random(n, 16 * groups, dtype=F32, seed=seed)))
        w = w * 2.0 ** round(math.log2(2688 / w.abs().max().item()))
        parts = quantization.quantize_nvfp4(w)
        packed = nvfp4.quantize_reference(w)
        torch.testing.assert_close(packed, quantization.dequantize_nvfp4(*parts), rtol=1e-5, atol=0)


def test_global_scale(nvfp4: Any) -> None:
    assert nvfp4.global_scale_for(torch.tensor([[-3.0, 2.0]])).tolist() == [896.0]
    assert nvfp4.global_scale_for(torch.zeros(1, 1)).item() == pytest.approx(2688e12)


# ------------------------------------------------------------------------------------------------------------- gemm


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", [(3,), (7,), (2, 3), (130,), (1, 1, 3)])
def test_more_than_two_rows_are_quantised_together(nvfp4: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    w, x = random(24, 80, dtype=F32, scale=0.02), random(*shape, 80, dtype=dtype)
    pw = nvfp4.pack(w)
    rows = x.reshape(-1, 80)
    y = nvfp4.gemm(pw, x)
    assert y.shape == (*shape, 24)
    assert_product(y.reshape(-1, 24), quantised(rows.to(BF16), over_all=rows), real(pw))


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2)])
def test_two_rows_or_fewer_stay_as_they_are_where_scales_are_row_by_row(nvfp4: Any, shape: tuple[int, ...]) -> None:
    w, x = random(24, 80, dtype=F32, scale=0.02), random(*shape, 80, dtype=F32)
    pw = nvfp4.pack(w)
    rows = x.reshape(-1, 80).to(BF16)
    assert_product(nvfp4.gemm(pw, x).reshape(-1, 24), rows.to(F64), real(pw))
    pw.sf_rowmajor = None
    assert_product(nvfp4.gemm(pw, x).reshape(-1, 24), quantised(rows, over_all=x.reshape(-1, 80)), real(pw))


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32)])
def test_no_rows_make_no_rows(nvfp4: Any, shape: tuple[int, ...]) -> None:
    pw = nvfp4.pack(torch.ones(16, 32))
    assert nvfp4.gemm(pw, torch.zeros(shape)).shape == (*shape[:-1], 16)
    pw.sf_rowmajor = None
    assert nvfp4.gemm(pw, torch.zeros(shape)).shape == (*shape[:-1], 16)


def test_rows_of_zeros_are_zeros(nvfp4: Any) -> None:
    pw = nvfp4.pack(random(16, 32, dtype=F32))
    assert nvfp4.gemm(pw, torch.zeros(5, 32)).eq(0).all()


def test_strides_do_not_matter_and_nothing_carries_a_gradient(nvfp4: Any) -> None:
    pw = nvfp4.pack(random(16, 32, dtype=F32).requires_grad_())
    x = random(32, 10, dtype=F32).T[::2].requires_grad_()
    y = nvfp4.gemm(pw, x)
    assert torch.equal(y, nvfp4.gemm(pw, x.contiguous()))
    assert y.is_contiguous()
    assert not y.requires_grad


@pytest.mark.parametrize("rows", [2, 5])
def test_gated_product(nvfp4: Any, rows: int) -> None:
    pw = nvfp4.pack_swiglu(random(8, 32, dtype=F32), random(8, 32, dtype=F32, seed=1))
    x = random(rows, 32, dtype=BF16)
    both = nvfp4.gemm(pw, x).to(F64)
    gate, up = both[:, :8], both[:, 8:]
    want = (gate / (1 + torch.exp(-gate))).to(BF16).to(F64) * up
    torch.testing.assert_close(nvfp4.gemm_swiglu(pw, x).to(F64), want, rtol=2**-7, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ layers


def linear(nvfp4: Any, w: Tensor) -> nn.Module:
    pw = nvfp4.pack(w)
    host = nn.Module()
    host.weight, host.weight_sf, host.weight_global_scale = pw.qweight, pw.sf, pw.global_scale
    host.out_features, host.in_features, host.weight_sf_rowmajor = pw.n, pw.k, pw.sf_rowmajor
    return put_into(host, nvfp4.layers.NVFP4Linear)


@pytest.mark.parametrize("rows", [1, 5])
def test_linear_layer_is_the_product(nvfp4: Any, rows: int) -> None:
    w, x = random(16, 32, dtype=F32), random(rows, 32, dtype=BF16)
    host = linear(nvfp4, w)
    assert torch.equal(host(x), nvfp4.gemm(nvfp4.pack(w), x))
    del host.weight_sf_rowmajor
    assert torch.equal(host(x), nvfp4.gemm(dataclasses.replace(nvfp4.pack(w), sf_rowmajor=None), x))


def mlp(nvfp4: Any, *, fused: bool) -> nn.Module:
    host = nn.Module()
    weights = [random(32, 48, dtype=F32, seed=1), random(32, 48, dtype=F32, seed=2, scale=3.0)]
    host.gate_proj, host.up_proj = (linear(nvfp4, w) for w in weights)
    host.down_proj, host.act_fn = linear(nvfp4, random(48, 32, dtype=F32, seed=3)), nn.SiLU()
    if fused:
        parts = [nvfp4.pack(w) for w in weights]
        host.nvfp4_fused_qweight = torch.cat([part.qweight for part in parts])
        host.nvfp4_fused_sf = torch.cat([part.sf_rowmajor for part in parts])
        host.nvfp4_fused_alpha = torch.cat([(1 / part.global_scale).expand(part.n) for part in parts])
    return put_into(host, nvfp4.layers.NVFP4FusedSwiGLUMLP)


@pytest.mark.parametrize("shape", [(48,), (2, 48), (1, 2, 48), (5, 48)])
@pytest.mark.parametrize("fused", [False, True])
def test_gated_mlp_is_that_of_its_projections(nvfp4: Any, shape: tuple[int, ...], fused: bool) -> None:
    host, x = mlp(nvfp4, fused=fused), random(*shape, dtype=BF16)
    gate, up = host.gate_proj(x).to(F64), host.up_proj(x).to(F64)
    down_proj, host.down_proj = host.down_proj, nn.Identity()  # which would add up what rounding leaves
    opened = host(x)
    torch.testing.assert_close(opened.to(F64), gate / (1 + torch.exp(-gate)) * up, rtol=2**-6, atol=1e-2)
    host.down_proj = down_proj
    assert torch.equal(host(x), down_proj(opened))


def test_few_rows_go_through_the_fused_weight(nvfp4: Any) -> None:
    host, x = mlp(nvfp4, fused=True), random(2, 48, dtype=BF16)
    gate, up = ((x.to(F64) @ quantised(w.to(BF16)).T) for w in weights_of_mlp())
    host.gate_proj = host.up_proj = None  # not called
    host.down_proj = nn.Identity()
    torch.testing.assert_close(host(x).to(F64), gate / (1 + torch.exp(-gate)) * up, rtol=2**-7, atol=1e-4)


def weights_of_mlp() -> list[Tensor]:
    return [random(32, 48, dtype=F32, seed=1), random(32, 48, dtype=F32, seed=2, scale=3.0)]


def test_layers_have_nothing_but_a_forward(nvfp4: Any) -> None:
    for layer in (nvfp4.layers.NVFP4Linear, nvfp4.layers.NVFP4FusedSwiGLUMLP):
        assert members_of(layer) - FLAGS == set()
        assert (layer.can_torch_compile, layer.has_backward) == (True, False)


# ------------------------------------------------------------------------------------------ compiled, and bounded


def test_layers_are_one_graph(nvfp4: Any) -> None:
    for host in (linear(nvfp4, random(16, 48, dtype=F32)), mlp(nvfp4, fused=True), mlp(nvfp4, fused=False)):
        for rows in (2, 5):
            x = random(rows, 48, dtype=BF16)
            assert torch.equal(compiled(host.forward)(x), host(x))


def test_the_op_passes_the_checks_of_torch(nvfp4: Any) -> None:
    product = module(nvfp4, "product")
    pw = nvfp4.pack(random(16, 48, dtype=F32))
    for scale in (None, torch.tensor([2.0])):
        torch.library.opcheck(
            product.ops.product.default, (random(3, 48, dtype=BF16), pw.qweight, pw.sf_rowmajor, scale)
        )


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


@pytest.mark.parametrize("scale", [None, torch.tensor([100.0])])
def test_temporaries_of_the_op_are_bounded_whatever_the_shapes(
    nvfp4: Any, monkeypatch: pytest.MonkeyPatch, scale: Tensor | None
) -> None:
    product = module(nvfp4, "product")
    limit = 8 * 64**2
    monkeypatch.setattr(product, "MAX_TEMPORARY_BYTES", limit)
    pw, x = nvfp4.pack(random(300, 160, dtype=F32)), random(200, 160, dtype=BF16)
    with Allocations() as made:
        y = product._product._init_fn(x, pw.qweight, pw.sf_rowmajor, scale)
    assert {size for size in made.sizes if size > limit} == {4 * 200 * 300}
    if scale is None:
        assert_product((y / pw.global_scale).to(BF16), x.to(F64), real(pw))


# ------------------------------------------------------------------------------------------------- wrong arguments


def test_what_cannot_be_packed_is_refused(nvfp4: Any) -> None:
    for function in (nvfp4.pack, nvfp4.quantize_reference):
        with pytest.raises(ValueError, match=r"^w: .*multiple of 16.*\(2, 17\)"):
            function(torch.ones(2, 17))
        with pytest.raises(ValueError, match=r"^w: .*\(N, K\).*\(16,\)"):
            function(torch.ones(16))
        with pytest.raises(TypeError, match="^w: .*floating-point.*int32"):
            function(torch.ones(2, 16, dtype=I32))
    with pytest.raises(ValueError, match=r"^w: .*one element.*\(0, 16\)"):
        nvfp4.pack(torch.ones(0, 16))
    with pytest.raises(TypeError, match="^w: .*int32"):
        nvfp4.global_scale_for(torch.ones(2, dtype=I32))
    with pytest.raises(ValueError, match=r"^w_up: .*\(2, 16\).*\(3, 16\)"):
        nvfp4.pack_swiglu(torch.ones(2, 16), torch.ones(3, 16))


@pytest.mark.parametrize(
    ("changes", "x", "error", "message"),
    [
        ({}, torch.ones(3, 16), ValueError, r"^x: .*K = 32.*\(3, 16\)"),
        ({}, torch.ones(()), ValueError, r"^x: .*\(\)"),
        ({}, torch.ones(3, 32, dtype=F64), TypeError, "^x: .*float64"),
        ({"qweight": torch.ones(16, 16)}, torch.ones(3, 32), TypeError, "^pw: .*qweight in torch.uint8.*float32"),
        ({"sf": torch.ones(16, 2, dtype=I32)}, torch.ones(3, 32), ValueError, r"^pw: .*sf of shape \(128, 1\)"),
        ({"global_scale": torch.ones(())}, torch.ones(3, 32), ValueError, r"^pw: .*global_scale of shape \(1,\)"),
        ({"sf_rowmajor": torch.ones(2, 16, dtype=U8)}, torch.ones(1, 32), ValueError, r"^pw: .*sf_rowmajor.*\(16, 2\)"),
        ({}, torch.ones(3, 32, device="meta"), ValueError, "^pw: .*qweight on meta.*cpu"),
    ],
)
def test_product_refuses(nvfp4: Any, changes: dict[str, Any], x: Tensor, error: type[Exception], message: str) -> None:
    pw = dataclasses.replace(nvfp4.pack(torch.ones(16, 32)), **changes)
    with pytest.raises(error, match=message):
        nvfp4.gemm(pw, x)


def test_gated_product_wants_a_weight_of_two(nvfp4: Any) -> None:
    with pytest.raises(ValueError, match=r"^pw: .*pack_swiglu"):
        nvfp4.gemm_swiglu(nvfp4.pack(torch.ones(16, 32)), torch.ones(3, 32))


def test_fused_mlp_refuses_a_wrong_width(nvfp4: Any) -> None:
    host = mlp(nvfp4, fused=True)
    with pytest.raises(ValueError, match=r"^x: .*K = 48.*\(2, 32\)"):
        host(torch.ones(2, 32))
