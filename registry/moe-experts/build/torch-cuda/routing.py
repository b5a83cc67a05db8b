# ruff: noqa: ANN001, ANN202 - arguments of kernels have no types of Python
"""Which rows go to which expert, found on the device and left there."""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tiles of rows, of one expert, that share a sweep over the columns at most: each step of a weight is then read from
# memory once, for all of them.
SWEEP: Final = tl.constexpr(20)


class Routing(NamedTuple):
    """The real slots of all tokens, sorted by expert; S = T * k is the most that there can be.

    Attributes:
        order: (S,) int32, the slot that comes at each place; not written past the last real one.
        place: (S,) int32, the place of each slot; not written for sentinels.
        offsets: (E + 1,) int32, the first place of each expert, and the number of real slots.
        tiles: (most, 5) int32: expert, first place and height of each tile of rows; the first tile of its sweep, and
            how many tiles that has.
        count: (1,) int32, how many tiles there are.
        most: how many tiles there could be.
    """

    order: Tensor
    place: Tensor
    offsets: Tensor
    tiles: Tensor
    count: Tensor  # type: ignore[assignment]  # nobody counts items of this tuple
    most: int


def route(top_k_index: Tensor, experts: int, height: int) -> Routing:
    """Sort the slots by expert, those of one expert staying in order, and cut their rows into tiles of `height`."""
    ids = top_k_index if top_k_index.dtype in (torch.int32, torch.int64) else top_k_index.to(torch.int64)
    slots = ids.numel()
    most = min(slots, slots // height + experts)
    order, place, offsets, tiles, count = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (slots, slots, experts + 1, 5 * most, 1)
    )
    _route[(experts,)](
        ids,
        order,
        place,
        offsets,
        tiles,
        count,
        slots,
        ids.shape[1],
        ids.stride(),
        experts,
        height,
        CONTIGUOUS=ids.is_contiguous(),
        BINS=triton.next_power_of_2(experts + 1),
        # Two sizes, so that no more are compiled.
        BLOCK=1024 if slots <= 1024 else 4096,
        num_warps=8,
    )
    return Routing(order, place, offsets, tiles, count, most)


@triton.jit
def _expert_of(ids, slot, slots, k, strides, experts, CONTIGUOUS: tl.constexpr):
    """Experts of a block of slots, `experts` for sentinels and past the end."""
    at = slot if CONTIGUOUS else (slot // k).to(tl.int64) * strides[0] + slot % k * strides[1]
    expert = tl.load(ids + at, mask=slot < slots, other=-1)
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)


# How many slots there are changes from call to call, and is nothing to compile for.
@triton.jit(do_not_specialize=["slots"])
def _route(
    ids,
    order,
    place,
    offsets,
    tiles,
    count,
    slots,
    k,
    strides,
    experts,
    height,
    CONTIGUOUS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program an expert. Each counts all slots, so that none waits for another."""
    me = tl.program_id(0)
    bins = tl.arange(0, BINS)
    rows = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        rows += tl.histogram(_expert_of(ids, slot, slots, k, strides, experts, CONTIGUOUS), BINS)
    heights = (rows + height - 1) // height
    first = tl.sum(tl.where(bins < me, rows, 0))
    mine = tl.sum(tl.where(bins == me, rows, 0))
    first_tile = tl.sum(tl.where(bins < me, heights, 0))
    my_tiles = (mine + height - 1) // height
    tl.store(offsets + me + 1, first + mine)
    if me == 0:
        tl.store(offsets, 0)
    if me == experts - 1:
        tl.store(count, first_tile + my_tiles)
    # As many sweeps as are needed, of one size.
    sweep = tl.maximum(tl.cdiv(my_tiles, tl.cdiv(my_tiles, SWEEP)), 1)
    for start in range(0, my_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        at = tiles + 5 * (first_tile + tile)
        there = tile < my_tiles
        tl.store(at, me, mask=there)
        tl.store(at + 1, first + tile * height, mask=there)
        tl.store(at + 2, tl.minimum(mine - tile * height, height), mask=there)
        tl.store(at + 3, first_tile + tile // sweep * sweep, mask=there)
        tl.store(at + 4, tl.minimum(my_tiles - tile // sweep * sweep, sweep), mask=there)
    next_place = first
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        is_mine = _expert_of(ids, slot, slots, k, strides, experts, CONTIGUOUS) == me
        at = next_place + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(order + at, slot, mask=is_mine)
        tl.store(place + slot, at, mask=is_mine)
        next_place += tl.sum(is_mine.to(tl.int32))
