"""Operating system, CPU and C library."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Final

from kernel_loader.probe.fact import Fact

# What different systems call the same instruction set.
_CPUS: Final = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


def probe(system: str | None = None, machine: str | None = None) -> Mapping[str, Fact]:
    """os, cpu, macos and glibc. Arguments stand for what the machine would answer."""
    system = (system or platform.system()).lower()
    machine = (machine or platform.machine()).lower()
    macos = platform.mac_ver()[0] if system == "darwin" else ""
    return {
        "os": Fact(system, "platform.system"),
        "cpu": Fact(_CPUS.get(machine, machine), "platform.machine"),
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
