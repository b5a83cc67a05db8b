"""The gated delta rule in plain PyTorch: slow, exact, and the definition of what a faster build must compute.

    chunk_gated_delta_rule              for whole sequences
    fused_recurrent_gated_delta_rule    for a few steps, with decays of single rows and columns besides

Source: Gated Delta Networks (arXiv:2412.06464), equation (10). Runs on every device with torch 2.6 or later, under
autograd and torch.compile.
"""

from .entrypoints import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
