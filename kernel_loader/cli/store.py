"""Commands about builds on disk: seal, and the store's cache ls, prune, verify and dir."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final

import click

from kernel_loader.cli import options
from kernel_loader.errors import KernelLoaderError
from kernel_loader.host import Host
from kernel_loader.resolver import resolve
from kernel_loader.settings import Settings
from kernel_loader.store import Store, Stored

_DAY: Final = 86400.0


@click.command()
@click.argument("builds", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when digests are stale.")
@options.as_json
def seal(builds: tuple[Path, ...], check: bool, as_json: bool) -> None:  # noqa: FBT001 - flags of the command line
    """Write the digests of builds' files into their metadata.json. Each argument is the directory of one build."""
    from kernel_loader.digest import is_sealed, seal as write

    changed = [build for build in builds if (not is_sealed(build) if check else write(build))]
    if as_json:
        click.echo(json.dumps({"changed": [str(build) for build in changed]}, indent=2))
    else:
        for build in builds:
            state = "up to date" if build not in changed else "stale" if check else "sealed"
            click.echo(f"{state}  {build}")
    if check and changed:
        raise click.exceptions.Exit(1)


@click.group()
def cache() -> None:
    """Look after the store of builds."""


@cache.command("dir")
@options.as_json
def directory(as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """Show where the store is: the directory that is written, then those that are read too."""
    settings = Settings.from_env()
    if as_json:
        click.echo(json.dumps({"cache": str(settings.cache), "shared": [str(p) for p in settings.shared]}, indent=2))
        return
    click.echo(f"{settings.cache}  (written)" if settings.shared else settings.cache)
    for path in settings.shared:
        click.echo(path)


def _store() -> Store:
    settings = Settings.from_env()
    return Store(settings.cache, settings.shared)


@cache.command("ls")
@options.as_json
def ls(as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """List the builds in the store: size, last use, and whether they would run on this machine."""
    store, host = _store(), Host.detect(Settings.from_env().overrides)
    rows = [_row(stored, host) for stored in store.all()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        age = (time.time() - row["last_use"]) / _DAY
        here = "runs here" if row["usable"] else "elsewhere"
        where = f"  in {row['directory']}" if len(store.directories) > 1 else ""
        click.echo(f"{row['digest'][:12]}  {row['size']:>12,} B  {age:6.1f} days  {here:9}  {row['what']}{where}")
    click.echo(f"{options.counted(len(rows), 'build')}, {sum(row['size'] for row in rows):,} B")


def _row(stored: Stored, host: Host) -> dict[str, Any]:
    sources = [f"{s.repo}@{s.revision} {s.variant}" for s in stored.sources]
    return {
        "digest": stored.digest,
        "size": stored.size,
        "last_use": stored.last_use,
        "usable": any(resolve([s.variant], host).chosen for s in stored.sources),
        "what": ", ".join(sources),
        "path": str(stored.path),
        "directory": str(stored.home),
    }


@cache.command()
@options.as_json
def verify(as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """Hash every file of every build in the store. Exits 1 when one is not what was published."""
    store = _store()
    problems: dict[str, list[str]] = {}
    for stored in store.all():
        told = problems.setdefault(stored.digest, [])  # of all directories that have the build
        try:
            store.verify(stored)
        except KernelLoaderError as error:
            told.append(error.problem)
    results = {digest: " ".join(told) or "whole" for digest, told in problems.items()}
    if as_json:
        click.echo(json.dumps(results, indent=2))
    else:
        for digest, result in results.items():
            click.echo(f"{digest[:12]}  {result}")
    if any(result != "whole" for result in results.values()):
        raise click.exceptions.Exit(1)


@cache.command()
@click.option("--older-than", "days", type=float, default=0.0, help="Only builds that were not used for so many days.")
@click.option("--dry-run", is_flag=True, help="Remove nothing; show what would be.")
@options.as_json
def prune(days: float, dry_run: bool, as_json: bool) -> None:  # noqa: FBT001 - flags of the command line
    """Remove builds from the directory that is written. A build that a process on this machine has loaded stays."""
    store = _store()
    old = [stored for stored in store.builds_in(store.root) if time.time() - stored.last_use >= days * _DAY]
    gone = [stored for stored in old if dry_run or store.remove(stored.digest)]
    if as_json:
        click.echo(json.dumps({"removed": [stored.digest for stored in gone], "dry_run": dry_run}, indent=2))
        return
    for stored in old:
        state = "in use" if stored not in gone else "would go" if dry_run else "removed"
        click.echo(f"{state}  {stored.digest[:12]}  {stored.size:,} B")
    click.echo(f"{sum(stored.size for stored in gone):,} B")


COMMANDS: Final = (seal, cache)
