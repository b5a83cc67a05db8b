"""A norm of rows that were scaled and thinned out, all in float32, or in float64 where the input is.

    x  = colscale * dropout(rowscale * input)
    mu = mean(x)
    z  = gamma * (x - mu) * rsigma + beta    with rsigma = 1 / sqrt(mean((x - mu) ** 2) + epsilon)
    z  = gamma * x * rsigma + beta           with rsigma = 1 / sqrt(mean(x ** 2) + epsilon), the RMS norm

Sources: Ba, Kiros and Hinton, Layer Normalization (arXiv:1607.06450); Zhang and Sennrich, Root Mean Square Layer
Normalization (arXiv:1910.07467).
"""

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import check


def dropout_add_ln_fwd(
    input: Tensor,  # noqa: A002 - the published name
    gamma: Tensor,
    beta: Tensor | None,
    rowscale: Tensor | None,
    colscale: Tensor | None,
    x0_subset: Tensor | None,
    z_subset: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale_const: float,
    z_numrows: int,
    gen: torch.Generator | None,
    residual_in_fp32: bool,  # noqa: FBT001 - the published signature
    is_rms_norm: bool,  # noqa: FBT001 - the published signature
) -> list[Tensor | None]:
    """Normalise rows, by the formula at the top of this module.

    Args:
        input: (S, H) float.
        gamma: (H,) of the dtype of `input`, or float32.
        beta: (H,) of the dtype of `gamma`, or None for zeros.
        rowscale: (R,) of the dtype of `input`, or None for ones. Not looked at where there are subsets.
        colscale: (H,) of the dtype of `gamma`, or None for ones.
        x0_subset: (R,) int32, which row of `input` each row is, counted from 1; 0 for a row of zeros. None for all
            rows as they are, so that R = S.
        z_subset: (R,) int32, which row of z each row becomes, counted from 1; 0 for none. Goes with `x0_subset`.
        dropout_p: share of the elements of `input` that are set to zero, below 1; the others are divided by 1 - p.
        epsilon: at least 0.
        rowscale_const: in the place of `rowscale` for all rows where there are subsets.
        z_numrows: rows of z where there are subsets; not looked at otherwise.
        gen: where random numbers come from; None for torch's own.
        residual_in_fp32: whether x comes out as it was computed.
        is_rms_norm: whether the mean is left in.

    Returns:
        z: (R, H), or (z_numrows, H) with zeros in rows that no row becomes, in the dtype of `input`.
        x: (R, H) in the dtype of `input`, or in that of mu; None where it is `input` itself: without scales, subsets
            and dropout, and in the dtype of `input`.
        mask: (S, H) uint8, 1 for elements that were kept; None without dropout.
        mu: (R,) float32, or float64 where the input is.
        rsigma: (R,), as mu.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device or a number.
    """
    check(input, gamma, beta, rowscale, colscale, x0_subset, z_subset, dropout_p, epsilon)
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    x, mask = input.to(wide), None
    if dropout_p > 0:
        draws = torch.rand(input.shape, generator=gen, device=input.device, dtype=torch.float32)
        kept = draws >= dropout_p
        x, mask = torch.where(kept, x / (1 - dropout_p), 0.0), kept.to(torch.uint8)
    if x0_subset is not None:
        x = rowscale_const * _placed(x, x0_subset)
    elif rowscale is not None:
        x = x * rowscale.to(wide).unsqueeze(1)
    x = x if colscale is None else x * colscale.to(wide)
    mu = x.mean(1)
    centred = x if is_rms_norm else x - mu.unsqueeze(1)
    rsigma = torch.rsqrt(centred.square().mean(1) + epsilon)
    z = gamma.to(wide) * centred * rsigma.unsqueeze(1)
    z = z if beta is None else z + beta.to(wide)
    if z_subset is not None:
        # Row 0 takes the rows that become none.
        z = z.new_zeros(z_numrows + 1, z.shape[1]).index_copy(0, z_subset.long(), z)[1:]
    dtype = wide if residual_in_fp32 else input.dtype
    untouched = rowscale is colscale is x0_subset is mask is None and dtype == input.dtype
    return [z.to(input.dtype), None if untouched else x.to(dtype), mask, mu, rsigma]


def _placed(x: Tensor, places: Tensor) -> Tensor:
    """The row at each place, counted from 1, and zeros at 0; (S, H) and (R,) -> (R, H)."""
    return functional.pad(x, (0, 0, 1, 0))[places.long()]
