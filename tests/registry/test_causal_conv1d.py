"""The causal-conv1d reference against the sum of its definition, one number at a time, in float64."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_loader.bundles.causal_conv1d import CausalConv1d, Convolution, StateUpdate, VariableLengthStates
from tests.registry.references import (
    BF16,
    F16,
    F32,
    F64,
    assert_near,
    compiled,
    is_shipped_reference,
    load_reference,
    random,
)

B, D = 2, 3
NAN = float("nan")


@pytest.fixture
def conv(cpu_machine, monkeypatch):
    return load_reference("causal_conv1d", monkeypatch)


def silu(x: Tensor) -> Tensor:
    return x / 2 * (1 + torch.tanh(x / 2))


def convolved(history: Tensor, weight: Tensor, bias: Tensor | None, length: int, act: str | None) -> Tensor:
    """The last `length` outputs (B, D, length) for inputs that start with at least W - 1 older ones."""
    history, weight = history.to(F64), weight.to(F64)
    width, first = weight.shape[1], history.shape[2] - length
    out = torch.zeros(*history.shape[:2], length, dtype=F64)
    for t in range(length):
        for w in range(width):
            out[:, :, t] += weight[:, w] * history[:, :, first + t - (width - 1) + w]
    out = out if bias is None else out + bias.to(F64)[:, None]
    return out if act is None else silu(out)


def padded(x: Tensor, width: int) -> Tensor:
    return torch.cat([torch.zeros(*x.shape[:2], width - 1, dtype=x.dtype), x], dim=2)


# ---------------------------------------------------------------------------------------------------------- loading


def parameters(function: Any) -> str:
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return " ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in found)


# Parameters of kernels-community/causal-conv1d, version 1, with their defaults.
FN = (
    "x weight bias=None seq_idx=None initial_states=None return_final_states=False final_states_out=None"
    " activation=None"
)
UPDATE = "x conv_state weight bias=None activation=None cache_seqlens=None conv_state_indices=None"


def test_the_kernel_loads_as_its_reference_with_the_published_parameters(conv):
    assert is_shipped_reference(conv, "causal-conv1d")
    assert isinstance(conv, CausalConv1d)
    assert parameters(conv.causal_conv1d_fn) == parameters(Convolution.__call__) == FN
    assert parameters(conv.causal_conv1d_update) == parameters(StateUpdate.__call__) == UPDATE
    states = parameters(conv.causal_conv1d_varlen_states)
    assert states == parameters(VariableLengthStates.__call__) == "x cu_seqlens state_len"


# --------------------------------------------------------------------------------------------------- whole sequences


@pytest.mark.parametrize("length", [0, 1, 3, 4, 9])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("act", [None, "silu", "swish"])
def test_each_output_is_the_sum_over_the_filter(conv, length, width, act):
    x, weight, bias = random(B, D, length), random(D, width, seed=1), random(D, seed=2)
    y = conv.causal_conv1d_fn(x, weight, bias, activation=act)
    assert_near(y, convolved(padded(x, width), weight, bias, length, act), atol=1e-14)
    y = conv.causal_conv1d_fn(x, weight, activation=act)
    assert_near(y, convolved(padded(x, width), weight, None, length, act), atol=1e-14)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("weight_dtype", [F32, BF16])
def test_it_is_computed_in_float32_and_rounded_once(conv, dtype, weight_dtype):
    x, weight, bias = random(B, D, 9, dtype=dtype), random(D, 4, dtype=weight_dtype, seed=1), random(D, dtype=F32)
    y = conv.causal_conv1d_fn(x, weight, bias, activation="silu")
    assert y.dtype == dtype
    assert_near(y, convolved(padded(x, 4), weight, bias, 9, "silu"), ulps=1, atol=2e-6)


def test_what_was_seen_before_comes_first_and_what_was_seen_last_is_kept(conv):
    x, weight, past = random(B, D, 9), random(D, 4, seed=1), random(B, D, 3, seed=2)
    whole = conv.causal_conv1d_fn(x, weight, initial_states=past, activation="silu")
    assert_near(whole, convolved(torch.cat([past, x], 2), weight, None, 9, "silu"), atol=1e-14)
    pieces, state = [], past
    for piece in x.split([1, 2, 0, 6], dim=2):
        y, state = conv.causal_conv1d_fn(
            piece, weight, initial_states=state, return_final_states=True, activation="silu"
        )
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 2), whole)
    assert torch.equal(state, x[..., -3:])


def test_final_states_have_zeros_in_front_of_a_short_sequence(conv):
    x = random(B, D, 2, dtype=BF16)
    _, state = conv.causal_conv1d_fn(x, random(D, 4, dtype=BF16), return_final_states=True)
    assert torch.equal(state, padded(x, 2))


def test_final_states_are_written_into_what_is_given(conv):
    x, out = random(B, D, 5), random(B, 3, D).transpose(1, 2)
    _, state = conv.causal_conv1d_fn(x, random(D, 4, seed=1), return_final_states=True, final_states_out=out)
    assert state is out
    assert torch.equal(out, x[..., -3:])
    untouched = out.clone()
    conv.causal_conv1d_fn(random(B, D, 5, seed=3), random(D, 4, seed=1), final_states_out=out)
    assert torch.equal(out, untouched)


def test_sequences_of_a_row_do_not_see_each_other(conv):
    x, weight, bias = random(1, D, 9).requires_grad_(), random(D, 4, seed=1), random(D, seed=2)
    with torch.no_grad():
        x[..., 4:6] = NAN
    seq_idx = torch.tensor([[7, 7, 7, 7, 2, 2, 5, 5, 5]], dtype=torch.int32)
    y = conv.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu")
    alone = [conv.causal_conv1d_fn(piece, weight, bias, activation="silu") for piece in x.split([4, 2, 3], dim=2)]
    torch.testing.assert_close(y, torch.cat(alone, 2), equal_nan=True)
    outside = torch.cat([y[..., :4], y[..., 6:]], 2)
    assert outside.isfinite().all()
    (to_x,) = torch.autograd.grad(outside.sum(), x)
    assert torch.cat([to_x[..., :4], to_x[..., 6:]], 2).isfinite().all()


def test_everything_has_a_gradient(conv):
    leaves = [random(B, D, 4), random(D, 3, seed=1), random(D, seed=2), random(B, D, 2, seed=3)]

    def run(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor) -> Any:
        return conv.causal_conv1d_fn(x, weight, bias, initial_states=past, return_final_states=True, activation="silu")

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


# ------------------------------------------------------------------------------------------------------ step by step


@pytest.mark.parametrize("steps", [None, 1, 2, 7])
@pytest.mark.parametrize("room", [3, 5])
def test_an_update_goes_on_from_the_state(conv, steps, room):
    x = random(B, D) if steps is None else random(B, D, steps)
    state, weight, bias = random(B, D, room, seed=1), random(D, 4, seed=2), random(D, seed=3)
    history = torch.cat([state, x.reshape(B, D, -1)], 2)
    y = conv.causal_conv1d_update(x, state, weight, bias, "silu")
    assert_near(y, convolved(history, weight, bias, steps or 1, "silu").reshape(x.shape), atol=1e-14)
    assert torch.equal(state, history[..., -room:])


@pytest.mark.parametrize("room", [3, 5])
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_circular_state_keeps_step_s_at_s_modulo_its_size(conv, room, steps):
    before, x = random(1, D, 11), random(1, D, steps, seed=1)
    weight = random(D, 4, seed=2)
    state = torch.zeros(1, D, room, dtype=F64)
    for s in range(11):
        state[:, :, s % room] = before[:, :, s]
    y = conv.causal_conv1d_update(x, state, weight, cache_seqlens=torch.tensor([11], dtype=torch.int32))
    history = torch.cat([before, x], 2)
    assert_near(y, convolved(history, weight, None, steps, None), atol=1e-14)
    for s in range(11 + steps - room, 11 + steps):
        assert torch.equal(state[:, :, s % room], history[:, :, s])


@pytest.mark.parametrize("circular", [False, True])
def test_rows_of_a_larger_state_are_written_and_others_left_alone(conv, circular):
    x, state, weight = random(B, D, dtype=BF16), random(5, D, 4, dtype=BF16, seed=1), random(D, 4, dtype=BF16)
    rows, counts = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([2, 5]) if circular else None
    own, kept = state[rows.long()].clone(), state.clone()
    expected = conv.causal_conv1d_update(x, own, weight, None, "silu", counts)
    y = conv.causal_conv1d_update(x, state, weight, None, "silu", counts, rows)
    assert torch.equal(y, expected)
    assert torch.equal(state[rows.long()], own)
    assert torch.equal(state[[0, 2, 4]], kept[[0, 2, 4]])


def test_an_update_is_not_differentiable(conv):
    x, state = random(B, D).requires_grad_(), random(B, D, 3, seed=1)
    assert not conv.causal_conv1d_update(x, state, random(D, 4, seed=2).requires_grad_()).requires_grad
    assert not state.requires_grad


def test_packed_sequences_leave_their_last_inputs(conv):
    x, bounds = random(6, D), torch.tensor([0, 0, 4, 5, 6, 6])
    states = conv.causal_conv1d_varlen_states(x, bounds, 2)
    zero = torch.zeros(D, dtype=F64)
    expected = [[zero, zero], [x[2], x[3]], [zero, x[4]], [zero, x[5]], [zero, zero]]
    assert torch.equal(states, torch.stack([torch.stack(columns, 1) for columns in expected]))
    assert conv.causal_conv1d_varlen_states(x, bounds, 0).shape == (5, D, 0)
    empty = conv.causal_conv1d_varlen_states(x[:0], torch.tensor([0, 0]), 2)
    assert torch.equal(empty, torch.zeros(1, D, 2, dtype=F64))


def test_each_entrypoint_compiles_into_one_graph(conv):
    x, weight = random(B, D, 5), random(D, 4, seed=1)
    bounds, rows, counts = torch.tensor([0, 3, 5]), torch.tensor([2, 0]), torch.tensor([4, 7])

    def step(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        y, last = conv.causal_conv1d_fn(x * 2, weight, return_final_states=True, activation="silu")
        z = conv.causal_conv1d_update(x[..., 0], state, weight, None, "silu", counts, rows)
        return y, last, z, conv.causal_conv1d_varlen_states(x[0].T, bounds, 2)

    results = []
    for function in (step, compiled(step)):
        leaves, state = [x.clone().requires_grad_(), weight.clone().requires_grad_()], random(3, D, 4, seed=2)
        found = function(*leaves, state)
        gradients = torch.autograd.grad(found[0].square().sum() + found[1].sum(), leaves)
        results.append([*(part.detach() for part in found), state, *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------------------------- errors

GOOD = {"x": torch.ones(2, 3, 5), "weight": torch.ones(3, 4), "bias": torch.ones(3)}
NEXT = {"x": torch.ones(2, 3), "conv_state": torch.ones(2, 3, 3), "weight": torch.ones(3, 4)}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2, 3, 5).int()}, TypeError, "^x: .*bfloat16.*int32"),
        ({"x": torch.ones(2, 3)}, ValueError, r"^x: .*\(B, D, L\).*\(2, 3\)"),
        ({"weight": torch.ones(4, 4)}, ValueError, r"^weight: .*\(3, 4\).*\(4, 4\)"),
        ({"weight": torch.ones(3, 0)}, ValueError, r"^weight: .*\(3, 0\)"),
        ({"weight": torch.ones(3, 1, 4)}, ValueError, r"^weight: .*\(D, W\).*\(3, 1, 4\)"),
        ({"bias": torch.ones(2)}, ValueError, r"^bias: .*\(3,\).*\(2,\)"),
        ({"bias": torch.ones(3, device="meta")}, ValueError, "^bias: .*cpu.*meta"),
        ({"activation": "gelu"}, ValueError, "^activation: .*'silu'.*'gelu'"),
        ({"seq_idx": torch.ones(2, 5)}, TypeError, "^seq_idx: .*int32.*float32"),
        ({"seq_idx": torch.ones(2, 4).int()}, ValueError, r"^seq_idx: .*\(2, 5\).*\(2, 4\)"),
        ({"seq_idx": torch.ones(2, 5).int(), "return_final_states": True}, ValueError, "^seq_idx: .*None"),
        ({"initial_states": torch.ones(2, 3, 4)}, ValueError, r"^initial_states: .*\(2, 3, 3\).*\(2, 3, 4\)"),
        ({"initial_states": torch.ones(2, 3, 3).double()}, TypeError, "^initial_states: .*float32.*float64"),
        ({"final_states_out": torch.ones(3, 3)}, ValueError, r"^final_states_out: .*\(2, 3, 3\)"),
    ],
)
def test_a_convolution_refuses(conv, change, error, message):
    with pytest.raises(error, match=message):
        conv.causal_conv1d_fn(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(2)}, ValueError, r"^x: .*\(B, D, L\).*\(2,\)"),
        ({"conv_state": torch.ones(2, 3, 2)}, ValueError, r"^conv_state: .*3 steps.*\(2, 3, 2\)"),
        ({"conv_state": torch.ones(3, 3, 3)}, ValueError, r"^conv_state: .*\(2, 3, 3\).*\(3, 3, 3\)"),
        ({"conv_state": torch.ones(2, 3, 3).bfloat16()}, TypeError, "^conv_state: .*float32.*bfloat16"),
        ({"cache_seqlens": torch.ones(3).int()}, ValueError, r"^cache_seqlens: .*\(2,\).*\(3,\)"),
        ({"conv_state_indices": torch.ones(2)}, TypeError, "^conv_state_indices: .*int32.*float32"),
        ({"activation": True}, ValueError, "^activation: .*True"),
    ],
)
def test_an_update_refuses(conv, change, error, message):
    with pytest.raises(error, match=message):
        conv.causal_conv1d_update(**(NEXT | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.ones(6)}, ValueError, r"^x: .*\(T, D\).*\(6,\)"),
        ({"cu_seqlens": torch.ones(1, 2).int()}, ValueError, r"^cu_seqlens: .*\(B \+ 1,\).*\(1, 2\)"),
        ({"cu_seqlens": torch.ones(2)}, TypeError, "^cu_seqlens: .*int32.*float32"),
        ({"state_len": -1}, ValueError, "^state_len: .*-1"),
    ],
)
def test_states_of_packed_sequences_refuse(conv, change, error, message):
    good = {"x": torch.ones(6, 3), "cu_seqlens": torch.tensor([0, 6]), "state_len": 2}
    with pytest.raises(error, match=message):
        conv.causal_conv1d_varlen_states(**(good | change))


@pytest.mark.parametrize("row", [-1, 4])
def test_an_update_of_a_row_that_is_not_there_is_refused(conv, row):
    state = random(4, 3, 5)
    rows = torch.tensor([0, row], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^conv_state_indices: expected rows of 4, got \[0, "):
        conv.causal_conv1d_update(random(2, 3), state, random(3, 4), conv_state_indices=rows)
    assert torch.equal(state, random(4, 3, 5))
