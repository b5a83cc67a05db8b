"""The mamba-ssm reference against the recurrence, one state at a time, in float64."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_loader.bundles.mamba_ssm import ChunkScan, MambaSSM, SelectiveScan, SelectiveStateUpdate
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

NAN = math.nan


@pytest.fixture
def mamba(cpu_machine, monkeypatch):
    return load_reference("mamba_ssm", monkeypatch)


# ---------------------------------------------------------------------------------------------------------- formula


def softplus(x: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(x.to(F64)))


def silu(x: Tensor) -> Tensor:
    return x.to(F64) * (1 + torch.tanh(x.to(F64) / 2)) / 2


def followed(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One channel: u, dt (l,), A (n,), B, C (n, l), state (n,)."""
    out = []
    for t in range(len(u)):
        state = torch.exp(dt[t] * A) * state + dt[t] * u[t] * B[:, t]
        out.append(C[:, t] @ state)
    return torch.stack(out) if out else u, state


def scanned(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Any:
    """u, dt (b, d, l), A (d, n), B, C (b, g, n, l), state (b, d, n)."""
    u, dt, A, B, C = (x.to(F64) for x in (u, dt, A, B, C))
    (batch, channels, _), group = u.shape, u.shape[1] // B.shape[1]
    state = torch.zeros(batch, *A.shape, dtype=F64) if state is None else state.to(F64)
    found = [
        [followed(u[b, d], dt[b, d], A[d], B[b, d // group], C[b, d // group], state[b, d]) for d in range(channels)]
        for b in range(batch)
    ]
    return tuple(torch.stack([torch.stack([pair[i] for pair in row]) for row in found]) for i in range(2))


def drawn(b: int = 2, d: int = 4, length: int = 5, n: int = 3, g: int = 2, dtype: torch.dtype = F64) -> list[Tensor]:
    """[u, delta, A, B, C]."""
    wide = F64 if dtype == F64 else F32
    return [
        random(b, d, length, dtype=dtype),
        random(b, d, length, dtype=dtype, seed=1).abs(),
        -random(d, n, dtype=wide, seed=2).abs(),
        random(b, g, n, length, dtype=dtype, seed=3),
        random(b, g, n, length, dtype=dtype, seed=4),
    ]


# ---------------------------------------------------------------------------------------------------------- loading


def parameters(function: Any) -> str:
    found = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    shown = {p.name: "..." if p.name == "dt_limit" else p.default for p in found}
    return " ".join(p.name if p.default is p.empty else f"{p.name}={shown[p.name]}" for p in found)


# Parameters of kernels-community/mamba-ssm, version 2, with their defaults.
SCAN = "u delta A B C D=None z=None delta_bias=None delta_softplus=False return_last_state=False"
STEP = "state x dt A B C D=None z=None dt_bias=None dt_softplus=False state_batch_indices=None"
CHUNKS = (
    "x dt A B C chunk_size D=None z=None dt_bias=None initial_states=None seq_idx=None cu_seqlens=None"
    " dt_softplus=False dt_limit=... return_final_states=False return_varlen_states=False"
)


def test_the_kernel_loads_as_its_reference_with_the_published_parameters(mamba):
    assert is_shipped_reference(mamba, "mamba-ssm")
    assert isinstance(mamba, MambaSSM)
    assert parameters(mamba.selective_scan_fn) == parameters(SelectiveScan.__call__) == SCAN
    assert parameters(mamba.selective_state_update) == parameters(SelectiveStateUpdate.__call__) == STEP
    assert parameters(mamba.mamba_chunk_scan_combined) == parameters(ChunkScan.__call__) == CHUNKS


# ------------------------------------------------------------------------------------------------------------ Mamba


@pytest.mark.parametrize("length", [0, 1, 5, 63, 64, 65, 130])
def test_the_scan_is_the_recurrence_whatever_is_worked_on_at_a_time(mamba, length):
    given = drawn(1, 2, length, 2, 1)
    y, last = mamba.selective_scan_fn(*given, return_last_state=True)
    for got, want in zip((y, last), scanned(*given), strict=True):
        assert_near(got, want, ulps=256, atol=1e-12)


@pytest.mark.parametrize("form", ["fixed", "one", "groups"])
@pytest.mark.parametrize("other", ["fixed", "groups"])
def test_what_is_put_in_and_read_out_has_three_forms(mamba, form, other):
    u, delta, A, B, C = drawn()
    forms = {
        "fixed": (lambda x: A * x.mean(), lambda x: (A * x.mean())[None, :, :, None].expand(2, -1, -1, 5)),
        "one": (lambda x: x[:, 0], lambda x: x[:, :1]),
        "groups": (lambda x: x, lambda x: x),
    }
    y = mamba.selective_scan_fn(u, delta, A, forms[form][0](B), forms[other][0](C))
    parts = [part if part.shape[1] == 4 else part.repeat_interleave(4 // part.shape[1], 1)
             for part in (forms[form][1](B), forms[other][1](C))]  # fmt: skip
    assert_near(y, scanned(u, delta, A, *parts)[0], ulps=64, atol=1e-13)


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
def test_bias_softplus_skip_and_gate_come_in_their_places(mamba, dtype):
    u, delta, A, B, C = drawn(dtype=dtype)
    D, bias, z = random(4, dtype=A.dtype, seed=5), random(4, dtype=A.dtype, seed=6), random(2, 4, 5, dtype=dtype)
    y, last = mamba.selective_scan_fn(u, delta, A, B, C, D, z, bias, delta_softplus=True, return_last_state=True)
    right, state = scanned(u, softplus(delta.to(F64) + bias.to(F64)[:, None]), A, B, C)
    right = (right + D.to(F64)[:, None] * u.to(F64)) * silu(z)
    assert y.dtype == dtype
    assert last.dtype == A.dtype
    assert_near(y, right, ulps=64 if dtype == F64 else 1, atol=1e-13 if dtype == F64 else 1e-5)
    assert_near(last, state, ulps=64, atol=1e-13 if dtype == F64 else 1e-6)


@pytest.mark.parametrize("forms", ["groups", "fixed"])
def test_every_argument_of_the_scan_has_a_gradient(mamba, forms):
    u, delta, A, B, C = drawn(2, 2, 3, 2, 1)
    shared = (B, C) if forms == "groups" else (random(2, 2, seed=3), random(2, 2, seed=4))
    leaves = [u, delta, A, *shared, random(2, seed=5), random(2, 2, 3, seed=6), random(2, seed=7)]

    def run(*leaves: Tensor) -> Tensor:
        return mamba.selective_scan_fn(*leaves, delta_softplus=True)

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


def test_gradients_go_through_all_that_is_worked_on_at_a_time(mamba):
    given = [leaf.requires_grad_() for leaf in drawn(1, 1, 130, 1, 1)]
    upstream = random(1, 1, 130, seed=9)
    got = torch.autograd.grad(mamba.selective_scan_fn(*given), given, upstream)
    want = torch.autograd.grad(scanned(*given)[0], given, upstream)
    for one, other in zip(got, want, strict=True):
        assert_near(one, other, ulps=256, atol=1e-12)


def test_no_gradient_passes_through_the_last_state(mamba):
    given = [leaf.requires_grad_() for leaf in drawn()]
    y, last = mamba.selective_scan_fn(*given, return_last_state=True)
    assert y.requires_grad
    assert not last.requires_grad


# ---------------------------------------------------------------------------------------------------------- Mamba-2

HEADS, WIDTH, SIZE = 4, 3, 2


def in_heads(b: int = 2, length: int = 6, g: int = 2, dtype: torch.dtype = F64) -> list[Tensor]:
    """[x, dt, A, B, C]."""
    return [
        random(b, length, HEADS, WIDTH, dtype=dtype),
        random(b, length, HEADS, dtype=dtype, seed=1),
        -random(HEADS, dtype=F64 if dtype == F64 else F32, seed=2).abs(),
        random(b, length, g, SIZE, dtype=dtype, seed=3),
        random(b, length, g, SIZE, dtype=dtype, seed=4),
    ]


def scanned_in_heads(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor | None = None) -> Any:
    """As the Mamba of as many channels; dt is the step size itself."""
    flat = x.flatten(2).mT
    steps = dt.mT.repeat_interleave(WIDTH, 1)
    decays = A.repeat_interleave(WIDTH)[:, None].expand(-1, SIZE)
    y, last = scanned(
        flat,
        steps,
        decays,
        B.permute(0, 2, 3, 1),
        C.permute(0, 2, 3, 1),
        None if state is None else state.flatten(1, 2),
    )
    return y.mT.unflatten(2, (HEADS, WIDTH)), last.unflatten(1, (HEADS, WIDTH))


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("dtype", [F64, BF16])
def test_channels_of_a_head_share_step_and_decay(mamba, per_channel, dtype):
    x, dt, A, B, C = in_heads(dtype=dtype)
    D = random(HEADS, WIDTH, dtype=A.dtype, seed=5) if per_channel else random(HEADS, dtype=A.dtype, seed=5)
    z, bias, state = random(*x.shape, dtype=dtype, seed=6), random(HEADS, seed=7), random(2, HEADS, WIDTH, SIZE, seed=8)
    y, last = mamba.mamba_chunk_scan_combined(
        x, dt, A, B, C, 16, D, z, bias, state, dt_softplus=True, dt_limit=(0.4, 0.9), return_final_states=True
    )
    steps = softplus(dt.to(F64) + bias).clamp(0.4, 0.9)
    assert (steps == 0.4).any()
    assert (steps == 0.9).any()
    right, states = scanned_in_heads(x, steps, A, B, C, state)
    right = (right + (D if per_channel else D[:, None]).to(F64) * x.to(F64)) * silu(z)
    assert y.dtype == dtype
    assert_near(y, right, ulps=64 if dtype == F64 else 1, atol=1e-13 if dtype == F64 else 1e-5)
    assert_near(last, states, ulps=64, atol=1e-13 if dtype == F64 else 1e-6)


def test_the_state_is_forgotten_where_another_sequence_starts(mamba):
    x, dt, A, B, C = in_heads(1, 7)
    dt, state = dt.abs(), random(1, HEADS, WIDTH, SIZE, seed=8)
    x[:, 3:5] = NAN
    seq_idx = torch.tensor([[0, 0, 0, 1, 1, 4, 4]], dtype=torch.int32)
    y, last = mamba.mamba_chunk_scan_combined(
        x, dt, A, B, C, 16, initial_states=state, seq_idx=seq_idx, return_final_states=True
    )
    cuts = [slice(0, 3), slice(3, 5), slice(5, 7)]
    alone = [scanned_in_heads(*(v[:, c] for v in (x, dt)), A, *(v[:, c] for v in (B, C)), s)
             for c, s in zip(cuts, (state, None, None), strict=True)]  # fmt: skip
    torch.testing.assert_close(y, torch.cat([pair[0] for pair in alone], 1), equal_nan=True)
    torch.testing.assert_close(last, alone[2][1])


def test_every_argument_of_the_heads_has_a_gradient(mamba):
    x, dt, A, B, C = in_heads(1, 3, 1)
    rest = [random(HEADS, seed=5), random(*x.shape, seed=6), random(HEADS, seed=7), random(1, HEADS, WIDTH, SIZE)]
    seq_idx = torch.tensor([[0, 0, 1]])

    def run(*leaves: Tensor) -> Any:
        return mamba.mamba_chunk_scan_combined(
            *leaves[:5], 16, *leaves[5:], seq_idx, dt_softplus=True, return_final_states=True
        )

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in (x, dt, A, B, C, *rest)])


# --------------------------------------------------------------------------------------------------------- one step


def one_step(b: int = 2, g: int = 2, dtype: torch.dtype = F64) -> dict[str, Tensor]:
    inner = (HEADS, WIDTH)
    shapes = {"state": (b, *inner, SIZE), "x": (b, *inner), "dt": (b, *inner), "A": (*inner, SIZE),
              "B": (b, g, SIZE), "C": (b, g, SIZE), "D": inner, "z": (b, *inner), "dt_bias": inner}  # fmt: skip
    return {name: random(*shape, dtype=dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}


def stepped(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    s = {name: value.to(F64) for name, value in given.items()}
    dt = softplus(s["dt"] + s["dt_bias"])
    y, state = torch.zeros_like(s["x"]), torch.zeros_like(s["state"])
    for b, h, p in torch.cartesian_prod(*(torch.arange(n) for n in s["x"].shape)).tolist():
        group = h // (HEADS // s["B"].shape[1])
        state[b, h, p] = torch.exp(dt[b, h, p] * s["A"][h, p]) * s["state"][b, h, p]
        state[b, h, p] += dt[b, h, p] * s["x"][b, h, p] * s["B"][b, group]
        y[b, h, p] = s["C"][b, group] @ state[b, h, p] + s["D"][h, p] * s["x"][b, h, p]
    return y * silu(s["z"]), state


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_step_writes_the_state_and_gives_the_output(mamba, dtype, groups):
    given = one_step(g=groups, dtype=dtype)
    right, states = stepped(given)
    y = mamba.selective_state_update(**given, dt_softplus=True)
    assert y.dtype == dtype
    for got, want in ((y, right), (given["state"], states)):
        assert_near(got, want, ulps=64 if dtype == F64 else 1, atol=1e-13 if dtype == F64 else 2e-6)


def test_a_step_goes_on_where_the_scan_ended(mamba):
    u, delta, A, B, C = drawn(g=1)
    whole = mamba.selective_scan_fn(u, delta, A, B, C)
    _, state = mamba.selective_scan_fn(
        u[..., :-1], delta[..., :-1], A, B[..., :-1], C[..., :-1], return_last_state=True
    )
    y = mamba.selective_state_update(state, u[..., -1], delta[..., -1], A, B[:, 0, :, -1], C[:, 0, :, -1])
    torch.testing.assert_close(y, whole[..., -1])


def test_rows_of_a_larger_state_are_written_and_padding_reads_nothing(mamba):
    given = one_step(3)
    rows = torch.tensor([4, -1, 0])
    expected, states = stepped({k: v[[0, 2]] if v.shape[0] == 3 else v for k, v in given.items()})
    larger = torch.full((5, HEADS, WIDTH, SIZE), 7.0, dtype=F64)
    larger[[4, 0]] = given["state"][[0, 2]]
    for name in ("x", "dt", "B", "C", "z"):
        given[name][1] = NAN
    y = mamba.selective_state_update(**(given | {"state": larger}), dt_softplus=True, state_batch_indices=rows)
    torch.testing.assert_close(y[[0, 2]], expected)
    assert torch.equal(y[1], torch.zeros(HEADS, WIDTH, dtype=F64))
    torch.testing.assert_close(larger[[4, 0]], states)
    assert (larger[1:4] == 7).all()


def test_a_step_is_not_differentiable(mamba):
    given = {name: value.requires_grad_(name != "state") for name, value in one_step().items()}
    assert not mamba.selective_state_update(**given).requires_grad
    assert not given["state"].requires_grad


def test_each_entrypoint_compiles_into_one_graph(mamba):
    given, heads, seq_idx = drawn(), in_heads(), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    rows = torch.tensor([3, -1])

    def run(*leaves: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        y, last = mamba.selective_scan_fn(leaves[0] * 2, *leaves[1:5], return_last_state=True)
        z = mamba.mamba_chunk_scan_combined(*leaves[5:], 16, seq_idx=seq_idx, dt_softplus=True)
        u, delta, A, B, C = leaves[:5]
        x = mamba.selective_state_update(
            state, u[..., 0], delta[..., 0], A, B[:, 0, :, 0], C[:, 0, :, 0], state_batch_indices=rows
        )
        return y, z, last, x

    results = []
    for function in (run, compiled(run)):
        leaves, state = [leaf.clone().requires_grad_() for leaf in (*given, *heads)], random(5, 4, 3, seed=9)
        found = function(*leaves, state=state)
        gradients = torch.autograd.grad(found[0].square().sum() + found[1].square().sum(), leaves)
        results.append([*(part.detach() for part in found), state, *gradients])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


# ----------------------------------------------------------------------------------------------------------- errors

GOOD = dict(zip(("u", "delta", "A", "B", "C"), drawn(dtype=F32), strict=True))
CHUNKED = dict(zip(("x", "dt", "A", "B", "C"), in_heads(dtype=F32), strict=True)) | {"chunk_size": 16}
ONE = torch.ones


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"u": ONE(2, 4)}, ValueError, r"^u: .*\(b, d, l\).*\(2, 4\)"),
        ({"u": ONE(2, 4, 5).int()}, TypeError, "^u: .*int32"),
        ({"delta": ONE(2, 4, 4)}, ValueError, r"^delta: .*\(2, 4, 5\).*\(2, 4, 4\)"),
        ({"delta": ONE(2, 4, 5).bfloat16()}, TypeError, "^delta: .*float32.*bfloat16"),
        ({"A": ONE(4, 3, dtype=torch.complex64)}, TypeError, "^A: .*complex64"),
        ({"A": ONE(3, 3)}, ValueError, r"^A: .*\(4, 3\).*\(3, 3\)"),
        ({"B": ONE(2, 3, 3, 5)}, ValueError, "^B: .*divides 4.*3"),
        ({"B": ONE(2, 2, 5)}, ValueError, r"^B: .*\(2, 3, 5\).*\(2, 2, 5\)"),
        ({"C": ONE(4, 2)}, ValueError, r"^C: .*\(4, 3\).*\(4, 2\)"),
        ({"C": ONE(2, 2, 3, 5).half()}, TypeError, "^C: .*float32.*float16"),
        ({"D": ONE(5)}, ValueError, r"^D: .*\(4,\).*\(5,\)"),
        ({"z": ONE(2, 4, 5, device="meta")}, ValueError, "^z: .*cpu.*meta"),
        ({"delta_bias": ONE(4).int()}, TypeError, "^delta_bias: .*int32"),
    ],
)
def test_the_scan_refuses(mamba, change, error, message):
    with pytest.raises(error, match=message):
        mamba.selective_scan_fn(**(GOOD | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": ONE(2, 6, 12)}, ValueError, r"^x: .*\(b, l, h, p\).*\(2, 6, 12\)"),
        ({"dt": ONE(2, 6, 3)}, ValueError, r"^dt: .*\(2, 6, 4\).*\(2, 6, 3\)"),
        ({"A": ONE(4, 2)}, ValueError, r"^A: .*\(4,\).*\(4, 2\)"),
        ({"B": ONE(2, 6, 3, 2)}, ValueError, "^B: .*divides 4.*3"),
        ({"C": ONE(2, 6, 2, 2).half()}, TypeError, "^C: .*float32.*float16"),
        ({"D": ONE(4, 2)}, ValueError, r"^D: .*\(4, 3\).*\(4, 2\)"),
        ({"initial_states": ONE(2, 4, 2, 3)}, ValueError, r"^initial_states: .*\(2, 4, 3, 2\).*\(2, 4, 2, 3\)"),
        ({"seq_idx": ONE(2, 6)}, TypeError, "^seq_idx: .*int32.*float32"),
        ({"chunk_size": 0}, ValueError, "^chunk_size: .*0"),
        ({"return_varlen_states": True}, ValueError, "^return_varlen_states: .*True"),
    ],
)
def test_the_heads_refuse(mamba, change, error, message):
    with pytest.raises(error, match=message):
        mamba.mamba_chunk_scan_combined(**(CHUNKED | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"state": ONE(2, 4)}, ValueError, r"^state: .*\(2, 4\)"),
        ({"state": ONE(3, 4, 3, 2)}, ValueError, r"^state: .*\(2, 4, 3, 2\).*\(3, 4, 3, 2\)"),
        ({"x": ONE(2, 4, 2)}, ValueError, r"^x: .*\(2, 4, 3\).*\(2, 4, 2\)"),
        ({"dt": ONE(2, 4, 3).int()}, TypeError, "^dt: .*int32"),
        ({"B": ONE(2, 3, 2)}, ValueError, "^B: .*divides 4.*3"),
        ({"C": ONE(2, 2)}, ValueError, r"^C: .*\(2, 2, 2\).*\(2, 2\)"),
        ({"D": ONE(4)}, ValueError, r"^D: .*\(4, 3\).*\(4,\)"),
        ({"z": ONE(2, 4, 3, device="meta")}, ValueError, "^z: .*cpu.*meta"),
        ({"state_batch_indices": ONE(2)}, TypeError, "^state_batch_indices: .*int32.*float32"),
    ],
)
def test_a_step_refuses(mamba, change, error, message):
    with pytest.raises(error, match=message):
        mamba.selective_state_update(**(one_step(dtype=F32) | change))
