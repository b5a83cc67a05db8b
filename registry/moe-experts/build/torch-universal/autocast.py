"""Ops whose dtypes are their own."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The implementation of an op whose dtypes are its own, whatever autocast says."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:  # noqa: ANN401 - those of the op
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*args)

    return call
