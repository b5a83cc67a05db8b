"""Modules that become one kernel, and the weights that change with them."""

from kernel_loader.fusion.config import KernelConfig
from kernel_loader.fusion.converter import Composition, WeightConverter, compose
from kernel_loader.fusion.difference import Parity, parity
from kernel_loader.fusion.live import fuse, make_parent_class_for_kernel_fusion, unfuse
from kernel_loader.fusion.operations import (
    Cast,
    Chunk,
    Concatenate,
    Deinterleave,
    DequantizeBlockFP8,
    Interleave,
    Pad,
    Permute,
    QuantizeBlockFP8,
    Rename,
    Stack,
    Transpose,
    Unpad,
    Unstack,
)
from kernel_loader.fusion.state_dict import convert_state_dict, revert_state_dict

__all__ = [
    "Cast",
    "Chunk",
    "Composition",
    "Concatenate",
    "Deinterleave",
    "DequantizeBlockFP8",
    "Interleave",
    "KernelConfig",
    "Pad",
    "Parity",
    "Permute",
    "QuantizeBlockFP8",
    "Rename",
    "Stack",
    "Transpose",
    "Unpad",
    "Unstack",
    "WeightConverter",
    "compose",
    "convert_state_dict",
    "fuse",
    "make_parent_class_for_kernel_fusion",
    "parity",
    "revert_state_dict",
    "unfuse",
]
