"""The op namespace of this copy of the build."""

import re
from typing import Any, Final

import torch

# Taken from the name this package was imported under, which carries the digest of its content: a fixed name would make
# a second version in the process overwrite the ops of the first.
NAMESPACE: Final = "_kl_" + re.sub(r"\W", "_", (__package__ or __name__).rpartition(".")[2])

ops: Final[Any] = getattr(torch.ops, NAMESPACE)


def qualified(name: str) -> str:
    """`name` in this build's op namespace, as `torch.library` wants it."""
    return f"{NAMESPACE}::{name}"
