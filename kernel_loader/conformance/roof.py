"""What a device can do: the two sides of its roof, measured on the spot, and how a call is timed under it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch

from kernel_loader.conformance.grid import Work

# A call is timed for so many seconds, and at least and at most so many times.
_SECONDS: Final = 1.0
_LEAST_CALLS: Final = 5
_MOST_CALLS: Final = 100

# Bytes, more than any device has of second-level cache.
_CACHE: Final = 1 << 28

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}


class Roof(NamedTuple):
    """What a device was measured to do at best.

    Attributes:
        bandwidth: bytes read or written in a second, by torch's copy of a large buffer.
        flops: kind of arithmetic -> operations in a second, by torch's matmul of large square matrices. A kind that the
            device has not is not there.
    """

    bandwidth: float
    flops: Mapping[str, float]

    def seconds(self, work: Work) -> float:
        """The least time that the work can take: the longer of its arithmetic and its traffic."""
        peak = self.flops.get(work.peak)
        return max(work.nbytes / self.bandwidth, work.flops / peak if peak else 0.0)


def measure_roof(device: torch.device, kinds: Iterable[str]) -> Roof:
    """Measure a device, for some kinds of arithmetic."""
    is_cpu = device.type == "cpu"
    source = torch.ones(1 << (26 if is_cpu else 28), device=device)
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device)
    rates = {kind: _matmul_rate(kind, 1024 if is_cpu else 8192, device) for kind in sorted(set(kinds))}
    return Roof(2 * source.numel() * source.element_size() / copy, {kind: rate for kind, rate in rates.items() if rate})


def _matmul_rate(kind: str, side: int, device: torch.device) -> float | None:
    """Operations in a second; None where torch has no such matmul for the device."""
    if kind not in _DTYPES:
        return None
    a = torch.ones(side, side, device=device).to(_DTYPES[kind])
    one = torch.ones((), device=device)

    def multiply() -> object:
        if kind == "fp8":
            return torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16)  # noqa: SLF001 - torch has no other
        return a @ a

    try:
        return 2.0 * side**3 / seconds(multiply, device)
    except (RuntimeError, NotImplementedError):
        return None


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Median time of a call, after two that are not counted; of the device where that is a CUDA or ROCm one."""
    for _ in range(2):
        function()
    calls = min(max(int(_SECONDS / max(wall_seconds(function, device), 1e-9)), _LEAST_CALLS), _MOST_CALLS)
    if device.type == "cuda":
        return statistics.median(device_seconds(function, device, calls))
    return statistics.median(wall_seconds(function, device) for _ in range(calls))


def device_seconds(function: Callable[[], object], device: torch.device, calls: int) -> list[float]:
    """Times that calls take of a CUDA or ROCm device.

    Calls are queued one behind the other, as in a model: what the CPU does for one is hidden behind the one before it,
    unless it takes longer. Between them the second-level cache is filled with other things. triton.testing.do_bench
    does the same.
    """
    other = torch.empty(_CACHE, dtype=torch.int8, device=device)
    pairs: list[tuple[Any, Any]] = []
    with torch.cuda.device(device):  # events are of the current one
        for _ in range(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch
            other.zero_()
            start.record()
            function()
            end.record()
            pairs.append((start, end))
    synchronise(device)
    return [float(start.elapsed_time(end)) / 1e3 for start, end in pairs]


def wall_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Time of one call until the device is done with it."""
    synchronise(device)
    begin = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - begin


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def called(device: torch.device) -> str:
    """What the device is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
