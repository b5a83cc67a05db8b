"""The op behind every function: attention of packed sequences, with its gradient.

Rows of q, k and v are packed. Sequence b has rows q_first[b] and on of q, q_count[b] of them. Its key number j stands
at place k_first[b] + j: that row of k and v, or, with a table of pages, row `place % page` of page
`table[b, place // page]`.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from ._ops import ops, qualified, without_autocast
from .core import NO_DESCALES, Descales, Rules, Span, backward, forward, wide

FP8: Final = torch.float8_e4m3fn
FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_ARGUMENTS: Final = (
    "Tensor q, Tensor k, Tensor v, Tensor q_first, Tensor q_count, Tensor k_first, Tensor k_count, Tensor? table,"
    " int page, Tensor? slopes, Tensor? sinks, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float scale,"
    " int left, int right, int chunk, float softcap, Tensor? q_most, Tensor? k_most"
)
_GRADIENTS: Final = (0, 1, 2, 10)  # of q, k, v and sinks


def check_heads(q: Tensor, k: Tensor, v: Tensor, ndim: int, names: tuple[str, str, str] = ("q", "k", "v")) -> None:
    """Dtypes, devices and shapes of q, k and v, each with `ndim` dimensions, the last two (heads, dim)."""
    for name, x in zip(names, (q, k, v), strict=True):
        if x.dtype not in (*FLOATS, FP8):
            raise TypeError(f"{name}: expected bfloat16, float16, float32, float64 or float8_e4m3fn, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected {q.dtype}, as q is, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: expected on {q.device}, where q is, got {x.device}")
    expected = "(batch, sequence, heads, dim)" if ndim == 4 else "(rows, heads, dim)"
    if q.ndim != ndim:
        raise ValueError(f"{names[0]}: expected shape {expected}, got {tuple(q.shape)}")
    if k.ndim not in (3, 4) or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[1]}: expected last dimension {q.shape[-1]}, as q has it, got {tuple(k.shape)}")
    if k.shape[-2] < 1 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{names[1]}: expected a number of heads that divides {q.shape[-2]}, got {tuple(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{names[2]}: expected shape {(*k.shape[:-1], 'dim')}, got {tuple(v.shape)}")


def check_vector(name: str, x: Tensor | None, length: int) -> None:
    """ValueError unless `x` is None or (length,) whole numbers."""
    if x is None:
        return
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    if tuple(x.shape) != (length,):
        raise ValueError(f"{name}: expected shape ({length},), got {tuple(x.shape)}")


def check_qv(q: Tensor, v: Tensor, qv: Tensor) -> None:
    """Qv is like q, with the dims of v."""
    if qv.dtype != q.dtype or q.dtype == FP8:
        raise TypeError(f"qv: expected {q.dtype}, as q is, and not FP8, got {qv.dtype}")
    if tuple(qv.shape) != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(f"qv: expected shape {(*q.shape[:-1], v.shape[-1])}, got {tuple(qv.shape)}")


def window(size: tuple[int, int], *, causal: bool) -> tuple[int, int]:
    """Left and right; anything below zero is -1."""
    if len(size) != 2:
        raise ValueError(f"window_size: expected (left, right), got {size!r}")
    left, right = (max(int(side), -1) for side in size)
    return left, 0 if causal else right


def scale_of(dim: int) -> float:
    """1 / sqrt(dim), and 1 where there is nothing to scale."""
    return 1.0 / math.sqrt(max(dim, 1))


def _rules(arguments: tuple[Any, ...]) -> Rules:
    return Rules(*arguments[14:19])


def _spans(arguments: tuple[Any, ...]) -> list[Span]:
    """What the arguments of the op name, held against the rows that there are."""
    q, k, _, *places, table, page, slopes, _, q_descale, k_descale, v_descale = arguments[:14]
    q_first, q_count, k_first, k_count = (x.tolist() for x in places)
    for name, counts, most in (("seqused_q", q_count, arguments[19]), ("seqused_k", k_count, arguments[20])):
        if most is not None and any(count > limit for count, limit in zip(counts, most.tolist(), strict=True)):
            raise ValueError(f"{name}: expected at most the rows of each sequence, {most.tolist()}, got {counts}")
    check_order("q", q_first, q_count, q.shape[0])
    spans = []
    for b, (first, count, start, length) in enumerate(zip(q_first, q_count, k_first, k_count, strict=True)):
        descales = (None if x is None else x[b] for x in (q_descale, k_descale, v_descale))
        keys = rows_of_keys(start, length, k.shape[0], page, None if table is None else table[b])
        slope = None if slopes is None else slopes[b]
        spans.append(Span(first, count, keys.to(k.device), slope, Descales(*descales)))
    return spans


def check_order(name: str, firsts: list[int], counts: list[int], rows: int) -> None:
    """ValueError unless sequences of packed rows come one after the other, within the rows that there are."""
    free = 0
    for first, count in zip(firsts, counts, strict=True):
        if first < free or count < 0 or first + count > rows:
            raise ValueError(
                f"{name}: expected sequences in order within {rows} rows, got rows {first} to {first + count}"
            )
        free = first + count


def rows_of_keys(start: int, length: int, rows: int, page: int, table: Tensor | None) -> Tensor:
    """The rows, (length,) int64, of a sequence whose keys stand at places from `start` on."""
    if table is None:
        stop = (start // page + 1) * page if page else rows
        if start < 0 or length < 0 or start + length > min(stop, rows):
            raise ValueError(f"k: expected sequences within its rows, got rows {start} to {start + length} of {stop}")
        return torch.arange(start, start + length)
    places = torch.arange(start, start + length, device=table.device)
    if start < 0 or length < 0 or start + length > page * len(table):
        raise ValueError(
            f"k: expected at most {page * len(table)} keys, for which the table has pages, got {start + length}"
        )
    found: Tensor = table.long()[places // page] * page + places % page
    if length and not 0 <= int(found.min()) <= int(found.max()) < rows:
        raise ValueError(f"the table of pages: expected pages of {rows // page}, got {table.tolist()}")
    return found


def _empty(arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    q, _, v = arguments[:3]
    out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=_output_dtype(q))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=wide(q.dtype))


def _output_dtype(q: Tensor) -> torch.dtype:
    return torch.bfloat16 if q.dtype == FP8 else q.dtype


@torch.library.custom_op(qualified("attend"), mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
@without_autocast
def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - as the schema says
    q, k, v = arguments[:3]
    return forward(q, k, v, _spans(arguments), _rules(arguments), arguments[10], _output_dtype(q))


@_attend.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return _empty(arguments)


@torch.library.custom_op(
    qualified("attend_backward"),
    mutates_args=(),
    schema=f"(Tensor grad, Tensor out, Tensor lse, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
@without_autocast
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    *arguments: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = arguments[:3]
    dq, dk, dv, dsinks = backward(grad, q, k, v, out, lse, _spans(arguments), _rules(arguments), arguments[10])
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_attend_backward.register_fake
def _(grad: Tensor, out: Tensor, lse: Tensor, *arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401, ARG001
    sinks = arguments[10]
    made = [x.new_empty(x.shape) for x in arguments[:3]]
    return *made, arguments[0].new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401 - torch's
    ctx.tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*output, *(inputs[i] for i in ctx.tensors))


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401 - torch's
    out, lse, *saved = ctx.saved_tensors
    arguments = list(ctx.rest)
    for i, x in zip(ctx.tensors, saved, strict=True):
        arguments[i] = x
    if arguments[0].dtype == FP8:
        raise TypeError("q: expected a dtype that has gradients, got torch.float8_e4m3fn")
    made = ops.attend_backward.default(grad, out, lse, *arguments)
    gradients: list[Tensor | None] = [None] * len(arguments)
    for i, gradient in zip(_GRADIENTS, made, strict=True):
        gradients[i] = gradient if ctx.needs_input_grad[i] else None
    return tuple(gradients)


torch.library.register_autograd(qualified("attend"), _backward, setup_context=_setup_context)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spans: tuple[Tensor, Tensor, Tensor, Tensor],
    rules: Rules,
    page: int = 0,
    table: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    descales: Descales = NO_DESCALES,
    most: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences.

    Args:
        q: (Tq, H, D).
        k: (Tk, Hk, D), H a multiple of Hk.
        v: (Tk, Hk, Dv).
        spans: q_first, q_count, k_first and k_count, (B,) each.
        rules: of scores.
        page: rows of a page, or that a sequence without a table may not cross; 0 for none.
        table: (B, pages), or None.
        slopes: (B, H) or (H,) float32, or None.
        sinks: (H,), or None.
        descales: (B, Hk) each, for FP8; not looked at for other dtypes.
        most: (B,) each, or None: what q_count and k_count may be at most.

    Returns:
        Out (Tq, H, Dv), differentiable in q, k, v and sinks, and lse (H, Tq), which is not.
    """
    batch = spans[0].shape[0]
    check_terms(q, k, batch, slopes, sinks, descales)
    if slopes is not None:
        slopes = slopes.expand(batch, q.shape[1])
    if q.dtype != FP8:
        descales = NO_DESCALES
    out, lse = ops.attend.default(q, k, v, *spans, table, page, slopes, sinks, *descales, *rules, *most)
    return out, lse.detach()


def check_terms(
    q: Tensor, k: Tensor, batch: int, slopes: Tensor | None, sinks: Tensor | None, descales: Descales
) -> None:
    """Dtypes and shapes of what `attend` takes besides q, k and v, whose last dimensions are (heads, dim)."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if slopes is not None:
        if slopes.dtype != torch.float32:
            raise TypeError(f"alibi_slopes: expected float32, got {slopes.dtype}")
        if tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes: expected shape ({heads},) or ({batch}, {heads}), got {tuple(slopes.shape)}"
            )
    if sinks is not None:
        if sinks.dtype not in FLOATS:
            raise TypeError(f"s_aux: expected bfloat16, float16, float32 or float64, got {sinks.dtype}")
        if tuple(sinks.shape) != (heads,):
            raise ValueError(f"s_aux: expected shape ({heads},), one a head, got {tuple(sinks.shape)}")
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales, strict=True):
        if q.dtype == FP8 and descale is not None and tuple(descale.shape) != (batch, kv_heads):
            raise ValueError(f"{name}: expected shape ({batch}, {kv_heads}), got {tuple(descale.shape)}")
