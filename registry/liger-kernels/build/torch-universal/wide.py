"""The dtype that numbers are computed in."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Cast to float32, or as it is where that is wider."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)
