"""Checks of arguments. They look at shapes, dtypes, strides and devices only, so they also run on fakes."""

import torch
from torch import Tensor

_BLOCK = 128


def check_plain(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor) -> None:
    """Arguments of `fp8_fp4_gemm_nt`."""
    _check_codes("a", a, "(M, K)", 2)
    _check_codes("b", b, "(N, K)", 2)
    _check_the_rest(a, a_scale, b, b_scale, d)


def check_grouped(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor, grouped_layout: Tensor) -> None:
    """Arguments of `m_grouped_fp8_fp4_gemm_nt_contiguous`, without the content of the layout."""
    _check_codes("a", a, "(M, K)", 2)
    _check_codes("b", b, "(G, N, K)", 3)
    if min(b.shape) < 1:
        raise ValueError(f"b: expected G, N and K of at least one, got codes {tuple(b.shape)}")
    _check_the_rest(a, a_scale, b, b_scale, d)
    if grouped_layout.dtype != torch.int32:
        raise TypeError(f"grouped_layout: expected int32, got {grouped_layout.dtype}")
    if tuple(grouped_layout.shape) != (a.shape[0],):
        raise ValueError(f"grouped_layout: expected shape {(a.shape[0],)}, got {tuple(grouped_layout.shape)}")
    if not grouped_layout.is_contiguous():
        raise ValueError(f"grouped_layout: expected contiguous, got strides {grouped_layout.stride()}")
    _check_device("grouped_layout", grouped_layout, a)


def _check_codes(name: str, codes: Tensor, shape: str, ndim: int) -> None:
    if codes.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name}: expected codes in float8_e4m3fn, got {codes.dtype}")
    if codes.ndim != ndim:
        raise ValueError(f"{name}: expected codes of shape {shape}, got {tuple(codes.shape)}")


def _check_the_rest(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, d: Tensor) -> None:
    (m, k), n = a.shape, b.shape[-2]
    if b.shape[-1] != k:
        raise ValueError(f"b: expected codes with K = {k}, that of a, got {tuple(b.shape)}")
    blocks_k = -(-k // _BLOCK)
    _check_scales("a", a_scale, (m, blocks_k))
    _check_scales("b", b_scale, (*b.shape[:-2], -(-n // _BLOCK), blocks_k))
    if d.dtype != torch.bfloat16:
        raise TypeError(f"d: expected bfloat16, got {d.dtype}")
    if tuple(d.shape) != (m, n):
        raise ValueError(f"d: expected shape {(m, n)}, got {tuple(d.shape)}")
    if d.numel() and d.stride(-1) != 1:
        raise ValueError(f"d: expected a last stride of 1, got {d.stride()}")
    for name, tensor in (("a", a_scale), ("b", b), ("b", b_scale), ("d", d)):
        _check_device(name, tensor, a)


def _check_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    if scales.dtype != torch.float32:
        raise TypeError(f"{name}: expected scales in float32, got {scales.dtype}")
    if tuple(scales.shape) != shape:
        raise ValueError(f"{name}: expected scales of shape {shape}, got {tuple(scales.shape)}")


def _check_device(name: str, tensor: Tensor, a: Tensor) -> None:
    if tensor.device != a.device:
        raise ValueError(f"{name}: expected on {a.device}, where the codes of a are, got {tensor.device}")
