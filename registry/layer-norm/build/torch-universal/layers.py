"""The norms as layers: `forward` alone, without a state of its own, to be put into a module that has it."""

import math

from torch import Tensor, nn

from .normalise import dropout_add_ln_fwd


class LayerNorm(nn.Module):
    """weight * (x - mean(x)) / sqrt(var(x) + variance_epsilon) over the last dimension, (..., H) -> (..., H).

    `weight` (H,) and `variance_epsilon` are those of the module which this is put into. A bias is not added.
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return _normalised(hidden_states, self.weight, self.variance_epsilon, is_rms_norm=False)


class LlamaRMSNorm(nn.Module):
    """weight * x / sqrt(mean(x ** 2) + variance_epsilon) over the last dimension, (..., H) -> (..., H).

    `weight` (H,) and `variance_epsilon` are those of the module which this is put into. Rounded once, at the end.
    """

    can_torch_compile: bool = True
    has_backward: bool = True

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:  # noqa: D102 - the class says it
        return _normalised(hidden_states, self.weight, self.variance_epsilon, is_rms_norm=True)


def _normalised(x: Tensor, weight: Tensor, epsilon: float, *, is_rms_norm: bool) -> Tensor:
    z, *_ = dropout_add_ln_fwd(
        input=x.reshape(math.prod(x.shape[:-1]), x.shape[-1]),
        gamma=weight,
        beta=None,
        rowscale=None,
        colscale=None,
        x0_subset=None,
        z_subset=None,
        dropout_p=0.0,
        epsilon=epsilon,
        rowscale_const=1.0,
        z_numrows=0,
        gen=None,
        residual_in_fp32=False,
        is_rms_norm=is_rms_norm,
    )
    return z.view(x.shape)  # type: ignore[union-attr]  # only what comes after z may be None
