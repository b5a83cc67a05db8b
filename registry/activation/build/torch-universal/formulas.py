"""What the functions and the layers compute: a tensor in, a new one of the same dtype out.

Each activation is computed in float32 at least and rounded once to the dtype of x. A gate is rounded before it is
multiplied, as in the published kernels and in a model that writes `act(gate) * up`.
"""

import torch
from torch import Tensor
from torch.nn import functional


def silu(x: Tensor) -> Tensor:
    """SiLU: x * sigmoid(x), elementwise."""
    return functional.silu(x)


def gelu(x: Tensor) -> Tensor:
    """GELU: x * Phi(x), where Phi is the distribution function of the standard normal, elementwise."""
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by tanh: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), elementwise."""
    return functional.gelu(x, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    """GELU by a sigmoid: x * sigmoid(1.702 * x), elementwise."""
    wide = _wide(x)
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def fatrelu(x: Tensor, threshold: float) -> Tensor:
    """FATReLU: x where x > threshold, else 0, elementwise; NaN gives 0."""
    # The threshold is not rounded to the dtype of x, so that an x which it would round to is still told apart.
    return torch.where(_wide(x) > threshold, x, 0.0)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second half of each row, (..., 2 * d) -> two of (..., d).

    Raises:
        ValueError: the last dimension is odd, or there is none.
    """
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"x: expected shape (..., 2 * d), got {tuple(x.shape)}")
    d = x.shape[-1] // 2
    return x[..., :d], x[..., d:]


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half."""
    gate, up = halves(x)
    return silu(gate) * up


def mul_and_silu(x: Tensor) -> Tensor:
    """First half * silu(second half)."""
    up, gate = halves(x)
    return up * silu(gate)


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(first half) * second half."""
    gate, up = halves(x)
    return gelu(gate) * up


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """gelu_tanh(first half) * second half."""
    gate, up = halves(x)
    return gelu_tanh(gate) * up


def fatrelu_and_mul(x: Tensor, threshold: float) -> Tensor:
    """fatrelu(first half) * second half."""
    gate, up = halves(x)
    return fatrelu(gate, threshold) * up


def _wide(x: Tensor) -> Tensor:
    """Cast to float32, or as it is where that is wider."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
