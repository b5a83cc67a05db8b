"""RMS normalisation of the last dimension in plain PyTorch, as models of the Llama family have it.

    apply_rms_norm             the normalised tensor
    apply_rms_norm_forward     that, and what its backward needs
    apply_rms_norm_backward    the gradients
    layers.RMSNorm             the same under autograd

Runs on every device and float dtype, with torch 2.6 or later, under torch.compile.
"""

from . import layers
from .normalise import apply_rms_norm, apply_rms_norm_backward, apply_rms_norm_forward

__all__ = ["apply_rms_norm", "apply_rms_norm_backward", "apply_rms_norm_forward", "layers"]
