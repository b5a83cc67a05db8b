"""`convert`: a checkpoint on disk in another layout."""

from __future__ import annotations

import importlib
import json
import operator
import re
import sys
import traceback
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kernel_loader.cli import options

if TYPE_CHECKING:
    from kernel_loader.fusion.converter import Composition
    from kernel_loader.fusion.plan import Plan

_UNITS: Final = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """The number of bytes that --max-shard-size means."""
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    size = int(Fraction(found[1]) * _UNITS.get(found[2].upper(), 0)) if found else 0
    if size < 1:
        raise click.BadParameter(f"{text!r} is not of the form 500MB, 5GB or 2GiB")
    return size


@click.command()
@click.argument("source", metavar="IN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@click.option("--layout", required=True, help="module:NAME of a list of converters, or of a layout class.")
@click.option("--revert", is_flag=True, help="Convert back: IN has the layout that the converters lead to.")
@click.option(
    "--dry-run", is_flag=True, help="Write nothing; show what would be done, or why not. OUT may be left out."
)
@click.option(
    "--max-shard-size",
    "max_size",
    metavar="SIZE",
    default="5GB",
    show_default=True,
    callback=_bytes,
    help="Size of a file, such as 500MB or 2GiB.",
)
@options.as_json
def convert(
    source: Path,
    out: Path | None,
    layout: str,
    revert: bool,  # noqa: FBT001 - flags of the command line
    dry_run: bool,  # noqa: FBT001
    max_size: int,
    as_json: bool,  # noqa: FBT001
) -> None:
    """Write the checkpoint in the directory IN into a new directory OUT, in another layout.

    IN has model.safetensors, or shards and model.safetensors.index.json; its other files are copied. OUT appears whole
    or not at all: after an interruption, the same command goes on where it was.
    """
    from kernel_loader.fusion import checkpoint

    converters = _layout(layout, revert=revert)
    if dry_run:
        _show(checkpoint.plan_checkpoint(source, converters, out, max_shard_size=max_size), as_json=as_json)
        return
    if out is None:
        raise click.UsageError("Missing argument 'OUT'.")
    done = checkpoint.convert_checkpoint(source, out, converters, max_shard_size=max_size, watch=_progress)
    if sys.stderr.isatty():
        click.echo(err=True)
    facts: dict[str, Any] = {
        "out": str(done.out),
        "converted": len(done.plan.groups),
        "kept": len(done.plan.kept),
        "exact": done.plan.exact,
        "shards": list(done.shards),
        "reused": done.reused,
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    again = f", {done.reused} of them from before" if done.reused else ""
    click.echo(f"{done.out}: {_counted(len(done.shards), 'shard')}{again}; {_summary(done.plan)}")


def _show(steps: Plan, *, as_json: bool) -> None:
    rows = steps.rows()
    if as_json:
        groups = [dict(zip(("sources", "operations", "targets"), row, strict=True)) for row in rows]
        click.echo(json.dumps({"groups": groups, "kept": list(steps.kept), "exact": steps.exact}, indent=2))
        return
    for sources, operations, targets in rows:
        click.echo(
            "\n".join((*sources, *(f"    {operation}" for operation in operations), *(f"  → {t}" for t in targets)))
        )
    click.echo(_summary(steps))


def _summary(steps: Plan) -> str:
    exact = "bit for bit" if steps.exact else "with loss"
    groups, kept = _counted(len(steps.groups), "group"), _counted(len(steps.kept), "tensor")
    return f"{groups} converted, {kept} kept; the way back is {exact}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _layout(spelt: str, *, revert: bool) -> Composition:
    """The converters that module:NAME is, or has as its conversion_mapping."""
    from kernel_loader.errors import FusionError
    from kernel_loader.fusion.converter import compose

    module, _, name = spelt.partition(":")
    if not module or not name:
        raise click.BadParameter(f"{spelt} is not of the form module:NAME", param_hint="--layout")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m kernel_loader` has it
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever the module raises
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if last.filename.startswith("<") else f", at {last.filename}:{last.lineno}"
        said = f"{str(error) or type(error).__name__}{where}"
        raise click.BadParameter(f"{spelt} cannot be imported ({said})", param_hint="--layout") from error
    mapping: Any = getattr(found, "conversion_mapping", None) if isinstance(found, type) else found
    try:
        composition = compose(mapping)
    except FusionError as error:
        where = f"{spelt}.conversion_mapping" if isinstance(found, type) else spelt
        raise click.BadParameter(f"{where}: {'; '.join(error.problems)}", param_hint="--layout") from error
    if not any(composition.stages):
        raise click.BadParameter(f"{spelt} has no converters", param_hint="--layout")
    return composition.inverse() if revert else composition


def _progress(done: int, total: int) -> None:
    """How far it is, in a line that the next one replaces, where a person watches."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{done / 1e9:.2f} of {total / 1e9:.2f} GB", nl=False, err=True)


COMMANDS: Final = (convert,)
