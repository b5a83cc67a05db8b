"""Guards of the matmuls of `kernel_loader.bundles.fp8`: each is called with the function, and then as the function.

Formats of weights are recognised as the bundle says, and as the published builds do: MX by the shape and dtype of the
scales, per-tensor by a `block_size` that is None or [N, K], block otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_loader.quantization.codes import E8M0_DTYPES, decode_e8m0

# OCP Microscaling Formats (MX) v1.0: elements along K that share a UE8M0 scale.
MX_GROUP: Final = 32

# A code of e4m3 that is NaN.
_NAN: Final = 0x7F

# The published builds try tiles of up to this many rows and columns; every tile divides it.
_LARGEST_TILE: Final = 256

# Block for a weight that has one scale and is treated as one of blocks.
_BLOCK: Final = 128


def whole_tiles(
    function: Callable[..., Tensor],
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """N and K of the weights of experts need not be multiples of a tile: they are padded with zeros.

    Builds without masks along N and K read and write past the ends of rows. Padding copies the weights at each call:
    a model whose layers need it should store them padded.
    """
    n, k = B.shape[-2], A.shape[-1]
    block = next((value for value in (*rest, *named.values()) if isinstance(value, (list, tuple))), None)
    mx, per_tensor = is_mx(B, Bs), block is None or tuple(block) == (n, B.shape[-1])
    tile_n, tile_k = (_LARGEST_TILE, _LARGEST_TILE) if mx or per_tensor or block is None else block
    more_n, more_k = -n % tile_n, -k % tile_k
    if not (more_n or more_k):
        return function(A, B, Bs, *rest, **named)
    A, B = pad(A, (0, more_k)), _grown(B, more_n, more_k * B.shape[-1] // k)
    if mx:
        Bs = _grown(Bs, more_n, more_k // MX_GROUP)
    elif per_tensor:  # [N, K] is that of the weight no more
        rest = tuple(None if value is block else value for value in rest)
        named = {name: None if value is block else value for name, value in named.items()}
    return function(A, B, Bs, *rest, **named)[:, :n].contiguous()


def static_scale(
    function: Callable[..., Tensor],
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    block_size: Sequence[int] | None,
    output_dtype: torch.dtype | None = None,
    activation_scale: Tensor | None = None,
) -> Tensor:
    """`activation_scale` counts for weights with one scale too: they are treated as blocks that share it."""
    n, k = B.shape
    if activation_scale is not None and not is_mx(B, Bs) and (block_size is None or tuple(block_size) == (n, k)):
        # A single block would be taken for a whole matrix again.
        block_size = [_BLOCK, _BLOCK // 2 if (n, k) == (_BLOCK, _BLOCK) else _BLOCK]
        Bs = Bs.reshape(1, 1).expand(-(-n // block_size[0]), -(-k // block_size[1]))
    return function(A, B, Bs, block_size, output_dtype, activation_scale)


def float_scale(
    function: Callable[..., Tensor],
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """One UE8M0 scale a matrix reaches the function as float32. Builds take its exponent for the scale itself."""
    if Bs.dtype in E8M0_DTYPES and not is_mx(B, Bs) and Bs.numel() == (B.shape[0] if B.ndim == 3 else 1):
        Bs = decode_e8m0(Bs)
    return function(A, B, Bs, *rest, **named)


def nan_scale(
    function: Callable[..., tuple[Tensor, Tensor]], x: Tensor, *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """NaN in a run of x makes its scale and its codes NaN. Maxima of Triton pass over NaN.

    x is read once more, and codes are written once more.
    """
    codes, scales = function(x, *rest, **named)
    if not scales.numel():
        return codes, scales
    runs = (scales.shape[-1], -1)
    poisoned = torch.unflatten(x, -1, runs).amax(-1).isnan()
    torch.unflatten(codes.view(torch.uint8), -1, runs).masked_fill_(poisoned.unsqueeze(-1), _NAN)
    return codes, scales.masked_fill_(poisoned, torch.nan)


def wide_indices(
    function: Callable[..., Tensor],
    A: Tensor,
    B: Tensor,
    Bs: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """Indices and counts of every integer dtype: those that are neither int32 nor int64 reach the function as int64.

    Sums of small dtypes overflow. A uint64 beyond int64, which can only be a sentinel, becomes the largest int64.
    """
    return function(A, B, Bs, *map(wide, rest), **{name: wide(value) for name, value in named.items()})


def vector(
    function: Callable[..., Tensor],
    A: Tensor,
    *rest: Any,
    **named: Any,
) -> Tensor:
    """A of one dimension is a matrix of one row."""
    return function(A[None], *rest, **named)[0] if A.ndim == 1 else function(A, *rest, **named)


def is_mx(B: Tensor, Bs: Tensor) -> bool:
    """Whether a weight is MXFP8 or MXFP4: one UE8M0 scale for 32 elements along K."""
    groups = B.shape[-1] * codes_per_element(B) // MX_GROUP
    return Bs.dtype in E8M0_DTYPES and tuple(Bs.shape) == (*B.shape[:-1], groups)


def codes_per_element(B: Tensor) -> int:
    """Codes in an element of B: two e2m1 in an int8."""
    return 2 if B.dtype == torch.int8 else 1


def wide(value: Any) -> Any:
    """Integers other than int32 and int64 as int64; any other argument as it is."""
    if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype in (torch.int32, torch.int64):
        return value
    found = value.to(torch.int64)
    return found.masked_fill(found < 0, torch.iinfo(torch.int64).max) if value.dtype == torch.uint64 else found


# An op, since Inductor hands no view in another dtype of what it computes itself to a kernel, and promotes no float8.
@torch.library.custom_op("kernel_loader_guards::grown", mutates_args=())
def _grown(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Codes of one byte each, with rows and columns of zeros added."""
    return pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


@_grown.register_fake
def _(codes: Tensor, rows: int, columns: int) -> Tensor:
    return codes.new_empty((*codes.shape[:-2], codes.shape[-2] + rows, codes.shape[-1] + columns))
