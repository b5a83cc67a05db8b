"""Layers of models, replaced by those of kernels."""

from kernel_loader.layers.decorator import (
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernelized_func,
)
from kernel_loader.layers.device import CapabilityRange, CUDAProperties, Device, ROCMProperties
from kernel_loader.layers.kernelizer import kernelize, unkernelize
from kernel_loader.layers.mapping import register_kernel_mapping, use_kernel_mapping
from kernel_loader.layers.mode import KernelizeFallback, Mode
from kernel_loader.layers.report import kernelize_report
from kernel_loader.layers.repository import LayerRepository, LocalLayerRepository, LockedLayerRepository

__all__ = [
    "CUDAProperties",
    "CapabilityRange",
    "Device",
    "KernelizeFallback",
    "LayerRepository",
    "LocalLayerRepository",
    "LockedLayerRepository",
    "Mode",
    "ROCMProperties",
    "kernelize",
    "kernelize_report",
    "register_kernel_mapping",
    "replace_kernel_forward_from_hub",
    "unkernelize",
    "use_kernel_forward_from_hub",
    "use_kernel_mapping",
    "use_kernelized_func",
]
