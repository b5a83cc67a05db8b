"""finegrained-fp8 with the faults of the published version 4, on the CPU: a build, written to a directory by tests.

The products are those of the grid's formulas. What is done otherwise is what the Triton source does otherwise: no
gradient, rows that stay unwritten, dimensions that are divided by, what must be contiguous or a multiple of a tile, and
scales that are read as they are stored.
"""

import torch

from kernel_loader.conformance.grids.fp8 import FINEGRAINED_FP8_GRID

FORMULAS = {entry.entrypoint: entry.formula for entry in FINEGRAINED_FP8_GRID}
NAMESPACE = "_" + __name__.rpartition(".")[2]
UE8M0 = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))
LARGEST_TILE = 256


def op(name, schema):
    """A custom op without a gradient, like those of the published build."""
    return torch.library.custom_op(f"{NAMESPACE}::{name}", mutates_args=(), schema=schema)


def is_mx(B, Bs):
    k = B.shape[-1] * (2 if B.dtype == torch.int8 else 1)
    return Bs.dtype in UE8M0 and Bs.shape == (*B.shape[:-1], k // 32)


def is_tensor_wide(block_size, B):
    return block_size is None or (block_size[0] == B.shape[-2] and block_size[1] == B.shape[-1])


def as_stored(Bs):
    return Bs.view(torch.uint8).float() if Bs.dtype in UE8M0 else Bs


def written(result, rows, A, dtype):
    """An output whose memory held NaN, where some rows were written."""
    out = torch.full(result.shape, torch.nan, dtype=dtype or A.dtype)
    out[rows] = result.to(out.dtype)[rows]
    return out


def check(A, B, Bs, block_size):
    if not A.is_contiguous() or not B.is_contiguous():
        raise AssertionError("A and B must be contiguous")
    n, k = B.shape[-2], A.shape[-1]
    tile = block_size if not (is_mx(B, Bs) or is_tensor_wide(block_size, B)) else (LARGEST_TILE, LARGEST_TILE)
    if B.ndim == 3 and (n % tile[0] or k % tile[1]):
        raise AssertionError("memory past the ends of rows was read and written")


@op("quant", "(Tensor x, int block_size) -> (Tensor, Tensor)")
def quant(x, block_size):
    if not x.is_contiguous():
        raise AssertionError("x must be contiguous")
    codes, scales = FORMULAS["fp8_act_quant"](x.nan_to_num(0.0), block_size)  # its maximum passes over NaN
    return torch.where(x.isnan(), torch.nan, codes).to(torch.float8_e4m3fn), scales.float()


@quant.register_fake
def _(x, block_size):
    scales = (*x.shape[:-1], x.shape[-1] // block_size)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(scales, dtype=torch.float32)


@op("dense", "(Tensor A, Tensor B, Tensor Bs, int[]? block_size, ScalarType? dtype, Tensor? scale) -> Tensor")
def dense(A, B, Bs, block_size, dtype, scale):
    A.stride(-2), A.numel() // A.shape[-1]
    check(A, B, Bs, block_size)
    if not is_mx(B, Bs) and is_tensor_wide(block_size, B):
        Bs, scale = as_stored(Bs), None
    return FORMULAS["fp8_matmul"](A, B, Bs, block_size, None, scale).to(dtype or A.dtype)


@dense.register_fake
def _(A, B, Bs, block_size, dtype, scale):
    return A.new_empty((*A.shape[:-1], B.shape[0]), dtype=dtype)


@op("batched", "(Tensor A, Tensor B, Tensor Bs, Tensor ids, int[]? block_size, ScalarType? dtype) -> Tensor")
def batched(A, B, Bs, ids, block_size, dtype):
    A.numel() // A.shape[-1]
    check(A, B, Bs, block_size)
    if not is_mx(B, Bs) and is_tensor_wide(block_size, B):
        Bs = as_stored(Bs)
    experts = ids.long()
    if (experts < 0).any():
        raise AssertionError("memory before the weights was read")
    result = FORMULAS["batched_fp8_matmul"](A, B, Bs, experts, block_size)
    return written(result, experts < B.shape[0], A, dtype)


@batched.register_fake
def _(A, B, Bs, ids, block_size, dtype):
    return A.new_empty((A.shape[0], B.shape[1]), dtype=dtype)


@op(
    "grouped",
    "(Tensor A, Tensor B, Tensor Bs, Tensor ends, Tensor tokens, int[]? block_size, ScalarType? dtype) -> Tensor",
)
def grouped(A, B, Bs, ends, tokens, block_size, dtype):
    A.shape[0] // B.shape[0]
    check(A, B, Bs, block_size)
    if not is_mx(B, Bs) and is_tensor_wide(block_size, B):
        Bs = as_stored(Bs)
    tiles = ((tokens + 127) // 128).cumsum(0)
    if (tiles.diff(prepend=tiles.new_zeros(1)) != (tokens.long() + 127) // 128).any():
        raise AssertionError("the number of tiles overflowed")
    result = FORMULAS["grouped_fp8_matmul"](A, B, Bs, ends, tokens, block_size)
    return written(result, torch.arange(A.shape[0]) < ends[-1].long(), A, dtype)


@grouped.register_fake
def _(A, B, Bs, ends, tokens, block_size, dtype):
    return A.new_empty((A.shape[0], B.shape[1]), dtype=dtype)


def fp8_act_quant(x, block_size=128):
    return quant(x, block_size)


def matmul_2d(A, B, Bs, block_size, output_dtype=None, activation_scale=None):
    """The published dispatcher."""
    return dense(A, B, Bs, block_size, output_dtype, activation_scale)


def matmul_batched(A, B, Bs, expert_ids, block_size, output_dtype=None):
    return batched(A, B, Bs, expert_ids, block_size, output_dtype)


def matmul_grouped(A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype=None):
    return grouped(A, B, Bs, offsets, tokens_per_expert, block_size, output_dtype)
