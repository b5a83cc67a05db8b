"""Memory that shows what a kernel does to it: filled with NaN before use, with canaries around every buffer.

What a kernel allocates through torch is given from a larger block: `empty` comes full of ones in every bit (NaN in each
float format, -1 in integers), and the bytes around a buffer are known, so that a store past its end is seen when they
are looked at. This reaches what Python, Triton and C++ code allocates with torch's factory functions, within custom ops
too. What a library allocates with cudaMalloc is not reached; neither is a store that goes further than `PADDING`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Bytes before and after a buffer: a multiple of what allocators align to (512), so that addresses are as they would be.
PADDING: Final = 2048
POISON: Final = 0xFF
CANARY: Final = 0xA5

_EMPTY: Final = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_FILLED: Final = frozenset(
    {"zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "full", "full_like", "new_full", "clone"}
)


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
            view.copy_(tensor)
            self._buffers.append(_Buffer(what, block, view, block.clone()))
        return view

    def damage(self, mutated: tuple[Tensor, ...] = ()) -> str:
        """What was overwritten that should not have been; empty if nothing was.

        Args:
            mutated: inputs that the entrypoint writes. Only what lies around them counts.
        """
        found = []
        for buffer in self._buffers:
            if buffer.before is not None:
                if any(buffer.view is tensor for tensor in mutated):
                    _within(buffer.before, buffer.view).copy_(buffer.view)
                wrong = buffer.block != buffer.before
            else:
                wrong = buffer.block != CANARY
                wrong[PADDING : PADDING + _extent(buffer.view)] = False
            if (count := int(wrong.sum())) > 0:
                found.append(f"{buffer.what}: {_where(wrong, count, PADDING + _extent(buffer.view))}")
        return "; ".join(found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return self._inside(func, args, kwargs)
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name not in _EMPTY | _FILLED or not _can_guard(result):
            return result
        block, view = _allocate(tuple(result.shape), result.stride(), result.dtype, result.device)
        if name in _EMPTY:
            block[PADDING : PADDING + _extent(view)].fill_(POISON)
        else:
            view.copy_(result)
        what = f"buffer {len(self._buffers)}, {name} {tuple(result.shape)} {result.dtype}"
        self._buffers.append(_Buffer(what, block, view, None))
        return view

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:  # noqa: ANN401 - an op of any library
        """Call a custom op so that what it allocates comes here too."""
        devices = [value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        key = getattr(torch._C.DispatchKey, devices[0].upper(), None) if devices else None  # noqa: SLF001
        if key is None or not hasattr(func, "redispatch"):
            return func(*args, **kwargs)
        with self:  # below this mode for the op itself, and above it for what it calls
            return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)  # noqa: SLF001


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
    """All bytes of a new block, and the tensor within it."""
    like = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - autograd takes the tensor for new, not for a view
        nbytes = _extent(like)
        block = torch.full((2 * PADDING + nbytes + -nbytes % 512,), CANARY, dtype=torch.uint8, device=device)
        return block, _within(block, like)


def _extent(tensor: Tensor) -> int:
    """Bytes from its first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + last) * tensor.element_size()


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
