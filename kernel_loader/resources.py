"""Where the data that ships with the package lies: the embedded kernels and the manifests."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def data_directory(name: str) -> Path:
    """The directory `registry` or `manifests`: inside the package in a wheel, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
