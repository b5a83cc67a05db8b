"""`verify`: every bit that is not as it was published is found and named, and the rest is verified all the same."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kernel_loader
from kernel_loader.resources import data_directory
from tests.published.conftest import files, own_hf_cache, site

__all__ = ["own_hf_cache", "site"]  # fixtures

SIZE = sum(map(len, files().values()))
CHANGED = "part3.py has other content"


@pytest.fixture
def run(site):
    """The command in a process of its own: exit status, and a row for each part."""

    def run(*arguments, **environ):
        def once(*more):
            return subprocess.run(
                [sys.executable, "-m", "kernel_loader", "verify", *map(str, arguments), *more],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                env=site.environ(**environ),
                cwd=site.root,
            )

        shown, done = once(), once("--json")
        assert (shown.stderr, done.stderr) == ("", "")
        assert shown.returncode == done.returncode
        rows = json.loads(done.stdout)
        lines = shown.stdout.splitlines()
        for row in rows:
            state = "damaged" if row["violations"] else "whole"
            assert any(
                line.startswith(
                    f"{state:8} {row['what']}: {row['builds']} build{'s' * (row['builds'] != 1)}, {row['size']:,} B"
                )
                for line in lines
            )
            assert all(f"    {violation}" in lines for violation in row["violations"])
        return done.returncode, rows

    return run


def flip(file: Path, at: int = -2) -> None:
    """Flip a bit, as a disk does: what the file looks like stays."""
    status, content = file.stat(), bytearray(file.read_bytes())
    content[at] ^= 1
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def of(rows, what):
    (row,) = (row for row in rows if row["what"].startswith(what))
    return row


def test_what_is_whole_is_counted(site, run):
    site.loader().load("kernel")
    status, rows = run()
    assert status == 0
    embedded = of(rows, "embedded kernels")
    assert embedded["builds"] == sum(1 for _ in data_directory("registry").glob("*/build/*/"))
    assert embedded["size"] > 0
    assert of(rows, f"store {site.store}") == {
        "what": f"store {site.store}", "builds": 1, "size": SIZE, "violations": [], "note": "",
    }  # fmt: skip


def test_a_flipped_bit_in_the_store_is_found_though_its_receipt_holds(site, run):
    site.publish(files(value=2), branch="v2")
    for version in (1, 2):
        site.loader().prefetch(f"kernel@{version}")
    build = next(
        path for path in (site.store / "builds").iterdir() if b"value = 1" in (path / "__init__.py").read_bytes()
    )
    flip(build / "part3.py")
    status, rows = run()
    assert status == 1
    row = of(rows, "store")
    assert (row["builds"], row["size"], row["violations"]) == (2, SIZE, [f"{build}: {CHANGED}"])
    assert of(rows, "embedded")["violations"] == []


def test_shared_directories_and_builds_without_a_receipt_are_verified_too(site, run):
    site.loader().load("kernel")
    shared = shutil.copytree(site.store, site.root / "shared")
    shutil.rmtree(shared / "receipts")
    (build,) = (shared / "builds").iterdir()
    stores = {"KERNEL_LOADER_CACHE": os.pathsep.join([str(site.store), str(shared)])}
    status, rows = run(**stores)
    assert (status, of(rows, f"store {shared}")["size"]) == (0, SIZE)
    flip(build / "part3.py")
    (build / "more.py").write_text("")
    status, rows = run(**stores)
    assert status == 1
    assert of(rows, f"store {shared}")["violations"] == [f"{build}: its content is not what its name says"]
    assert of(rows, f"store {site.store}")["violations"] == []


@pytest.mark.parametrize("damage", ["changed", "missing", "added", "metadata", "rewritten", "gone"])
def test_damage_of_the_embedded_kernels_is_found(site, run, damage):
    home = site.root / "installed"
    package = Path(kernel_loader.__file__).parent
    shutil.copytree(package, home / "kernel_loader", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("registry", "manifests"):
        shutil.copytree(data_directory(name), home / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = home / "registry" / "relu" / "build" / "torch-universal"
    name = "relu torch-universal"
    installed = {"PYTHONPATH": str(home)}
    before = of(run(**installed)[1], "embedded")
    assert before["violations"] == []
    if damage == "changed":
        flip(build / "__init__.py")
        said = f"{name}: __init__.py has other content"
    elif damage == "missing":
        (build / "__init__.py").unlink()
        said = f"{name}: __init__.py is missing"
    elif damage == "added":
        (build / "more.py").write_text("")
        said = f"{name}: more.py is not listed"
    elif damage == "metadata":
        document = json.loads((build / "metadata.json").read_text())
        del document["digest"]
        (build / "metadata.json").write_text(json.dumps(document))
        said = f"{name}: metadata.json lists no digests"
    elif damage == "rewritten":
        document = json.loads((build / "metadata.json").read_text())
        (build / "metadata.json").write_text(json.dumps(document | {"version": 99}))
        said = f"{name}: metadata.json is not as it was sealed"
    else:
        shutil.rmtree(build.parents[1])
        (build.parents[1]).mkdir()
        said = "relu: "
    status, rows = run(**installed)
    assert status == 1
    after = of(rows, "embedded")
    (violation,) = after["violations"]
    assert violation.startswith(said)
    assert after["builds"] == before["builds"] - (damage == "gone")
    assert 0 < after["size"] < before["size"]


@pytest.fixture
def carried(site):
    """A bundle, a lock, and a wheel of one kernel."""
    loader = site.loader()
    loader.export(["kernel"], site.root / "kernels.klb")
    loader.export(["kernel"], site.root / "my_kernels-1.0-py3-none-any.whl", wheel=True)
    (site.root / "kernel-loader.lock").write_text(loader.make_lock(["kernel"]).to_toml())
    return site.root / "kernels.klb", site.root / "kernel-loader.lock"


def test_bundles_and_locks_that_are_named_are_told_apart(site, carried, run):
    bundle, lock = carried
    renamed = bundle.rename(site.root / "renamed.lock")
    status, rows = run(renamed, lock)
    assert status == 0
    assert [row["what"] for row in rows] == [f"bundle {renamed}", f"lock {lock}"]
    assert [(row["builds"], row["size"]) for row in rows] == [(1, SIZE), (1, SIZE)]
    assert rows[1]["note"] == "1 kernels, 1 repositories; builds in the store of 1 that it names"
    status, rows = run(lock, KERNEL_LOADER_CACHE=str(site.root / "empty"))
    assert (status, rows[0]["builds"], rows[0]["size"]) == (0, 0, 0)


def test_any_flipped_bit_of_a_bundle_is_found_and_what_else_is_named_verified(carried, run):
    bundle, lock = carried
    whole = bundle.read_bytes()
    with zipfile.ZipFile(bundle) as archive:
        inside = [info.header_offset + 30 + len(info.filename) + info.file_size // 2 for info in archive.infolist()]
    for at in (0, *inside[:3], len(whole) - 20):
        bundle.write_bytes(whole)
        flip(bundle, at)
        status, rows = run(bundle, lock)
        assert status == 1, at
        assert rows[0]["what"] == f"bundle {bundle}"
        assert len(rows[0]["violations"]) == 1
        assert rows[1]["violations"] == []


def test_a_lock_that_is_damaged_and_a_locked_build_that_is_are_found(site, carried, run):
    bundle, lock = carried
    flip(site.build() / "part3.py")
    status, rows = run(lock, bundle)
    assert status == 1
    assert rows[0]["violations"] == [f"org/kernel@v1 torch-universal: {CHANGED}"]
    assert rows[1]["violations"] == []
    text = lock.read_text()
    lock.write_text(text.replace("part3.py", "part4.py", 1).replace("part4.py", "part5.py", 1))
    status, rows = run(lock, bundle)
    assert status == 1
    (violation,) = rows[0]["violations"]
    assert violation.startswith(f"Lock file {lock}, repository[0].build[0]")
    lock.write_bytes(b"\xff\xfe")
    (violation,) = run(lock)[1][0]["violations"]
    assert "not UTF-8" in violation


def test_the_lock_in_force_is_verified_without_being_named(site, carried, run):
    _, lock = carried
    status, rows = run(KERNEL_LOADER_LOCK=str(lock))
    assert (status, of(rows, f"lock {lock}")["builds"]) == (0, 1)
    lock.unlink()
    status, rows = run(KERNEL_LOADER_LOCK=str(lock))
    assert status == 1
    assert of(rows, f"lock {lock}")["violations"] == [f"Lock file {lock}: there is no such file."]
    assert of(rows, "store")["violations"] == []


def test_installed_packages_of_builds_are_verified(site, carried, run):
    packages = site.root / "packages"
    with zipfile.ZipFile(site.root / "my_kernels-1.0-py3-none-any.whl") as wheel:
        wheel.extractall(packages)
    other = shutil.copytree(
        packages / "kernel_loader_builds" / "my_kernels", packages / "kernel_loader_builds" / "other_kernels"
    )
    home = packages / "kernel_loader_builds" / "my_kernels"
    installed = {"PYTHONPATH": os.pathsep.join([str(packages), str(Path(kernel_loader.__file__).parents[1])])}
    status, rows = run(**installed)
    assert status == 0
    assert (of(rows, f"package {home}")["builds"], of(rows, f"package {home}")["size"]) == (1, SIZE)
    (build,) = (home / "builds").iterdir()
    flip(build / "part3.py")
    (home / "builds" / "stranger").mkdir()
    status, rows = run(**installed)
    assert status == 1
    stranger = home / "builds" / "stranger"
    violations = [f"{build}: {CHANGED}", f"{stranger}: its content is not what its name says"]
    assert of(rows, f"package {home}")["violations"] == violations
    assert of(rows, f"package {other}")["violations"] == []
    (home / "bundle.json").write_text("garbage")
    status, rows = run(**installed)
    assert status == 1
    assert "bundle.json" in of(rows, f"package {home}")["violations"][0]
    assert of(rows, f"package {other}")["violations"] == []


def test_a_file_that_is_not_there_is_wrong_use(site):
    done = subprocess.run(
        [sys.executable, "-m", "kernel_loader", "verify", "no-such-file.klb"],
        capture_output=True, text=True, timeout=120, check=False, env=site.environ(),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "does not exist" in done.stderr
