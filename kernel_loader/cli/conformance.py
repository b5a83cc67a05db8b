"""`check` and `bench`: is a kernel right, and how fast is it?"""

from __future__ import annotations

import importlib
import operator
import re
import sys
from pathlib import Path
from typing import Any, Final

import click

from kernel_loader.cli import options

_DEVICE: Final = click.option(
    "--device", help="Where inputs lie, such as cuda; by default what this machine computes on."
)


@click.command()
@click.argument("kernel")
@_DEVICE
@click.option("--mode", "modes", help="Some of eager, compile, graph, backward, with commas between; all by default.")
@click.option(
    "--only", multiple=True, help="An entrypoint, or a case of one (entrypoint/case). May be given several times."
)
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds that a case may take in a mode.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="How many work at a time, each on cases of its own. 0 works in this one, for a debugger; a crash ends it.",
)
@options.as_json
def check(
    kernel: str,
    device: str | None,
    modes: str | None,
    only: tuple[str, ...],
    deadline: float,
    processes: int,
    as_json: bool,  # noqa: FBT001 - a flag of the command line
) -> None:
    """Hold the build that KERNEL loads here against its reference, over the grid that its manifest names.

    KERNEL is a registered name, with a version or a revision after an @ if need be; a capability, for the kernel that
    serves it here; or module:Class of a bundle. Looks at outputs, at memory around them, at later calls, streams,
    torch.compile, CUDA graphs and gradients. Exits 1 when anything failed, each with the command that shows it alone.
    """
    from kernel_loader.conformance import report, runner
    from kernel_loader.conformance.grid import MODES

    named: Any = tuple(modes.split(",")) if modes is not None else MODES
    checked = runner.check(
        _kernel(kernel, device),
        device=device,
        modes=named,
        only=only,
        deadline=deadline,
        processes=processes,
        watch=lambda finding: _progress(f"{finding.entrypoint}/{finding.case}, {finding.mode}: {finding.status}"),
    )
    _progress("")
    click.echo(report.check_to_json(checked) if as_json else report.of_check(checked))
    if checked.failed:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("kernel")
@_DEVICE
@click.option("--only", multiple=True, help="An entrypoint. May be given several times.")
@click.option(
    "--size", "sizes", multiple=True, help="A problem instead of the grid's: m=16,n=4096. May be given several times."
)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the roofline into this SVG file.")
@options.as_json
def bench(
    kernel: str,
    device: str | None,
    only: tuple[str, ...],
    sizes: tuple[str, ...],
    plot: Path | None,
    as_json: bool,  # noqa: FBT001 - a flag of the command line
) -> None:
    """Time the entrypoints of KERNEL on the problems of its grid, against the reference and what the device can do.

    The first call, in which kernels compile and tune themselves, is shown apart from the median of later ones.
    """
    from kernel_loader.conformance import measure, report

    if plot is not None and not plot.parent.is_dir():
        raise click.BadParameter(f"there is no directory {plot.parent}", param_hint="--plot")
    measured = measure.bench(
        _kernel(kernel, device),
        device=device,
        only=only,
        sizes=[_sizes(text) for text in sizes],
        watch=lambda timing: _progress(f"{timing.entrypoint} {dict(timing.sizes)}: {timing.steady * 1e3:.3g} ms"),
    )
    _progress("")
    if plot is not None:
        from kernel_loader.conformance.plot import roofline

        plot.write_text(roofline(measured), encoding="utf-8")
    click.echo(report.bench_to_json(measured) if as_json else report.of_bench(measured))


def _kernel(spelt: str, device: str | None) -> str | type:
    """A name, that of the kernel which serves a capability, or the class that module:Class is."""
    module, colon, name = spelt.partition(":")
    if not colon:
        from kernel_loader.api import default_loader
        from kernel_loader.conformance.plan import default_device

        on_cpu = (device or default_device()).partition(":")[0] == "cpu"
        return default_loader().serving(spelt, backend="cpu" if on_cpu else None)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m kernel_loader` has it
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except Exception as error:  # whatever the module raises
        raise click.BadParameter(f"{spelt} cannot be imported ({error})") from error
    if not isinstance(found, type):
        raise click.BadParameter(f"{spelt} is no class")
    return found


def _sizes(text: str) -> dict[str, Any]:
    """The numbers and words of m=16,layout=t."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.isidentifier() and value for name, _, value in pairs):
        raise click.BadParameter(f"{text!r} is not of the form m=16,n=4096", param_hint="--size")
    return {name: int(value) if re.fullmatch(r"-?\d+", value) else value for name, _, value in pairs}


def _progress(text: str) -> None:
    """What is being done, in a line that the next one replaces, where a person watches."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{text}", nl=False, err=True)


COMMANDS: Final = (check, bench)
