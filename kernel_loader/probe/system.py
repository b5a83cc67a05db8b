"""Operating system, CPU and C library."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from kernel_loader.host import normal_cpu, normal_os
from kernel_loader.probe.fact import Fact


def probe(system: str | None = None, machine: str | None = None) -> Mapping[str, Fact]:
    """os, cpu, macos and glibc. Arguments stand for what the machine would answer."""
    system = normal_os(system or platform.system())
    macos = platform.mac_ver()[0] if system == "darwin" else ""
    return {
        "os": Fact(system, "platform.system"),
        "cpu": Fact(normal_cpu(machine or platform.machine()), "platform.machine"),
        "macos": Fact(macos or None, "platform.mac_ver"),
        "glibc": glibc() if system == "linux" else Fact(None, f"no glibc on {system}"),
    }


def glibc(answer: str | None = None) -> Fact:
    """The GNU C library that this process runs on; None on musl, which does not know the question."""
    try:
        answer = answer if answer is not None else os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        answer = None
    name, _, version = (answer or "").partition(" ")
    return Fact(version if name == "glibc" and version else None, "confstr(CS_GNU_LIBC_VERSION)")
