"""Liger: layers and the loss of language models, for training.

The loss of a token, with c its logits (capped to softcap * tanh(logits / softcap) where there is a softcap), y its
label, w the weights of the classes (ones where there are none), V classes, and lse = log(sum(exp(c))):

    hard   = w[y] * (lse - c[y])
    smooth = sum over i: w[i] * (lse - c[i]) / V
    loss   = ((1 - label_smoothing) * hard + label_smoothing * smooth) / W + lse_square_scale * lse ** 2 / N

times softmax(c)[y], through which no gradient goes, with `use_token_scaling`. For the mean, W is the sum of w[y] and N
the number of tokens that have a label; for the sum, both are 1, and the sum is divided by `num_items_in_batch`.

Sources: Szegedy et al. (arXiv:1512.00567), section 7, for the smoothing; PaLM (arXiv:2204.02311), section 5, for the
square; Gemma 2 (arXiv:2408.00118) for the cap; Wu et al. (arXiv:2508.05629) for the scaling by token;
Zhang and Sennrich (arXiv:1910.07467) for the norm, Shazeer (arXiv:2002.05202) for the gated MLPs, Su et al.
(arXiv:2104.09864), 3.4, for the rotary embedding. Names are those of kernels-community/liger-kernels, version 3.

The reference build does all of this. So do the published Triton builds (version 3) behind the guards of the manifest,
with these exceptions:

- Backward is made to be the last use of what it is given. That of LigerRMSNorm writes into the gradient to its output,
  which is wrong where another branch gets the same gradient, as in `x + norm(y)`, so that `kernelize` does not take it
  for training; those of the MLPs write into what `gate_proj` and `up_proj` returned, and cannot run twice.
- `liger_rotary_pos_emb` computes in the dtype of cos and sin, and gives these no gradient. Its layer, which no guard
  stands before, takes `unsqueeze_dim` for 1 whatever it is, and writes into q, k or a gradient that is a transposed
  contiguous (B, T, heads, D).
- The loss multiplies, and sums the gradients to its weights, in the dtype of `hidden_states`, or under autocast in that
  of autocast; the reference does both in float32, whatever autocast says. It gives the weights none where
  `hidden_states` need none, wants these contiguous, and fails without a token. It counts labels on the host, so that it
  breaks the graph under torch.compile and cannot be captured in a CUDA graph. With a cap, classes that pad its blocks
  count as if their score were minus the cap: with few classes and a small cap the loss is too large, and its gradients
  are off. Its backward scales in place the gradients that forward made: unless the gradient to it is 1, a second
  backward (`retain_graph=True`) scales them twice. Other errors tell what is wrong; shapes and labels are not looked
  at.
- Compiled graphs that contain LigerRMSNorm are known to differ, so that it does not say that it can be compiled.
- The tiled layers, LigerLinear included, want two dimensions or more.

LigerLinear, like the projections of the MLPs, multiplies in the dtype of autocast where that is on, as nn.Linear does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["CausalLMLoss", "Layers", "Liger", "RotaryPosEmb"]


class CausalLMLoss(Protocol):
    """`LigerForCausalLMLoss`."""

    def __call__(
        self,
        logits: None,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        lm_head_weight: torch.Tensor | None = None,
        lm_head_bias: torch.Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401 - the published signature
    ) -> torch.Tensor:
        """The cross entropy of the next tokens, by the formula at the top of this module.

        The logits are hidden_states @ lm_head_weight.T + lm_head_bias, of some tokens at a time.

        Args:
            logits: not looked at.
            labels: (..., T) int64, the tokens themselves: the one at t + 1 is the label of what is at t.
            vocab_size: not looked at.
            num_items_in_batch: what the sum is divided by; None for the mean over tokens that have a label.
            ignore_index: the label of tokens that do not count. Others lie within 0 and V.
            shift_labels: (..., T) int64, takes the place of `labels` and is not shifted.
            hidden_states: (..., T, H) float, needed.
            lm_head_weight: (V, H) of the dtype of `hidden_states`, needed.
            lm_head_bias: (V,) of the dtype of `hidden_states`.
            **kwargs: `hidden_size`, which is H and needed; `final_logit_softcapping`, the softcap; `ce_weight` (V,)
                float, `label_smoothing`, `lse_square_scale` and `use_token_scaling` of the formula. Others that models
                pass are not looked at.

        Returns:
            One float32 number (float64 where `hidden_states` are). Zero for the mean over no token. Differentiable in
            `hidden_states`, `lm_head_weight` and `lm_head_bias`.

        Raises:
            TypeError: the dtype of an argument.
            ValueError: what is needed is not there, or a shape; `return_z_loss`, which would return something else.
        """
        ...


class RotaryPosEmb(Protocol):
    """`liger_rotary_pos_emb`."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves x1 and x2 of each head of q and k.

        Args:
            q: (B, heads, T, D) float with D even.
            k: (B, key heads, T, D), as q.
            cos: (1 or B, T, D), or D / 2. Columns from D / 2 on are not read.
            sin: as cos.
            unsqueeze_dim: where the heads are: 1, or 2 for (B, T, heads, D).

        Returns:
            q and k turned, new tensors of their shapes and dtypes. Differentiable in q and k.

        Raises:
            ValueError: D is odd, or the last dimension of cos or sin is neither D nor D / 2.
        """
        ...


class Layers(Protocol):
    """`layers`: classes whose `forward` is put into a module that has what it names; differentiable in all of it.

    Attributes:
        LigerRMSNorm: `forward(hidden_states)`, (..., H) -> (..., H): weight * x / sqrt(mean(x ** 2) + variance_epsilon)
            over the last dimension, with the module's `weight` (H,) and `variance_epsilon`. The mean is taken in
            float32, and what `weight` multiplies is rounded to the dtype of x, which the result has.
        LigerLinear: `forward(input)`, (..., K) -> (..., N): input @ weight.T + bias, with the module's `weight` (N, K)
            and `bias` (N,) or None.
        LigerSwiGLUMLP: `forward(x)`: down_proj(silu(gate_proj(x)) * up_proj(x)), the projections being layers of the
            module. The gate is computed in float32, and rounded before it is multiplied.
        LigerGEGLUMLP: the same with gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))).
        LigerTiledSwiGLUMLP: the same as LigerSwiGLUMLP, in runs of rows, and once more in backward.
        LigerTiledGEGLUMLP: the same as LigerGEGLUMLP, in runs of rows, and once more in backward.
        liger_rotary_pos_emb_layer: `forward` is `liger_rotary_pos_emb`.
        LigerForCausalLMLossLayer: `forward` is `LigerForCausalLMLoss`.
    """

    LigerRMSNorm: type[nn.Module]
    LigerLinear: type[nn.Module]
    LigerSwiGLUMLP: type[nn.Module]
    LigerGEGLUMLP: type[nn.Module]
    LigerTiledSwiGLUMLP: type[nn.Module]
    LigerTiledGEGLUMLP: type[nn.Module]
    liger_rotary_pos_emb_layer: type[nn.Module]
    LigerForCausalLMLossLayer: type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class Liger:
    """The entrypoints of `liger`."""

    __kernel__: ClassVar = "liger"

    layers: Layers
    LigerForCausalLMLoss: CausalLMLoss
    liger_rotary_pos_emb: RotaryPosEmb
