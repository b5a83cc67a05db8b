"""Pairs of numbers turned by an angle, in float32 at least and rounded once.

Source: Su et al., RoFormer (arXiv:2104.09864), 3.4; the two of a pair lie half a head apart, not side by side.
"""

import torch
from torch import Tensor


def apply_rotary(
    x1: Tensor,
    x2: Tensor,
    cos: Tensor,
    sin: Tensor,
    out1: Tensor,
    out2: Tensor,
    conj: bool,  # noqa: FBT001 - the published signature
) -> None:
    """(out1, out2) = (x1 * cos - x2 * sin, x1 * sin + x2 * cos); with `conj`, turned the other way.

    Args:
        x1: (..., d) float tensor, any strides: the first of each pair.
        x2: the second of each pair, as x1.
        cos: broadcasts to the shape of x1.
        sin: as cos.
        out1: written to, of the shape and dtype of x1. May be x1 itself.
        out2: written to, as out1. May be x2 itself.
        conj: whether sin is negated, which undoes a turn.

    Raises:
        ValueError: shapes that do not agree.
        TypeError: x1 is not of floats, or another dtype than its own of x2 or an output.
    """
    _refuse_integers("x1", x1)
    for name, out in (("x2", x2), ("out1", out1), ("out2", out2)):
        if out.shape != x1.shape:
            raise ValueError(f"{name}: expected shape {tuple(x1.shape)}, which x1 has, got {tuple(out.shape)}")
        if out.dtype != x1.dtype:
            raise TypeError(f"{name}: expected {x1.dtype}, which x1 has, got {out.dtype}")
    turned1, turned2 = _turn(x1, x2, cos, -sin if conj else sin)
    if turned1.shape != x1.shape:
        raise ValueError(f"cos: expected to broadcast to {tuple(x1.shape)}, which x1 has, got {tuple(cos.shape)}")
    # Both are computed before the first is written: an output may be an input.
    out1.copy_(turned1)
    out2.copy_(turned2)


def apply_rotary_transformers(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys: x * cos + (-second half of x, first half of x) * sin.

    Args:
        q: (..., D) float tensor with D even, such as (batch, heads, sequence, D).
        k: as q; the number of heads may differ.
        cos: (batch, sequence, D), or D / 2 where the two halves are the same.
        sin: as cos.
        unsqueeze_dim: where the dimension of the heads is: 1, or 2 for (batch, sequence, heads, D).

    Returns:
        q and k turned, new tensors of their shapes and dtypes.

    Raises:
        ValueError: D is odd, or the last dimension of cos or sin is neither D nor D / 2.
        TypeError: q or k is not of floats.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turn_halves("q", q, cos, sin), _turn_halves("k", k, cos, sin)


apply_rotary_transformers.can_torch_compile = True  # type: ignore[attr-defined]  # where published builds say it


def _turn_halves(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    _refuse_integers(name, x)
    width, half = x.shape[-1], x.shape[-1] // 2
    if width % 2:
        raise ValueError(f"{name}: expected shape (..., D) with D even, got {tuple(x.shape)}")
    cos, sin = (_columns(label, table, width) for label, table in (("cos", cos), ("sin", sin)))
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)  # each pair by a quarter
    return (_wide(x) * _wide(cos) + _wide(turned) * _wide(sin)).to(x.dtype)


def _columns(name: str, table: Tensor, width: int) -> Tensor:
    """The table with one column for each of a head: one with half of them serves both halves."""
    if table.shape[-1] not in (width, width // 2):
        raise ValueError(f"{name}: expected last dimension {width} or {width // 2}, got {table.shape[-1]}")
    return table if table.shape[-1] == width else torch.cat((table, table), dim=-1)


def _turn(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs turned, in the dtype of x1."""
    a, b, c, s = _wide(x1), _wide(x2), _wide(cos), _wide(sin)
    return (a * c - b * s).to(x1.dtype), (a * s + b * c).to(x1.dtype)


def _refuse_integers(name: str, x: Tensor) -> None:
    # What is turned would be cut off to whole numbers.
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a tensor of floats, got {x.dtype}")


def _wide(x: Tensor) -> Tensor:
    """Cast to float32, or as it is where that is wider."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
