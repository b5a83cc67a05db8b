"""What a project locks: `[tool.kernel-loader]` of its pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from kernel_loader.errors import ManifestError
from kernel_loader.lock import FILE_NAME
from kernel_loader.reading import Node

PROJECT: Final = "pyproject.toml"


class Project(NamedTuple):
    """Which kernels a project loads, as on the command line, and where its lock file is."""

    kernels: tuple[str, ...]
    lock: Path


def read_project(directory: Path) -> Project | None:
    """The project of a directory; None where its pyproject.toml says nothing of kernels.

    `kernels` lists them as on the command line; `[tool.kernel-loader.layers]` is a mapping of layers, whose
    repositories are locked too; `lock` is the path of the lock file, by default beside pyproject.toml.

    Raises:
        ManifestError: it cannot be read, or holds something else.
    """
    import tomllib

    file = directory / PROJECT
    if not file.is_file():
        return None
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(str(file), "", f"it cannot be read ({error})") from error
    tool = Node(tables, lambda path, detail: ManifestError(str(file), f"tool.{path}", detail)).table()
    if "kernel-loader" not in tool:
        return None
    own = tool["kernel-loader"].table()
    for key, value in own.items():
        if key not in ("kernels", "layers", "lock"):
            value.error("unknown key; there are kernels, layers, lock")
    named = own["kernels"].texts() if "kernels" in own else ()
    layers = _of_layers(own["layers"], file) if "layers" in own else ()
    lock = own["lock"].text() if "lock" in own else FILE_NAME
    return Project(tuple(dict.fromkeys((*named, *layers))), directory / lock)


def _of_layers(node: Node, file: Path) -> tuple[str, ...]:
    """The repositories of a mapping, as on the command line."""
    from kernel_loader.layers.mapping import read_layers

    mapping = read_layers(node.value, str(file), trusted=False)
    repositories = [
        repository
        for devices in mapping.values()
        for modes in devices.values()
        for repository in (modes.values() if isinstance(modes, Mapping) else (modes,))
    ]
    # A LayerRepository is spelt as on the command line, and its layer behind a colon.
    return tuple(sorted({str(repository).rpartition(":")[0] for repository in repositories}))
