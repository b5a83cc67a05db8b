"""`kernel-loader lock`: from names, from a project, kept up to date, checked."""

import json
import subprocess
import sys

import pytest

from kernel_loader.lock import Lock
from tests.published.conftest import REPO, files

PYPROJECT = """
[project]
name = "mine"

[tool.kernel-loader]
kernels = ["kernel"]

[tool.kernel-loader.layers.RMSNorm.cuda]
inference = { repo = "org/norm", version = 2, layer = "RMSNorm" }
training = { kernel = "kernel", layer = "Kernel" }
"""


@pytest.fixture
def project(site):
    """A directory with a pyproject.toml, and the repositories that it names."""
    site.hub.kernel("org/norm").commit(files(4, value=2), branch="v2")
    site.hub.publisher("org", trusted=True)
    directory = site.root / "project"
    directory.mkdir()
    (directory / "pyproject.toml").write_text(PYPROJECT)
    return directory


@pytest.fixture
def run(site, project):
    def run(*arguments, **environ):
        command = [sys.executable, "-m", "kernel_loader", "lock", *map(str, arguments)]
        done = subprocess.run(
            command, cwd=project, env=site.environ(**environ), capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


def test_a_project_is_locked_with_the_repositories_of_its_layers(project, run):
    status, out, _ = run()
    assert status == 0
    assert "kernel-loader.lock was written" in out
    lock = Lock.read(str(project / "kernel-loader.lock"))
    assert [one.name for one in lock.kernels] == ["kernel", "org/norm@2"]
    assert [str(one.request) for one in lock.repositories] == [f"{REPO}@v1", "org/norm@v2"]


def test_a_second_run_asks_nobody_and_writes_nothing(site, project, run):
    run()
    file = project / "kernel-loader.lock"
    before = file.stat()
    site.hub.requests.clear()
    status, out, _ = run()
    assert (status, "is up to date" in out) == (0, True)
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(site.hub.requests) == 0


def test_an_upgrade_takes_up_what_has_moved(site, project, run):
    run()
    site.publish(files(value=9))
    assert run()[1].splitlines() == [f"{project / 'kernel-loader.lock'} is up to date"]
    status, out, _ = run("--upgrade", "org/norm@2")
    assert (status, "goes from" in out) == (0, False)
    assert run("--check", "--upgrade")[0] == 1
    status, out, _ = run("--upgrade")
    assert (status, f"{REPO}@v1 goes from" in out) == (0, True)
    assert run("--check", "--upgrade")[0] == 0


CHANGES = {
    "nothing": (lambda text: text, 0, "is up to date"),
    "a kernel more": (lambda text: text.replace('["kernel"]', '["kernel", "org/other@1"]'), 1, "is not locked"),
    "a kernel less": (lambda text: text.replace("[tool.kernel-loader.layers", "[tool.other"), 1, "no longer needed"),
    "another version": (lambda text: text.replace("version = 2", "version = 3"), 1, "org/norm@v3 is not locked"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_check_tells_whether_the_file_is_stale_without_asking(site, project, run, what):
    change, expected, said = CHANGES[what]
    run()
    file, text = project / "kernel-loader.lock", (project / "kernel-loader.lock").read_text()
    (project / "pyproject.toml").write_text(change(PYPROJECT))
    site.hub.requests.clear()
    status, out, _ = run("--check")
    assert (status, said in out) == (expected, True), out
    assert file.read_text() == text
    assert len(site.hub.requests) == 0


def test_a_manifest_that_names_another_version_makes_the_lock_stale(site, run):
    run()
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(manifest.read_text().replace("version = 1", "version = 2"))
    status, out, _ = run("--check")
    assert (status, f"{REPO}@v2 is not locked" in out) == (1, True)


def test_a_file_that_is_not_there_is_stale(run):
    assert run("--check")[0] == 1


def test_names_are_locked_and_nothing_else(project, run):
    status, out, _ = run("kernel", "--file", "named.lock", "--json")
    assert (status, json.loads(out)["file"]) == (0, "named.lock")
    assert [one.name for one in Lock.read(str(project / "named.lock")).kernels] == ["kernel"]
    run("--file", "named.lock")  # the project's again
    assert len(Lock.read(str(project / "named.lock")).kernels) == 2


def test_a_lock_without_a_project_is_kept_up_to_date(site, project, run):
    (project / "pyproject.toml").write_text('[project]\nname = "mine"\n')
    assert run()[0] == 1
    run("kernel")
    site.publish(files(value=9))
    status, out, _ = run("--upgrade")
    assert (status, "goes from" in out) == (0, True)


def test_the_project_says_where_the_file_is(project, run):
    (project / "pyproject.toml").write_text(PYPROJECT.replace("kernels =", 'lock = "src/x.lock"\nkernels ='))
    (project / "src").mkdir()
    assert run()[0] == 0
    assert (project / "src" / "x.lock").is_file()
    assert not (project / "kernel-loader.lock").exists()


WRONG = {
    "no TOML": ("[tool", "it cannot be read"),
    "another key": (PYPROJECT.replace("kernels =", "kernel ="), "unknown key; there are kernels, layers, lock"),
    "no list": (PYPROJECT.replace('["kernel"]', '"kernel"'), "tool.kernel-loader.kernels: a list was expected"),
    "no table": ("[tool]\nkernel-loader = 1", "a table was expected"),
    "an unknown name": (PYPROJECT.replace('["kernel"]', '["kernal"]'), "kernal"),
    "no layer": (PYPROJECT.replace(', layer = "RMSNorm"', ""), "an entry has a layer"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_project_that_cannot_be_read_is_told(project, run, what):
    text, said = WRONG[what]
    (project / "pyproject.toml").write_text(text)
    status, out, err = run()
    assert (status, out) == (1, "")
    assert said in err
    assert "Traceback" not in err
    assert not (project / "kernel-loader.lock").exists()


def test_a_damaged_lock_is_not_written_over(project, run):
    (project / "kernel-loader.lock").write_text("schema = 9")
    status, _, err = run()
    assert (status, "schema 9" in err) == (1, True)
    assert (project / "kernel-loader.lock").read_text() == "schema = 9"


def test_an_unreachable_hub_leaves_the_file_as_it_was(site, project, run):
    run()
    text = (project / "kernel-loader.lock").read_text()
    site.hub.close()
    assert run("--upgrade")[0] == 1
    assert (project / "kernel-loader.lock").read_text() == text
    assert run()[0] == 0
