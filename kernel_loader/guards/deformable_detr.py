"""Guards of `kernel_loader.bundles.deformable_detr`: each is called with the function, and then as the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# What an int can count, by which builds find elements.
_LARGEST: Final = 2**31 - 1


def empty_batch(
    function: Callable[..., Any],
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    """Without batches, queries, pixels or points all is zeros, and an `im2col_step` below 1 is refused: ValueError.

    Builds divide by the smaller of B and `im2col_step`, which ends the process where that is zero, and print an error
    where they launch nothing. For `ms_deform_attn_forward` and, with `grad_output` before the step,
    `ms_deform_attn_backward`.
    """
    step = named["im2col_step"] if "im2col_step" in named else rest[-1]
    if step < 1:
        raise ValueError(f"im2col_step: expected 1 or more, got {step}")
    if value.numel() and sampling_loc.numel():
        return function(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, *rest, **named)
    if len(rest) + len(named) == 2:  # backward, for which a gradient is given too
        return [torch.zeros_like(given) for given in (value, sampling_loc, attn_weight)]
    return value.new_zeros((value.shape[0], sampling_loc.shape[1], value.shape[2] * value.shape[3]))


def int_sizes(
    function: Callable[..., Any],
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    *rest: Any,
    **named: Any,
) -> Any:
    """Tensors of 2 ** 31 elements or more, the output included, are refused: ValueError.

    Builds count elements by int, and would read and write elsewhere.
    """
    output = value.shape[0] * sampling_loc.shape[1] * value.shape[2] * value.shape[3]
    for name, count in (("value", value.numel()), ("sampling_loc", sampling_loc.numel()), ("the output", output)):
        if count > _LARGEST:
            raise ValueError(f"{name}: expected fewer than 2 ** 31 elements, got {count}; pass fewer batches at a time")
    return function(value, spatial_shapes, level_start_index, sampling_loc, attn_weight, *rest, **named)
