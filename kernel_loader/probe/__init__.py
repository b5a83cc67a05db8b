"""The only code that asks the machine. Every probe is bounded in time, and none raises or makes a CUDA context.

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
PROBES: Final[tuple[tuple[Callable[[], Mapping[str, Fact]], tuple[str, ...]], ...]] = (
    (system.probe, ("os", "cpu", "macos", "glibc")),
    (python.probe, ("python", "free_threaded", "packages", "tvm_ffi")),
    (torch.probe, ("torch", "cxx11_abi", "cuda", "rocm", "xpu", "cann", "metal", "neuron", "tpu")),
    (lambda: {"driver": nvidia.driver()}, ("driver",)),
)


def detect(overrides: Mapping[str, str]) -> Host:
    """Ask this machine, then apply `overrides` (see `Settings.overrides`).

    Raises:
        SettingsError: an override has an unknown name or an unreadable value.
    """
    facts: dict[str, Fact] = {}
    for probe, names in PROBES:
        facts |= bounded(probe, names, SECONDS)
    facts |= bounded(_devices, ("devices",), SECONDS)
    # Only kernels for CUDA compile at run time, and asking nvcc for its version starts a process.
    if overrides.get("CUDA", facts["cuda"].value):
        facts |= bounded(lambda: {"cuda_toolkit": nvidia.toolkit(os.environ)}, ("cuda_toolkit",), SECONDS)
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


def bounded(probe: Callable[[], Mapping[str, Fact]], names: tuple[str, ...], seconds: float) -> Mapping[str, Fact]:
    """What a probe finds, or unknown facts when it raises or has not come back after `seconds`.

    A driver in a bad state can block for minutes inside a call that nothing can interrupt; the thread that made the
    call is then left behind.
    """
    outcome: list[Mapping[str, Fact]] = []

    def run() -> None:
        try:
            outcome.append(probe())
        except Exception as error:  # noqa: BLE001 - a probe never raises, whatever the machine answers
            outcome.append({name: Fact.unknown(f"{type(error).__name__}: {error}") for name in names})

    thread = threading.Thread(target=run, daemon=True, name=f"probe-{names[0]}")
    thread.start()
    thread.join(seconds)
    return outcome[0] if outcome else {name: Fact.unknown(f"no answer in {seconds:g} s") for name in names}


def _devices() -> Mapping[str, Fact]:
    found = (nvidia.devices(), amd.devices())
    return {
        "devices": Fact(
            tuple(device for fact in found if fact.known for device in fact.value),
            "; ".join(fact.source for fact in found),
            known=all(fact.known for fact in found),
        )
    }


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
