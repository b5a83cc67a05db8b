"""Sonic MoE: the MLP of a mixture of experts, with or without the router in front of it, forward and backward.

A row r is a token t(r), an expert e(r) and a score s(r). Each token gets

    o[t] = sum over its rows: s * (w2[e] @ (act(gate) * up) + b2[e])        gate, up = w1[e] @ x[t] + b1[e]

in float32 (float64 for float64), cast to the dtype of x at the end; act is silu (SWIGLU), or the gelu by tanh (GEGLU).

==========  =====================  ==================================================================================
argument    shape                  layout
==========  =====================  ==================================================================================
x           (T, H)                 float
w1          (2I, H, E)             rows are gate and up in turn; with `concat_layout` all gates, then all ups
b1          (E, 2I) or None        ordered as the rows of w1
w2          (H, I, E)
b2          (E, H) or None         None exactly where b1 is
==========  =====================  ==================================================================================

Weights have the expert last: of a parameter (E, 2I, H) it is `parameter.permute(1, 2, 0)`, which is also the layout in
memory that published builds want. All of them have the dtype and the device of x.

Sentinels: a row with an expert id of E or more belongs to another device. It adds nothing to its token, is counted for
no expert, and its score gets a gradient of exactly zero, whatever stands in it, NaN included. A token without other
rows comes out as zeros.

Gradients: to x, scores, w1, b1, w2, b2, and to the router where there is one. An expert without rows gets zeros.

Source: Guo et al., SonicMoE (arXiv:2512.14080), and the layouts of kernels-community/sonic-moe, version 2, whose
parameter names these are.

The reference build does all of this. Code that must also run on published builds keeps to what those do: bfloat16 or
float16, H and I multiples of 8, at least one token, expert ids below 65536, and intermediate results rounded to the
dtype of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Activation", "ActivationTypes", "GeneralRouting", "SonicMoE", "TopKRouting"]


class Activation(Protocol):
    """A member of `ActivationType`."""

    @property
    def value(self) -> Any:  # noqa: ANN401 - text, of an enum that does not say so
        """The name, such as "swiglu"."""
        ...


class ActivationTypes(Protocol):
    """`ActivationType`, the enum of the build: what lies between the two products. `ActivationType("swiglu")` works.

    Attributes:
        SWIGLU: "swiglu", silu(gate) * up.
        GEGLU: "geglu", gelu(gate) * up, the gelu by tanh.
    """

    SWIGLU: Activation
    GEGLU: Activation

    def __call__(self, value: str) -> Activation:
        """The member of a value."""
        ...


class GeneralRouting(Protocol):
    """`moe_general_routing_inputs`: rows in any number a token."""

    def __call__(
        self,
        x: torch.Tensor,
        router_scores: torch.Tensor,
        token_indices: torch.Tensor,
        expert_indices: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        E: int,
        stream_id: int,
        activation_type: Activation,
        is_inference_mode_enabled: bool = False,  # noqa: FBT001, FBT002 - the published signature
        concat_layout: bool = False,  # noqa: FBT001, FBT002 - the published signature
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum, for each token, what the experts of its rows make of it, weighted by their scores.

        Args:
            x: (T, H) bfloat16, float16 or float32.
            router_scores: (R,) float of any dtype, one for each row; used in float32.
            token_indices: (R,) int32, ascending, each within 0 and T; the same token may come any number of times.
            expert_indices: (R,) int32. E and above are sentinels.
            w1: (2I, H, E).
            b1: (E, 2I), or None.
            w2: (H, I, E).
            b2: (E, H), or None.
            E: number of experts.
            stream_id: a number; work is done on the current stream, whatever it is.
            activation_type: SWIGLU or GEGLU of this bundle's `ActivationType`.
            is_inference_mode_enabled: keep nothing for a backward; the result must not be differentiated.
            concat_layout: see `w1` at the top of this module.

        Returns:
            (T, H) in the dtype of x, contiguous, and how many rows each expert has, (E,) int32.

        Raises:
            TypeError: a dtype, or something that is no activation.
            ValueError: a shape or device, another activation, tokens that do not ascend within T, or an expert below 0.
        """
        ...


class TopKRouting(Protocol):
    """`moe_TC_softmax_topk_layer`: a router, and the K best experts of each token."""

    def __call__(
        self,
        x: torch.Tensor,
        router_w: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        K: int,
        stream_id: int,
        activation_type: Activation | str = ...,
        is_inference_mode_enabled: bool = False,  # noqa: FBT001, FBT002 - the published signature
        is_softmax_over_topk: bool = True,  # noqa: FBT001, FBT002 - the published signature
        norm_topk_probs: bool = False,  # noqa: FBT001, FBT002 - the published signature
        concat_layout: bool = False,  # noqa: FBT001, FBT002 - the published signature
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Send each token to the K experts with the largest logits x @ router_w.T.

        Logits are in the dtype of x, scores in float32. Which of two experts with equal logits is chosen is not
        promised; builds may take logits for equal that differ by less than E * 2 ** -23 of themselves.

        Args:
            x: (T, H) bfloat16, float16 or float32.
            router_w: (E, H) of the dtype of x.
            w1: (2I, H, E).
            b1: (E, 2I), or None.
            w2: (H, I, E).
            b2: (E, H), or None.
            K: experts of each token, 1 to E.
            stream_id: a number; work is done on the current stream, whatever it is.
            activation_type: SWIGLU (the default) or GEGLU, or their values.
            is_inference_mode_enabled: keep nothing for a backward; the first result must not be differentiated.
            is_softmax_over_topk: scores are the softmax over the K logits, which sums to 1. Otherwise they are those of
                the softmax over all E.
            norm_topk_probs: in the second case, divided by their sum. Not looked at in the first.
            concat_layout: see `w1` at the top of this module.

        Returns:
            (T, H) in the dtype of x, contiguous; the logits (T, E) in the dtype of x, differentiable; and how many rows
            each expert has, (E,) int32.

        Raises:
            TypeError: a dtype, or something that is no activation.
            ValueError: a shape or device, another activation, or K not within 1 and E.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SonicMoE:
    """The entrypoints of `sonic_moe`."""

    __kernel__: ClassVar = "sonic_moe"

    moe_general_routing_inputs: GeneralRouting
    moe_TC_softmax_topk_layer: TopKRouting  # noqa: N815 - the published name
    ActivationType: ActivationTypes
