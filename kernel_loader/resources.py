"""Where the data that ships with the package lies: the embedded kernels and the manifests."""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import Final

# The namespace package below which packages of builds are installed.
INSTALLED: Final = "kernel_loader_builds"

_PACKAGE = Path(__file__).parent


def data_directory(name: str) -> Path:
    """The directory `registry` or `manifests`: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def installed_builds() -> tuple[Path, ...]:
    """The directories of builds that packages have brought (`kernel-loader export --wheel`), by name.

    They share a namespace package of which nothing is ever imported, so that finding them costs a look into each
    directory of `sys.path` and no reading of what every distribution says of itself.
    """
    spec = importlib.machinery.PathFinder.find_spec(INSTALLED)
    places = (Path(place) for place in (spec.submodule_search_locations if spec else None) or ())
    return tuple(sorted(entry for place in places if place.is_dir() for entry in place.iterdir() if entry.is_dir()))
