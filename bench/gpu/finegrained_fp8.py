"""The published FP8 kernel against the embedded reference, on an NVIDIA GPU: agreement and speed.

The published build is found through KERNEL_LOADER_LOCAL, so that no Hub is needed:

    KERNEL_LOADER_LOCAL=kernels-community/finegrained-fp8=DIRECTORY python bench/gpu/finegrained_fp8.py [RESULT.md]

Errors are ||kernel - reference|| / ||reference|| over the rows that are no sentinels. Times are medians of CUDA events
after a first call, whose compilation and tuning is shown apart.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from device import machine, median_ms
from torch import Tensor

import kernel_loader
from kernel_loader.bundles.fp8 import FineGrainedFP8
from kernel_loader.quantization import quantize_block_fp8

BLOCK = [128, 128]
DTYPE = torch.bfloat16
Case = tuple[str, Callable[[FineGrainedFP8], Tensor], Tensor]


def main() -> None:
    """Load both, compare case by case, print a table and write it where the command line says."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    kernel = kernel_loader.load_kernel("finegrained_fp8")
    load_seconds = time.perf_counter() - begin
    reference = kernel_loader.KernelLoader().load_reference("finegrained_fp8")
    origin = kernel_loader.origin(kernel)
    assert not origin.reference, origin
    assert kernel_loader.origin(reference).reference

    lines = [
        "# finegrained_fp8: the published Triton build against the embedded reference",
        "",
        machine(),
        f"Loaded {origin.variant} ({origin.digest[:12]}) from a local directory in {load_seconds * 1e3:.0f} ms.",
        "",
        "| case | real rows | error | sentinels in the reference | first call | kernel | reference | speed-up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        lines.append(compare(kernel, reference, *case))
        print(lines[-1], flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


def compare(
    kernel: FineGrainedFP8, reference: FineGrainedFP8, name: str, call: Callable[..., Tensor], real: Tensor
) -> str:
    """One row of the table."""
    begin = time.perf_counter()
    got = call(kernel)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    wanted = call(reference)
    error = ((got[real].float() - wanted[real].float()).norm() / wanted[real].float().norm()).item()
    sentinels = wanted[~real]
    zeros = "none" if not len(sentinels) else "zeros" if not sentinels.any() else "NOT ZERO"
    fast, slow = (median_ms(lambda bundle=bundle: call(bundle)) for bundle in (kernel, reference))
    return (
        f"| {name} | {int(real.sum())} of {len(real)} | {error:.2e} | {zeros} | {first:.1f} s "
        f"| {fast:.3f} ms | {slow:.3f} ms | {slow / fast:.0f}x |"
    )


def cases() -> list[Case]:
    """Dense, batched and grouped matmuls of the sizes of real layers."""
    found: list[Case] = []
    for rows, n, k in ((1, 4096, 4096), (128, 4096, 7168), (4096, 4096, 4096)):
        a, (w, s) = torch.randn(rows, k, device="cuda", dtype=DTYPE), weights(n, k)
        everywhere = torch.ones(rows, dtype=torch.bool, device="cuda")
        found.append(
            (f"dense {rows}x{k} @ {k}x{n}", lambda b, a=a, w=w, s=s: b.fp8_matmul(a, w, s, BLOCK, DTYPE), everywhere)
        )
    a, (w, s) = torch.randn(512, 4096, device="cuda", dtype=DTYPE), weights(4096, 4096)
    scale = a.abs().max().float() / 448
    found.append(
        (
            "dense 512x4096 @ 4096x4096, static scale",
            lambda b: b.fp8_matmul(a, w, s, BLOCK, DTYPE, activation_scale=scale),
            torch.ones(512, dtype=torch.bool, device="cuda"),
        )
    )
    experts, n, k = 16, 2048, 4096
    pairs = [weights(n, k) for _ in range(experts)]
    stack, scales = torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
    for rows in (32, 4096):
        x = torch.randn(rows, k, device="cuda", dtype=DTYPE)
        ids = torch.randint(0, 2 * experts, (rows,), device="cuda", dtype=torch.int32)  # half of them are sentinels
        if rows <= 256:
            found.append(
                (
                    f"batched {rows}x{k} @ {experts}x{k}x{n}",
                    lambda b, x=x, ids=ids: b.batched_fp8_matmul(x, stack, scales, ids, BLOCK, DTYPE),
                    ids < experts,
                )
            )
        ordered = ids.sort().values
        counts = ordered.bincount(minlength=2 * experts)[:experts].int()
        found.append(
            (
                f"grouped {rows}x{k} @ {experts}x{k}x{n}",
                lambda b, x=x, counts=counts: b.grouped_fp8_matmul(
                    x, stack, scales, counts.cumsum(0).int(), counts, BLOCK, DTYPE
                ),
                ordered < experts,
            )
        )
    return found


def weights(n: int, k: int) -> tuple[Tensor, Tensor]:
    """(N, K) e4m3 codes and fp32 scales of blocks of 128 x 128, from normal weights."""
    return quantize_block_fp8(torch.randn(n, k, device="cuda") / k**0.5, BLOCK)


if __name__ == "__main__":
    main()
