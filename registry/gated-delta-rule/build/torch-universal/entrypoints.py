"""The two functions, which differ in what they take."""

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import check_gates, check_heads, check_like
from .recurrence import delta_rule

_EPS = 1e-6  # in the norm of queries and keys


def chunk_gated_delta_rule(
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
    cu_seqlens_cpu: Tensor | None = None,  # noqa: ARG001 - the published signature
    cp_context: None = None,
    *,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule of `recurrence.py`, in float32.

    Args:
        q: (B, T, H, K) float.
        k: (B, T, H, K) in the dtype of q.
        v: (B, T, HV, V) in the dtype of q, HV a multiple of H; head h of v has head h // (HV / H) of q and k.
        g: (B, T, HV) float, the logarithm of the decay.
        beta: (B, T, HV) float.
        scale: of q; K ** -0.5 if None.
        initial_state: (N, HV, K, V) float, zeros if None.
        output_final_state: also return the last states.
        use_qk_l2norm_in_kernel: divide q and k by sqrt(sum of squares + 1e-6).
        use_beta_sigmoid_in_kernel: take the sigmoid of beta.
        allow_neg_eigval: and twice that.
        state_v_first: states are (N, HV, V, K).
        cu_seqlens: (N + 1,) int32 or int64, ascending from 0 to T: where sequences start in the one row there then is.
        cu_seqlens_cpu: not looked at.
        cp_context: None.
        chunk_size: 16, 32 or 64; makes no difference here.
        use_gate_in_kernel: the decay is -exp(A_log) * softplus(g + dt_bias).
        A_log: (HV,) float.
        dt_bias: (HV,) float, or None.

    Returns:
        (B, T, HV, V) in the dtype of q, and the states in what is computed in, or None. Both are differentiable in all
        float tensors.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or device, or arguments that do not go together.
    """
    if cp_context is not None:
        raise ValueError(f"cp_context: expected None, got {cp_context!r}")
    if chunk_size not in {16, 32, 64}:
        raise ValueError(f"chunk_size: expected 16, 32 or 64, got {chunk_size}")
    check_heads(q, k, v, cu_seqlens)
    check_gates(v, {}, g=g, beta=beta)
    outputs, states = _apply(
        q,
        k,
        v,
        (_gate(g, v, A_log, dt_bias) if use_gate_in_kernel else g).unsqueeze(-1),
        None,
        _written(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval).unsqueeze(-1),
        scale,
        initial_state,
        cu_seqlens,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
    )
    return outputs.to(q.dtype), states if output_final_state else None


def fused_recurrent_gated_delta_rule(
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
    """The delta rule of `recurrence.py`, in float32. What is not said here is as in `chunk_gated_delta_rule`.

    Args:
        q: see there.
        k: see there.
        v: see there.
        g: (B, T, HV) float, the logarithm of the decay of a state; none if None.
        gk: (B, T, HV, K) float, that of its rows, besides.
        gv: (B, T, HV, V) float, that of its columns, besides.
        beta: (B, T, HV) float, or (B, T, HV, V) for one a column; ones if None.
        scale: see there.
        initial_state: see there.
        output_final_state: see there.
        use_qk_l2norm_in_kernel: see there.
        use_gate_in_kernel: see there; `g` is then given.
        A_log: see there.
        dt_bias: see there.
        use_beta_sigmoid_in_kernel: see there.
        allow_neg_eigval: see there.
        state_v_first: see there.
        cu_seqlens: see there.

    Returns:
        (B, T, HV, V) in the dtype of v, and the states, or None.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or device, or arguments that do not go together.
    """
    check_heads(q, k, v, cu_seqlens)
    beta = torch.ones_like(v[..., 0]) if beta is None else beta
    sizes = {"gk": q.shape[3], "gv": v.shape[3], "beta": v.shape[3] if beta.ndim == 4 else None}
    check_gates(v, sizes, g=g, gk=gk, gv=gv, beta=beta)
    if use_gate_in_kernel:
        if g is None:
            raise ValueError("g: expected a tensor, as use_gate_in_kernel is True, got None")
        g = _gate(g, v, A_log, dt_bias)
    wide = _widen(v)
    decay = wide.new_zeros(()) if gk is None else gk.to(wide.dtype)
    if g is not None:
        decay = decay + g.to(wide.dtype).unsqueeze(-1)
    written = _written(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    outputs, states = _apply(
        q,
        k,
        v,
        decay.expand(*v.shape[:3], decay.shape[-1] if decay.ndim else 1),
        gv,
        written if beta.ndim == 4 else written.unsqueeze(-1),
        scale,
        initial_state,
        cu_seqlens,
        norm=use_qk_l2norm_in_kernel,
        v_first=state_v_first,
    )
    return outputs.to(v.dtype), states if output_final_state else None


def _apply(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_decay: Tensor,
    column_decay: Tensor | None,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    norm: bool,
    v_first: bool,
) -> tuple[Tensor, Tensor]:
    """Outputs and states in what is computed in."""
    wide = _widen(v)
    heads, count = v.shape[2], q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sizes = (q.shape[3], v.shape[3])
    if initial_state is not None:
        check_like("initial_state", initial_state, q, (count, heads, *(sizes[::-1] if v_first else sizes)))
        initial_state = initial_state.to(wide.dtype)
        initial_state = initial_state.mT if v_first else initial_state
    queries, keys = (x.to(wide.dtype) for x in (q, k))
    if norm:
        queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS) for x in (queries, keys))
    queries = queries * (max(sizes[0], 1) ** -0.5 if scale is None else scale)
    queries, keys = (x.repeat_interleave(heads // q.shape[2], dim=2) for x in (queries, keys))
    if column_decay is None:
        column_decay = torch.zeros_like(wide[..., :1])
    rest = (row_decay.to(wide.dtype), column_decay.to(wide.dtype), beta.to(wide.dtype))
    outputs, states = delta_rule(queries, keys, wide, *rest, initial_state, cu_seqlens)
    return outputs, states.mT.contiguous() if v_first else states


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _gate(g: Tensor, v: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """The logarithm of the decay, from what comes before its activation."""
    if A_log is None:
        raise ValueError("A_log: expected a tensor, as use_gate_in_kernel is True, got None")
    for name, value in (("A_log", A_log), ("dt_bias", dt_bias)):
        if value is not None:
            check_like(name, value, v, (v.shape[2],))
    dtype = _widen(v).dtype
    raw = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    return -A_log.to(dtype).exp() * functional.softplus(raw)


def _written(beta: Tensor, sigmoid: bool, twice: bool) -> Tensor:  # noqa: FBT001 - two of the published flags
    """How much of what is missing is written."""
    if twice and not sigmoid:
        raise ValueError("allow_neg_eigval: expected use_beta_sigmoid_in_kernel besides, got it alone")
    if not sigmoid:
        return beta
    return torch.sigmoid(_widen(beta)) * (2 if twice else 1)
