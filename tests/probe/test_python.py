"""The interpreter and what is installed for it."""

import importlib.metadata
import platform
import sys
import zipfile

import pytest
from packaging.utils import canonicalize_name

from kernel_loader.probe import python


def site(root, *names: str):
    for name in names:
        (root / name).mkdir(parents=True)
    return str(root)


@pytest.mark.parametrize(
    ("directory", "name", "version"),
    [
        ("numpy-2.4.6.dist-info", "numpy", "2.4.6"),
        ("apache_tvm_ffi-0.1.8.dist-info", "apache-tvm-ffi", "0.1.8"),
        ("PyYAML-6.0.4.dist-info", "pyyaml", "6.0.4"),
        ("zope.interface-7.2.dist-info", "zope-interface", "7.2"),
        ("torch-2.13.0+cpu.dist-info", "torch", "2.13.0+cpu"),
        ("thing-1.0rc1.post2.dev3.dist-info", "thing", "1.0rc1.post2.dev3"),
        ("old-1.2.egg-info", "old", "1.2"),
        ("old-1.2-py3.11.egg-info", "old", "1.2"),
    ],
)
def test_names_and_versions_are_read_from_directory_names(tmp_path, directory: str, name: str, version: str) -> None:
    assert python.installed([site(tmp_path, directory)]) == {name: version}


def test_what_is_no_distribution_is_passed_over(tmp_path) -> None:
    names = ("numpy", "numpy.libs", "numpy-2.0", "dist-info", "a-1.0.data", "-1.0.txt")
    assert python.installed([site(tmp_path, *names)]) == {}


def test_a_project_in_development_has_its_version_inside(tmp_path) -> None:
    there = site(tmp_path, "einops.egg-info", "other.egg-info")
    (tmp_path / "einops.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: einops\nVersion: 0.9.dev1\n")
    assert python.installed([there]) == {"einops": "0.9.dev1", "other": "0"}


def test_the_first_of_two_on_the_path_counts(tmp_path) -> None:
    first = site(tmp_path / "a", "numpy-2.0.dist-info")
    second = site(tmp_path / "b", "NumPy-1.0.dist-info", "einops-0.8.dist-info")
    assert python.installed([first, second]) == {"numpy": "2.0", "einops": "0.8"}
    assert python.installed([second, first]) == {"numpy": "1.0", "einops": "0.8"}


def test_files_and_missing_directories_on_the_path_are_passed_over(tmp_path) -> None:
    archive = tmp_path / "lib.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("module.py", "")
    there = site(tmp_path / "site", "numpy-2.0.dist-info")
    assert python.installed([str(archive), str(tmp_path / "nowhere"), there]) == {"numpy": "2.0"}


def test_an_empty_entry_is_the_current_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(site(tmp_path, "numpy-2.0.dist-info"))
    assert python.installed([""]) == {"numpy": "2.0"}


def test_this_environment_has_what_the_standard_library_finds() -> None:
    # Of several on the path both take the first.
    expected = {}
    for distribution in importlib.metadata.distributions():
        expected.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution.version)
    assert python.installed(sys.path) == expected


def test_the_interpreter_is_the_running_one() -> None:
    facts = python.probe()
    assert facts["python"].value == platform.python_version()
    assert facts["free_threaded"].value is (not getattr(sys, "_is_gil_enabled", lambda: True)())


def test_tvm_ffi_is_found_among_the_packages(tmp_path, monkeypatch) -> None:
    assert python.probe()["tvm_ffi"].value == python.installed(sys.path).get("apache-tvm-ffi")
    monkeypatch.syspath_prepend(site(tmp_path, "apache_tvm_ffi-0.1.8.dist-info"))
    assert python.probe()["tvm_ffi"].value == "0.1.8"
