"""What a benchmark reports: rows with a value, a target and whether it was met. As a Markdown table or as JSON."""

from __future__ import annotations

import argparse
import compileall
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parent.parent


def as_installed() -> None:
    """Write the bytecode of the package, as installers do: an environment may forbid Python to write it on import."""
    compileall.compile_dir(ROOT / "kernel_loader", quiet=1)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing; `met` is None where there is no target."""

    measure: str
    value: str
    target: str = ""
    met: bool | None = None

    def cells(self) -> tuple[str, ...]:
        """The row as a table shows it."""
        return self.measure, self.value, self.target, {None: "", True: "yes", False: "**no**"}[self.met]


@dataclass(frozen=True, slots=True)
class Report:
    """The rows of one benchmark, and details in Markdown."""

    title: str
    rows: tuple[Row, ...]
    details: str = ""

    @property
    def met(self) -> bool:
        """Whether no target was missed."""
        return all(row.met is not False for row in self.rows)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `emit` printed."""
        document = json.loads(text)
        return cls(document["title"], tuple(Row(**row) for row in document["rows"]), document["details"])

    def emit(self, *, as_json: bool) -> int:
        """Print the report, and give the exit status of its script."""
        print(json.dumps(asdict(self)) if as_json else str(self))
        return 0 if self.met else 1

    def __str__(self) -> str:
        parts = [f"## {self.title}", summary(self.rows), self.details]
        return "\n\n".join(part for part in parts if part)


def summary(rows: Sequence[Row]) -> str:
    """Rows as a table."""
    return table(("measure", "value", "target", "met"), [row.cells() for row in rows])


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns line up."""
    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what every script takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON, for run.py")
    return parser


def ask(python: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([python, *arguments], cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()
