"""Gated activations and their gradients, on float32 or float64."""

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from .enums import ActivationType

_GATED: Final = (ActivationType.SWIGLU.value, ActivationType.GEGLU.value)


def gated_name(activation_type: Any) -> str:  # noqa: ANN401 - an enum of any build
    """The value of an activation with a gate. A member of another build's enum counts by its value.

    Raises:
        TypeError: neither a member of an enum nor text.
        ValueError: none that there is, or one without a gate.
    """
    name = getattr(activation_type, "value", activation_type)
    if not isinstance(name, str):
        raise TypeError(f"activation_type: expected an ActivationType or its value, got {activation_type!r}")
    if name not in _GATED:
        raise ValueError(f"activation_type: expected one of {', '.join(_GATED)}, got {name!r}")
    return name


def forward(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """act(gate) * up, with silu for swiglu, and the gelu by tanh for geglu."""
    act = functional.silu(gate) if name == "swiglu" else functional.gelu(gate, approximate="tanh")
    return act * up


def backward(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The gradients to gate and up."""
    if name == "swiglu":
        act, to_gate = functional.silu(gate), torch.ops.aten.silu_backward(grad * up, gate)
    else:
        act = functional.gelu(gate, approximate="tanh")
        to_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh")
    return to_gate, grad * act
