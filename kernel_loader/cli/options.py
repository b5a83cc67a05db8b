"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kernel_loader.errors import HostError
from kernel_loader.host import Host
from kernel_loader.presets import PREFIX, preset

if TYPE_CHECKING:
    from kernel_loader.loader import KernelLoader

as_json = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
backend = click.option("--backend", help='"cpu", or the backend of the machine\'s torch (the default).')
trust = click.option(
    "--trust-remote-code", is_flag=True, help="Let code of repositories pass whose publisher the Hub does not trust."
)

lock = click.option(
    "--lock",
    "lock_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take what this lock file names, and no other bytes.",
)
all_variants = click.option(
    "--all-variants", is_flag=True, help="Every build of each repository, not only the one that fits."
)

_EXAMPLE: Final = f"{PREFIX}h200-cu130-torch2.11"
_HELP: Final = (
    f"Answer for another machine: a file that `kernel-loader host --json` made there, or {_EXAMPLE} "
    "(`kernel-loader host --presets` lists them)."
)

if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType  # which older releases of click have no types for


class _Described(_TextType):
    """Where a machine is described: a file that is there, "-" for standard input, or a preset that is known."""

    name = "file|preset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401
        try:
            if value.startswith(PREFIX):
                preset(value.removeprefix(PREFIX))
            else:
                click.Path(exists=True, dir_okay=False, allow_dash=True).convert(value, param, ctx)
        except HostError as error:
            self.fail(str(error), param, ctx)
        except click.BadParameter as error:
            self.fail(f"{error.message} A host without a file begins with {PREFIX}, as {_EXAMPLE} does.", param, ctx)
        return str(value)


host = click.option("--host", "host_file", type=_Described(), help=_HELP)
hosts = click.option("--host", "host_files", type=_Described(), multiple=True, help=f"{_HELP} Any number of times.")


def read_host(described: str) -> Host:
    """The machine of a file, of standard input, or of a preset.

    Raises:
        HostError: it is no description, or there is no such preset; the error names it.
    """
    if described.startswith(PREFIX):
        return preset(described.removeprefix(PREFIX))
    with click.open_file(described, "rb") as stream:
        text = stream.read()
    try:
        return Host.from_json(text)
    except HostError as error:
        raise HostError(f"{described}, {error.path}", error.detail, error.advice) from error


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def locked_loader(lock_file: Path | None, kernels: tuple[str, ...]) -> tuple[KernelLoader, tuple[str, ...]]:
    """A loader, under a lock where one is named, and the kernels that are meant: by default all that are locked.

    Raises:
        click.UsageError: there are neither kernels nor a lock.
    """
    from kernel_loader.loader import KernelLoader

    loader = KernelLoader(lock=lock_file)
    asked = kernels or tuple(kernel.name for kernel in (loader.lock.kernels if loader.lock is not None else ()))
    if not asked and loader.lock is not None:
        raise click.UsageError("Name kernels: the lock has none that was asked for, or names commits alone.")
    if not asked:
        raise click.UsageError("Name kernels, or a lock file that does (--lock FILE).")
    return loader, asked
