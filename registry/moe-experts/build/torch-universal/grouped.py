"""Rows sorted by expert times one matrix an expert, as ops: their loops depend on data, and torch.compile sees none.

Rows at or past offsets[-1] are those of sentinels: they are not read, come out as zeros, and get a gradient of zero.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from ._ops import ops, qualified
from .autocast import without_autocast


def grouped_linear(x: Tensor, matrices: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    """Row s times the matrix of its expert, plus its bias; (S, K) -> (S, N) in the dtype of x.

    x: (S, K). matrices: (E, K, N) in the dtype of x, any strides. bias: (E, N) float, or None.
    offsets: (E,) int32, the row after the last of each expert.
    """
    result: Tensor = ops.grouped_linear.default(x, matrices, bias, offsets)
    return result


def segments(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each expert that has any. Waits for the device."""
    for expert, (start, end) in enumerate(pairwise([0, *offsets.tolist()])):
        if start < end:
            yield expert, slice(start, end)


@torch.library.custom_op(
    qualified("grouped_linear"),
    mutates_args=(),
    schema="(Tensor x, Tensor matrices, Tensor? bias, Tensor offsets) -> Tensor",
)
@without_autocast
def _grouped_linear(x: Tensor, matrices: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    if _can_group(x, matrices):
        return _in_one_kernel(x, matrices, bias, offsets)
    out = x.new_zeros((x.shape[0], matrices.shape[2]))
    for expert, rows in segments(offsets):
        y = x[rows] @ matrices[expert]
        out[rows] = y if bias is None else y.float() + bias[expert].float()
    return out


@_grouped_linear.register_fake
def _(x: Tensor, matrices: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:  # noqa: ARG001 - the op's
    return x.new_empty((x.shape[0], matrices.shape[2]))


def _can_group(*tensors: Tensor) -> bool:
    """Whether torch multiplies all groups at once: bf16 on a GPU, in rows or columns of whole 16 bytes."""
    return hasattr(F, "grouped_mm") and all(
        x.is_cuda and x.dtype == torch.bfloat16 and x.numel() > 0 and x.data_ptr() % 16 == 0 and _is_aligned(x.stride())
        for x in tensors
    )


def _is_aligned(strides: tuple[int, ...]) -> bool:
    """Whether matrices have neighbours in one dimension, and steps of whole 16 bytes (of bf16) in all others."""
    steps = sorted(strides[-2:])
    return steps[0] == 1 and all(step % 8 == 0 for step in (steps[1], *strides[:-2]))


def _in_one_kernel(x: Tensor, matrices: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    y = F.grouped_mm(x, matrices, offs=offsets)
    rows = torch.arange(x.shape[0], device=x.device, dtype=offsets.dtype)
    if bias is not None:
        experts = torch.searchsorted(offsets, rows, right=True).clamp(max=matrices.shape[0] - 1)
        y = (y.float() + bias[experts].float()).to(x.dtype)
    # grouped_mm leaves the rows past the last offset unwritten.
    return torch.where((rows < offsets[-1]).unsqueeze(1), y, 0)


@torch.library.custom_op(
    qualified("grouped_outer"), mutates_args=(), schema="(Tensor x, Tensor grad, Tensor offsets) -> Tensor"
)
@without_autocast
def _grouped_outer(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """For each expert, x.T @ grad over its rows: (S, K), (S, N) -> (E, K, N)."""
    out = x.new_zeros((offsets.shape[0], x.shape[1], grad.shape[1]))
    for expert, rows in segments(offsets):
        out[expert] = x[rows].t() @ grad[rows]
    return out


@_grouped_outer.register_fake
def _(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1], grad.shape[1]))


@torch.library.custom_op(
    qualified("grouped_sum"), mutates_args=(), schema="(Tensor x, Tensor offsets, ScalarType dtype) -> Tensor"
)
def grouped_sum(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """For each expert, the float32 sum of its rows, in `dtype`: (S, N) -> (E, N)."""
    out = x.new_zeros((offsets.shape[0], x.shape[1]), dtype=dtype)
    for expert, rows in segments(offsets):
        out[expert] = x[rows].float().sum(0)
    return out


@grouped_sum.register_fake
def _(x: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((offsets.shape[0], x.shape[1]), dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401, ARG001 - torch's
    x, matrices, bias, offsets = inputs
    ctx.save_for_backward(x, matrices, offsets)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    x, matrices, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    to_x = to_matrices = to_bias = None
    if ctx.needs_input_grad[0]:
        to_x = grouped_linear(grad, matrices.transpose(1, 2), None, offsets)
    if ctx.needs_input_grad[1]:
        to_matrices = ops.grouped_outer.default(x, grad, offsets)
    if ctx.needs_input_grad[2]:
        to_bias = grouped_sum(grad, offsets, ctx.bias_dtype)
    return to_x, to_matrices, to_bias, None


_grouped_linear.register_autograd(_backward, setup_context=_setup_context)
