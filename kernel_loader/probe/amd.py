"""AMD devices, from the topology that the amdkfd driver shows in sysfs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kernel_loader.host import HostDevice
from kernel_loader.probe.fact import Fact
from kernel_loader.probe.visible import visible

_TOPOLOGY: Final = Path("/sys/class/kfd/kfd/topology/nodes")


def devices(environ: Mapping[str, str] = os.environ, topology: Path = _TOPOLOGY) -> Fact:
    """The GPUs that ROCR_, HIP_ (or CUDA_)VISIBLE_DEVICES leave visible."""
    if not topology.is_dir():
        return Fact((), "no amdkfd")
    found = [d for node in sorted(topology.iterdir(), key=_number) if (d := _device(node)) is not None]
    for variables in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        # HIP numbers the devices that ROCr left; it reads CUDA's variable where its own is not set.
        value = next((environ[v] for v in variables if v in environ), None)
        found = [found[index] for index in visible([uuid for uuid, _ in found], value)]
    return Fact(tuple(device for _, device in found), "amdkfd and *_VISIBLE_DEVICES")


def _device(node: Path) -> tuple[str, HostDevice] | None:
    try:
        text = (node / "properties").read_text(encoding="utf-8")
    except PermissionError:
        return None  # amdkfd answers so for GPUs outside the process's cgroup
    properties = dict(re.findall(r"^(\w+) (\d+)$", text, re.MULTILINE))
    target = int(properties.get("gfx_target_version", 0))
    if target == 0:
        return None  # a CPU is a node of the topology too
    name = (node / "name").read_text(encoding="utf-8").strip() if (node / "name").is_file() else ""
    return f"GPU-{int(properties.get('unique_id', 0)):016x}", HostDevice(arch=gfx_name(target), name=name)


def gfx_name(target: int) -> str:
    """Name of a target, gfx90a for 90010: decimal pairs; minor and stepping are written in hexadecimal."""
    return f"gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"


def _number(node: Path) -> int:
    return int(node.name) if node.name.isdecimal() else -1
