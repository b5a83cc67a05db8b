"""The only code that asks the machine. No probe raises or makes a CUDA context, and drivers have a bounded time.

A process that has initialised CUDA can no longer fork workers that use it, so devices are read from NVML and sysfs,
and what torch was built for is read from torch's own files unless torch is already imported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Final

from kernel_loader.errors import HostError, SettingsError
from kernel_loader.host import Host, read_fact
from kernel_loader.probe import amd, nvidia, python, system, torch
from kernel_loader.probe.fact import Fact
from kernel_loader.settings import OVERRIDE_PREFIX

__all__ = ["Fact", "detect"]

SECONDS: Final = 5.0

# What can be overridden, beside the devices, whose variable is called ARCH.
_NAMES: Final = frozenset(f.name.upper() for f in fields(Host)) - {"DEVICES", "PACKAGES", "UNKNOWN", "PROVENANCE"}

# A probe, and the fields it answers for: those are unknown when it fails or does not come back.
Probe = tuple[Callable[[], Mapping[str, Fact]], tuple[str, ...]]

INTERPRETER: Final[tuple[Probe, ...]] = (
    (system.probe, ("os", "cpu", "macos", "glibc")),
    (python.probe, ("python", "free_threaded", "packages", "tvm_ffi")),
    (torch.probe, ("torch", "cxx11_abi", "cuda", "rocm", "xpu", "cann", "metal", "neuron", "tpu")),
)
DRIVERS: Final[tuple[Probe, ...]] = (
    (lambda: {"driver": nvidia.driver()}, ("driver",)),
    (lambda: {"devices": devices()}, ("devices",)),
)
TOOLKIT: Final[Probe] = (lambda: {"cuda_toolkit": nvidia.toolkit(os.environ)}, ("cuda_toolkit",))


def detect(overrides: Mapping[str, str]) -> Host:
    """Ask this machine, then apply `overrides` (see `Settings.overrides`).

    Raises:
        SettingsError: an override has an unknown name or an unreadable value.
    """
    drivers = begin(*DRIVERS)
    facts: dict[str, Fact] = {}
    for probe in INTERPRETER:
        facts |= _answer(probe)
    facts |= drivers(SECONDS)
    # Only kernels for CUDA compile at run time, and asking nvcc for its version starts a process.
    if overrides.get("CUDA", facts["cuda"].value):
        facts |= begin(TOOLKIT)(SECONDS)
    else:
        facts["cuda_toolkit"] = Fact.unknown("not looked for: this torch is not for CUDA")
    for name, value in overrides.items():
        facts |= _override(name, value)
    known: dict[str, Any] = {"os": "", "cpu": ""} | {name: fact.value for name, fact in facts.items() if fact.known}
    return Host(
        **known,
        unknown=frozenset(name for name, fact in facts.items() if not fact.known),
        provenance={name: fact.source for name, fact in facts.items()},
    )


def begin(*probes: Probe) -> Callable[[float], Mapping[str, Fact]]:
    """Ask in a thread, one after the other. The result waits so many seconds at most, and gives what is known then.

    A driver in a bad state can block for minutes inside a call that nothing can interrupt; the thread that made the
    call is then left behind.
    """
    facts: dict[str, Fact] = {}

    def run() -> None:
        for probe in probes:
            facts.update(_answer(probe))

    thread = threading.Thread(target=run, daemon=True, name="kernel-loader-probe")
    thread.start()

    def wait(seconds: float) -> Mapping[str, Fact]:
        thread.join(seconds)
        late = Fact.unknown(f"no answer in {seconds:g} s")
        return {name: facts.get(name, late) for _, names in probes for name in names}

    return wait


def _answer(probe: Probe) -> Mapping[str, Fact]:
    ask, names = probe
    try:
        return ask()
    except Exception as error:  # noqa: BLE001 - a probe never raises, whatever the machine answers
        return {name: Fact.unknown(f"{type(error).__name__}: {error}") for name in names}


def devices() -> Fact:
    """The accelerators of any make that this process can see."""
    found = (nvidia.devices(), amd.devices())
    return Fact(
        tuple(device for fact in found if fact.known for device in fact.value),
        "; ".join(fact.source for fact in found),
        known=all(fact.known for fact in found),
    )


def _override(name: str, value: str) -> Mapping[str, Fact]:
    key = "devices" if name == "ARCH" else name.lower()
    variable = f"{OVERRIDE_PREFIX}{name}"
    try:
        return {key: Fact(read_fact(key, _parse(key, value)), variable)}
    except HostError as error:
        raise SettingsError(variable, value, f"a value for {key} ({error.detail}), or to nothing for absent") from error


def _parse(key: str, value: str) -> Any:  # noqa: ANN401 - read_fact checks the type
    match key:
        case "devices":
            return [arch.strip() for arch in value.split(",") if arch.strip()]
        case "free_threaded" | "metal" | "neuron" | "tpu" | "cxx11_abi":
            words = {"1": True, "true": True, "0": False, "false": False, "": None if key == "cxx11_abi" else False}
            return words.get(value.lower(), value)
        case "os" | "cpu":
            return value
        case _ if key.upper() not in _NAMES:
            raise HostError(key, f"no such fact; there are ARCH, {', '.join(sorted(_NAMES))}")
        case _:
            return value or None
