"""A roofline as an SVG: how much of what the device can do each problem gets, by how much arithmetic a byte takes."""

from __future__ import annotations

import math
from html import escape
from typing import Final

from kernel_loader.conformance.measure import Measured

_WIDTH: Final = 860
_HEIGHT: Final = 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 50, 60
_COLOURS: Final = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


def roofline(measured: Measured) -> str:
    """The text of an SVG file. Problems whose work the grid does not tell are not on it."""
    timings = [(timing, timing.work) for timing in measured.timings if timing.work is not None]
    points = [(work.flops / work.nbytes, work.flops / timing.steady, timing) for timing, work in timings if work.flops]
    peaks = measured.roof.flops
    if not points or not peaks:
        return _page(measured, [_text(_WIDTH / 2, _HEIGHT / 2, "the grid tells the work of no problem", "middle")])
    xs = [x for x, _, _ in points] + [peak / measured.roof.bandwidth for peak in peaks.values()]
    ys = [y for _, y, _ in points] + list(peaks.values())
    axes = _Axes(min(xs) / 2, max(xs) * 2, min(ys) / 2, max(ys) * 2)
    marks = axes.grid()
    for kind, peak in peaks.items():
        knee = peak / measured.roof.bandwidth
        corners = [(axes.x0, axes.x0 * measured.roof.bandwidth), (knee, peak), (axes.x1, peak)]
        path = " ".join(f"{axes.x(x):.1f},{axes.y(max(y, axes.y0)):.1f}" for x, y in corners)
        marks.append(f'<polyline points="{path}" fill="none" stroke="#555" stroke-width="1.5"/>')
        marks.append(_text(axes.x(axes.x1) - 4, axes.y(peak) - 5, f"{kind}: {_si(peak)}FLOP/s", "end"))
    names = list(dict.fromkeys(timing.entrypoint for _, _, timing in points))
    for x, y, timing in points:
        colour = _COLOURS[names.index(timing.entrypoint) % len(_COLOURS)]
        sizes = " ".join(f"{key}={value}" for key, value in timing.sizes.items())
        tip = escape(f"{timing.entrypoint} {sizes}: {_si(y)}FLOP/s, {timing.steady * 1e3:.3g} ms")
        marks.append(
            f'<circle cx="{axes.x(x):.1f}" cy="{axes.y(y):.1f}" r="5" fill="{colour}"><title>{tip}</title></circle>'
        )
    for row, name in enumerate(names):
        y = _TOP + 16 + 18 * row
        marks.append(f'<circle cx="{_LEFT + 14}" cy="{y - 4}" r="5" fill="{_COLOURS[row % len(_COLOURS)]}"/>')
        marks.append(_text(_LEFT + 26, y, name, "start"))
    return _page(measured, marks)


class _Axes:
    """Two logarithmic axes."""

    def __init__(self, x0: float, x1: float, y0: float, y1: float) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * _share(value, self.x0, self.x1)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * _share(value, self.y0, self.y1)

    def grid(self) -> list[str]:
        marks = []
        for power in range(math.ceil(math.log10(self.x0)), math.floor(math.log10(self.x1)) + 1):
            x = self.x(10.0**power)
            marks.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}" stroke="#ddd"/>')
            marks.append(_text(x, _HEIGHT - _BOTTOM + 18, _si(10.0**power), "middle"))
        for power in range(math.ceil(math.log10(self.y0)), math.floor(math.log10(self.y1)) + 1):
            y = self.y(10.0**power)
            marks.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
            marks.append(_text(_LEFT - 6, y + 4, _si(10.0**power), "end"))
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        marks.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, "operations a byte", "middle"))
        marks.append(
            f'<text transform="translate(20 {middle}) rotate(-90)" text-anchor="middle">operations a second</text>'
        )
        return marks


def _page(measured: Measured, marks: list[str]) -> str:
    title = f"{measured.kernel}, {measured.origin.variant}, on {measured.device}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>'
    return "\n".join([head, ground, _text(_LEFT, 28, title, "start"), *marks, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _share(value: float, low: float, high: float) -> float:
    return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))


def _si(value: float) -> str:
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g} "
