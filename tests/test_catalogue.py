"""The catalogue: every community repository has a name, and each kind of machine takes the build that it should."""

import dataclasses
import functools
import runpy
from pathlib import Path

import pytest

from kernel_loader.binder import bundle_class
from kernel_loader.catalog import Catalog
from kernel_loader.loader import KernelLoader
from kernel_loader.resolver import Resolution, Verdict
from kernel_loader.settings import Settings
from tests.hosts import HOSTS
from tests.repositories import BY_KERNEL, REPOSITORIES, Published

ROOT = Path(__file__).parent.parent

# What each machine takes of each repository:
#
#     py       the build without compiled code for its backend
#     cu130    the build for that backend, its torch, its CPU and its system
#     cu130*   the one against torch's stable ABI
#
# or why nothing:
#
#     -        the kernel is not for what the machine computes on
#     arch     compiled for other GPUs
#     cap      made for other GPUs, as its manifest says
#     os       compiled for no such system
#     pip      a Python package is missing
#     version  compiled for newer or older versions of CUDA alone
GRID = """
kernel                         cpu cpu-arm T4      A100    H200    B200    GB10    MI250   MI300   PVC      Mac   Win
activation                     -   -       cu126*  cu126*  cu130*  cu132*  cu130*  rocm71* rocm72* -        metal os
aiter_flash_attn               -   -       -       -       -       -       -       py      py      -        -     -
aiter_flash_attn_ck            -   -       -       -       -       -       -       arch    rocm72  -        -     -
aiter_kernels                  -   -       -       -       -       -       -       py      py      -        -     -
aiter_rope                     -   -       -       -       -       -       -       py      py      -        -     -
bitsandbytes_mps               -   -       -       -       -       -       -       -       -       -        metal -
causal_conv1d                  -   -       cu126   cu126   cu130   cu132   cu130   -       -       -        -     os
cv_utils                       -   -       cu126   cu126   cu130   cu132   cu130   -       -       -        -     os
deep_gemm                      -   -       version version cu130   arch    cap     -       -       -        -     os
deformable_detr                -   -       cu126   cu126   cu130   cu132   cu130   -       -       -        -     os
einops                         py  py      py      py      py      py      py      py      py      py       py    py
esmfold2_trimul                -   -       py      py      py      py      py      -       -       -        -     py
finegrained_fp8                -   -       cap     cap     py      py      py      py      py      py       -     py
fla                            -   -       pip     py      py      py      pip     -       -       -        -     pip
flash_attn_ops                 -   -       py      py      py      py      py      py      py      py       -     py
flash_attn2                    -   -       arch    cu126*  cu130*  cu132*  cu130*  -       -       xpu20260 -     os
flash_attn3                    -   -       arch    cu126*  cu130*  arch    arch    -       -       -        -     os
flash_attn4                    -   -       cap     pip     py      py      pip     -       -       -        -     pip
flash_mla                      -   -       version version cu130   cu132   arch    -       -       -        -     os
fp8_fbgemm                     -   -       cap     cap     py      py      py      py      py      py       -     py
gpt_oss_metal_kernels          -   -       -       -       -       -       -       -       -       -        metal -
gpt_oss_triton_kernels         -   -       py      py      py      py      py      py      py      py       -     py
layer_norm                     -   -       cap     cu126   cu130   cu132   cu130   -       -       -        -     os
liger_kernels                  -   -       py      py      py      py      py      py      py      py       -     py
mamba_ssm                      -   -       pip     pip     cu130   cu132   pip     -       -       -        -     os
megablocks                     cpu cpu     cu126   cu126   cu130   cu132   cu130   arch    rocm72  xpu20260 -     os
metal_flash_sdpa               -   -       -       -       -       -       -       -       -       -        metal -
mlx_quantization_metal_kernels -   -       -       -       -       -       -       -       -       -        metal -
mlx_rmsnorm                    -   -       -       -       -       -       -       -       -       -        metal -
mra                            -   -       cu126   cu126   cu130   cu132   cu130   -       -       -        -     os
msa                            -   -       version version arch    cu132   arch    -       -       -        -     os
natten                         -   -       arch    cu126   cu130   cu132   cu130   -       -       -        -     os
nvfp4_gemm                     -   -       version version cap     cu132*  arch    -       -       -        -     os
paged_attention                -   -       cu126   cu126   cu130   cu132   cu130   rocm71  rocm72  -        metal os
punica_sgmv                    -   -       arch    cu126   cu130   cu132   cu130   -       -       -        -     os
quantization_bitsandbytes      cpu cpu     -       -       -       -       -       -       -       -        -     -
quantization_eetq              -   -       cu126   cu126   version version version -       -       -        -     os
quantization_gptq              cpu cpu     -       -       -       -       -       -       -       -        -     -
relu                           cpu cpu     cu126   cu126   cu130   cu132   cu130   rocm71  rocm72  xpu20260 metal os
rmsnorm                        cpu cpu     -       -       -       -       -       -       -       xpu20260 -     -
rotary                         cpu cpu     cu126   cu126   cu130   cu132   cu130   -       -       xpu20260 -     os
rwkv                           -   -       arch    cu126   cu130   cu132   cu130   -       -       -        -     os
sage_attention                 -   -       version version cu130   cu132   arch    -       -       -        -     os
scattermoe                     -   -       py      py      py      py      py      py      py      py       -     py
sgl_flash_attn3                -   -       version version cu130   arch    arch    -       -       -        -     os
sonic_moe                      -   -       cap     cap     py      py      pip     -       -       -        -     cap
tinygrad_rms                   -   -       cu126   cu126   cu130   cu132   cu130   -       -       -        -     os
trimul_gpumode                 -   -       py      py      py      py      py      py      py      py       -     py
triton_kernels                 -   -       py      py      py      py      py      -       -       -        -     py
vllm_flash_attn3               -   -       arch    cu126*  cu130*  arch    arch    -       -       -        -     os
vllm_moe                       -   -       arch    cu126   version version version -       -       -        -     os
yoso                           -   -       arch    cu126   cu130   cu132   cu130   -       -       -        -     os
"""
WHY = {
    "arch": "arch",
    "cuda-capability": "cap",
    "os": "os",
    "python-depends": "pip",
    "requires-python": "pip",
    "backend-version": "version",
}

HEADERS, *ROWS = [line.split() for line in GRID.strip().splitlines()]


@functools.cache
def loader(host: str) -> KernelLoader:
    return KernelLoader(Settings(), HOSTS[host], (Published(),))


@functools.cache
def resolved(kernel: str, host: str) -> Resolution:
    return loader(host).resolve(kernel)


def shown(resolution: Resolution) -> str:
    """The cell of the table: what is taken of the repository itself, whatever else the kernel has."""
    if resolution.chosen is not None:
        return built_for(resolution.chosen)
    if resolution.nearest is None:
        return "-"
    # Of a build whose name fits, metadata.json was read: what that says is why there is none, whatever else is near.
    fits = (verdict for verdict in resolution.verdicts if verdict.metadata is not None)
    return WHY[next(fits, resolution.nearest).reasons[0].code]


def built_for(build: Verdict) -> str:
    if build.variant.is_noarch:
        return "py"
    return build.name.split("-")[-3] + "*" * (build.variant.framework == "torch-stable-abi")


def test_every_repository_has_a_row_and_every_host_a_column():
    assert ["kernel", *HOSTS] == HEADERS
    assert [row[0] for row in ROWS] == [repository.kernel for repository in REPOSITORIES]
    assert len(ROWS) == 52


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_host_takes_what_the_table_says(row):
    kernel, *expected = row
    found = {host: resolved(kernel, host) for host in HOSTS}
    assert {host: shown(resolution) for host, resolution in found.items()} == dict(zip(HOSTS, expected, strict=True))
    for host, resolution in found.items():
        if resolution.chosen is not None and not resolution.chosen.variant.is_noarch:
            made_for, machine = resolution.chosen.variant, HOSTS[host]
            stable = BY_KERNEL[kernel].stable_abi if made_for.framework == "torch-stable-abi" else None
            release = stable or ".".join(machine.torch.split(".")[:2])
            assert made_for.framework_version == tuple(map(int, release.split(".")))
            assert (made_for.cpu, made_for.os) == (machine.cpu, machine.os)


def test_nothing_is_taken_in_doubt():
    for host in HOSTS:
        for repository in REPOSITORIES:
            chosen = resolved(repository.kernel, host).chosen
            assert chosen is None or chosen.status == "accepted", f"{repository.kernel} on {host}: {chosen.reasons}"


@pytest.mark.parametrize("repository", REPOSITORIES, ids=lambda repository: repository.kernel)
def test_every_repository_is_found_by_its_name(repository):
    catalog = Catalog(Settings())
    kernel = catalog.get(repository.kernel)
    assert catalog.get(repository.kernel.replace("_", "-")) == kernel
    assert catalog.get(repository.repo.partition("/")[2]) == kernel
    assert kernel.repo == repository.repo
    assert (kernel.version, kernel.revision) == (None if repository.branch else repository.version, repository.branch)
    assert set(kernel.backends) <= set(repository.backends.split())
    assert kernel.summary
    assert not kernel.summary.endswith(".")
    assert bundle_class(kernel)


def test_the_page_of_kernels_is_what_manifests_and_bundles_say():
    page = runpy.run_path(str(ROOT / "docs" / "make_kernels.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["document"](), "run `python docs/make_kernels.py`"


def test_the_page_of_kernels_has_every_kernel_and_every_field_of_its_bundle():
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    catalog = Catalog(Settings())
    for repository in REPOSITORIES:
        kernel = catalog.get(repository.kernel)
        section = page.partition(f"\n## {kernel.name}\n")[2].partition("\n## ")[0]
        assert kernel.repo in section
        for field in dataclasses.fields(bundle_class(kernel)):
            assert f"`{field.name}`" in section or f"### {field.name}\n" in section
