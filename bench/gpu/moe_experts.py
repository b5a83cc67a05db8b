r"""moe_experts in Triton against the grouped-matmul experts forward of transformers, on an NVIDIA GPU.

    python bench/gpu/moe_experts.py [RESULT.md]

Experts are drawn evenly among all, those of other devices included, so that a share of the slots is sentinels. Times
are medians of CUDA events, of calls that are queued with other work between them, after some that are not counted; in
graphs nothing is launched by the CPU; "alone" is a call that finds the device idle, on the clock of the host. Floors
are the longer of the arithmetic, at the rate of torch's own matmul of 8192 x 8192, and of reading the weights that are
asked for, at the rate of torch's copy; both are measured on the spot.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import NamedTuple

import torch
import transformers
from device import alone_ms, machine, median_ms
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

import kernel_loader
from kernel_loader.bundles.moe import ExpertsForward
from kernel_loader.conformance import Work
from kernel_loader.conformance.roof import Roof, measure_roof
from kernel_loader.quantization import quantize_block_fp8

DTYPE = torch.bfloat16


class Shape(NamedTuple):
    """Tokens, slots of each, experts, hidden and intermediate size."""

    tokens: int
    slots: int
    experts: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return f"{self.experts} experts, {self.hidden}, {self.intermediate}, top-{self.slots}"


PREFILL = (Shape(8192, 2, 8, 4096, 14336), Shape(2048, 8, 128, 4096, 1536), Shape(2048, 8, 16, 7168, 2048))
DECODE = (Shape(1, 2, 8, 4096, 14336), Shape(1, 8, 128, 4096, 1536), Shape(1, 8, 128, 2048, 768))
SHARES = (1.0, 0.5, 0.125)


def least_ms(roof: Roof, shape: Shape, index: Tensor) -> float:
    """The least time of a forward call."""
    real = index[index < shape.experts]
    matrix = 3 * shape.hidden * shape.intermediate
    return 1e3 * roof.seconds(Work(2 * matrix * real.numel(), 2 * matrix * real.unique().numel()))


class Experts(nn.Module):
    """An experts module as transformers has them, with random weights."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = shape.experts, True, False, False
        self.act_fn = nn.functional.silu
        self._apply_gate = MethodType(_default_apply_gate, self)
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.empty(shape.experts, n, k, device="cuda", dtype=DTYPE).normal_(std=k**-0.5))
            for n, k in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
        )


def main() -> None:
    """Measure, print, and write where the command line says."""
    torch.manual_seed(0)
    kernel = kernel_loader.load_kernel("moe_experts")
    origin = kernel_loader.origin(kernel)
    assert origin.variant == "torch-cuda", origin
    roof = measure_roof(torch.device("cuda"), ["bf16"])
    lines = [
        "# moe_experts: the Triton build against the grouped-matmul experts forward of transformers",
        "",
        machine(f"transformers {transformers.__version__}"),
        f"Build {origin.variant} ({origin.digest[:12]}), bf16.",
        f"Measured: {roof.flops['bf16'] / 1e12:.0f} TFLOP/s in matmul, {roof.bandwidth / 1e12:.1f} TB/s in a copy.",
        "Errors are ||kernel - transformers|| / ||transformers||.",
    ]
    for title, rows in (
        ("Forward, 16,384 slots", prefill(kernel.experts_forward, roof)),
        ("Forward and backward, all slots real, gradients to everything", training(kernel.experts_forward)),
        ("Forward of few tokens", decode(kernel.experts_forward, roof)),
        ("FP8 weights in blocks of 128 x 128", quantised(kernel.experts_forward)),
    ):
        lines += ["", f"## {title}", ""]
        for row in rows:
            lines.append(row)
            print(row, flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


def prefill(forward: ExpertsForward, roof: Roof) -> Iterator[str]:
    """The shapes of the issue, by shares of real slots."""
    yield (
        "| shape | real slots | transformers | kernel | of its own full time | graph | of its own full time | alone "
        "| of its own full time | floor | error | first call |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for shape in PREFILL:
        layer, x = Experts(shape), hidden(shape)
        timers, cells = [], []
        with torch.no_grad():
            for share in SHARES:
                index, routing = route(shape, share)
                ours, theirs = calls(forward, layer, x, index, routing)
                begin = time.perf_counter()
                got = ours()
                torch.cuda.synchronize()
                first = time.perf_counter() - begin
                timers.append(
                    (
                        *(partial(median_ms, call, 5) for call in (theirs, ours, graphed(ours))),
                        partial(alone_ms, ours, 5),
                    )
                )
                cells.append(f"{least_ms(roof, shape, index):.2f} ms | {relative(got, theirs()):.1e} | {first:.1f} s |")
            times = interleaved(timers)
        for share, now, rest in zip(SHARES, times, cells, strict=True):
            of_full = [f"{one / full:.3f}" for one, full in zip(now, times[0], strict=True)]
            yield (
                f"| {shape} | {share:.1%} | {now[0]:.2f} ms | {now[1]:.2f} ms | {of_full[1]} | {now[2]:.2f} ms "
                f"| {of_full[2]} | {now[3]:.2f} ms | {of_full[3]} | {rest}"
            )


def interleaved(timers: list[tuple[Callable[[], float], ...]], rounds: int = 5) -> list[list[float]]:
    """Medians of all in turn: what the device's clock does in the meantime happens to all of them."""
    times = [[[timer() for timer in row] for row in timers] for _ in range(rounds)]
    return [[statistics.median(each) for each in zip(*rows, strict=True)] for rows in zip(*times, strict=True)]


def training(forward: ExpertsForward) -> Iterator[str]:
    """A step: gradients to hidden states, routing weights and both weights."""
    yield "| shape | transformers | kernel | kernel's rate | errors of gradients |"
    yield "|---|---|---|---|---|"
    for shape in PREFILL:
        layer, x = Experts(shape), hidden(shape).requires_grad_()
        index, routing = route(shape, 1.0)
        leaves = [x, routing.requires_grad_(), layer.gate_up_proj, layer.down_proj]
        upstream = torch.randn_like(x)

        def step(
            call: Callable[[], Tensor], leaves: list[Tensor] = leaves, upstream: Tensor = upstream
        ) -> list[Tensor]:
            return list(torch.autograd.grad(call(), leaves, upstream))

        ours, theirs = calls(forward, layer, x, index, routing)
        errors = [f"{relative(a, b):.1e}" for a, b in zip(step(ours), step(theirs), strict=True)]
        slow, fast = (median_ms(lambda call=call: step(call), 10) for call in (theirs, ours))
        flops = 18 * index.numel() * shape.hidden * shape.intermediate
        yield f"| {shape} | {slow:.1f} ms | {fast:.1f} ms | {flops / fast / 1e9:.0f} TFLOP/s | {', '.join(errors)} |"


def decode(forward: ExpertsForward, roof: Roof) -> Iterator[str]:
    """Few tokens, where the weights that are asked for must be read, and the CPU must keep up."""
    yield "| shape | tokens | transformers | kernel | transformers, graph | kernel, graph | floor | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for shape in DECODE:
        layer = Experts(shape)
        for tokens in (1, 8, 64, 256):
            now = shape._replace(tokens=tokens)
            index, routing = route(now, 1.0)
            with torch.no_grad():
                ours, theirs = calls(forward, layer, hidden(now), index, routing)
                error = relative(ours(), theirs())
                times = [median_ms(call) for call in (theirs, ours, graphed(theirs), graphed(ours))]
            cells = " | ".join(f"{ms:.3f} ms" for ms in (*times, least_ms(roof, now, index)))
            yield f"| {shape} | {tokens} | {cells} | {error:.1e} |"


def quantised(forward: ExpertsForward) -> Iterator[str]:
    """The same weights in FP8; the error is against them in bf16."""
    yield "| shape | real slots | bf16 | FP8 | difference |"
    yield "|---|---|---|---|---|"
    for shape in PREFILL[1:]:
        layer, x = Experts(shape), hidden(shape)
        first, first_scale = quantize_block_fp8(layer.gate_up_proj.detach())
        second, second_scale = quantize_block_fp8(layer.down_proj.detach())
        scales = {"gate_up_proj_scale": first_scale, "down_proj_scale": second_scale, "block_size": [128, 128]}
        for share in SHARES:
            index, routing = route(shape, share)
            with torch.no_grad():
                plain, _ = calls(forward, layer, x, index, routing)

                def ours(index: Tensor = index, routing: Tensor = routing) -> Tensor:
                    return forward(x, index, routing, first, second, **scales)  # noqa: B023 - called at once

                error = relative(ours(), plain())
                times = median_ms(plain), median_ms(ours)
            yield f"| {shape} | {share:.1%} | {times[0]:.2f} ms | {times[1]:.2f} ms | {error:.1e} |"


def calls(
    forward: ExpertsForward, layer: Experts, x: Tensor, index: Tensor, routing: Tensor
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The kernel and transformers, on the same arguments."""
    return (
        lambda: forward(x, index, routing, layer.gate_up_proj, layer.down_proj),
        lambda: grouped_mm_experts_forward(layer, x, index, routing),
    )


def hidden(shape: Shape) -> Tensor:
    """Hidden states (T, H)."""
    return torch.randn(shape.tokens, shape.hidden, device="cuda", dtype=DTYPE)


def route(shape: Shape, share: float) -> tuple[Tensor, Tensor]:
    """Ids and routing weights (T, k): different experts for each token, a share of them real, E for the others."""
    index = torch.rand(shape.tokens, shape.experts, device="cuda").topk(shape.slots, 1).indices
    away = torch.rand(index.shape, device="cuda") >= share
    routing = torch.rand(index.shape, device="cuda").to(DTYPE)
    return index.masked_fill(away, shape.experts), routing.masked_fill(away, 0)


def graphed(call: Callable[[], object]) -> Callable[[], None]:
    """The call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def relative(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    return ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()


if __name__ == "__main__":
    main()
