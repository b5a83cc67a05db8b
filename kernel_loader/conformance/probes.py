"""What is done to a kernel in each mode: small functions that call it and say what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernel_loader.conformance.compare import Difference, compare
from kernel_loader.conformance.grid import Case, Draw, Entry, Inputs, Mode, map_tensors, tensors_in
from kernel_loader.conformance.memory import GuardedMemory, soil
from kernel_loader.conformance.roof import synchronise

Status = Literal["passed", "failed", "skipped"]
Call = Callable[..., Any]

# What torch raises when the device has failed, in releases that tell it from other errors.
_DEVICE_ERROR: Final = getattr(torch, "AcceleratorError", ())

# Seeds of the inputs that are checked, and of those that a kernel sees before, after or instead of them.
_SEED: Final = 0
_OTHER_SEED: Final = 1


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


class Skipped(Exception):  # noqa: N818 - no error
    """The probe cannot be made here."""


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

    def inputs(self, seed: int = _SEED, device: torch.device | None = None) -> Inputs:
        """The arguments of the call."""
        return self.case.make(Draw(device or self.device, seed))

    def results(self, function: Call, inputs: Inputs) -> Any:  # noqa: ANN401 - any structure
        """What a call returns, and after it the arguments that it writes."""
        returned = inputs.call(function)
        entry = self.entry
        if entry.canonical is not None:
            returned = entry.canonical(returned)
        return (returned, *(inputs[key] for key in entry.mutates)) if entry.mutates else returned

    def want(self, inputs: Inputs) -> Any:  # noqa: ANN401 - any structure
        """What is right for the inputs. They are not written to."""
        own = inputs.map(_copy)
        if self.reference is not None:
            return self.results(self.reference, own)
        returned = own.call(self.entry.formula)
        return (
            self.entry.canonical(returned) if self.entry.canonical is not None and not self.entry.mutates else returned
        )

    def differs(self, got: Any, want: Any) -> Difference:  # noqa: ANN401 - any structure
        """How far what came is from what is right."""
        return compare(got, want, self.entry.tolerance, same_dtype=self.reference is not None)


def as_function(entrypoint: Any) -> Call:  # noqa: ANN401 - what a bundle holds
    """What is called: for the class of a layer its forward, whose first argument is the module."""
    is_layer = isinstance(entrypoint, type) and issubclass(entrypoint, nn.Module)
    function: Call = entrypoint.forward if is_layer else entrypoint
    return function


def probe(subject: Subject, mode: Mode) -> Iterator[Finding]:
    """All that is looked at in a mode, one finding each."""
    entry, case = subject.entry, subject.case
    for name, function in PROBES[mode].items():
        finding = Finding(entry.entrypoint, case.name, mode, name, "passed")
        if mode in entry.skip or mode not in case.modes:
            yield finding._replace(status="skipped", detail=entry.skip.get(mode, "the case is not for this mode"))
            continue
        try:
            difference = function(subject)
        except Skipped as skipped:
            yield finding._replace(status="skipped", detail=str(skipped))
        except Exception as error:  # noqa: BLE001 - whatever a kernel raises is a finding
            status, detail = _raised(error, subject)
            yield finding._replace(status=status, detail=detail)
        else:
            status = "failed" if difference.detail else "passed"
            yield finding._replace(status=status, detail=difference.detail, worst=difference.worst)


def _raised(error: Exception, subject: Subject) -> tuple[Status, str]:
    """What an error says of a build: that it is wrong, or that it refuses what it may."""
    may_refuse = subject.case.may_refuse if subject.reference is not None else ""
    if may_refuse and not isinstance(error, _DEVICE_ERROR):
        return "skipped", f"refused, as it may: {may_refuse}"
    lines = str(error).strip().splitlines() or [""]
    return "failed", f"raised {type(error).__name__}: {lines[0]}"


# --- eager --------------------------------------------------------------------------------------------------------


def _value(subject: Subject) -> Difference:
    """Outputs are right."""
    inputs = subject.inputs()
    want = subject.want(inputs)
    with torch.no_grad():
        return subject.differs(subject.results(subject.function, inputs), want)


def _memory(subject: Subject) -> Difference:
    """Outputs are right in memory full of NaN, nothing is written outside of them, and inputs stay as they are."""
    drawn = subject.inputs()
    want = subject.want(drawn)
    memory = GuardedMemory()
    names = iter(range(len(tensors_in(drawn))))
    inputs = drawn.map(lambda tensor: memory.input(tensor, f"input {next(names)}"))
    soil(subject.device)
    with torch.no_grad(), memory:
        got = subject.results(subject.function, inputs)
    synchronise(subject.device)
    written = tuple(tensor for key in subject.entry.mutates for tensor in tensors_in(inputs[key]))
    if damage := memory.damage(written):
        return Difference(float("inf"), damage)
    return subject.differs(got, want)


def _again(subject: Subject) -> Difference:
    """A call is right after others, and leaves their outputs alone."""
    inputs, others = subject.inputs(), subject.inputs(_OTHER_SEED)
    want = subject.want(inputs)
    with torch.no_grad():
        earlier = subject.results(subject.function, others)
        kept = map_tensors(earlier, _copy)
        got = subject.results(subject.function, inputs)
        synchronise(subject.device)
        if any(not _same(a, b) for a, b in zip(tensors_in(earlier), tensors_in(kept), strict=True)):
            return Difference(float("inf"), "the output of an earlier call was overwritten by a later one")
    return subject.differs(got, want)


def _stream(subject: Subject) -> Difference:
    """Outputs are right on a stream that is not the default one, and whose inputs come late."""
    if subject.device.type != "cuda":
        raise Skipped("streams are of CUDA and ROCm devices")
    drawn = subject.inputs()
    want = subject.want(drawn)
    inputs = drawn.map(_copy if subject.entry.mutates else _zeros)
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]  # torch's
    torch.cuda.synchronize(subject.device)
    with torch.no_grad(), torch.cuda.stream(stream):
        subject.results(subject.function, drawn.map(_copy))  # compiles, so that the next call is short
        # About 10 ms, in which a kernel on another stream would read zeros.
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
        for there, value in zip(tensors_in(inputs), tensors_in(drawn), strict=True):
            there.copy_(value)
        got = subject.results(subject.function, inputs)
    stream.synchronize()
    return subject.differs(got, want)


def _device(subject: Subject) -> Difference:
    """Outputs are right on a device that is not the current one."""
    count = torch.cuda.device_count() if subject.device.type == "cuda" else 0
    if count < 2:
        raise Skipped(f"there is {'one device' if count else 'no device beside the CPU'}")
    current = torch.cuda.current_device()
    inputs = subject.inputs(device=torch.device("cuda", (current + 1) % count))
    want = subject.want(inputs)
    with torch.no_grad(), torch.cuda.device(current):
        return subject.differs(subject.results(subject.function, inputs), want)


# --- compile ------------------------------------------------------------------------------------------------------


def _compile(subject: Subject) -> Difference:
    """torch.compile makes one graph of the call, whose outputs are right."""
    inputs = subject.inputs()
    want = subject.want(inputs)
    torch.compiler.reset()
    # The CPU's code generator needs a C++ compiler and seconds a call; what it makes is not what is looked at here.
    backend = "aot_eager" if subject.device.type == "cpu" else "inductor"
    compiled = torch.compile(subject.function, fullgraph=True, backend=backend)
    with torch.no_grad():
        return subject.differs(subject.results(compiled, inputs), want)


# --- CUDA graphs --------------------------------------------------------------------------------------------------


def _graph(subject: Subject) -> Difference:
    """A captured call is right for other inputs in the same memory, whatever its outputs held."""
    if subject.device.type != "cuda":
        raise Skipped("CUDA graphs are of CUDA and ROCm devices")
    inputs, others = subject.inputs(), subject.inputs(_OTHER_SEED)
    if [tensor.shape for tensor in tensors_in(inputs)] != [tensor.shape for tensor in tensors_in(others)]:
        raise Skipped("the case draws inputs of changing shapes")
    want = subject.want(others)
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]  # torch's
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            subject.results(subject.function, inputs.map(_copy))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        got = inputs.call(subject.function)
    mutated = [id(tensor) for key in subject.entry.mutates for tensor in tensors_in(inputs[key])]
    for tensor in tensors_in(got):
        if id(tensor) not in mutated:
            _poison(tensor)
    for there, value in zip(tensors_in(inputs), tensors_in(others), strict=True):
        there.copy_(value)
    graph.replay()
    torch.cuda.synchronize(subject.device)
    if subject.entry.canonical is not None:
        got = subject.entry.canonical(got)
    if subject.entry.mutates:
        got = (got, *(inputs[key] for key in subject.entry.mutates))
    return subject.differs(got, want)


# --- gradients ----------------------------------------------------------------------------------------------------


def _gradient(subject: Subject) -> Difference:
    """Gradients are those of the formula in float64, for any upstream gradient."""
    return _gradients(
        subject, lambda output, draw: draw.normal(*output.shape, dtype=output.dtype), contextlib.nullcontext()
    )


def _expanded_gradient(subject: Subject) -> Difference:
    """Gradients are right for an upstream gradient that is one number expanded, as `sum()` makes it."""
    return _gradients(subject, lambda output, _: output.new_ones(()).expand(output.shape), contextlib.nullcontext())


def _gradient_memory(subject: Subject) -> Difference:
    """Gradients are right in memory full of NaN, and nothing is written outside of them."""
    memory = GuardedMemory()
    found = _gradients(subject, lambda output, draw: draw.normal(*output.shape, dtype=output.dtype), memory)
    damage = memory.damage()
    return Difference(float("inf"), damage) if damage else found


def _gradients(
    subject: Subject, upstream: Callable[[Tensor, Draw], Tensor], memory: contextlib.AbstractContextManager[Any]
) -> Difference:
    entry = subject.entry
    if not entry.gradients:
        raise Skipped("no gradient is promised")
    drawn = subject.inputs()
    ours = drawn.map(_copy).replace(entry.gradients, _leaf)
    theirs = drawn.map(_copy).replace(entry.gradients, _wide_leaf)
    want = [output for output in tensors_in(theirs.call(entry.formula)) if output.dtype.is_floating_point]
    draw = Draw(subject.device, _OTHER_SEED)
    soil(subject.device)
    with memory:
        got = [output for output in tensors_in(ours.call(subject.function)) if output.dtype.is_floating_point]
        pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.requires_grad]
        if missing := [number for number, (a, _) in enumerate(pairs) if not a.requires_grad]:
            return Difference(float("inf"), f"output {missing[0]} has no gradient")
        above = [upstream(a, draw) for a, _ in pairs]
        torch.autograd.backward([a for a, _ in pairs], above)
        synchronise(subject.device)
    torch.autograd.backward([b for _, b in pairs], [g.to(torch.float64) for g in above])
    tolerance = entry.gradient_tolerance or entry.tolerance
    worst = Difference(0.0)
    for key in entry.gradients:
        right, there = theirs[key].grad, ours[key].grad
        if right is None and there is None:
            continue
        if there is None:
            return Difference(float("inf"), f"{_called(key)} got no gradient")
        found = compare(there, right if right is not None else torch.zeros_like(there), tolerance, same_dtype=False)
        if found.detail:
            found = found._replace(detail=f"gradient of {_called(key)}: {found.detail}")
        worst = found if found.worst > worst.worst or (found.detail and not worst.detail) else worst
    return worst


def _leaf(value: Tensor) -> Tensor:
    return value.requires_grad_()


def _wide_leaf(value: Tensor) -> Tensor:
    return value.to(torch.float64).requires_grad_()


def _called(key: int | str) -> str:
    return f"argument {key}" if isinstance(key, int) else key


# --- what they share ----------------------------------------------------------------------------------------------


def _copy(tensor: Tensor) -> Tensor:
    """Equal values at the same strides, in memory of its own."""
    with torch.no_grad():
        extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        room = torch.empty(extent if tensor.numel() else 0, dtype=tensor.dtype, device=tensor.device)
        return room.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _zeros(tensor: Tensor) -> Tensor:
    return _copy(tensor).zero_()


def _poison(tensor: Tensor) -> None:
    if tensor.numel() and tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(0xFF)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a != a) & (b != b)).all())  # noqa: PLR0124 - NaN


PROBES: Final[dict[Mode, dict[str, Callable[[Subject], Difference]]]] = {
    "eager": {"value": _value, "memory": _memory, "again": _again, "stream": _stream, "device": _device},
    "compile": {"value": _compile},
    "graph": {"value": _graph},
    "backward": {"value": _gradient, "expanded": _expanded_gradient, "memory": _gradient_memory},
}
