"""The functions as layers: `forward` alone, without a state of its own, to be put into a module that has it.

x is a float tensor of any strides; the result is new, of its dtype and device.
"""

from torch import Tensor, nn

from . import formulas


class SiluAndMul(nn.Module):
    """silu(x[..., :d]) * x[..., d:], (..., 2 * d) -> (..., d)."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.silu_and_mul(x)


class Silu(nn.Module):
    """x * sigmoid(x), any shape."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.silu(x)


class Gelu(nn.Module):
    """x * Phi(x), where Phi is the distribution function of the standard normal, any shape."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu(x)


class GeluTanh(nn.Module):
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))), any shape."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu_tanh(x)


class MulAndSilu(nn.Module):
    """x[..., :d] * silu(x[..., d:]), (..., 2 * d) -> (..., d)."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.mul_and_silu(x)


class GeluAndMul(nn.Module):
    """gelu(x[..., :d]) * x[..., d:], (..., 2 * d) -> (..., d)."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu_and_mul(x)


class GeluTanhAndMul(nn.Module):
    """gelu_tanh(x[..., :d]) * x[..., d:], (..., 2 * d) -> (..., d)."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu_tanh_and_mul(x)


class FatreluAndMul(nn.Module):
    """x[..., :d] * x[..., d:] where x[..., :d] > threshold, else 0, (..., 2 * d) -> (..., d).

    `threshold` is that of the module which this is put into; 0.0 where it has none.
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.fatrelu_and_mul(x, getattr(self, "threshold", 0.0))


class FastGELU(nn.Module):
    """As GeluTanh: published kernels differ from it in rounding alone."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu_tanh(x)


class NewGELU(nn.Module):
    """As GeluTanh: published kernels differ from it in rounding alone."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu_tanh(x)


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 * x), any shape."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return formulas.gelu_quick(x)
