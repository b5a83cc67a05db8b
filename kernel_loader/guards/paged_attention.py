"""Guards of attention to caches in blocks: each is called with the function, and then as the function.

For `paged_attention_v1` and `paged_attention_v2` of `kernel_loader.bundles.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kernel_loader.guards.memory import is_whole, whole

# The arguments from query on, which are alike in both functions, as far as they are looked at here.
_NAMES: Final = (
    "query",
    "key_cache",
    "value_cache",
    "num_kv_heads",
    "scale",
    "block_tables",
    "seq_lens",
    "block_size",
    "max_seq_len",
    "alibi_slopes",
    "kv_cache_dtype",
)

# Bytes of shared memory beside scores and a query: sums of 4 warps for maxima, and for sums.
_SUMS: Final = 32


def whole_query(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """`query` may start anywhere and have any strides: it is copied where a build could not load it by vectors.

    Inside torch.compile it always is. What builds would compute wrongly is refused: ValueError for caches that do not
    start at a multiple of 16 bytes, or whose blocks lie at different distances; TypeError for an FP8 cache with a
    float32 query, which they read through float16.
    """
    query, keys, values = (_of(name, args, kwargs) for name in _NAMES[:3])
    is_seen = not torch.compiler.is_compiling()  # where memory is
    if keys.stride(0) != values.stride(0) or (is_seen and not (is_whole(keys) and is_whole(values))):
        raise ValueError("key_cache and value_cache: expected contiguous tensors that start at multiples of 16 bytes")
    if query.dtype == torch.float32 and _of("kv_cache_dtype", args, kwargs) != "auto":
        raise TypeError("query: expected bfloat16 or float16 with an FP8 cache, got float32; cast it")
    if not (is_whole(query, query.stride(0)) and query[:1].is_contiguous()):
        query = whole(query)
    if "query" in kwargs:
        kwargs = kwargs | {"query": query}
    else:
        place = _place(args)
        args = (*args[:place], query, *args[place + 1 :])
    function(*args, **kwargs)


def short_scores(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """A `max_seq_len` whose scores shared memory does not hold is refused: ValueError, instead of writing nothing.

    For `paged_attention_v1`, which keeps a float32 for each key of a sequence there.
    """
    query, size = _of("query", args, kwargs), _of("block_size", args, kwargs)
    most, longest = _shared_memory(query.device), _of("max_seq_len", args, kwargs)
    if most is not None and 4 * size * -(-longest // size) > most - _SUMS - query.shape[2] * query.itemsize:
        raise ValueError(
            f"max_seq_len: {longest} scores need more than the {most} bytes of shared memory of this device; call "
            "paged_attention_v2"
        )
    function(*args, **kwargs)


def no_keys(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Where `max_seq_len` is 0, `out`, the first argument, is zeros, and the function is not called.

    For `paged_attention_v2`, whose builds launch nothing for the partitions that are not there, and so fail in whatever
    is launched next.
    """
    if _of("max_seq_len", args, kwargs) > 0:
        function(*args, **kwargs)
    else:
        (args[0] if args else kwargs["out"]).zero_()


def _of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs[name] if name in kwargs else args[_place(args) + _NAMES.index(name)]


def _place(args: tuple[Any, ...]) -> int:
    """Where query is: behind `out`, or also behind the three that v2 alone has. The fifth of v1 is a number."""
    return 4 if len(args) > 4 and isinstance(args[4], Tensor) else 1


def _shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that a block may have; None where it is not known, or not looked at."""
    if device.type != "cuda":
        return None
    found: int | None = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    return found


# What torch._dynamo.assume_constant_result sets.
_shared_memory._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - Dynamo reads this name
