"""The group of commands. Each is a thin door to a function of the library; `--json` gives its answer to programs.

Exit status: 0 done, 1 a clear negative, 2 wrong use. An error is one paragraph on standard error, with what to do next.
"""

from __future__ import annotations

import io
import sys

import click

from kernel_loader import __version__
from kernel_loader.cli import conformance, convert, doctor, kernels, sealed, store
from kernel_loader.errors import KernelLoaderError


class _Group(click.Group):
    """Turns the errors of the library into a paragraph and an exit status."""

    def invoke(self, ctx: click.Context) -> object:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a pipe of an old encoding lacks some marks of the tables
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read has enough, as `head` has: click ends without a word
        except (KernelLoaderError, OSError) as error:
            click.echo(f"kernel-loader: {error}", err=True)
            ctx.exit(1)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            click.echo(
                "kernel-loader: this needs torch, which is not installed here. Run `pip install torch`.", err=True
            )
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernel-loader")
def main() -> None:
    """Find, verify and load the compiled GPU kernel that fits a machine."""


for command in (
    *kernels.COMMANDS,
    *conformance.COMMANDS,
    *convert.COMMANDS,
    *doctor.COMMANDS,
    *sealed.COMMANDS,
    *store.COMMANDS,
):
    main.add_command(command)
