"""Find, verify and load the compiled GPU kernel that fits this machine.

    fp8 = kernel_loader.load_kernel("finegrained_fp8")
    y = fp8.fp8_matmul(a, w, w_scale, [128, 128], torch.bfloat16)

Importing this package imports neither torch nor huggingface_hub: names are looked up when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_loader.api import (
        can_load as can_load,
        load_kernel as load_kernel,
        load_module as load_module,
        loaded_kernels as loaded_kernels,
        origin as origin,
        prefetch as prefetch,
        resolve as resolve,
    )
    from kernel_loader.conformance import prewarm as prewarm
    from kernel_loader.errors import (
        AbiMismatch as AbiMismatch,
        BundleError as BundleError,
        CyclicDependency as CyclicDependency,
        FusionError as FusionError,
        HostError as HostError,
        HubUnavailable as HubUnavailable,
        IntegrityError as IntegrityError,
        KernelImportError as KernelImportError,
        KernelizeError as KernelizeError,
        KernelLoaderError as KernelLoaderError,
        LockError as LockError,
        LockMismatch as LockMismatch,
        LockMissing as LockMissing,
        LockStale as LockStale,
        ManifestError as ManifestError,
        MetadataError as MetadataError,
        MissingDependency as MissingDependency,
        MissingEntrypoints as MissingEntrypoints,
        NoCompatibleBuild as NoCompatibleBuild,
        NotCached as NotCached,
        OpNamespaceTaken as OpNamespaceTaken,
        RepositoryMissing as RepositoryMissing,
        RequestError as RequestError,
        SettingsError as SettingsError,
        SourceError as SourceError,
        StoreError as StoreError,
        TrustError as TrustError,
        UnknownKernel as UnknownKernel,
        UnknownVersion as UnknownVersion,
        VariantError as VariantError,
    )
    from kernel_loader.fusion import (
        Cast as Cast,
        Chunk as Chunk,
        Concatenate as Concatenate,
        Deinterleave as Deinterleave,
        DequantizeBlockFP8 as DequantizeBlockFP8,
        Interleave as Interleave,
        KernelConfig as KernelConfig,
        Pad as Pad,
        Permute as Permute,
        QuantizeBlockFP8 as QuantizeBlockFP8,
        Rename as Rename,
        Stack as Stack,
        Transpose as Transpose,
        Unpad as Unpad,
        Unstack as Unstack,
        WeightConverter as WeightConverter,
        convert_state_dict as convert_state_dict,
        fuse as fuse,
        make_parent_class_for_kernel_fusion as make_parent_class_for_kernel_fusion,
        parity as parity,
        revert_state_dict as revert_state_dict,
        unfuse as unfuse,
    )
    from kernel_loader.host import Host as Host
    from kernel_loader.layers import (
        CapabilityRange as CapabilityRange,
        CUDAProperties as CUDAProperties,
        Device as Device,
        KernelizeFallback as KernelizeFallback,
        LayerRepository as LayerRepository,
        LocalLayerRepository as LocalLayerRepository,
        LockedLayerRepository as LockedLayerRepository,
        Mode as Mode,
        ROCMProperties as ROCMProperties,
        kernelize as kernelize,
        kernelize_report as kernelize_report,
        register_kernel_mapping as register_kernel_mapping,
        replace_kernel_forward_from_hub as replace_kernel_forward_from_hub,
        unkernelize as unkernelize,
        use_kernel_forward_from_hub as use_kernel_forward_from_hub,
        use_kernel_mapping as use_kernel_mapping,
        use_kernelized_func as use_kernelized_func,
    )
    from kernel_loader.loader import KernelLoader as KernelLoader
    from kernel_loader.lock import Lock as Lock
    from kernel_loader.planning import Prefetched as Prefetched
    from kernel_loader.provenance import Origin as Origin
    from kernel_loader.resolver import Resolution as Resolution, Verdict as Verdict
    from kernel_loader.rules import Reason as Reason
    from kernel_loader.settings import Settings as Settings

__version__ = "0.1.0"

_HOMES = {
    "api": ("can_load", "load_kernel", "load_module", "loaded_kernels", "origin", "prefetch", "resolve"),
    "conformance": ("prewarm",),
    "errors": (
        "AbiMismatch",
        "BundleError",
        "CyclicDependency",
        "FusionError",
        "HostError",
        "HubUnavailable",
        "IntegrityError",
        "KernelImportError",
        "KernelLoaderError",
        "KernelizeError",
        "LockError",
        "LockMismatch",
        "LockMissing",
        "LockStale",
        "ManifestError",
        "MetadataError",
        "MissingDependency",
        "MissingEntrypoints",
        "NoCompatibleBuild",
        "NotCached",
        "OpNamespaceTaken",
        "RepositoryMissing",
        "RequestError",
        "SettingsError",
        "SourceError",
        "StoreError",
        "TrustError",
        "UnknownKernel",
        "UnknownVersion",
        "VariantError",
    ),
    "fusion": (
        "Cast",
        "Chunk",
        "Concatenate",
        "Deinterleave",
        "DequantizeBlockFP8",
        "Interleave",
        "KernelConfig",
        "Pad",
        "Permute",
        "QuantizeBlockFP8",
        "Rename",
        "Stack",
        "Transpose",
        "Unpad",
        "Unstack",
        "WeightConverter",
        "convert_state_dict",
        "fuse",
        "make_parent_class_for_kernel_fusion",
        "parity",
        "revert_state_dict",
        "unfuse",
    ),
    "host": ("Host",),
    "layers": (
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
    ),
    "loader": ("KernelLoader",),
    "lock": ("Lock",),
    "planning": ("Prefetched",),
    "provenance": ("Origin",),
    "resolver": ("Resolution", "Verdict"),
    "rules": ("Reason",),
    "settings": ("Settings",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # noqa: PLE0604 - names of the table above


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
