"""The interpreter and the distributions installed for it."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from kernel_loader.host import normal_distribution
from kernel_loader.probe.fact import Fact


def probe() -> Mapping[str, Fact]:
    """python, free_threaded, packages and tvm_ffi."""
    packages = installed(sys.path)
    return {
        "python": Fact(platform.python_version(), "platform.python_version"),
        "free_threaded": Fact("free-threading build" in sys.version, "sys.version"),
        "packages": Fact(packages, "names of *.dist-info on sys.path"),
        "tvm_ffi": Fact(packages.get("apache-tvm-ffi"), "installed distributions"),
    }


def installed(path: Iterable[str]) -> dict[str, str]:
    """Canonical name -> version of the distributions on a search path; the first on the path counts.

    Names and versions are read from directory names, which wheels fix as NAME-VERSION.dist-info: importlib.metadata
    would open one file for each of several hundred distributions.
    """
    found: dict[str, str] = {}
    for directory in path:
        try:
            names = os.listdir(directory or ".")  # noqa: PTH208 - names alone, thousands of them
        except OSError:
            continue  # zip files and directories that are gone may stand on sys.path
        for name in (name for name in names if name.endswith((".dist-info", ".egg-info"))):
            distribution, dash, version = name.rpartition(".")[0].partition("-")
            # egg-info names may go on, NAME-VERSION-pyX.Y; that of a project in development is its name alone.
            version = version.partition("-")[0] if dash else _version_in(Path(directory, name, "PKG-INFO"))
            found.setdefault(normal_distribution(distribution), version)
    return found


def _version_in(file: Path) -> str:
    try:
        match = re.search(r"^Version: (\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        match = None
    return match[1] if match else "0"
