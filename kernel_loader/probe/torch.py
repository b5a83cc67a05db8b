"""torch and what it was built for: asked of the running torch, or read from its files without importing it."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kernel_loader.host import major_minor
from kernel_loader.probe.fact import Fact

_ABSENT: Final = "torch cannot be found"


def probe() -> Mapping[str, Fact]:
    """torch, cxx11_abi, cuda, rocm, xpu, cann, metal, neuron and tpu."""
    module = sys.modules.get("torch")
    # While another thread imports it, half of it is there.
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        return _facts(_versions_of(module), _running_abi(module), _running_extensions(module), "running torch")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        flags = dict.fromkeys(("metal", "neuron", "tpu"), Fact(value=False, source=_ABSENT))
        return dict.fromkeys(("torch", "cxx11_abi", "cuda", "rocm", "xpu", "cann"), Fact(None, _ABSENT)) | flags
    directory = Path(spec.origin).parent
    return _facts(read_versions(directory), read_abi(directory), _installed_extensions(), "torch/version.py")


def read_versions(directory: Path) -> dict[str, str | None]:
    """The assignments of a torch/version.py: `__version__`, `cuda`, `hip`, `xpu`."""
    tree = ast.parse((directory / "version.py").read_text(encoding="utf-8"))
    found: dict[str, str | None] = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found |= {target.id: node.value.value for target in targets if isinstance(target, ast.Name)}
    return found


def read_abi(directory: Path) -> Fact:
    """The C++11 ABI of torch, from the mangled name of a function in libc10 that takes a std::string."""
    library = directory / "lib" / "libc10.so"
    symbols = library.read_bytes() if library.is_file() else b""
    if b"torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_string" in symbols:
        return Fact(value=True, source="symbols of libc10.so")
    if b"torchCheckFailEPKcS2_jRKSs" in symbols:
        return Fact(value=False, source="symbols of libc10.so")
    return Fact.unknown("libc10.so does not tell, and torch is not imported")


def _facts(
    versions: Mapping[str, str | None], abi: Fact, extensions: Mapping[str, bool], source: str
) -> Mapping[str, Fact]:
    return {
        "torch": Fact(versions["__version__"], source),
        # libstdc++ is Linux's: elsewhere no name carries this ABI.
        "cxx11_abi": abi if sys.platform == "linux" else Fact(None, "no libstdc++ ABI here"),
        "cuda": Fact(versions.get("cuda"), source),
        "rocm": Fact(_release(versions.get("hip")), source),
        "xpu": Fact(xpu_release(versions.get("xpu")), source),
        "cann": _cann(extensions),
    } | {name: Fact(extensions[name], source) for name in ("metal", "neuron", "tpu")}


def _release(version: str | None) -> str | None:
    """Major and minor, "7.0", of a HIP version such as "7.0.51831-a3e329ad8"."""
    release = major_minor(version) if version else None
    return f"{release[0]}.{release[1]}" if release else None


def xpu_release(version: str | None) -> str | None:
    """Release, "2025.2", of a oneAPI version such as "20250200": year, two digits for the release, patch."""
    match = re.match(r"(\d{4})\.?(\d{1,2})", version) if version else None
    return f"{match[1]}.{int(match[2])}" if match else None


def _cann(extensions: Mapping[str, bool]) -> Fact:
    release = cann_release(os.environ) if extensions["npu"] else None
    if extensions["npu"] and release is None:
        return Fact.unknown("torch_npu is here, and no CANN toolkit that tells its version")
    return Fact(release, "CANN toolkit's version file")


def cann_release(environ: Mapping[str, str]) -> str | None:
    """Version of the Ascend toolkit that the environment points to."""
    home = environ.get("ASCEND_TOOLKIT_HOME") or environ.get("ASCEND_HOME_PATH")
    for file in sorted(Path(home).rglob("ascend_toolkit_install.info")) if home else []:
        match = re.search(r"^version=(\d+\.\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match[1]
    return None


def _versions_of(module: ModuleType) -> dict[str, str | None]:
    version: Any = module.version
    return {"__version__": str(module.__version__)} | {k: getattr(version, k, None) for k in ("cuda", "hip", "xpu")}


def _running_abi(module: ModuleType) -> Fact:
    return Fact(bool(module.compiled_with_cxx11_abi()), "torch.compiled_with_cxx11_abi")


def _running_extensions(module: ModuleType) -> Mapping[str, bool]:
    # Extensions register themselves on torch when they are loaded, hardware or not.
    return {
        "metal": module.backends.mps.is_available(),
        "neuron": hasattr(module, "neuron"),
        "tpu": hasattr(module.backends, "tpu"),
        "npu": hasattr(module, "npu"),
    }


def _installed_extensions() -> Mapping[str, bool]:
    names = {"neuron": "torch_neuronx", "tpu": "torch_tpu", "npu": "torch_npu"}
    found = {key: importlib.util.find_spec(name) is not None for key, name in names.items()}
    # Every torch for Macs with Apple's own chips computes on their GPU.
    return found | {"metal": sys.platform == "darwin" and os.uname().machine == "arm64"}
