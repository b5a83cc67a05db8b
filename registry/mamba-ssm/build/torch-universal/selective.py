"""Mamba: every channel has a step size and decays of its own."""

from torch import Tensor
from torch.nn import functional

from .arguments import check_float, check_groups, check_like, widen
from .scan import scan


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,  # noqa: FBT001, FBT002 - the published signature
    return_last_state: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of `scan.py`, plus D * u, times silu(z), in float32.

    Args:
        u: (b, d, l) float.
        delta: (b, d, l) in the dtype of u. `delta_bias` is added first, then softplus taken if `delta_softplus`.
        A: (d, n) float, real.
        B: (b, n, l) or (b, g, n, l) in the dtype of u, g dividing d; or (d, n) float for what does not change.
        C: as B, one of the three independently of it.
        D: (d,) float.
        z: (b, d, l) in the dtype of u.
        delta_bias: (d,) float.
        delta_softplus: see `delta`.
        return_last_state: also return the last state.

    Returns:
        (b, d, l) in the dtype of u, and the state (b, d, n) in what is computed in. The first is differentiable in all
        tensors.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or device.
    """
    check_float("u", u, "(b, d, l)")
    batch, channels, length = u.shape
    check_float("A", A, "(d, n)")
    check_like("A", A, u, (channels, A.shape[1]))
    for name, value in (("delta", delta), ("z", z)):
        if value is not None:
            check_like(name, value, u, (batch, channels, length), (u.dtype,))
    for name, value in (("D", D), ("delta_bias", delta_bias)):
        if value is not None:
            check_like(name, value, u, (channels,))

    wide = widen(u)
    steps = delta.to(wide.dtype)
    if delta_bias is not None:
        steps = steps + delta_bias.to(wide.dtype)[:, None]
    if delta_softplus:
        steps = functional.softplus(steps)
    shared = (_by_group(name, value, u, A).to(wide.dtype) for name, value in (("B", B), ("C", C)))
    y, last_state = scan(wide, steps, A.to(wide.dtype), next(shared), next(shared), None, None)
    if D is not None:
        y = y + D.to(wide.dtype)[:, None] * wide
    if z is not None:
        y = y * functional.silu(z.to(wide.dtype))
    output = y.to(u.dtype)
    # Published builds let no gradient through the state; dropping it in silence would look like one of zero.
    return (output, last_state.detach()) if return_last_state else output


def _by_group(name: str, value: Tensor, u: Tensor, A: Tensor) -> Tensor:
    """B or C as the scan takes it: (b, g, n, l), or (b, d, n, 1) where it does not change."""
    (batch, channels, length), size = u.shape, A.shape[1]
    if value.ndim == 2:
        check_like(name, value, u, (channels, size))
        return value[None, :, :, None].expand(batch, -1, -1, -1)
    groups = value.shape[1] if value.ndim == 4 else 1
    if value.ndim == 4:
        check_groups(name, groups, channels)
    check_like(name, value, u, (batch, size, length) if value.ndim == 3 else (batch, groups, size, length), (u.dtype,))
    return value.unsqueeze(1) if value.ndim == 3 else value
