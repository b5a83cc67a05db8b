"""What a device can do, asked once."""

import contextlib
import functools
from typing import Any

import torch
import triton


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time, if one fills a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles are brought by a copy engine (TMA), into more than 200 KB of shared memory.

    So on compute capability 9 and 10 (CUDA programming guide, technical specifications per compute capability).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def precision(dtype: torch.dtype) -> str:
    """Of products, what torch's own have: of float32, IEEE unless the user allows TF32."""
    matmul = torch.backends.cuda.matmul
    # Where the newer setting is there and was used, asking for the older one is an error.
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if dtype == torch.float32 and allowed else "ieee"


def check_device(device: torch.device, *, fp8: bool) -> None:
    """ValueError where nothing here can run; the interpreter of Triton can on a CPU."""
    if device.type != "cuda":
        if not triton.knobs.runtime.interpret:
            raise ValueError(f"hidden_states: expected on a CUDA device, got {device}")
    elif fp8 and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(f"gate_up_proj: expected a device of capability 8.9 or later for FP8, got {major}.{minor}")


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make the device the current one: Triton launches there, wherever tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
