"""What was fused in a model: where it is remembered, and the weights of modules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor, nn

from kernel_loader.fusion.converter import Composition
from kernel_loader.fusion.hooks import ConvertedModule
from kernel_loader.fusion.operations import Rename
from kernel_loader.fusion.plan import Group

# On a parent: first child -> what was fused into it.
FUSED: Final = "_kernel_loader_fused"


@dataclass
class Fused:
    """What was fused into one module, and what brings it back.

    Attributes:
        children: names in the parent; the first is the fused module, the others are nn.Identity.
        originals: the modules that were there.
        conversion: from their weights to those of the fused module, by names in the parent.
        emptied: weights that are gone from `originals`, and come back by conversion, which is exact for them.
        links: buffers that no state dict has -> the same in the fused module, by names in the parent.
        training: the mode of the fused module when it was made.
        hooks: by which the parent speaks the original layout.
    """

    children: tuple[str, ...]
    originals: tuple[nn.Module, ...]
    conversion: Composition
    emptied: frozenset[str]
    links: dict[str, str]
    training: bool
    hooks: ConvertedModule = field(repr=False)


def fused_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, Fused]]:
    """All that was fused in a model, with the parents and their paths."""
    for path, parent in model.named_modules():
        for fused in vars(parent).get(FUSED, {}).values():
            yield path, parent, fused


def holds_fused(parent: nn.Module, fused: Fused) -> bool:
    """Whether something else was fused within a fused module."""
    return any(True for _ in fused_in(parent.get_submodule(fused.children[0])))


def state_of(module: nn.Module, *, persistent: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that a state dict has, under all their names; or the buffers that it has not."""
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if persistent:
            for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
                yield prefix + name, parameter
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            if persistent is (name not in part._non_persistent_buffers_set):  # noqa: SLF001 - nothing else tells
                yield prefix + name, buffer


def gone(
    children: Sequence[str], originals: Sequence[nn.Module], stay: frozenset[int]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are not part of the fused one, with their paths in the parent."""
    for child, original in zip(children, originals, strict=True):
        yield from ((path, part) for path, part in original.named_modules(prefix=child) if id(part) not in stay)


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor the parameter or buffer of a name, whatever is there."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    held = owner._parameters if leaf in owner._parameters else owner._buffers  # noqa: SLF001
    held[leaf] = tensor  # type: ignore[assignment]


def renames(group: Group) -> bool:
    """Whether tensors stay what they are."""
    return all(isinstance(operation, Rename) for converter in group.converters for operation in converter.operations)
