"""The mixture-of-experts MLP of GPT-OSS in plain PyTorch, as a layer.

Runs on every device and float dtype, with torch 2.6 or later, under autograd. What published builds have besides, their
ops on bins and their modules for training across machines, is not here.
"""

from . import layers

__all__ = ["layers"]
