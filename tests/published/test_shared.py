"""A store that others fill: read by all, written by nobody but them."""

import json
import os
import shutil
import sys
import time

import pytest

import kernel_loader
from kernel_loader import store as store_module
from kernel_loader.errors import IntegrityError, StoreError
from kernel_loader.index import Entry, Index
from kernel_loader.sources import Request
from kernel_loader.store import Store
from tests.published.conftest import REPO, files
from tests.published.test_faults import CHANGES, change_a_byte
from tests.published.test_processes import LOAD, command, finish

REQUEST = Request(REPO, version=1)


def contents(*directories):
    """Everything below directories, to tell whether something was written."""
    found = [path for directory in directories for path in (directory, *directory.rglob("*"))]
    looks = {path: path.lstat() for path in found if path.exists() or path.is_symlink()}
    return {
        path: (status.st_ino, status.st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path, status in looks.items()
    }


@pytest.fixture
def shared(site):
    """A store that an administrator has filled; whoever loads from the site reads it."""
    directory = site.root / "shared"
    site.loader(cache=directory).prefetch("kernel")
    site.hub.requests.clear()
    return directory


def reader(site, *shared, **settings):
    return site.loader(shared=shared, **settings)


def both(site, *shared):
    """The variable that names the store of the site, and shared ones."""
    return {"KERNEL_LOADER_CACHE": os.pathsep.join(map(str, (site.store, *shared)))}


# --- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [True, False])
def test_a_complete_shared_store_is_loaded_from_with_no_request_and_no_write(site, shared, offline):
    before = contents(shared)
    bundle = reader(site, shared, offline=offline).load("kernel")
    assert bundle.double(21) == 42
    assert kernel_loader.origin(bundle).path.is_relative_to(shared)
    assert len(site.hub.requests) == 0
    assert contents(shared) == before
    assert not site.store.exists()


@pytest.mark.parametrize("root", ["missing", "read-only"])
@pytest.mark.parametrize("receipts", ["hold", "are of another machine"])
def test_who_may_write_nowhere_loads_from_a_shared_store(site, unprivileged, open_path, root, receipts):
    site.store, site.manifests = open_path / "store", site.manifests.rename(open_path / "manifests")
    shared, mask = open_path / "shared", os.umask(0o022)
    try:
        site.run(LOAD, KERNEL_LOADER_CACHE=str(shared))
    finally:
        os.umask(mask)
    if root == "read-only":
        site.store.mkdir(mode=0o755)
    if receipts != "hold":
        touch(shared)
    site.hub.requests.clear()
    before = contents(open_path)
    for _ in range(2):
        with unprivileged():
            assert reader(site, shared).load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0
    assert contents(open_path) == before


def touch(store):
    for file in (store / "builds").rglob("*.py"):
        os.utime(file, ns=(1, 1))


READ = """
import os, sys
read, build = [], os.path.join(os.environ["READ"], "builds")
sys.addaudithook(lambda event, args: read.append(args[0]) if event == "open" and "part" in str(args[0]) else None)
import kernel_loader
kernel_loader.load_kernel("kernel")
print(len([file for file in read if str(file).startswith(build)]))
"""


@pytest.mark.parametrize("change", [touch, lambda shared: shutil.rmtree(shared / "receipts")], ids=["touched", "none"])
def test_where_the_receipts_do_not_hold_here_files_are_hashed_once(site, shared, change):
    digest, build = digest_of(shared), build_of(shared)
    change(shared)
    before = contents(shared)
    hashed = [int(site.run(READ, READ=str(shared), **both(site, shared))) for _ in range(3)]
    assert hashed == [8, 0, 0]
    assert contents(shared) == before
    assert {path.name for path in site.store.iterdir()} == {"receipts"}
    assert Store(site.store, (shared,)).find(digest) == build
    assert Store(site.store).all() == ()


def test_a_receipt_that_is_kept_for_a_shared_build_is_not_that_of_a_copy_in_the_root(site, shared):
    site.loader().prefetch("kernel")
    touch(shared)
    receipt = site.store / "receipts" / f"{site.build().name}.json"
    before = contents(receipt)
    assert command_of(site, shared, "cache", "verify")[0] == 0
    assert len(list(receipt.parent.iterdir())) == 2
    assert contents(receipt) == before
    assert site.run(READ, READ=str(site.store), **both(site, shared)) == "0\n"


def digest_of(store):
    return Store(store).all()[0].digest


def build_of(store):
    return Store(store).all()[0].path


def test_a_kernel_that_is_not_in_the_shared_store_is_fetched_into_the_root(site, shared):
    before = contents(shared)
    site.publish(files(value=3), branch="v2")
    loader = reader(site, shared)
    assert loader.load("kernel", version=2).double(21) == 84
    assert contents(shared) == before
    assert [stored.home for stored in loader.store.all()] == [site.store, shared]


@pytest.mark.parametrize("place", ["missing", "a file", "empty"])
def test_a_shared_directory_that_is_not_there_holds_nothing(site, place):
    other = site.root / "other"
    if place == "a file":
        other.write_text("")
    elif place == "empty":
        other.mkdir()
    loader = reader(site, other)
    assert loader.load("kernel").double(21) == 42
    assert [stored.home for stored in loader.store.all()] == [site.store]
    assert other.exists() == (place != "missing")
    site.hub.requests.clear()
    assert reader(site, other).load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


@pytest.mark.parametrize("part", ["", "builds", "receipts"])
def test_a_shared_directory_that_may_not_be_read_is_named(site, unprivileged, open_path, part):
    site.store, closed = open_path / "store", open_path / "closed"
    site.loader(cache=closed).prefetch("kernel")
    digest = digest_of(closed)
    (closed / part).chmod(0o700)
    store = Store(site.store, (closed,))
    with unprivileged(), pytest.raises(StoreError, match=f"{closed}.*cannot be read"):
        store.all()
    if part == "receipts":  # without them, files are hashed
        with unprivileged():
            assert store.find(digest) == closed / "builds" / digest[:32]
        return
    with unprivileged(), pytest.raises(StoreError, match=f"{closed}.*cannot be read"):
        store.find(digest)


# --- damaged builds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_shared_build_is_refused_offline_and_replaced_in_the_root_online(site, shared, change, caplog):
    digest, damaged = digest_of(shared), build_of(shared)
    change(damaged)
    before = contents(shared)
    with pytest.raises(IntegrityError, match="whoever fills that store") as caught:
        reader(site, shared, offline=True).load("kernel")
    assert caught.value.build == str(damaged)
    assert Store(site.store, (shared,)).find(digest, repair=True) is None
    assert not (site.store / "builds").exists()
    assert not (site.store / "staging").exists()
    assert reader(site, shared).load("kernel").double(21) == 42
    assert str(damaged) in caplog.text
    assert caplog.text.count("It is fetched again") == 1
    assert site.build().name == damaged.name
    caplog.clear()
    site.hub.requests.clear()
    bundle = reader(site, shared).load("kernel")
    assert kernel_loader.origin(bundle).path == site.build()
    assert (len(site.hub.requests), caplog.text) == (0, "")
    assert contents(shared) == before


def test_a_damaged_build_of_the_root_goes_where_a_shared_one_is_sound(site, shared):
    site.loader().prefetch("kernel")
    change_a_byte(site.build())
    site.hub.requests.clear()
    bundle = reader(site, shared).load("kernel")
    assert kernel_loader.origin(bundle).path.is_relative_to(shared)
    assert len(site.hub.requests) == 0
    assert not list((site.store / "builds").iterdir())


def test_a_damaged_shared_build_is_passed_over_for_a_sound_one_behind_it(site, shared):
    second = shutil.copytree(shared, site.root / "second")
    change_a_byte(build_of(shared))
    bundle = reader(site, shared, second).load("kernel")
    assert kernel_loader.origin(bundle).path.is_relative_to(second)
    assert len(site.hub.requests) == 0


# --- the index ----------------------------------------------------------------------------------------------------


def entry(commit, checked, names=("a", "b"), **known):
    return Entry(REQUEST, commit * 40, names, checked=checked, **known)


X, Y = "0" * 64, "f" * 64
ROOT, SHARED = entry("1", 10.0, builds={"a": X}), entry("1", 20.0, metadata={"b": "{}"}, builds={"b": Y})
BOTH = SHARED._replace(builds={"a": X, "b": Y})
MOVED, MOVED_LATER, MOVED_THEN = (entry("2", checked, builds={"a": X}) for checked in (10.0, 30.0, 20.0))
ENTRIES = {
    "none": (None, None, None),
    "the root alone": (ROOT, None, ROOT),
    "the shared one alone": (None, SHARED, SHARED),
    "of one commit": (ROOT, SHARED, BOTH),
    "of another commit": (MOVED, SHARED, SHARED),
    "the root asked later": (MOVED_LATER, SHARED, MOVED_LATER),
    "asked at one time": (MOVED_THEN, SHARED, MOVED_THEN),
    "names that only one knows": (ROOT, SHARED._replace(names=None), BOTH),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_the_answer_that_was_asked_for_last_counts_with_what_others_know_of_its_commit(tmp_path, case):
    own, other, expected = ENTRIES[case]
    root, shared = tmp_path / "root", tmp_path / "shared"
    for directory, known in ((root, own), (shared, other)):
        if known is not None:
            Index(Store(directory)).put(known)
    assert Index(Store(root, (shared,))).get(REQUEST) == expected


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (None, None, None),
        ((True, 1.0), None, (True, 1.0)),
        (None, (True, 1.0), (True, 1.0)),
        ((False, 1.0), (True, 2.0), (True, 2.0)),
        ((False, 2.0), (True, 1.0), (False, 2.0)),
        ((False, 1.0), (True, 1.0), (False, 1.0)),
    ],
)
def test_what_the_hub_said_last_of_a_publisher_counts(tmp_path, own, other, expected):
    root, shared = tmp_path / "root", tmp_path / "shared"
    for directory, said in ((root, own), (shared, other)):
        if said is not None:
            Index(Store(directory)).put_publisher("org", trusted=said[0], asked=said[1])
    assert Index(Store(root, (shared,))).publisher("org") == expected


def test_what_is_asked_again_is_remembered_in_the_root_alone(site, shared):
    before = contents(shared)
    new = site.publish(files(value=2))
    assert reader(site, shared, refresh_after=0).load("kernel").value == 2
    site.hub.requests.clear()
    loader = reader(site, shared)
    assert loader.index.get(REQUEST).commit == new
    assert loader.load("kernel").value == 2
    assert len(site.hub.requests) == 0
    assert contents(shared) == before


def test_what_the_administrator_asked_later_counts_for_all(site, shared):
    assert reader(site, shared).load("kernel").value == 1
    site.publish(files(value=2))
    site.loader(cache=shared, refresh_after=0).prefetch("kernel")
    assert reader(site, shared, offline=True).load("kernel").value == 2


def test_a_lost_index_of_a_shared_store_is_told_by_its_receipts(site, shared):
    shutil.rmtree(shared / "index")
    assert reader(site, shared, offline=True).load("kernel").double(21) == 42
    assert not site.store.exists()


ASKED = """
import os, sys
asked, places = [], {place: i for i, place in enumerate(os.environ["KERNEL_LOADER_CACHE"].split(os.pathsep))}
def hook(event, args):
    if event in ("open", "os.scandir", "os.listdir") and isinstance(args[0], str):
        for place, name in places.items():
            if args[0].startswith(place + os.sep):
                asked.append(f"{name}/{os.path.relpath(args[0], place).split(os.sep)[0]}")
import kernel_loader
loader = kernel_loader.KernelLoader()
sys.addaudithook(hook)
loader.load("kernel")
import collections, json
print(json.dumps(collections.Counter(asked)))
"""


def test_a_warm_load_looks_at_few_files(site, shared):
    one = {"0/index": 3, "0/receipts": 1, "0/builds": 4}
    alone = json.loads(site.run(ASKED, KERNEL_LOADER_CACHE=str(shared)))
    assert alone == one
    assert json.loads(site.run(ASKED, **both(site, shared))) == {"0/index": 3} | {
        key.replace("0/", "1/"): count for key, count in one.items()
    }
    site.loader().prefetch("kernel")
    assert json.loads(site.run(ASKED, **both(site, shared))) == one | {"1/index": 3}


# --- commands and removing ----------------------------------------------------------------------------------------


def command_of(site, shared, *arguments):
    site_store, site.store = site.store, f"{site.store}{os.pathsep}{shared}"
    try:
        return command(site, *arguments)
    finally:
        site.store = site_store


def test_the_commands_of_a_store_with_a_shared_directory(site, shared):
    site.publish(files(value=3), branch="v2")
    site.loader().prefetch(f"{REPO}@2", trust_remote_code=True)
    before = contents(shared)
    assert command_of(site, shared, "cache", "dir")[1] == f"{site.store}  (written)\n{shared}\n"
    named = {"cache": str(site.store), "shared": [str(shared)]}
    assert json.loads(command_of(site, shared, "cache", "dir", "--json")[1]) == named
    rows = json.loads(command_of(site, shared, "cache", "ls", "--json")[1])
    assert [(row["directory"], row["what"]) for row in rows] == [
        (str(site.store), f"{REPO}@v2 torch-universal"),
        (str(shared), f"{REPO}@v1 torch-universal"),
    ]
    listed = command_of(site, shared, "cache", "ls")[1].splitlines()
    assert [line.rpartition("  in ")[2] for line in listed[:2]] == [str(site.store), str(shared)]
    pruned = json.loads(command_of(site, shared, "cache", "prune", "--json")[1])
    assert pruned["removed"] == [rows[0]["digest"]]
    assert Store(site.store).all() == ()
    assert contents(shared) == before


def test_verifying_reads_the_copies_in_all_directories(site, shared):
    site.loader().prefetch("kernel")
    status, out, _ = command_of(site, shared, "cache", "verify")
    assert (status, out) == (0, f"{digest_of(shared)[:12]}  whole\n")
    hide(change_a_byte, build_of(shared))
    before = contents(shared)
    status, out, _ = command_of(site, shared, "cache", "verify", "--json")
    assert status == 1
    assert str(build_of(shared)) in json.loads(out)[digest_of(shared)]
    assert contents(shared) == before


def hide(change, build):
    """A change that size and time do not show, as of a disk that fails."""
    status = (build / "part3.py").stat()
    change(build)
    os.utime(build / "part3.py", ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_build_that_a_link_damaged_is_listed_all_the_same(site, shared):
    (build_of(shared) / "link.py").symlink_to("part3.py")
    assert len(Store(site.store, (shared,)).all()) == 1
    assert command_of(site, shared, "cache", "verify")[0] == 1


@pytest.mark.skipif(sys.platform == "win32", reason="files in use cannot be removed there anyway")
def test_a_shared_build_that_a_live_process_has_loaded_is_not_removed(site, shared):
    keeps = site.start(LOAD + "import sys; print('loaded', flush=True); sys.stdin.read()\n", **both(site, shared))
    try:
        assert [keeps.stdout.readline() for _ in range(2)] == ["42\n", "loaded\n"], keeps.stderr.read()
        assert not Store(shared).remove(digest_of(shared))
    finally:
        keeps.kill()
        keeps.communicate(timeout=30)
    assert Store(site.store, (shared,)).remove(digest_of(shared))  # of the root, which has none
    assert Store(shared).find(digest_of(shared))
    assert Store(shared).remove(digest_of(shared))


# --- processes ----------------------------------------------------------------------------------------------------


def test_processes_with_roots_of_their_own_load_from_one_shared_store(site, shared):
    before, stores = contents(shared), [site.root / f"own{i}" for i in range(3)]
    processes = []
    for site.store in stores:
        processes.append(site.start(LOAD, **both(site, shared)))
    assert finish(processes) == ["42\n"] * 3
    assert len(site.hub.requests) == 0
    assert contents(shared) == before
    assert not [store for store in stores if store.exists()]


VERSIONS = 4

# Loads each version as soon as it is there. Any error but that it is not there yet ends the process.
FOLLOWS = f"""
import time
from kernel_loader import KernelLoader
from kernel_loader.errors import NotCached
deadline, missed, values = time.monotonic() + 90, 0, []
while len(values) < {VERSIONS} and time.monotonic() < deadline:
    try:
        values.append(KernelLoader().load("kernel", version=len(values) + 1).value)
    except NotCached:
        missed += 1
        print("missed", flush=True) if missed == 1 else None
print(values)
"""


def test_what_the_administrator_publishes_is_loaded_as_soon_as_it_is_whole(site):
    shared = site.root / "shared"
    for version in range(1, VERSIONS + 1):
        site.publish(files(30, value=version), branch=f"v{version}")
    site.hub.latency = 0.004
    stores, readers = [site.root / f"own{i}" for i in range(2)], []
    for site.store in stores:
        readers.append(site.start(FOLLOWS, KERNEL_LOADER_OFFLINE="1", **both(site, shared)))
    try:
        assert [process.stdout.readline() for process in readers] == ["missed\n"] * 2
        site.store = shared
        for version in range(1, VERSIONS + 1):
            status, _, err = command(site, "prefetch", f"{REPO}@{version}", "--trust-remote-code")
            assert (status, err) == (0, "")
        assert finish(readers) == [f"{list(range(1, VERSIONS + 1))}\n"] * 2
    finally:
        for process in readers:
            process.kill()
    assert not [store for store in stores if (store / "builds").exists()]


# Removes a build and publishes it anew, again and again, as an administrator who repairs it.
REPAIRS = """
import json, shutil
from kernel_loader.settings import Settings
from kernel_loader.store import Store
store = Store(Settings.from_env().cache)
(stored,) = store.all()
receipt = json.loads((store.root / "receipts" / f"{stored.path.name}.json").read_text())
hashes = {path: entry["sha256"] for path, entry in receipt["files"].items()}
print("repairs", flush=True)
for _ in range(60):
    with store.staging() as staging:
        shutil.copytree(stored.path, staging, dirs_exist_ok=True)
        store.remove(stored.digest, in_use=True)
        store.publish(staging, hashes, stored.sources[0])
"""


def test_a_shared_build_that_is_replaced_while_it_is_read_is_whole_or_not_there(site, shared):
    digest, seen = digest_of(shared), set()
    process = site.start(REPAIRS, KERNEL_LOADER_CACHE=str(shared))
    try:
        assert process.stdout.readline() == "repairs\n", process.stderr.read()
        store, deadline = Store(site.store, (shared,)), time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            seen.add(store.find(digest, trust_receipt=False))
        assert process.wait(timeout=10) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate(timeout=30)
    build = shared / "builds" / digest[:32]
    assert {build} <= seen <= {None, build}


SPAWNS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import kernel_loader
if __name__ == "__main__":
    double = kernel_loader.load_kernel("kernel").double
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(list(pool.map(double, [21])))
"""


def test_a_spawned_process_finds_the_builds_of_a_shared_store(site, shared):
    script = site.root / "spawns.py"
    script.write_text(SPAWNS)
    run = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    assert site.run(run, **both(site, shared)) == "[42]\n"


@pytest.mark.parametrize("digest", ["../precious", "ABSOLUTE", "", 5, None, "0" * 63, "Z" * 64])
def test_an_index_leads_to_nothing_but_builds(site, shared, digest):
    """What others write names directories that are removed when they are no sound builds."""
    precious, outside = site.store / "precious", site.root / "precious"
    for directory in (precious, outside, site.store / "builds" / "kept"):
        directory.mkdir(parents=True)
        (directory / "work").write_text("of a lifetime")
    (file,) = (shared / "index").iterdir()
    document = json.loads(file.read_text())
    document["builds"] = dict.fromkeys(document["builds"], str(outside) if digest == "ABSOLUTE" else digest)
    file.write_text(json.dumps(document))
    assert reader(site, shared).load("kernel").double(21) == 42
    assert all((d / "work").is_file() for d in (precious, outside, site.store / "builds" / "kept"))


def test_a_load_looks_at_no_file_of_other_builds(site, shared, monkeypatch):
    """When a build was last used costs a look at each of its files, and is nobody's question here."""
    walked = []
    monkeypatch.setattr(store_module, "_last_use", walked.append)
    site.hub.kernel("org/other").commit(files(value=3), branch="v1")
    reader(site, shared).load_module("org/other", version=1, trust_remote_code=True)
    assert walked == []
