"""The gated activation of GPT-OSS."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .numerics import InFlexData, OutFlexData
from .routing import RoutingData


@dataclass(frozen=True)
class FlexCtx:
    """Scales of whole tensors; only the defaults are taken."""

    out_data: OutFlexData = field(default_factory=OutFlexData)
    inp_data: InFlexData = field(default_factory=InFlexData)
    saturate_inf: bool = False

    @property
    def is_default(self) -> bool:
        """Whether nothing is scaled."""
        return self.out_data.is_default and self.inp_data.is_default and not self.saturate_inf


@dataclass(frozen=True)
class PrecisionConfig:
    """How far a gate may go up, and the other half up and down; None for any far."""

    limit: float | None
    flex_ctx: FlexCtx = field(default_factory=FlexCtx)


def swiglu_fn(input: Tensor, alpha: float, limit: float | None) -> Tensor:  # noqa: A002 - as published
    """(..., 2 * N) -> (..., N): gate * sigmoid(alpha * gate) * (linear + 1) in float32.

    Gates are the even columns, clamped to at most `limit`; the odd ones are linear, clamped to within -limit and limit.
    """
    gate, linear = input[..., ::2].to(torch.float32), input[..., 1::2].to(torch.float32)
    if limit is not None:
        gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + 1)


def swiglu(
    a: Tensor, alpha: float, precision_config: PrecisionConfig, routing_data: RoutingData | None = None
) -> Tensor:
    """`swiglu_fn` in the dtype of `a`; with `routing_data`, zeros in the rows past the places of experts.

    Args:
        a: (..., 2 * N) bfloat16, float16 or float32; (R, 2 * N) with `routing_data`.
        alpha: see `swiglu_fn`.
        precision_config: with the limit.
        routing_data: of the rows of `a`, in the order of experts.

    Raises:
        TypeError: the dtype of `a`.
        ValueError: an odd last dimension, `flex_ctx`, or `a` that is not (R, 2 * N) where rows are routed.
    """
    if a.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"a: expected bfloat16, float16 or float32, got {a.dtype}")
    if a.ndim < 1 or a.shape[-1] % 2:
        raise ValueError(f"a: expected an even last dimension, got shape {tuple(a.shape)}")
    if not precision_config.flex_ctx.is_default:
        raise ValueError("precision_config: expected no scales in flex_ctx")
    out = swiglu_fn(a.detach(), alpha, precision_config.limit).to(a.dtype)
    if routing_data is None:
        return out
    if a.ndim != 2:
        raise ValueError(f"a: expected shape (R, 2 * N) for routed rows, got {tuple(a.shape)}")
    places = torch.arange(a.shape[0], device=a.device)
    return out.masked_fill((places >= routing_data.expt_hist.sum()).unsqueeze(1), 0.0)
