"""How far a fused model is from the model that it was made of, layer by layer."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernel_loader.errors import RequestError
from kernel_loader.fusion.fused import fused_in


class Difference(NamedTuple):
    """How outputs of one module differ, in float64: |a - b| of all elements of all float tensors, of all its calls.

    Attributes:
        module: its path; empty for the model itself.
        largest: of all elements; NaN where one of the two has NaN and the other has not.
        mean: likewise.
        scale: the largest finite magnitude in the output of the original.
    """

    module: str
    largest: float
    mean: float
    scale: float


class Parity(NamedTuple):
    """What `parity` found.

    Attributes:
        output: of the model.
        layers: of the modules that both models have and call, in the order in which the original calls them.
    """

    output: Difference
    layers: tuple[Difference, ...]

    @property
    def worst(self) -> Difference:
        """The layer with the largest difference as a share of its scale; NaN comes first."""
        return max(self.layers or (self.output,), key=_share)

    def __str__(self) -> str:
        return "\n".join(
            f"{d.module or '(output)'}: {d.largest:.3g} at most, {d.mean:.3g} on average, of {d.scale:.3g}"
            for d in (self.output, *self.layers)
        )


def parity(model: nn.Module, fused: nn.Module, inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> Parity:
    """Run a model and its fused counterpart on the same inputs, without gradients, and hold their layers together.

    Where modules became one, the last of them and the nn.Identity in its place give the same. Both models keep their
    mode: with dropout, call `eval` on them first. Each model gets a copy of the inputs.

    Args:
        model: the original, such as a copy from before `fuse`.
        fused: the other.
        inputs: a tensor, positional arguments, or arguments by name.

    Raises:
        RequestError: the outputs of the models have other structures or shapes.
    """
    one, theirs = _outputs(model, inputs)
    other, ours = _outputs(fused, inputs)
    whole = _difference("", one, other)
    if whole is None:
        detail = f"the models return {_described(one)} and {_described(other)}"
        raise RequestError(detail, "Give the model that the fused one was made of, and inputs for which it is float.")
    # The first of modules that became one computes what all of them did.
    moved = {
        f"{path}.{child}" if path else child
        for side in (model, fused)
        for path, _, fusion in fused_in(side)
        for child in fusion.children[:-1]
    }
    pairs = ((path, out, ours[path]) for path, out in theirs.items() if path in ours and path not in moved)
    return Parity(whole, tuple(d for path, a, b in pairs if (d := _difference(path, a, b)) is not None))


def _outputs(model: nn.Module, inputs: Any) -> tuple[list[Tensor], dict[str, list[Tensor]]]:  # noqa: ANN401
    """The tensors that a model returns, and those of each module of all calls, in the order of the first."""
    found: dict[str, list[Tensor]] = {}

    def noting(path: str) -> Any:  # noqa: ANN401 - a hook
        def note(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401, ARG001
            found.setdefault(path, []).extend(tensor.detach().clone() for tensor in _tensors(output))

        return note

    handles = [module.register_forward_hook(noting(path)) for path, module in model.named_modules() if path]
    inputs = _copied(inputs)  # a model may write into them, as into a cache
    try:
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            else:
                output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return _tensors(output), found


def _copied(value: Any) -> Any:  # noqa: ANN401 - whatever a model takes
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(part) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_copied(part) for part in value)
    return copy.deepcopy(value)


def _tensors(output: object) -> list[Tensor]:
    """All floating-point tensors of a structure, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    elif dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [tensor for part in output for tensor in _tensors(part)] if isinstance(output, tuple | list) else []


def _difference(path: str, one: list[Tensor], other: list[Tensor]) -> Difference | None:
    """None where there is nothing to compare."""
    if not one or [tensor.shape for tensor in one] != [tensor.shape for tensor in other]:
        return None
    a, b = (torch.cat([tensor.detach().cpu().double().flatten() for tensor in side]) for side in (one, other))
    if not a.numel():
        return Difference(path, 0.0, 0.0, 0.0)
    # Infinities of one sign are alike, and so are NaN in the same place.
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    finite = a[a.isfinite()].abs()
    return Difference(path, gap.max().item(), gap.mean().item(), finite.max().item() if finite.numel() else 0.0)


def _share(difference: Difference) -> float:
    if difference.largest != difference.largest:
        return float("inf")
    return difference.largest / difference.scale if difference.scale else difference.largest


def _described(tensors: list[Tensor]) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no float tensors"
