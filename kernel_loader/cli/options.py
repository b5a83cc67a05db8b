"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from kernel_loader.errors import HostError
from kernel_loader.host import Host

as_json = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
backend = click.option("--backend", help='"cpu", or the backend of the machine\'s torch (the default).')
trust = click.option(
    "--trust-remote-code", is_flag=True, help="Let code of repositories pass whose publisher the Hub does not trust."
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
