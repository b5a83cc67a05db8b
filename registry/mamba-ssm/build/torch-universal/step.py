"""One step of either kind, from a state that is written."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ._ops import ops, qualified
from .arguments import INTEGERS, check_float, check_groups, check_like


class _Step(NamedTuple):
    """The arguments of a step.

    state: (N, h, p, n). x, dt, z: (b, h, p). A: (h, p, n). B, C: (b, g, n). D, dt_bias: (h, p). rows: (b,).
    """

    state: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    dt_softplus: bool
    rows: Tensor | None

    def of_heads(self, shared: Tensor, dtype: torch.dtype) -> Tensor:
        """B or C for each head, (b, h, 1, n)."""
        heads, groups = self.x.shape[1], shared.shape[1]
        return shared.to(dtype).repeat_interleave(heads // groups, dim=1).unsqueeze(2)


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One step of the scan of `scan.py`, plus D * x, times silu(z), in float32.

    Without heads the dimension h is left out of all tensors, and that of groups may be.

    Args:
        state: (b, h, p, n) float; (N, h, p, n) with `state_batch_indices`. Written in place.
        x: (b, h, p) float.
        dt: (b, h, p) float. `dt_bias` is added first, then softplus taken if `dt_softplus`.
        A: (h, p, n) float.
        B: (b, g, n) float, g dividing h.
        C: (b, g, n) float.
        D: (h, p) float.
        z: (b, h, p) float.
        dt_bias: (h, p) float.
        dt_softplus: see `dt`.
        state_batch_indices: (b,) int32 or int64, the row of `state` that each row of x has, no two alike. A negative
            one is padding: its row comes out as zeros, and has no state.

    Returns:
        (b, h, p) in the dtype of x. Not differentiable.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or device.
    """
    has_heads = state.ndim == 4
    check_float("state", state, "(b, h, p, n)" if has_heads else "(b, d, n)")
    check_float("x", x, "(b, h, p)" if has_heads else "(b, d)")
    batch, size = x.shape[0], state.shape[-1]
    channels = tuple(state.shape[1:-1])
    rows = batch if state_batch_indices is None else state.shape[0]
    check_like("x", x, state, (batch, *channels))
    check_like("state", state, x, (rows, *channels, size))
    check_like("dt", dt, x, (batch, *channels))
    check_like("A", A, x, (*channels, size))
    groups = B.shape[1] if B.ndim == 3 else 1
    check_groups("B", groups, channels[0] if has_heads else 1)
    for name, value in (("B", B), ("C", C)):
        check_like(name, value, x, (batch, groups, size) if B.ndim == 3 else (batch, size))
    for name, given in (("D", D), ("dt_bias", dt_bias)):
        if given is not None:
            check_like(name, given, x, channels)
    if z is not None:
        check_like("z", z, x, (batch, *channels))
    if state_batch_indices is not None:
        check_like("state_batch_indices", state_batch_indices, x, (batch,), INTEGERS)

    if has_heads:
        one_more = (state, x, dt, A)
        biases: tuple[Tensor | None, ...] = (D, z, dt_bias)
    else:
        one_more = (state.unsqueeze(1), x.unsqueeze(1), dt.unsqueeze(1), A.unsqueeze(0))
        biases = tuple(
            None if value is None else value.unsqueeze(0 if value.ndim == 1 else 1) for value in (D, z, dt_bias)
        )
    shared = (value if value.ndim == 3 else value.unsqueeze(1) for value in (B, C))
    output: Tensor = ops.step.default(*one_more, *shared, *biases, dt_softplus, state_batch_indices)
    return output if has_heads else output.squeeze(1)


# An op, as which rows are padding is known only when it runs.
@torch.library.custom_op(
    qualified("step"),
    mutates_args=("state",),
    schema=(
        "(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias,"
        " bool dt_softplus, Tensor? rows) -> Tensor"
    ),
)
def _step(*arguments: Any) -> Tensor:  # noqa: ANN401 - those of _Step
    s = _Step(*arguments)
    real = torch.arange(s.x.shape[0], device=s.x.device) if s.rows is None else (s.rows >= 0).nonzero().squeeze(1)
    places = real if s.rows is None else s.rows[real].long()
    wide = torch.float64 if s.x.dtype == torch.float64 else torch.float32
    x, dt = s.x[real].to(wide), s.dt[real].to(wide)
    if s.dt_bias is not None:
        dt = dt + s.dt_bias.to(wide)
    if s.dt_softplus:
        dt = functional.softplus(dt)
    decay = torch.exp(dt.unsqueeze(-1) * s.A.to(wide))
    state = decay * s.state[places].to(wide) + (dt * x).unsqueeze(-1) * s.of_heads(s.B[real], wide)
    y = (state * s.of_heads(s.C[real], wide)).sum(-1)
    if s.D is not None:
        y = y + s.D.to(wide) * x
    if s.z is not None:
        y = y * functional.silu(s.z[real].to(wide))
    s.state.index_copy_(0, places, state.to(s.state.dtype))
    return torch.zeros(s.x.shape, dtype=s.x.dtype, device=s.x.device).index_copy_(0, real, y.to(s.x.dtype))


@_step.register_fake
def _(*arguments: Any) -> Tensor:  # noqa: ANN401 - those of _Step
    s = _Step(*arguments)
    return s.x.new_empty(s.x.shape)
