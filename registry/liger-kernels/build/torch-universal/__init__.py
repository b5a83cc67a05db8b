"""Layers and losses of language models in plain PyTorch.

    LigerForCausalLMLoss    the last projection and the cross entropy of its logits, at once
    liger_rotary_pos_emb    rotary position embedding of queries and keys
    layers                  both as layers, RMS normalisation, a projection, and gated MLPs

Runs on every device and float dtype, with torch 2.6 or later, under autograd and torch.compile.
"""

from . import layers
from .loss import LigerForCausalLMLoss
from .rotary import liger_rotary_pos_emb

__all__ = ["LigerForCausalLMLoss", "layers", "liger_rotary_pos_emb"]
