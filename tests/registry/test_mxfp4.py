"""The mxfp4 reference build against its formulas, dense and in float64, by loops over rows and routes."""

import dataclasses
import inspect
import math
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_loader.bundles import mxfp4 as promises
from kernel_loader.bundles.mxfp4 import MXFP4
from tests.registry.references import BF16, F16, F32, F64, compiled, is_shipped_reference, load_reference, random

NAN = math.nan
U8, I32 = torch.uint8, torch.int32


@pytest.fixture
def mxfp4(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_reference("mxfp4", monkeypatch)


def e2m1(code: int) -> float:
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


E2M1 = torch.tensor([e2m1(code) for code in range(16)], dtype=F64)


def draw_weight(experts: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Any codes, and exponents around those of trained weights."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, n, k // 2), generator=generator).to(U8)
    return codes, torch.randint(118, 126, (experts, n, k // 32), generator=generator).to(U8)


def real(codes: Tensor, scales: Tensor) -> Tensor:
    """(E, N, K) float64."""
    values = torch.stack((E2M1[(codes % 16).long()], E2M1[(codes // 16).long()]), dim=-1).flatten(-2)
    return values * (2.0 ** (scales.to(F64) - 127)).repeat_interleave(32, -1)


def activation(h: Tensor, alpha: float, limit: float | None) -> Tensor:
    gate, linear = h[..., 0::2], h[..., 1::2]
    if limit is not None:
        gate, linear = (
            gate.minimum(torch.tensor(limit)),
            linear.minimum(torch.tensor(limit)).maximum(torch.tensor(-limit)),
        )
    return gate / (1 + torch.exp(-alpha * gate)) * (linear + 1)


class Routes:
    """A routing by hand: the experts of each row, None for one that is elsewhere."""

    def __init__(self, chosen: list[list[int | None]], experts: int) -> None:
        self.chosen, self.experts, self.k = chosen, experts, len(chosen[0]) if chosen else 1
        flat = [(expert, route) for route, expert in enumerate(e for row in chosen for e in row) if expert is not None]
        self.places = [route for _, route in sorted(flat)]
        self.of_place = [sorted(flat)[place][0] for place in range(len(flat))]
        self.count = len(chosen) * self.k

    def objects(self, mxfp4: Any, gates: Tensor | None = None) -> tuple[Any, Any, Any]:
        src = torch.full((self.count,), -1, dtype=I32)
        dst = torch.full((self.count,), -1, dtype=I32)
        for place, route in enumerate(self.places):
            src[place], dst[route] = route, place
        hist = torch.tensor([self.of_place.count(expert) for expert in range(self.experts)], dtype=I32)
        data = mxfp4.compute_expt_data(hist, self.experts, self.count)
        gates = torch.zeros(self.count) if gates is None else gates
        routing_data = mxfp4.RoutingData(gates, hist, self.experts, self.k, data)
        return routing_data, mxfp4.GatherIndx(src_indx=src, dst_indx=dst), mxfp4.ScatterIndx(dst, src)


MIXED = [[0, 2], [2, 3], [0, None], [None, None], [3, 2], [2, 0]]


def assert_near(got: Tensor, want: Tensor, size: Tensor) -> None:
    """`got` is `want` within the rounding of a float32 sum of terms of this size, and of the dtype of `got`."""
    bound = 2e-6 * size + torch.finfo(got.dtype).eps * want.abs() + torch.finfo(got.dtype).tiny
    assert got.shape == want.shape
    assert ((got.to(F64) - want).abs() <= bound).all()


def test_the_manifest_binds_the_shipped_reference(mxfp4: Any) -> None:
    assert isinstance(mxfp4, MXFP4)
    assert is_shipped_reference(mxfp4, "mxfp4")


def test_signatures_are_those_of_the_bundle(mxfp4: Any) -> None:
    hints = get_type_hints(MXFP4, vars(promises) | {"torch": torch})
    for name in ("matmul", "routing", "swiglu", "compute_expt_data", "wrap_torch_tensor", "convert_layout"):
        wanted = list(inspect.signature(hints[name].__call__).parameters.values())[1:]
        given_ = inspect.signature(getattr(mxfp4, name)).parameters.values()
        assert [(p.name, p.kind, p.default) for p in given_] == [(p.name, p.kind, p.default) for p in wanted]


# -------------------------------------------------------------------------------------------------------- product


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("n", "k"), [(1, 32), (6, 64), (33, 96), (64, 160)])
def test_gathered_products_are_those_of_the_formula(mxfp4: Any, dtype: torch.dtype, n: int, k: int) -> None:
    parts, routes = draw_weight(4, n, k), Routes(MIXED, 4)
    x, bias = random(6, k, dtype=dtype), random(4, n, dtype=F32, seed=1)
    w, config = mxfp4.weight(*parts)
    data, gather, _ = routes.objects(mxfp4)
    x[3] = NAN  # no route of it has a place
    y = mxfp4.matmul(x, w, bias, data, gather_indx=gather, precision_config=config)
    assert y.dtype == dtype
    assert y.shape == (12, n)
    weights = real(*parts)
    for place, (route, expert) in enumerate(zip(routes.places, routes.of_place, strict=True)):
        row = x[route // 2].to(F64)
        assert_near(y[place], weights[expert] @ row + bias[expert].to(F64), weights[expert].abs() @ row.abs() + 1)
    assert torch.equal(y[len(routes.places) :], torch.zeros(12 - len(routes.places), n, dtype=dtype))


@pytest.mark.parametrize("gates", [False, True])
def test_scattered_products_are_sums_over_the_routes_of_a_row(mxfp4: Any, gates: bool) -> None:
    parts, routes = draw_weight(4, 5, 64), Routes(MIXED, 4)
    h, gammas = random(12, 64, dtype=BF16), random(12, dtype=F32, seed=2)
    real_places = len(routes.places)
    h[real_places:], gammas[real_places:] = NAN, NAN
    w, config = mxfp4.weight(*parts)
    data, _, scatter = routes.objects(mxfp4)
    y = mxfp4.matmul(h, w, None, data, scatter_indx=scatter, precision_config=config, gammas=gammas if gates else None)
    weights, want, size = real(*parts), torch.zeros(6, 5, dtype=F64), torch.zeros(6, 5, dtype=F64)
    for place, (route, expert) in enumerate(zip(routes.places, routes.of_place, strict=True)):
        product = weights[expert] @ h[place].to(F64) * (gammas[place].to(F64) if gates else 1)
        want[route // 2] += product.to(BF16).to(F64)
        size[route // 2] += product.abs() + 1
    # A product on the border between two bfloat16 may be rounded to either.
    assert ((y.to(F64) - want).abs() <= 2**-8 * size).all()
    assert torch.equal(y[3], torch.zeros(5, dtype=BF16))


def test_one_route_a_row_and_rows_without_any(mxfp4: Any) -> None:
    parts, routes = draw_weight(2, 3, 32), Routes([[1], [None], [0], [1]], 2)
    x = random(4, 32, dtype=F32)
    w, config = mxfp4.weight(*parts)
    data, gather, scatter = routes.objects(mxfp4)
    y = mxfp4.matmul(x, w, None, data, gather, scatter, config)
    weights = real(*parts)
    want = torch.stack(
        [
            weights[e] @ x[t].to(F64) if e is not None else torch.zeros(3, dtype=F64)
            for t, (e,) in enumerate(routes.chosen)
        ]
    )
    assert_near(y, want, torch.ones_like(want) * 50)
    assert y[1].eq(0).all()


@pytest.mark.parametrize("limit", [None, 7.0, 0.5])
def test_fused_activation_is_made_of_the_float32_product(mxfp4: Any, limit: float | None) -> None:
    parts, routes = draw_weight(4, 6, 64), Routes(MIXED, 4)
    x, bias = random(6, 64, dtype=BF16), random(4, 6, dtype=F32, seed=1)
    w, config = mxfp4.weight(*parts)
    data, gather, _ = routes.objects(mxfp4)
    y = mxfp4.matmul(
        x, w, bias, data, gather_indx=gather, precision_config=config, fused_activation=mxfp4.fused_swiglu(1.702, limit)
    )
    assert y.shape == (12, 3)
    weights = real(*parts)
    for place, (route, expert) in enumerate(zip(routes.places, routes.of_place, strict=True)):
        product = weights[expert] @ x[route // 2].to(F64) + bias[expert].to(F64)
        torch.testing.assert_close(y[place].to(F64), activation(product, 1.702, limit), rtol=2**-8, atol=1e-4)
    assert y[len(routes.places) :].eq(0).all()


def test_an_activation_whose_zero_is_not_zero_leaves_empty_places_zero(mxfp4: Any) -> None:
    parts, routes = draw_weight(2, 4, 32), Routes([[0], [None]], 2)
    w, config = mxfp4.weight(*parts)
    data, gather, _ = routes.objects(mxfp4)
    plus_one = mxfp4.FusedActivation(mxfp4.FnSpecs("plus", lambda h, n: h + n, ("n",)), (1.0,), 1)
    x = torch.zeros(2, 32)
    y = mxfp4.matmul(x, w, None, data, gather_indx=gather, precision_config=config, fused_activation=plus_one)
    assert y.tolist() == [[1.0] * 4, [0.0] * 4]


def test_every_code_and_exponent_is_multiplied_exactly(mxfp4: Any) -> None:
    codes = torch.arange(256, dtype=I32).to(U8).view(1, 16, 16)
    scales = torch.arange(16, dtype=I32).mul(17).to(U8).view(1, 16, 1)  # 0 .. 255
    w, config = mxfp4.weight(codes, scales)
    data, _, _ = Routes([[0]] * 32, 1).objects(mxfp4)
    x = torch.eye(32)
    y = mxfp4.matmul(x, w, None, data, precision_config=config)
    want = real(codes, scales)[0].T
    assert torch.equal(y[:, :15].to(F64), want[:, :15])
    assert y[:, 15].isnan().all()


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 4, 32)])
def test_no_rows_make_no_rows(mxfp4: Any, shape: tuple[int, int, int]) -> None:
    w, config = mxfp4.weight(*draw_weight(2, 4, 32))
    data, gather, scatter = mxfp4.routing(torch.zeros(0, 2), 2)
    assert mxfp4.matmul(torch.zeros(0, 32), w, None, data, gather, precision_config=config).shape == (0, 4)
    assert mxfp4.matmul(torch.zeros(0, 32), w, None, data, None, scatter, config).shape == (0, 4)


def test_checkpoints_have_blocks_of_sixteen_bytes(mxfp4: Any) -> None:
    codes, scales = draw_weight(2, 4, 64)
    data, gather, _ = Routes([[0], [1]], 2).objects(mxfp4)
    x = random(2, 64, dtype=F32)
    got = [
        mxfp4.matmul(x, w, None, data, gather, precision_config=config)
        for w, config in (mxfp4.weight(codes, scales), mxfp4.weight(codes.unflatten(2, (2, 16)), scales))
    ]
    assert torch.equal(*got)


def test_output_dtype_and_plain_scales(mxfp4: Any) -> None:
    codes, scales = draw_weight(2, 4, 64)
    w, _ = mxfp4.weight(codes, scales)
    assert list(w.shape) == [2, 64, 4]
    data, gather, _ = Routes([[0], [1]], 2).objects(mxfp4)
    config = mxfp4.PrecisionConfig(
        weight_scale=scales.mT, out_dtype=F32, flex_ctx=mxfp4.FlexCtx(rhs_data=mxfp4.InFlexData())
    )
    y = mxfp4.matmul(random(2, 64, dtype=BF16), w, None, data, gather, precision_config=config)
    assert y.dtype == F32


def test_strides_do_not_matter(mxfp4: Any) -> None:
    w, config = mxfp4.weight(*draw_weight(2, 4, 64))
    data, gather, _ = Routes([[0], [1], [0]], 2).objects(mxfp4)
    x = random(64, 6, dtype=F32).T[::2]
    got, want = (mxfp4.matmul(t, w, None, data, gather, precision_config=config) for t in (x, x.contiguous()))
    assert torch.equal(got, want)


def test_nothing_carries_a_gradient(mxfp4: Any) -> None:
    w, config = mxfp4.weight(*draw_weight(2, 4, 32))
    data, gather, _ = mxfp4.routing(torch.zeros(2, 2, requires_grad=True), 1)
    y = mxfp4.matmul(torch.ones(2, 32, requires_grad=True), w, None, data, gather, precision_config=config)
    assert not y.requires_grad
    assert not data.gate_scal.requires_grad


# -------------------------------------------------------------------------------------------------------- routing


def assert_routing(found: tuple[Any, Any, Any], logits: Tensor, k: int, sm_first: bool) -> None:
    data, gather, scatter = found
    rows, experts = logits.shape
    chosen: list[list[int | None]] = []
    weights = []
    for row in logits.to(F64):
        best = sorted(sorted(range(experts), key=lambda e: (-row[e].item(), e))[:k])
        exps = [math.exp(row[e].item() - row.max().item()) for e in range(experts)]
        total = sum(exps) if sm_first else sum(exps[e] for e in best)
        chosen.append(list(best))
        weights += [exps[e] / total for e in best]
    routes = Routes(chosen, experts)
    assert gather.src_indx.tolist() == scatter.dst_indx.tolist() == routes.places
    places = [routes.places.index(route) for route in range(rows * k)]
    assert gather.dst_indx.tolist() == scatter.src_indx.tolist() == places
    assert data.expt_hist.tolist() == [routes.of_place.count(e) for e in range(experts)]
    assert (data.n_expts_tot, data.n_expts_act) == (experts, k)
    assert {t.dtype for t in (data.expt_hist, gather.src_indx, gather.dst_indx, scatter.src_indx)} == {I32}
    assert data.gate_scal.dtype == logits.dtype
    want = torch.tensor([weights[route] for route in routes.places], dtype=F64)
    torch.testing.assert_close(data.gate_scal.to(F64), want, rtol=4 * torch.finfo(logits.dtype).eps, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_go_to_the_experts_of_their_largest_logits(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mxfp4 = load_reference("mxfp4", patch)
        rows, experts = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 9))
        k, sm_first = data.draw(st.integers(1, experts)), data.draw(st.booleans())
        dtype = data.draw(st.sampled_from([BF16, F16, F32]))
        # Few values, so that many are equal.
        numbers = data.draw(st.lists(st.integers(-3, 3), min_size=rows * experts, max_size=rows * experts))
        logits = torch.tensor(numbers, dtype=dtype).view(rows, experts) / 2
        if sm_first and dtype != F32:
            logits = random(rows, experts, dtype=F32)  # rounding the softmax could make two equal
        assert_routing(mxfp4.routing(logits, k, sm_first), logits, k, sm_first)


# ------------------------------------------------------------------------------------------------------- activation


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("limit", [None, 7.0, 0.5])
@pytest.mark.parametrize("shape", [(4,), (5, 2), (2, 3, 258), (0, 8), (3, 0)])
def test_swiglu_is_the_formula(mxfp4: Any, dtype: torch.dtype, limit: float | None, shape: tuple[int, ...]) -> None:
    a = random(*shape, dtype=dtype, scale=4.0)
    y = mxfp4.swiglu(a, 1.702, mxfp4.SwiGLUConfig(limit))
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.to(F64), activation(a.to(F64), 1.702, limit), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )


def test_swiglu_of_places_of_no_expert_is_zero(mxfp4: Any) -> None:
    data, _, _ = Routes(MIXED, 4).objects(mxfp4)
    a = random(12, 8, dtype=F32)
    a[9:] = NAN
    y = mxfp4.swiglu(a, 1.0, mxfp4.SwiGLUConfig(limit=7.0), data)
    assert y[9:].eq(0).all()
    torch.testing.assert_close(y[:9].to(F64), activation(a[:9].to(F64), 1.0, 7.0), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- a whole layer


def layer(mxfp4: Any, x: Tensor, logits: Tensor, weights: list[Any], biases: list[Tensor]) -> Tensor:
    (w, config), (w2, config2) = weights
    data, gather, scatter = mxfp4.routing(logits, 2)
    h = mxfp4.matmul(
        x,
        w,
        biases[0],
        data,
        gather_indx=gather,
        precision_config=config,
        fused_activation=mxfp4.fused_swiglu(1.702, 7.0),
    )
    return mxfp4.matmul(h, w2, biases[1], data, scatter_indx=scatter, precision_config=config2, gammas=data.gate_scal)


def test_a_layer_of_gpt_oss_is_that_of_the_formula_and_one_graph(mxfp4: Any) -> None:
    parts = draw_weight(4, 64, 64), draw_weight(4, 64, 32, seed=1)
    biases = [random(4, 64, dtype=F32, seed=2), random(4, 64, dtype=F32, seed=3)]
    x, logits = random(7, 64, dtype=F32), random(7, 4, dtype=F32, seed=4)
    weights = [mxfp4.weight(*part) for part in parts]
    y = layer(mxfp4, x, logits, weights, biases)
    dense = real(*parts[0]), real(*parts[1])
    for t in range(7):
        top = logits[t].to(F64).topk(2)
        want = torch.zeros(64, dtype=F64)
        for gate, e in zip(torch.softmax(top.values, 0), top.indices.tolist(), strict=True):
            h = activation(dense[0][e] @ x[t].to(F64) + biases[0][e].to(F64), 1.702, 7.0)
            want += gate * (dense[1][e] @ h + biases[1][e].to(F64))
        torch.testing.assert_close(y[t].to(F64), want, rtol=1e-5, atol=1e-5)
    together = compiled(lambda x, logits: layer(mxfp4, x, logits, weights, biases))(x, logits)
    assert torch.equal(together, y)


# ------------------------------------------------------------------------------------------------- wrong arguments


def call(mxfp4: Any, **changes: Any) -> Any:
    w, config = mxfp4.weight(*draw_weight(2, 4, 64))
    data, gather, _ = Routes([[0, 1], [1, 0]], 2).objects(mxfp4)
    arguments = {"x": torch.ones(2, 64), "w": w, "bias": None, "routing_data": data, "gather_indx": gather}
    arguments |= {"precision_config": config, "scatter_indx": None}
    there = {"mxfp4": mxfp4, "config": config, "data": data, "gather": gather}
    made = {key: value(there) if callable(value) else value for key, value in changes.items()}
    return mxfp4.matmul(**(arguments | made))


def replaced(what: str, **changes: Any) -> Any:
    return lambda there: dataclasses.replace(there[what], **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.ones(2, 64, dtype=I32)}, TypeError, "^x: .*bfloat16.*int32"),
        ({"x": torch.ones(64)}, ValueError, r"^x: .*\(T, K\).*\(64,\)"),
        ({"x": torch.ones(2, 32)}, ValueError, r"^x: .*K = 64.*\(2, 32\)"),
        ({"w": torch.ones(2, 64, 4)}, TypeError, "^w: .*FP4.*float32"),
        ({"w": lambda t: t["mxfp4"].wrap_torch_tensor(torch.zeros(2, 32, 4))}, TypeError, "^w: .*FP4.*float32"),
        ({"w": lambda t: wrapped(t, torch.zeros(2, 4, 8, dtype=U8).mT)}, ValueError, "^w: .*multiple of 32, got 16"),
        ({"w": lambda t: wrapped(t, torch.zeros(4, 32, dtype=U8).mT)}, ValueError, r"^w: .*\(E, K, N\)"),
        ({"w": lambda t: wrapped(t, torch.zeros(2, 32, 4, dtype=U8))}, ValueError, "^w: .*packed along K"),
        ({"precision_config": None}, ValueError, "^precision_config: .*weight_scale, got None"),
        ({"precision_config": replaced("config", weight_scale=torch.ones(2, 2, 4))}, TypeError, "^precision.*uint8"),
        (
            {"precision_config": replaced("config", weight_scale=torch.ones(2, 4, 2, dtype=U8))},
            ValueError,
            r"^precision_config: .*\(2, 2, 4\).*\(2, 64, 4\).*\(2, 4, 2\)",
        ),
        (
            {"precision_config": lambda t: flexed(t["mxfp4"], t["config"])},
            ValueError,
            "^precision_config: .*flex_ctx",
        ),
        ({"bias": torch.ones(2, 3)}, ValueError, r"^bias: .*\(2, 4\).*\(2, 3\)"),
        ({"bias": torch.ones(2, 4, dtype=BF16)}, TypeError, "^bias: .*float32.*bfloat16"),
        ({"bias": torch.ones(2, 4, device="meta")}, ValueError, "^bias: .*cpu.*meta"),
        ({"routing_data": replaced("data", n_expts_act=0)}, ValueError, "^routing_data: .*n_expts_act.*0"),
        ({"routing_data": replaced("data", expt_hist=torch.ones(2))}, TypeError, "^routing_data: .*int32"),
        (
            {"routing_data": replaced("data", expt_hist=torch.ones(3, dtype=I32))},
            ValueError,
            r"^routing_data: .*\(2,\).*\(3,\)",
        ),
        (
            {"routing_data": replaced("data", expt_hist=torch.tensor([1, 4], dtype=I32))},
            ValueError,
            r"^routing_data: .*expt_hist\[1\] within 0 and 3.*4",
        ),
        ({"routing_data": replaced("data", expt_hist=torch.tensor([-1, 4], dtype=I32))}, ValueError, "got -1"),
        ({"gather_indx": replaced("gather", src_indx=torch.ones(4))}, TypeError, "^gather_indx: .*int32"),
        (
            {"gather_indx": replaced("gather", src_indx=torch.tensor([0, 1, 2, 4], dtype=I32))},
            ValueError,
            "^gather_indx: .*within 0 and 1.*got 1 to 2",
        ),
        (
            {"gather_indx": replaced("gather", src_indx=torch.tensor([0, -1, 2, 3], dtype=I32))},
            ValueError,
            "^gather_indx: .*got -1 to 0",
        ),
        (
            {"scatter_indx": lambda t: t["mxfp4"].ScatterIndx(torch.zeros(2, dtype=I32), None)},
            ValueError,
            r"^scatter_indx: .*\(4,\).*\(2,\)",
        ),
        ({"gammas": torch.ones(2)}, ValueError, r"^gammas: .*\(4,\).*\(2,\)"),
        ({"gammas": torch.ones(4, dtype=I32)}, TypeError, "^gammas: .*int32"),
        (
            {"gammas": torch.ones(4), "fused_activation": lambda t: t["mxfp4"].fused_swiglu(1.0, None)},
            ValueError,
            "^fused_activation: .*gammas",
        ),
    ],
)
def test_product_refuses(mxfp4: Any, changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(mxfp4, **changes)


def wrapped(there: dict[str, Any], codes: Tensor) -> Any:
    return there["mxfp4"].wrap_torch_tensor(codes, dtype=there["mxfp4"].FP4)


def flexed(mxfp4: Any, config: Any) -> Any:
    scaled = mxfp4.FlexCtx(rhs_data=mxfp4.InFlexData(dtype=F16))
    return dataclasses.replace(config, flex_ctx=scaled)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.routing(torch.ones(2, 4, dtype=I32), 1), TypeError, "^logits: .*int32"),
        (lambda m: m.routing(torch.ones(4), 1), ValueError, r"^logits: .*\(T, E\).*\(4,\)"),
        (lambda m: m.routing(torch.ones(2, 4), 5), ValueError, "^n_expts_act: .*E = 4, got 5"),
        (lambda m: m.routing(torch.ones(2, 4), 0), ValueError, "^n_expts_act: .*got 0"),
        (lambda m: m.swiglu(torch.ones(2, 4, dtype=I32), 1.0, m.SwiGLUConfig(None)), TypeError, "^a: .*int32"),
        (lambda m: m.swiglu(torch.ones(2, 3), 1.0, m.SwiGLUConfig(None)), ValueError, r"^a: .*even.*\(2, 3\)"),
        (
            lambda m: m.swiglu(torch.ones(2, 2, 4), 1.0, m.SwiGLUConfig(None), Routes(MIXED, 4).objects(m)[0]),
            ValueError,
            r"^a: .*\(R, 2 \* N\).*\(2, 2, 4\)",
        ),
        (lambda m: m.compute_expt_data(torch.ones(3), 3, 4), TypeError, "^hist: .*int32.*float32"),
        (lambda m: m.compute_expt_data(torch.ones(3, dtype=I32), 4, 4), ValueError, r"^hist: .*\(4,\).*\(3,\)"),
        (lambda m: m.wrap_torch_tensor(torch.ones(4), m.FP4), TypeError, "^dtype: .*float32"),
        (lambda m: m.wrap_torch_tensor(torch.ones(4, 4, dtype=U8)[::2, ::2], m.FP4), ValueError, "^torch_tensor: .*1"),
        (lambda m: m.convert_layout(torch.ones(4), m.StridedLayout), TypeError, "^tensor: .*wrap_torch_tensor"),
    ],
)
def test_the_rest_refuses(mxfp4: Any, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(mxfp4)


# ------------------------------------------------------------------------------------------------------- temporaries


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


def test_temporaries_of_the_op_are_bounded_whatever_the_shapes(mxfp4: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = inspect.getmodule(mxfp4.matmul)
    assert module is not None
    product = inspect.getmodule(module.experts_product)
    assert product is not None
    limit = 8 * 64**2
    monkeypatch.setattr(product, "MAX_TEMPORARY_BYTES", limit)
    parts = draw_weight(2, 300, 256)
    w, config = mxfp4.weight(*parts)
    data, gather, _ = Routes([[t % 2] for t in range(300)], 2).objects(mxfp4)
    x = random(300, 256, dtype=F32)
    codes, scale = module._weight(w, config.weight_scale)
    with Allocations() as made:
        y = product._experts_product._init_fn(x, codes, scale, None, data.expt_hist, gather.src_indx, 1)
    assert {size for size in made.sizes if size > limit} == {4 * 300 * 300}
    want = real(*parts)[0] @ x[0].to(F64)
    assert_near(y[0], want, real(*parts)[0].abs() @ x[0].to(F64).abs())
