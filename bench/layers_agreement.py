"""The same script on layers with either package: mappings, modes, conditions, fallbacks, copies; tiny models.

    python bench/layers_agreement.py --peer PATH-OF-THE-PEER'S-PYTHON

Both run in the peer's environment, so that torch and transformers are the same. Cases that end otherwise are shown
with the reason; one without a reason misses the target.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import ROOT, Report, Row, arguments, table

sys.path.insert(0, str(ROOT))

from tests.builds import write_build

# The peer reads no build without these.
METADATA = {"license": "Apache-2.0", "backend": {"type": "cpu"}}

LAYER = """
class {name}(nn.Module):
    can_torch_compile = {compiles}
    has_backward = {backward}
    {more}
    def forward(self, {parameters}):
        return x * {factor}
"""
USUAL = {"compiles": True, "backward": True, "more": "", "parameters": "x", "factor": 2}
LAYERS: dict[str, dict[str, object]] = {
    "Double": {},
    "Triple": {"factor": 3},
    "TimesWeight": {"factor": "self.weight"},
    "NoBackward": {"backward": False},
    "NoCompile": {"compiles": False},
    "Member": {"more": "helper = 1"},
    "TwoParameters": {"parameters": "x, y"},
    "Keyword": {"parameters": "*, x"},
    "Constructor": {"more": "def __init__(self): super().__init__()"},
}

FAILURE = "a fallback covers every failure of loading, and `use_fallback=True` means all of them"
REASONS = {
    "no directory, default fallback": FAILURE,
    "kernel raises at import, KernelizeFallback.ALL": FAILURE,
    "layer that is not there, KernelizeFallback.ALL": FAILURE,
    "layer with a constructor": "a layer that does not fit is a failure of loading: reported, and covered",
    "layer with a member": "the same",
    "layer with two parameters for one": "the same",
    "parameter by keyword alone": "the same",
    "no directory, KernelizeFallback.DEFAULT": "errors of sources are OSErrors, whatever is missing",
    "properties the wrong way round": "misuse is always a ValueError",
    "no backward, registered for T": "the mapping is wrong: reported, and covered by the fallback for modes",
    "parameter of another name, called by it": "parameters are called as in the original: calls by keyword work",
    "subclass with a forward of its own": "a name counts for the forward that it was given to",
    "two users name one class": "names add up; the newest for which there is a kernel counts",
    "forward wrapped on the module before": "the wrapper is left where it is, and the report says so",
    "pickled, and read in another process": "the kernel is loaded again, or a warning says why not",
}


def run(python: str, package: str, kernels: Path) -> dict[str, Any]:
    """The outcome of each case."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "KERNEL_LOADER_CACHE": str(kernels / "store")}
    script = str(ROOT / "bench" / "layers_cases.py")
    done = subprocess.run(
        [python, script, package, str(kernels)], env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=600
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(kernels: Path) -> None:
    """Write the kernels of the cases."""
    layers = "from torch import nn\n" + "".join(LAYER.format(name=n, **USUAL | own) for n, own in LAYERS.items())
    files = {"__init__.py": "from . import layers", "layers.py": layers}
    write_build(kernels / "kernel", "torch-cpu", files, **METADATA, id="_kernel_0")
    write_build(kernels / "broken", "torch-cpu", {"__init__.py": "raise RuntimeError"}, **METADATA, id="_broken_0")
    norm = write_build(kernels / "rmsnorm", "torch-cpu", **METADATA, id="_rmsnorm_0")
    for file in (ROOT / "registry/rmsnorm/build/torch-universal").glob("*.py"):
        shutil.copy(file, norm)


def main() -> int:
    """Run both, print, and tell whether all differences have a reason."""
    parser = arguments(__doc__)
    parser.add_argument("--peer", required=True, help="interpreter that has the peer and transformers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prepare(Path(directory))
        theirs, mine = (run(options.peer, package, Path(directory)) for package in ("kernels", "kernel_loader"))
    models = mine.pop("models"), theirs.pop("models")
    different = {name for name in mine if mine[name] != theirs[name]}
    without = sorted(different - REASONS.keys())
    rows = [
        Row("cases that end alike", f"{len(mine) - len(different)} of {len(mine)}"),
        Row("that end otherwise without a reason", ", ".join(without) or "none", "none", met=not without),
    ]
    for name, model in models[0].items():
        same = model == models[1][name] and model["close"] and model["norms"] == model["by kernel"]
        rows.append(Row(f"tiny {name} of transformers, outputs", f"{model['logits']:.6f}", "as the peer's", met=same))
    details = [(name, theirs[name], mine[name], REASONS.get(name, "") if name in different else "") for name in mine]
    shown = table(("case", "peer", "ours", "why otherwise"), details)
    return Report("Layers, case by case", tuple(rows), shown).emit(as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
