"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kernel_loader.errors import HostError
from kernel_loader.host import Host

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

_HELP: Final = "Answer for the machine that this file describes (made there by `kernel-loader host --json`)."
_FILE: Final = click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)

host = click.option("--host", "host_file", type=_FILE, help=_HELP)
hosts = click.option("--host", "host_files", type=_FILE, multiple=True, help=f"{_HELP} May be given several times.")


def read_host(file: Path) -> Host:
    """The machine that a file, or standard input, describes.

    Raises:
        HostError: it is no description; the error names the file.
    """
    with click.open_file(str(file), "rb") as stream:
        text = stream.read()
    try:
        return Host.from_json(text)
    except HostError as error:
        raise HostError(f"{file}, {error.path}", error.detail, error.advice) from error


def locked_loader(lock_file: Path | None, kernels: tuple[str, ...]) -> tuple[KernelLoader, tuple[str, ...]]:
    """A loader, under a lock where one is named, and the kernels that are meant: by default all that are locked.

    Raises:
        click.UsageError: there are neither kernels nor a lock.
    """
    from kernel_loader.loader import KernelLoader

    loader = KernelLoader(lock=lock_file)
    asked = kernels or tuple(kernel.name for kernel in (loader.lock.kernels if loader.lock is not None else ()))
    if not asked:
        raise click.UsageError("Name kernels, or a lock file that does (--lock FILE).")
    return loader, asked
