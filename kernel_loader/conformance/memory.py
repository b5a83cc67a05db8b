"""Memory that shows what a kernel does to it: filled with NaN before use, with canaries around every buffer.

What a kernel allocates through torch is given from a larger block: `empty` comes full of ones in every bit (NaN in each
float format, -1 in integers), and the bytes around a buffer are known, so that a store past its end is seen when they
are looked at. This reaches what ops of torch make for Python, Triton and C++ code, within custom ops too. What was
allocated before is not reached, nor what a library takes from the driver, nor a store further away than `PADDING`.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_loader.conformance.compare import Skipped
from kernel_loader.conformance.grid import Inputs, map_tensors, tensors_in

# Bytes before and after a buffer: a multiple of what allocators align to (512), so that addresses are as they would be.
PADDING: Final = 2048

# Bytes of the largest vector that a thread loads at a time.
_VECTOR: Final = 16
POISON: Final = 0xFF
CANARY: Final = 0xA5

_EMPTY: Final = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


class _Buffer(NamedTuple):
    what: str
    block: Tensor  # all its bytes, the padding included
    view: Tensor  # the tensor in the middle of it
    before: Tensor | None  # the bytes of an input as they were


class GuardedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """While this is active, what torch allocates is poisoned and guarded. `damage` tells what was overwritten."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._buffers: list[_Buffer] = []

    def input(self, tensor: Tensor, what: str) -> Tensor:
        """A copy of an input, of the same strides, in guarded memory; what lies between its elements is guarded too."""
        with torch.no_grad():
            block, view = _allocate(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
            _flat(view).copy_(_flat(tensor))
            self._buffers.append(_Buffer(what, block, view, block.clone()))
        return view

    def inputs(self, drawn: Inputs) -> Inputs:
        """Copies of all tensors of some arguments, likewise."""
        numbers = itertools.count()
        return drawn.map(lambda tensor: self.input(tensor, f"input {next(numbers)}"))

    def damage(self, mutated: tuple[Tensor, ...] = ()) -> str:
        """What was overwritten that should not have been; empty if nothing was.

        Args:
            mutated: inputs that the entrypoint writes. Only what lies around them counts.
        """
        buffers, self._buffers = self._buffers, []  # what is made here, within the mode, is of no interest
        found = []
        for buffer in buffers:
            if buffer.before is not None:
                if any(buffer.view is tensor for tensor in mutated):
                    _within(buffer.before, buffer.view).copy_(buffer.view)
                wrong = buffer.block != buffer.before
            else:
                wrong = buffer.block != CANARY
                wrong[PADDING : PADDING + _extent(buffer.view)] = False
            if (count := int(wrong.sum())) > 0:
                found.append(f"{buffer.what}: {_where(wrong, count, PADDING + _extent(buffer.view))}")
        self._buffers = buffers
        return "; ".join(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return self._inside(func, args, kwargs)
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs)) if _can_guard(tensor)}  # noqa: SLF001
        return map_tensors(result, lambda tensor: self._guarded(tensor, name, given))

    def _guarded(self, tensor: Tensor, name: str, given: set[int]) -> Tensor:
        """What an op made, in a block of its own; a view of what it was given, or that itself, stays as it is."""
        if not _can_guard(tensor) or tensor.untyped_storage()._cdata in given:  # noqa: SLF001
            return tensor
        block, view = _allocate(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if name in _EMPTY:
            block[PADDING : PADDING + _extent(view)].fill_(POISON)
        else:
            view.copy_(tensor)
        what = f"buffer {len(self._buffers)}, {name} {tuple(tensor.shape)} {tensor.dtype}"
        self._buffers.append(_Buffer(what, block, view, None))
        return view

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - an op of any library
        """Call a custom op so that what it allocates comes here too."""
        devices = {tensor.device.type for tensor in tensors_in((args, kwargs))}
        # An op is of the accelerator where one of its arguments is there.
        kinds = sorted(devices, key=lambda kind: kind == "cpu")
        key = getattr(torch._C.DispatchKey, kinds[0].upper(), None) if kinds else None  # noqa: SLF001
        if key is None or not hasattr(func, "redispatch"):
            return func(*args, **kwargs)
        with self:  # below this mode for the op itself, and above it for what it calls
            result = func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)  # noqa: SLF001
        if isinstance(result, list) and any(tensor is None for tensor in result):
            raise Skipped("torch cannot bring a list of tensors with none in some places past a mode of Python")
        return result


def soil(device: torch.device, nbytes: int = 1 << 26) -> None:
    """Leave NaN in the memory that the device's allocator gives next."""
    if device.type != "cpu":
        blocks = [torch.full((size,), POISON, dtype=torch.uint8, device=device) for size in (nbytes, 1 << 20, 1 << 12)]
        del blocks


def _can_guard(tensor: object) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and all(stride >= 0 for stride in tensor.stride())
    )


def _allocate(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """All bytes of a new block, and the tensor within it.

    The tensor has a storage of its own: autograd and kernels take offset 0 for its start. The block must outlive it.
    """
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - autograd takes the tensor for new, not for a view
        nbytes = _extent(like)
        block = torch.full((2 * PADDING + nbytes + -nbytes % 512,), CANARY, dtype=torch.uint8, device=device)
        view = torch.empty(0, dtype=dtype, device=device)
        if nbytes:
            start = block.data_ptr() + PADDING
            storage = torch._C._construct_storage_from_data_pointer(start, block.device, nbytes)  # noqa: SLF001
            view.set_(storage, 0, shape, stride)
        else:
            view = view.as_strided(shape, stride)
        return block, view


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


def _flat(tensor: Tensor) -> Tensor:
    """All memory from its first element to its last, what lies between them included."""
    return tensor.as_strided((_extent(tensor) // tensor.element_size(),), (1,))


def copy_of(tensor: Tensor) -> Tensor:
    """Equal values at the same strides, in memory of its own, as far from a multiple of 16 bytes."""
    with torch.no_grad():
        flat, off = _flat(tensor), tensor.data_ptr() % _VECTOR // tensor.itemsize
        copy = torch.empty(off + flat.numel(), dtype=flat.dtype, device=flat.device)
        copy[off:].copy_(flat)
        return copy.as_strided(tensor.shape, tensor.stride(), off)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same, NaN included."""
    return bool(((a == b) | (a != a) & (b != b)).all())  # noqa: PLR0124 - NaN


def _within(block: Tensor, like: Tensor) -> Tensor:
    """The tensor in the middle of a block."""
    middle = block[PADDING : PADDING + _extent(like)].view(like.dtype)
    return middle.as_strided(like.shape, like.stride())


def _where(wrong: Tensor, count: int, end: int) -> str:
    places = wrong.nonzero().flatten()
    first, last = int(places[0]), int(places[-1])
    if first >= end:
        return f"{count} bytes written past its end, up to {last - end + 1} beyond it"
    if last < PADDING:
        return f"{count} bytes written before its start"
    return f"{count} bytes of what should stay were changed, from byte {first - PADDING} on"
