"""Which rows go to which expert."""

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The slots of all tokens, S = T * k of them, sorted by expert; sentinels come last.

    Attributes:
        is_real: (S,) bool, by slot: it is no sentinel.
        order: (S,) int64, the slot that comes at each place.
        place: (S,) int64, the place of each slot.
        offsets: (E,) int32, the place after the last one of each expert.
    """

    is_real: Tensor
    order: Tensor
    place: Tensor
    offsets: Tensor


def route(top_k_index: Tensor, experts: int) -> Routing:
    """Sort the slots by expert, those of one expert staying in order."""
    ids = top_k_index.reshape(-1).to(torch.int64)  # a uint64 beyond int64 becomes negative: a sentinel all the same
    is_real = (ids >= 0) & (ids < experts)
    ids, order = torch.where(is_real, ids, experts).sort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    each = torch.arange(experts, device=ids.device)
    return Routing(is_real, order, place, torch.searchsorted(ids, each, right=True, out_int32=True))


def sort_rows(hidden_states: Tensor, slots: int, routing: Routing) -> Tensor:
    """The hidden state of each slot, in order, (S, H). Those of sentinels are zeros, and give no gradient."""
    # Expanded first: the gradients of a token's slots then meet in one sum, and not one by one in the hidden dtype.
    tokens, hidden = hidden_states.shape
    each = hidden_states.unsqueeze(1).expand(tokens, slots, hidden).reshape(tokens * slots, hidden)
    return torch.where(routing.is_real[routing.order].unsqueeze(1), each[routing.order], 0)


def sum_slots(y: Tensor, top_k_weights: Tensor, routing: Routing) -> Tensor:
    """The weighted sum (T, H) of each token's rows of y (S, H), which are in order."""
    weights = torch.where(routing.is_real, top_k_weights.reshape(-1).float(), 0)
    weighted = y[routing.place].float() * weights.unsqueeze(1)
    return weighted.view(*top_k_weights.shape, y.shape[1]).sum(1).to(y.dtype)
