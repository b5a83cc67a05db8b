"""What `gated_delta_rule` is held against: one triangular system in float64 for all positions, instead of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Tolerance, Work
from kernel_loader.conformance.grids.common import Make, compiled, may_refuse_backward, uncompiled

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

_EMPTY: Final = "it wants at least one of each"


def _waiting(name: str, make: Make) -> Case:
    """A case for which a build may wait for the device, as no CUDA graph allows."""
    return Case(name, make, ("eager", "backward"))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _kept(logarithms: Tensor) -> Tensor:
    """What is left at t of what was there after s, (B, H, T, T, D) for s <= t, of decays (B, T, H, D); zeros else."""
    total = logarithms.cumsum(1).transpose(1, 2)
    since = total.unsqueeze(3) - total.unsqueeze(2)
    seen = torch.ones(since.shape[2:4], dtype=torch.bool, device=since.device).tril().unsqueeze(-1)
    return torch.where(seen, since, -math.inf).exp()


def _corrected(steps: Sequence[Tensor], initial: Tensor) -> tuple[Tensor, Tensor]:
    """All that is written, which is right for all positions at once, and what comes of it.

    What is written at t is beta times what v is more than the state says, and the state is what was written before: one
    triangular system a head and column. Steps are q, k (B, T, H, K), v (B, T, H, V), the logarithms of decays of rows
    and of columns, and beta, shaped as these; initial is (B, H, K, V). All float64.
    """
    q, k, v, rows, columns, beta = steps
    of_rows, of_columns = _kept(rows), _kept(columns)
    before = torch.exp(rows.cumsum(1))
    # (B, H, V, T, T): how much of what is written at s in a column is seen by the key, and by the query, of t.
    seen = torch.einsum("bthk,bshk,bhtsk,bhtsv->bhvts", k, k, of_rows, of_columns)
    asked = torch.einsum("bthk,bshk,bhtsk,bhtsv->bhvts", q, k, of_rows, of_columns)
    stays = torch.exp(columns.cumsum(1))
    from_initial = [torch.einsum("bthk,bthk,bhkv,bthv->bhvt", x, before, initial, stays) for x in (k, q)]
    rate = beta.permute(0, 2, 3, 1)
    system = rate.unsqueeze(-1) * seen.tril(-1) + torch.eye(q.shape[1], dtype=_F64, device=q.device)
    surprise = rate * (v.permute(0, 2, 3, 1) - from_initial[0])
    written = torch.linalg.solve_triangular(system, surprise.unsqueeze(-1), upper=False)
    outputs = (asked @ written).squeeze(-1) + from_initial[1]
    if not q.shape[1]:
        return outputs.permute(0, 3, 1, 2), initial
    left = torch.einsum("bhsk,bshk,bhvs,bhsv->bhkv", of_rows[:, :, -1], k, written.squeeze(-1), of_columns[:, :, -1])
    decay = before[:, -1].unsqueeze(-1) * stays[:, -1].unsqueeze(-2)
    return outputs.permute(0, 3, 1, 2), left + decay * initial


def _rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
    use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
    use_gate_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
    allow_neg_eigval: bool = False,  # noqa: FBT001, FBT002 - the published signature
    state_v_first: bool = False,  # noqa: FBT001, FBT002 - the published signature
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    head = torch.arange(v.shape[2], device=v.device) // (v.shape[2] // q.shape[2])
    queries, keys, values = q.to(_F64)[:, :, head], k.to(_F64)[:, :, head], v.to(_F64)
    if use_qk_l2norm_in_kernel:
        queries, keys = (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt() for x in (queries, keys))
    queries = queries * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    whole = torch.zeros(v.shape[:3], dtype=_F64, device=v.device) if g is None else g.to(_F64)
    if use_gate_in_kernel:
        assert A_log is not None
        whole = -torch.exp(A_log.to(_F64)) * _softplus(whole if dt_bias is None else whole + dt_bias.to(_F64))
    rows = whole.unsqueeze(-1) + (torch.zeros_like(keys) if gk is None else gk.to(_F64))
    columns = torch.zeros_like(values) if gv is None else gv.to(_F64)
    rate = torch.ones_like(values) if beta is None else beta.to(_F64)
    rate = 1 / (1 + torch.exp(-rate)) if use_beta_sigmoid_in_kernel else rate
    rate = 2 * rate if allow_neg_eigval else rate
    rate = rate if rate.ndim == 4 else rate.unsqueeze(-1).expand(values.shape)

    steps = (queries, keys, values, rows, columns, rate)
    count = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    shape = (count, v.shape[2], q.shape[3], v.shape[3])
    initial = torch.zeros(shape, dtype=_F64, device=v.device)
    if initial_state is not None:
        initial = initial_state.to(_F64).mT if state_v_first else initial_state.to(_F64)
    if cu_seqlens is None:
        outputs, states = _corrected(steps, initial)
    else:
        bounds = enumerate(pairwise(cu_seqlens.tolist()))
        parts = [_corrected([x[:, start:end] for x in steps], initial[n : n + 1]) for n, (start, end) in bounds]
        outputs, states = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts])
    return outputs, (states.mT if state_v_first else states) if output_final_state else None


def _chunk_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
    use_qk_l2norm_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
    use_beta_sigmoid_in_kernel: bool = False,  # noqa: FBT001, FBT002 - the published signature
    allow_neg_eigval: bool = False,  # noqa: FBT001, FBT002 - the published signature
    state_v_first: bool = False,  # noqa: FBT001, FBT002 - the published signature
    cu_seqlens: Tensor | None = None,
    *,
    chunk_size: int = 64,  # noqa: ARG001 - makes no difference
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    return _rule(
        q,
        k,
        v,
        g,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


class _Heads(NamedTuple):
    """Rows, positions, heads of keys and of values, and their widths."""

    rows: int = 2
    positions: int = 5
    keys: int = 2
    values: int = 2
    key_width: int = 16
    value_width: int = 16


def _drawn_rule(
    size: _Heads = _Heads(),  # noqa: B008 - a tuple
    *,
    dtype: torch.dtype = _BF16,
    strided: bool = False,
    norm: bool = False,
    raw_gate: str = "",
    bounds: tuple[int, ...] = (),
    initial: bool = False,
    recurrent: bool = False,
    gates: str = "g",
    rates: str = "head",
    **flags: Any,  # noqa: ANN401 - of the published functions
) -> Make:
    """Keys have the norm 1, or nearly so if the kernel sees to it.

    `raw_gate` is "" for a decay, "A" for one that the kernel makes, "A, bias" with a bias. `gates` are those of the
    recurrent form that are given, and `rates` "head", "column" or "none".
    """

    def make(draw: Draw) -> Inputs:
        batch, length, heads, value_heads, width, columns = size
        q = draw.normal(batch, length, heads, width)
        k = functional.normalize(draw.normal(batch, length, heads, width), dim=-1)
        q, k = q.to(dtype), (3 * k if norm else k).to(dtype)
        v = draw.normal(batch, length, value_heads, columns, dtype=dtype)
        if strided:
            q, k, v = (draw.strided(x) for x in (q, k, v))
        shape = (batch, length, value_heads)
        g = draw.normal(*shape) if raw_gate else -draw.uniform(*shape, high=0.5)
        wide = {"gk": -draw.uniform(*shape, width, high=0.3), "gv": -draw.uniform(*shape, columns, high=0.3)}
        beta = draw.uniform(*shape, columns) if rates == "column" else draw.uniform(*shape, dtype=dtype)
        given = {"use_qk_l2norm_in_kernel": norm, **flags}
        if initial:
            states = (width, columns) if not flags.get("state_v_first") else (columns, width)
            given["initial_state"] = draw.normal(len(bounds) or batch, value_heads, *states)
        if raw_gate:
            given |= {"use_gate_in_kernel": True, "A_log": draw.normal(value_heads, scale=0.3)}
        if "bias" in raw_gate:
            given["dt_bias"] = draw.normal(value_heads)
        if bounds:
            given["cu_seqlens"] = draw.put(torch.tensor([0, *bounds]))
        if not recurrent:
            return Inputs(q, k, v, g, beta, **given)
        named = gates.split(", ")
        several = (wide[name] if name in named else None for name in ("gk", "gv"))
        return Inputs(q, k, v, g if "g" in named else None, *several, None if rates == "none" else beta, **given)

    return make


def _recurrent(size: _Heads = _Heads(), **rest: Any) -> Make:  # noqa: ANN401, B008 - those of _drawn_rule
    return _drawn_rule(size, recurrent=True, **rest)


def _rule_problem(draw: Draw, *, tokens: int, keys: int, values: int, width: int, recurrent: bool = False) -> Inputs:
    size = (
        _Heads(1, tokens, keys, values, width, width)
        if not recurrent
        else _Heads(tokens, 1, keys, values, width, width)
    )
    return _drawn_rule(size, recurrent=recurrent, initial=recurrent, norm=True, output_final_state=recurrent)(draw)


def _rule_work(*, tokens: int, keys: int, values: int, width: int) -> Work:
    # In chunks of 64: keys with keys and queries, the system, and states in and out.
    flops = 2.0 * tokens * values * width * (4 * 64 + 3 * width)
    return Work(flops, 4.0 * tokens * width * (keys + values), "bf16")


def _step_rule_work(*, tokens: int, keys: int, values: int, width: int) -> Work:
    states = float(tokens * values * width * width)
    return Work(7.0 * states, 8.0 * states + 4.0 * tokens * width * (keys + values), "fp32")


# The system is solved in numbers rounded to bfloat16, or to TF32, and its solutions add up in the state.
_RULE: Final = Tolerance(row=4e-2, least=2e-2)
_RULE_GRADIENT: Final = Tolerance(row=1e-1, each=4e-2, least=5e-2)
# Step by step, in float32.
_STEPS: Final = Tolerance(row=2e-5, least=2e-5)

_SIZES_OF_RULE: Final = ({"tokens": 4096, "keys": 16, "values": 32, "width": 128},)
_WIDE: Final = "K is 256 at most"
_GROUPED: Final = _Heads(keys=2, values=4, value_width=32)
_PACKED: Final = _Heads(rows=1, positions=9)
_DECAYS: Final = ("g", "gk", "gv", "g, gk, gv", "")

_HOPPER: Final = "Triton 3.4 to 3.7.0 compiles backward wrongly for compute capability 9, and builds say so"

GATED_DELTA_RULE_GRID: Final = (
    Entry(
        entrypoint="chunk_gated_delta_rule",
        cases=may_refuse_backward(
            (
                *(uncompiled(f"{n} positions", _drawn_rule(_Heads(1, n, 1, 1))) for n in (1, 2)),
                *(Case(f"{n} positions", _drawn_rule(_Heads(1, n, 1, 1)), ("eager", "graph")) for n in (63, 64, 65)),
                *(uncompiled(f"chunks of {n}", _drawn_rule(_Heads(1, n + 1, 1, 1), chunk_size=n)) for n in (16, 32)),
                *(
                    uncompiled(f"shape {size[:2]}", _drawn_rule(size), _EMPTY)
                    for size in (_Heads(rows=0), _Heads(positions=0))
                ),
                uncompiled("grouped heads", _drawn_rule(_GROUPED)),
                uncompiled("K = 48, V = 80", _drawn_rule(_Heads(1, 3, 1, 1, 48, 80))),
                uncompiled("K = 257", _drawn_rule(_Heads(1, 2, 1, 1, 257)), _WIDE),
                uncompiled("float16", _drawn_rule(dtype=_F16)),
                uncompiled("float32", _drawn_rule(dtype=_F32)),
                uncompiled("strided", _drawn_rule(strided=True)),
                uncompiled("a norm in the kernel", _drawn_rule(norm=True)),
                uncompiled("a scale", _drawn_rule(scale=0.5)),
                uncompiled("a sigmoid in the kernel", _drawn_rule(use_beta_sigmoid_in_kernel=True)),
                uncompiled("twice a sigmoid", _drawn_rule(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)),
                uncompiled("final states", _drawn_rule(_GROUPED, output_final_state=True)),
                uncompiled(
                    "final states, columns first", _drawn_rule(_GROUPED, output_final_state=True, state_v_first=True)
                ),
                _waiting("sequences", _drawn_rule(_PACKED, bounds=(3, 4, 9), output_final_state=True)),
                compiled("final states", _drawn_rule(_GROUPED, output_final_state=True)),
            ),
            _HOPPER,
        ),
        formula=_chunk_rule,
        gradients=(0, 1, 2, 3, 4),
        tolerance=_RULE,
        gradient_tolerance=_RULE_GRADIENT,
        problem=_rule_problem,
        sizes=_SIZES_OF_RULE,
        work=_rule_work,
    ),
    Entry(
        entrypoint="chunk_gated_delta_rule",
        cases=may_refuse_backward(
            (
                uncompiled("initial states", _drawn_rule(initial=True)),
                uncompiled("initial and final states", _drawn_rule(_GROUPED, initial=True, output_final_state=True)),
                uncompiled(
                    "columns first", _drawn_rule(_GROUPED, initial=True, output_final_state=True, state_v_first=True)
                ),
                _waiting(
                    "sequences with states",
                    _drawn_rule(_PACKED, bounds=(3, 3, 9), initial=True, output_final_state=True),
                ),
                compiled(
                    "sequences with states",
                    _drawn_rule(_PACKED, bounds=(3, 3, 9), initial=True, output_final_state=True, norm=True),
                ),
            ),
            _HOPPER,
        ),
        formula=_chunk_rule,
        gradients=(0, 1, 2, 3, 4, "initial_state"),
        tolerance=_RULE,
        gradient_tolerance=_RULE_GRADIENT,
    ),
    Entry(
        entrypoint="chunk_gated_delta_rule",
        cases=may_refuse_backward((uncompiled("a gate in the kernel", _drawn_rule(raw_gate="A")),), _HOPPER),
        formula=_chunk_rule,
        gradients=(0, 1, 2, 3, 4, "A_log"),
        tolerance=_RULE,
        gradient_tolerance=_RULE_GRADIENT,
    ),
    Entry(
        entrypoint="chunk_gated_delta_rule",
        cases=may_refuse_backward(
            (
                uncompiled("a gate with a bias", _drawn_rule(_GROUPED, raw_gate="A, bias")),
                uncompiled("a gate with a bias, float32", _drawn_rule(dtype=_F32, raw_gate="A, bias")),
            ),
            _HOPPER,
        ),
        formula=_chunk_rule,
        gradients=(0, 1, 2, 3, 4, "A_log", "dt_bias"),
        tolerance=_RULE,
        gradient_tolerance=_RULE_GRADIENT,
    ),
    Entry(
        entrypoint="fused_recurrent_gated_delta_rule",
        cases=(
            *(uncompiled(f"{n} positions", _recurrent(_Heads(positions=n))) for n in (1, 2, 7)),
            *(
                uncompiled(f"shape {size[:2]}", _recurrent(size), _EMPTY)
                for size in (_Heads(rows=0), _Heads(positions=0))
            ),
            *(uncompiled(f"decays {gates or 'none'}", _recurrent(_GROUPED, gates=gates)) for gates in _DECAYS),
            uncompiled("a rate a column", _recurrent(_GROUPED, rates="column")),
            uncompiled("no rates", _recurrent(rates="none")),
            uncompiled("no rates, grouped heads", _recurrent(_GROUPED, rates="none")),
            *(uncompiled(f"V = {n}", _recurrent(_Heads(key_width=24, value_width=n))) for n in (1, 7, 9)),
            uncompiled("K = 257", _recurrent(_Heads(1, 2, 1, 1, 257))),
            uncompiled("float16", _recurrent(dtype=_F16)),
            uncompiled("float32", _recurrent(dtype=_F32)),
            uncompiled("strided", _recurrent(strided=True)),
            uncompiled("a norm in the kernel", _recurrent(norm=True)),
            uncompiled("a scale", _recurrent(scale=0.5)),
            uncompiled("a gate in the kernel", _recurrent(raw_gate="A")),
            uncompiled("a gate with a bias", _recurrent(raw_gate="A, bias")),
            uncompiled("a sigmoid in the kernel", _recurrent(use_beta_sigmoid_in_kernel=True)),
            uncompiled("twice a sigmoid", _recurrent(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)),
            uncompiled("states", _recurrent(_GROUPED, initial=True, output_final_state=True)),
            uncompiled(
                "states, columns first",
                _recurrent(_GROUPED, initial=True, output_final_state=True, state_v_first=True),
            ),
            uncompiled("sequences", _recurrent(_PACKED, bounds=(3, 3, 9), initial=True, output_final_state=True)),
            compiled("everything", _recurrent(_GROUPED, gates="g, gk, gv", initial=True, output_final_state=True)),
        ),
        formula=_rule,
        tolerance=_STEPS,
        skip={"backward": "it is not promised to be differentiable"},
        problem=partial(_rule_problem, recurrent=True),
        sizes=({"tokens": 64, "keys": 16, "values": 32, "width": 128},),
        work=_step_rule_work,
    ),
)
