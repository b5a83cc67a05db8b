"""RMS normalisation and the gated MLP behind it as one module, in plain PyTorch.

    layers.RMSNormMLP          forward
    layers.RMSNormMLPLayout    the module, made of a norm and an MLP, and where its weights come from

Runs on every device and float dtype, with torch 2.6 or later, under autograd and torch.compile.
"""

from . import layers

__all__ = ["layers"]
