"""The experts of a mixture-of-experts layer in plain PyTorch: the definition of what a faster build must compute.

    experts_forward    routed rows through two grouped matmuls with an activation between, and their weighted sum

Runs on every device, with torch 2.6 or later, under autograd and torch.compile.
"""

from .experts import experts_forward

__all__ = ["experts_forward"]
