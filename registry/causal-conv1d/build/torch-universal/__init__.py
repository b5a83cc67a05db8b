"""Causal depthwise convolution along time in plain PyTorch: the definition of what a faster build must compute.

    causal_conv1d_fn                whole sequences, differentiable
    causal_conv1d_update            some steps more, from a state that is written
    causal_conv1d_varlen_states     the states that packed sequences leave

Every channel has a filter of its own, as in the Mamba block (arXiv:2312.00752, 3.4). Runs on every device with torch
2.6 or later, under autograd and torch.compile.
"""

from .convolution import causal_conv1d_fn
from .states import causal_conv1d_update, causal_conv1d_varlen_states

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]
