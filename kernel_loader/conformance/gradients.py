"""Gradients of a build against those of the formula in float64."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_loader.conformance.compare import Difference, Skipped, compare
from kernel_loader.conformance.grid import Draw, tensors_in
from kernel_loader.conformance.memory import GuardedMemory, copy_of, same, soil
from kernel_loader.conformance.roof import synchronise
from kernel_loader.conformance.subject import OTHER_SEED, SEED, Subject, of_build


def gradient(subject: Subject) -> Difference:
    """Gradients are those of the formula in float64."""
    return _gradients(subject, _dense)


def expanded_gradient(subject: Subject) -> Difference:
    """Gradients are right for an upstream gradient that is one number expanded, as `sum()` makes it."""
    return _gradients(subject, lambda output, _: output.new_ones(()).expand(output.shape))


def sliced_gradient(subject: Subject) -> Difference:
    """Gradients are right for an upstream gradient that is part of a larger one, as `cat` makes it."""
    return _gradients(subject, _sliced)


def gradient_memory(subject: Subject) -> Difference:
    """Gradients are right in memory full of NaN, nothing is written outside of them, and inputs stay as they are."""
    memory = GuardedMemory()
    found = _gradients(subject, _dense, memory)
    damage = memory.damage()
    return Difference(math.inf, damage) if damage else found


def gradient_again(subject: Subject) -> Difference:
    """Gradients are right after others, and leave those alone."""
    earlier: list[Tensor] = []
    _gradients(subject, _dense, seed=OTHER_SEED, keep=earlier)
    kept = [copy_of(tensor) for tensor in earlier]
    found = _gradients(subject, _dense)
    if any(not same(a, b) for a, b in zip(earlier, kept, strict=True)):
        return Difference(math.inf, "the gradient of an earlier call was overwritten by a later one")
    return found


def _dense(output: Tensor, draw: Draw) -> Tensor:
    """An upstream gradient with another number for each element."""
    return draw.normal(*output.shape, dtype=output.dtype)


def _sliced(output: Tensor, draw: Draw) -> Tensor:
    """The same numbers, from the second element on of rows that hold three more."""
    above = _dense(output, draw)
    if not above.ndim:
        return above
    return above.new_ones(*above.shape[:-1], above.shape[-1] + 3)[..., 1:-2].copy_(above)


def _gradients(
    subject: Subject,
    upstream: Callable[[Tensor, Draw], Tensor],
    memory: GuardedMemory | None = None,
    seed: int = SEED,
    keep: list[Tensor] | None = None,
) -> Difference:
    """Compare the gradients for inputs of a seed. `keep` gets those of the build."""
    entry = subject.entry
    if not entry.gradients:
        raise Skipped("no gradient is promised")
    drawn = subject.inputs(seed)
    keys = drawn.tensors(entry.gradients, subject.positions)
    if not keys:
        raise Skipped("no argument of the case gets a gradient")
    own = memory.inputs(drawn) if memory is not None else drawn.map(copy_of)
    ours, theirs = own.replace(keys, _leaf), drawn.map(copy_of).replace(keys, _wide_leaf)
    want = _floats(theirs.call(entry.formula))
    soil(subject.device)
    with memory or contextlib.nullcontext():
        got = _floats(of_build(lambda: ours.call(subject.function)))
        if len(got) != len(want):
            return Difference(math.inf, f"{len(got)} tensors of floats came, {len(want)} are right")
        pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.requires_grad]
        if missing := [number for number, (a, _) in enumerate(pairs) if not a.requires_grad]:
            return Difference(math.inf, f"output {missing[0]} has no gradient")
        draw = Draw(subject.device, OTHER_SEED)
        above = [upstream(a, draw) for a, _ in pairs]
        given = [copy_of(g) for g in above]
        there = of_build(lambda: _grad([a for a, _ in pairs], [ours[key] for key in keys], above))
        synchronise(subject.device)
    right = _grad([b for _, b in pairs], [theirs[key] for key in keys], [g.to(torch.float64) for g in given])
    if keep is not None:
        keep += [gradient for gradient in there if gradient is not None]
    parts = (_of_argument(subject, *parts) for parts in zip(keys, there, right, strict=True))
    found = max(parts, key=lambda part: (bool(part.detail), part.worst), default=Difference(0.0))
    if not found.detail and any(not same(a, b) for a, b in zip(above, given, strict=True)):
        return Difference(math.inf, "the gradient from above, which may be another's too, was overwritten")
    return found


def _grad(outputs: list[Tensor], inputs: list[Tensor], above: list[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients as they come: `backward` would copy those that somebody else holds."""
    if not outputs or not inputs:
        return (None,) * len(inputs)
    return torch.autograd.grad(outputs, inputs, above, allow_unused=True)


def _of_argument(subject: Subject, key: int | str, there: Tensor | None, right: Tensor | None) -> Difference:
    """How far the gradient of an argument is from the right one."""
    name = f"argument {key}" if isinstance(key, int) else key
    if there is None:
        return Difference(0.0) if right is None else Difference(math.inf, f"{name} got no gradient")
    right = right if right is not None else torch.zeros_like(there)
    found = compare(there, right, subject.entry.gradient_tolerance or subject.entry.tolerance, (there.dtype,))
    return found._replace(detail=f"gradient of {name}: {found.detail}") if found.detail else found


def _floats(returned: Any) -> list[Tensor]:  # noqa: ANN401 - any structure
    return [output for output in tensors_in(returned) if output.dtype.is_floating_point]


def _leaf(value: Tensor) -> Tensor:
    return value.requires_grad_()


def _wide_leaf(value: Tensor) -> Tensor:
    return value.to(torch.float64).requires_grad_()
