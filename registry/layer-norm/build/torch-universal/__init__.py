"""Layer and RMS normalisation of the last dimension in plain PyTorch.

    dropout_add_ln_fwd    scales, dropout and a norm, by rows
    layers                both norms with a weight, as layers

Runs on every device and float dtype, with torch 2.6 or later, under autograd and torch.compile.
"""

from . import layers
from .normalise import dropout_add_ln_fwd

__all__ = ["dropout_add_ln_fwd", "layers"]
