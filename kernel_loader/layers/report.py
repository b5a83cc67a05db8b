"""What became of the layers of a model: which kernel each one uses, or why it has none."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_loader.layers.decorator import functions_of, names_of
from kernel_loader.layers.kernelizer import REASON
from kernel_loader.layers.model import refuse_no_module
from kernel_loader.layers.swap import base_of, kernel_of

if TYPE_CHECKING:
    from torch import nn

    from kernel_loader.provenance import Origin


class LayerReport(NamedTuple):
    """Layers of one class that share one fate.

    Attributes:
        layer: their name in mappings.
        cls: the model's class.
        used: whether a kernel serves them.
        code: "used", or why not: no-layer, no-device, no-properties, no-mode, cannot-load, misfit, condition,
            overridden, wrapped, scripted, disabled, not-restored, not-kernelized.
        message: the same for people.
        mode: what was asked for; empty where nothing was.
        origin: where the kernel is from.
        total: how many there are.
        path: the first of them in the model.
    """

    layer: str
    cls: str
    used: bool
    code: str
    message: str
    mode: str
    origin: Origin | None
    total: int
    path: str


class KernelizeReport(NamedTuple):
    """Every layer of a model that has a name in mappings. Its text is a table."""

    layers: tuple[LayerReport, ...]

    @property
    def used(self) -> int:
        """How many layers a kernel serves."""
        return sum(layer.total for layer in self.layers if layer.used)

    @property
    def unused(self) -> int:
        """How many keep their own forward."""
        return sum(layer.total for layer in self.layers if not layer.used)

    def to_json(self) -> str:
        """The same for programs."""
        rows: list[dict[str, Any]] = []
        for layer in self.layers:
            origin = layer.origin._asdict() | {"path": str(layer.origin.path)} if layer.origin else None
            rows.append(layer._asdict() | {"origin": origin})
        return json.dumps({"used": self.used, "unused": self.unused, "layers": rows}, indent=2)

    def __str__(self) -> str:
        head = f"{self.used} layers use a kernel, {self.unused} keep their own forward"
        width = max((len(layer.layer) for layer in self.layers), default=0)
        rows = [
            f"  {'✓' if layer.used else '✗'} {layer.layer:{width}}  {layer.total} x {layer.cls}: {layer.message}"
            for layer in self.layers
        ]
        return "\n".join([head, *rows])


def kernelize_report(model: nn.Module) -> KernelizeReport:
    """What became of each layer of a model that has a name in mappings, and of the functions that it calls.

    It is read off the model as it is now: a copy, or one that was loaded from a file, tells its own.

    Raises:
        RequestError: it is no model.
    """
    refuse_no_module(model)
    counts: Counter[LayerReport] = Counter()
    paths: dict[LayerReport, str] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for layer in (module, *functions_of(module)):
            row = _row(layer) if id(layer) not in seen else None
            seen.add(id(layer))
            if row is not None:
                counts[row] += 1
                paths.setdefault(row, path)
    rows = (row._replace(total=total, path=paths[row]) for row, total in counts.items())
    return KernelizeReport(tuple(sorted(rows, key=lambda row: (not row.used, row.layer, row.cls, row.code))))


def _row(module: nn.Module) -> LayerReport | None:
    kernel = kernel_of(module)
    outcome = kernel.outcome if kernel is not None else module.__dict__.get(REASON)
    cls = base_of(module)
    if outcome is None:
        named = names_of(cls)
        if not named.names:
            return None
        name, message = named.names[0].name, "kernelize was not called on it"
        return LayerReport(name, cls.__qualname__, False, "not-kernelized", message, "", None, 0, "")  # noqa: FBT003
    o = outcome
    return LayerReport(o.layer, cls.__qualname__, o.used, o.code, o.message, str(o.mode), o.origin, 0, "")
