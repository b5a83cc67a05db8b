"""The module-level functions: one-line doors to a default `KernelLoader`."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from kernel_loader.errors import RequestError
from kernel_loader.host import Host
from kernel_loader.loaded import LEDGER
from kernel_loader.loader import KernelLoader
from kernel_loader.planning import Prefetched
from kernel_loader.provenance import Origin
from kernel_loader.resolver import Resolution
from kernel_loader.settings import Fallback

if TYPE_CHECKING:
    from kernel_loader.bundles.activation import Activation
    from kernel_loader.bundles.attention import FlashAttn2, FlashAttn3, VllmFlashAttn3
    from kernel_loader.bundles.causal_conv1d import CausalConv1d
    from kernel_loader.bundles.deep_gemm import DeepGEMM
    from kernel_loader.bundles.deformable_detr import DeformableDETR
    from kernel_loader.bundles.fp8 import FineGrainedFP8
    from kernel_loader.bundles.gated_delta_rule import GatedDeltaRule
    from kernel_loader.bundles.layer_norm import LayerNorms
    from kernel_loader.bundles.liger import Liger
    from kernel_loader.bundles.mamba_ssm import MambaSSM
    from kernel_loader.bundles.megablocks import MegaBlocks
    from kernel_loader.bundles.moe import MoEExperts
    from kernel_loader.bundles.mxfp4 import MXFP4
    from kernel_loader.bundles.nvfp4 import NVFP4GEMM
    from kernel_loader.bundles.paged_attention import PagedAttention
    from kernel_loader.bundles.relu import ReLU
    from kernel_loader.bundles.rmsnorm import RMSNorm
    from kernel_loader.bundles.rotary import Rotary
    from kernel_loader.bundles.sonic_moe import SonicMoE

_Bundle = TypeVar("_Bundle")

# torch.compile traces load_kernel. What it can read is a plain dict, and what it can leave alone is a step that is
# marked constant; so the bundles of the default loader lie in a dict of the module, and nothing else does.
_BUNDLES: Final[dict[tuple[object, ...], Any]] = {}
_DEFAULT: Final[list[KernelLoader]] = []
_DEFAULT_LOCK: Final = threading.Lock()


def default_loader() -> KernelLoader:
    """The loader behind the module-level functions, made from the environment when it is first needed."""
    with _DEFAULT_LOCK:
        if not _DEFAULT:
            _DEFAULT.append(KernelLoader())
        return _DEFAULT[0]


def reset() -> None:
    """Forget the default loader: the next call reads the environment and looks at the machine again.

    Modules that were imported stay imported.
    """
    with _DEFAULT_LOCK:
        _DEFAULT.clear()
        _BUNDLES.clear()


def _load_bundle(key: tuple[Any, ...]) -> bool:
    try:
        known = key in _BUNDLES
    except TypeError as error:
        raise RequestError(f"load_kernel was called with {key!r}", "Pass a name or a bundle class.") from error
    if not known:
        kernel, version, revision, backend, fallback = key
        loaded = default_loader().load(kernel, version=version, revision=revision, backend=backend, fallback=fallback)
        _BUNDLES[key] = loaded
    return True


# What torch._dynamo.assume_constant_result sets, without importing torch.
_load_bundle._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - Dynamo reads this name


@overload
def load_kernel(
    kernel: Literal["activation"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Activation: ...
@overload
def load_kernel(
    kernel: Literal["causal_conv1d", "causal-conv1d"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> CausalConv1d: ...
@overload
def load_kernel(
    kernel: Literal["deep_gemm", "deep-gemm"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> DeepGEMM: ...
@overload
def load_kernel(
    kernel: Literal["deformable_detr", "deformable-detr"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> DeformableDETR: ...
@overload
def load_kernel(
    kernel: Literal["finegrained_fp8", "finegrained-fp8"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> FineGrainedFP8: ...
@overload
def load_kernel(
    kernel: Literal["flash_attn2", "flash-attn2"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> FlashAttn2: ...
@overload
def load_kernel(
    kernel: Literal["flash_attn3", "flash-attn3"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> FlashAttn3: ...
@overload
def load_kernel(
    kernel: Literal["gated_delta_rule", "gated-delta-rule"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> GatedDeltaRule: ...
@overload
def load_kernel(
    kernel: Literal["layer_norm", "layer-norm"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> LayerNorms: ...
@overload
def load_kernel(
    kernel: Literal["liger"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Liger: ...
@overload
def load_kernel(
    kernel: Literal["mamba_ssm", "mamba-ssm"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> MambaSSM: ...
@overload
def load_kernel(
    kernel: Literal["megablocks"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> MegaBlocks: ...
@overload
def load_kernel(
    kernel: Literal["moe_experts", "moe-experts"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> MoEExperts: ...
@overload
def load_kernel(
    kernel: Literal["mxfp4"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> MXFP4: ...
@overload
def load_kernel(
    kernel: Literal["nvfp4_gemm", "nvfp4-gemm"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> NVFP4GEMM: ...
@overload
def load_kernel(
    kernel: Literal["paged_attention", "paged-attention"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> PagedAttention: ...
@overload
def load_kernel(
    kernel: Literal["relu"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> ReLU: ...
@overload
def load_kernel(
    kernel: Literal["rmsnorm"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> RMSNorm: ...
@overload
def load_kernel(
    kernel: Literal["rotary"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Rotary: ...
@overload
def load_kernel(
    kernel: Literal["sonic_moe", "sonic-moe"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> SonicMoE: ...
@overload
def load_kernel(
    kernel: Literal["vllm_flash_attn3", "vllm-flash-attn3"],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> VllmFlashAttn3: ...
@overload
def load_kernel(
    kernel: type[_Bundle],
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> _Bundle: ...
@overload
def load_kernel(
    kernel: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Any: ...  # noqa: ANN401 - a kernel that only the user's manifests know
def load_kernel(
    kernel: str | type,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> Any:
    """Load a named kernel: the build that fits this machine, verified and imported once, as a frozen dataclass.

    Threads that ask at the same time get one object, and the kernel's code runs once. Works inside `torch.compile`,
    cold and warm, without a graph break.

    Args:
        kernel: a registered name ("finegrained_fp8" and "finegrained-fp8" are the same), a bundle class, or a
            capability with the features that are needed, "attention[varlen,sinks]": the first kernel that offers them
            and has a build here, or else the first whose reference does.
        version: version of the kernel's repository, instead of the manifest's. Not for a capability.
        revision: branch, tag or commit, instead of a version.
        backend: "cpu", or the backend of this machine's torch, which is also the default.
        fallback: "reference" takes the slow reference, with a warning, when a build fits but cannot be had or fails;
            "error" refuses the reference even where no build fits. By default failures raise, and where nothing fits
            the reference is the best build there is.

    Raises:
        UnknownKernel: no kernel and no capability has that name, or the capability no such feature.
        NoCompatibleBuild: no build fits, and the reference is refused or there is none.
        SourceError, IntegrityError, KernelImportError: a build fits and could not be had, or failed.
        MissingEntrypoints: the build lacks symbols; all of them are named.
        ManifestError, MetadataError, RequestError, SettingsError: something that was written cannot be read.
    """
    key = (kernel, version, revision, backend, fallback)
    _load_bundle(key)
    return _BUNDLES[key]


def resolve(
    kernel_or_repo: str | type,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    host: Host | None = None,
) -> Resolution:
    """Which build of a kernel a machine would take, and why. May list builds and read metadata; never fetches one.

    Args:
        kernel_or_repo: a registered name, a bundle class, a capability, or a repository id ("org/name"). For a
            capability the answer is about the kernel that serves, and its `candidates` are all that could.
        version: as in `load_kernel`.
        revision: as in `load_kernel`.
        backend: as in `load_kernel`.
        host: the machine; this one by default.

    Raises:
        As `load_kernel`, apart from what only loading can raise. That nothing fits is an answer, not an error.
    """
    return default_loader().resolve(kernel_or_repo, version=version, revision=revision, backend=backend, host=host)


def can_load(
    kernel_or_repo: str | type,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    fallback: Fallback | None = None,
) -> bool:
    """Whether a build, or under the same rules the reference, fits this machine. Never fetches or imports.

    With `fallback="error"` the reference does not count.

    Raises:
        SettingsError: the environment cannot be read. That nothing fits, or is known, is an answer.
    """
    return default_loader().can_load(
        kernel_or_repo, version=version, revision=revision, backend=backend, fallback=fallback
    )


def origin(loaded: object) -> Origin:
    """Where a bundle, or the module of a kernel, is from.

    Raises:
        RequestError: the object was not loaded by this package.
    """
    found = LEDGER.find(loaded)
    if found is None:
        detail = f"{type(loaded).__name__} object was not loaded by kernel_loader"
        raise RequestError(detail, "Pass what load_kernel returned.")
    return found


def load_module(
    repo_id: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    trust_remote_code: bool | Collection[str] = False,
) -> ModuleType:
    """Load the module of any kernel repository: the build that fits this machine, verified and imported once.

    Args:
        repo_id: repository on the Hub, "org/name"; or a registered name, whose module has no bundle's promises, and
            whose reference serves where no build fits.
        version: version of the repository (its branch `v<N>`).
        revision: branch, tag or commit, instead of a version; "main" when neither is given.
        backend: as in `load_kernel`.
        trust_remote_code: False lets publishers pass that the Hub marks as trusted; a list of repository ids, or one,
            lets those pass too; True lets all pass.

    Raises:
        TrustError: code of the repository may not run here.
        NoCompatibleBuild: no build fits.
        UnknownVersion, SourceError, IntegrityError, KernelImportError, MetadataError, RequestError: as `load_kernel`.
    """
    return default_loader().load_module(
        repo_id, version=version, revision=revision, backend=backend, trust_remote_code=trust_remote_code
    )


def prefetch(
    kernels: Iterable[str | type] | str | type,
    *,
    hosts: Iterable[Host] | Host | None = None,
    all_variants: bool = False,
    trust_remote_code: bool | Collection[str] = False,
    dry_run: bool = False,
) -> list[Prefetched]:
    """Bring builds into the store, so that loading them asks nothing of the network. Imports nothing.

    With them come the kernels that they depend on.

    Args:
        kernels: registered names, bundle classes, capabilities, or repositories ("org/name", "org/name@3",
            "org/name@branch"); or one of them.
        hosts: machines to choose builds for, or one; this one by default.
        all_variants: every build of the repository, not only the one that fits.
        trust_remote_code: as in `load_module`, for kernels that are given as repositories.
        dry_run: fetch nothing; tell what would be, and how many bytes.

    Raises:
        As `load_kernel` and `load_module`, apart from what only importing can raise.
    """
    return default_loader().prefetch(
        kernels, hosts=hosts, all_variants=all_variants, trust_remote_code=trust_remote_code, dry_run=dry_run
    )


def loaded_kernels() -> tuple[Origin, ...]:
    """The origin of every build that is loaded in this process, in the order of loading."""
    return LEDGER.modules()
