"""What stands between the two products."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from .arguments import Activation


def activate(z: Tensor, activation: Activation, dtype: torch.dtype) -> Tensor:
    """The activated rows (S, I) of z (S, 2I), or (S, I) without a gate, computed in float32, in `dtype`."""
    if not activation.gated:
        return _function(z.float(), activation).to(dtype)
    gate, up = (z[:, 0::2], z[:, 1::2]) if activation.interleaved else z.chunk(2, dim=1)
    gate, up = gate.float(), up.float()
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if activation.name == "swiglu_oai":
        up = up + 1
    return (_function(gate, activation) * up).to(dtype)


def _function(x: Tensor, activation: Activation) -> Tensor:
    match activation.name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
        case "relu2":
            return F.relu(x).square()
        case _:
            return x * torch.sigmoid(activation.alpha * x)
