"""load_kernel inside torch.compile: no graph break, no recompilation and no warning, cold or warm."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys, warnings
import torch
import kernel_loader
from torch._dynamo.utils import counters

backend, warm, attribute = sys.argv[1], sys.argv[2] == "warm", sys.argv[3] == "attribute"
if warm:
    kernel_loader.load_kernel("finegrained_fp8")
if not attribute:
    from kernel_loader import load_kernel

def layer(a, w, s):
    fp8 = kernel_loader.load_kernel("finegrained_fp8") if attribute else load_kernel("finegrained-fp8", fallback=None)
    return 2 * fp8.fp8_matmul(a, w, s, [128, 128], torch.bfloat16)

a = torch.randn(3, 256, dtype=torch.bfloat16, requires_grad=True)
w = torch.randn(256, 256).to(torch.float8_e4m3fn)
s = torch.rand(2, 2)
compiled = torch.compile(layer, fullgraph=True, backend=backend)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first = compiled(a, w, s)
graphs = counters["stats"]["unique_graphs"]
kernel_loader.load_kernel("finegrained_fp8", fallback="reference")
second = compiled(a, w, s)
second.sum().backward()
assert torch.equal(first, second)
assert torch.equal(first, layer(a, w, s))
assert a.grad is not None
assert counters["stats"]["unique_graphs"] == graphs == 1, counters
assert not counters["graph_break"], counters
ours = [str(w.message) for w in caught if "dynamo" in w.filename or "cache" in str(w.message)]
assert not ours, ours
print("done")
"""


INDUCTOR = pytest.param("inductor", "cold", "attribute", marks=pytest.mark.needs_compiler)


@pytest.mark.parametrize(
    ("backend", "state", "access"),
    [("eager", "cold", "name"), ("eager", "warm", "attribute"), ("aot_eager", "cold", "attribute"), INDUCTOR],
)
def test_a_kernel_is_loaded_and_called_inside_one_graph(backend, state, access, tmp_path, cpu_machine):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, backend, state, access],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
    )
    assert done.stdout == "done\n", done.stderr
