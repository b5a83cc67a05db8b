"""Layers: `forward` alone, without a state of its own, to be put into a module that has it.

x is a float tensor of any strides; the result is new, of its dtype and device. What is tiled in published builds to
save memory is not here: the numbers are the same.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from . import loss, rotary
from .formulas import geglu, rms_norm, swiglu


class LigerRMSNorm(nn.Module):
    """weight * x / sqrt(mean(x ** 2) + variance_epsilon) over the last dimension, (..., H) -> (..., H).

    `weight` (H,) and `variance_epsilon` are those of the module which this is put into.
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class LigerLinear(nn.Module):
    """input @ weight.T + bias, (..., K) -> (..., N), with the module's `weight` (N, K) and `bias` (N,) or None."""

    can_torch_compile: bool = True
    has_backward: bool = True

    weight: Tensor
    bias: Any

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, D102 - the published name; the class says it
        return functional.linear(input, self.weight, self.bias)


class LigerSwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), the projections being layers of the module."""

    can_torch_compile: bool = True
    has_backward: bool = True

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class LigerGEGLUMLP(nn.Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)) with gelu by tanh, the projections being layers of the module."""

    can_torch_compile: bool = True
    has_backward: bool = True

    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class LigerTiledSwiGLUMLP(LigerSwiGLUMLP):
    """As LigerSwiGLUMLP."""


class LigerTiledGEGLUMLP(LigerGEGLUMLP):
    """As LigerGEGLUMLP."""


class liger_rotary_pos_emb_layer(nn.Module):  # noqa: N801 - the published name
    """Queries and keys turned, as `liger_rotary_pos_emb` does it."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(  # noqa: D102 - the function says it
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        return rotary.liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class LigerForCausalLMLossLayer(nn.Module):
    """The loss of a language model, as `LigerForCausalLMLoss` computes it."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(  # noqa: D102 - the function says it
        self,
        logits: None,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: int | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        hidden_states: Tensor | None = None,
        lm_head_weight: Tensor | None = None,
        lm_head_bias: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401 - the published signature
    ) -> Tensor:
        return loss.LigerForCausalLMLoss(
            logits,
            labels,
            vocab_size,
            num_items_in_batch,
            ignore_index,
            shift_labels,
            hidden_states,
            lm_head_weight,
            lm_head_bias,
            **kwargs,
        )
