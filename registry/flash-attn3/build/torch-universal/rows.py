"""Packed rows: which belong to which sequence."""

from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Rows of several sequences: how many rows and sequences, and where each begins and how long it is, (B,)."""

    rows: int
    first: Tensor
    lengths: Tensor

    def owners(self) -> tuple[Tensor, Tensor]:
        """The sequence of each row, and its number there; for rows of none, the last one, and what is past its end."""
        row = torch.arange(self.rows, device=self.first.device)
        owner = torch.bucketize(row, self.first[1:].contiguous(), right=True)
        return owner, row - self.first[owner]


def equal_lengths(batch: int, length: int, device: torch.device) -> Packed:
    """Sequences of one length, one after the other."""
    first = torch.arange(batch, device=device) * length
    return Packed(batch * length, first, torch.full_like(first, length))


def by_offsets(rows: int, cu_seqlens: Tensor) -> Packed:
    """Sequences from one offset to the next."""
    offsets = cu_seqlens.long()
    return Packed(rows, offsets[:-1], offsets.diff())


def unpack_lse(lse: Tensor, batch: int, length: int) -> Tensor:
    """(H, batch * length) as (batch, H, length)."""
    return lse.view(lse.shape[0], batch, length).transpose(0, 1).contiguous()
