"""Bundles: as they are exported from a Hub, and as somebody with a grudge, or a bad disk, would make them."""

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kernel_loader.carry.archive import import_archive, write_archive
from kernel_loader.carry.contents import Bundle
from kernel_loader.index import Index
from kernel_loader.lock import LockedFile, digest_of
from kernel_loader.store import NAME_DIGITS, Store
from tests.published.conftest import Site, own_hf_cache, site

__all__ = ["own_hf_cache", "site"]  # fixtures

COMMIT = "c0ffee" * 6 + "beef"
BUILD = {
    "__init__.py": b"from .sub.part import part\nvalue = 1\n",
    "metadata.json": b'{"name": "kernel", "version": 1}\r\n',
    "sub/part.py": b"part = 1\n",
}


def listed(build: Mapping[str, bytes]) -> tuple[LockedFile, ...]:
    """The files of a build as a bundle names them."""
    return tuple(
        LockedFile(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in sorted(build.items())
    )


def digest(build: Mapping[str, bytes] = BUILD) -> str:
    return digest_of(listed(build))


def document(*builds: Mapping[str, bytes], **more: Any) -> dict[str, Any]:
    """A bundle.json that carries builds of org/kernel, variants torch-universal, torch-cpu, torch-cuda in turn."""
    variants = dict(zip(("torch-universal", "torch-cpu", "torch-cuda"), builds or (BUILD,), strict=False))
    texts = {
        variant: build["metadata.json"].decode() if "metadata.json" in build else None
        for variant, build in variants.items()
    }
    return {
        "schema": 1,
        "repositories": [
            {
                "repo": "org/kernel",
                "revision": "v1",
                "commit": COMMIT,
                "names": sorted(variants),
                "metadata": texts,
                "builds": {variant: digest(build) for variant, build in variants.items()},
            }
        ],
        "builds": {
            digest(build): {file.path: {"size": file.size, "sha256": file.sha256} for file in listed(build)}
            for build in variants.values()
        },
        "publishers": ["org"],
    } | more


def member(path: str, build: Mapping[str, bytes] = BUILD) -> str:
    return f"builds/{digest(build)[:NAME_DIGITS]}/{path}"


def members(*builds: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members of the bundle that has this document."""
    content = {"bundle.json": json.dumps(document(*builds)).encode()}
    return content | {member(path, b): text for b in builds or (BUILD,) for path, text in b.items()}


def pack(file: Path, content: Mapping[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    """A ZIP of these members."""
    with zipfile.ZipFile(file, "w", kind) as archive:
        for name, text in content.items():
            archive.writestr(zipfile.ZipInfo(name), text, kind)
    return file


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A bundle of one build, as the exporter writes it."""
    return write(tmp_path, BUILD)


def write(home: Path, *builds: Mapping[str, bytes], name: str = "good.klb", **more: Any) -> Path:
    """The bundle of builds, as the exporter writes it."""
    directories = {}
    for build in builds:
        directories[digest(build)] = home / "sources" / digest(build)
        for path, content in build.items():
            target = directories[digest(build)] / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    write_archive(home / name, Bundle.parse(json.dumps(document(*builds, **more))), directories)
    return home / name


def bring(file: Path, home: Path, lock: Any = None, shared: tuple[Path, ...] = ()) -> list[Any]:
    """Import a bundle into the store of a directory."""
    store = Store(home, shared)
    return import_archive(file, store, Index(store), lock)


def kept(home: Path) -> dict[str, bytes]:
    """Every file in a store, and every directory that a build could be in; receipts apart, which tell of the disk."""
    return {
        str(path.relative_to(home)): path.read_bytes() if path.is_file() else b""
        for path in home.rglob("*")
        if path.is_file() or "staging" in path.parts[len(home.parts) : -1]
    }


def imported(home: Path) -> dict[str, Any]:
    """What an import left behind, as far as it decides anything: builds, and what the index knows."""
    content: dict[str, Any] = {
        str(path.relative_to(home)): path.read_bytes() for path in (home / "builds").rglob("*") if path.is_file()
    }
    for path in [*(home / "index").glob("*.json"), *(home / "publishers").glob("*.json")]:
        content[path.name] = {
            key: value for key, value in json.loads(path.read_bytes()).items() if key not in ("checked", "asked")
        }
    return content


@pytest.fixture
def sealed(site: Site) -> Callable[..., Any]:
    """A loader on a machine of its own, without a network; the requests that it makes all the same would be seen."""
    site.sealed = site.root / "sealed"  # type: ignore[attr-defined]

    def loader(*given: Any, **settings: Any) -> Any:
        site.hub.requests.clear()
        return site.loader(*given, **({"cache": site.root / "sealed", "offline": True} | settings))

    return loader
