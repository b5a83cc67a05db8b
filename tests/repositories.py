"""The repositories of kernels that are catalogued, and the builds that each would have. Facts of August 2026.

kernel-builder makes a compiled kernel for each machine of `MATRIX`, as far as the repository is for its backend and its
CUDA version, and a kernel without compiled code for each backend. metadata.json names the architectures that the
sources ask for, or else those that the builder takes for a CUDA version. Builds for Windows, which few kernels have,
are left out.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from packaging.specifiers import SpecifierSet

from kernel_loader.metadata import Metadata
from kernel_loader.sources import Fetched, Listing, Request
from kernel_loader.variant import Variant

# backend of a build -> the releases of torch that it is made for; by system (kernel-builder, docs: build variants).
MATRIX = {
    "x86_64-linux": {
        "cpu": "2.12 2.13",
        "cu126": "2.12 2.13",
        "cu130": "2.12 2.13",
        "cu132": "2.12 2.13",
        "rocm71": "2.12 2.13",
        "rocm72": "2.12 2.13",
        "xpu20253": "2.12",
        "xpu20260": "2.13",
    },
    "aarch64-linux": {"cpu": "2.12 2.13", "cu126": "2.12 2.13", "cu130": "2.12 2.13", "cu132": "2.12 2.13"},
    "aarch64-darwin": {"cpu": "2.12 2.13", "metal": "2.12 2.13"},
}
# What kernel-builder compiles for where a kernel does not say, by the major version of CUDA.
DEFAULT_ARCHS = {
    12: "7.0 7.2 7.5 8.0 8.6 8.7 8.9 9.0+PTX",
    13: "7.5 8.0 8.6 8.7 8.9 9.0 10.0 11.0 12.0 12.1+PTX",
}
GFX = "gfx906 gfx908 gfx90a gfx940 gfx941 gfx942 gfx1030 gfx1100 gfx1101"


class Repository(NamedTuple):
    """What a repository publishes. Texts are lists, separated by blanks.

    Attributes:
        repo: its id on the Hub.
        version: of which the builds are.
        backends: that it is for.
        compiled: whether its builds have compiled code.
        branch: where the version lies, if not on the branch of its number.
        stable_abi: least torch whose stable ABI the builds for CUDA and ROCm use; empty where they use the other.
        cuda: CUDA versions that it is built for.
        archs, gfx: NVIDIA and AMD architectures that it is compiled for; empty for the builder's choice.
        python: Python packages that its builds for CUDA import.
    """

    repo: str
    version: int
    backends: str
    compiled: bool = True
    branch: str | None = None
    stable_abi: str = ""
    cuda: str = ""
    archs: str = ""
    gfx: str = ""
    python: str = ""

    @property
    def kernel(self) -> str:
        """The name of the kernel."""
        return self.repo.partition("/")[2].replace("-", "_")

    def builds(self) -> dict[str, dict[str, object]]:
        """Name of a build -> its metadata.json."""
        names = self._compiled() if self.compiled else (f"torch-{backend}" for backend in self.backends.split())
        return {name: self._metadata(Variant.parse(name)) for name in names}

    def _compiled(self) -> Iterator[str]:
        for system, backends in MATRIX.items():
            for backend, releases in backends.items():
                for release in releases.split():
                    abi = "" if system == "aarch64-darwin" else "-cxx11"
                    name = f"torch{release.replace('.', '')}{abi}-{backend}-{system}"
                    if self._is_for(variant := Variant.parse(name)):
                        stable = self.stable_abi and variant.backend in ("cuda", "rocm")
                        prefix = f"torch-stable-abi{self.stable_abi.replace('.', '')}"
                        yield f"{prefix}-{backend}-{system}" if stable else name

    def _is_for(self, variant: Variant) -> bool:
        if variant.backend not in self.backends.split():
            return False
        return variant.backend != "cuda" or SpecifierSet(self.cuda).contains(_dotted(variant.backend_version))

    def _metadata(self, variant: Variant) -> dict[str, object]:
        backend: dict[str, object] = {"type": variant.backend}
        if self.compiled and variant.backend == "cuda":
            backend["archs"] = (self.archs or DEFAULT_ARCHS[variant.backend_version[0]]).split()
        if self.compiled and variant.backend == "rocm":
            backend["archs"] = self.gfx.split()
        python = self.python.split() if variant.backend == "cuda" else []
        return {
            "name": self.repo.partition("/")[2],
            "version": self.version,
            "python-depends": python,
            "backend": backend,
        }


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


REPOSITORIES = (
    Repository("kernels-community/activation", 1, "cuda metal cpu rocm", stable_abi="2.10", gfx=GFX),
    Repository("kernels-community/aiter-flash-attn", 1, "rocm", compiled=False),
    Repository("kernels-community/aiter-flash-attn-ck", 1, "rocm", gfx="gfx942 gfx950"),
    Repository("kernels-community/aiter-kernels", 2, "rocm", compiled=False),
    Repository("kernels-community/aiter-rope", 2, "rocm", compiled=False),
    Repository("kernels-community/bitsandbytes-mps", 1, "metal"),
    Repository("kernels-community/causal-conv1d", 1, "cuda"),
    Repository("kernels-community/cv-utils", 1, "cuda"),
    Repository("kernels-community/deep-gemm", 2, "cuda", cuda=">=12.8", archs="9.0a"),
    Repository("kernels-community/deformable-detr", 1, "cuda"),
    Repository("kernels-community/einops", 1, "cpu cuda metal rocm xpu", compiled=False),
    Repository("kernels-community/esmfold2-trimul", 1, "cuda", compiled=False),
    Repository("kernels-community/finegrained-fp8", 4, "cuda rocm xpu", compiled=False),
    Repository("kernels-community/fla", 1, "cuda", compiled=False, python="einops"),
    Repository("kernels-community/flash-attn-ops", 1, "cuda rocm xpu", compiled=False),
    Repository("kernels-community/flash-attn2", 3, "cpu cuda xpu", stable_abi="2.10", archs="8.0 9.0 10.0 12.0"),
    Repository("kernels-community/flash-attn3", 1, "cuda", stable_abi="2.9", cuda=">=12.6,<=13.0", archs="8.0 9.0a"),
    Repository(
        "kernels-community/flash-attn4",
        0,
        "cuda",
        compiled=False,
        cuda=">=12.8",
        python="einops tvm-ffi nvidia-cutlass-dsl",
    ),
    Repository("kernels-community/flash-mla", 1, "cuda", cuda=">=12.8", archs="9.0a 10.0f"),
    Repository("kernels-community/fp8-fbgemm", 1, "cuda rocm xpu", compiled=False),
    Repository("kernels-community/gpt-oss-metal-kernels", 1, "metal"),
    Repository("kernels-community/gpt-oss-triton-kernels", 1, "cuda rocm xpu cpu", compiled=False),
    Repository("kernels-community/layer-norm", 1, "cuda", archs="8.0 8.9 9.0 10.0 12.0"),
    Repository("kernels-community/liger-kernels", 3, "cuda rocm xpu", compiled=False),
    Repository("kernels-community/mamba-ssm", 2, "cuda", python="einops"),
    Repository(
        "kernels-community/megablocks",
        1,
        "cuda rocm xpu cpu",
        archs="7.0 7.2 7.5 8.0 8.6 8.7 8.9 9.0 10.0 10.1 11.8 12.0",
        gfx="gfx942 gfx950",
    ),
    Repository("kernels-community/metal-flash-sdpa", 1, "metal"),
    Repository("kernels-community/mlx-quantization-metal-kernels", 1, "metal"),
    Repository("mlx-rmsnorm/mlx-rmsnorm", 1, "metal"),
    Repository("kernels-community/mra", 1, "cuda"),
    Repository("MiniMaxAI/msa", 0, "cuda", cuda=">=12.8", archs="10.0", python="tvm-ffi nvidia-cutlass-dsl"),
    Repository("shi-labs/natten", 1, "cuda", archs="8.0 9.0 9.0a 10.0 10.0a 12.0"),
    Repository("kernels-community/nvfp4-gemm", 1, "cuda", stable_abi="2.9", cuda=">=12.8", archs="10.0a 12.0a"),
    Repository("kernels-community/paged-attention", 1, "cuda metal rocm", gfx=GFX),
    Repository("kernels-community/punica-sgmv", 1, "cuda", archs="8.0 8.6 8.7 8.9 9.0 10.0 10.1 12.0"),
    Repository("kernels-community/quantization-bitsandbytes", 1, "cpu"),
    Repository("kernels-community/quantization-eetq", 1, "cuda", cuda="<=12.9"),
    Repository("kernels-community/quantization-gptq", 1, "cpu"),
    Repository("kernels-community/relu", 1, "cpu cuda metal rocm xpu", gfx=GFX),
    Repository("kernels-community/rmsnorm", 1, "cpu xpu"),
    Repository("kernels-community/rotary", 2, "cuda xpu cpu"),
    Repository("kernels-community/rwkv", 1, "cuda", archs="8.0 8.9 9.0 10.0 12.0"),
    Repository("kernels-community/sage-attention", 2, "cuda", cuda=">=12.8", archs="8.0 8.9 9.0a 10.0a"),
    Repository("kernels-community/scattermoe", 1, "cuda rocm xpu", compiled=False),
    Repository("sgl-project/sgl-flash-attn3", 1, "cuda", cuda=">=12.8", archs="8.0 9.0a"),
    Repository(
        "kernels-community/sonic-moe",
        2,
        "cuda",
        compiled=False,
        branch="ep-support",
        cuda=">=12.9",
        python="tvm-ffi nvidia-cutlass-dsl",
    ),
    Repository("kernels-community/tinygrad-rms", 1, "cuda"),
    Repository("kernels-community/trimul-gpumode", 1, "cuda rocm xpu", compiled=False),
    Repository("kernels-community/triton-kernels", 1, "cuda", compiled=False),
    Repository(
        "kernels-community/vllm-flash-attn3", 1, "cuda", stable_abi="2.9", cuda=">=12.6,<=13.0", archs="8.0 9.0a"
    ),
    Repository("kernels-community/vllm-moe", 0, "cuda", cuda="<=12.9", archs="8.0 8.6 8.7 8.9 9.0 10.0 10.1 12.0"),
    Repository("kernels-community/yoso", 1, "cuda", archs="8.0 8.9 9.0 10.0 12.0"),
)
BY_KERNEL = {repository.kernel: repository for repository in REPOSITORIES}


class Published:
    """A source that has the repositories, and hands out no files."""

    kind = "hub"
    is_local = False

    def listing(self, request: Request) -> Listing | None:
        for found in REPOSITORIES:
            if (found.repo, found.branch or f"v{found.version}") == (request.repo, request.git_revision):
                return Listing(found.repo, request.git_revision, tuple(_read(found)))
        return None

    def versions(self, request: Request) -> tuple[int, ...]:
        return ()

    def metadata(self, listing: Listing, name: str) -> Metadata:
        (found,) = (repository for repository in REPOSITORIES if repository.repo == listing.repo)
        return _read(found)[name]

    def fetch(self, listing: Listing, name: str) -> Fetched:
        raise NotImplementedError

    def hold(self, fetched: Fetched) -> None:
        raise NotImplementedError


@cache
def _read(repository: Repository) -> dict[str, Metadata]:
    return {name: Metadata.parse(json.dumps(document)) for name, document in repository.builds().items()}
