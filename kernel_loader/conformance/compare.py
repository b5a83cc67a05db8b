"""Is what came the same as what is right?"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_loader.conformance.grid import Tolerance

_WIDE = torch.float64


class Skipped(Exception):  # noqa: N818 - no error
    """The probe cannot be made here."""


class Difference(NamedTuple):
    """How far off something is.

    Attributes:
        worst: the largest error as a share of what is tolerated; 0 for what is equal, infinite for what cannot be near.
        detail: what differs, for people; empty if all is within the tolerance.
    """

    worst: float
    detail: str = ""


def compare(
    got: Any,  # noqa: ANN401 - any structure
    want: Any,  # noqa: ANN401
    tolerance: Tolerance,
    dtypes: Collection[torch.dtype] | None = None,
) -> Difference:
    """Compare two structures, tensor by tensor and value by value. Tuples and lists are alike.

    Args:
        got: what came.
        want: what is right; tensors of floats in any dtype if `dtypes` says which are right, and in theirs otherwise.
        tolerance: how far an element may be off.
        dtypes: of what comes.
    """
    return _structures(got, want, tolerance, dtypes, "")


def _structures(
    got: Any,  # noqa: ANN401 - any structure
    want: Any,  # noqa: ANN401
    tolerance: Tolerance,
    dtypes: Collection[torch.dtype] | None,
    where: str,
) -> Difference:
    if isinstance(want, Tensor):
        found = (
            _tensors(got.detach(), want.detach(), tolerance, dtypes)
            if isinstance(got, Tensor)
            else Difference(math.inf, f"{_kind(got)} came, a tensor is right")
        )
        return found._replace(detail=f"{where}: {found.detail}") if found.detail and where else found
    if isinstance(want, (tuple, list, dict)):
        keys = list(want) if isinstance(want, dict) else list(range(len(want)))
        if isinstance(got, dict) != isinstance(want, dict) or not isinstance(got, (tuple, list, dict)):
            return Difference(math.inf, f"{where or 'the output'}: {_kind(got)} came, {_kind(want)} is right")
        if keys != (list(got) if isinstance(got, dict) else list(range(len(got)))):
            return Difference(math.inf, f"{where or 'the output'}: {len(got)} items came, {len(want)} are right")
        parts = [
            _structures(got[k], want[k], tolerance, dtypes, f"{where}[{k!r}]" if where else f"item {k!r}") for k in keys
        ]
        return max(parts, key=lambda part: (bool(part.detail), part.worst), default=Difference(0.0))
    if isinstance(got, Tensor) or got != want:
        return Difference(math.inf, f"{where or 'the output'}: {_kind(got)} came, {want!r} is right")
    return Difference(0.0)


def _kind(value: Any) -> str:  # noqa: ANN401 - any structure
    if isinstance(value, (Tensor, tuple, list, dict)):
        return f"a {type(value).__name__.lower()}"
    return repr(value)


def _tensors(got: Tensor, want: Tensor, tolerance: Tolerance, dtypes: Collection[torch.dtype] | None) -> Difference:
    if got.shape != want.shape:
        return Difference(math.inf, f"shape {tuple(got.shape)} came, {tuple(want.shape)} is right")
    if dtypes is None and got.dtype != want.dtype:
        return Difference(math.inf, f"{got.dtype} came, {want.dtype} is right")
    if dtypes is not None and got.dtype.is_floating_point and got.dtype not in (*dtypes, want.dtype):
        right = " or ".join(map(str, dtypes)) or str(want.dtype)
        return Difference(math.inf, f"{got.dtype} came, {right} is right")
    if got.device != want.device:
        return Difference(math.inf, f"it is on {got.device}, and {want.device} is right")
    if not got.numel():
        return Difference(0.0)
    if not (got.dtype.is_floating_point and want.dtype.is_floating_point):
        wrong = _whole(got) != _whole(want)
        return _elements(got, want, wrong, wrong.to(_WIDE) * math.inf)
    a, b = got.to(_WIDE), want.to(_WIDE)
    each = 2 * torch.finfo(got.dtype).eps if tolerance.each is None else tolerance.each
    finite = b.isfinite()
    square = torch.where(finite, b, 0.0).square()
    rms = (square.mean(-1, keepdim=True) if b.ndim else square).sqrt()
    allowed = tolerance.row * rms + each * b.abs() + tolerance.least + torch.finfo(got.dtype).tiny
    # What the dtype cannot hold is infinite.
    same = (a == b) | (a.isnan() & b.isnan()) | (a.isinf() & (a == b.to(got.dtype).to(_WIDE)))
    # Infinite where one is finite and the other not, or where the sum rounds to what the dtype cannot hold.
    share = torch.where(same, 0.0, torch.where(finite & a.isfinite(), (a - b).abs() / allowed, math.inf))
    return _elements(got, want, share > 1, share)


def _whole(tensor: Tensor) -> Tensor:
    """Numbers that can be compared: torch compares unsigned ones only with their own kind."""
    return tensor.to(torch.int64) if not tensor.dtype.is_floating_point else tensor


def _elements(got: Tensor, want: Tensor, wrong: Tensor, share: Tensor) -> Difference:
    share = share.nan_to_num(0.0, posinf=math.inf)
    worst = float(share.max())
    if not bool(wrong.any()):
        return Difference(worst)
    places = wrong.nonzero()
    place = tuple(int(index) for index in places[0])
    rows = len(torch.unique(places[:, :-1], dim=0)) if wrong.ndim > 1 else 0
    text = f"{len(places)} of {wrong.numel()} elements" + (f", in {rows} rows" if rows else "")
    far = "" if worst == math.inf else f"; up to {worst:.3g} times what is tolerated"
    first = f"first at {list(place)}: {got[place].item()!r} came, {want[place].item()!r} is right"
    return Difference(worst, f"{text} differ, {first}{far}")
