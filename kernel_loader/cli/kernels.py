"""Commands about machines and kernels: host, list, explain, load, prefetch."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import click

from kernel_loader.cli import options
from kernel_loader.errors import KernelLoaderError, NotCached
from kernel_loader.host import Host
from kernel_loader.settings import Settings


@click.command()
@options.host
@click.option("--presets", is_flag=True, help="List the accelerators of presets instead.")
@options.as_json
def host(host_file: str | None, presets: bool, as_json: bool) -> None:  # noqa: FBT001 - flags of the command line
    """Show what this machine is, and where each fact comes from.

    With --host and --json, a preset becomes a description that can be corrected.
    """
    if presets and host_file:
        raise click.UsageError("--presets lists all that there are; leave it out to see the one of --host.")
    if presets:
        _list_presets(as_json=as_json)
        return
    machine = options.read_host(host_file) if host_file else Host.detect(Settings.from_env().overrides)
    if as_json:
        click.echo(machine.to_json())
        return
    shown = [f.name for f in fields(Host) if f.name not in ("unknown", "provenance")]
    for name in shown:
        click.echo(f"{name:14} {_fact(machine, name):30} {machine.provenance.get(name, '')}".rstrip())


def _list_presets(*, as_json: bool) -> None:
    from kernel_loader.presets import ACCELERATORS, ASSUMES, FORM, PREFIX, UNKNOWN

    if as_json:
        rows = {name: accelerator._asdict() for name, accelerator in ACCELERATORS.items()}
        click.echo(json.dumps({"form": FORM, "assumes": ASSUMES, "unknown": UNKNOWN, "accelerators": rows}, indent=2))
        return
    click.echo(f"A preset is {PREFIX}{FORM}.\n")
    for name, one in ACCELERATORS.items():
        backends = " or ".join(one.backends)
        click.echo(f"{name:11} {one.arch or '':8} {backends:13} {one.os:7} {one.cpu:8} {one.name}")
    click.echo(f"\nIt assumes {ASSUMES}.\nUnknown stay {', '.join(UNKNOWN)}.")


def _fact(machine: Host, name: str) -> str:
    value = getattr(machine, name)
    if name in machine.unknown:
        return "unknown"
    if name == "packages":
        return f"{len(value)} installed"
    if name == "devices":
        return ", ".join(f"{d.arch} {d.name}".strip() for d in value) or "none"
    return {None: "absent", True: "yes", False: "no"}.get(value, str(value))


@click.command("list")
@options.host
@options.as_json
def list_kernels(host_file: str | None, as_json: bool) -> None:  # noqa: FBT001 - a flag of the command line
    """List the named kernels, and the build that each would take, as far as that is known without the Hub.

    By default on this machine. Then the capabilities, which several kernels offer: their features, and the order in
    which kernels are asked.
    """
    from kernel_loader.loader import KernelLoader

    machine = options.read_host(host_file) if host_file else None
    loader = KernelLoader(replace(Settings.from_env(), offline=True), machine)
    rows = []
    for name in loader.catalog.names():
        row: dict[str, Any] = {"name": name, "repo": None, "summary": "", "offers": {}}
        try:
            manifest = loader.catalog.get(name)
            row |= {"repo": manifest.repo, "summary": manifest.summary, "offers": _offers(manifest)}
            resolution = loader.resolve(name)
            row["build"] = _taken(resolution)
        except NotCached:
            row["build"] = "not known yet (`kernel-loader explain` asks the Hub)"
        except KernelLoaderError as error:
            row["build"] = f"none: {error.problem}"
        rows.append(row)
    capabilities: list[dict[str, Any]] = []
    try:
        capabilities += [_capability(loader.catalog, name) for name in sorted(loader.catalog.capabilities)]
    except KernelLoaderError as error:  # takes no kernels with it
        click.echo(f"kernel-loader: {error}", err=True)
    if as_json:
        click.echo(json.dumps({"kernels": rows, "capabilities": capabilities}, indent=2))
        return
    where = "here" if machine is None else "there"
    for row in rows:
        offered = (f"{name}[{', '.join(has)}]" if has else name for name, has in row["offers"].items())
        offers = f"offers: {', '.join(offered)}" if row["offers"] else None
        lines = [row["summary"], row["repo"] or "embedded", offers, f"{where}: {row['build']}"]
        click.echo("\n".join([str(row["name"]), *(f"    {line}" for line in lines if line)]))
    click.echo("\nCapabilities:" if capabilities else "")
    for one in capabilities:
        lines = [one["summary"], *(f"{feature}: {meaning}" for feature, meaning in one["features"].items())]
        lines.append(f"asked in this order: {', '.join(one['order'])}" if one["order"] else "no kernel offers it")
        click.echo("\n".join([one["name"], *(f"    {line}" for line in lines if line)]))


def _offers(manifest: Any) -> dict[str, list[str]]:  # noqa: ANN401 - a Manifest
    """What a kernel can do: capability -> features, with the backends where they are not all."""
    return {name: list(map(str, features)) for name, features in manifest.capabilities.items()}


def _capability(catalog: Any, name: str) -> dict[str, Any]:  # noqa: ANN401 - a Catalog
    from kernel_loader.capability import Wanted

    capability = catalog.capabilities[name]
    offers = catalog.offers(Wanted(name), "cpu")
    return {
        "name": name,
        "summary": capability.summary,
        "features": {feature: about.meaning for feature, about in sorted(capability.features.items())},
        "order": [offer.manifest.name for offer in offers if name in offer.manifest.capabilities],
    }


def _taken(resolution: Any) -> str:  # noqa: ANN401 - a Resolution, whose module is imported only when it is needed
    taken = resolution.taken
    if taken is None:
        return "none"
    if taken is resolution.reference:
        return f"{taken.chosen.name} ({'reference' if taken.chosen.is_universal else 'embedded'})"
    return taken.chosen.name if taken is resolution else f"{taken.chosen.name} of {taken.repo}"


@click.command()
@click.argument("kernel")
@options.host
@options.backend
@options.as_json
def explain(kernel: str, host_file: str | None, backend: str | None, as_json: bool) -> None:  # noqa: FBT001
    """Show which build of KERNEL a machine would take, and why not the others.

    KERNEL is a registered name; a capability, such as attention[varlen]; or a repository: org/name, org/name@3 (a
    version), org/name@branch-or-commit. Exits 1 when nothing fits, not even a reference, and when that cannot be told
    since the Hub cannot be asked; what is known is shown all the same.
    """
    from kernel_loader.api import default_loader
    from kernel_loader.planning import spelt

    name, version, revision = spelt(kernel)
    machine = options.read_host(host_file) if host_file else None
    resolution = default_loader().resolve(
        name, version=version, revision=revision, backend=backend, host=machine, partly=True
    )
    click.echo(resolution.to_json() if as_json else resolution.explain())
    if resolution.doubt:
        click.echo(f"kernel-loader: {resolution.doubt}", err=True)
    if resolution.taken is None:
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("kernel")
@options.backend
@click.option("--fallback", type=click.Choice(["reference", "error"]), help="What to do when no build can be had.")
@options.trust
@options.as_json
def load(kernel: str, backend: str | None, fallback: Any, trust_remote_code: bool, as_json: bool) -> None:  # noqa: ANN401, FBT001
    """Load KERNEL as a program would, and show what was loaded from where.

    KERNEL is a registered name, a capability, or a repository: org/name@3 (a version), org/name@branch-or-commit.
    """
    from kernel_loader import api
    from kernel_loader.planning import spelt

    name, version, revision = spelt(kernel)
    if "/" in name:
        loaded: Any = api.load_module(
            name, version=version, revision=revision, backend=backend, trust_remote_code=trust_remote_code
        )
        entrypoints = sorted(symbol for symbol in vars(loaded) if not symbol.startswith("_"))
    else:
        loaded = api.load_kernel(name, version=version, revision=revision, backend=backend, fallback=fallback)
        entrypoints = [field.name for field in fields(loaded)]
    origin = api.origin(loaded)
    facts = origin._asdict() | {"path": str(origin.path), "entrypoints": entrypoints}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for key, value in facts.items():
        click.echo(f"{key:12} {', '.join(value) if isinstance(value, list | tuple) else value}")


@click.command()
@click.argument("kernels", nargs=-1)
@options.hosts
@options.all_variants
@options.lock
@click.option("--dry-run", is_flag=True, help="Fetch nothing; show what would be, and how many bytes.")
@options.trust
@options.as_json
def prefetch(
    kernels: tuple[str, ...],
    host_files: tuple[str, ...],
    all_variants: bool,  # noqa: FBT001 - a flag of the command line
    lock_file: Path | None,
    dry_run: bool,  # noqa: FBT001
    trust_remote_code: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
) -> None:
    """Bring the builds of KERNELS into the store, so that loading them asks nothing of the network.

    With them come the kernels that they depend on. Under a lock, KERNELS are by default all that it names.
    """
    loader, asked = options.locked_loader(lock_file, kernels)
    hosts = [options.read_host(file) for file in host_files] or None
    ready = loader.prefetch(
        asked, hosts=hosts, all_variants=all_variants, trust_remote_code=trust_remote_code, dry_run=dry_run
    )
    if as_json:
        rows = [item._asdict() | {"path": str(item.path) if item.path is not None else None} for item in ready]
        click.echo(json.dumps(rows, indent=2))
        return
    for item in ready:
        where = f"{item.size:,} B to fetch" if item.path is None else item.path
        click.echo(f"{item.kernel}  {item.variant}{' (reference)' if item.reference else ''}  {where}")
    if dry_run:
        click.echo(f"{sum(item.size for item in ready if not item.here):,} B to fetch")


COMMANDS: Final = (host, list_kernels, explain, load, prefetch)
