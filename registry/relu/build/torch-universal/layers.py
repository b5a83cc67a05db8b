"""The function as a layer: `forward` alone, to be put into a module."""

from torch import Tensor, nn

from .rectify import relu


class ReLU(nn.Module):
    """x where x > 0, else 0, any shape; NaN gives 0."""

    can_torch_compile: bool = True
    has_backward: bool = True

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return relu(x)
