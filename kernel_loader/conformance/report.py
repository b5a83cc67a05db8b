"""What a check found and what a measurement gave, as tables for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator

from kernel_loader.conformance.grid import MODES
from kernel_loader.conformance.measure import Measured, Timing
from kernel_loader.conformance.runner import Checked
from kernel_loader.conformance.subject import Finding
from kernel_loader.provenance import Origin


def of_check(checked: Checked) -> str:
    """An entrypoint a row, a mode a column; below it every failure, with the command that shows it alone."""
    modes = [mode for mode in MODES if any(finding.mode == mode for finding in checked.findings)]
    entrypoints = list(dict.fromkeys(finding.entrypoint for finding in checked.findings))
    rows = [["entrypoint", *modes, "largest error"]]
    for entrypoint in entrypoints:
        own = [finding for finding in checked.findings if finding.entrypoint == entrypoint]
        worst = max((f.worst for f in own if f.worst is not None), default=None)
        cells = [_cell([finding for finding in own if finding.mode == mode]) for mode in modes]
        rows.append([entrypoint, *cells, "" if worst is None else f"{worst:.2g} of what is tolerated"])
    head = f"{_what(checked.kernel, checked.device, checked.origin)}, against {checked.against}"
    return "\n".join([head, "", *_aligned(rows), *_skipped(checked), *_failures(checked)])


def check_to_json(checked: Checked) -> str:
    """The same for programs."""
    findings = [
        finding._asdict()
        | {"worst": finding.worst if finding.worst is not None and math.isfinite(finding.worst) else None}
        for finding in checked.findings
    ]
    document = {
        "kernel": checked.kernel,
        "device": checked.device,
        "against": checked.against,
        "passed": not checked.failed,
        "origin": _origin(checked.origin),
        "findings": findings,
    }
    return json.dumps(document, indent=2)


def of_bench(measured: Measured) -> str:
    """A problem a row."""
    rows = [["entrypoint", "sizes", "first call", "steady", "reference", "speed-up", "roof", "of the roof"]]
    rows += [_timing(timing) for timing in measured.timings]
    roof = measured.roof
    peaks = ", ".join(f"{rate / 1e12:.3g} TFLOP/s in {kind}" for kind, rate in roof.flops.items())
    lines = [
        _what(measured.kernel, measured.device, measured.origin),
        f"roof, measured: {roof.bandwidth / 1e9:.4g} GB/s by copying"
        + (f", {peaks} by torch's matmul" if peaks else ""),
    ]
    return "\n".join([*lines, "", *_aligned(rows)])


def bench_to_json(measured: Measured) -> str:
    """The same for programs; times in seconds."""
    timings = [
        timing._asdict() | {"sizes": dict(timing.sizes), "work": timing.work._asdict() if timing.work else None}
        for timing in measured.timings
    ]
    document = {
        "kernel": measured.kernel,
        "device": measured.device,
        "origin": _origin(measured.origin),
        "roof": {"bandwidth": measured.roof.bandwidth, "flops": dict(measured.roof.flops)},
        "timings": timings,
    }
    return json.dumps(document, indent=2)


def _timing(timing: Timing) -> list[str]:
    return [
        timing.entrypoint,
        " ".join(f"{key}={value}" for key, value in timing.sizes.items()),
        _time(timing.first),
        _time(timing.steady),
        _time(timing.reference),
        f"{timing.reference / timing.steady:.1f}x" if timing.reference else "",
        _time(timing.roof),
        f"{timing.roof / timing.steady:.0%}" if timing.roof else "",
    ]


def _what(kernel: str, device: str, origin: Origin) -> str:
    guards = f", guarded ({', '.join(origin.guards)})" if origin.guards else ""
    return f"{kernel} on {device}: {origin.variant} from {origin.where} ({origin.digest[:12]}){guards}"


def _origin(origin: Origin) -> dict[str, object]:
    return origin._asdict() | {"path": str(origin.path)}


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _time(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def command(checked: Checked, finding: Finding) -> str:
    """The command that makes one finding again."""
    words = ["kernel-loader", "check", checked.kernel, "--device", checked.device, "--mode", finding.mode]
    return shlex.join([*words, "--only", f"{finding.entrypoint}/{finding.case}"])


def _cell(findings: list[Finding]) -> str:
    passed = sum(finding.status == "passed" for finding in findings)
    failed = sum(finding.status == "failed" for finding in findings)
    if not passed and not failed:
        return "-"
    return f"{passed} passed" + (f", {failed} FAILED" if failed else "")


def _skipped(checked: Checked) -> Iterator[str]:
    reasons: dict[tuple[str, str], int] = {}
    for finding in checked.findings:
        if finding.status == "skipped":
            key = (f"{finding.mode}/{finding.probe}", finding.detail)
            reasons[key] = reasons.get(key, 0) + 1
    if reasons:
        yield ""
    for (where, why), count in reasons.items():
        yield f"skipped {count} x {where}: {why}"


def _failures(checked: Checked) -> Iterator[str]:
    for finding in checked.failed:
        yield ""
        yield f"FAILED {finding.entrypoint}/{finding.case}, {finding.mode}, {finding.probe}: {finding.detail}"
        yield f"       {command(checked, finding)}"
