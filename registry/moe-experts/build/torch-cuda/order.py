# ruff: noqa: ANN001, ANN201 - arguments of kernels have no types of Python
"""In which order a persistent program goes through the tiles of the output."""

import triton
import triton.language as tl


@triton.jit
def rounds(count, across, HALVED: tl.constexpr):
    """How many tiles there are, how many fill whole rounds of all programs, and at which number to end.

    In the last round most programs may have nothing to do. If HALVED, its tiles are then cut into an upper and a lower
    half, which have numbers of their own.
    """
    total = tl.load(count) * across
    programs = tl.num_programs(0)
    whole = total // programs * programs
    end = total
    if HALVED:
        halves = 2 * (total - whole)
        end = tl.where(halves <= programs, whole + halves, total)
    return total, whole, end


@triton.jit
def tile_of(number, total, whole, end, tiles, across, HALVED: tl.constexpr, SHORT: tl.constexpr):
    """Expert, first row, height and place among the columns of a tile; the height of a half may be zero or less.

    Columns are swept over the tiles of rows of one sweep at a time, which share the weights that they read.
    """
    is_half = (number >= whole) & (end > total)
    index = tl.where(is_half, whole + (number - whole) // 2, number)
    # Each tile of a sweep counts for as many as there are columns, so that this one is of the same sweep.
    any_of_sweep = tiles + 5 * (index // across)
    first = tl.load(any_of_sweep + 3)
    size = tl.load(any_of_sweep + 4)
    within = index - first * across
    tile = tiles + 5 * (first + within % size)
    row = tl.load(tile + 1)
    height = tl.load(tile + 2)
    if HALVED:
        above = tl.where(is_half, (number - whole) % 2 * SHORT, 0)
        row += above
        height = tl.where(is_half, tl.minimum(height - above, SHORT), height)
    return tl.load(tile), row, height, within // size
