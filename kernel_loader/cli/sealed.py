"""Commands for machines without a network: lock, export, import."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import click

from kernel_loader.cli import options
from kernel_loader.cli.project import PROJECT, read_project
from kernel_loader.errors import LockMissing, NotCached, RequestError
from kernel_loader.files import replace_file
from kernel_loader.lock import FILE_NAME, Lock, LockedKernel
from kernel_loader.settings import Settings

_EVERY: Final = "*"


@click.command()
@click.argument("kernels", nargs=-1)
@click.option("--file", type=click.Path(dir_okay=False, path_type=Path), help=f"The lock file; by default {FILE_NAME}.")
@click.option(
    "--upgrade",
    multiple=True,
    is_flag=False,
    flag_value=_EVERY,
    metavar="[NAME]",
    help="Look anew at a kernel that is locked, or at all of them.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 when the file is not up to date.")
@options.trust
@options.as_json
def lock(
    kernels: tuple[str, ...],
    file: Path | None,
    upgrade: tuple[str, ...],
    check: bool,  # noqa: FBT001 - a flag of the command line
    trust_remote_code: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """Write a lock file: which commit of each repository is loaded, and what all its builds consist of.

    KERNELS are added to what the file has; without any, it is made what `[tool.kernel-loader]` of the pyproject.toml
    here lists, or else what it has is looked at. What is locked already stays as it is, unless it is to be upgraded.
    --check alone asks nobody; with --upgrade it also looks whether something newer was published.
    """
    from kernel_loader.loader import KernelLoader

    settings = Settings.from_env()
    project = read_project(Path.cwd()) if not (kernels and file) else None
    target = file or (project.lock if project is not None else settings.lock or Path(FILE_NAME))
    known = _known(target)
    there = _kernels_of(known)
    listed = project.kernels if project is not None else ()
    asked = (*there, *kernels) if kernels else listed or there
    if not asked:
        advice = f"Name kernels, or list them in {PROJECT}: [tool.kernel-loader] kernels = [...]."
        raise RequestError("there is nothing to lock", advice)
    loader = KernelLoader(replace(settings, lock=None, offline=settings.offline or (check and not upgrade)))
    try:
        made = loader.make_lock(
            asked,
            known=known,
            upgrade=None if _EVERY in upgrade else upgrade,
            trust_remote_code=trust_remote_code,
        )
    except NotCached as error:
        if not check or upgrade:
            raise
        changes = [f"{error.source} is not locked" if known is not None else "the file is not there"]
    else:
        changes = _changes(known, made)
        if not check and (changes or not target.exists()):
            _write(target, made)
    if as_json:
        click.echo(json.dumps({"file": str(target), "changes": changes}, indent=2))
    else:
        state = "is up to date" if not changes else "is not up to date" if check else "was written"
        click.echo("\n".join([*changes, f"{target} {state}"]))
    if check and changes:
        raise click.exceptions.Exit(1)


def _known(file: Path) -> Lock | None:
    try:
        return Lock.read(str(file))
    except LockMissing:
        return None


def _write(file: Path, made: Lock) -> None:
    try:
        replace_file(file.absolute(), made.to_toml().encode())
    except OSError as error:
        advice = f"Make its directory, or correct --file, or `lock` in {PROJECT}."
        raise RequestError(f"{file} cannot be written ({error.strerror or error})", advice) from error


def _kernels_of(known: Lock | None) -> tuple[str, ...]:
    return tuple(_kernels(known))


def _changes(known: Lock | None, made: Lock) -> list[str]:
    """What differs, a line for each repository and kernel."""
    old = {str(one.request): one for one in known.repositories} if known is not None else {}
    new = {str(one.request): one for one in made.repositories}
    lines = []
    for name in sorted(old.keys() | new.keys()):
        was, now = old.get(name), new.get(name)
        if now is None:
            lines.append(f"{name} is no longer needed")
        elif was is None:
            lines.append(f"{name} is locked at {now.commit[:12]}, {options.counted(len(now.builds or ()), 'build')}")
        elif was != now:
            lines.append(f"{name} goes from {was.commit[:12]} to {now.commit[:12]}")
    return [*lines, *_of_kernels(_kernels(known), _kernels(made))]


def _kernels(lock: Lock | None) -> dict[str, LockedKernel]:
    return {kernel.name: kernel for kernel in (lock.kernels if lock is not None else ())}


def _of_kernels(old: dict[str, LockedKernel], new: dict[str, LockedKernel]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            yield f"{name} is no longer locked"
        elif old.get(name) != new[name]:
            places = ", ".join(str(place.request) for place in new[name].places)
            yield f"{name} is {'now ' if name in old else ''}from {places}"


@click.command()
@click.argument("kernels", nargs=-1)
@click.option(
    "-o", "--output", "file", required=True, type=click.Path(dir_okay=False, path_type=Path), help="What is written."
)
@options.hosts
@options.all_variants
@click.option("--wheel", is_flag=True, help="Write a wheel (NAME-VERSION-py3-none-any.whl) for `pip install`.")
@options.lock
@options.trust
@options.as_json
def export(
    kernels: tuple[str, ...],
    file: Path,
    host_files: tuple[str, ...],
    all_variants: bool,  # noqa: FBT001 - a flag of the command line
    wheel: bool,  # noqa: FBT001
    lock_file: Path | None,
    trust_remote_code: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """Write the builds of KERNELS to one file, which `kernel-loader import` reads on a machine without a network.

    Under a lock, KERNELS are by default all that it names.
    """
    loader, asked = options.locked_loader(lock_file, kernels)
    hosts = [options.read_host(one) for one in host_files] or None
    bundle = loader.export(
        asked,
        file,
        hosts=hosts,
        all_variants=all_variants,
        trust_remote_code=trust_remote_code,
        wheel=wheel or file.suffix == ".whl",
    )
    rows = [
        {"repo": one.repo, "revision": one.revision, "commit": one.commit, "variant": variant, "digest": digest}
        | {"size": sum(listed.size for listed in bundle.files[digest])}
        for one in bundle.repositories
        for variant, digest in one.builds.items()
    ]
    if as_json:
        click.echo(json.dumps({"file": str(file), "builds": rows}, indent=2))
        return
    _show(rows)
    click.echo(f"{file}: {options.counted(len(bundle.files), 'build')}, {bundle.size:,} B")


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@options.lock
@options.as_json
def import_bundles(files: tuple[Path, ...], lock_file: Path | None, as_json: bool) -> None:  # noqa: FBT001
    """Bring the builds of bundles (FILES) into the store, verified; they are then loaded without the network."""
    from kernel_loader.loader import KernelLoader

    loader = KernelLoader(lock=lock_file)
    rows: list[dict[str, Any]] = []
    for file in files:
        for one in loader.import_bundle(file):
            rows.append(one._asdict())
            state = "imported" if one.new else "here already"
            if not as_json:  # at once: what comes may fail, and this stays
                click.echo(f"{state:12}  {one.digest[:12]}  {one.repo}@{one.revision}  {one.variant}")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif not rows:
        click.echo("no build was carried, only what must be known to choose")


def _show(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        where = f"{row['repo']}@{row['revision']}"
        click.echo(f"{row['digest'][:12]}  {row['size']:>13,} B  {where}  {row['variant']}")


COMMANDS: Final = (lock, export, import_bundles)
