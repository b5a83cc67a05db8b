"""Guards of rotary embeddings of q and k: each is called with the function, and then as the function.

For functions `(q, k, cos, sin, unsqueeze_dim=1)` that return q and k turned, as those of `kernel_loader.bundles.rotary`
and `kernel_loader.bundles.liger`; `pair-dtype` is for `apply_rotary` of the former.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_Turn = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def pair_dtype(
    function: Callable[..., None],
    x1: Tensor,
    x2: Tensor,
    cos: Tensor,
    sin: Tensor,
    out1: Tensor,
    out2: Tensor,
    conj: bool,  # noqa: FBT001 - the published signature
) -> None:
    """Cos and sin may have another dtype than the pairs: these are then turned as copies of the wider dtype.

    For `apply_rotary`. What is turned is rounded once, into `out1` and `out2`.
    """
    if cos.dtype == sin.dtype == x1.dtype:
        function(x1, x2, cos, sin, out1, out2, conj)
        return
    x1, x2, cos, sin = _alike(x1, x2, cos, sin)
    wide = torch.empty_like(x1), torch.empty_like(x2)
    function(x1, x2, cos, sin, *wide, conj)
    out1.copy_(wide[0])
    out2.copy_(wide[1])


def table_dtype(
    function: _Turn, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Cos and sin may have another dtype than q and k: these are then turned as copies of the wider dtype.

    What is turned is rounded once.
    """
    if cos.dtype == sin.dtype == q.dtype == k.dtype:
        return function(q, k, cos, sin, unsqueeze_dim)
    wide_q, wide_k, cos, sin = _alike(q, k, cos, sin)
    one, other = function(wide_q, wide_k, cos, sin, unsqueeze_dim)
    return one.to(q.dtype), other.to(k.dtype)


def table_batch(
    function: _Turn, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Cos and sin of one batch serve all of q: they reach the function expanded, without a copy.

    Builds for CPUs with AVX-512 step through them by the stride of a batch that is not there.
    """
    batch = q.shape[0]
    return function(q, k, cos.expand(batch, *cos.shape[1:]), sin.expand(batch, *sin.shape[1:]), unsqueeze_dim)


def left_alone(
    function: _Turn, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`q`, `k` and the gradients to what comes out of them are not written.

    Builds turn a (B, T, heads, D) in place, which they get by transposing. What lies in memory like that is copied
    before, in each direction: what a model projects and transposes does.
    """
    turned = function(_own(q), _own(k), cos, sin, unsqueeze_dim)
    one, other = (_OwnGradient.apply(x) if x.requires_grad else x for x in turned)  # type: ignore[no-untyped-call]
    return one, other


def heads_dimension(
    function: _Turn, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`unsqueeze_dim` tells the dimension of the heads: for 2, q and k are transposed on the way in and out."""
    if unsqueeze_dim != 2:
        return function(q, k, cos, sin, unsqueeze_dim)
    one, other = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 1)
    return one.transpose(1, 2), other.transpose(1, 2)


def turn_gradient(
    function: _Turn, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`q` and `k` get their gradient: that to what comes out, turned back by the function itself, with -sin for sin.

    Exact where the halves of cos and sin are alike. Builds change a copy of q and k in place by an op without a
    derivative, which autograd does not see: the gradients would be those of a copy.
    """
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)):
        return function(q, k, cos, sin, unsqueeze_dim)
    one, other = _Turned.apply(function, q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-untyped-call]
    return one, other


def _alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the widest of their dtypes."""
    wide = functools.reduce(torch.promote_types, (x.dtype for x in tensors))
    return tuple(x.to(wide) for x in tensors)


def _own(x: Tensor) -> Tensor:
    """x, or a copy where a build would write into it."""
    return x.clone() if x.transpose(1, 2).is_contiguous() else x


class _OwnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 - the signature of autograd
        return x.detach()  # a view would not let its user change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004 - the signature of autograd
        return _own(grad)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: _Turn, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.function, ctx.unsqueeze_dim = function, unsqueeze_dim
        return function(q, k, cos, sin, unsqueeze_dim)

    @staticmethod
    def backward(ctx: Any, to_q: Tensor, to_k: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        one, other = _Turned.apply(ctx.function, to_q, to_k, cos, -sin, ctx.unsqueeze_dim)  # type: ignore[no-untyped-call]
        return None, one, other, None, None, None
