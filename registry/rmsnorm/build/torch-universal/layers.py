"""The norm as a layer: `forward` alone, without a state of its own, to be put into a module that has it."""

from torch import Tensor, nn

from .normalise import apply_rms_norm


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x ** 2) + variance_epsilon) over the last dimension, (..., H) -> (..., H).

    `weight` (H,) and `variance_epsilon` are those of the module which this is put into. The mean is taken in float32,
    and what `weight` multiplies is rounded to the dtype of x, as in the Llama models.
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return apply_rms_norm(hidden_states, self.weight, self.variance_epsilon)
