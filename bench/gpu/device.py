"""What the scripts here share: how a call is timed on the device, and which machine a page of results is of."""

import platform
import statistics
from collections.abc import Callable
from datetime import UTC, datetime

import torch
import triton

import kernel_loader
from kernel_loader.conformance.roof import device_seconds, wall_seconds


def median_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call on the device, among others that are queued, after three that are not counted."""
    for _ in range(3):
        function()
    device = torch.device("cuda", torch.cuda.current_device())
    return 1e3 * statistics.median(device_seconds(function, device, repeats))


def alone_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a call from an idle device to an idle device, on the clock of the host."""
    device = torch.device("cuda", torch.cuda.current_device())
    return 1e3 * statistics.median(wall_seconds(function, device) for _ in range(repeats))


def machine(*others: str) -> str:
    """The day, the device and the versions, with those of other packages."""
    parts = [
        f"{datetime.now(UTC):%Y-%m-%d}",
        torch.cuda.get_device_name(),
        f"driver {kernel_loader.Host.detect().driver}",
        f"Python {platform.python_version()}",
        f"torch {torch.__version__}",
        f"triton {triton.__version__}",
        *others,
        f"kernel_loader {kernel_loader.__version__}.",
    ]
    return ", ".join(parts)
