"""The loss of a language model from its last hidden states, without all logits in memory at once.

With c = logits of a token, capped to softcap * tanh(logits / softcap) where there is a softcap, y its label, w the
weights of the classes (ones where there are none), V classes, and lse = log(sum(exp(c))):

    hard   = w[y] * (lse - c[y])
    smooth = sum over i: w[i] * (lse - c[i]) / V
    loss   = ((1 - label_smoothing) * hard + label_smoothing * smooth) / W + lse_square_scale * lse ** 2 / N

times softmax(c)[y], through which no gradient goes, with `use_token_scaling`. For the mean, W is the sum of w[y] and N
the number of tokens that have a label; for the sum, both are 1, and the sum is divided by `num_items_in_batch`.

Sources: Szegedy et al. (arXiv:1512.00567), section 7, for the smoothing; PaLM (arXiv:2204.02311), section 5, for the
square; Gemma 2 (arXiv:2408.00118) for the cap; Wu et al. (arXiv:2508.05629) for the scaling by token.
"""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .wide import wide

# Tokens whose logits are in memory at once, in forward and again in backward.
_TOKENS: Final = 512


class _Terms(NamedTuple):
    """What the loss of a token is made of besides its logits; `weights` (V,), `over_weights` and `over_tokens` ()."""

    ignore_index: int
    softcap: float | None
    weights: Tensor | None
    label_smoothing: float
    lse_square_scale: float
    use_token_scaling: bool
    over_weights: Tensor
    over_tokens: Tensor


def LigerForCausalLMLoss(  # noqa: N802 - the published name
    logits: None,  # noqa: ARG001 - models pass it
    labels: Tensor,
    vocab_size: int,  # noqa: ARG001 - models pass it
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    hidden_states: Tensor | None = None,
    lm_head_weight: Tensor | None = None,
    lm_head_bias: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401 - the published signature
) -> Tensor:
    """The cross entropy of the next tokens, by the formula at the top of this module.

    Args:
        logits: not looked at.
        labels: (B, T) int64, the tokens themselves: those at t + 1 are the labels of what is at t.
        vocab_size: not looked at.
        num_items_in_batch: what the sum is divided by; None for the mean over tokens that have a label.
        ignore_index: the label of tokens that do not count.
        shift_labels: (B, T) int64, takes the place of `labels` and is not shifted.
        hidden_states: (B, T, H) float, needed.
        lm_head_weight: (V, H) of the dtype of `hidden_states`, needed.
        lm_head_bias: (V,) of the dtype of `hidden_states`.
        **kwargs: `hidden_size`, which is H and needed; `final_logit_softcapping`, the softcap; `ce_weight` (V,) float,
            `label_smoothing`, `lse_square_scale` and `use_token_scaling` of the formula. Others are not looked at.

    Returns:
        One float32 number, or float64 where `hidden_states` are, whatever autocast says. Zero for the mean over no
        token. Differentiable in `hidden_states`, `lm_head_weight` and `lm_head_bias`, whose gradients are added up in
        that dtype, with a copy of both in memory until backward, and rounded once.

    Raises:
        TypeError: the dtype of an argument.
        ValueError: what is needed is not there, or a shape; `return_z_loss`, which would return something else.
    """
    hidden_size = kwargs.get("hidden_size")
    if hidden_size is None or hidden_states is None or lm_head_weight is None:
        raise ValueError("hidden_states, lm_head_weight and hidden_size: expected all of them, got None")
    if kwargs.get("return_z_loss"):
        raise ValueError("return_z_loss: expected False, as one number is returned, got True")
    weights = kwargs.get("ce_weight")
    _check_head(hidden_size, hidden_states, lm_head_weight, lm_head_bias, weights)
    if shift_labels is None:
        _check_labels("labels", labels, hidden_states)
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    _check_labels("shift_labels", shift_labels, hidden_states)
    rows, target = hidden_states.reshape(-1, hidden_size), shift_labels.reshape(-1).to(hidden_states.device)
    one = torch.ones((), dtype=wide(rows).dtype, device=rows.device)
    counts = target != ignore_index
    if num_items_in_batch is None:
        each = one.expand(counts.shape) if weights is None else weights.to(one)[torch.where(counts, target, 0)]
        # Where no token counts, a gradient of zero must not be divided by zero.
        over_weights = torch.where(counts.any(), torch.where(counts, each, 0.0).sum(), one)
        over_tokens = counts.sum().clamp(min=1).to(one)
    else:
        over_weights = over_tokens = one
    terms = _Terms(
        ignore_index=ignore_index,
        softcap=kwargs.get("final_logit_softcapping"),
        weights=None if weights is None else weights.to(one),
        label_smoothing=kwargs.get("label_smoothing", 0.0),
        lse_square_scale=kwargs.get("lse_square_scale", 0.0),
        use_token_scaling=kwargs.get("use_token_scaling", False),
        over_weights=over_weights,
        over_tokens=over_tokens,
    )
    total = one * 0.0
    # Once for all tokens, so that the gradients are rounded after they have been added up.
    weight, bias = wide(lm_head_weight), None if lm_head_bias is None else wide(lm_head_bias)
    for some, labels_of in zip(torch.split(rows, _TOKENS), torch.split(target, _TOKENS), strict=True):
        total = total + checkpoint(
            _loss, some, weight, bias, labels_of, terms, use_reentrant=False, preserve_rng_state=False
        )
    return total if num_items_in_batch is None else total / num_items_in_batch


LigerForCausalLMLoss.can_torch_compile = True  # type: ignore[attr-defined]  # where published builds say it


def _loss(rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, terms: _Terms) -> Tensor:
    """The sum over these tokens, ()."""
    with torch.autocast(rows.device.type, enabled=False):  # it is in float32
        logits = functional.linear(wide(rows), weight, bias)
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    counts = target != terms.ignore_index
    place = torch.where(counts, target, 0).unsqueeze(1)
    lse = torch.logsumexp(logits, dim=1)
    below = lse - logits.gather(1, place).squeeze(1)
    loss = below if terms.weights is None else below * terms.weights[place.squeeze(1)]
    if terms.label_smoothing:
        every = lse.unsqueeze(1) - logits
        smooth = (every if terms.weights is None else every * terms.weights).mean(1)
        loss = (1 - terms.label_smoothing) * loss + terms.label_smoothing * smooth
    loss = loss / terms.over_weights + terms.lse_square_scale * lse.square() / terms.over_tokens
    if terms.use_token_scaling:
        loss = loss * torch.exp(-below.detach())
    return torch.where(counts, loss, 0.0).sum()


def _check_labels(name: str, labels: Tensor, hidden: Tensor) -> None:
    if labels.dtype != torch.int64:
        raise TypeError(f"{name}: expected torch.int64, got {labels.dtype}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"{name}: expected shape {tuple(hidden.shape[:-1])}, got {tuple(labels.shape)}")


def _check_head(hidden_size: int, hidden: Tensor, weight: Tensor, bias: Tensor | None, classes: Tensor | None) -> None:
    if not hidden.dtype.is_floating_point:
        raise TypeError(f"hidden_states: expected a float dtype, got {hidden.dtype}")
    if hidden.shape[-1:] != (hidden_size,):
        raise ValueError(f"hidden_states: expected shape (..., {hidden_size}), got {tuple(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[1] != hidden_size or not weight.shape[0]:
        raise ValueError(f"lm_head_weight: expected shape (V, {hidden_size}), got {tuple(weight.shape)}")
    for name, value in (("lm_head_weight", weight), ("lm_head_bias", bias)):
        if value is not None and value.dtype != hidden.dtype:
            raise TypeError(f"{name}: expected {hidden.dtype}, which hidden_states have, got {value.dtype}")
    for name, value in (("lm_head_bias", bias), ("ce_weight", classes)):
        if value is not None and value.shape != weight.shape[:1]:
            raise ValueError(f"{name}: expected shape {tuple(weight.shape[:1])}, got {tuple(value.shape)}")
    if classes is not None and not classes.dtype.is_floating_point:
        raise TypeError(f"ce_weight: expected a float dtype, got {classes.dtype}")
