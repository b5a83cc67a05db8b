"""Scales of whole tensors, for FP8 on either side of the product: here there are none, and the classes stay empty."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InFlexData:
    """How an input is read. Only the defaults are taken."""

    dtype: torch.dtype | None = None
    scale: Tensor | None = None

    @property
    def is_default(self) -> bool:
        """Whether nothing is scaled or read as something else."""
        return self.dtype is None and self.scale is None


@dataclass(frozen=True)
class OutFlexData:
    """How an output is written. Only the defaults are taken."""

    dtype: torch.dtype | None = None
    expected_scale: Tensor | None = None
    actual_scale: Tensor | None = None
    checksum_scale: Tensor | None = None

    @property
    def is_default(self) -> bool:
        """Whether nothing is scaled or written as something else."""
        scales = (self.expected_scale, self.actual_scale, self.checksum_scale)
        return self.dtype is None and all(scale is None for scale in scales)
