"""Guards that give a function what it may be called without: each is called with the function, and then as it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def step_terms(
    function: Callable[..., Tensor],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """A step of Mamba without `D` or `dt_bias` has zeros for it: one number, expanded to the shape.

    Its stride of 0 leaves builds the faster way that they have for what a head shares.
    """
    if D is None or dt_bias is None:
        zeros = x.new_zeros(()).expand(x.shape[1:])
        D, dt_bias = zeros if D is None else D, zeros if dt_bias is None else dt_bias
    return function(state, x, dt, A, B, C, D, z, dt_bias, *rest, **named)


def ones_beta(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    *rest: Any,
    **named: Any,
) -> Any:
    """Steps of the gated delta rule without `beta` have ones for it, (B, T, HV), in the dtype of v.

    Builds make as many as there are heads of q, and read one for each head of v. They would fill the same memory.
    """
    if beta is None:
        beta = v.new_ones(v.shape[:-1])
    return function(q, k, v, g, gk, gv, beta, *rest, **named)
