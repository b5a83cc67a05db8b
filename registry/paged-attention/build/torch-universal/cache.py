"""What goes into a cache, and is moved within it."""

import torch
from torch import Tensor

from ._ops import ops, qualified
from .formats import FLOATS, check_blocks, check_shape, check_whole, decode, encode, is_fp8, one_scale


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """Write keys and values of tokens to their slots, in place. Slot s is place s % block of block s // block.

    Args:
        key: (T, Hk, D) bfloat16, float16 or float32.
        value: the same.
        key_cache: (blocks, Hk, D / x, block, x): the same dtype, or uint8 for FP8.
        value_cache: (blocks, Hk, D, block), the same dtype as `key_cache`.
        slot_mapping: (T,) or fewer, whole numbers; a token whose slot is negative is left out, and so are those past
            the end.
        kv_cache_dtype: "auto" for the dtype of `key`; "fp8" or "fp8_e4m3" for e4m3(x / scale).
        k_scale: one float32; not looked at for "auto".
        v_scale: the same.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, or a slot that the cache has not.
    """
    heads, dim, x = _check(key, value, slot_mapping, key_cache, 5)
    size = key_cache.shape[3]
    check_shape("key_cache", key_cache, ("blocks", heads, dim // x, size, x))
    check_shape("value_cache", value_cache, (key_cache.shape[0], heads, dim, size))
    fp8 = is_fp8(kv_cache_dtype, {"key_cache": key_cache, "value_cache": value_cache}, key.dtype)
    scales = one_scale("k_scale", k_scale, key.device), one_scale("v_scale", v_scale, key.device)
    ops.reshape_and_cache.default(key_cache, value_cache, key, value, slot_mapping, fp8, *scales)


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | float,
    v_scale: Tensor | float,
) -> None:
    """`reshape_and_cache` to caches (blocks, block, Hk, D)."""
    heads, dim, _ = _check(key, value, slot_mapping, key_cache, 4)
    check_shape("key_cache", key_cache, ("blocks", "block", heads, dim))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    fp8 = is_fp8(kv_cache_dtype, {"key_cache": key_cache, "value_cache": value_cache}, key.dtype)
    scales = one_scale("k_scale", k_scale, key.device), one_scale("v_scale", v_scale, key.device)
    ops.reshape_and_cache_flash.default(key_cache, value_cache, key, value, slot_mapping, fp8, *scales)


def copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks within each cache, in place. What is written is what stood there before the call.

    Args:
        key_caches: one a layer, (blocks, ...), each of its own memory.
        value_caches: as many.
        block_mapping: (n, 2) whole numbers: from which block to which.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, or a block that is not there.
    """
    if len(key_caches) != len(value_caches):
        raise ValueError(f"value_caches: expected {len(key_caches)}, as there are key_caches, got {len(value_caches)}")
    check_whole("block_mapping", block_mapping, ("n", 2))
    if key_caches:
        ops.copy_blocks.default(key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copy blocks of one cache to another, which may be on another device, in place.

    Args:
        src: (blocks, ...).
        dst: (blocks, ...) of the same dtype and shape of blocks.
        block_mapping: (n, 2) whole numbers on the CPU: from which block of `src` to which of `dst`.

    Raises:
        TypeError: a dtype.
        ValueError: a shape, a device, or a block that is not there.
    """
    check_whole("block_mapping", block_mapping, ("n", 2))
    if block_mapping.device.type != "cpu":
        raise ValueError(f"block_mapping: expected on the CPU, got {block_mapping.device}")
    if dst.dtype != src.dtype:
        raise TypeError(f"dst: expected {src.dtype}, as src is, got {dst.dtype}")
    check_shape("dst", dst, ("blocks", *src.shape[1:]))
    ops.swap_blocks.default(dst, src, block_mapping)


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:  # noqa: A002
    """Write `input` to `output` as e4m3 codes, or the other way round; the uint8 tensor is the one of codes.

    Args:
        output: uint8: e4m3(input / scale). Or bfloat16, float16 or float32: input * scale.
        input: of the other kind, in the same shape.
        scale: of all elements.
        kv_dtype: "fp8" or "fp8_e4m3".

    Raises:
        TypeError: not one uint8 tensor and one of floats.
        ValueError: a shape, or `kv_dtype`.
    """
    if kv_dtype not in ("fp8", "fp8_e4m3"):
        raise ValueError(f'kv_dtype: expected "fp8" or "fp8_e4m3", got {kv_dtype!r}')
    codes, floats = (output, input) if output.dtype == torch.uint8 else (input, output)
    if codes.dtype != torch.uint8 or floats.dtype not in FLOATS:
        raise TypeError(
            f"output and input: expected uint8 and bfloat16, float16 or float32, got {output.dtype} and {input.dtype}"
        )
    check_shape("output", output, tuple(input.shape))
    ops.convert_fp8.default(output, input, float(scale))


def _check(key: Tensor, value: Tensor, slots: Tensor, cache: Tensor, ndim: int) -> tuple[int, int, int]:
    """Heads, dim, and the last size of the cache of keys."""
    if key.dtype not in FLOATS:
        raise TypeError(f"key: expected bfloat16, float16 or float32, got {key.dtype}")
    if value.dtype != key.dtype:
        raise TypeError(f"value: expected {key.dtype}, as key is, got {value.dtype}")
    check_shape("key", key, ("tokens", "heads", "dim"))
    check_shape("value", value, tuple(key.shape))
    check_whole("slot_mapping", slots, ("tokens",))
    if slots.shape[0] > key.shape[0]:
        raise ValueError(f"slot_mapping: expected at most {key.shape[0]} slots, one a token, got {slots.shape[0]}")
    if cache.ndim != ndim:
        raise ValueError(f"key_cache: expected {ndim} dimensions, got shape {tuple(cache.shape)}")
    x = cache.shape[-1]
    if ndim == 5 and (x < 1 or key.shape[2] % x):
        raise ValueError(f"key_cache: expected a last dimension that divides {key.shape[2]}, got {tuple(cache.shape)}")
    return key.shape[1], key.shape[2], x


def _placed(
    key: Tensor, value: Tensor, slots: Tensor, size: int, blocks: int, scales: tuple[Tensor, Tensor], *, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks, places in them, and what goes there, (n, Hk, D) each, of tokens that have a slot."""
    kept = slots >= 0
    slot = slots[kept].long()
    if len(slot) and int(slot.max()) >= blocks * size:
        raise ValueError(f"slot_mapping: expected slots below {blocks * size}, got {int(slot.max())}")
    k, v = key[: len(slots)][kept], value[: len(slots)][kept]
    if fp8:
        k, v = encode(k, scales[0]), encode(v, scales[1])
    return slot // size, slot % size, k, v


_WRITE = (
    "(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor key, Tensor value, Tensor slots, bool fp8, Tensor k_scale,"
    " Tensor v_scale) -> ()"
)


@torch.library.custom_op(qualified("reshape_and_cache"), mutates_args=("key_cache", "value_cache"), schema=_WRITE)
def _reshape_and_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    fp8: bool,  # noqa: FBT001 - as the schema has it
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    blocks, heads, parts, size, x = key_cache.shape
    block, place, k, v = _placed(key, value, slots, size, blocks, (k_scale, v_scale), fp8=fp8)
    key_cache[block, :, :, place] = k.view(len(k), heads, parts, x)
    value_cache[block, :, :, place] = v


@torch.library.custom_op(qualified("reshape_and_cache_flash"), mutates_args=("key_cache", "value_cache"), schema=_WRITE)
def _reshape_and_cache_flash(
    key_cache: Tensor,
    value_cache: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    fp8: bool,  # noqa: FBT001 - as the schema has it
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    blocks, size = key_cache.shape[:2]
    block, place, k, v = _placed(key, value, slots, size, blocks, (k_scale, v_scale), fp8=fp8)
    key_cache[block, place] = k
    value_cache[block, place] = v


@torch.library.custom_op(
    qualified("copy_blocks"),
    mutates_args=("key_caches", "value_caches"),
    schema="(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping) -> ()",
)
def _copy_blocks(key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor) -> None:
    source, target = block_mapping.long().unbind(1)
    for cache in (*key_caches, *value_caches):
        check_blocks("block_mapping", block_mapping, cache.shape[0])
        cache[target.to(cache.device)] = cache[source.to(cache.device)]


@torch.library.custom_op(
    qualified("swap_blocks"),
    mutates_args=("dst",),
    schema="(Tensor(a!) dst, Tensor src, Tensor block_mapping) -> ()",
)
def _swap_blocks(dst: Tensor, src: Tensor, block_mapping: Tensor) -> None:
    source, target = block_mapping.long().unbind(1)
    check_blocks("block_mapping", source, src.shape[0])
    check_blocks("block_mapping", target, dst.shape[0])
    dst[target.to(dst.device)] = src[source.to(src.device)].to(dst.device)


@torch.library.custom_op(
    qualified("convert_fp8"),
    mutates_args=("output",),
    schema="(Tensor(a!) output, Tensor input, float scale) -> ()",
)
def _convert_fp8(output: Tensor, input: Tensor, scale: float) -> None:  # noqa: A002 - the published name
    factor = torch.full((), scale, dtype=torch.float32, device=input.device)
    output.copy_(encode(input, factor) if output.dtype == torch.uint8 else decode(input, factor))


@_reshape_and_cache.register_fake
@_reshape_and_cache_flash.register_fake
@_copy_blocks.register_fake
@_swap_blocks.register_fake
@_convert_fp8.register_fake
def _(*arguments: object) -> None:
    pass
