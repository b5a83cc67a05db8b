"""Guards of `kernel_loader.bundles.mxfp4`: each is called with the function, and then as the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# What the published builds multiply by at a time. Measured on an H200: K = 32, 96 and 160 give wrong results, N = 17
# too, and N = 1 reads where no memory is.
_WHOLE_K: Final = 64
_WHOLE_N: Final = 16


def whole_weights(
    function: Callable[..., Tensor],
    x: Tensor,
    w: Any,
    bias: Tensor | None,
    routing_data: Any,
    gather_indx: Any = None,
    scatter_indx: Any = None,
    precision_config: Any = None,
    **named: Any,
) -> Tensor:
    """A product without rows is empty, and one that the function would compute wrongly is refused: ValueError."""
    k, n = x.shape[-1], w.shape[-1]
    if k % _WHOLE_K or n % _WHOLE_N:
        raise ValueError(
            f"w: expected K a multiple of {_WHOLE_K} and N of {_WHOLE_N}, got K = {k} and N = {n}; pad both"
        )
    if not x.shape[0]:
        activation = named.get("fused_activation")
        dtype = precision_config.out_dtype if precision_config is not None else None
        return x.new_empty((0, n // (activation.reduction_n if activation is not None else 1)), dtype=dtype or x.dtype)
    return function(x, w, bias, routing_data, gather_indx, scatter_indx, precision_config, **named)


def zero_places(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Rows at places of no expert, from sum(expt_hist) on, are zeros where nothing is scattered.

    `routing_data` is the fourth argument, `scatter_indx` the sixth. Rows are written in place.
    """
    result = function(*args, **kwargs)
    data = args[3] if len(args) > 3 else kwargs.get("routing_data")
    scatter = args[5] if len(args) > 5 else kwargs.get("scatter_indx")
    if data is None or scatter is not None:
        return result
    places = torch.arange(result.shape[0], device=result.device)
    return result.masked_fill_((places >= data.expt_hist.sum()).unsqueeze(1), 0)
