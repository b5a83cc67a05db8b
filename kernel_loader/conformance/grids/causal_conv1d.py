"""What `causal_conv1d` is held against: the product of the filter with all windows at once, in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from kernel_loader.conformance.grid import Draw, Entry, Inputs, Tolerance, Work
from kernel_loader.conformance.grids.common import Make, compiled, off_by_one, uncompiled

_BF16, _F16, _F32, _F64, _I32 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32
_NAN: Final = float("nan")

_EMPTY: Final = "it wants at least one of each"


def _swish(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _windows(inputs: Tensor, width: int) -> Tensor:
    """What each output sees of the W - 1 + L inputs (..., W - 1 + L), (..., L, W)."""
    # One more, as torch wants one window at least.
    return functional.pad(inputs, (0, 1)).unfold(-1, width, 1)[..., :-1, :]


def _conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[tuple[Tensor, Tensor], Tensor]:
    reach = weight.shape[1] - 1
    past = x.new_zeros(*x.shape[:2], reach) if initial_states is None else initial_states
    inputs = torch.cat([past.to(_F64), x.to(_F64)], dim=-1)
    seen = _windows(inputs, reach + 1)
    if seq_idx is not None:
        same = _windows(functional.pad(seq_idx, (reach, 0), value=-1), reach + 1) == seq_idx.unsqueeze(-1)
        seen = torch.where(same.unsqueeze(1), seen, 0.0)
    y = (seen * weight.to(_F64).unsqueeze(1)).sum(-1)
    y = y if bias is None else y + bias.to(_F64)[:, None]
    y = y if activation is None else _swish(y)
    if not return_final_states:
        return y
    states = inputs[..., x.shape[2] :]
    return (y, states) if final_states_out is None else ((y, states), states)


def _conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each state is turned so that its newest input comes last, and turned back afterwards."""
    states = conv_state.to(_F64, copy=True)
    size, rows = conv_state.shape[2], range(x.shape[0])
    outputs = torch.zeros(x.shape, dtype=_F64, device=x.device)
    for row in rows:
        place = row if conv_state_indices is None else int(conv_state_indices[row])
        turn = 0 if cache_seqlens is None else int(cache_seqlens[row])
        steps = x[row].to(_F64).reshape(x.shape[1], -1)
        history = torch.cat([states[place].roll(-turn, 1), steps], dim=1)
        y = (_windows(history, weight.shape[1]) * weight.to(_F64).unsqueeze(1)).sum(-1)
        y = y[:, y.shape[1] - steps.shape[1] :]
        y = y if bias is None else y + bias.to(_F64)[:, None]
        outputs[row] = (y if activation is None else _swish(y)).reshape(outputs[row].shape)
        turned = 0 if cache_seqlens is None else turn + steps.shape[1]
        states[place] = history[:, history.shape[1] - size :].roll(turned, 1)
    return outputs, states


def _varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    bounds = cu_seqlens.tolist()
    sequences = [x[start:end].to(_F64).T for start, end in pairwise(bounds)]
    padded = [functional.pad(sequence, (state_len, 0)) for sequence in sequences]
    return torch.stack([sequence[:, sequence.shape[1] - state_len :] for sequence in padded])


def _drawn_conv(
    shape: tuple[int, int, int] = (2, 8, 9),
    width: int = 4,
    *,
    dtype: torch.dtype = _BF16,
    weight_dtype: torch.dtype | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    channels_last: bool = False,
    strided: bool = False,
    sliced: bool = False,
    sequences: bool = False,
    initial: bool = False,
    final: bool = False,
    into: bool = False,
) -> Make:
    batch, channels, length = shape

    def drawn(draw: Draw, *, last: int) -> Tensor:
        """(B, D, last)."""
        shape = (batch, last, channels) if channels_last else (batch, channels, last)
        x = draw.normal(*shape, dtype=dtype)
        x = off_by_one(draw, x) if sliced else x
        return x.transpose(1, 2) if channels_last else x

    def make(draw: Draw) -> Inputs:
        x = drawn(draw, last=length)
        given: dict[str, Tensor | bool] = {}
        if sequences:
            given["seq_idx"] = draw.integers(0, 3, batch, length, dtype=_I32).sort(dim=1).values
        if initial:
            given["initial_states"] = drawn(draw, last=width - 1)
        if final:
            given["return_final_states"] = True
        if into:
            given["final_states_out"] = drawn(draw, last=width - 1)
        return Inputs(
            draw.strided(x) if strided else x,
            draw.normal(channels, width, dtype=weight_dtype or dtype),
            draw.normal(channels, dtype=weight_dtype or dtype) if bias else None,
            activation=activation,
            **given,
        )

    return make


def _packed_with_nan(draw: Draw) -> Inputs:
    inputs = _drawn_conv((1, 8, 12), channels_last=True, dtype=_F32)(draw)
    inputs[0][:, :, :5] = _NAN
    inputs.kwargs["seq_idx"] = draw.put(torch.tensor([[0] * 5 + [1] * 4 + [2] * 3], dtype=_I32))
    return inputs


def _drawn_update(
    batch: int = 3,
    channels: int = 8,
    steps: int | None = None,
    width: int = 4,
    room: int = 3,
    *,
    dtype: torch.dtype = _BF16,
    weight_dtype: torch.dtype | None = None,
    bias: bool = True,
    activation: str | None = "silu",
    counts: bool = False,
    rows: int | None = None,
    strided: bool = False,
) -> Make:
    def make(draw: Draw) -> Inputs:
        shape = (batch, channels) if steps is None else (batch, channels, steps)
        state = draw.normal(rows or batch, channels, room, dtype=dtype)
        given = {}
        if counts:
            given["cache_seqlens"] = draw.integers(0, 9, batch, dtype=_I32)
        if rows is not None:
            given["conv_state_indices"] = draw.permutation(rows)[:batch].to(_I32)
        return Inputs(
            draw.normal(*shape, dtype=dtype),
            draw.strided(state) if strided else state,
            draw.normal(channels, width, dtype=weight_dtype or dtype),
            draw.normal(channels, dtype=weight_dtype or dtype) if bias else None,
            activation,
            **given,
        )

    return make


def _drawn_packed(lengths: tuple[int, ...], room: int, *, channels: int = 8, dtype: torch.dtype = _BF16) -> Make:
    def make(draw: Draw) -> Inputs:
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(_I32)
        return Inputs(draw.normal(sum(lengths), channels, dtype=dtype), draw.put(bounds), room)

    return make


def _conv_problem(draw: Draw, *, tokens: int, channels: int) -> Inputs:
    return _drawn_conv((1, channels, tokens))(draw)


def _conv_work(*, tokens: int, channels: int) -> Work:
    return Work(8.0 * tokens * channels, 4.0 * tokens * channels, "fp32")


def _update_problem(draw: Draw, *, batch: int, channels: int) -> Inputs:
    return _drawn_update(batch, channels)(draw)


def _update_work(*, batch: int, channels: int) -> Work:
    return Work(8.0 * batch * channels, 16.0 * batch * channels, "fp32")


# Mamba-2.8B, Qwen3-Next.
_CHANNELS: Final = (5120, 8192)
# A handful of products in float32, which may cancel, of numbers up to 5.
_CONV: Final = Tolerance(row=2e-6, least=4e-6)
# Those of all positions of a channel are added; in half precision each factor is rounded once.
_CONV_GRADIENT: Final = Tolerance(row=1e-4, each=1.6e-2, least=1e-4)
_WIDTH: Final = "W is 2, 3 or 4"
_LAST: Final = "it wants channels-last, and multiples of 8"

_CONV_ENTRY: Final = Entry(
    entrypoint="causal_conv1d_fn",
    cases=(
        *(uncompiled(f"{length} positions", _drawn_conv((2, 8, length))) for length in (1, 2, 3, 4, 63, 64, 65)),
        *(uncompiled(f"{n} positions, a few channels", _drawn_conv((1, 3, n))) for n in (1023, 1024, 1025)),
        *(uncompiled(f"W = {width}", _drawn_conv(width=width)) for width in (2, 3)),
        *(uncompiled(f"W = {width}", _drawn_conv(width=width), _WIDTH) for width in (1, 5)),
        *(uncompiled(f"shape {shape}", _drawn_conv(shape), _EMPTY) for shape in ((2, 8, 0), (0, 8, 5))),
        uncompiled("float16", _drawn_conv(dtype=_F16)),
        uncompiled("float32", _drawn_conv(dtype=_F32)),
        uncompiled("float32 weights", _drawn_conv(weight_dtype=_F32)),
        uncompiled("no bias, no activation", _drawn_conv(bias=False, activation=None)),
        uncompiled("swish", _drawn_conv(activation="swish", dtype=_F32)),
        uncompiled("strided", _drawn_conv(strided=True)),
        *(uncompiled(f"sliced, {n} positions", _drawn_conv((2, 8, n), sliced=True)) for n in (8, 16, 17, 1024)),
        uncompiled("sliced, float32", _drawn_conv((2, 8, 4), dtype=_F32, sliced=True)),
        uncompiled("sliced, channels-last", _drawn_conv((2, 16, 9), channels_last=True, sliced=True)),
        uncompiled(
            "sliced, initial and final states",
            _drawn_conv((2, 8, 5), channels_last=True, sliced=True, initial=True, final=True),
        ),
        *(
            uncompiled(f"channels-last, {n} positions", _drawn_conv((2, 16, n), channels_last=True))
            for n in (1, 31, 65)
        ),
        uncompiled("sequences", _drawn_conv((2, 8, 40), sequences=True, channels_last=True)),
        uncompiled("sequences, float32", _drawn_conv((2, 8, 40), 3, sequences=True, channels_last=True, dtype=_F32)),
        uncompiled("sequences, channels-first", _drawn_conv((2, 8, 40), sequences=True), _LAST),
        uncompiled("NaN in another sequence", _packed_with_nan),
        *(
            uncompiled(f"initial states, {n} positions", _drawn_conv((2, 8, n), initial=True, channels_last=True))
            for n in (1, 9)
        ),
        uncompiled("initial states, channels-first", _drawn_conv(initial=True), _LAST),
        *(
            uncompiled(f"final states, {n} positions", _drawn_conv((2, 8, n), final=True, channels_last=True))
            for n in (1, 2, 3, 64, 65)
        ),
        uncompiled("initial and final states", _drawn_conv((2, 8, 2), initial=True, final=True, channels_last=True)),
        uncompiled("final states, channels-first", _drawn_conv(final=True), _LAST),
        compiled("sequences", _drawn_conv((2, 8, 40), sequences=True, channels_last=True)),
        compiled("states", _drawn_conv(initial=True, final=True, channels_last=True)),
    ),
    formula=_conv1d,
    gradients=(0, 1),
    tolerance=_CONV,
    gradient_tolerance=_CONV_GRADIENT,
    problem=_conv_problem,
    sizes=tuple({"tokens": 4096, "channels": channels} for channels in _CHANNELS),
    work=_conv_work,
)

CAUSAL_CONV1D_GRID: Final = (
    _CONV_ENTRY,
    Entry(
        entrypoint="causal_conv1d_fn",
        cases=(uncompiled("bias and initial states", _drawn_conv(initial=True, final=True, channels_last=True)),),
        formula=_conv1d,
        gradients=(0, 1, 2, "initial_states"),
        tolerance=_CONV,
        gradient_tolerance=_CONV_GRADIENT,
    ),
    Entry(
        entrypoint="causal_conv1d_fn",
        cases=(
            uncompiled("final states into", _drawn_conv(final=True, into=True, channels_last=True)),
            uncompiled(
                "final states into, sliced", _drawn_conv(final=True, into=True, channels_last=True, sliced=True)
            ),
            compiled("final states into", _drawn_conv(final=True, into=True, channels_last=True)),
        ),
        formula=_conv1d,
        tolerance=_CONV,
        mutates=("final_states_out",),
        skip={"backward": "it is looked at where states are new"},
    ),
    Entry(
        entrypoint="causal_conv1d_update",
        cases=(
            uncompiled("one step", _drawn_update()),
            *(uncompiled(f"{steps} steps", _drawn_update(steps=steps)) for steps in (1, 2, 4, 7)),
            *(uncompiled(f"{steps} steps, room for 6", _drawn_update(steps=steps, room=6)) for steps in (2, 5, 8)),
            *(uncompiled(f"W = {width}", _drawn_update(width=width)) for width in (2, 3)),
            *(uncompiled(f"{channels} channels", _drawn_update(channels=channels)) for channels in (1, 63, 65)),
            uncompiled("float16", _drawn_update(dtype=_F16)),
            uncompiled("float32", _drawn_update(dtype=_F32)),
            uncompiled("float32 weights", _drawn_update(weight_dtype=_F32)),
            uncompiled("no bias, no activation", _drawn_update(bias=False, activation=None)),
            uncompiled("no rows", _drawn_update(batch=0), _EMPTY),
            uncompiled("a state that is not contiguous", _drawn_update(steps=2, room=5, strided=True)),
            *(
                uncompiled(
                    f"circular, room for {room}, {steps} steps", _drawn_update(steps=steps, room=room, counts=True)
                )
                for room, steps in ((3, 1), (5, 2), (5, 5), (4, 9))
            ),
            uncompiled("rows of a larger state", _drawn_update(rows=7)),
            uncompiled("rows of a larger circular state", _drawn_update(rows=7, room=5, counts=True)),
            compiled("one step", _drawn_update()),
            compiled("rows of a larger circular state", _drawn_update(rows=7, room=5, counts=True)),
        ),
        formula=_conv1d_update,
        tolerance=_CONV,
        mutates=(1,),
        skip={"backward": "it is not differentiable"},
        problem=_update_problem,
        sizes=tuple({"batch": 64, "channels": channels} for channels in _CHANNELS),
        work=_update_work,
    ),
    Entry(
        entrypoint="causal_conv1d_varlen_states",
        cases=(
            *(uncompiled(f"room for {room}", _drawn_packed((5, 1, 9), room)) for room in (1, 3, 4, 17)),
            uncompiled("empty sequences", _drawn_packed((0, 3, 0, 2, 0), 3)),
            uncompiled("one sequence", _drawn_packed((20,), 3)),
            uncompiled("257 channels", _drawn_packed((5, 2), 3, channels=257)),
            uncompiled("float16", _drawn_packed((5, 2), 3, dtype=_F16)),
            uncompiled("float32", _drawn_packed((5, 2), 3, dtype=_F32)),
            compiled("room for 3", _drawn_packed((5, 1, 9), 3)),
        ),
        formula=_varlen_states,
        skip={"backward": "it is not differentiable"},
    ),
)
