"""The entrypoints: how rows are routed, in front of the experts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .activations import gated_name
from .arguments import check_router, check_triples, check_weights
from .enums import ActivationType
from .experts import mixture, wide


def moe_general_routing_inputs(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int,
    stream_id: int,  # noqa: ARG001 - the published signature
    activation_type: Any,  # noqa: ANN401 - an enum of any build
    is_inference_mode_enabled: bool = False,  # noqa: FBT001, FBT002 - the published signature
    concat_layout: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> tuple[Tensor, Tensor]:
    """Sum, for each token, what the experts of its rows make of it, weighted by their scores.

    Args:
        x: (T, H) bfloat16, float16, float32 or float64.
        router_scores: (R,) float, one for each row.
        token_indices: (R,) int32 or int64, ascending.
        expert_indices: (R,) int32 or int64. A row with an id of E or more is a sentinel and leaves no trace.
        w1: (2I, H, E) of the dtype of x, any strides. Its rows are gate and up in turn; with `concat_layout` all gates
            come first.
        b1: (E, 2I), ordered as the rows of w1, or None.
        w2: (H, I, E).
        b2: (E, H); None exactly where b1 is.
        E: number of experts.
        stream_id: not looked at.
        activation_type: SWIGLU or GEGLU, or their values.
        is_inference_mode_enabled: the result has no gradient.
        concat_layout: see w1.

    Returns:
        (T, H) in the dtype of x, and the number of rows of each expert, (E,) int32.

    Raises:
        TypeError: a dtype, or something that is no activation.
        ValueError: a shape or device, an activation without a gate, tokens that do not ascend within T, or an expert
            below 0.
    """
    check_weights(x, w1, b1, w2, b2)
    if w2.shape[2] != E:
        raise ValueError(f"E: expected {w2.shape[2]}, which w2 has, got {E}")
    check_triples(x, router_scores, token_indices, expert_indices)
    activation = gated_name(activation_type)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        result = mixture(x, router_scores, token_indices, expert_indices, w1, b1, w2, b2, activation, concat_layout)
    return result, _frequency(expert_indices, E)


def moe_TC_softmax_topk_layer(  # noqa: N802 - the published name
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    K: int,
    stream_id: int,  # noqa: ARG001 - the published signature
    activation_type: Any = ActivationType.SWIGLU,  # noqa: ANN401 - an enum of any build
    is_inference_mode_enabled: bool = False,  # noqa: FBT001, FBT002 - the published signature
    is_softmax_over_topk: bool = True,  # noqa: FBT001, FBT002 - the published signature
    norm_topk_probs: bool = False,  # noqa: FBT001, FBT002 - the published signature
    concat_layout: bool = False,  # noqa: FBT001, FBT002 - the published signature
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each token to the K experts with the largest logits x @ router_w.T, and sum what they make of it.

    Args:
        x: (T, H) bfloat16, float16, float32 or float64.
        router_w: (E, H) of the dtype of x.
        w1: as in `moe_general_routing_inputs`.
        b1: as there.
        w2: as there.
        b2: as there.
        K: experts of each token.
        stream_id: not looked at.
        activation_type: SWIGLU or GEGLU, or their values.
        is_inference_mode_enabled: the first result has no gradient.
        is_softmax_over_topk: scores are the softmax over the K logits; else their share of the softmax over all E.
        norm_topk_probs: in the latter case, scaled so that the K sum to 1. Not looked at in the former.
        concat_layout: as there.

    Returns:
        (T, H) in the dtype of x; the logits, (T, E) in the dtype of x; the number of rows of each expert, (E,) int32.

    Raises:
        TypeError: as `moe_general_routing_inputs`.
        ValueError: as it, or K not within 1 and E.
    """
    check_weights(x, w1, b1, w2, b2)
    experts = w2.shape[2]
    check_router(x, router_w, experts, K)
    activation = gated_name(activation_type)
    logits = functional.linear(x, router_w)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not is_inference_mode_enabled):
        scores, chosen = _choose(logits, K, over_topk=is_softmax_over_topk, norm=norm_topk_probs)
        tokens = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand(-1, K).flatten()
        chosen = chosen.flatten()
        result = mixture(x, scores.flatten(), tokens, chosen, w1, b1, w2, b2, activation, concat_layout)
    return result, logits, _frequency(chosen, experts)


def _choose(logits: Tensor, K: int, *, over_topk: bool, norm: bool) -> tuple[Tensor, Tensor]:
    """Scores (T, K) in float32 at least, and experts (T, K)."""
    if over_topk:
        best, chosen = logits.topk(K, dim=-1)
        return best.softmax(-1, dtype=wide(logits.dtype)), chosen
    scores, chosen = logits.softmax(-1, dtype=wide(logits.dtype)).topk(K, dim=-1)
    return scores / scores.sum(-1, keepdim=True) if norm else scores, chosen


def _frequency(experts: Tensor, count: int) -> Tensor:
    """How many rows each expert has, (count,) int32."""
    index = experts.long().clamp(max=count)
    found = torch.zeros(count + 1, dtype=torch.int32, device=experts.device)
    return found.index_add(0, index, torch.ones_like(index, dtype=torch.int32))[:count]
