"""What stands in a cache: elements of the dtype of the keys, or e4m3 codes with one scale."""

from typing import Final

import torch
from torch import Tensor

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32)

_FP8_NAMES: Final = ("fp8", "fp8_e4m3")
_LARGEST: Final = 448.0


def is_fp8(kv_cache_dtype: str, caches: dict[str, Tensor], dtype: torch.dtype) -> bool:
    """Whether caches hold e4m3 codes.

    Raises:
        TypeError: a cache is not of the dtype that the name says.
        ValueError: the name.
    """
    fp8 = kv_cache_dtype in _FP8_NAMES
    if not fp8 and kv_cache_dtype != "auto":
        raise ValueError(f'kv_cache_dtype: expected "auto", "fp8" or "fp8_e4m3", got {kv_cache_dtype!r}')
    wanted = torch.uint8 if fp8 else dtype
    for name, cache in caches.items():
        if cache.dtype != wanted:
            raise TypeError(f"{name}: expected {wanted} for kv_cache_dtype {kv_cache_dtype!r}, got {cache.dtype}")
    return fp8


def encode(x: Tensor, scale: Tensor) -> Tensor:
    """uint8 codes of e4m3(x / scale), in float32; what is too large becomes 448."""
    return (x.float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    """Code * scale, float32."""
    return codes.view(torch.float8_e4m3fn).float() * scale


def one_scale(name: str, scale: Tensor | float, device: torch.device) -> Tensor:
    """The scale as one float32 on the device."""
    if not isinstance(scale, Tensor):
        return torch.full((), float(scale), dtype=torch.float32, device=device)
    if scale.numel() != 1:
        raise ValueError(f"{name}: expected one element, got shape {tuple(scale.shape)}")
    return scale.to(device, torch.float32).reshape(())


def check_whole(name: str, x: Tensor, shape: tuple[int | str, ...]) -> None:
    """`x` holds whole numbers in this shape; a name stands for any size."""
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    check_shape(name, x, shape)


def check_shape(name: str, x: Tensor, shape: tuple[int | str, ...]) -> None:
    """`x` has this shape; a name stands for any size."""
    fits = x.ndim == len(shape) and all(
        isinstance(want, str) or want == got for want, got in zip(shape, x.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name}: expected shape ({', '.join(map(str, shape))}), got {tuple(x.shape)}")


def check_blocks(name: str, numbers: Tensor, count: int) -> None:
    """The numbers are of blocks that are there."""
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(
            f"{name}: expected blocks from 0 to {count - 1}, got {int(numbers.min())} to {int(numbers.max())}"
        )
