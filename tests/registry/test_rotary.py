"""The rotary reference against multiplication by complex numbers in complex128."""

import dataclasses
import inspect
import itertools

import pytest
import torch
from torch import Tensor

from tests.registry.references import (
    BF16,
    DTYPES,
    F32,
    F64,
    FLAGS,
    assert_near,
    compiled,
    is_shipped_reference,
    layers_of,
    load_reference,
    members_of,
    random,
)

SHAPES = [(0, 4), (1, 1), (5,), (3, 7), (2, 3, 4, 8), (2, 0)]


def turned(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """The pairs as complex numbers times cos + i sin, or times its conjugate."""
    turn = torch.complex(cos.to(F64), sin.to(F64))
    product = torch.complex(x1.to(F64), x2.to(F64)) * (turn.conj() if back else turn)
    return product.real, product.imag


def angles(batch: int, sequence: int, width: int) -> Tensor:
    """Angles of positions and frequencies, (batch, sequence, width)."""
    positions = torch.arange(sequence, dtype=F64) + 3 * torch.arange(batch, dtype=F64).unsqueeze(1)
    return positions.unsqueeze(-1) * 100.0 ** -torch.linspace(0, 1, max(width, 1), dtype=F64)[:width]


def heads_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(batch, heads, sequence, D) turned by tables (batch, sequence, D / 2)."""
    half = x.shape[-1] // 2
    pairs = turned(x[..., :half], x[..., half:], cos.unsqueeze(1), sin.unsqueeze(1))
    return torch.cat(pairs, dim=-1)


@pytest.fixture
def rotary(cpu_machine, monkeypatch):
    return load_reference("rotary", monkeypatch)


@pytest.fixture(params=["function", "layer"])
def transformers(rotary, request):
    """Both forms of `apply_rotary_transformers`."""
    return (
        rotary.apply_rotary_transformers if request.param == "function" else rotary.layers.apply_rotary_transformers()
    )


def test_the_kernel_loads_as_its_reference(rotary):
    assert is_shipped_reference(rotary, "rotary")
    assert {field.name for field in dataclasses.fields(type(rotary))} == {
        "layers",
        "apply_rotary",
        "apply_rotary_transformers",
    }


def test_the_layer_is_a_forward_without_a_state(rotary):
    layer = rotary.layers.apply_rotary_transformers
    assert layers_of(rotary.layers) == {"apply_rotary_transformers": layer}
    assert members_of(layer) == FLAGS
    assert layer.can_torch_compile
    assert layer.has_backward


def test_function_and_layer_have_the_published_parameters(rotary):
    function = inspect.signature(rotary.apply_rotary_transformers)
    layer = inspect.signature(rotary.layers.apply_rotary_transformers.forward)
    assert list(function.parameters) == ["q", "k", "cos", "sin", "unsqueeze_dim"]
    assert list(layer.parameters) == ["self", *function.parameters]
    assert function.parameters["unsqueeze_dim"].default == layer.parameters["unsqueeze_dim"].default == 1
    in_place = inspect.signature(rotary.apply_rotary).parameters
    assert list(in_place) == ["x1", "x2", "cos", "sin", "out1", "out2", "conj"]
    assert rotary.apply_rotary_transformers.can_torch_compile


# ----------------------------------------------------------------------------------------------------- apply_rotary


@pytest.mark.parametrize("conj", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_are_turned_into_the_outputs(rotary, shape, dtype, conj):
    x1, x2, cos, sin = (random(*shape, dtype=dtype, seed=seed) for seed in range(4))
    out1, out2 = torch.full_like(x1, torch.nan), torch.full_like(x2, torch.nan)
    assert rotary.apply_rotary(x1, x2, cos, sin, out1, out2, conj) is None
    for out, expected in zip((out1, out2), turned(x1, x2, cos, sin, back=conj), strict=True):
        assert out.dtype == dtype
        # The two products may cancel, so that an error is in proportion to them and not to their sum.
        assert_near(out, expected, ulps=1, atol=16 * torch.finfo(F64 if dtype == F64 else F32).eps)


def test_tables_are_broadcast(rotary):
    x1, x2 = random(2, 3, 4, 5), random(2, 3, 4, 5, seed=1)
    cos, sin = random(2, 1, 4, 5, seed=2), random(2, 1, 4, 5, seed=3)
    out1, out2 = torch.empty_like(x1), torch.empty_like(x2)
    rotary.apply_rotary(x1, x2, cos, sin, out1, out2, False)
    expected = turned(x1, x2, cos, sin)
    assert_near(out1, expected[0], atol=1e-14)
    assert_near(out2, expected[1], atol=1e-14)


def test_halves_of_a_tensor_are_turned_in_place(rotary):
    x = random(3, 8)
    before, table = x.clone(), angles(1, 3, 4)[0]
    rotary.apply_rotary(x[:, :4], x[:, 4:], table.cos(), table.sin(), x[:, :4], x[:, 4:], False)
    assert_near(x, torch.cat(turned(before[:, :4], before[:, 4:], table.cos(), table.sin()), -1), atol=1e-14)


def test_conj_undoes_a_turn(rotary):
    x1, x2, table = random(3, 4), random(3, 4, seed=1), angles(1, 3, 4)[0]
    y1, y2 = x1.clone(), x2.clone()
    rotary.apply_rotary(y1, y2, table.cos(), table.sin(), y1, y2, False)
    assert not torch.allclose(y1, x1)
    rotary.apply_rotary(y1, y2, table.cos(), table.sin(), y1, y2, True)
    assert_near(y1, x1, atol=1e-14)
    assert_near(y2, x2, atol=1e-14)


def test_what_is_written_has_a_gradient(rotary):
    def run(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        out1, out2 = torch.empty_like(x1), torch.empty_like(x2)
        rotary.apply_rotary(x1, x2, cos, sin, out1, out2, True)
        return out1, out2

    assert torch.autograd.gradcheck(run, [random(2, 3, seed=seed).requires_grad_() for seed in range(4)])


@pytest.mark.parametrize("argument", ["x2", "out1", "out2"])
def test_a_tensor_of_another_shape_or_dtype_is_refused(rotary, argument):
    arguments = {name: random(1, 4, dtype=F32) for name in ("x1", "x2", "cos", "sin", "out1", "out2")}
    with pytest.raises(ValueError, match=rf"{argument}: expected shape \(1, 4\), which x1 has, got \(3, 4\)"):
        rotary.apply_rotary(**arguments | {argument: torch.empty(3, 4)}, conj=False)
    with pytest.raises(TypeError, match=rf"{argument}: expected torch\.float32, which x1 has, got torch\.bfloat16"):
        rotary.apply_rotary(**arguments | {argument: torch.empty(1, 4, dtype=BF16)}, conj=False)


def test_tables_larger_than_the_pairs_are_refused_before_anything_is_written(rotary):
    x1, x2, table = random(1, 4), random(1, 4, seed=1), random(3, 4, seed=2)
    out1, out2 = torch.zeros_like(x1), torch.zeros_like(x2)
    with pytest.raises(ValueError, match=r"cos: expected to broadcast to \(1, 4\), which x1 has, got \(3, 4\)"):
        rotary.apply_rotary(x1, x2, table, table, out1, out2, False)
    assert not out1.any()
    assert not out2.any()


# ---------------------------------------------------------------------------------------- apply_rotary_transformers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "sequence", "width"),
    [(2, 4, 2, 5, 8), (1, 1, 1, 1, 2), (1, 3, 1, 7, 6), (0, 2, 1, 3, 4), (2, 2, 2, 0, 4), (1, 1, 1, 1, 0)],
)
def test_queries_and_keys_are_turned_by_their_positions(transformers, batch, heads, key_heads, sequence, width, dtype):
    q = random(batch, heads, sequence, width, dtype=dtype)
    k = random(batch, key_heads, sequence, width, dtype=dtype, seed=1)
    table = angles(batch, sequence, width // 2)
    cos, sin = table.cos().to(dtype), table.sin().to(dtype)
    results = transformers(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for x, result in zip((q, k), results, strict=True):
        assert result.dtype == dtype
        assert_near(result, heads_turned(x, cos, sin), ulps=1, atol=16 * torch.finfo(F64 if dtype == F64 else F32).eps)


def test_tables_of_half_a_head_serve_both_halves(transformers):
    q, k, table = random(2, 4, 5, 8), random(2, 2, 5, 8, seed=1), angles(2, 5, 4)
    full = torch.cat((table, table), -1)
    for half, whole in zip(
        transformers(q, k, table.cos(), table.sin()), transformers(q, k, full.cos(), full.sin()), strict=True
    ):
        assert torch.equal(half, whole)


def test_each_column_of_the_tables_is_that_of_its_own_element(transformers):
    x = random(1, 1, 2, 6)
    cos, sin = random(1, 2, 6, seed=1), random(1, 2, 6, seed=2)
    expected = torch.empty_like(x)
    for row, column in itertools.product(range(2), range(6)):
        other = -x[0, 0, row, column + 3] if column < 3 else x[0, 0, row, column - 3]
        expected[0, 0, row, column] = x[0, 0, row, column] * cos[0, row, column] + other * sin[0, row, column]
    for result in transformers(x, x, cos, sin):
        assert_near(result, expected, atol=1e-14)


def test_heads_may_come_after_the_sequence(transformers):
    q, k, table = random(2, 5, 4, 8), random(2, 5, 2, 8, seed=1), angles(2, 5, 4)
    results = transformers(q, k, table.cos(), table.sin(), unsqueeze_dim=2)
    for x, result in zip((q, k), results, strict=True):
        assert_near(result.transpose(1, 2), heads_turned(x.transpose(1, 2), table.cos(), table.sin()), atol=1e-14)


def test_wider_tables_leave_the_dtype_of_queries_and_keys(transformers):
    q, k, table = random(1, 2, 3, 4, dtype=BF16), random(1, 2, 3, 4, dtype=BF16, seed=1), angles(1, 3, 2).to(F32)
    for x, result in zip((q, k), transformers(q, k, table.cos(), table.sin()), strict=True):
        assert result.dtype == BF16
        assert_near(result, heads_turned(x, table.cos(), table.sin()), ulps=1, atol=1e-6)


def test_the_inputs_are_left_as_they_were(transformers):
    q, k, table = random(1, 2, 3, 4), random(1, 2, 3, 4, seed=1), angles(1, 3, 2)
    before = q.clone(), k.clone()
    transformers(q, k, table.cos(), table.sin())
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_queries_and_keys_have_a_gradient(transformers):
    table = angles(2, 3, 2)
    cos, sin = table.cos().requires_grad_(), table.sin().requires_grad_()
    q, k = random(2, 2, 3, 4).requires_grad_(), random(2, 1, 3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(transformers, (q, k, cos, sin))


def test_queries_and_keys_compile_to_one_graph(transformers):
    q, k, table = random(1, 2, 3, 4, dtype=F32).requires_grad_(), random(1, 2, 3, 4, dtype=F32, seed=1), angles(1, 3, 2)
    cos, sin = table.cos().to(F32), table.sin().to(F32)
    turned_q, turned_k = compiled(transformers)(q, k, cos, sin)
    assert_near(turned_q, heads_turned(q, cos, sin), atol=1e-6)
    assert_near(turned_k, heads_turned(k, cos, sin), atol=1e-6)
    upstream = random(1, 2, 3, 4, dtype=F32, seed=2)
    (to_q,) = torch.autograd.grad(turned_q, q, upstream)
    assert_near(to_q, heads_turned(upstream, cos, -sin), atol=1e-6)  # a turn back: the transpose of a rotation


def test_apply_rotary_compiles_to_one_graph(rotary):
    x1, x2, table = random(3, 4, dtype=F32), random(3, 4, dtype=F32, seed=1), angles(1, 3, 4)[0].to(F32)
    out1, out2 = torch.empty_like(x1), torch.empty_like(x2)
    compiled(rotary.apply_rotary)(x1, x2, table.cos(), table.sin(), out1, out2, True)
    expected = turned(x1, x2, table.cos(), table.sin(), back=True)
    assert_near(out1, expected[0], atol=1e-6)
    assert_near(out2, expected[1], atol=1e-6)


def test_an_odd_head_is_refused(transformers):
    x = random(1, 1, 2, 5)
    with pytest.raises(ValueError, match=r"q: expected shape \(\.\.\., D\) with D even, got \(1, 1, 2, 5\)"):
        transformers(x, x, random(1, 2, 5), random(1, 2, 5))


def test_tables_of_another_width_are_refused(transformers):
    x = random(1, 1, 2, 8)
    with pytest.raises(ValueError, match="sin: expected last dimension 8 or 4, got 1"):
        transformers(x, x, random(1, 2, 8), random(1, 2, 1))


def test_whole_numbers_are_refused(rotary):
    q, table = torch.ones(1, 1, 2, 4, dtype=torch.int64), torch.ones(1, 2, 4)
    with pytest.raises(TypeError, match="q: expected a tensor of floats"):
        rotary.apply_rotary_transformers(q, q.float(), table, table)
    with pytest.raises(TypeError, match="k: expected a tensor of floats"):
        rotary.apply_rotary_transformers(q.float(), q, table, table)
    with pytest.raises(TypeError, match="x1: expected a tensor of floats"):
        rotary.apply_rotary(q, q, table, table, q, q, False)
