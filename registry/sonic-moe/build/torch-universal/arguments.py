"""Checks of arguments. Those of shapes, dtypes and devices also run on fakes; `check_routing` reads the numbers."""

from typing import Final

import torch
from torch import Tensor

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_INTEGERS: Final = (torch.int32, torch.int64)


def check_float(name: str, x: Tensor, ndim: int, shape: str) -> None:
    """`x` is a float tensor of `ndim` dimensions."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name}: expected bfloat16, float16, float32 or float64, got {x.dtype}")
    if x.ndim != ndim:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")


def check_weights(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> None:
    """Weights and biases agree with x (T, H) and with each other."""
    check_float("x", x, 2, "(T, H)")
    check_float("w2", w2, 3, "(H, I, E)")
    (hidden, inner, experts), width = w2.shape, x.shape[1]
    if hidden != width:
        raise ValueError(f"w2: expected shape (H, I, E) with H = {width} to match x, got {tuple(w2.shape)}")
    _check_like(x, "w1", w1, (2 * inner, hidden, experts))
    _check_like(x, "w2", w2, (hidden, inner, experts))
    if (b1 is None) != (b2 is None):
        raise ValueError("b2: expected a bias exactly where there is a b1")
    if b1 is not None and b2 is not None:
        _check_like(x, "b1", b1, (experts, 2 * inner))
        _check_like(x, "b2", b2, (experts, hidden))


def check_router(x: Tensor, router_w: Tensor, experts: int, K: int) -> None:
    """The router has a row for each expert, of which K can be chosen."""
    _check_like(x, "router_w", router_w, (experts, x.shape[1]))
    if not 1 <= K <= experts:
        raise ValueError(f"K: expected a number within 1 and E = {experts}, got {K}")


def check_triples(x: Tensor, scores: Tensor, tokens: Tensor, experts: Tensor) -> None:
    """One score, token and expert for each row of the products."""
    check_float("router_scores", scores, 1, "(R,)")
    for name, index in (("token_indices", tokens), ("expert_indices", experts)):
        if index.dtype not in _INTEGERS:
            raise TypeError(f"{name}: expected int32 or int64, got {index.dtype}")
        if index.shape != scores.shape:
            raise ValueError(
                f"{name}: expected shape {tuple(scores.shape)}, as router_scores, got {tuple(index.shape)}"
            )
    for name, value in (("router_scores", scores), ("token_indices", tokens), ("expert_indices", experts)):
        if value.device != x.device:
            raise ValueError(f"{name}: expected on {x.device}, where x is, got {value.device}")


def check_routing(tokens: Tensor, experts: Tensor, count: int) -> None:
    """Tokens ascend within 0 and `count`, and no expert is negative. Reads the numbers, so it waits for the device."""
    if not tokens.numel():
        return
    if bool((tokens[1:] < tokens[:-1]).any()):
        raise ValueError("token_indices: expected ascending numbers")
    low, high = int(tokens[0]), int(tokens[-1])
    if low < 0 or high >= count:
        raise ValueError(f"token_indices: expected numbers within 0 and T = {count}, got {low if low < 0 else high}")
    if (lowest := int(experts.min())) < 0:
        raise ValueError(f"expert_indices: expected ids >= 0 (E and above being sentinels), got {lowest}")


def _check_like(x: Tensor, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
    if value.dtype != x.dtype:
        raise TypeError(f"{name}: expected {x.dtype}, which x has, got {value.dtype}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(value.shape)}")
    if value.device != x.device:
        raise ValueError(f"{name}: expected on {x.device}, where x is, got {value.device}")
