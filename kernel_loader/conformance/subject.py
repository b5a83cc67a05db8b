"""What is probed: a case with the function of a build and what it is held against, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from kernel_loader.conformance.compare import Difference, Skipped, compare
from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, positions_of, tensors_in
from kernel_loader.conformance.memory import copy_of

Status = Literal["passed", "failed", "skipped"]
Call = Callable[..., Any]


# Seeds of the inputs that are checked, and of those that a kernel sees before, after or instead of them.
SEED: Final = 0
OTHER_SEED: Final = 1


class Finding(NamedTuple):
    """What came of one probe.

    Attributes:
        entrypoint: of the bundle.
        case: name of the case.
        mode: "eager", "compile", "graph" or "backward".
        probe: what was looked at.
        status: "passed", "failed" or "skipped".
        detail: what is wrong, or why it was skipped.
        worst: the largest error as a share of what is tolerated, where outputs were compared.
    """

    entrypoint: str
    case: str
    mode: Mode
    probe: str
    status: Status
    detail: str = ""
    worst: float | None = None


class BuildError(Exception):
    """What a call of the loaded build raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause: Final = cause


def of_build(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - any structure
    """What a call of the loaded build returns.

    Raises:
        BuildError: it raised.
    """
    try:
        return call()
    except Skipped:
        raise
    except Exception as error:
        raise BuildError(error) from error


class Subject(NamedTuple):
    """A case, with what is called and what is right.

    Attributes:
        entry: what the entrypoint is held against.
        case: the call.
        function: the entrypoint of the loaded build.
        reference: that of the reference; None where the loaded build is the reference, which the formula is against.
        device: where inputs lie.
    """

    entry: Entry
    case: Case
    function: Call
    reference: Call | None
    device: torch.device

    @property
    def positions(self) -> dict[str, int]:
        """Parameter -> its position, by the signatures of the entrypoint and of the formula."""
        return positions_of(self.function, self.reference, self.entry.formula)

    def inputs(self, seed: int = SEED, device: torch.device | None = None) -> Inputs:
        """The arguments of the call."""
        return self.case.make(Draw(device or self.device, seed))

    def results(self, function: Call, inputs: Inputs) -> Any:  # noqa: ANN401 - any structure
        """What a call returns, and after it the arguments that it writes.

        Raises:
            BuildError: the call raised, and it is one of the loaded build.
        """
        if function is self.reference:
            return self.with_mutated(inputs.call(function), inputs)
        return self.with_mutated(of_build(lambda: inputs.call(function)), inputs)

    def written(self, inputs: Inputs) -> tuple[Any, ...]:
        """The arguments that the entrypoint writes."""
        positions = self.positions if self.entry.mutates else {}
        return tuple(inputs[inputs.place(key, positions)] for key in self.entry.mutates)

    def with_mutated(self, returned: Any, inputs: Inputs) -> Any:  # noqa: ANN401 - any structure
        """What was returned, in a form that can be compared, and after it the arguments that were written."""
        entry = self.entry
        if entry.canonical is not None:
            returned = entry.canonical(returned)
        return (returned, *self.written(inputs)) if entry.mutates else returned

    def want(self, inputs: Inputs) -> Any:  # noqa: ANN401 - any structure
        """What is right for the inputs. They are not written to."""
        own = inputs.map(copy_of)
        if self.reference is not None:
            return self.results(self.reference, own)
        right = own.call(self.entry.formula)
        if self.entry.canonical is None:
            return right
        return (self.entry.canonical(right[0]), *right[1:]) if self.entry.mutates else self.entry.canonical(right)

    def differs(self, got: Any, want: Any, inputs: Inputs) -> Difference:  # noqa: ANN401 - any structure
        """How far what came is from what is right."""
        return compare(got, want, self.entry.tolerance, None if self.reference is not None else self._dtypes(inputs))

    def _dtypes(self, inputs: Inputs) -> tuple[torch.dtype, ...]:
        """Those that outputs of floats may have: of an argument, named by one, or told by the entry."""
        given = [tensor.dtype for tensor in tensors_in(inputs) if tensor.dtype.is_floating_point]
        named = [value for value in (*inputs.args, *inputs.kwargs.values()) if isinstance(value, torch.dtype)]
        return tuple(dict.fromkeys((*given, *named, *self.entry.dtypes)))


def as_function(entrypoint: Any) -> Call:  # noqa: ANN401 - what a bundle holds
    """What is called: for the class of a layer its forward, whose first argument is the module."""
    is_layer = isinstance(entrypoint, type) and issubclass(entrypoint, nn.Module)
    function: Call = entrypoint.forward if is_layer else entrypoint
    return function
