"""Commands for when something is wrong: doctor and verify."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from kernel_loader.cli import options
from kernel_loader.diagnosis import Diagnosis, Directory, Kernel, Locked, Setting, diagnose, without_secrets
from kernel_loader.settings import Settings
from kernel_loader.store import Store
from kernel_loader.verification import Checked, check_file, check_installation

_WIDTH: Final = 100
_LABEL: Final = 14

# Reasons that are shown of kernels in one state; the others are together in one more row.
_REASONS: Final = 6
_FINDINGS: Final = 20

_MEANS: Final[Mapping[str, str]] = {
    "ready": "loads now, from",
    "reference": "takes the reference",
    "to fetch": "to be fetched, its build is known",
    "not known": "not known until the Hub is asked",
    "does not load": "does not load",
}


@click.command()
@options.host
@options.as_json
def doctor(host_file: str | None, as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """Show on one page what this machine is, what would load without the network, and what to do about what is wrong.

    The page holds no token and no credentials, and is made to be pasted into a report. The network is not asked. Exits
    1 when a finding is an error.
    """
    machine = options.read_host(host_file) if host_file else None
    seen = diagnose(host=machine)
    page = seen.to_json() if as_json else "\n".join(_page(seen, host_file or ""))
    click.echo(without_secrets(page))
    if seen.fails:
        raise click.exceptions.Exit(1)


def _page(seen: Diagnosis, described_by: str) -> Iterator[str]:
    yield f"Machine, by {described_by}" if described_by else "Machine"
    for fact in seen.machine:
        yield from _row(fact.name, f"{fact.value}  ({fact.note})" if fact.note else fact.value)
    yield from _section("Versions")
    yield from _row("", ", ".join(f"{name} {version}" for name, version in seen.versions.items()))
    yield from _section("Settings")
    for setting in (setting for setting in seen.settings if setting.variables):
        yield from _row(setting.name, f"{setting.value}  ({', '.join(setting.variables)})")
    yield from _row("by default", _defaults(seen.settings))
    yield from _row("the Hub", ", ".join(f"{name}: {value}" for name, value in seen.hub.items()))
    yield from _section("Store")
    for directory in seen.directories:
        yield from _row("written" if directory.written else "read", _of_directory(directory))
    for package in seen.packages:
        yield from _row("package", f"{package.path}: {options.counted(package.builds, 'build')}, {package.size:,} B")
    if seen.lock is not None:
        yield from _row("lock", _of_lock(seen.lock))
    yield from _section(
        f"Kernels without the network ({len(seen.kernels)}; `kernel-loader explain NAME` has the details)"
    )
    for state, means in _MEANS.items():
        yield from _of_state(means, [kernel for kernel in seen.kernels if kernel.state == state])
    yield from _section("Findings" if seen.findings else "No findings.")
    for finding in seen.findings[:_FINDINGS]:
        yield from _wrapped("  ", f"{finding.severity}: {finding.problem} {finding.remedy}", 4)
    if len(seen.findings) > _FINDINGS:
        yield f"  and {len(seen.findings) - _FINDINGS} more, which --json tells"


def _section(title: str) -> tuple[str, ...]:
    return ("", title)


def _row(label: str, text: str) -> Iterator[str]:
    return _wrapped(f"  {label:{_LABEL}}" if label else "  ", text)


def _wrapped(head: str, text: str, indent: int | None = None) -> Iterator[str]:
    """A text behind a head, and its further lines below it."""
    further = " " * (len(head) if indent is None else indent)
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _defaults(settings: Iterable[Setting]) -> str:
    return ", ".join(f"{s.name} {s.value}" for s in settings if not s.variables and s.name not in ("cache", "shared"))


def _of_directory(directory: Directory) -> str:
    if directory.state:
        return f"{directory.path}  {directory.state}"
    may = "" if directory.writable or not directory.written else ", cannot be written"
    free = f", {directory.free / 2**30:.1f} GiB free" if directory.free is not None else ""
    return f"{directory.path}: {options.counted(directory.builds, 'build')}, {directory.size:,} B{free}{may}"


def _of_lock(lock: Locked) -> str:
    if lock.repositories and not lock.kernels:
        return f"{lock.file}: the commits of {lock.repositories} repositories"
    runs = ", ".join(name for name, build in lock.kernels.items() if build)
    return f"{lock.file}: {len(lock.kernels)} kernels, {lock.repositories} repositories; a build here: {runs or 'none'}"


def _of_state(means: str, kernels: list[Kernel]) -> Iterator[str]:
    """The names of kernels in one state, those of one reason together, the most first."""
    groups: dict[str, list[str]] = {}
    for kernel in kernels:
        groups.setdefault(kernel.why or kernel.where, []).append(kernel.name)
    rows = sorted(groups.items(), key=lambda row: (-len(row[1]), row[0]))
    shown = rows if len(rows) <= _REASONS else rows[: _REASONS - 1]
    others = sorted(name for _, names in rows[len(shown) :] for name in names)
    if kernels:
        yield f"  {means}: {len(kernels)}" if any(why for why, _ in rows) else f"  {means}:"
    for why, names in [*shown, *([("of other reasons", others)] if others else [])]:
        yield from _wrapped("    ", f"{why}: {', '.join(names)}" if why else ", ".join(names), 6)


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@options.as_json
def verify(files: tuple[Path, ...], as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """Hash anew what is on this machine, and name everything that is not as it was published.

    Each of FILES is a bundle or a lock. Without any: the embedded kernels, all builds of the store's directories and of
    installed packages, and the lock in force. Exits 1 when something is not whole.
    """
    settings = Settings.from_env()
    store = Store(settings.cache, settings.shared)
    checked = [check_file(file, store) for file in files] if files else list(check_installation(settings))
    if as_json:
        click.echo(json.dumps([one._asdict() for one in checked], indent=2))
    else:
        for one in checked:
            click.echo("\n".join(_lines(one)))
    if any(one.violations for one in checked):
        raise click.exceptions.Exit(1)


def _lines(one: Checked) -> Iterator[str]:
    state = "damaged" if one.violations else "whole"
    note = f" ({one.note})" if one.note else ""
    yield f"{state:8} {one.what}: {options.counted(one.builds, 'build')}, {one.size:,} B{note}"
    for violation in one.violations:
        yield f"    {violation}"


COMMANDS: Final = (doctor, verify)
