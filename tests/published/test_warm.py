"""What a load asks of the Hub and writes to disk: cold, warm, refreshed, offline."""

import logging

import pytest

import kernel_loader
from kernel_loader.errors import HubUnavailable, NotCached, RepositoryMissing, UnknownVersion
from kernel_loader.published import PublishedBuilds
from kernel_loader.sources import Request
from kernel_loader.store import Store
from kernel_loader.testing import Fault
from tests.published.conftest import REPO, files

LOAD = """
import kernel_loader
bundle = kernel_loader.load_kernel("kernel")
print(bundle.double(21), kernel_loader.origin(bundle).source)
"""


@pytest.mark.parametrize("count", [2, 10, 60])
def test_a_cold_load_asks_for_each_file_once_and_for_four_things_more_at_most(site, count):
    site.publish(files(count))
    assert site.loader().load("kernel").double(21) == 42
    assert len(site.hub.requests) <= count + 4
    assert not [r for r in site.hub.requests if r.method == "HEAD"]
    paths = [r.path for r in site.hub.requests if r.route == "resolve"]
    assert len(paths) == len(set(paths))


def test_a_warm_load_in_a_new_process_asks_nothing_and_writes_nothing(site):
    site.run(LOAD)
    site.hub.requests.clear()
    before = site.tree()
    assert site.run(LOAD) == "42 hub\n"
    assert len(site.hub.requests) == 0
    assert site.tree() == before


def test_a_warm_load_opens_no_file_for_writing_and_imports_no_client(site):
    site.run(LOAD)
    script = """
import sys, os
opened = []
def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        opened.append(args[0])
    if event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.chmod", "os.utime", "socket.connect"):
        opened.append(event)
import kernel_loader
loader = kernel_loader.KernelLoader()
sys.addaudithook(hook)
loader.load("kernel")
print(opened, "huggingface_hub" in sys.modules)
"""
    assert site.run(script, PYTHONDONTWRITEBYTECODE="1") == "[] False\n"


def test_a_second_call_in_a_process_asks_nothing(site):
    loader = site.loader()
    first = loader.load("kernel")
    site.hub.requests.clear()
    assert loader.load("kernel") is first
    assert len(site.hub.requests) == 0


@pytest.mark.parametrize("state", ["offline", "down"])
def test_what_was_loaded_once_loads_without_the_hub(site, state):
    site.run(LOAD)
    if state == "down":
        site.hub.close()
    assert site.run(LOAD, KERNEL_LOADER_OFFLINE="1" if state == "offline" else "0") == "42 hub\n"


def test_offline_a_kernel_that_is_not_here_is_not_cached(site):
    with pytest.raises(NotCached, match="must not be asked"):
        site.loader(offline=True).load("kernel")
    assert len(site.hub.requests) == 0


def test_an_unreachable_hub_is_told_when_nothing_is_here(site):
    site.hub.fault(Fault(status=503))
    with pytest.raises(HubUnavailable, match="503"):
        PublishedBuilds(Store(site.store), offline=False, refresh_after=1, retries=0).listing(
            Request(repo=REPO, version=1)
        )


# --- versions that move -------------------------------------------------------------------------------------------


def published(site, now, **settings):
    return PublishedBuilds(
        Store(site.store), **({"offline": False, "refresh_after": 100.0, "now": lambda: now, "retries": 0} | settings)
    )


def listed(site, now, revision=None, **settings):
    request = Request(repo=REPO, version=None if revision else 1, revision=revision)
    return published(site, now, **settings).listing(request)


def test_a_version_is_asked_about_again_when_that_is_due(site):
    first = listed(site, 0)
    site.hub.requests.clear()
    assert listed(site, 99) == first
    assert len(site.hub.requests) == 0
    assert listed(site, 101) == first
    assert site.hub.counts() == {("GET", "info"): 1}
    site.hub.requests.clear()
    assert listed(site, 200) == first  # counted from the last answer
    assert len(site.hub.requests) == 0


def test_a_version_that_has_moved_is_listed_anew(site):
    old = listed(site, 0)
    new = site.publish(files(value=2) | files(variant="torch-cuda"))
    assert listed(site, 50).commit == old.commit
    assert listed(site, 101).commit == new
    assert listed(site, 101).names == ("torch-cuda", "torch-universal")


def test_a_moved_version_loads_its_new_build_in_a_new_process(site):
    assert site.run(LOAD) == "42 hub\n"
    site.publish(files(value=2))
    assert site.run(LOAD) == "42 hub\n"
    assert site.run(LOAD, KERNEL_LOADER_REFRESH_AFTER="0") == "63 hub\n"


def test_a_commit_is_never_asked_about_again(site):
    commit = site.publish()
    listed(site, 0, revision=commit)
    site.hub.requests.clear()
    assert listed(site, 1e9, revision=commit).commit == commit
    assert len(site.hub.requests) == 0


@pytest.mark.parametrize("fault", [Fault(status=503), Fault(close=True), Fault(reset=True)])
def test_when_the_hub_fails_the_earlier_answer_serves_with_a_warning(site, fault, caplog):
    first = listed(site, 0)
    site.hub.fault(fault)
    assert listed(site, 101) == first
    (record,) = [r for r in caplog.records if r.name == "kernel_loader" and r.levelno == logging.WARNING]
    assert "what is known here serves" in record.getMessage()


def test_a_branch_that_moves_during_a_load_gives_one_commit(site):
    first = site.kernel.commit(files(), branch="v1")
    moved = []

    def move(_):
        moved.append(site.publish(files(12, value=2)))

    site.hub.fault(Fault(route="tree", first=1, run=move))
    bundle = site.loader().load("kernel")
    assert moved
    assert bundle.value == 1
    assert kernel_loader.origin(bundle).commit == first
    assert len(list(site.build().iterdir())) == 10


# --- what is not there --------------------------------------------------------------------------------------------


def test_an_unknown_version_names_those_that_there_are(site):
    site.publish(branch="v3")
    with pytest.raises(UnknownVersion, match="Its versions are 1, 3") as caught:
        site.loader().load("kernel", version=2)
    assert caught.value.available == (1, 3)


def test_a_missing_repository_is_told(site):
    with pytest.raises(RepositoryMissing, match="no such kernel repository"):
        site.loader().load_module("org/nothing", trust_remote_code=True)


def test_a_repository_of_another_type_is_told(site):
    site.hub.model("org/a-model").commit({"README.md": b""}, branch="main")
    with pytest.raises(RepositoryMissing, match="of type model"):
        site.loader().load_module("org/a-model", trust_remote_code=True)


def test_a_gated_repository_says_how_to_get_access(site):
    site.kernel.gated = True
    with pytest.raises(RepositoryMissing, match="Ask for access"):
        site.loader().load("kernel")


def test_when_nothing_fits_another_version_that_has_a_build_is_named(site):
    site.publish(files(variant="torch-cuda"))
    site.publish(files(), branch="v2")
    site.publish(files(variant="torch-rocm"), branch="v3")
    with pytest.raises(kernel_loader.NoCompatibleBuild, match="pass version=2") as caught:
        site.loader().load("kernel")
    assert caught.value.version == 2


def test_names_below_build_that_are_no_variants_are_shown(site):
    site.publish(files() | {"build/notes/readme.txt": b""})
    verdicts = {v.name: v.status for v in site.loader().resolve("kernel").verdicts}
    assert verdicts == {"torch-universal": "accepted", "notes": "rejected"}


# --- the index ----------------------------------------------------------------------------------------------------


def test_a_lost_index_is_rebuilt_from_the_store(site):
    site.run(LOAD)
    for file in (site.store / "index").iterdir():
        file.unlink()
    assert site.run(LOAD, KERNEL_LOADER_OFFLINE="1") == "42 hub\n"


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"schema": 99}', b'{"schema": 1, "repo": "org/kernel"}', b"\xff"]
)
def test_a_damaged_index_is_asked_for_again(site, damage):
    site.run(LOAD)
    (file,) = (site.store / "index").iterdir()
    file.write_bytes(damage)
    assert site.run(LOAD) == "42 hub\n"


def test_the_index_can_be_read_by_a_person(site):
    site.loader().load("kernel")
    (file,) = (site.store / "index").iterdir()
    assert file.name.startswith("org--kernel@v1-")


def test_resolving_fetches_no_build(site):
    assert site.loader().resolve("kernel").chosen.name == "torch-universal"
    assert site.gets() == 1  # its metadata.json
    assert not (site.store / "builds").exists()
