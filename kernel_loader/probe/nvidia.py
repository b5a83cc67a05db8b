"""NVIDIA driver, devices and toolkit, without a CUDA context."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kernel_loader.host import HostDevice, major_minor
from kernel_loader.probe.fact import Fact
from kernel_loader.probe.visible import visible

_NVML: Final = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
_ROOT: Final = Path("/")
_DRIVER_NOT_LOADED: Final = 9  # nvmlReturn_t


def driver(root: Path = _ROOT) -> Fact:
    """Version of the kernel driver, from sysfs, procfs or NVML; None where no driver is loaded."""
    for file, pattern in (
        ("sys/module/nvidia/version", r"([\d.]+)"),
        ("proc/driver/nvidia/version", r"Kernel Module.*?\s([\d]+\.[\d.]+)"),
    ):
        try:
            match = re.search(pattern, (root / file).read_text(encoding="utf-8"))
        except OSError:
            continue
        if match:
            return Fact(match[1], f"/{file}")
    with _nvml() as nvml:
        if nvml is None:
            return Fact(None, "no driver in /sys, /proc or NVML")
        return Fact(_text(nvml.nvmlSystemGetDriverVersion), "NVML")


def devices(environ: Mapping[str, str] = os.environ) -> Fact:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves visible, by NVML, which needs no context."""
    with _nvml() as nvml:
        if nvml is None:
            return Fact((), "no NVML")
        count = ctypes.c_uint()
        _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
        found = [_device(nvml, index) for index in range(count.value)]
    shown = visible([uuid for uuid, _ in found], environ.get("CUDA_VISIBLE_DEVICES"))
    # Numbers count in CUDA's own order, fastest first unless this asks for NVML's. On a machine of unlike GPUs they
    # could mean any of them, so all must be able to run the build.
    unlike = len({device.arch for _, device in found}) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    if shown and unlike:
        shown = range(len(found))
    return Fact(tuple(found[index][1] for index in shown), "NVML and CUDA_VISIBLE_DEVICES")


def toolkit(environ: Mapping[str, str], default: Path = Path("/usr/local/cuda")) -> Fact:
    """The CUDA toolkit that just-in-time compilers would find: CUDA_HOME, nvcc on PATH, or the usual place."""
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    home = Path(named) if named else Path(on_path).resolve().parent.parent if on_path else default
    nvcc = home / "bin" / ("nvcc.exe" if sys.platform == "win32" else "nvcc")
    if not os.access(nvcc, os.X_OK):
        return Fact(None, f"no nvcc in {home / 'bin'}")
    version = _toolkit_version(home, nvcc)
    return Fact(version, str(nvcc)) if version else Fact.unknown(f"{nvcc} does not tell its version")


def _toolkit_version(home: Path, nvcc: Path) -> str | None:
    try:
        version = str(json.loads((home / "version.json").read_text(encoding="utf-8"))["cuda"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        version = ""  # distributions leave the file out
    if major_minor(version) is not None:
        return version
    answer = subprocess.run(  # noqa: S603 - the compiler that kernels would run
        [nvcc, "--version"], capture_output=True, text=True, timeout=4, check=False
    ).stdout
    match = re.search(r"release (\d+\.\d+)", answer)
    return match[1] if match else None


# --- NVML ---------------------------------------------------------------------------------------------------------


@contextmanager
def _nvml() -> Iterator[ctypes.CDLL | None]:
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        yield None
        return
    status = nvml.nvmlInit_v2()
    if status == _DRIVER_NOT_LOADED:
        yield None  # containers bring the library along to machines without the driver
        return
    _check(status)
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, index: int) -> tuple[str, HostDevice]:
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
    _check(nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)))
    device = HostDevice(arch=f"{major.value}.{minor.value}", name=_text(nvml.nvmlDeviceGetName, handle))
    return _text(nvml.nvmlDeviceGetUUID, handle), device


def _text(function: ctypes._FuncPointer, *args: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    _check(function(*args, buffer, ctypes.c_uint(len(buffer))))
    return buffer.value.decode(errors="replace")


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"NVML answered {status}")
