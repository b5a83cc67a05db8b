"""Which rows go to which experts."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class GatherIndx:
    """Routes in the order of experts.

    src_indx: (R,) int32, the route, row * n_expts_act + choice, at each place; -1 past the last.
    dst_indx: (R,) int32, the place of each route; -1 for one that goes nowhere.
    """

    src_indx: Tensor
    dst_indx: Tensor


@dataclass
class ScatterIndx:
    """The same, seen from the other side: src_indx is the place of each route, dst_indx the route at each place."""

    src_indx: Tensor
    dst_indx: Tensor


@dataclass
class ExptData:
    """Where experts begin.

    hist: (E,) int32, places of each expert.
    token_offs_raw: (E + 1,) int32, the first place of each, and how many there are in all.
    """

    hist: Tensor
    token_offs_raw: Tensor


@dataclass
class RoutingData:
    """What the product and the activation are told of the experts.

    gate_scal: (R,) the weight of the route at each place.
    expt_hist: (E,) int32, places of each expert.
    n_expts_tot: E.
    n_expts_act: routes of a row.
    """

    gate_scal: Tensor
    expt_hist: Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: ExptData | None = None


def compute_expt_data(hist: Tensor, n_expts_tot: int, n_gates: int) -> ExptData:  # noqa: ARG001 - as published
    """What `RoutingData.expt_data` holds, of how many places each expert has.

    Args:
        hist: (E,) int32.
        n_expts_tot: E.
        n_gates: R.

    Raises:
        TypeError: the dtype of `hist`.
        ValueError: the shape of `hist`.
    """
    if hist.dtype != torch.int32:
        raise TypeError(f"hist: expected int32, got {hist.dtype}")
    if tuple(hist.shape) != (n_expts_tot,):
        raise ValueError(f"hist: expected shape ({n_expts_tot},), got {tuple(hist.shape)}")
    return ExptData(hist, torch.cat((hist.new_zeros(1), hist.cumsum(0, dtype=torch.int32))))


# The name that published builds have for theirs in torch.
compute_expt_data_torch = compute_expt_data


def routing(
    logits: Tensor,
    n_expts_act: int,
    sm_first: bool = False,  # noqa: FBT001, FBT002 - as published
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Send each row to the experts of its largest logits; of equal ones, to those that come first.

    Args:
        logits: (T, E) bfloat16, float16 or float32.
        n_expts_act: routes of a row.
        sm_first: weights are the softmax over all experts instead of that over the chosen ones.

    Raises:
        TypeError: the dtype of `logits`.
        ValueError: the shape of `logits`, or more routes than experts.
    """
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"logits: expected bfloat16, float16 or float32, got {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits: expected shape (T, E), got {tuple(logits.shape)}")
    experts = logits.shape[1]
    if not 1 <= n_expts_act <= experts:
        raise ValueError(f"n_expts_act: expected a number within 1 and E = {experts}, got {n_expts_act}")
    logits = logits.detach()
    scores = torch.softmax(logits, dim=1) if sm_first else logits
    chosen = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :n_expts_act].sort(dim=1).values
    weights = scores.gather(1, chosen)
    if not sm_first:
        weights = torch.softmax(weights.to(torch.float32), dim=1).to(logits.dtype)
    expert = chosen.reshape(-1)
    route = torch.sort(expert, stable=True).indices
    place = torch.empty_like(route).scatter_(0, route, torch.arange(route.numel(), device=route.device))
    hist = torch.zeros(experts, dtype=torch.int64, device=logits.device).scatter_add_(
        0, expert, torch.ones_like(expert)
    )
    hist, route32, place32 = hist.to(torch.int32), route.to(torch.int32), place.to(torch.int32)
    data = compute_expt_data(hist, experts, route.numel())
    return (
        RoutingData(weights.reshape(-1)[route], hist, experts, n_expts_act, data),
        GatherIndx(src_indx=route32, dst_indx=place32),
        ScatterIndx(src_indx=place32, dst_indx=route32),
    )
