"""`kernel-loader lock`: from names, from a project, kept up to date, checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_loader
from kernel_loader.lock import Lock
from kernel_loader.testing import Fault
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
        environ = {"PYTHONPATH": str(Path(kernel_loader.__file__).parents[1])} | environ  # it may not be installed
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


def test_a_check_needs_no_hub(site, project, run):
    run()
    site.hub.close()
    assert run("--check")[0] == 0
    (project / "kernel-loader.lock").unlink()
    assert run("--check")[0] == 1  # a file that is not there is stale
    assert not (project / "kernel-loader.lock").exists()


def test_a_check_in_json_lists_what_changes(project, run):
    run()
    (project / "pyproject.toml").write_text(PYPROJECT.replace('["kernel"]', '["kernel", "org/norm@2", "relu"]'))
    status, out, _ = run("--check", "--json")
    assert (status, json.loads(out)["changes"]) == (1, ["kernels-community/relu@v1 is not locked"])


def test_a_stranger_needs_the_users_word_once(site, project, run):
    site.hub.publisher("org", trusted=False)
    status, _, err = run()
    assert (status, "org/norm@v2 may not run here" in err) == (1, True)
    assert not (project / "kernel-loader.lock").exists()
    assert run("--trust-remote-code")[0] == 0
    assert run()[0] == 0
    status, _, err = run("--upgrade")
    assert (status, "org/norm@v2 may not run here" in err) == (1, True)


def test_offline_nothing_new_is_locked(site, project, run):
    status, _, err = run(KERNEL_LOADER_OFFLINE="1")
    assert (status, "Run `kernel-loader lock` where the Hub can be asked" in err) == (1, True)
    run()
    assert run(KERNEL_LOADER_OFFLINE="1")[0] == 0
    assert run("--upgrade", KERNEL_LOADER_OFFLINE="1")[0] == 1


def test_the_lock_of_the_environment_is_written_where_no_project_has_one(site, project, run):
    file = site.root / "own.lock"
    assert run(KERNEL_LOADER_LOCK=str(file))[0] == 0
    assert not file.exists()
    (project / "pyproject.toml").unlink()
    assert run("kernel", KERNEL_LOADER_LOCK=str(file))[0] == 0
    assert [one.name for one in Lock.read(str(file)).kernels] == ["kernel"]
    site.publish(files(value=9))
    assert run("--upgrade", KERNEL_LOADER_LOCK=str(file))[0] == 0  # not held to what it is to change


def test_a_file_that_cannot_be_written_is_told(project, run):
    status, _, err = run("--file", "nowhere/x.lock")
    assert (status, "nowhere/x.lock cannot be written (No such file or directory). Make its dir" in err) == (1, True)


def test_names_are_added_to_what_the_file_has(site, project, run):
    def names():
        return [one.name for one in Lock.read(str(project / "named.lock")).kernels]

    status, out, _ = run("org/norm@2", "--file", "named.lock", "--json")
    assert (status, json.loads(out)["file"], names()) == (0, "named.lock", ["org/norm@2"])
    site.hub.kernel("org/norm").commit(files(4, value=3), branch="v2")
    status, out, _ = run("kernel", "--file", "named.lock")
    assert (status, "goes from" in out, names()) == (0, False, ["kernel", "org/norm@2"])
    assert run("kernel", "--file", "named.lock", "--check")[0] == 0
    (project / "pyproject.toml").write_text('[tool.kernel-loader]\nkernels = ["kernel"]\n')
    status, out, _ = run("--file", "named.lock")  # the project's, and nothing else
    assert (status, "org/norm@2 is no longer locked" in out, names()) == (0, True, ["kernel"])


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
    "a deep table": (f"a = {'[' * 100_000}", "it cannot be read"),
    "nothing": ("[tool.kernel-loader]", "there is nothing to lock"),
    "no name": (PYPROJECT.replace('["kernel"]', '[""]'), "No kernel or capability"),
    "a number": (PYPROJECT.replace('["kernel"]', "[1]"), "tool.kernel-loader.kernels[0]: a text was expected"),
    "a directory for a file": (PYPROJECT.replace("kernels =", 'lock = ""\nkernels ='), "cannot be read"),
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


def test_a_hub_that_fails_leaves_the_file_as_it_was(site, project, run):
    run()
    text = (project / "kernel-loader.lock").read_text()
    site.hub.fault(Fault(status=507))  # which the client does not try again
    assert run("--upgrade")[0] == 1
    assert (project / "kernel-loader.lock").read_text() == text
    assert run()[0] == 0
