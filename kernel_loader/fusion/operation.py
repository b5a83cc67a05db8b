"""What an operation on weights is, and what all of them have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernel_loader.errors import FusionError


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor: what can be known of it before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """That of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        count = self.dtype.itemsize
        for side in self.shape:
            count *= side
        return count

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_int, value))


# Annotations of the arguments of operations, and whether a value is of that kind.
_KINDS: Final[dict[str, Callable[[object], bool]]] = {
    "int": _is_int,
    "bool": lambda value: isinstance(value, bool),
    "None": lambda value: value is None,
    "torch.dtype": lambda value: isinstance(value, torch.dtype),
    "tuple[int, ...]": _are_ints,
    "tuple[int, int]": _are_ints,
}


@dataclass(frozen=True)
class Operation(ABC):
    """Tensors in, tensors out, and a way back."""

    @property
    def exact(self) -> bool:
        """Whether `inverse().apply(apply(x))` is x, bit for bit, for all x that are taken."""
        return True

    @abstractmethod
    def inverse(self) -> Operation:
        """The operation that leads back; its inverse equals this one."""

    @abstractmethod
    def targets(self, sources: int) -> int | None:
        """How many tensors it makes of so many; None where the tensors themselves say.

        Raises:
            FusionError: it does not take so many.
        """

    def __post_init__(self, *_: object) -> None:
        """Check that arguments are what their annotations say; a list stands for a tuple.

        Raises:
            FusionError: one is not.
        """
        for each in fields(self):
            kind, value = str(each.type), getattr(self, each.name)
            if kind.startswith("tuple") and isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, each.name, value)
            if not any(_KINDS[one](value) for one in kind.split(" | ")):
                problem = f"{type(self).__name__}: expected {each.name} of the kind {kind}, got {value!r}"
                raise FusionError((problem,), "Correct the operation.")

    def bound(self, sources: int | None, targets: int | None) -> Operation:  # noqa: ARG002 - for those that need them
        """The operation, told how many tensors go in and come out (None: not known)."""
        return self

    def shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """What `apply` makes of tensors of these shapes and dtypes.

        Raises:
            FusionError: it does not take them.
        """
        self.targets(len(specs))
        return self._shapes(specs)

    def apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results, in order.

        Raises:
            FusionError: the number, shapes, dtypes or devices of the tensors.
        """
        self.shapes([TensorSpec.of(tensor) for tensor in tensors])
        if len(devices := {str(tensor.device) for tensor in tensors}) > 1:
            raise self.refuses("tensors on one device", ", ".join(sorted(devices)), "Bring them to one device.")
        with torch.no_grad():
            return self._apply(tensors)

    @abstractmethod
    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]: ...

    @abstractmethod
    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def refuses(self, expected: object, got: object, advice: str | None = None) -> FusionError:
        """The error that says what it would have taken."""
        problem = f"{self}: expected {expected}, got {got}"
        return FusionError((problem,), advice) if advice else FusionError((problem,))

    def axis(self, dim: int, ndim: int, *, field: str = "dim") -> int:
        """A dimension, counted from the front."""
        if not -ndim <= dim < ndim:
            raise self.refuses(f"a tensor that has dimension {field}={dim}", f"one of {ndim} dimensions")
        return dim % ndim

    def alike(self, specs: Iterable[TensorSpec], but: int | None = None) -> None:
        """Refuse tensors that are not of one dtype and shape, dimension `but` excepted."""
        specs = list(specs)
        kinds = {(spec.dtype, *(side for i, side in enumerate(spec.shape) if i != but)) for spec in specs}
        if len(kinds) > 1 or len({len(spec.shape) for spec in specs}) > 1:
            along = "" if but is None else f" but for dimension {but}"
            raise self.refuses(f"tensors of one dtype and shape{along}", ", ".join(map(str, specs)))


class Each(Operation):
    """An operation that does the same to every tensor."""

    def targets(self, sources: int) -> int | None:
        """As many."""
        return sources

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        return [self._shape(spec) for spec in specs]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self._one(tensor) for tensor in tensors]

    @abstractmethod
    def _shape(self, spec: TensorSpec) -> TensorSpec: ...

    @abstractmethod
    def _one(self, tensor: Tensor) -> Tensor: ...


class ToOne(Operation):
    """An operation that makes one tensor of several."""

    def targets(self, sources: int) -> int | None:
        """One."""
        if sources < 1 or sources != (self._count or sources):
            raise self.refuses(f"{self._count or 'at least 1'} tensors", sources)
        return 1

    @property
    def _count(self) -> int | None:
        return None


class FromOne(Operation):
    """An operation that makes several tensors of one."""

    def targets(self, sources: int) -> int | None:
        """As many as are known beforehand."""
        if sources != 1:
            raise self.refuses("1 tensor", sources)
        return self._count

    @property
    def _count(self) -> int | None:
        return None


def as_bits(tensor: Tensor) -> Tensor:
    """A view with the same bits, where torch lacks most functions for a dtype: FP8, and wide unsigned integers."""
    dtype = tensor.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:
        return tensor.view(torch.uint8)
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}.get(dtype)
    return tensor if signed is None else tensor.view(signed)


def moved(tensors: Sequence[Tensor], move: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """What `move` makes of tensors of one dtype, whichever that is."""
    dtype = tensors[0].dtype
    return [tensor if tensor.dtype == dtype else tensor.view(dtype) for tensor in move([as_bits(t) for t in tensors])]


def owned(tensor: Tensor) -> Tensor:
    """A contiguous copy, which keeps no larger tensor alive."""
    return tensor.clone(memory_format=torch.contiguous_format)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether `dtype` has every value of `other`: its range, its precision, its smallest numbers."""
    if other in {dtype, torch.bool}:
        return True
    if dtype == torch.bool or other.is_complex or dtype.is_complex:
        return False
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        if not other.is_floating_point:
            # All integers up to 2 / eps are there, and the lowest, where it is negative, is a power of two.
            return torch.iinfo(other).max <= min(2 / limits.eps, limits.max)
        fewer = torch.finfo(other)
        return (
            limits.eps <= fewer.eps
            and limits.max >= fewer.max
            and limits.smallest_normal * limits.eps <= fewer.smallest_normal * fewer.eps
        )
    if other.is_floating_point:
        return False
    return torch.iinfo(dtype).min <= torch.iinfo(other).min and torch.iinfo(dtype).max >= torch.iinfo(other).max
