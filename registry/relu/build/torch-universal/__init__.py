"""ReLU in plain PyTorch: `relu` as a function, `layers.ReLU` as a layer.

Runs on every device and float dtype, with torch 2.6 or later, under autograd and torch.compile.
"""

from . import layers
from .rectify import relu

__all__ = ["layers", "relu"]
