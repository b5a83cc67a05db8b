"""The mixture-of-experts MLP of GPT-OSS in plain PyTorch, as a layer, and the ops on bins that such layers are made of.

    layers                                      the MLP, alone and beside an expert that every token goes through
    exclusive_cumsum, inclusive_cumsum, cumsum  where the bins of a histogram begin and end
    histogram                                   how often each number occurs
    indices                                     the columns of a block-sparse matrix whose blocks are those of bins
    replicate_forward, replicate_backward       a number for each bin <-> one for each element of it
    sort, argsort                               numbers in order, with where they were

Runs on every device, with torch 2.6 or later, under autograd and torch.compile. What published builds have besides,
their modules for training across machines, is not here.
"""

from . import layers
from .bins import (
    argsort,
    cumsum,
    exclusive_cumsum,
    histogram,
    inclusive_cumsum,
    indices,
    replicate_backward,
    replicate_forward,
    sort,
)

__all__ = [
    "argsort",
    "cumsum",
    "exclusive_cumsum",
    "histogram",
    "inclusive_cumsum",
    "indices",
    "layers",
    "replicate_backward",
    "replicate_forward",
    "sort",
]
