"""How the scripts here time a call on the device."""

import statistics
from collections.abc import Callable

import torch


def median_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call on the device, after three that are not counted."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
