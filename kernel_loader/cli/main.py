"""The commands. Each is a thin door to a function of the library; `--json` gives its answer to programs.

Exit status: 0 done, 1 a clear negative, 2 wrong use. An error is one paragraph on standard error, with what to do next.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import click

from kernel_loader import __version__
from kernel_loader.errors import KernelLoaderError
from kernel_loader.host import Host
from kernel_loader.settings import Settings

_VERSION: Final = re.compile(r"(?P<repo>[^@]+)@(?P<at>.+)")


class _Group(click.Group):
    """Turns the errors of the library into a paragraph and an exit status."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KernelLoaderError as error:
            click.echo(f"kernel-loader: {error}", err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernel-loader")
def main() -> None:
    """Find, verify and load the compiled GPU kernel that fits a machine."""


_json = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
_host = click.option(
    "--host",
    "host_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Answer for the machine that this file describes (made there by `kernel-loader host --json`).",
)
_backend = click.option("--backend", help='"cpu", or the backend of the machine\'s torch (the default).')


@main.command()
@_json
def host(as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """Show what this machine is, and where each fact comes from."""
    machine = Host.detect(Settings.from_env().overrides)
    if as_json:
        click.echo(machine.to_json())
        return
    shown = [f.name for f in fields(Host) if f.name not in ("unknown", "provenance")]
    for name in shown:
        click.echo(f"{name:14} {_fact(machine, name):30} {machine.provenance.get(name, '')}")


def _fact(machine: Host, name: str) -> str:
    value = getattr(machine, name)
    if name in machine.unknown:
        return "unknown"
    if name == "packages":
        return f"{len(value)} installed"
    if name == "devices":
        return ", ".join(f"{d.arch} {d.name}".strip() for d in value) or "none"
    return {None: "absent", True: "yes", False: "no"}.get(value, str(value))


@main.command("list")
@_json
def list_kernels(as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """List the named kernels, and the build that each would take here."""
    from kernel_loader.loader import default_loader

    loader = default_loader()
    rows = []
    for name in loader.catalog.names():
        manifest = loader.catalog.get(name)
        try:
            resolution = loader.resolve(name)
            build = resolution.chosen.name if resolution.chosen else _reference(resolution.reference)
        except KernelLoaderError as error:
            build = f"none: {error.problem}"
        rows.append({"name": name, "repo": manifest.repo, "summary": manifest.summary, "build": build})
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(f"{row['name']}\n    {row['summary']}\n    {row['repo'] or 'embedded'}\n    here: {row['build']}")


def _reference(resolution: Any) -> str:  # noqa: ANN401 - a Resolution, whose module is imported only when it is needed
    return f"{resolution.chosen.name} (reference)" if resolution is not None and resolution.chosen else "none"


@main.command()
@click.argument("kernel")
@_host
@_backend
@_json
def explain(kernel: str, host_file: Path | None, backend: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Show which build of KERNEL a machine would take, and why not the others.

    KERNEL is a registered name, or a repository: org/name, org/name@3 (a version), org/name@branch-or-commit. Exits 1
    when nothing fits, not even a reference.
    """
    from kernel_loader.loader import default_loader

    name, version, revision = _parse(kernel)
    machine = Host.from_json(host_file.read_bytes()) if host_file else None
    resolution = default_loader().resolve(name, version=version, revision=revision, backend=backend, host=machine)
    click.echo(resolution.to_json() if as_json else resolution.explain())
    reference = resolution.reference.chosen if resolution.reference else None
    if resolution.chosen is None and reference is None:
        raise click.exceptions.Exit(1)


@main.command()
@click.argument("kernel")
@_backend
@click.option("--fallback", type=click.Choice(["reference", "error"]), help="What to do when no build can be had.")
@_json
def load(kernel: str, backend: str | None, fallback: Any, as_json: bool) -> None:  # noqa: ANN401, FBT001
    """Load KERNEL as a program would, and show what was loaded from where."""
    from kernel_loader import loader

    name, version, revision = _parse(kernel)
    bundle = loader.load_kernel(name, version=version, revision=revision, backend=backend, fallback=fallback)
    origin = loader.origin(bundle)
    facts = {f.name: getattr(origin, f.name) for f in fields(origin)} | {"path": str(origin.path)}
    facts["entrypoints"] = [f.name for f in fields(bundle)]
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        click.echo(f"{key:12} {', '.join(value) if isinstance(value, list) else value}")


@main.command()
@click.argument("builds", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when digests are stale.")
@_json
def seal(builds: tuple[Path, ...], check: bool, as_json: bool) -> None:  # noqa: FBT001 - flags of the command line
    """Write the digests of builds' files into their metadata.json. Each argument is the directory of one build."""
    from kernel_loader.digest import is_sealed, seal as write

    changed = [build for build in builds if (not is_sealed(build) if check else write(build))]
    if as_json:
        click.echo(json.dumps({"changed": [str(build) for build in changed]}, indent=2))
    else:
        for build in changed:
            click.echo(f"{'stale' if check else 'sealed'}  {build}")
    if check and changed:
        raise click.exceptions.Exit(1)


def _parse(kernel: str) -> tuple[str, int | None, str | None]:
    """Name or repository, version and revision of a kernel on the command line."""
    match = _VERSION.fullmatch(kernel)
    if match is None:
        return kernel, None, None
    at = match["at"]
    return match["repo"], int(at) if at.isdecimal() else None, None if at.isdecimal() else at
