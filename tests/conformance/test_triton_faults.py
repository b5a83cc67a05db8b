"""The same in Triton, on a GPU: a right kernel passes in every mode, and each way of being wrong is found."""

import pytest
import torch

from kernel_loader.conformance.runner import check

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.needs_cuda

RIGHT = """
import torch, triton
import triton.language as tl

WORK = {}

@triton.jit
def _forward(x, ids, w, out, T, E, N: tl.constexpr, K: tl.constexpr, sxt, sxk, NP: tl.constexpr, KP: tl.constexpr):
    t = tl.program_id(0)
    n, k = tl.arange(0, NP), tl.arange(0, KP)
    e = tl.load(ids + t)
    stored = n < N
    acc = tl.zeros((NP,), tl.float32)
    if e < E:
        row = tl.load(x + t * sxt + k * sxk, k < K, 0.0).to(tl.float32)
        weight = tl.load(w + e * N * K + n[:, None] * K + k[None, :], (n[:, None] < N) & (k[None, :] < K), 0.0)
        acc = tl.sum(weight * row[None, :], 1) * 0.25
    tl.store(out + t * N + n, acc, stored)

def routed(x, ids, w):
    T, (E, N, K) = len(x), w.shape
    out = torch.empty(T, N, device=x.device)
    if T:
        with torch.cuda.device(x.device):
            _forward[(T,)](x, ids, w, out, T, E, N, K, x.stride(0), x.stride(1), 16, 16)
    return out
"""

FAULTS = {
    "uninitialised rows": ("stored = n < N\n", "stored = (n < N) & (e < E)\n", "memory", "nan came, 0.0 is right"),
    "off-by-one store": (
        "stored = n < N\n",
        "stored = n < N + (t == T - 1).to(tl.int32)\n",
        "memory",
        "4 bytes written past its end",
    ),
    "clamped sentinels": (
        "e = tl.load(ids + t)\n",
        "e = tl.minimum(tl.load(ids + t), E - 1)\n",
        "value",
        "nan came, 0.0 is right",
    ),
    "wrong scale": ("* 0.25\n", "* 0.2501\n", "value", "times what is tolerated"),
    "stale workspace": (
        "    out = torch.empty(T, N, device=x.device)\n    if T:\n",
        "    out = WORK.setdefault(T, torch.empty(T, N, device=x.device))\n    if T:\n",
        "again",
        "the output of an earlier call was overwritten by a later one",
    ),
    "stale accumulator": (
        "    tl.store(out + t * N + n, acc, stored)\n\ndef routed(x, ids, w):\n",
        """    tl.atomic_add(out + t * N + n, acc, stored)

def routed(x, ids, w):
    work = WORK.setdefault(len(x), torch.zeros(len(x), w.shape[1], device=x.device))
    return _add(x, ids, w, work).clone()

def _add(x, ids, w, out):
""",
        "again",
        "times what is tolerated",
    ),
    "default stream": (
        "        with torch.cuda.device(x.device):\n",
        "        with torch.cuda.device(x.device), torch.cuda.stream(torch.cuda.default_stream()):\n",
        "stream",
        "elements",
    ),
    "counts on the host": ("    if T:\n", "    if T and int(ids.max()) >= 0:\n", "graph", "raised"),
    "illegal access": (
        "    if e < E:\n",
        "    if e < E + 1:\n        e = e + (e == E).to(tl.int32) * (1 << 30)\n",
        "value",
        "CUDA error",
    ),
}


def source(fault: str) -> str:
    right, wrong, *_ = FAULTS[fault]
    assert RIGHT.count(right) == 1
    made = RIGHT.replace(right, wrong)
    return made.replace("    out = torch.empty(T, N, device=x.device)\n", "") if fault == "stale accumulator" else made


@pytest.fixture
def on_gpu(kernel, monkeypatch):
    def register(text):
        name = kernel(text, backends=None)
        for variable in ("CUDA", "ROCM", "XPU", "CANN", "METAL", "NEURON", "TPU"):
            monkeypatch.delenv(f"KERNEL_LOADER_OVERRIDE_{variable}", raising=False)
        return name

    return register


def test_a_right_kernel_passes(on_gpu):
    checked = check(on_gpu(RIGHT), device="cuda", modes=("eager", "graph"))
    assert checked.failed == ()
    assert {(f.mode, f.probe) for f in checked.findings if f.status == "passed"} >= {
        ("eager", "value"),
        ("eager", "memory"),
        ("eager", "again"),
        ("eager", "stream"),
        ("graph", "value"),
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_by_its_probe_and_said(on_gpu, fault):
    *_, probe, said = FAULTS[fault]
    modes = ("graph",) if probe == "graph" else ("eager",)
    checked = check(on_gpu(source(fault)), device="cuda", modes=modes)
    where = "value" if probe == "graph" else probe
    assert any(f.probe == where and said in f.detail for f in checked.failed), checked.failed
    # What follows an illegal access goes on in another process.
    assert any(f.status == "passed" for f in checked.findings) or probe == "graph"
