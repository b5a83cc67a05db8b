"""The functions: each writes into `out` and returns it.

`out` has the dtype and device of x, and the shape (..., d) that the function says; anything else is a ValueError or a
TypeError. x may have any strides, and may be `out` itself where the shapes agree.
"""

from torch import Tensor

from . import formulas


def silu_and_mul(out: Tensor, x: Tensor) -> Tensor:
    """Set out = silu(x[..., :d]) * x[..., d:], (..., 2 * d) -> (..., d)."""
    return _write(out, formulas.silu_and_mul(x))


def mul_and_silu(out: Tensor, x: Tensor) -> Tensor:
    """Set out = x[..., :d] * silu(x[..., d:]), (..., 2 * d) -> (..., d)."""
    return _write(out, formulas.mul_and_silu(x))


def gelu_and_mul(out: Tensor, x: Tensor) -> Tensor:
    """Set out = gelu(x[..., :d]) * x[..., d:], (..., 2 * d) -> (..., d)."""
    return _write(out, formulas.gelu_and_mul(x))


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> Tensor:
    """Set out = gelu_tanh(x[..., :d]) * x[..., d:], (..., 2 * d) -> (..., d)."""
    return _write(out, formulas.gelu_tanh_and_mul(x))


def fatrelu_and_mul(out: Tensor, x: Tensor, threshold: float = 0.0) -> Tensor:
    """Set out = x[..., :d] * x[..., d:] where x[..., :d] > threshold, else 0, (..., 2 * d) -> (..., d)."""
    return _write(out, formulas.fatrelu_and_mul(x, threshold))


def gelu_fast(out: Tensor, x: Tensor) -> Tensor:
    """Set out = gelu_tanh(x), (..., d) -> (..., d). Published kernels differ from it in rounding alone."""
    return _write(out, formulas.gelu_tanh(x))


def gelu_new(out: Tensor, x: Tensor) -> Tensor:
    """Set out = gelu_tanh(x), (..., d) -> (..., d). Published kernels differ from it in rounding alone."""
    return _write(out, formulas.gelu_tanh(x))


def gelu_quick(out: Tensor, x: Tensor) -> Tensor:
    """Set out = x * sigmoid(1.702 * x), (..., d) -> (..., d)."""
    return _write(out, formulas.gelu_quick(x))


def gelu_tanh(out: Tensor, x: Tensor) -> Tensor:
    """Set out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), (..., d) -> (..., d)."""
    return _write(out, formulas.gelu_tanh(x))


def silu(out: Tensor, x: Tensor) -> Tensor:
    """Set out = x * sigmoid(x), (..., d) -> (..., d)."""
    return _write(out, formulas.silu(x))


def gelu(out: Tensor, x: Tensor) -> Tensor:
    """Set out = x * Phi(x), where Phi is the distribution function of the standard normal, (..., d) -> (..., d)."""
    return _write(out, formulas.gelu(x))


def _write(out: Tensor, value: Tensor) -> Tensor:
    # copy_ alone would broadcast, cast and change devices in silence, which no compiled kernel does.
    if out.dtype != value.dtype:
        raise TypeError(f"out: expected {value.dtype}, which x has, got {out.dtype}")
    if out.shape != value.shape:
        raise ValueError(f"out: expected shape {tuple(value.shape)}, got {tuple(out.shape)}")
    if out.device != value.device:
        raise ValueError(f"out: expected on {value.device}, where x is, got {out.device}")
    return out.copy_(value)
