"""From a laptop to a sealed machine, as commands: prefetch, export, lock; then import and load without a network.

    python bench/rehearsal.py [--source KERNEL=DIRECTORY ...] [--host FILE|preset:...] [--keep DIRECTORY]

A loopback Hub has the repositories of kernels for the GPU that `--source` gives, or else a small stand-in for
finegrained_fp8; and relu, compiled here for this CPU. The first machine has a HOME of its own, and a
torch whose import fails. The second has another HOME, and runs in a network namespace without routes (`unshare -rn`),
while the Hub is still up: what it loads, it loads from the bundle. `--keep` leaves the bundles there.

Prints each command with what it said. Exits 1 when one did not end as it should.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from report import ROOT

sys.path.insert(0, str(ROOT))

from kernel_loader.catalog import Catalog
from kernel_loader.digest import seal
from kernel_loader.host import Host
from kernel_loader.settings import Settings
from kernel_loader.testing import Hub
from tests.builds import NO_ACCELERATOR, compile_library, write_build

PRESET: Final = "preset:h200-cu130-torch2.11"

STAND_IN: Final = "".join(
    f"def {name}(*_, **__):\n    raise NotImplementedError\n"
    for name in ("matmul_2d", "matmul_batched", "matmul_grouped", "fp8_act_quant", "mxfp4_act_quant")
)
OP: Final = """
#include <torch/library.h>
#include <ATen/ATen.h>
void relu(at::Tensor& out, const at::Tensor& x) { at::clamp_min_out(out, x, 0); }
TORCH_LIBRARY(_relu_rehearsal, m) { m.def("relu(Tensor! out, Tensor x) -> ()", &relu); }
"""
RELU_PY: Final = """
from pathlib import Path
import torch
from . import layers

torch.ops.load_library(str(next(Path(__file__).parent.glob("*.so"))))

def relu(x, out=None):
    out = torch.empty_like(x) if out is None else out
    torch.ops._relu_rehearsal.relu(out, x)
    return out
"""
LAYERS: Final = """
import torch
from torch import nn

class ReLU(nn.Module):
    has_backward = False
    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops._relu_rehearsal.relu(out, x)
        return out
"""
USE: Final = """
import kernel_loader, torch
bundle = kernel_loader.load_kernel("relu")
print(kernel_loader.origin(bundle).variant, bundle.relu(torch.tensor([-1.0, 0.0, 2.0])).tolist())
"""


def relu(directory: Path, more: str = "") -> Path:
    """A repository with a build of relu for this CPU and torch."""
    host = Host.detect({name.rpartition("_")[2]: value for name, value in NO_ACCELERATOR.items()})
    assert host.torch is not None, "torch is here"
    major, minor = host.torch.split(".")[:2]
    variant = f"torch{major}{minor}-cxx11-cpu-{host.cpu}-{host.os}"
    files = {"__init__.py": RELU_PY + more, "layers.py": LAYERS}
    build = write_build(directory, variant, files, version=1, backend={"type": "cpu"})
    compile_library(OP, build / "_relu_rehearsal.abi3.so")
    seal(build)
    return directory


def stand_in(directory: Path) -> Path:
    """A repository that looks like finegrained-fp8, and computes nothing."""
    seal(write_build(directory, "torch-cuda", {"__init__.py": STAND_IN}, version=4, backend={"type": "cuda"}))
    return directory


def publish(hub: Hub, kernel: str, *directories: Path) -> None:
    """Put the repository of a kernel on the Hub, with the builds of some directories."""
    manifest = Catalog(Settings()).get(kernel)
    assert manifest.repo is not None, "only kernels that are published"
    content = {
        f"build/{file.relative_to(directory / 'build').as_posix()}": file.read_bytes()
        for directory in directories
        for file in sorted((directory / "build").rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }
    hub.kernel(manifest.repo).commit(content, branch=f"v{manifest.version}")


class Machine:
    """A HOME, an environment, and what it runs."""

    def __init__(self, name: str, home: Path, environ: Mapping[str, str], prefix: tuple[str, ...] = ()) -> None:
        self.name, self.home, self._prefix = name, home, prefix
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("KERNEL_LOADER_", "HF_", "XDG_"))
        }
        self._environ = kept | {"HOME": str(home), "HF_HOME": str(home / "hf"), "PYTHONPATH": str(ROOT)} | dict(environ)
        home.mkdir(parents=True)

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run a command of the shell's spelling; print it, and what it says."""
        words = shlex.split(command)
        real = [sys.executable, "-m", "kernel_loader", *words[1:]] if words[0] == "kernel-loader" else words
        real = [sys.executable, *real[1:]] if real[0] == "python" else real
        done = subprocess.run(
            [*self._prefix, *real], cwd=self.home, env=self._environ, capture_output=True, text=True, check=False
        )
        said = "".join(f"    {line}\n" for line in (done.stdout + done.stderr).splitlines())
        print(f"{self.name}$ {command}\n{said.replace(str(self.home), '~')}", flush=True)
        if (done.returncode != 0) != fails:
            raise SystemExit(f"{command}: exit status {done.returncode}")
        return done.stdout


def main() -> None:
    """Go from one machine to the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", action="append", default=[], metavar="KERNEL=DIRECTORY")
    parser.add_argument("--host", default=PRESET, help="the machine with the GPU (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="where the bundles are left")
    arguments = parser.parse_args()
    sources = {kernel: Path(path) for kernel, _, path in (source.partition("=") for source in arguments.source)}
    with tempfile.TemporaryDirectory() as directory, Hub() as hub:
        root = Path(directory)
        sources = sources or {"finegrained_fp8": stand_in(root / "finegrained-fp8")}
        for kernel, source in ({"relu": relu(root / "relu")} | sources).items():
            publish(hub, kernel, *([root / "relu", source] if kernel == "relu" and kernel in sources else [source]))
        hidden = root / "no-torch" / "torch"
        hidden.mkdir(parents=True)
        (hidden / "__init__.py").write_text("raise ImportError('this machine has no torch')\n")
        online = dict(hub.environ) | {"HF_HUB_OFFLINE": "0", "PYTHONPATH": f"{hidden.parent}:{ROOT}"}
        laptop = Machine("laptop", root / "laptop", online)
        moved = relu(root / "moved", "# moved\n")
        prepare(laptop, arguments.host, " ".join(sources), lambda: publish(hub, "relu", moved))
        sealed_environ = dict(hub.environ) | NO_ACCELERATOR | {"HF_HUB_OFFLINE": "0"}
        sealed = Machine("cluster", root / "cluster", sealed_environ, ("unshare", "-rn"))
        arrive(laptop.home, sealed)
        if arguments.keep:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            for file in (*laptop.home.glob("*.klb"), *laptop.home.glob("*.whl")):
                (arguments.keep / file.name).write_bytes(file.read_bytes())


def prepare(laptop: Machine, host: str, kernels: str, move: Callable[[], object]) -> None:
    """What is done where there is a network, and neither a GPU nor torch."""
    laptop.run("python -c 'import torch'", fails=True)
    cpu = Host.detect({name.rpartition("_")[2]: value for name, value in NO_ACCELERATOR.items()})
    (laptop.home / "cpu.json").write_text(cpu.to_json())
    if not host.startswith("preset:"):
        (laptop.home / "gpu.json").write_text(Path(host).read_text())
        host = "gpu.json"
    laptop.run(f"kernel-loader prefetch {kernels} --host {host} --dry-run")
    laptop.run(f"kernel-loader prefetch {kernels} --host {host}")
    laptop.run(f"kernel-loader lock {' '.join(dict.fromkeys([*kernels.split(), 'relu']))}")
    laptop.run(f"kernel-loader export -o gpu.klb {kernels} --host {host}")
    laptop.run("kernel-loader export -o cpu.klb relu --host cpu.json --lock kernel-loader.lock")
    laptop.run("kernel-loader export --wheel -o cluster_kernels-1.0-py3-none-any.whl relu --host cpu.json")
    laptop.run("kernel-loader verify gpu.klb cpu.klb kernel-loader.lock")
    move()
    laptop.run("kernel-loader lock --check")
    laptop.run("kernel-loader lock --check --upgrade", fails=True)
    laptop.run(f"kernel-loader prefetch {kernels} --host {host} --lock kernel-loader.lock --dry-run")


def arrive(carried: Path, sealed: Machine) -> None:
    """What is done where there is no network."""
    for name in ("cpu.klb", "gpu.klb", "kernel-loader.lock"):
        (sealed.home / name).write_bytes((carried / name).read_bytes())
    sealed.run("kernel-loader load relu --fallback error", fails=True)
    sealed.run("kernel-loader import cpu.klb gpu.klb --lock kernel-loader.lock")
    sealed.run("kernel-loader import cpu.klb gpu.klb")
    sealed.run("kernel-loader load relu")
    sealed.run(f"python -c {shlex.quote(USE)}")
    sealed.run("kernel-loader verify")
    sealed.run("kernel-loader doctor")


if __name__ == "__main__":
    main()
