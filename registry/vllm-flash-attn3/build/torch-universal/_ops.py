"""The op namespace of this copy of the build."""

import functools
import re
from collections.abc import Callable
from typing import Any, Final

import torch

# Taken from the name this package was imported under, which carries the digest of its content: a fixed name would make
# a second version in the process overwrite the ops of the first.
NAMESPACE: Final = "_kl_" + re.sub(r"\W", "_", (__package__ or __name__).rpartition(".")[2])

ops: Final[Any] = getattr(torch.ops, NAMESPACE)


def qualified(name: str) -> str:
    """`name` in this build's op namespace, as `torch.library` wants it."""
    return f"{NAMESPACE}::{name}"


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an op whose dtypes are its own, whatever autocast says."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:  # noqa: ANN401 - those of the op
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*args)

    return call
