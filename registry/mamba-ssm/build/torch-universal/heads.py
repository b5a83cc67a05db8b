"""Mamba-2: the channels of a head share one step size, and one decay for all of the state."""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import FLOATS, INTEGERS, check_float, check_groups, check_like, widen
from .scan import scan

_ANY_STEP: Final = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,  # noqa: ARG001 - the published signature
    dt_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
    dt_limit: tuple[float, float] = _ANY_STEP,
    return_final_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
    return_varlen_states: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of `scan.py` over the heads of x, plus D * x, times silu(z), in float32.

    Args:
        x: (b, l, h, p) float.
        dt: (b, l, h) float. `dt_bias` is added first, then softplus taken if `dt_softplus`; the result is held within
            `dt_limit`.
        A: (h,) float.
        B: (b, l, g, n) in the dtype of x, g dividing h.
        C: (b, l, g, n) in the dtype of x.
        chunk_size: above 0; makes no difference here.
        D: (h,) or (h, p) float.
        z: (b, l, h, p) in the dtype of x.
        dt_bias: (h,) float.
        initial_states: (b, h, p, n) float, zeros if None.
        seq_idx: (b, l) int32 or int64. Where it changes, the state is forgotten.
        cu_seqlens: not looked at.
        dt_softplus: see `dt`.
        dt_limit: see `dt`.
        return_final_states: also return the last states.
        return_varlen_states: False.

    Returns:
        (b, l, h, p) in the dtype of x, and the states (b, h, p, n) in what is computed in. Both are differentiable in
        all tensors.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or device, a `chunk_size` below 1, or `return_varlen_states`.
    """
    _check(x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states, seq_idx=seq_idx)
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected a number above 0, got {chunk_size}")
    if return_varlen_states:
        raise ValueError("return_varlen_states: expected False, got True")
    batch, length, heads, width = x.shape
    size = B.shape[3]

    wide = widen(x)
    steps = dt.to(wide.dtype)
    if dt_bias is not None:
        steps = steps + dt_bias.to(wide.dtype)
    if dt_softplus:
        steps = functional.softplus(steps)
    if tuple(dt_limit) != _ANY_STEP:
        steps = steps.clamp(*dt_limit)
    starts = None
    if seq_idx is not None:
        starts = functional.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))[:, :length]
    y, states = scan(
        _channels_first(wide),
        _channels_first(steps.unsqueeze(-1).expand(-1, -1, -1, width)),
        A.to(wide.dtype)[:, None, None].expand(-1, width, size).reshape(heads * width, size),
        B.to(wide.dtype).permute(0, 2, 3, 1),
        C.to(wide.dtype).permute(0, 2, 3, 1),
        None if initial_states is None else initial_states.to(wide.dtype).reshape(batch, heads * width, size),
        starts,
    )
    y = y.transpose(1, 2).reshape(x.shape)
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).to(wide.dtype) * wide
    if z is not None:
        y = y * functional.silu(z.to(wide.dtype))
    output = y.to(x.dtype)
    return (output, states.reshape(batch, heads, width, size)) if return_final_states else output


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **rest: Tensor | None) -> None:
    """Shapes, dtypes and devices agree with x (b, l, h, p) and B (b, l, g, n)."""
    check_float("x", x, "(b, l, h, p)")
    check_float("B", B, "(b, l, g, n)")
    (batch, length, heads, width), (groups, size) = x.shape, B.shape[2:]
    check_like("dt", dt, x, (batch, length, heads))
    check_like("A", A, x, (heads,))
    check_groups("B", groups, heads)
    for name, value in (("B", B), ("C", C)):
        check_like(name, value, x, (batch, length, groups, size), (x.dtype,))
    shapes = {
        "D": (heads,) if rest["D"] is None or rest["D"].ndim == 1 else (heads, width),
        "z": (batch, length, heads, width),
        "dt_bias": (heads,),
        "initial_states": (batch, heads, width, size),
        "seq_idx": (batch, length),
    }
    dtypes = {"z": (x.dtype,), "seq_idx": INTEGERS}
    for name, given in rest.items():
        if given is not None:
            check_like(name, given, x, shapes[name], dtypes.get(name, FLOATS))


def _channels_first(x: Tensor) -> Tensor:
    """(b, l, h, p) -> (b, h * p, l)."""
    return torch.flatten(x, 2).transpose(1, 2)
