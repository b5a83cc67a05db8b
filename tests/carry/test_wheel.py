"""Bundles as wheels: what pip makes of them, and that each file is as RECORD has it."""

import base64
import csv
import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from kernel_loader.carry.archive import write_wheel
from kernel_loader.carry.contents import Bundle, installed
from kernel_loader.errors import RequestError
from kernel_loader.index import Index
from kernel_loader.resources import INSTALLED
from kernel_loader.sources import Request
from kernel_loader.store import Store
from tests.carry.conftest import BUILD, digest, document, write

ODD = BUILD | {"a, b.py": b"", "größe.txt": b"x", "empty/__init__.py": b""}
NAME = "cluster_kernels-1.0-py3-none-any.whl"


def make(home: Path, name: str = NAME, build=ODD) -> Path:
    write(home, build)  # the build's files, below `sources`
    write_wheel(
        home / name, Bundle.parse(json.dumps(document(build))), {digest(build): home / "sources" / digest(build)}
    )
    return home / name


def pip(*arguments: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def check_record(root: Path) -> set[str]:
    """Every file below a directory that wheels were installed into is as RECORD has it; gives their paths."""
    (record,) = root.glob("*.dist-info/RECORD")
    with record.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    for path, told, size in rows:
        if told:
            content = (root / path).read_bytes()
            kind, _, value = told.partition("=")
            found = base64.urlsafe_b64encode(hashlib.new(kind, content).digest()).decode().rstrip("=")
            assert (found, str(len(content))) == (value, size), path
    paths = {path for path, *_ in rows}
    assert len(paths) == len(rows)
    return paths


def test_record_names_every_member_with_its_hash(tmp_path):
    with zipfile.ZipFile(make(tmp_path)) as archive:
        archive.extractall(tmp_path / "unpacked")
        names = archive.namelist()
        about = Parser().parsestr(archive.read("cluster_kernels-1.0.dist-info/METADATA").decode())
    assert check_record(tmp_path / "unpacked") == set(names)
    assert len(names) == len(set(names))
    assert (about["Name"], about["Version"], about["Requires-Dist"]) == ("cluster_kernels", "1.0", "kernel-loader")


def test_pip_installs_it_without_a_network_and_what_it_brings_is_found(tmp_path):
    target = tmp_path / "site"
    done = pip("install", "--no-deps", "--no-index", "--target", target, make(tmp_path))
    assert done.returncode == 0, done.stderr
    check_record(target)
    home = target / INSTALLED / "cluster_kernels"
    assert installed(home).files.keys() == {digest(ODD)}
    store = Store(tmp_path / "store", (home,))  # bytecode that pip has compiled does not count
    assert store.find(digest(ODD)) == home / "builds" / digest(ODD)[:32]
    assert Index(store).get(Request("org/kernel", version=1)).builds == {"torch-universal": digest(ODD)}


@pytest.fixture
def environment(tmp_path):
    """A fresh environment: its directory of packages, and pip for it."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    (site,) = home.rglob("site-packages")

    def run(*arguments):
        done = pip("--python", python, *arguments)  # the pip of this environment, for that one
        assert done.returncode == 0, done.stderr
        return done.stdout

    return site, run


def test_a_fresh_environment_has_it_and_gives_it_back(tmp_path, environment):
    site, run = environment
    run("install", "--no-deps", "--no-index", make(tmp_path))
    assert {path.name for path in site.iterdir()} >= {INSTALLED, "cluster_kernels-1.0.dist-info"}
    check_record(site)
    assert "cluster" in run("list")
    run("uninstall", "-y", "cluster-kernels")
    assert not [*(site / INSTALLED).iterdir()]  # pip leaves the directory of a namespace


def test_two_wheels_stand_beside_each_other_and_a_newer_one_replaces_the_older(tmp_path, environment):
    site, run = environment
    for name, build in (
        (NAME, BUILD),
        ("more-1.0-py3-none-any.whl", ODD),
        ("cluster_kernels-2.0-py3-none-any.whl", ODD),
    ):
        run("install", "--no-deps", "--no-index", make(tmp_path, name, build))
    homes = sorted((site / INSTALLED).iterdir())
    assert [home.name for home in homes] == ["cluster_kernels", "more"]
    assert [installed(home).files.keys() for home in homes] == [{digest(ODD)}] * 2
    assert all(len(list((home / "builds").iterdir())) == 1 for home in homes)


GOOD = {
    "cluster_kernels-1.0-py3-none-any.whl": ("cluster_kernels", "1.0"),
    "Cluster.Kernels-1.0-py3-none-any.whl": ("cluster_kernels", "1.0"),
    "a_b.c-2026.1.post3-py3-none-any.whl": ("a_b_c", "2026.1.post3"),
    "x-1.0+cu130-py3-none-any.whl": ("x", "1.0+cu130"),
    "x-01.0RC1-py3-none-any.whl": ("x", "1.0rc1"),
    "x-1!2.0-py3-none-any.whl": ("x", "1!2.0"),
}


@pytest.mark.parametrize("name", GOOD)
def test_names_are_normalised_and_pip_takes_the_file(name, tmp_path):
    distribution, version = GOOD[name]
    wheel = make(tmp_path, name)
    with zipfile.ZipFile(wheel) as archive:
        assert {path.split("/")[0] for path in archive.namelist()} == {
            INSTALLED, f"{distribution}-{version}.dist-info",
        }  # fmt: skip
        assert f"{INSTALLED}/{distribution}/bundle.json" in archive.namelist()
    done = pip("install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "kernels.klb", "kernels.whl", "kernels-1.0.whl", "kernels-1.0-py3-none-any", "kernels-1.0-py3-none-any.zip",
        "kernels-1.0-1-py3-none-any.whl", "kernels-1.0-cp311-cp311-linux_x86_64.whl", "k-1.0-py2.py3-none-any.whl",
        "kernels-next-py3-none-any.whl", "kernels-1..0-py3-none-any.whl", "my-kernels-1.0-py3-none-any.whl",
        "-1.0-py3-none-any.whl", "ker nels-1.0-py3-none-any.whl", "größe-1.0-py3-none-any.whl",
        "_-1.0-py3-none-any.whl", "kernels-1.0-PY3-none-any.whl", "..-1.0-py3-none-any.whl",
        "a__b-1.0-py3-none-any.whl",
    ],
)  # fmt: skip
def test_what_pip_would_not_take_is_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(RequestError, match="was given as the name of a wheel") as raised:
        make(tmp_path, name)
    assert NAME in raised.value.remedy
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("sources", "good.klb")] == []


def test_a_wheel_has_the_same_bytes_each_time_and_any_tool_lists_it(tmp_path):
    wheel = make(tmp_path)
    before = wheel.read_bytes()
    assert make(tmp_path).read_bytes() == before
    for file in (wheel, tmp_path / "good.klb"):
        listing = subprocess.run(
            [sys.executable, "-m", "zipfile", "-l", str(file)], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        assert listing.count("1980-01-01 00:00:00") == len(zipfile.ZipFile(file).namelist())
        assert (
            subprocess.run([sys.executable, "-m", "zipfile", "-t", str(file)], timeout=60, check=True).returncode == 0
        )
