"""Is what came the same as what is right?"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Tolerance, tensors_in

_WIDE = torch.float64


class Difference(NamedTuple):
    """How far off something is.

    Attributes:
        worst: the largest error as a share of what is tolerated; 0 for what is equal, infinite for what cannot be near.
        detail: what differs, for people; empty if all is within the tolerance.
    """

    worst: float
    detail: str = ""


def compare(got: Any, want: Any, tolerance: Tolerance, *, same_dtype: bool) -> Difference:  # noqa: ANN401
    """Compare two structures, tensor by tensor and value by value.

    Args:
        got: what came.
        want: what is right, in any wider dtype unless `same_dtype`.
        tolerance: how far an element may be off.
        same_dtype: whether dtypes count.
    """
    ours, right = tensors_in(got), tensors_in(want)
    if len(ours) != len(right):
        return Difference(float("inf"), f"{len(ours)} tensors came, {len(right)} are right")
    if not right and not isinstance(want, (tuple, list, dict)):
        return Difference(0.0) if got == want else Difference(float("inf"), f"{got!r} came, {want!r} is right")
    worst = Difference(0.0)
    for number, (a, b) in enumerate(zip(ours, right, strict=True)):
        found = _tensors(a.detach(), b.detach(), tolerance, same_dtype=same_dtype)
        if found.detail and len(right) > 1:
            found = found._replace(detail=f"tensor {number}: {found.detail}")
        if found.worst > worst.worst or (found.detail and not worst.detail):
            worst = found
    return worst


def _tensors(got: Tensor, want: Tensor, tolerance: Tolerance, *, same_dtype: bool) -> Difference:
    if got.shape != want.shape:
        return Difference(float("inf"), f"shape {tuple(got.shape)} came, {tuple(want.shape)} is right")
    if same_dtype and got.dtype != want.dtype:
        return Difference(float("inf"), f"{got.dtype} came, {want.dtype} is right")
    if got.device != want.device:
        return Difference(float("inf"), f"it is on {got.device}, and {want.device} is right")
    if not got.numel():
        return Difference(0.0)
    if not (got.dtype.is_floating_point and want.dtype.is_floating_point):
        return _elements(got, want, got != want, (got != want).to(_WIDE) * float("inf"))
    a, b = got.to(_WIDE), want.to(_WIDE)
    each = 2 * torch.finfo(got.dtype).eps if tolerance.each is None else tolerance.each
    finite = b.isfinite()
    square = torch.where(finite, b, 0.0).square()
    rms = (square.mean(-1, keepdim=True) if b.ndim else square).sqrt()
    allowed = tolerance.row * rms + each * b.abs() + tolerance.least + torch.finfo(got.dtype).tiny
    same = (a == b) | (a.isnan() & b.isnan())
    # Infinite where one is finite and the other not, or where the sum rounds to what the dtype cannot hold.
    share = torch.where(same, 0.0, torch.where(finite & a.isfinite(), (a - b).abs() / allowed, float("inf")))
    return _elements(got, want, share > 1, share)


def _elements(got: Tensor, want: Tensor, wrong: Tensor, share: Tensor) -> Difference:
    share = share.nan_to_num(0.0, posinf=float("inf"))
    worst = float(share.max())
    if not bool(wrong.any()):
        return Difference(worst)
    places = wrong.nonzero()
    place = tuple(int(index) for index in places[0])
    rows = len(torch.unique(places[:, :-1], dim=0)) if wrong.ndim > 1 else 0
    text = f"{len(places)} of {wrong.numel()} elements" + (f", in {rows} rows" if rows else "")
    far = "" if worst == float("inf") else f"; up to {worst:.3g} times what is tolerated"
    first = f"first at {list(place)}: {got[place].item()!r} came, {want[place].item()!r} is right"
    return Difference(worst, f"{text} differ, {first}{far}")
