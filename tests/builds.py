"""Makes kernel repositories on disk, for tests."""

import json
import subprocess
import sysconfig
from pathlib import Path

from kernel_loader.host import Host, HostDevice
from kernel_loader.manifest import Manifest

CPU_HOST = Host(
    os="linux", cpu="x86_64", glibc="2.36", python="3.11.7", torch="2.13.0+cpu", cxx11_abi=True, driver=None
)
# Overrides that make any machine one without an accelerator.
NO_ACCELERATOR = {
    f"KERNEL_LOADER_OVERRIDE_{fact}": "" for fact in ("CUDA", "ROCM", "XPU", "CANN", "METAL", "NEURON", "TPU")
}
H200 = Host(
    os="linux",
    cpu="x86_64",
    glibc="2.39",
    python="3.12.3",
    torch="2.11.0+cu130",
    cxx11_abi=True,
    cuda="13.0",
    driver="580.159.04",
    cuda_toolkit="13.0",
    devices=(HostDevice(arch="9.0", name="NVIDIA H200"),),
)


def write_build(repository: Path, variant: str, files: dict[str, str] | None = None, **metadata: object) -> Path:
    """Write `build/<variant>/` into a repository. Keywords go into metadata.json, underscores as dashes."""
    build = repository / "build" / variant
    for name, content in ({"__init__.py": "def double(x):\n    return 2 * x\n"} | (files or {})).items():
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text(content)
    document = {"name": repository.name, "version": 1, "python-depends": []}
    document |= {key.replace("_", "-"): value for key, value in metadata.items()}
    (build / "metadata.json").write_text(json.dumps(document))
    return build


def write_manifest(directory: Path, name: str, **keys: object) -> Path:
    """Write a manifest with TOML that JSON can express."""
    directory.mkdir(parents=True, exist_ok=True)
    table = {"name": name, "repo": f"org/{name.replace('_', '-')}", "version": 1} | keys
    lines = [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    file = directory / f"{name}.toml"
    file.write_text("\n".join(lines))
    Manifest.parse(file.read_text(), str(file))
    return file


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {_toml(item)}' for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def counts_runs(file: Path) -> str:
    """Source that leaves one byte in a file each time it is executed."""
    return f"with open({str(file)!r}, 'a') as stream: stream.write('x')"


def compile_library(source: str, library: Path) -> Path:
    """Compile C++ against torch into a shared library.

    torch.utils.cpp_extension knows the flags too, and imports setuptools, which puts packages of its own on sys.path.
    """
    import torch

    home = Path(torch.__file__).parent
    file = library.with_suffix(".cpp")
    file.write_text(source)
    includes = [home / "include", home / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = ["c++", "-std=c++20", "-O0", "-shared", "-fPIC", abi, *(f"-I{path}" for path in includes)]
    command += [f"-L{home / 'lib'}", str(file), "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(library)]
    subprocess.run(command, check=True, timeout=300)
    return library
