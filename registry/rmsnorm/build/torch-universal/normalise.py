"""The norm and its gradients.

    rstd   = 1 / sqrt(mean(input ** 2) + eps)          over the last dimension, in float32
    output = weight * (input * rstd)                   the product in parentheses rounded to the dtype of input

float64 input is computed in float64, so that gradients can be checked. Source: Zhang and Sennrich, Root Mean Square
Layer Normalization (arXiv:1910.07467), with the roundings of the Llama models.
"""

import torch
from torch import Tensor


def apply_rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: A002 - the published name
    """Normalise `input` (..., H) and scale it by `weight` (H,). (..., H) in the dtype that the two promote to."""
    return apply_rms_norm_forward(input, weight, eps)[0]


def apply_rms_norm_forward(
    input: Tensor,  # noqa: A002 - the published name
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """As `apply_rms_norm`, with what the backward needs.

    Returns:
        output: (..., H) in the dtype that `input` and `weight` promote to.
        rstd: (...) in float32, or float64 for float64 `input`.
    """
    wide = _wide(input)
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return weight * (wide * rstd.unsqueeze(-1)).to(input.dtype), rstd


def apply_rms_norm_backward(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002 - the published name
    weight: Tensor,
    output: Tensor,  # noqa: ARG001 - some builds make use of it
    rstd: Tensor,
    eps: float,  # noqa: ARG001 - in rstd already
    input_requires_grad: bool = True,  # noqa: FBT001, FBT002 - the published signature
    weight_requires_grad: bool = True,  # noqa: FBT001, FBT002 - the published signature
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients to `input` and `weight`, None for one that is not asked for.

    Args:
        grad_output: (..., H), the gradient to `output`.
        input: (..., H), as the forward had it.
        weight: (H,), as the forward had it.
        output: as the forward returned it; not looked at.
        rstd: as the forward returned it.
        eps: as the forward had it; not looked at.
        input_requires_grad: whether the first gradient is wanted.
        weight_requires_grad: whether the second is.

    Returns:
        (..., H) in the dtype of `input`, and (H,) in that of `weight`; summed in float32, or in float64 for float64
        `input`.
    """
    grad, rstd = grad_output.to(rstd.dtype), rstd.unsqueeze(-1)
    normalised = _wide(input) * rstd
    to_input = to_weight = None
    if input_requires_grad:
        to_normalised = grad * weight
        along = (to_normalised * normalised).mean(-1, keepdim=True)
        to_input = (rstd * (to_normalised - normalised * along)).to(input.dtype)
    if weight_requires_grad:
        rounded = normalised.to(input.dtype)  # what the weight was multiplied with
        to_weight = (grad * rounded).sum_to_size(weight.shape).to(weight.dtype)
    return to_input, to_weight


def _wide(x: Tensor) -> Tensor:
    """Cast to float32, or as it is where that is wider."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
