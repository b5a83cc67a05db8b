"""Guards of gradients of `kernel_loader.bundles.attention`: of attention sinks, and of rows of no sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# Places of s_aux after q, k and v, in `flash_attn_func` and in `flash_attn_varlen_func`.
_PLACE: Final = 12
_PLACE_PACKED: Final = 18


def sink_gradient(
    function: Callable[..., tuple[Tensor, ...]], q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, ...]:
    """`s_aux` gets its gradient: minus the sum over rows of exp(s_aux - lse) * (out . gradient to out).

    A sink is a score whose value is zero, so that this is all of the softmax's derivative. Gradients to q, k and v
    remain those of the function. Backward reads `out` and the gradient to it once more, in float32.
    """
    packed = q.ndim == 3
    place = _PLACE_PACKED if packed else _PLACE
    sinks = rest[place] if len(rest) > place else named.get("s_aux")
    if sinks is None or not (torch.is_grad_enabled() and sinks.requires_grad):
        return function(q, k, v, *rest, **named)
    if len(rest) > place:
        rest = (*rest[:place], sinks.detach(), *rest[place + 1 :])
    else:
        named = named | {"s_aux": sinks.detach()}
    starts = (rest[0] if rest else named["cu_seqlens_q"]) if packed else None
    counts = (rest[4] if len(rest) > 4 else named.get("seqused_q")) if packed else None
    out, lse, *more = function(q, k, v, *rest, **named)
    attached = _Sinks.apply(sinks, out, lse, starts, counts)  # type: ignore[no-untyped-call]
    return (attached, lse, *more)


def packed_gradient(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Packed rows of no sequence, and those past `seqused_q` or `seqused_k`, get gradients of zero.

    For functions of (q, k, v), (q, kv) or qkv with `cu_seqlens` behind them, which leave those unwritten. Backward
    copies the gradients once more.
    """
    names = _names(args, named)
    given = dict(zip(names, args, strict=False)) | named
    found = {}
    for name, side in (("q", "q"), ("k", "k"), ("v", "k"), ("kv", "k"), ("qkv", "q")):
        x = given.get(name)
        # Pages are no rows, and have no gradient.
        if x is None or not (torch.is_grad_enabled() and x.requires_grad) or (name in ("k", "v") and x.ndim != 3):
            continue
        starts = given["cu_seqlens" if name == "qkv" else f"cu_seqlens_{side}"]
        counts = given.get(f"seqused_{side}")
        counts = counts if isinstance(counts, Tensor) else None
        found[name] = _Rows.apply(x, starts, counts)  # type: ignore[no-untyped-call]
    first = tuple(found.pop(name, value) for name, value in zip(names, args, strict=False))
    return function(*first, *args[len(names) :], **(named | found))


def _names(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[str, ...]:
    """Those of the first arguments. What flash-attn2 has in the places of seqused_q and seqused_k are no tensors."""
    if "qkv" in named or (args and args[0].ndim == 4):
        return ("qkv", "cu_seqlens")
    two = len(args) > 1 and "v" not in named and (len(args) == 2 or not args[2].is_floating_point())
    if two or "kv" in named:
        return ("q", "kv", "cu_seqlens_q", "cu_seqlens_k")
    offsets = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")
    return ("q", "k", "v", *offsets)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: Tensor, counts: Tensor | None) -> Tensor:
        ctx.save_for_backward(starts, counts)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        is_row = _is_row(len(grad), *ctx.saved_tensors)
        return grad.masked_fill(~is_row.view(-1, *[1] * (grad.ndim - 1)), 0), None, None


class _Sinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, sinks: Tensor, out: Tensor, lse: Tensor, starts: Tensor | None, counts: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(sinks, out, lse, starts, counts)
        return out.detach()  # a view would not let its user change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        sinks, out, lse, starts, counts = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        along = (grad.to(wide) * out.to(wide)).sum(-1)
        lse = lse.transpose(-1, -2)  # (..., heads), as `along`
        lost = (torch.exp(sinks.to(wide) - lse) * along).masked_fill(lse == -torch.inf, 0)
        if starts is not None:  # rows that are of no sequence hold anything
            lost = lost.masked_fill(~_is_row(len(out), starts, counts).unsqueeze(-1), 0)
        return -lost.flatten(0, -2).sum(0).to(sinks.dtype), grad, None, None, None


def _is_row(rows: int, starts: Tensor, counts: Tensor | None) -> Tensor:
    """Which of packed rows are of a sequence: (rows,) bool. The host does not wait for the device."""
    row = torch.arange(rows, device=starts.device, dtype=starts.dtype)
    found = (row >= starts[0]) & (row < starts[-1])
    if counts is not None:
        of = torch.searchsorted(starts, row, right=True).clamp(1, len(starts) - 1) - 1
        found &= row - starts[of] < counts[of]
    return found
