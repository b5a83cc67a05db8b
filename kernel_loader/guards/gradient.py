"""The guard that gives the matmuls of `kernel_loader.bundles.fp8` the gradient that the bundle promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.guards.fp8 import MX_GROUP, codes_per_element, is_mx, wide
from kernel_loader.quantization import dequantize_block_fp8, dequantize_mxfp4, dequantize_mxfp8
from kernel_loader.quantization.codes import E8M0_DTYPES

# Elements of a weight that are decoded at a time: 64 MiB in float32.
_AT_A_TIME: Final = 2**24


def input_gradient(
    function: Callable[..., Tensor], A: Tensor, B: Tensor, Bs: Tensor, *rest: Any, **named: Any
) -> Tensor:
    """The gradient to A goes straight through the quantiser: dA = dC @ (code(b) * scale(b)) in float32, then A's dtype.

    It is exactly zero for the rows of sentinels. Nothing else gets a gradient. Backward decodes a part of one weight
    at a time, and makes the host wait once for the weights of experts, to know how many rows each has.
    """
    if not torch.is_grad_enabled():
        return function(A, B, Bs, *rest, **named)
    with torch.no_grad():
        result = function(A, B, Bs, *rest, **named)
    if not A.requires_grad:
        return result
    block = next((value for value in (*rest, *named.values()) if isinstance(value, (list, tuple))), None)
    index, grouped = _index(rest, named)
    block_size = None if block is None else list(block)
    attached: Tensor = _StraightThrough.apply(A, result, B, Bs, index, grouped, block_size)  # type: ignore[no-untyped-call]
    return attached


def _index(rest: Sequence[Any], named: Mapping[str, Any]) -> tuple[Tensor | None, bool]:
    """The expert of each row, or the row after the last of each expert and True; None for a single weight."""
    given = [value for value in rest if isinstance(value, Tensor) and not value.is_floating_point()]
    index = given[0] if given else named.get("expert_ids", named.get("offsets"))
    return index, len(given) == 2 or "tokens_per_expert" in named


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        A: Tensor,
        result: Tensor,
        B: Tensor,
        Bs: Tensor,
        index: Tensor | None,
        grouped: bool,  # noqa: FBT001 - of a row of arguments
        block_size: list[int] | None,
    ) -> Tensor:
        ctx.save_for_backward(B, Bs, index)
        ctx.dtype, ctx.grouped, ctx.block_size = A.dtype, grouped, block_size
        return result.detach()  # a view would not let its user change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        B, Bs, index = ctx.saved_tensors
        return _gradient(grad, B, Bs, index, ctx.grouped, ctx.block_size, ctx.dtype), *(None,) * 6


# An op, so that what depends on the values of indices breaks no graph.
@torch.library.custom_op(
    "kernel_loader_guards::fp8_input_gradient",
    mutates_args=(),
    schema="(Tensor grad, Tensor B, Tensor Bs, Tensor? index, bool grouped, int[]? block_size, ScalarType dtype)"
    " -> Tensor",
)
def _gradient(
    grad: Tensor,
    B: Tensor,
    Bs: Tensor,
    index: Tensor | None,
    grouped: bool,  # noqa: FBT001 - of a row of arguments
    block_size: list[int] | None,
    dtype: torch.dtype,
) -> Tensor:
    weights = _read(B, Bs, block_size)
    flat = grad.reshape(math.prod(grad.shape[:-1]), weights.n)
    result = flat.new_zeros((flat.shape[0], weights.k), dtype=dtype)
    with torch.autocast(grad.device.type, enabled=False):  # it is in float32
        for expert, rows in _segments(index, weights.codes.shape[0], flat.shape[0], grouped=grouped):
            upstream = flat[rows].float()
            for start, stop, part in weights.parts(expert):
                result[rows, start:stop] = (upstream @ part).to(dtype)
    return result.reshape(*grad.shape[:-1], weights.k)


@_gradient.register_fake
def _(grad: Tensor, B: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], B.shape[-1] * codes_per_element(B)), dtype=rest[-1])


def _segments(index: Tensor | None, experts: int, count: int, *, grouped: bool) -> Iterator[tuple[int, slice | Tensor]]:
    """The rows of each expert that has any; sentinels are in none."""
    if index is None:
        yield 0, slice(0, count)
        return
    order, ends = None, wide(index)
    if not grouped:
        ids = ends.clamp(max=experts)
        order, ends = ids.argsort(), torch.bincount(ids, minlength=experts + 1)[:experts].cumsum(0)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end) if order is None else order[start:end]
        start = end


class _Weights(NamedTuple):
    """A stack of quantised matrices of one format.

    Attributes:
        codes: (E, N, K), or (E, N, K / 2) for MXFP4.
        scale: (E, ceil(N / block_n), ceil(K / block_k)).
        n, k, block_n, block_k: in elements; for one scale a matrix, the block is the matrix.
    """

    codes: Tensor
    scale: Tensor
    n: int
    k: int
    block_n: int
    block_k: int

    def parts(self, expert: int) -> Iterator[tuple[int, int, Tensor]]:
        """The matrix of an expert in runs of columns: first, last and one, and (N, columns) float32."""
        codes, scale, packed = self.codes[expert], self.scale[expert], codes_per_element(self.codes)
        step = max(_AT_A_TIME // max(self.n, 1), 1)
        step = -(-step // self.block_k) * self.block_k if self.block_k < self.k else step
        for start in range(0, self.k, step):
            stop = min(start + step, self.k)
            part = codes[:, start // packed : -(-stop // packed)]
            blocks = scale[:, start // self.block_k : -(-stop // self.block_k)]
            yield start, stop, self._decoded(part, blocks)

    def _decoded(self, codes: Tensor, scale: Tensor) -> Tensor:
        if codes.dtype == torch.int8:
            return dequantize_mxfp4(codes, scale)
        if (self.block_n, self.block_k) == (1, MX_GROUP) and scale.dtype in E8M0_DTYPES:
            return dequantize_mxfp8(codes, scale)
        return dequantize_block_fp8(codes, scale, (self.block_n, min(self.block_k, codes.shape[-1])))


def _read(B: Tensor, Bs: Tensor, block_size: Sequence[int] | None) -> _Weights:
    n, k = B.shape[-2], B.shape[-1] * codes_per_element(B)
    if is_mx(B, Bs):
        block_n, block_k = 1, MX_GROUP
    elif block_size is None or tuple(block_size) == (n, k):
        block_n, block_k = max(n, 1), max(k, 1)  # an empty matrix still needs a block that can be divided by
    else:
        block_n, block_k = block_size
    codes = B if B.ndim == 3 else B[None]
    scale = Bs.reshape(codes.shape[0], -(-n // block_n), -(-k // block_k))
    return _Weights(codes, scale, n, k, block_n, block_k)
