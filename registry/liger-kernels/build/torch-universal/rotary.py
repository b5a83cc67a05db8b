"""Rotary position embedding of queries and keys, computed in float32 at least and rounded once.

Source: Su et al., RoFormer (arXiv:2104.09864), 3.4; the two of a pair lie half a head apart, not side by side.
"""

import torch
from torch import Tensor

from .wide import wide


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys: (x1 * cos - x2 * sin, x2 * cos + x1 * sin) for the halves x1 and x2 of each head.

    Args:
        q: (B, heads, T, D) float with D even.
        k: (B, key heads, T, D), as q.
        cos: (1 or B, T, D), or D / 2. Columns from D / 2 on are not read.
        sin: as cos.
        unsqueeze_dim: where the heads are: 1, or 2 for (B, T, heads, D).

    Returns:
        q and k turned, new tensors of their shapes and dtypes.

    Raises:
        ValueError: D is odd, or the last dimension of cos or sin is neither D nor D / 2.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turn("q", q, cos, sin), _turn("k", k, cos, sin)


liger_rotary_pos_emb.can_torch_compile = True  # type: ignore[attr-defined]  # where published builds say it


def _turn(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width, half = x.shape[-1], x.shape[-1] // 2
    if width % 2:
        raise ValueError(f"{name}: expected shape (..., D) with D even, got {tuple(x.shape)}")
    for label, table in (("cos", cos), ("sin", sin)):
        if table.shape[-1] not in (width, half):
            raise ValueError(f"{label}: expected last dimension {width} or {half}, got {table.shape[-1]}")
    c, s = wide(cos[..., :half]), wide(sin[..., :half])
    x1, x2 = wide(x[..., :half]), wide(x[..., half:])
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1).to(x.dtype)
