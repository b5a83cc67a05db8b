"""Selective state-space models in plain PyTorch: slow, exact, and the definition of what a faster build must compute.

    selective_scan_fn              Mamba: whole sequences, differentiable
    mamba_chunk_scan_combined      Mamba-2: the same with heads whose channels decay alike, differentiable
    selective_state_update         one step of either, from a state that is written

Sources: Mamba (arXiv:2312.00752), Mamba-2 (arXiv:2405.21060). Runs on every device with torch 2.6 or later, under
autograd and torch.compile.
"""

from .heads import mamba_chunk_scan_combined
from .selective import selective_scan_fn
from .step import selective_state_update

__all__ = ["mamba_chunk_scan_combined", "selective_scan_fn", "selective_state_update"]
