"""Multi-scale deformable attention in plain PyTorch.

    ms_deform_attn_forward                  the attention
    ms_deform_attn_backward                 its gradients
    layers.MultiScaleDeformableAttention    the same under autograd

Runs on every device and float dtype, with torch 2.6 or later, under torch.compile. Nothing waits for the device.
"""

from . import layers
from .attention import ms_deform_attn_backward, ms_deform_attn_forward

__all__ = ["layers", "ms_deform_attn_backward", "ms_deform_attn_forward"]
