"""Each token through the experts that the router chooses for it.

The roundings are those of a model in PyTorch: every product and sum is in the dtype of x.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def mixture(x: Tensor, router: Any, experts: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - modules of any model
    """Route x and add up what the chosen experts make of it, weighted by their scores.

    Args:
        x: (..., H) float tensor.
        router: has `weight` (E, H), `bias` (E,) and `top_k`.
        experts: has `gate_up_proj` (E, H, 2 * I) with gate and up in alternate columns, `gate_up_proj_bias`
            (E, 2 * I), `down_proj` (E, I, H), `down_proj_bias` (E, H), and the numbers `alpha` and `limit`.

    Returns:
        output: (..., H), of the shape and dtype of x.
        scores: (tokens, top_k), the weights of the chosen experts, the largest first; each row sums to 1.
    """
    tokens = x.reshape(-1, x.shape[-1])
    logits, chosen = functional.linear(tokens, router.weight, router.bias).topk(router.top_k, dim=-1)
    scores = logits.softmax(dim=-1)

    order = chosen.flatten().argsort(stable=True)  # of (token, choice) pairs, so that each expert has one run of them
    counts = chosen.flatten().bincount(minlength=experts.gate_up_proj.shape[0]).tolist()
    runs = tokens[order // router.top_k].split_with_sizes(counts)
    made = torch.cat([_expert(run, experts, number) for number, run in enumerate(runs)])
    made = made[order.argsort()].view(*scores.shape, x.shape[-1])
    return (made * scores.unsqueeze(-1)).sum(1).view(x.shape), scores


def _expert(rows: Tensor, experts: Any, number: int) -> Tensor:  # noqa: ANN401 - a module of any model
    """What one expert makes of its rows, (S, H) -> (S, H): down(swiglu(gate, up)), with the clamps of GPT-OSS."""
    gate_up = rows @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number]
    gate = gate_up[..., 0::2].clamp(max=experts.limit)
    up = gate_up[..., 1::2].clamp(-experts.limit, experts.limit)
    activated = (up + 1) * (gate * torch.sigmoid(experts.alpha * gate))
    down: Tensor = activated @ experts.down_proj[number] + experts.down_proj_bias[number]
    return down


def shared(
    x: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    activation: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """What an expert that every token goes through makes of x (..., H). up is (S, H) and (S,), down (H, S) and (H,)."""
    act = functional.gelu if activation is None else activation
    return functional.linear(act(functional.linear(x, *up)), *down)
