"""Weights in NVFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .quantize import check_matrix, global_scale_for, quantize
from .swizzle import swizzle


@dataclass
class PackedWeight:
    """A weight (n, k): element = code * scale of its group / global_scale.

    qweight: (n, k / 2) uint8, two e2m1 codes a byte, the one with the lower k in the low four bits.
    sf: int32, e4m3 scales as `swizzled_sf_shape` and the tiles of tensor cores have them.
    global_scale: (1,) float32.
    n, k: rows and columns.
    swiglu: whether it is two weights, gates above what they open.
    sf_rowmajor: (n, k / 16) uint8, the same scales row by row; None where they are not there.
    """

    qweight: Tensor
    sf: Tensor
    global_scale: Tensor
    n: int
    k: int
    swiglu: bool = False
    sf_rowmajor: Tensor | None = None

    def to(self, device: str | torch.device) -> PackedWeight:
        """The same on another device."""
        return PackedWeight(
            qweight=self.qweight.to(device),
            sf=self.sf.to(device),
            global_scale=self.global_scale.to(device),
            n=self.n,
            k=self.k,
            swiglu=self.swiglu,
            sf_rowmajor=None if self.sf_rowmajor is None else self.sf_rowmajor.to(device),
        )


def pack(
    w: Tensor,
    device: str | torch.device | None = None,
    swiglu: bool = False,  # noqa: FBT001, FBT002 - as published
) -> PackedWeight:
    """Quantise a weight, rounded to bfloat16 first.

    Args:
        w: (N, K) float, K a multiple of 16.
        device: where the packed weight shall lie; where `w` lies if None.
        swiglu: whether it is two weights, gates above what they open.

    Raises:
        TypeError: the dtype of `w`.
        ValueError: the shape of `w`.
    """
    check_matrix(w)
    rounded = w.detach().to(device if device is not None else w.device, torch.bfloat16)
    global_scale = global_scale_for(rounded)
    qweight, scales = quantize(rounded.to(torch.float32), global_scale)
    n, k = w.shape
    return PackedWeight(qweight, swizzle(scales), global_scale, n, k, swiglu, scales)


def pack_swiglu(w_gate: Tensor, w_up: Tensor, device: str | torch.device | None = None) -> PackedWeight:
    """Two weights (N, K) of a gated MLP as one of (2 * N, K), gates above.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, or that the two are not alike.
    """
    if w_gate.shape != w_up.shape:
        raise ValueError(f"w_up: expected shape {tuple(w_gate.shape)}, that of w_gate, got {tuple(w_up.shape)}")
    return pack(torch.cat([w_gate, w_up], dim=0), device, swiglu=True)
