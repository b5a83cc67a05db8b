"""Import a bundle on a machine with a GPU and no Hub, and run what it carries.

    python bench/gpu/sealed.py kernels.klb RESULT.md relu rotary ...

The bundle is one that `bench/rehearsal.py --keep` leaves. It is imported into an empty store, twice, and verified;
each kernel is then loaded in a fresh process, without settings of any kind, and `check` holds it against its reference.
`finegrained_fp8`, whose searches take minutes in a check, multiplies two matrices instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from device import machine

LOAD: Final = """
import sys, kernel_loader
bundle = kernel_loader.load_kernel(sys.argv[1], fallback="error")
print(*kernel_loader.origin(bundle)[1:6])
"""
MULTIPLY: Final = """
import torch, kernel_loader
from kernel_loader.api import default_loader
from kernel_loader.quantization import quantize_block_fp8
fp8 = kernel_loader.load_kernel("finegrained_fp8", fallback="error")
reference = default_loader().load_reference("finegrained_fp8")
torch.manual_seed(0)
x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
w, scale = quantize_block_fp8(torch.randn(2048, 4096, device="cuda"), [128, 128])
y, expected = (bundle.fp8_matmul(x, w, scale, [128, 128], torch.bfloat16) for bundle in (fp8, reference))
error = (y.float() - expected.float()).abs().max() / expected.float().abs().max()
print(f"fp8_matmul (512, 4096) x (2048, 4096): largest difference {error:.1e} of the largest value")
assert error < 1e-2
"""


def main() -> None:
    """Import, load, run."""
    bundle, page, *kernels = sys.argv[1:]
    lines = ["# A bundle on a machine without a Hub", "", machine(), "", "```"]
    with tempfile.TemporaryDirectory() as home:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("KERNEL_LOADER_")}
        environ = kept | {"HOME": home, "XDG_CACHE_HOME": f"{home}/cache", "HF_HOME": f"{home}/hf"}
        command = (sys.executable, "-m", "kernel_loader")
        steps = [(*command, "import", bundle), (*command, "import", bundle), (*command, "verify")]
        for kernel in kernels:
            steps.append((sys.executable, "-c", LOAD, kernel))
            steps.append(
                (sys.executable, "-c", MULTIPLY)
                if kernel == "finegrained_fp8"
                else (*command, "check", kernel, "--device", "cuda", "--mode", "eager")
            )
        failed = False
        for step in steps:
            begin = time.perf_counter()
            done = subprocess.run(step, env=environ, capture_output=True, text=True, check=False)
            failed |= done.returncode != 0
            shown = " ".join(
                "kernel-loader" if word == "kernel_loader" else word for word in step[2:] if "\n" not in word
            )
            said = [line for line in (done.stdout + done.stderr).replace(home, "~").splitlines() if line.strip()][-12:]
            lines += [f"$ {shown}", *(f"    {line}" for line in said)]
            lines.append(f"    exit {done.returncode}, {time.perf_counter() - begin:.1f} s")
            Path(page).write_text("\n".join([*lines, "```", ""]), encoding="utf-8")
    print(Path(page).read_text(encoding="utf-8"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
