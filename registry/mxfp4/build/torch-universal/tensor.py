"""Tensors of numbers that torch has no dtype for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .tensor_details.layout import StridedLayout


@dataclass(frozen=True)
class FloatType:
    """A format of numbers, by its bits."""

    bitwidth_exponent: int
    bitwidth_mantissa: int
    is_signed: bool

    @property
    def bitwidth(self) -> int:
        """Bits of a number."""
        return int(self.is_signed) + self.bitwidth_exponent + self.bitwidth_mantissa


FP4 = FloatType(bitwidth_exponent=2, bitwidth_mantissa=1, is_signed=True)


@dataclass
class Storage:
    """What lies in memory, and how."""

    data: torch.Tensor
    layout: StridedLayout


@dataclass
class Tensor:
    """Numbers of some format, with the shape that they have before they are packed."""

    storage: Storage
    dtype: FloatType | torch.dtype
    shape: Any

    @property
    def device(self) -> torch.device:
        """Where the data lie."""
        return self.storage.data.device

    @property
    def data(self) -> torch.Tensor:
        """What lies in memory."""
        return self.storage.data


def wrap_torch_tensor(torch_tensor: torch.Tensor, dtype: FloatType | torch.dtype | None = None) -> Tensor:
    """A tensor of codes, packed along the dimension whose stride is 1.

    Args:
        torch_tensor: uint8 with two codes a byte for FP4; anything else for a `dtype` of its own.
        dtype: FP4, or that of `torch_tensor`, which None stands for.

    Raises:
        TypeError: the dtype does not go with that of the data.
        ValueError: no stride is 1.
    """
    shape = list(torch_tensor.shape)
    if dtype is None or dtype == torch_tensor.dtype:
        dtype = torch_tensor.dtype
    elif dtype == FP4 and torch_tensor.dtype == torch.uint8:
        if 1 not in torch_tensor.stride():
            raise ValueError(f"torch_tensor: expected a stride of 1 along what is packed, got {torch_tensor.stride()}")
        shape[torch_tensor.stride().index(1)] *= 2
    else:
        raise TypeError(f"dtype: expected None, or FP4 for uint8, got {dtype} for {torch_tensor.dtype}")
    return Tensor(Storage(torch_tensor, StridedLayout(torch_tensor.shape)), dtype, shape)


def convert_layout(tensor: Tensor, layout_cls: type[StridedLayout], **layout_kwargs: Any) -> Tensor:  # noqa: ANN401
    """The same numbers in another layout.

    Raises:
        TypeError: `tensor` is not of `wrap_torch_tensor`.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"tensor: expected one of wrap_torch_tensor, got {type(tensor).__name__}")
    data = tensor.storage.layout.unswizzle_data(tensor.storage.data)
    layout = layout_cls(data.shape, **layout_kwargs)
    return Tensor(Storage(layout.swizzle_data(data), layout), tensor.dtype, tensor.shape)
