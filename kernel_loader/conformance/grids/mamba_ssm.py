"""What `mamba_ssm` is held against: closed forms in float64 of what it computes step by step.

There is no loop over positions: a state is the sum of all that came in, each as it was before all decay, decayed at
once.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Draw, Entry, Inputs, Tolerance, Work
from kernel_loader.conformance.grids.common import Make, compiled, uncompiled

_BF16, _F16, _F32, _F64, _I32 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32
_NAN: Final = float("nan")

_EMPTY: Final = "it wants at least one of each"


def _swish(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _softplus(x: Tensor) -> Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _scanned(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What has come in, each as it was before all decay, added up and decayed at once.

    x, dt: (N, D, L) float64. a: (D, S). b, c: (N, D, S, L). initial: (N, D, S). The exponents of a case stay below 700,
    or exp of them would be infinite.
    """
    exponents = a[:, :, None] * dt.cumsum(-1).unsqueeze(2)
    inputs = torch.exp(-exponents) * b * (dt * x).unsqueeze(2)
    before = x.new_zeros(*x.shape[:2], a.shape[1]) if initial is None else initial
    states = torch.exp(exponents) * (inputs.cumsum(-1) + before.unsqueeze(-1))
    return (c * states).sum(2), states[..., -1] if x.shape[2] else before


def _of_channels(shared: Tensor, channels: int, length: int) -> Tensor:
    """B or C of Mamba in any of its forms, for each channel and position, (N or 1, D, S, L) float64."""
    wide = shared.to(_F64)
    if shared.ndim == 2:
        return wide[None, :, :, None].expand(-1, -1, -1, length)
    groups = wide.unsqueeze(1) if shared.ndim == 3 else wide
    group = torch.arange(channels, device=shared.device) // (channels // groups.shape[1])
    return groups[:, group]


def _selective_scan(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
    return_last_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> Tensor | tuple[Tensor, Tensor]:
    x, dt = u.to(_F64), delta.to(_F64)
    dt = dt if delta_bias is None else dt + delta_bias.to(_F64)[:, None]
    dt = _softplus(dt) if delta_softplus else dt
    channels, length = u.shape[1:]
    y, state = _scanned(x, dt, a.to(_F64), _of_channels(b, channels, length), _of_channels(c, channels, length))
    y = y if d is None else y + d.to(_F64)[:, None] * x
    y = y if z is None else y * _swish(z.to(_F64))
    return (y, state.detach()) if return_last_state else y


def _state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
    state_batch_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Row by row, each a scan of one position."""
    states, y = state.to(_F64, copy=True), torch.zeros(x.shape, dtype=_F64, device=x.device)
    heads = x.shape[1] if x.ndim == 3 else 1
    of_channel = torch.arange(heads, device=x.device).repeat_interleave(x[0].numel() // heads if len(x) else 0)
    for row in range(x.shape[0]):
        place = row if state_batch_indices is None else int(state_batch_indices[row])
        if place < 0:
            continue
        step = dt[row].to(_F64) if dt_bias is None else dt[row].to(_F64) + dt_bias.to(_F64)
        step = _softplus(step) if dt_softplus else step
        out, after = _scanned(
            x[row].to(_F64).reshape(1, -1, 1),
            step.reshape(1, -1, 1),
            a.to(_F64).flatten(0, -2),
            _of_channels(b[row].reshape(1, -1, b.shape[-1], 1), heads, 1)[:, of_channel],
            _of_channels(c[row].reshape(1, -1, c.shape[-1], 1), heads, 1)[:, of_channel],
            states[place].flatten(0, -2).unsqueeze(0),
        )
        out = out.reshape(x[row].shape)
        out = out if d is None else out + d.to(_F64) * x[row].to(_F64)
        y[row] = out if z is None else out * _swish(z[row].to(_F64))
        states[place] = after.reshape(states[place].shape)
    return y, states


def _chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,  # noqa: ARG001 - makes no difference
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: None = None,  # noqa: ARG001 - the published signature
    dt_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> Tensor | tuple[Tensor, Tensor]:
    """Sequence by sequence; with a channel for each column of each head."""
    batch, length, heads, width = x.shape
    step = dt.to(_F64) if dt_bias is None else dt.to(_F64) + dt_bias.to(_F64)
    step = _softplus(step) if dt_softplus else step
    step = step.clamp(*dt_limit).transpose(1, 2).repeat_interleave(width, 1)
    inputs = x.to(_F64).permute(0, 2, 3, 1).reshape(batch, heads * width, length)
    decays = a.to(_F64).repeat_interleave(width)[:, None].expand(-1, b.shape[3])
    before, keys = (_of_channels(value.permute(0, 2, 3, 1), heads * width, length) for value in (b, c))
    rows, states = [], []
    for row in range(batch):
        ends = [length] if seq_idx is None else [*((seq_idx[row].diff() != 0).nonzero().flatten() + 1).tolist(), length]
        state = None if initial_states is None else initial_states[row : row + 1].to(_F64).flatten(1, 2)
        pieces = []
        for start, end in pairwise([0, *ends]):
            here = (slice(row, row + 1), ..., slice(start, end))
            y, last = _scanned(inputs[here], step[here], decays, before[here], keys[here], state)
            pieces.append(y)
            state = None
        rows.append(torch.cat(pieces, -1))
        states.append(last)
    y = torch.cat(rows) if rows else inputs
    y = y.unflatten(1, (heads, width)).permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
    y = y if d is None else y + (d if d.ndim == 2 else d[:, None]).to(_F64) * x.to(_F64)
    y = y if z is None else y * _swish(z.to(_F64))
    return (y, torch.cat(states).reshape(batch, heads, width, -1)) if return_final_states else y


def _shared(draw: Draw, form: str, shape: tuple[int, int, int], size: int, dtype: torch.dtype) -> Tensor:
    """B or C: "fixed", "one" for all channels, or a number of groups."""
    batch, channels, length = shape
    if form == "fixed":
        return draw.normal(channels, size)
    if form == "one":
        return draw.normal(batch, size, length, dtype=dtype)
    return draw.normal(batch, int(form), size, length, dtype=dtype)


def _drawn_scan(
    shape: tuple[int, int, int] = (2, 8, 9),
    size: int = 4,
    *,
    dtype: torch.dtype = _BF16,
    forms: tuple[str, str] = ("one", "one"),
    full: bool = False,
    softplus: bool = False,
    last: bool = False,
    strided: bool = False,
    step: float = 0.5,
) -> Make:
    def make(draw: Draw) -> Inputs:
        batch, channels, length = shape
        u = draw.normal(batch, channels, length, dtype=dtype)
        delta = draw.uniform(batch, channels, length, dtype=dtype, high=step)
        if strided:
            u, delta = draw.strided(u), draw.strided(delta)
        a = -draw.uniform(channels, size, low=0.5, high=1.5)
        b, c = (_shared(draw, form, shape, size, dtype) for form in forms)
        rest = (draw.normal(channels), draw.normal(*shape, dtype=dtype), draw.normal(channels, scale=0.5))
        return Inputs(u, delta, a, b, c, *(rest if full else (None,) * 3), full or softplus, last)

    return make


def _drawn_step(
    batch: int = 2,
    heads: tuple[int, ...] = (4,),
    channels: int = 8,
    size: int = 16,
    *,
    groups: int | None = None,
    dtype: torch.dtype = _BF16,
    state_dtype: torch.dtype = _F32,
    full: bool = True,
    rows: tuple[int, ...] | None = None,
    tied: bool = False,
    strided: bool = False,
) -> Make:
    """`heads` is () for a state without; `rows` are the rows of a state of 6."""

    def make(draw: Draw) -> Inputs:
        inner = (*heads, channels)
        shared = (batch, groups, size) if groups is not None else (batch, size)
        state = draw.normal(batch if rows is None else 6, *inner, size, dtype=state_dtype)
        a, dt, bias = -draw.uniform(*inner, size, low=0.5, high=1.5), draw.normal(batch, *inner), draw.normal(*inner)
        if tied:
            a, dt, bias = a[:, :1, :1].expand(a.shape), dt[..., :1].expand(dt.shape), bias[:, :1].expand(bias.shape)
        x, b, c = draw.normal(batch, *inner), draw.normal(*shared), draw.normal(*shared)
        rest = (draw.normal(*inner), draw.normal(batch, *inner, dtype=dtype), bias) if full else (None,) * 3
        places = None if rows is None else draw.put(torch.tensor(rows, dtype=_I32))
        x, b, c = (value.to(dtype) for value in (x, b, c))
        # A copy would no longer be tied.
        dt = dt if tied else dt.to(dtype)
        if strided:
            state, x, b = (draw.strided(value) for value in (state, x, b))
        softplus = True
        return Inputs(state, x, dt, a, b, c, *rest, softplus, places)

    return make


def _padded_with_nan(draw: Draw) -> Inputs:
    inputs = _drawn_step(3, groups=2, rows=(4, -1, 0), dtype=_F32)(draw)
    for key in (1, 2, 4, 5, 7):
        inputs[key][1] = _NAN
    return inputs


def _drawn_chunks(
    shape: tuple[int, int, int, int] = (2, 9, 4, 4),
    size: int = 8,
    *,
    dtype: torch.dtype = _BF16,
    groups: int = 1,
    chunk: int = 16,
    full: bool = False,
    per_channel: bool = False,
    initial: bool = False,
    final: bool = False,
    sequences: bool = False,
    limit: tuple[float, float] = (0.0, math.inf),
) -> Make:
    def make(draw: Draw) -> Inputs:
        batch, length, heads, width = shape
        d = draw.normal(heads, width) if per_channel else draw.normal(heads)
        rest = (d, draw.normal(*shape, dtype=dtype), draw.normal(heads, scale=0.5))
        numbers = draw.integers(0, 3, batch, length, dtype=_I32).sort(dim=1).values
        return Inputs(
            draw.normal(*shape, dtype=dtype),
            draw.uniform(batch, length, heads, dtype=dtype, high=0.5),
            -draw.uniform(heads, low=0.5, high=1.5),
            *(draw.normal(batch, length, groups, size, dtype=dtype) for _ in range(2)),
            chunk,
            *(rest if full else (None,) * 3),
            draw.normal(batch, heads, width, size) if initial else None,
            numbers - numbers[:, :1] if sequences else None,
            None,
            full,
            limit,
            final,
        )

    return make


def _scan_problem(draw: Draw, *, tokens: int, channels: int, size: int) -> Inputs:
    return _drawn_scan((1, channels, tokens), size, full=True)(draw)


def _scan_work(*, tokens: int, channels: int, size: int) -> Work:
    return Work(9.0 * tokens * channels * size, 2.0 * tokens * (4 * channels + 2 * size), "fp32")


def _step_problem(draw: Draw, *, batch: int, heads: int, width: int, size: int) -> Inputs:
    return _drawn_step(batch, (heads,), width, size, groups=1, tied=True)(draw)


def _step_work(*, batch: int, heads: int, width: int, size: int) -> Work:
    states = float(batch * heads * width * size)
    return Work(6.0 * states, 8.0 * states, "fp32")


def _chunk_problem(draw: Draw, *, tokens: int, heads: int, width: int, size: int) -> Inputs:
    return _drawn_chunks((1, tokens, heads, width), size, chunk=256, full=True)(draw)


def _chunk_work(*, tokens: int, heads: int, width: int, size: int) -> Work:
    # In chunks of 256: C @ B.T once, its product with x, and states in and out.
    flops = 2.0 * tokens * (256 * size + heads * width * (256 + 2 * size))
    return Work(flops, 2.0 * tokens * (3 * heads * width + 2 * size), "bf16")


# Sums over a state and over what has not decayed, in float32, which may cancel; exp as fast as a device has it.
_SCAN: Final = Tolerance(row=2e-5, least=2e-5)
_SCAN_GRADIENT: Final = Tolerance(row=2e-4, least=2e-4)
# Published builds round the output to the dtype of u before z meets it in backward.
_HALF_SCAN_GRADIENT: Final = Tolerance(row=2e-2, each=2e-2, least=2e-2)
# Products of a chunk are of numbers rounded to bfloat16, or to TF32, and so are the states between chunks.
_CHUNKS: Final = Tolerance(row=3e-2, least=3e-2)
_CHUNKS_GRADIENT: Final = Tolerance(row=1e-1, each=3e-2, least=1e-1)

_ALL_OF_SCAN: Final = (0, 1, 2, 3, 4, 5, 6, 7)
_SINGLE_SCAN_CASES: Final = (
    uncompiled("float32", _drawn_scan(dtype=_F32)),
    *(
        uncompiled(f"B {b}, C {c}", _drawn_scan(dtype=_F32, forms=(b, c)))
        for b in ("fixed", "2")
        for c in ("fixed", "2")
    ),
    uncompiled("float32, strided", _drawn_scan(dtype=_F32, strided=True)),
    uncompiled("float32, 2049 positions", _drawn_scan((1, 1, 2049), 1, dtype=_F32, step=0.2)),
)
_STEP_REFUSES: Final = "it wants D and dt_bias"

MAMBA_SSM_GRID: Final = (
    Entry(
        entrypoint="selective_scan_fn",
        cases=(
            *(uncompiled(f"{length} positions", _drawn_scan((1, 2, length))) for length in (1, 2, 127, 128, 129)),
            *(uncompiled(f"a state of {n}", _drawn_scan(size=n)) for n in (1, 3, 16)),
            uncompiled("a state of 65", _drawn_scan((1, 2, 5), 65)),
            *(uncompiled(f"shape {shape}", _drawn_scan(shape), _EMPTY) for shape in ((0, 8, 5), (2, 8, 0))),
            uncompiled("softplus", _drawn_scan(softplus=True)),
            uncompiled("groups", _drawn_scan(forms=("4", "4"))),
            uncompiled("a group a channel", _drawn_scan(forms=("8", "8"))),
            uncompiled("float16", _drawn_scan(dtype=_F16)),
            uncompiled("strided", _drawn_scan(strided=True)),
            uncompiled("the last state", _drawn_scan(last=True)),
            compiled("groups", _drawn_scan(forms=("4", "4"))),
        ),
        formula=_selective_scan,
        gradients=(0, 1, 2, 3, 4),
        tolerance=_SCAN,
        gradient_tolerance=_HALF_SCAN_GRADIENT,
    ),
    Entry(
        entrypoint="selective_scan_fn",
        cases=_SINGLE_SCAN_CASES,
        formula=_selective_scan,
        gradients=(0, 1, 2, 3, 4),
        tolerance=_SCAN,
        gradient_tolerance=_SCAN_GRADIENT,
    ),
    Entry(
        entrypoint="selective_scan_fn",
        cases=(
            uncompiled("everything", _drawn_scan(full=True)),
            uncompiled("everything, and the last state", _drawn_scan(full=True, last=True, forms=("2", "one"))),
            uncompiled("everything, float16", _drawn_scan(full=True, dtype=_F16)),
            compiled("everything", _drawn_scan(full=True, last=True)),
        ),
        formula=_selective_scan,
        gradients=_ALL_OF_SCAN,
        tolerance=_SCAN,
        gradient_tolerance=_HALF_SCAN_GRADIENT,
        problem=_scan_problem,
        sizes=({"tokens": 4096, "channels": 5120, "size": 16},),
        work=_scan_work,
    ),
    Entry(
        entrypoint="selective_scan_fn",
        cases=(uncompiled("everything, float32", _drawn_scan(full=True, dtype=_F32, last=True)),),
        formula=_selective_scan,
        gradients=_ALL_OF_SCAN,
        tolerance=_SCAN,
        gradient_tolerance=_SCAN_GRADIENT,
    ),
    Entry(
        entrypoint="selective_state_update",
        cases=(
            *(uncompiled(f"a state of {n}", _drawn_step(size=n, groups=2)) for n in (1, 16, 17, 64, 128, 129)),
            *(uncompiled(f"{n} channels", _drawn_step(channels=n, groups=1)) for n in (1, 31, 33)),
            uncompiled("a group a head", _drawn_step(groups=4)),
            uncompiled("without heads", _drawn_step(heads=())),
            uncompiled("without heads, a group", _drawn_step(heads=(), groups=1)),
            uncompiled("heads that share", _drawn_step(groups=2, tied=True)),
            uncompiled("a state in bfloat16", _drawn_step(groups=2, state_dtype=_BF16)),
            uncompiled("float16", _drawn_step(groups=2, dtype=_F16)),
            uncompiled("float32", _drawn_step(groups=2, dtype=_F32)),
            uncompiled("strided", _drawn_step(groups=2, strided=True)),
            uncompiled("no D, z and bias", _drawn_step(groups=2, full=False), _STEP_REFUSES),
            uncompiled("no rows", _drawn_step(0, groups=2), _EMPTY),
            uncompiled("rows of a larger state", _drawn_step(3, groups=2, rows=(4, 0, 5))),
            uncompiled("padding", _padded_with_nan),
            uncompiled("rows of a larger state, without heads", _drawn_step(3, (), rows=(4, -1, 5))),
            compiled("without heads", _drawn_step(heads=())),
            compiled("padding", _padded_with_nan),
        ),
        formula=_state_update,
        tolerance=_SCAN,
        mutates=(0,),
        skip={"backward": "it is not differentiable"},
        problem=_step_problem,
        sizes=({"batch": 64, "heads": 80, "width": 64, "size": 128},),
        work=_step_work,
    ),
    Entry(
        entrypoint="mamba_chunk_scan_combined",
        cases=(
            *(uncompiled(f"{length} positions", _drawn_chunks((1, length, 2, 8))) for length in (1, 15, 16, 17, 33)),
            *(uncompiled(f"shape {shape}", _drawn_chunks(shape), _EMPTY) for shape in ((0, 9, 4, 8), (2, 0, 4, 8))),
            uncompiled("groups", _drawn_chunks(groups=2)),
            uncompiled("a group a head", _drawn_chunks(groups=4)),
            uncompiled("a state of 17", _drawn_chunks(size=17)),
            uncompiled("heads of 24", _drawn_chunks((1, 9, 2, 24))),
            uncompiled("chunks of 64", _drawn_chunks((1, 65, 2, 8), chunk=64)),
            uncompiled("float16", _drawn_chunks(dtype=_F16)),
            uncompiled("float32", _drawn_chunks(dtype=_F32)),
            uncompiled("a limited step", _drawn_chunks(limit=(0.1, 0.3))),
            uncompiled("final states", _drawn_chunks((2, 33, 4, 4), final=True)),
            uncompiled("sequences", _drawn_chunks((2, 24, 4, 4), sequences=True)),
            uncompiled("sequences, final states", _drawn_chunks((2, 24, 4, 4), sequences=True, final=True)),
            compiled("sequences", _drawn_chunks((2, 20, 4, 4), sequences=True, final=True)),
        ),
        formula=_chunk_scan,
        gradients=(0, 1, 2, 3, 4),
        tolerance=_CHUNKS,
        gradient_tolerance=_CHUNKS_GRADIENT,
    ),
    Entry(
        entrypoint="mamba_chunk_scan_combined",
        cases=(
            uncompiled("everything", _drawn_chunks((2, 33, 4, 4), full=True, initial=True, final=True, groups=2)),
            uncompiled("everything, D a channel", _drawn_chunks(full=True, per_channel=True, initial=True)),
            uncompiled("everything, float32", _drawn_chunks(full=True, initial=True, dtype=_F32)),
            uncompiled("everything, sequences", _drawn_chunks((2, 24, 4, 4), full=True, initial=True, sequences=True)),
            compiled("everything", _drawn_chunks(full=True, initial=True, final=True)),
        ),
        formula=_chunk_scan,
        gradients=(0, 1, 2, 3, 4, 6, 7, 8, 9),
        tolerance=_CHUNKS,
        gradient_tolerance=_CHUNKS_GRADIENT,
        problem=_chunk_problem,
        sizes=({"tokens": 4096, "heads": 80, "width": 64, "size": 128},),
        work=_chunk_work,
    ),
)
