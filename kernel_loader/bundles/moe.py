"""Mixture-of-experts layers: everything between the router and the residual stream, in one call.

A token t has k slots; slot (t, j) names an expert e = top_k_index[t, j] of the E that are here, and that expert is a
two-layer perceptron. With X = hidden_states, W and V the two weights, b and c their biases where there are any:

    z(t, j)  = X[t] @ W[e].T + b[e]              gate and up together
    h(t, j)  = activation(z(t, j))               below
    y(t, j)  = h(t, j) @ V[e].T + c[e]
    out[t]   = sum over the slots j of t: top_k_weights[t, j] * y(t, j)

**Sentinels.** A slot whose id is not within 0 .. E - 1 belongs to an expert on another device (expert parallelism), or
to none. It adds nothing, gets a gradient of exactly zero, costs no matmul, and leaves no trace whatever stands in its
routing weight, in the hidden state of a token that has no other slots, or in the upstream gradient of such a token: NaN
and infinity included. A token without real slots comes out as zeros.

**Precision.** Products, biases, activations and the sum over slots are computed in float32; products of float32 inputs
in TF32 only where the user allows that to torch's own matmuls. In between, h and y are rounded to the dtype of
`hidden_states`, and so may z be, save where h is quantised. Routing weights are used in float32, and the sum over slots
is rounded once. The same call gives the same bits.

**Activations**, with gate g and up u, each I wide. Where `limit` is given, g is clamped from above to `limit` first,
and u to -limit .. limit:

==============  =======================================================================================
"silu"          g * sigmoid(g) * u
"gelu"          g * Phi(g) * u, by erf
"gelu_tanh"     the approximation of gelu by tanh, * u
"relu"          max(g, 0) * u
"relu2"         max(g, 0) ** 2 * u
"swiglu_oai"    g * sigmoid(alpha * g) * (u + 1), as in GPT-OSS, which has alpha = 1.702 and limit = 7
==============  =======================================================================================

Without a gate, z is I wide and h is the same function of it without u; "swiglu_oai" and `limit` need one.

**Layouts of weights** are those of transformers' experts modules, with the names of their flags:

=====================  ====================================  ===================
..                     gate_up_proj                          down_proj
=====================  ====================================  ===================
plain                  (E, 2I, H)                            (E, H, I)
is_transposed          (E, H, 2I)                            (E, I, H)
has_gate=False         I in the place of 2I                  the same
=====================  ====================================  ===================

Of the 2I, the first I are the gate and the rest the up; with is_concatenated=False they alternate, gate first.

**FP8 weights** are float8_e4m3fn, not transposed, with one scale a block of [bn, bk] elements: `gate_up_proj_scale` (E,
ceil(2I / bn), ceil(H / bk)) and `down_proj_scale` (E, ceil(H / bn), ceil(I / bk)), float32 or UE8M0. X is quantised in
front of the first product, and h, once in the dtype of X, in front of the second: in runs of bk along each row, by
the formula for blocks at the top of `kernel_loader.bundles.fp8`. The gradient goes straight through both quantisers.

**Gradients** go to hidden_states, top_k_weights, both biases, and weights unless they are FP8. Those of weights and
biases are written for every expert: zeros where no row came. Sums over slots and over rows are float32, rounded once to
the dtype of the input.

Sources: Shazeer et al., "Outrageously large neural networks" (arXiv:1701.06538), for the layer; transformers,
integrations/moe.py, for layouts and ids of sentinels; openai/gpt-oss for its activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    import torch

__all__ = ["Activation", "ExpertsForward", "MoEExperts"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai"]


class ExpertsForward(Protocol):
    """`experts_forward`: what the experts of a layer make of the hidden states."""

    def __call__(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        gate_up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        *,
        gate_up_proj_bias: torch.Tensor | None = None,
        down_proj_bias: torch.Tensor | None = None,
        gate_up_proj_scale: torch.Tensor | None = None,
        down_proj_scale: torch.Tensor | None = None,
        block_size: Sequence[int] | None = None,
        activation: Activation = "silu",
        alpha: float = 1.702,
        limit: float | None = None,
        has_gate: bool = True,
        is_concatenated: bool = True,
        is_transposed: bool = False,
    ) -> torch.Tensor:
        """The weighted sum of a token's experts, (T, H) -> (T, H), by the formula at the top of this module.

        T, k, E, H and I may each be zero. No argument needs to be contiguous.

        Args:
            hidden_states: (T, H) bfloat16, float16 or float32.
            top_k_index: (T, k) of any integer dtype. An id below 0, or of E or more, is a sentinel. A token may name
                an expert twice.
            top_k_weights: (T, k) bfloat16, float16 or float32.
            gate_up_proj: (E, 2I, H) in the dtype of `hidden_states`, or float8_e4m3fn with `gate_up_proj_scale`;
                otherwise laid out as the table says.
            down_proj: (E, H, I) of the same dtype.
            gate_up_proj_bias: (E, 2I), or (E, I) without a gate; laid out as the rows of `gate_up_proj`; bfloat16,
                float16 or float32.
            down_proj_bias: (E, H), likewise.
            gate_up_proj_scale: with FP8 weights, (E, ceil(2I / bn), ceil(H / bk)) float32 or UE8M0 (float8_e8m0fnu, or
                its exponent bytes as uint8).
            down_proj_scale: with FP8 weights, (E, ceil(H / bn), ceil(I / bk)), likewise.
            block_size: [bn, bk] of FP8 weights.
            activation: one of the table.
            alpha: of "swiglu_oai"; not looked at for the others.
            limit: not below zero; None clamps nothing.
            has_gate: whether gate_up_proj holds gate and up, or up alone.
            is_concatenated: whether the gate precedes the up, or they alternate.
            is_transposed: whether the last two dimensions of both weights are exchanged.

        Returns:
            (T, H) in the dtype of `hidden_states`, contiguous.

        Raises:
            TypeError: the dtype of an argument.
            ValueError: the shape or device of an argument, an unknown activation, or options that exclude each other.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class MoEExperts:
    """The entrypoints of `moe_experts`."""

    __kernel__: ClassVar = "moe_experts"

    experts_forward: ExpertsForward
