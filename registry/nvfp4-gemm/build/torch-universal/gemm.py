"""The product with a packed weight."""

import torch
from torch import Tensor
from torch.nn import functional

from .pack import PackedWeight
from .product import product
from .quantize import E2M1_MAX, E4M3_MAX
from .swizzle import GROUP, swizzled_sf_shape, unswizzle

# So few rows keep their activations as they are, where there are scales row by row.
FEW_ROWS = 2

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def gemm(pw: PackedWeight, x: Tensor) -> Tensor:
    """The product x @ W.T, with x quantised to NVFP4 on the way in. (..., K) -> (..., N) bfloat16.

    One scale stands for the whole of x. Two rows or fewer are not quantised, where the weight has `sf_rowmajor`.

    Args:
        pw: a packed weight (N, K).
        x: (..., K) bfloat16, float16 or float32, rounded to bfloat16; any strides.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or a device.
    """
    check_activations(x, pw.k)
    _check_weight(pw, x)
    rows = x.detach().reshape(-1, pw.k)
    rounded = rows.to(torch.bfloat16)
    if rows.shape[0] <= FEW_ROWS and pw.sf_rowmajor is not None:
        y = product(rounded, pw.qweight, pw.sf_rowmajor, None) / pw.global_scale
    else:
        scale = _activation_scale(rows)
        y = product(rounded, pw.qweight, unswizzle(pw.sf, pw.n, pw.k), scale) / (scale * pw.global_scale)
    return y.to(torch.bfloat16).reshape(*x.shape[:-1], pw.n)


def gemm_swiglu(pw: PackedWeight, x: Tensor) -> Tensor:
    """silu(gates) * what they open, for a weight of `pack_swiglu`. (..., K) -> (..., N / 2) bfloat16.

    Args:
        pw: a packed weight (N, K), gates above what they open.
        x: as `gemm` takes it.

    Raises:
        TypeError: a dtype.
        ValueError: a shape or a device, or a weight that is not two.
    """
    if not pw.swiglu:
        raise ValueError("pw: expected a weight of pack_swiglu, got one whose swiglu is False")
    y = gemm(pw, x)
    half = pw.n // 2
    return functional.silu(y[..., :half]) * y[..., half:]


def check_activations(x: Tensor, k: int) -> None:
    """Whether x is (..., K) of a dtype that can be quantised."""
    if x.dtype not in _FLOATS:
        raise TypeError(f"x: expected bfloat16, float16 or float32, got {x.dtype}")
    if x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(f"x: expected last dimension K = {k}, got shape {tuple(x.shape)}")


def _activation_scale(rows: Tensor) -> Tensor:
    """448 * 6 / max(abs(x)) of all rows, (1,) float32."""
    if not rows.numel():
        return torch.ones(1, dtype=torch.float32, device=rows.device)
    amax = rows.abs().amax().to(torch.float32).clamp(min=1e-12)
    return (torch.full_like(amax, E4M3_MAX * E2M1_MAX) / amax).reshape(1)


def _check_weight(pw: PackedWeight, x: Tensor) -> None:
    n, k = pw.n, pw.k
    _check("qweight", pw.qweight, torch.uint8, (n, k // 2), x)
    _check("sf", pw.sf, torch.int32, swizzled_sf_shape(n, k), x)
    _check("global_scale", pw.global_scale, torch.float32, (1,), x)
    if pw.sf_rowmajor is not None:
        _check("sf_rowmajor", pw.sf_rowmajor, torch.uint8, (n, k // GROUP), x)


def _check(name: str, part: Tensor, dtype: torch.dtype, shape: tuple[int, ...], x: Tensor) -> None:
    if part.dtype != dtype:
        raise TypeError(f"pw: expected {name} in {dtype}, got {part.dtype}")
    if tuple(part.shape) != shape:
        raise ValueError(f"pw: expected {name} of shape {shape}, got {tuple(part.shape)}")
    if part.device != x.device:
        raise ValueError(f"pw: expected {name} on {x.device}, where x is, got {part.device}")
