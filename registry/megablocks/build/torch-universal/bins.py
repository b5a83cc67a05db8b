"""Ops on bins: runs of a row, given by where each of them ends.

Numbers are int16, int32 or int64 unless said otherwise. `out` has the dtype and device that the op says; anything else
is a TypeError or a ValueError. No op waits for the device.
"""

from typing import Final

import torch
from torch import Tensor

_BITS: Final = {torch.int16: 16, torch.int32: 32, torch.int64: 64}


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> Tensor:
    """Set out to the sum of what comes before each element of x along `dim`, wrapping around in the dtype of x."""
    _check_integers("x", x)
    _check_output("out", out, x, tuple(x.shape))
    return out.copy_(x.cumsum(dim) - x)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> Tensor:
    """Set out to the sum of what comes before each element of x along `dim` and the element, as `exclusive_cumsum`."""
    _check_integers("x", x)
    _check_output("out", out, x, tuple(x.shape))
    return out.copy_(x.cumsum(dim))


def cumsum(x: Tensor, dim: int = -1, exclusive: bool = False) -> Tensor:  # noqa: FBT001, FBT002 - as published
    """As `inclusive_cumsum`, or `exclusive_cumsum`, into a new tensor."""
    return (exclusive_cumsum if exclusive else inclusive_cumsum)(x, dim, torch.empty_like(x))


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """How often 0 .. num_bins - 1 occur in each row, (N,) -> (num_bins,) or (B, N) -> (B, num_bins), int32.

    Numbers out of this range are not counted.
    """
    _check_integers("x", x)
    if x.ndim not in (1, 2):
        raise ValueError(f"x: expected shape (N,) or (B, N), got {tuple(x.shape)}")
    if num_bins < 0:
        raise ValueError(f"num_bins: expected a number >= 0, got {num_bins}")
    index = x.long()
    index = torch.where((index < 0) | (index >= num_bins), num_bins, index)
    counts = torch.zeros((*x.shape[:-1], num_bins + 1), dtype=torch.int32, device=x.device)
    return counts.scatter_add(-1, index, torch.ones_like(index, dtype=torch.int32))[..., :num_bins].contiguous()


def indices(padded_bins: Tensor, block_size: int, output_block_rows: int, output_block_columns: int) -> Tensor:
    """The columns of each row of blocks: those of bin b are b * columns .. (b + 1) * columns - 1.

    Args:
        padded_bins: (E,) int32, where each bin ends, multiples of `block_size`.
        block_size: rows of a block.
        output_block_rows: how many rows of blocks there are.
        output_block_columns: blocks of a row.

    Returns:
        (output_block_rows * output_block_columns,) int16. Rows past the last bin are zeros.
    """
    _check_bins("padded_bins", padded_bins)
    if block_size < 1:
        raise ValueError(f"block_size: expected a positive number, got {block_size}")
    rows = torch.arange(output_block_rows, device=padded_bins.device)
    bins, inside = _bin_of(rows * block_size, padded_bins)
    columns = torch.arange(output_block_columns, device=padded_bins.device)
    blocks = bins.unsqueeze(1) * output_block_columns + columns
    return torch.where(inside.unsqueeze(1), blocks, 0).to(torch.int16).flatten()


def replicate_forward(x: Tensor, bins: Tensor, out: Tensor) -> Tensor:
    """Set out[:, j] = x[:, b] for each j of bin b, (B, E) -> (B, N). What lies past the last bin stays as it is.

    x has any dtype, and `bins` (E,) int32 says where each bin ends.
    """
    _check_matrix("x", x, bins)
    _check_output("out", out, x, (x.shape[0], *out.shape[1:]) if out.ndim == 2 else (x.shape[0], -1))
    if not bins.numel():
        return out
    bin_of, inside = _bin_of(torch.arange(out.shape[1], device=x.device), bins)
    return out.copy_(torch.where(inside, x[:, bin_of.clamp(max=len(bins) - 1)], out))


def replicate_backward(grad: Tensor, bins: Tensor, out: Tensor) -> Tensor:
    """Set out[:, b] to the sum of grad[:, j] over bin b, (B, N) -> (B, E), added in float32 at least.

    grad is a float tensor, and `bins` (E,) int32 says where each bin ends. What lies past the last bin is not read.
    """
    _check_bins("bins", bins)
    if not grad.dtype.is_floating_point:
        raise TypeError(f"grad: expected a floating-point dtype, got {grad.dtype}")
    if grad.ndim != 2:
        raise ValueError(f"grad: expected shape (B, N), got {tuple(grad.shape)}")
    _check_output("out", out, grad, (grad.shape[0], len(bins)))
    bin_of, _ = _bin_of(torch.arange(grad.shape[1], device=grad.device), bins)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    sums = torch.zeros((grad.shape[0], len(bins) + 1), dtype=wide, device=grad.device)
    return out.copy_(sums.index_add(1, bin_of, grad.to(wide))[:, :-1])


def sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> Tensor:
    """Order x (N,) by its lowest `end_bit` bits, those that agree in them staying in order.

    x_out gets the numbers and iota_out where they were, both of the dtype of x. With as many bits as the dtype has, or
    more, negative numbers come first. Returns x_out.
    """
    _check_integers("x", x)
    if x.ndim != 1:
        raise ValueError(f"x: expected shape (N,), got {tuple(x.shape)}")
    if end_bit < 0:
        raise ValueError(f"end_bit: expected a number >= 0, got {end_bit}")
    _check_output("x_out", x_out, x, tuple(x.shape))
    _check_output("iota_out", iota_out, x, tuple(x.shape))
    key = x if end_bit >= _BITS[x.dtype] else x & ((1 << end_bit) - 1)
    order = key.argsort(stable=True)
    iota_out.copy_(order)
    return x_out.copy_(x[order])


def argsort(x: Tensor, end_bit: int = 32) -> tuple[Tensor, Tensor]:
    """The numbers in order and where they were, as `sort`, in new tensors."""
    x_out, iota_out = torch.empty_like(x), torch.empty_like(x)
    return sort(x, end_bit, x_out, iota_out), iota_out


def _bin_of(places: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """The bin of each place, int64, and whether it lies in one; past the last, the number of bins."""
    found = torch.searchsorted(bins.long(), places.contiguous(), right=True)
    return found, found < len(bins)


def _check_integers(name: str, x: Tensor) -> None:
    if x.dtype not in _BITS:
        raise TypeError(f"{name}: expected int16, int32 or int64, got {x.dtype}")


def _check_bins(name: str, bins: Tensor) -> None:
    if bins.dtype != torch.int32:
        raise TypeError(f"{name}: expected int32, got {bins.dtype}")
    if bins.ndim != 1:
        raise ValueError(f"{name}: expected shape (E,), got {tuple(bins.shape)}")


def _check_matrix(name: str, x: Tensor, bins: Tensor) -> None:
    _check_bins("bins", bins)
    if x.ndim != 2 or x.shape[1] != len(bins):
        raise ValueError(f"{name}: expected shape (B, {len(bins)}), a column for each bin, got {tuple(x.shape)}")


def _check_output(name: str, out: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    # copy_ alone would broadcast, cast and change devices in silence, which no compiled kernel does.
    if out.dtype != like.dtype:
        raise TypeError(f"{name}: expected {like.dtype}, got {out.dtype}")
    if tuple(out.shape) != shape:
        wanted = str(shape).replace("-1", "N")
        raise ValueError(f"{name}: expected shape {wanted}, got {tuple(out.shape)}")
    if out.device != like.device:
        raise ValueError(f"{name}: expected on {like.device}, got {out.device}")
