"""Real processes: many at once, killed at any instant, with locks that lie, and with a store that cannot be written."""

import json
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from huggingface_hub import constants

from kernel_loader.store import Store
from kernel_loader.testing import Fault
from tests.published.conftest import REPO, files

LOAD = """
import kernel_loader
bundle = kernel_loader.load_kernel("kernel")
print(bundle.double(21))
"""


def finish(processes):
    results = [process.communicate(timeout=120) for process in processes]
    for process, (_, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err
    return [out for out, _ in results]


def test_eight_cold_processes_fetch_each_file_of_a_large_build_once(site):
    site.publish(files(400))
    site.hub.latency = 0.005
    assert finish([site.start(LOAD) for _ in range(8)]) == ["42\n"] * 8
    fetched = Counter(r.path for r in site.hub.requests if r.route == "resolve" and "metadata.json" not in r.path)
    assert len(fetched) == 399
    assert set(fetched.values()) == {1}
    assert len(site.hub.requests) <= 400 + 8 * 4


@pytest.mark.parametrize("processes", [2, 4])
def test_with_locks_that_lie_every_process_still_loads_the_whole_build(site, processes):
    # What some network file systems do: every lock is granted.
    lying = "import fcntl\nfcntl.flock = lambda *_: None\n"
    site.hub.latency = 0.02
    assert finish([site.start(lying + LOAD) for _ in range(processes)]) == ["42\n"] * processes
    assert len(list(site.build().iterdir())) == 10
    Store(site.store).find(Store(site.store).all()[0].digest, trust_receipt=False)


def test_a_process_that_waits_too_long_fetches_by_itself_and_says_for_whom_it_waited(site, caplog):
    holds = """
import sys, time
from pathlib import Path
from kernel_loader.store import Store
with Store(Path(sys.argv[1])).lock("thing"):
    print("held", flush=True)
    sys.stdin.read()
"""
    import subprocess
    import sys

    holder = subprocess.Popen(
        [sys.executable, "-c", holds, str(site.store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    entered = []
    with Store(site.store, lock_seconds=0.2).lock("thing"):
        entered.append(True)
    holder.communicate(timeout=30)
    assert entered
    assert f"process {holder.pid} on " in caplog.text


# --- killed -------------------------------------------------------------------------------------------------------

INSTANTS = 50


def test_killed_at_any_instant_a_load_leaves_nothing_that_a_clean_load_trips_over(site):
    """Fifty cold loads, each killed after another while; whatever is there then loads right, or is fetched."""
    site.publish(files(30))
    site.hub.latency = 0.004
    whole = time.monotonic()
    site.run(LOAD)
    whole = time.monotonic() - whole
    dice, around = random.Random(0), 0.6 * whole
    seen = Counter()
    for _ in range(INSTANTS):
        store = site.root / f"killed{_}"
        site.store = store
        process = site.start(LOAD)
        # Around the instant of publication, which moves where other jobs slow the machine and end.
        time.sleep(around * dice.uniform(0.4, 1.6))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        builds = list((store / "builds").iterdir()) if (store / "builds").exists() else []
        seen["whole build" if builds else "nothing"] += 1
        around *= 0.85 if builds else 1.15
        for build in builds:
            assert len(list(build.iterdir())) == 30
        assert site.loader(offline=False).load("kernel").double(21) == 42
        assert len(list((store / "builds").iterdir())) == 1
        assert not list((store / "staging").iterdir())
    assert len(seen) == 2, seen  # instants before and after publication were met


def test_what_a_killed_process_left_in_staging_is_swept(site):
    site.publish(files(30))
    site.hub.fault(Fault(path=r"part20\.py", stall_after=1))
    process = site.start(LOAD)
    deadline = time.monotonic() + 30
    while not list(site.store.glob("staging/*/part3.py")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert list((site.store / "staging").iterdir())
    site.hub.clear_faults()
    assert site.loader().load("kernel").double(21) == 42
    assert not list((site.store / "staging").iterdir())


# --- a store that cannot be written -------------------------------------------------------------------------------


def test_a_complete_store_works_read_only(site, unprivileged, open_path):
    site.store, site.manifests = open_path / "store", site.manifests.rename(open_path / "manifests")
    site.run(LOAD)
    site.hub.requests.clear()
    for entry in [site.store, *site.store.rglob("*")]:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    before = site.tree()
    with unprivileged():
        assert site.loader().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0
    assert site.tree() == before


def test_an_index_that_cannot_be_written_costs_a_request_and_not_the_load(site, unprivileged, open_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(open_path / "token"))
    site.store, site.manifests = open_path / "store", site.manifests.rename(open_path / "manifests")
    site.hub.publisher("org", trusted=True)
    site.loader().load_module(REPO, version=1)
    for entry in [site.store, *site.store.rglob("*")]:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    site.hub.requests.clear()
    with unprivileged():  # the version is due, and so is what the Hub says of the publisher
        assert site.loader(refresh_after=0).load_module(REPO, version=1).double(21) == 42
    assert site.hub.counts() == {("GET", "info"): 1, ("GET", "organization"): 1}


# --- removing -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_build_that_is_loaded_again_is_held_once(site):
    loader = site.loader()
    loader.load("kernel")
    loader.load("kernel", fallback="error")
    loader.load_module(REPO, version=1, trust_remote_code=True)
    build = site.build().resolve()
    assert [fd.resolve() for fd in Path("/proc/self/fd").iterdir()].count(build) == 1


def test_a_build_that_a_live_process_has_loaded_is_not_removed(site):
    keeps = site.start(LOAD + "import sys; print('loaded', flush=True); sys.stdin.read()\n")
    try:
        assert [keeps.stdout.readline() for _ in range(2)] == ["42\n", "loaded\n"], keeps.stderr.read()
        (stored,) = Store(site.store).all()
        # Another repository publishes the same content: its receipt is written anew, and the build stays held.
        site.hub.kernel("org/twin").commit(files(), branch="v1")
        site.loader().prefetch(["org/twin@1"], trust_remote_code=True)
        assert len(Store(site.store).all()[0].sources) == 2
        assert not Store(site.store).remove(stored.digest)
        assert Store(site.store).find(stored.digest)
    finally:
        keeps.kill()
        keeps.communicate(timeout=30)
    assert Store(site.store).remove(stored.digest)
    assert Store(site.store).find(stored.digest) is None
    assert not list((site.store / "receipts").iterdir())


def command(site, *arguments, **environ):
    script = f"from kernel_loader.cli import main; main({list(arguments)!r}, prog_name='kernel-loader')"
    process = site.start(script, **environ)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_the_commands_of_the_store(site):
    assert command(site, "cache", "dir") == (0, f"{site.store}\n", "")
    status, out, err = command(site, "prefetch", "kernel")
    assert (status, err) == (0, "")
    assert "torch-universal" in out
    (row,) = json.loads(command(site, "cache", "ls", "--json")[1])
    assert row["what"] == "org/kernel@v1 torch-universal"
    assert row["usable"]
    assert "1 build, " in command(site, "cache", "ls")[1]
    assert command(site, "cache", "verify")[0] == 0
    (site.build() / "part3.py").write_text("changed")
    status, out, _ = command(site, "cache", "verify")
    assert status == 1
    assert "part3.py has other content" in out
    assert "would go" in command(site, "cache", "prune", "--dry-run")[1]
    assert command(site, "cache", "prune", "--older-than", "1")[1] == "0 B\n"
    assert "removed" in command(site, "cache", "prune")[1]
    assert json.loads(command(site, "cache", "ls", "--json")[1]) == []


def test_prefetching_a_strangers_repository_needs_the_users_word(site):
    status, _, err = command(site, "prefetch", "org/kernel@1")
    assert status == 1
    assert "may not run here" in err
    status, out, _ = command(site, "prefetch", "org/kernel@1", "--trust-remote-code", "--json")
    assert status == 0
    assert json.loads(out)[0]["variant"] == "torch-universal"
