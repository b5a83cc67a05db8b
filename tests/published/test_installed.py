"""Builds that a package has brought: found without configuration, on a machine that has nothing else."""

import subprocess
import sys
import zipfile

import pytest

from kernel_loader.errors import BundleError
from kernel_loader.loader import KernelLoader
from tests.builds import CPU_HOST
from tests.published.conftest import files

LOAD = """
import kernel_loader
bundle = kernel_loader.load_kernel("kernel")
origin = kernel_loader.origin(bundle)
print(bundle.value, bundle.double(21), origin.commit[:6], "site" in str(origin.path))
"""
SPAWNS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import kernel_loader
if __name__ == "__main__":
    double = kernel_loader.load_kernel("kernel").double
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(list(pool.map(double, [21])))
"""


@pytest.fixture
def package(site):
    """A directory on the path with an installed package of the kernel; the Hub has moved on since."""
    wheel = site.root / "cluster_kernels-1.0-py3-none-any.whl"
    site.loader(cache=site.root / "laptop").export("kernel", wheel, wheel=True)
    target = site.root / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True, timeout=120)
    site.publish(files(value=7))
    site.hub.requests.clear()
    return target


def run(site, package, code=LOAD, **environ):
    return site.run(code, PYTHONPATH=str(package), **environ)


def test_an_installed_build_loads_with_no_request_and_no_configuration(site, package):
    assert run(site, package).split()[:2] == ["1", "42"]
    assert run(site, package).split()[3] == "True"
    assert len(site.hub.requests) == 0
    assert not (site.store / "builds").exists()


def test_the_second_process_hashes_nothing_and_writes_nothing(site, package):
    run(site, package)
    before = site.tree()
    assert any(path.startswith("receipts") for path in before)
    assert run(site, package).startswith("1 42")
    assert site.tree() == before


def test_what_is_installed_counts_before_what_the_store_remembers(site, package):
    assert site.loader().load("kernel").value == 7
    assert run(site, package).startswith("1 42")
    assert run(site, package, KERNEL_LOADER_REFRESH_AFTER="0").startswith("1 42")


def test_what_is_no_longer_installed_is_asked_of_the_hub(site, package):
    run(site, package)
    assert site.run(LOAD).startswith("7 168")


def test_a_damaged_file_is_refused_offline_and_fetched_elsewhere(site, package):
    (build,) = (package / "kernel_loader_builds" / "cluster_kernels" / "builds").iterdir()
    (build / "part0.py").write_text("part = 666\n")
    process = site.start(LOAD, PYTHONPATH=str(package), KERNEL_LOADER_OFFLINE="1")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "part0.py has other content" in err
    assert run(site, package).split()[3] == "False"  # the same commit, from the Hub
    assert (build / "part0.py").read_text() == "part = 666\n"


def test_a_spawned_process_finds_what_is_installed(site, package):
    script = site.root / "spawns.py"
    script.write_text(SPAWNS)
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert run(site, package, code) == "[42]\n"


def test_a_package_may_be_read_only(site, package, unprivileged, open_path, monkeypatch):
    target, manifests = package.rename(open_path / "site"), site.manifests.rename(open_path / "manifests")
    monkeypatch.syspath_prepend(str(target))
    with unprivileged():
        loader = site.loader(cache=open_path / "nowhere" / "store", manifests=(manifests,), offline=True)
        assert loader.load("kernel").value == 1


def test_a_damaged_bundle_json_is_told(site, package):
    (file,) = package.rglob("bundle.json")
    file.write_text("{")
    process = site.start(LOAD, PYTHONPATH=str(package))
    _, err = process.communicate(timeout=120)
    assert "bundle.json is no JSON" in err
    assert BundleError.__name__ in err


def test_two_packages_are_both_found(site, package):
    site.hub.kernel("org/other").commit(files(value=5), branch="v1")
    site.hub.publisher("org", trusted=True)
    wheel = site.root / "more_kernels-2.0-py3-none-any.whl"
    site.loader(cache=site.root / "laptop").export("org/other@1", wheel, wheel=True)
    second = site.root / "second"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(second)
    code = "import kernel_loader\nprint(kernel_loader.load_module('org/other', version=1).value)\n" + LOAD
    out = site.run(code, PYTHONPATH=f"{package}:{second}", KERNEL_LOADER_OFFLINE="1")
    assert out.startswith("5\n1 42")


def test_installed_builds_serve_a_lock_too(site, package, monkeypatch):
    newer = site.loader(cache=site.root / "laptop").make_lock(["kernel"])
    older = site.publish(files()) and site.loader(cache=site.root / "laptop").make_lock(["kernel"])
    monkeypatch.syspath_prepend(str(package))
    for locked, value in ((older, 1), (newer, 7)):
        site.hub.requests.clear()
        assert KernelLoader(site.loader().settings, CPU_HOST, lock=locked).load("kernel").value == value
        assert (site.gets() == 0) == (locked == older)
