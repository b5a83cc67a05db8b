"""The experts of a mixture-of-experts layer in Triton, for NVIDIA GPUs of compute capability 8.0 and later.

    experts_forward    routed rows through two grouped matmuls with an activation between, and their weighted sum

Work is done for real rows alone; how many there are is known to the device only, and nobody waits for it. So a call can
be captured in a CUDA graph. Runs with torch 2.6 or later, under autograd and torch.compile.
"""

from .experts import experts_forward

__all__ = ["experts_forward"]
