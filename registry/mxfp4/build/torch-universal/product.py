"""The op that multiplies, in temporaries of bounded size."""

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from ._ops import ops, qualified

# No temporary of the op is larger than this, whatever the shapes; row numbers are not counted.
MAX_TEMPORARY_BYTES: Final = 64 * 1024 * 1024

# OCP Microscaling Formats (MX) v1.0: one exponent for 32 elements along K.
_GROUP: Final = 32

# e2m1 of OCP MX v1.0, by the four bits of the code: one of sign, two of exponent, one of mantissa.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def experts_product(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, hist: Tensor, routes: Tensor | None, k: int
) -> Tensor:
    """x[row of place] @ weight[expert of place].T + bias[expert], zeros past the places of experts.

    Args:
        x: (T, K) float.
        codes: (E, N, K / 2) uint8, two e2m1 codes a byte, the one with the lower k in the low four bits.
        scale: (E, N, K / 32) uint8, exponents.
        bias: (E, N) float32.
        hist: (E,) int32, places of each expert.
        routes: (R,) int32, the route at each place, whose row is route // k; None for row = place.
        k: routes of a row.

    Returns:
        (R, N) float32.
    """
    result: Tensor = ops.experts_product.default(x, codes, scale, bias, hist, routes, k)
    return result


def _empty_output(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, hist: Tensor, routes: Tensor | None, k: int
) -> Tensor:
    experts, n, packed = codes.shape
    if x.shape[1] != 2 * packed:
        raise ValueError(f"x: expected K = {2 * packed} to match w, got {tuple(x.shape)}")
    if k < 1:
        raise ValueError(f"routing_data: expected n_expts_act of at least one, got {k}")
    _check("bias", "", bias, torch.float32, (experts, n), x)
    _check("routing_data", "expt_hist ", hist, torch.int32, (experts,), x)
    _check("gather_indx", "src_indx ", routes, torch.int32, (routes.numel() if routes is not None else 0,), x)
    for name, tensor in (("w", codes), ("precision_config", scale)):
        if tensor.device != x.device:
            raise ValueError(f"{name}: expected on {x.device}, where x is, got {tensor.device}")
    places = x.shape[0] if routes is None else routes.shape[0]
    return torch.empty((places, n), dtype=torch.float32, device=x.device)


def _check(name: str, part: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], x: Tensor) -> None:
    if tensor is None:
        return
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: expected {part}in {dtype}, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected {part}of shape {shape}, got {tuple(tensor.shape)}")
    if tensor.device != x.device:
        raise ValueError(f"{name}: expected {part}on {x.device}, where x is, got {tensor.device}")


@torch.library.custom_op(
    qualified("experts_product"),
    mutates_args=(),
    schema="(Tensor x, Tensor codes, Tensor scale, Tensor? bias, Tensor hist, Tensor? routes, int k) -> Tensor",
)
def _experts_product(
    x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, hist: Tensor, routes: Tensor | None, k: int
) -> Tensor:
    out = _empty_output(x, codes, scale, bias, hist, routes, k).zero_()
    side = max(_GROUP, math.isqrt(MAX_TEMPORARY_BYTES // 8) // _GROUP * _GROUP)
    first = 0
    for expert, count in enumerate(hist.tolist()):
        last = first + count
        if count < 0 or last > out.shape[0]:
            raise ValueError(
                f"routing_data: expected expt_hist[{expert}] within 0 and {out.shape[0] - first}, the places left of "
                f"{out.shape[0]}, got {count}"
            )
        for r0, r1 in _spans(first, last, side):
            rows = _rows(r0, r1, routes, k, x)
            for n0, n1 in _spans(0, codes.shape[1], side):
                tile = out[r0:r1, n0:n1]
                for k0, k1 in _spans(0, x.shape[1], side):
                    part = x[rows, k0:k1].to(torch.float32)
                    tile.addmm_(part, _weight(codes[expert], scale[expert], n0, n1, k0, k1).t())
                if bias is not None:
                    tile += bias[expert, n0:n1]
        first = last
    return out


_experts_product.register_fake(_empty_output)


def _rows(first: int, last: int, routes: Tensor | None, k: int, x: Tensor) -> Tensor:
    """Rows of x for places first:last."""
    if routes is None:
        return torch.arange(first, last, device=x.device)
    rows = routes[first:last].long() // k
    low, high = (int(bound) for bound in rows.aminmax())
    if low < 0 or high >= x.shape[0]:
        raise ValueError(
            f"gather_indx: expected rows within 0 and {x.shape[0] - 1} at places {first}:{last}, got {low} to {high}"
        )
    return rows


def _weight(codes: Tensor, scale: Tensor, n0: int, n1: int, k0: int, k1: int) -> Tensor:
    """Rows n0:n1 and columns k0:k1 of a weight; k0 begins a group. (n, k) float32."""
    packed = codes[n0:n1, k0 // 2 : k1 // 2]
    table = torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)
    values = torch.empty((n1 - n0, k1 - k0), dtype=torch.float32, device=codes.device)
    values[:, 0::2] = table[(packed & 0xF).long()]
    values[:, 1::2] = table[(packed >> 4).long()]
    exponents = _real(scale[n0:n1, k0 // _GROUP : k1 // _GROUP])
    return torch.unflatten(values, 1, (-1, _GROUP)).mul_(exponents.unsqueeze(2)).flatten(1)


def _real(exponents: Tensor) -> Tensor:
    """2 ** (e - 127) in float32, 255 being NaN (OCP MX v1.0, E8M0)."""
    exponent = exponents.to(torch.int32)
    # e is the exponent field of the float32 itself, save at the ends: 2 ** -127 is subnormal there, and 255 with an
    # empty mantissa would be infinity.
    bits = (exponent << 23).masked_fill_(exponent == 0, 1 << 22).masked_fill_(exponent == 255, 0x7FC00000)
    return bits.view(torch.float32)


def _spans(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """start:stop in pieces of at most `step`."""
    return ((low, min(low + step, stop)) for low in range(start, stop, step))
