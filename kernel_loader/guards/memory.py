"""Where tensors lie in memory: builds that load vectors of numbers at a time take them from whole places alone."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Bytes of the largest vector that a thread loads or stores at a time.
_VECTOR: Final = 16


def is_whole(x: Tensor, *strides: int) -> bool:
    """Whether x starts at a multiple of 16 bytes, and each of these strides, in elements, is one.

    False inside torch.compile: what is being compiled has no memory yet, and may be called with any.
    """
    if torch.compiler.is_compiling():
        return False
    return not (x.data_ptr() % _VECTOR or any(stride * x.itemsize % _VECTOR for stride in strides))


def whole(x: Tensor) -> Tensor:
    """A copy of x, contiguous, that starts at a multiple of 16 bytes."""
    copied: Tensor = _copied(x) if torch.compiler.is_compiling() else x.clone(memory_format=torch.contiguous_format)
    return copied


# An op, since a compiler may leave out a plain copy.
@torch.library.custom_op("kernel_loader_guards::whole", mutates_args=(), schema="(Tensor x) -> Tensor")
def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_copied.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(ctx: object, grad: Tensor) -> Tensor:  # noqa: ARG001 - the signature of autograd
    return grad


_copied.register_autograd(_backward)
