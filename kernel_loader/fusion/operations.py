"""What is done to weights between two layouts: one small class an operation, each with its inverse.

An operation takes tensors and gives tensors. `exact` says whether the inverse brings back every bit.

==============================  =========  =======================================  ==============================
operation                       tensors    what it does                             inverse
==============================  =========  =======================================  ==============================
Rename                          n -> n     nothing                                  Rename
Concatenate(dim, sizes)         n -> 1     end to end along `dim`                   Chunk(dim, sizes)
Stack(dim)                      n -> 1     along a new dimension                    Unstack(dim)
Interleave(dim, parts)          n -> 1     rows in turn along `dim`                 Deinterleave(dim, parts)
Transpose(dim0, dim1)           n -> n     two dimensions exchanged                 Transpose(dim0, dim1)
Permute(dims)                   n -> n     all dimensions in another order          Permute
Pad(dim, original, size)        n -> n     zeros at the end of `dim`                Unpad(dim, original, size)
Cast(dtype, back)               n -> n     from dtype `back` to `dtype`             Cast(back, dtype)
QuantizeBlockFP8(block_size)    1 -> 2     codes and scales; loses precision        DequantizeBlockFP8
==============================  =========  =======================================  ==============================

What holds for all of them:

- Results are contiguous, on the device of the sources, need no gradient, and share no memory with a source: writing one
  leaves the other alone. Rename alone hands on the tensor that it was given.
- Sources of one call have one dtype and lie on one device, QuantizeBlockFP8's inverse excepted: codes and scales.
- Where only bits are moved, any dtype will do, and NaNs keep their payload.
- `shapes` answers for `apply` without a tensor, and raises the same errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from kernel_loader.fusion.operation import Each, FromOne, Operation, TensorSpec, ToOne, as_bits, holds, moved, owned
from kernel_loader.quantization import dequantize_block_fp8, quantize_block_fp8


@dataclass(frozen=True)
class Rename(Each):
    """Nothing but other names. The tensors are handed on as they are: no copy, and tied ones stay tied."""

    def inverse(self) -> Rename:
        """Itself."""
        return self

    def _shape(self, spec: TensorSpec) -> TensorSpec:
        return spec

    def _one(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True)
class _Joint(Operation):
    """What Concatenate and Chunk share."""

    dim: int = 0
    sizes: tuple[int, ...] | None = None
    parts: int | None = None

    def __post_init__(self, *_: object) -> None:
        super().__post_init__()
        if self.sizes is not None:
            if min(self.sizes, default=-1) < 0 or self.parts not in {None, len(self.sizes)}:
                raise self.refuses("sizes that are not negative, and as many as parts", self.sizes)
            object.__setattr__(self, "parts", len(self.sizes))
        if self.parts is not None and self.parts < 1:
            raise self.refuses("at least one part", self.parts)

    @property
    def _count(self) -> int | None:
        return self.parts


@dataclass(frozen=True)
class Concatenate(_Joint, ToOne):
    """Tensors end to end along `dim`: gate and up, or the projections of grouped-query attention with `sizes`.

    Attributes:
        dim: of the sources.
        sizes: of the sources along `dim`; None where all are equal.
        parts: how many sources there are; a converter fills it in.
    """

    def inverse(self) -> Chunk:
        """`Chunk` into the same parts."""
        return Chunk(self.dim, self.sizes, self.parts)

    def bound(self, sources: int | None, targets: int | None) -> Operation:  # noqa: ARG002, D102
        return Concatenate(self.dim, self.sizes, self.parts or sources)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        dim = self.axis(self.dim, len(specs[0].shape))
        self.alike(specs, but=dim)
        found = tuple(spec.shape[dim] for spec in specs)
        if self.sizes is None and len(set(found)) > 1:
            raise self.refuses(
                f"equal sizes along dimension {dim}", found, f"Give the sizes: Concatenate({self.dim}, sizes={found})."
            )
        if self.sizes is not None and found != self.sizes:
            raise self.refuses(f"sizes {self.sizes} along dimension {dim}", found)
        first = specs[0]
        return [TensorSpec((*first.shape[:dim], sum(found), *first.shape[dim + 1 :]), first.dtype)]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return moved(tensors, lambda bits: [torch.cat(bits, self.dim)])


@dataclass(frozen=True)
class Chunk(_Joint, FromOne):
    """One tensor cut along `dim`.

    Attributes:
        dim: of the source.
        sizes: of the targets along `dim`, which together are the source's; None for `parts` equal ones.
        parts: how many targets there are; a converter fills it in.
    """

    def inverse(self) -> Concatenate:
        """`Concatenate` of the same parts."""
        return Concatenate(self.dim, self.sizes, self.parts)

    def bound(self, sources: int | None, targets: int | None) -> Operation:  # noqa: ARG002, D102
        return Chunk(self.dim, self.sizes, self.parts or targets)

    def _along(self, size: int, dim: int) -> tuple[int, ...]:
        if self.parts is None:
            raise self.refuses("sizes, or the number of parts", "neither", "Give sizes= or parts=.")
        if self.sizes is None and size % self.parts:
            raise self.refuses(f"a size along dimension {dim} that divides into {self.parts} parts", size)
        sizes = self.sizes or (size // self.parts,) * self.parts
        if sum(sizes) != size:
            raise self.refuses(f"size {sum(sizes)} along dimension {dim}", size)
        return sizes

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        ((shape, dtype),) = specs
        dim = self.axis(self.dim, len(shape))
        return [TensorSpec((*shape[:dim], size, *shape[dim + 1 :]), dtype) for size in self._along(shape[dim], dim)]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes = self._along(tensors[0].shape[self.dim], self.dim)
        return moved(tensors, lambda bits: [owned(part) for part in torch.split(bits[0], list(sizes), self.dim)])


@dataclass(frozen=True)
class Stack(ToOne):
    """Tensors of one shape along a new dimension `dim` of the result, such as the experts of a mixture.

    In a converter whose last `*` is not in the targets, it takes all that this `*` matches, ordered by number.
    """

    dim: int = 0

    def inverse(self) -> Unstack:
        """`Unstack` along the same dimension."""
        return Unstack(self.dim)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        self.alike(specs)
        shape, dtype = specs[0]
        dim = self.axis(self.dim, len(shape) + 1)
        return [TensorSpec((*shape[:dim], len(specs), *shape[dim:]), dtype)]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return moved(tensors, lambda bits: [torch.stack(bits, self.dim)])


@dataclass(frozen=True)
class Unstack(FromOne):
    """One tensor taken apart along `dim`, which the targets lack. There are as many targets as `dim` is long."""

    dim: int = 0

    def inverse(self) -> Stack:
        """`Stack` along the same dimension."""
        return Stack(self.dim)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        ((shape, dtype),) = specs
        dim = self.axis(self.dim, len(shape))
        if not shape[dim]:
            raise self.refuses(f"at least one tensor along dimension {dim}", TensorSpec(shape, dtype))
        return [TensorSpec((*shape[:dim], *shape[dim + 1 :]), dtype)] * shape[dim]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return moved(tensors, lambda bits: [owned(part) for part in bits[0].unbind(self.dim)])


@dataclass(frozen=True)
class _InTurn(Operation):
    """What Interleave and Deinterleave share."""

    dim: int = 0
    parts: int = 2

    def __post_init__(self, *_: object) -> None:
        super().__post_init__()
        if self.parts < 1:
            raise self.refuses("at least one part", self.parts)

    @property
    def _count(self) -> int | None:
        return self.parts


@dataclass(frozen=True)
class Interleave(_InTurn, ToOne):
    """Rows of the sources in turn: the i-th along `dim` of source s becomes the (parts * i + s)-th.

    With gate and up it is the layout of GPT-OSS: gate at `[..., ::2]`, up at `[..., 1::2]`.
    """

    def inverse(self) -> Deinterleave:
        """`Deinterleave` into the same parts."""
        return Deinterleave(self.dim, self.parts)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        self.alike(specs)
        shape, dtype = specs[0]
        dim = self.axis(self.dim, len(shape))
        return [TensorSpec((*shape[:dim], shape[dim] * self.parts, *shape[dim + 1 :]), dtype)]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        dim = self.dim % tensors[0].ndim
        return moved(tensors, lambda bits: [torch.stack(bits, dim + 1).flatten(dim, dim + 1)])


@dataclass(frozen=True)
class Deinterleave(_InTurn, FromOne):
    """Every `parts`-th row along `dim`, beginning with the first, the second, ...: one target each."""

    def inverse(self) -> Interleave:
        """`Interleave` of the same parts."""
        return Interleave(self.dim, self.parts)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        ((shape, dtype),) = specs
        dim = self.axis(self.dim, len(shape))
        if shape[dim] % self.parts:
            raise self.refuses(f"a size along dimension {dim} that divides by {self.parts}", shape[dim])
        return [TensorSpec((*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]), dtype)] * self.parts

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        dim = self.dim % tensors[0].ndim
        rows = tensors[0].shape[dim] // self.parts
        return moved(
            tensors,
            lambda bits: [owned(part) for part in torch.unflatten(bits[0], dim, (rows, self.parts)).unbind(dim + 1)],
        )


@dataclass(frozen=True)
class Transpose(Each):
    """Two dimensions exchanged, and laid out anew."""

    dim0: int = -2
    dim1: int = -1

    def inverse(self) -> Transpose:
        """Itself."""
        return self

    def _shape(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(tuple(spec.shape[dim] for dim in self.order(len(spec.shape))), spec.dtype)

    def order(self, ndim: int) -> tuple[int, ...]:
        """For each dimension of a target that has `ndim`, which one of the source it is."""
        first, second = self.axis(self.dim0, ndim, field="dim0"), self.axis(self.dim1, ndim, field="dim1")
        return tuple({first: second, second: first}.get(dim, dim) for dim in range(ndim))

    def _one(self, tensor: Tensor) -> Tensor:
        return moved([tensor], lambda bits: [owned(bits[0].transpose(self.dim0, self.dim1))])[0]


@dataclass(frozen=True)
class Permute(Each):
    """All dimensions in another order, and laid out anew: dimension i of the result is `dims[i]` of the source."""

    dims: tuple[int, ...]

    def __post_init__(self, *_: object) -> None:
        super().__post_init__()
        if sorted(self.dims) != list(range(len(self.dims))):
            raise self.refuses("every dimension from 0 on once", self.dims)

    def inverse(self) -> Permute:
        """The order that undoes this one."""
        return Permute(tuple(sorted(range(len(self.dims)), key=self.dims.__getitem__)))

    def _shape(self, spec: TensorSpec) -> TensorSpec:
        if len(spec.shape) != len(self.dims):
            raise self.refuses(f"a tensor of {len(self.dims)} dimensions", spec)
        return TensorSpec(tuple(spec.shape[dim] for dim in self.order(len(spec.shape))), spec.dtype)

    def order(self, ndim: int) -> tuple[int, ...]:  # noqa: ARG002 - as that of Transpose
        """For each dimension of the target, which one of the source it is."""
        return self.dims

    def _one(self, tensor: Tensor) -> Tensor:
        return moved([tensor], lambda bits: [owned(bits[0].permute(self.dims))])[0]


@dataclass(frozen=True)
class _Margin(Each):
    """What Pad and Unpad share: the size along `dim` without and with the padding. `multiple` rounds the former up."""

    dim: int
    original: int
    size: int = -1
    multiple: InitVar[int | None] = None

    def __post_init__(self, multiple: object, *_: object) -> None:
        super().__post_init__()
        if multiple is not None and not isinstance(multiple, int):
            raise self.refuses("a whole number as multiple", multiple)
        if multiple is not None and (self.size != -1 or multiple < 1):
            raise self.refuses("a size, or a positive multiple to round up to", f"multiple={multiple}")
        if multiple is not None:
            object.__setattr__(self, "size", -(-self.original // multiple) * multiple)
        if not 0 <= self.original <= self.size:
            raise self.refuses("a padded size (size= or multiple=) that is not below the original one", self.size)

    def _resized(self, spec: TensorSpec, taken: int, given: int) -> TensorSpec:
        dim = self.axis(self.dim, len(spec.shape))
        if spec.shape[dim] != taken:
            raise self.refuses(f"size {taken} along dimension {dim}", spec)
        return TensorSpec((*spec.shape[:dim], given, *spec.shape[dim + 1 :]), spec.dtype)


@dataclass(frozen=True)
class Pad(_Margin):
    """Zeros at the end of `dim`: `Pad(0, original=1000, multiple=128)` is `Pad(0, 1000, 1024)`.

    Attributes:
        dim: of source and target.
        original: size along `dim` before, which the way back needs.
        size: size along `dim` after.
    """

    def inverse(self) -> Unpad:
        """`Unpad` to the original size."""
        return Unpad(self.dim, self.original, self.size)

    def _shape(self, spec: TensorSpec) -> TensorSpec:
        return self._resized(spec, self.original, self.size)

    def _one(self, tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        shape[self.dim] = self.size
        (padded,) = moved([tensor], lambda bits: [bits[0].new_zeros(shape)])
        as_bits(padded).narrow(self.dim, 0, self.original).copy_(as_bits(tensor))
        return padded


@dataclass(frozen=True)
class Unpad(_Margin):
    """The padding of `Pad` taken off. Only zeros are: anything else would be lost, and is an error."""

    def inverse(self) -> Pad:
        """`Pad` to the same size."""
        return Pad(self.dim, self.original, self.size)

    def _shape(self, spec: TensorSpec) -> TensorSpec:
        return self._resized(spec, self.size, self.original)

    def _one(self, tensor: Tensor) -> Tensor:
        padding = tensor.narrow(self.dim, self.original, self.size - self.original).contiguous()
        # Bits, as a zero with a sign would not come back either. A meta tensor has none.
        if padding.numel() and not padding.is_meta and bool(padding.view(torch.uint8).any()):
            raise self.refuses("padding of zeros", "other values in it", "Set the padding to zero first.")
        return moved([tensor], lambda bits: [owned(bits[0].narrow(self.dim, 0, self.original))])[0]


@dataclass(frozen=True)
class Cast(Each):
    """Another dtype: `dtype`, of tensors of dtype `back`.

    Exact where `dtype` has every value of `back`; NaNs come back as NaNs, perhaps with another payload.
    """

    dtype: torch.dtype
    back: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether `dtype` has every value of `back`."""
        return holds(self.dtype, self.back)

    def inverse(self) -> Cast:
        """The cast back."""
        return Cast(self.back, self.dtype)

    def _shape(self, spec: TensorSpec) -> TensorSpec:
        if spec.dtype != self.back:
            raise self.refuses(f"dtype {self.back}", spec)
        return TensorSpec(spec.shape, self.dtype)

    def _one(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype, copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class _BlockFP8(Operation):
    """What the two directions of block FP8 share; see `kernel_loader.quantization.quantize_block_fp8`."""

    block_size: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    ue8m0: bool = False

    def __post_init__(self, *_: object) -> None:
        super().__post_init__()
        sides: tuple[int, ...] = self.block_size
        if len(sides) != 2 or min(sides) < 1:
            raise self.refuses("two positive numbers as block_size", self.block_size)

    @property
    def exact(self) -> bool:
        """Never: a weight is rounded to codes, and codes are chosen anew when it is quantised again."""
        return False

    def scales_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales for codes (..., N, K): (..., ceil(N / bn), ceil(K / bk))."""
        if len(shape) < 2:
            raise self.refuses("shape (..., N, K)", shape)
        sides = zip(shape[-2:], self.block_size, strict=True)
        return (*shape[:-2], *(-(-side // block) for side, block in sides))


@dataclass(frozen=True)
class QuantizeBlockFP8(_BlockFP8, FromOne):
    """A weight as FP8 codes and scales, one a block. Rounds: what comes back is near, not equal.

    One weight (..., N, K) of dtype `dtype` gives codes (..., N, K) float8_e4m3fn and scales
    (..., ceil(N / bn), ceil(K / bk)) float32; with `ue8m0` the scales are powers of two.
    """

    @property
    def _count(self) -> int | None:
        return 2

    def inverse(self) -> DequantizeBlockFP8:
        """`DequantizeBlockFP8` to the same dtype."""
        return DequantizeBlockFP8(self.block_size, self.dtype, self.ue8m0)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        ((shape, dtype),) = specs
        if dtype != self.dtype or not dtype.is_floating_point:
            raise self.refuses(f"a floating-point weight, dtype {self.dtype}", specs[0], "Say which: dtype=.")
        return [TensorSpec(shape, torch.float8_e4m3fn), TensorSpec(self.scales_of(shape), torch.float32)]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(quantize_block_fp8(tensors[0], self.block_size, ue8m0=self.ue8m0))


@dataclass(frozen=True)
class DequantizeBlockFP8(_BlockFP8, ToOne):
    """Codes and scales as the weight that they stand for, in `dtype`: the inverse of `QuantizeBlockFP8`."""

    @property
    def _count(self) -> int | None:
        return 2

    def inverse(self) -> QuantizeBlockFP8:
        """`QuantizeBlockFP8` with the same blocks."""
        return QuantizeBlockFP8(self.block_size, self.dtype, self.ue8m0)

    def _shapes(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        codes, scales = specs
        if codes.dtype != torch.float8_e4m3fn or scales != (self.scales_of(codes.shape), torch.float32):
            raise self.refuses(
                "codes float8_e4m3fn (..., N, K) and scales float32 (..., ceil(N / bn), ceil(K / bk))",
                f"{codes} and {scales}",
            )
        return [TensorSpec(codes.shape, self.dtype)]

    def _apply(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [dequantize_block_fp8(tensors[0], tensors[1], self.block_size, self.dtype)]
