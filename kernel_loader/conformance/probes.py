"""What is done to a kernel in each mode: small functions that call it and say what is wrong."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernel_loader.conformance import gradients
from kernel_loader.conformance.compare import Difference, Skipped
from kernel_loader.conformance.grid import Mode, map_tensors, tensors_in
from kernel_loader.conformance.memory import GuardedMemory, copy_of, same, soil
from kernel_loader.conformance.roof import synchronise
from kernel_loader.conformance.subject import OTHER_SEED, BuildError, Finding, Status, Subject, of_build

# What torch raises when the device has failed, in releases that tell it from other errors.
_DEVICE_ERROR: Final = getattr(torch, "AcceleratorError", ())

# What is looked at with gradients that are not those of the first.
_OTHER_CALLS: Final = ("expanded", "sliced")


def probe(subject: Subject, mode: Mode, names: Iterable[str] | None = None) -> Iterator[Finding]:
    """All that is looked at in a mode, or some of it, one finding each."""
    entry, case = subject.entry, subject.case
    may_refuse = may_refuse_others = bool(case.may_refuse) and subject.reference is not None
    for name in PROBES[mode] if names is None else names:
        function = PROBES[mode][name]
        finding = Finding(entry.entrypoint, case.name, mode, name, "passed")
        if mode in entry.skip or mode not in case.modes:
            yield finding._replace(status="skipped", detail=entry.skip.get(mode, "the case is not for this mode"))
            continue
        try:
            difference = function(subject)
        except Skipped as skipped:
            yield finding._replace(status="skipped", detail=str(skipped))
        except BuildError as error:
            refused = may_refuse or (may_refuse_others and name in _OTHER_CALLS)
            if refused and not isinstance(error.cause, _DEVICE_ERROR):
                yield finding._replace(status="skipped", detail=f"refused, as it may: {case.may_refuse}")
            else:
                yield finding._replace(status="failed", detail=f"raised {_said(error.cause)}")
        except Exception as error:  # noqa: BLE001 - a reference, a formula or a grid may raise anything
            yield finding._replace(status="failed", detail=f"what it is held against raised {_said(error)}")
        else:
            may_refuse = may_refuse and name == "reference"  # what was not refused at first may not be later
            status: Status = "failed" if difference.detail else "passed"
            yield finding._replace(status=status, detail=difference.detail, worst=difference.worst)


def _said(error: Exception) -> str:
    """An error in a line, with the place where it was raised."""
    text = str(error).strip().partition("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{place}"


# --- eager --------------------------------------------------------------------------------------------------------


def _value(subject: Subject) -> Difference:
    """Outputs are right."""
    inputs = subject.inputs()
    want = subject.want(inputs)
    with torch.no_grad():
        return subject.differs(subject.results(subject.function, inputs), want, inputs)


def _reference(subject: Subject) -> Difference:
    """What the build is held against is itself right by the formula."""
    if subject.reference is None:
        raise Skipped("the formula is what the build is held against")
    inputs = subject.inputs()
    with torch.no_grad():
        got = subject.want(inputs)
    return subject._replace(reference=None).differs(got, subject._replace(reference=None).want(inputs), inputs)


def _memory(subject: Subject) -> Difference:
    """Outputs are right in memory full of NaN, nothing is written outside of them, and inputs stay as they are."""
    drawn = subject.inputs()
    want = subject.want(drawn)
    memory = GuardedMemory()
    inputs = memory.inputs(drawn)
    soil(subject.device)
    with torch.no_grad(), memory:
        got = subject.results(subject.function, inputs)
    synchronise(subject.device)
    written = tuple(tensor for value in subject.written(inputs) for tensor in tensors_in(value))
    if damage := memory.damage(written):
        return Difference(math.inf, damage)
    return subject.differs(got, want, drawn)


def _again(subject: Subject) -> Difference:
    """A call is right after others, and leaves their outputs alone."""
    inputs, others = subject.inputs(), subject.inputs(OTHER_SEED)
    want = subject.want(inputs)
    with torch.no_grad():
        earlier = subject.results(subject.function, others)
        kept = map_tensors(earlier, copy_of)
        got = subject.results(subject.function, inputs)
        synchronise(subject.device)
        if any(not same(a, b) for a, b in zip(tensors_in(earlier), tensors_in(kept), strict=True)):
            return Difference(math.inf, "the output of an earlier call was overwritten by a later one")
    return subject.differs(got, want, inputs)


def _stream(subject: Subject) -> Difference:
    """Outputs are right on a stream that is not the default one, and whose inputs come late."""
    if subject.device.type != "cuda":
        raise Skipped("streams are of CUDA and ROCm devices")
    drawn = subject.inputs()
    want = subject.want(drawn)
    inputs = drawn.map(copy_of if subject.entry.mutates else _zeros)
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]  # torch's
    torch.cuda.synchronize(subject.device)
    with torch.no_grad(), torch.cuda.stream(stream):
        subject.results(subject.function, drawn.map(copy_of))  # compiles, so that the next call is short
        # About 10 ms, in which a kernel on another stream would read zeros.
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - it has no public name
        for there, value in zip(tensors_in(inputs), tensors_in(drawn), strict=True):
            there.copy_(value)
        got = subject.results(subject.function, inputs)
    stream.synchronize()
    return subject.differs(got, want, drawn)


def _device(subject: Subject) -> Difference:
    """Outputs are right on a device that is not the current one."""
    count = torch.cuda.device_count() if subject.device.type == "cuda" else 0
    if count < 2:
        raise Skipped(f"there is {'one device' if count else 'no device beside the CPU'}")
    current = torch.cuda.current_device()
    inputs = subject.inputs(device=torch.device("cuda", (current + 1) % count))
    want = subject.want(inputs)
    with torch.no_grad(), torch.cuda.device(current):
        return subject.differs(subject.results(subject.function, inputs), want, inputs)


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
        return subject.differs(subject.results(compiled, inputs), want, inputs)


# --- CUDA graphs --------------------------------------------------------------------------------------------------


def _graph(subject: Subject) -> Difference:
    """A captured call is right for other inputs in the same memory, whatever its outputs held."""
    if subject.device.type != "cuda":
        raise Skipped("CUDA graphs are of CUDA and ROCm devices")
    inputs, others = subject.inputs(), subject.inputs(OTHER_SEED)
    if [tensor.shape for tensor in tensors_in(inputs)] != [tensor.shape for tensor in tensors_in(others)]:
        raise Skipped("the case draws inputs of changing shapes")
    want = subject.want(others)
    stream = torch.cuda.Stream(subject.device)  # type: ignore[no-untyped-call]  # torch's
    stream.wait_stream(torch.cuda.current_stream(subject.device))
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            subject.results(subject.function, inputs.map(copy_of))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        got = of_build(lambda: inputs.call(subject.function))
    mutated = [id(tensor) for value in subject.written(inputs) for tensor in tensors_in(value)]
    for tensor in tensors_in(got):
        if id(tensor) not in mutated:
            _poison(tensor)
    for there, value in zip(tensors_in(inputs), tensors_in(others), strict=True):
        there.copy_(value)
    graph.replay()
    torch.cuda.synchronize(subject.device)
    return subject.differs(subject.with_mutated(got, inputs), want, others)


def _zeros(tensor: Tensor) -> Tensor:
    return copy_of(tensor).zero_()


def _poison(tensor: Tensor) -> None:
    if tensor.numel() and tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8).fill_(0xFF)


PROBES: Final[dict[Mode, dict[str, Callable[[Subject], Difference]]]] = {
    "eager": {
        "value": _value,
        "reference": _reference,
        "memory": _memory,
        "again": _again,
        "stream": _stream,
        "device": _device,
    },
    "compile": {"value": _compile},
    "graph": {"value": _graph},
    "backward": {
        "value": gradients.gradient,
        "expanded": gradients.expanded_gradient,
        "sliced": gradients.sliced_gradient,
        "memory": gradients.gradient_memory,
        "again": gradients.gradient_again,
    },
}
