"""Checks of arguments. They look at shapes, dtypes and devices only: they run on fakes, and wait for no device."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai")

# torch 2.6 has no float8_e8m0fnu; there UE8M0 scales can only be raw exponent bytes.
UE8M0_DTYPES: Final = (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8))

_INTEGERS: Final = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


class Activation(NamedTuple):
    """What stands between the two products.

    Attributes:
        name: one of ACTIVATIONS.
        alpha: of "swiglu_oai".
        limit: the clamp of gate and up; None for none.
        gated: whether there are a gate and an up.
        interleaved: whether these alternate, gate first, instead of following each other.
    """

    name: str
    alpha: float
    limit: float | None
    gated: bool
    interleaved: bool


class Problem(NamedTuple):
    """What a call is about, once its arguments are known to agree.

    Attributes:
        tokens: T.
        slots: k, of each token.
        experts: E.
        hidden: H.
        intermediate: I.
        width: 2I, or I without a gate.
        activation: what stands between the two products.
        block_size: [bn, bk] of FP8 weights, None for others.
    """

    tokens: int
    slots: int
    experts: int
    hidden: int
    intermediate: int
    width: int
    activation: Activation
    block_size: list[int] | None


def check(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None,
    down_proj_bias: Tensor | None,
    gate_up_proj_scale: Tensor | None,
    down_proj_scale: Tensor | None,
    block_size: Sequence[int] | None,
    activation: Activation,
    *,
    is_transposed: bool,
) -> Problem:
    """The sizes of the problem.

    Raises:
        TypeError: the dtype of an argument, or a `block_size` that is no list of ints.
        ValueError: the shape or device of an argument, an unknown activation, or options that exclude each other.
    """
    tensors = {
        "top_k_index": top_k_index,
        "top_k_weights": top_k_weights,
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "gate_up_proj_bias": gate_up_proj_bias,
        "down_proj_bias": down_proj_bias,
        "gate_up_proj_scale": gate_up_proj_scale,
        "down_proj_scale": down_proj_scale,
    }
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != hidden_states.device:
            expected = f"on {hidden_states.device}, where hidden_states is"
            raise ValueError(f"{name}: expected {expected}, got {tensor.device}")
    _check_activation(activation)
    tokens, hidden, slots = _check_tokens(hidden_states, top_k_index, top_k_weights)
    experts, intermediate = _check_weights(
        hidden_states, gate_up_proj, down_proj, gated=activation.gated, is_transposed=is_transposed
    )
    width = intermediate * (2 if activation.gated else 1)
    _check_bias("gate_up_proj_bias", gate_up_proj_bias, experts, width)
    _check_bias("down_proj_bias", down_proj_bias, experts, hidden)
    fp8 = gate_up_proj.dtype == torch.float8_e4m3fn
    blocks = _check_block_size(block_size, fp8=fp8, is_transposed=is_transposed)
    _check_scale("gate_up_proj_scale", gate_up_proj_scale, (experts, width, hidden), blocks)
    _check_scale("down_proj_scale", down_proj_scale, (experts, hidden, intermediate), blocks)
    return Problem(tokens, slots, experts, hidden, intermediate, width, activation, blocks)


def _check_activation(activation: Activation) -> None:
    if activation.name not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation.name!r}")
    if activation.name == "swiglu_oai" and not activation.gated:
        raise ValueError("activation: expected one that needs no gate with has_gate=False, got 'swiglu_oai'")
    if activation.limit is not None and not activation.gated:
        raise ValueError(f"limit: expected None with has_gate=False, got {activation.limit}")
    if activation.limit is not None and not activation.limit >= 0:
        raise ValueError(f"limit: expected None or a number not below zero, got {activation.limit}")


def _check_tokens(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[int, int, int]:
    """(T, H, k)."""
    if hidden_states.dtype not in FLOATS:
        raise TypeError(f"hidden_states: expected bfloat16, float16 or float32, got {hidden_states.dtype}")
    if top_k_index.dtype not in _INTEGERS:
        raise TypeError(f"top_k_index: expected an integer dtype, got {top_k_index.dtype}")
    if top_k_weights.dtype not in FLOATS:
        raise TypeError(f"top_k_weights: expected bfloat16, float16 or float32, got {top_k_weights.dtype}")
    if hidden_states.ndim != 2:
        raise ValueError(f"hidden_states: expected shape (T, H), got {tuple(hidden_states.shape)}")
    tokens, hidden = hidden_states.shape
    if top_k_index.ndim != 2 or top_k_index.shape[0] != tokens:
        raise ValueError(f"top_k_index: expected shape (T, k) with T = {tokens}, got {tuple(top_k_index.shape)}")
    if top_k_weights.shape != top_k_index.shape:
        expected = f"{tuple(top_k_index.shape)}, that of top_k_index"
        raise ValueError(f"top_k_weights: expected shape {expected}, got {tuple(top_k_weights.shape)}")
    return tokens, hidden, top_k_index.shape[1]


def _check_weights(
    hidden_states: Tensor, gate_up_proj: Tensor, down_proj: Tensor, *, gated: bool, is_transposed: bool
) -> tuple[int, int]:
    """(E, I)."""
    hidden = hidden_states.shape[1]
    if gate_up_proj.dtype not in (hidden_states.dtype, torch.float8_e4m3fn):
        expected = f"{hidden_states.dtype}, that of hidden_states, or float8_e4m3fn"
        raise TypeError(f"gate_up_proj: expected {expected}, got {gate_up_proj.dtype}")
    if down_proj.dtype != gate_up_proj.dtype:
        raise TypeError(f"down_proj: expected {gate_up_proj.dtype}, that of gate_up_proj, got {down_proj.dtype}")
    rows = "2I" if gated else "I"
    shape = f"(E, H, {rows})" if is_transposed else f"(E, {rows}, H)"
    axes = (2, 1) if is_transposed else (1, 2)
    if gate_up_proj.ndim != 3 or gate_up_proj.shape[axes[1]] != hidden:
        raise ValueError(f"gate_up_proj: expected shape {shape} with H = {hidden}, got {tuple(gate_up_proj.shape)}")
    experts, width = gate_up_proj.shape[0], gate_up_proj.shape[axes[0]]
    if gated and width % 2:
        raise ValueError(f"gate_up_proj: expected shape {shape}, an even 2I, got {tuple(gate_up_proj.shape)}")
    intermediate = width // 2 if gated else width
    down = (experts, intermediate, hidden) if is_transposed else (experts, hidden, intermediate)
    if tuple(down_proj.shape) != down:
        raise ValueError(f"down_proj: expected shape {down} to match gate_up_proj, got {tuple(down_proj.shape)}")
    return experts, intermediate


def _check_bias(name: str, bias: Tensor | None, experts: int, width: int) -> None:
    if bias is None:
        return
    if bias.dtype not in FLOATS:
        raise TypeError(f"{name}: expected bfloat16, float16 or float32, got {bias.dtype}")
    if tuple(bias.shape) != (experts, width):
        raise ValueError(f"{name}: expected shape {(experts, width)}, got {tuple(bias.shape)}")


def _check_block_size(block_size: Sequence[int] | None, *, fp8: bool, is_transposed: bool) -> list[int] | None:
    """[bn, bk] for FP8 weights, None for others."""
    if not fp8:
        if block_size is not None:
            raise ValueError(f"block_size: expected None, as the weights are not FP8, got {block_size!r}")
        return None
    if is_transposed:
        raise ValueError("is_transposed: expected False with FP8 weights, got True")
    if block_size is None:
        raise ValueError("block_size: expected [bn, bk] with FP8 weights, got None")
    if not isinstance(block_size, (list, tuple)) or not all(isinstance(size, int) for size in block_size):
        raise TypeError(f"block_size: expected a list of two ints, got {block_size!r}")
    if len(block_size) != 2 or min(block_size) < 1:
        raise ValueError(f"block_size: expected two positive numbers [bn, bk], got {list(block_size)}")
    return list(block_size)


def _check_scale(name: str, scale: Tensor | None, weight: tuple[int, int, int], blocks: list[int] | None) -> None:
    if blocks is None:
        if scale is not None:
            raise ValueError(f"{name}: expected None, as the weights are not FP8, got {tuple(scale.shape)}")
        return
    experts, n, k = weight
    expected = (experts, -(-n // blocks[0]), -(-k // blocks[1]))
    if scale is None:
        raise ValueError(f"{name}: expected shape {expected} with FP8 weights, got None")
    if scale.dtype != torch.float32 and scale.dtype not in UE8M0_DTYPES:
        raise TypeError(f"{name}: expected float32, float8_e8m0fnu or uint8 (UE8M0 exponents), got {scale.dtype}")
    if tuple(scale.shape) != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(scale.shape)}")
