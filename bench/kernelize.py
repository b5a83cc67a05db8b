"""What kernelizing a model of 10,000 layers costs, against the peer, and what calling a replaced layer costs.

    python bench/kernelize.py --peer PATH-OF-THE-PEER'S-PYTHON [--repeats 7]

The kernel is the same directory for both, loaded before the clock starts. A call is held against the same forward as a
method of a class that nobody has replaced.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from report import ROOT, Report, Row, arguments, as_installed, ask, table

sys.path.insert(0, str(ROOT))

from tests.builds import write_build

LAYERS = """
from torch import nn
class Scale(nn.Module):
    can_torch_compile = True
    def forward(self, x):
        return x
"""

SCRIPT = """
import gc, json, time, timeit
from pathlib import Path
import torch
from torch import nn
from {package} import LocalLayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

@use_kernel_forward_from_hub("Scale")
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x + 1

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
    def forward(self, x):
        return x

model = nn.Sequential(*(nn.Sequential(*(Scale() for _ in range(100))) for _ in range({modules} // 100)))
repository = LocalLayerRepository({where}, layer_name="Scale")
with use_kernel_mapping({{"Scale": {{"cpu": repository}}}}):
    kernelize(Scale(), mode=Mode.INFERENCE)
    gc.collect()  # the model's ten thousand modules are new to the collector
    begin = time.perf_counter()
    kernelize(model, mode=Mode.INFERENCE)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    kernelize(model, mode=Mode.INFERENCE)
    again = time.perf_counter() - begin
layer, plain = model[0][0], Plain()
assert layer(3) == 3
calls = [min(timeit.repeat(lambda: one(1), number=100_000, repeat=15)) / 100_000 for one in (layer, plain)]
print(json.dumps([first, again, *calls]))
"""

MODULES = 10_000

# Without these the peer refuses a build.
PEERS = {"license": "Apache-2.0", "backend": {"type": "cpu"}}


def measure(python: str, package: str, where: Path, repeats: int) -> list[float]:
    """Medians: kernelizing, kernelizing again, a call of a replaced layer, a call of one that nobody touched."""
    script = SCRIPT.format(package=package, modules=MODULES, where=f"Path({str(where)!r})")
    runs = [json.loads(ask(python, "-c", script).splitlines()[-1]) for _ in range(repeats)]
    return [statistics.median(values) for values in zip(*runs, strict=True)]


def main() -> int:
    """Measure, print, and tell whether the targets were met."""
    parser = arguments(__doc__)
    parser.add_argument("--peer", required=True, help="interpreter that has the peer")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    as_installed()
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory) / "kernel"
        write_build(
            where, "torch-cpu", {"__init__.py": "from . import layers\n", "layers.py": LAYERS}, id="_scale_0", **PEERS
        )
        mine = measure(sys.executable, "kernel_loader", where, options.repeats)
        theirs = measure(options.peer, "kernels", where, options.repeats)
    rows = (
        Row(f"kernelize {MODULES:,} loaded layers", f"{mine[0] * 1e3:.0f} ms", "< 200 ms", met=mine[0] < 0.2),
        Row("the same, against the peer", f"{mine[0] / theirs[0]:.2f}", "<= 0.5", met=mine[0] / theirs[0] <= 0.5),
        Row(
            "a replaced layer's call, against a plain one",
            f"{mine[2] / mine[3]:.2f}",
            "<= 1.1",
            met=mine[2] / mine[3] <= 1.1,
        ),
    )
    details = [
        (
            who,
            *(f"{seconds * 1e3:.1f} ms" for seconds in times[:2]),
            *(f"{seconds * 1e9:.0f} ns" for seconds in times[2:]),
        )
        for who, times in (("ours", mine), ("peer", theirs))
    ]
    head = ("who", "kernelize", "again", "call of a replaced layer", "call of a plain layer")
    return Report("Kernelizing", rows, table(head, details)).emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
