"""What goes wrong on the way from the Hub, and what is on disk afterwards: the whole build, or nothing of it."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import kernel_loader.sources.hub as hub_source
from kernel_loader.errors import (
    HubUnavailable,
    IntegrityError,
    KernelLoaderError,
    MetadataError,
    SourceError,
    StoreError,
)
from kernel_loader.store import Store
from kernel_loader.testing import Answer, Fault
from tests.published.conftest import files

HOME = "build/torch-universal"


def nothing_is_left(site):
    for name in ("builds", "staging"):
        directory = site.store / name
        assert not directory.exists() or not list(directory.iterdir()), name


@pytest.fixture
def impatient(monkeypatch):
    """A stalled body is given up soon, and refused requests are not tried for long."""
    monkeypatch.setattr(hub_source, "STALL", 0.3)


# --- bodies -------------------------------------------------------------------------------------------------------

BODIES = {
    "truncated": {"truncate_after": 5},
    "wrong bytes": {"corrupt_at": 0},
    "stalled": {"stall_after": 5},
    "another file": {"body": b"value = 666\ndef double(x): return x\n"},
    "more than is listed": {"body": b"x" * 10_000},
    "an empty file": {"body": b""},
}


@pytest.mark.parametrize("what", BODIES)
def test_a_body_that_comes_out_wrong_once_is_fetched_again(site, impatient, what):
    site.hub.fault(Fault(path=r"part3\.py", first=1, **BODIES[what]))
    assert site.loader().load("kernel").double(21) == 42
    assert len([r for r in site.hub.requests if r.path.endswith("part3.py")]) == 2


@pytest.mark.parametrize("what", BODIES)
def test_a_body_that_always_comes_out_wrong_is_refused_and_leaves_nothing(site, impatient, what):
    site.hub.fault(Fault(path=r"part3\.py", **BODIES[what]))
    with pytest.raises(IntegrityError, match=r"part3\.py"):
        site.loader().load("kernel")
    nothing_is_left(site)
    assert len([r for r in site.hub.requests if r.path.endswith("part3.py")]) == hub_source.TRIES
    site.hub.clear_faults()
    assert site.loader().load("kernel").double(21) == 42


def test_files_that_are_not_what_the_metadata_lists_are_refused(site):
    import json

    build = files()
    digest = {"algorithm": "sha256", "files": {"__init__.py": "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="}}
    build["build/torch-universal/metadata.json"] = json.dumps({"name": "kernel", "digest": digest}).encode()
    site.publish(build)
    with pytest.raises(IntegrityError, match="__init__.py has other content"):
        site.loader().load("kernel")
    nothing_is_left(site)


def test_large_files_are_held_against_their_sha256(site):
    site.kernel.lfs_threshold = 15
    site.publish()
    assert site.loader().load("kernel").double(21) == 42
    site.hub.fault(Fault(route="redirect-target", path=r".", corrupt_at=3))
    site.publish(files(12, value=2), branch="v2")
    with pytest.raises(IntegrityError, match="its content is not what is listed"):
        site.loader().load("kernel", version=2)


def test_a_large_file_in_xet_storage_is_left_to_the_client_and_verified_all_the_same(site, monkeypatch):
    import json

    monkeypatch.setattr(hub_source, "LARGE", 100)
    site.publish(files() | {f"{HOME}/large.bin": b"x" * 1000})

    def in_xet(_, right):
        entries = [entry | {"xetHash": "0" * 64} for entry in json.loads(right.whole())]
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(entries).encode())

    site.hub.fault(Fault(route="tree", path="torch-universal", edit=in_xet))
    assert site.loader().load("kernel").double(21) == 42
    assert (site.build() / "large.bin").read_bytes() == b"x" * 1000
    asked = [(r.method, r.path.rpartition("/")[2]) for r in site.hub.requests if r.method == "HEAD"]
    assert asked == [("HEAD", "large.bin")]
    assert len(list(site.build().iterdir())) == 11


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["info", "tree", "resolve"])
def test_a_storm_of_refusals_is_waited_out(site, route):
    site.hub.fault(Fault(route=route, first=2, status=429, retry_after=0))
    assert site.loader().load("kernel").double(21) == 42


@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 503}, {"close": True}, {"reset": True}])
def test_a_hub_that_fails_once_is_asked_again(site, fault):
    site.hub.fault(Fault(route="info", first=1, **fault))
    assert site.loader().load("kernel").double(21) == 42


@pytest.mark.parametrize("route", ["info", "tree", "resolve"])
def test_endless_refusals_end_in_an_error_and_leave_nothing(site, route, monkeypatch):
    monkeypatch.setattr(hub_source.Hub, "__init__", lambda self, retries=4: setattr(self, "_retries", 1))
    site.hub.fault(Fault(route=route, status=429, retry_after=0))
    with pytest.raises(HubUnavailable, match="429"):
        site.loader().load("kernel")
    nothing_is_left(site)


def test_an_answer_that_stalls_is_given_up(site, impatient, monkeypatch):
    monkeypatch.setattr(hub_source.Hub, "__init__", lambda self, retries=4: setattr(self, "_retries", 0))
    site.hub.fault(Fault(route="tree", latency=3.0))
    with pytest.raises(HubUnavailable, match="cannot be reached"):
        site.loader().load("kernel")


# --- hostile listings ---------------------------------------------------------------------------------------------


def entry(path, size=3, oid="0" * 40):
    return {"type": "file", "path": path, "size": size, "oid": oid}


@pytest.mark.parametrize(
    "paths",
    [
        [f"{HOME}/../../escape.py"],
        [f"{HOME}/a/../../../escape.py"],
        ["/tmp/escape.py"],
        ["escape.py"],
        [f"{HOME}/C:/escape.py"],
        [f"{HOME}/a\\..\\escape.py"],
        [f"{HOME}/a\x00.py"],
        [f"{HOME}//double.py"],
        [f"{HOME}/a.py", f"{HOME}/A.py"],
        [f"{HOME}/a.py", f"{HOME}/a.py"],
        [f"{HOME}/ß.py", f"{HOME}/SS.py"],
    ],
)
def test_a_listing_that_leads_out_of_the_build_or_collides_is_refused(site, paths, tmp_path):
    before = {file for file in tmp_path.rglob("*") if site.store not in file.parents}
    site.hub.fault(Fault(route="tree", path="torch-universal", json=lambda _: [entry(path) for path in paths]))
    with pytest.raises(IntegrityError, match="the Hub lists"):
        site.loader().load("kernel")
    nothing_is_left(site)
    after = {file for file in tmp_path.rglob("*") if site.store not in file.parents}
    assert {file.name for file in after - before} <= {"store"}


def test_a_listing_without_end_is_refused(site):
    many = (entry(f"{HOME}/f{i}.py") for i in range(100_000))
    site.hub.fault(Fault(route="tree", path="torch-universal", json=lambda _: many))
    with pytest.raises(SourceError, match="more than 20000 entries"):
        site.loader().load("kernel")
    nothing_is_left(site)


@pytest.mark.parametrize("answer", [{}, [], "text", None, [{"type": "file"}], {"sha": "main"}, {"sha": 7}, [1]])
@pytest.mark.parametrize("route", ["info", "tree"])
def test_an_answer_of_another_form_is_an_error_of_our_tree(site, route, answer):
    site.hub.fault(Fault(route=route, json=lambda _: answer))
    with pytest.raises(KernelLoaderError):
        site.loader().load("kernel")
    nothing_is_left(site)


@pytest.mark.parametrize("body", [b"not json", b"\xff\xfe", b"{" * 100_000])
def test_an_answer_that_is_no_json_is_an_error_of_our_tree(site, body):
    site.hub.fault(Fault(route="info", body=body))
    with pytest.raises(SourceError):
        site.loader().load("kernel")


def test_metadata_of_200_megabytes_is_refused_by_size(site):
    sent = []

    def body():
        for _ in range(200):
            sent.append(2**20)
            yield b" " * 2**20

    site.hub.fault(Fault(path=r"metadata\.json", edit=lambda _, right: Answer(200, {}, body())))
    with pytest.raises(SourceError, match="more than"):
        site.loader().load("kernel")
    assert len(sent) < 100


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"version": "one"}', b"\xff"])
def test_damaged_metadata_is_told_and_not_remembered(site, text):
    site.publish(files() | {f"{HOME}/metadata.json": text})
    with pytest.raises(MetadataError, match=r"metadata\.json"):
        site.loader().load("kernel")
    site.publish()
    assert site.loader(refresh_after=0).load("kernel").double(21) == 42


# --- the disk -----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, check=False, timeout=30
    )
    if mounted.returncode != 0:
        pytest.skip("this machine lets nobody mount a small file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


def test_a_full_disk_is_told_and_leaves_nothing(site, small_disk):
    site.publish(files() | {f"{HOME}/big.bin": b"x" * 400_000})
    site.store = small_disk / "store"
    with pytest.raises(StoreError, match="no space left"):
        site.loader().load("kernel")
    nothing_is_left(site)
    site.publish()
    assert site.loader(refresh_after=0).load("kernel").double(21) == 42


def test_a_store_that_cannot_be_made_is_told(site, tmp_path):
    (tmp_path / "file").write_text("")
    site.store = tmp_path / "file" / "store"
    with pytest.raises(StoreError, match="KERNEL_LOADER_CACHE"):
        site.loader().load("kernel")


# --- what changes on disk after publication -----------------------------------------------------------------------


def change_a_byte(build: Path) -> None:
    content = bytearray((build / "part3.py").read_bytes())
    content[-2] ^= 1
    (build / "part3.py").write_bytes(content)


def change_a_byte_and_hide_it(build: Path) -> None:
    import os

    status = (build / "part3.py").stat()
    change_a_byte(build)
    os.utime(build / "part3.py", ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def remove_a_file(build: Path) -> None:
    (build / "part3.py").unlink()


def add_a_file(build: Path) -> None:
    (build / "part99.py").write_text("")


def replace_by_a_link(build: Path) -> None:
    (build / "part3.py").rename(build.parent.parent / "elsewhere.py")
    (build / "part3.py").symlink_to(build.parent.parent / "elsewhere.py")


def replace_by_a_directory(build: Path) -> None:
    (build / "part3.py").unlink()
    (build / "part3.py").mkdir()
    (build / "part3.py" / "x.py").write_text("")


CHANGES = [
    change_a_byte,
    change_a_byte_and_hide_it,
    remove_a_file,
    add_a_file,
    replace_by_a_link,
    replace_by_a_directory,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_build_that_changed_on_disk_is_refused_offline_and_fetched_again_online(site, change, caplog):
    site.loader().load("kernel")
    change(site.build())
    with pytest.raises(IntegrityError, match="part"):
        site.loader(offline=True).load("kernel")
    assert site.loader().load("kernel").double(21) == 42
    assert "It is fetched again" in caplog.text
    site.hub.requests.clear()
    site.loader().load("kernel")
    assert len(site.hub.requests) == 0


def test_files_that_were_touched_or_copied_are_hashed_once_and_accepted(site):
    site.loader().load("kernel")
    copied = site.root / "copied"
    shutil.copytree(site.store, copied)
    site.store = copied
    site.hub.requests.clear()
    before = site.tree()
    site.loader().load("kernel")
    assert len(site.hub.requests) == 0
    changed = [name for name, content in site.tree().items() if before.get(name) != content]
    assert [name.split("/")[0] for name in changed] == ["receipts"]
    before = site.tree()
    site.loader().load("kernel")
    assert site.tree() == before


def test_a_lost_receipt_costs_hashing_and_nothing_else(site):
    site.loader().load("kernel")
    for file in (site.store / "receipts").iterdir():
        file.unlink()
    site.hub.requests.clear()
    assert site.loader().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda receipt: "",
        lambda receipt: "[]",
        lambda receipt: "{}",
        lambda receipt: json.dumps(receipt)[:-40],
        lambda receipt: json.dumps(receipt | {"digest": 1}),
        lambda receipt: json.dumps(receipt | {"files": {"__init__.py": "x"}}),
        lambda receipt: json.dumps(receipt | {"files": {name: {} for name in receipt["files"]}}),
        lambda receipt: json.dumps(receipt | {"sources": [{"repo": "org/kernel"}]}),
    ],
)
def test_a_damaged_receipt_counts_as_lost(site, damage):
    site.loader().load("kernel")
    (receipt,) = (site.store / "receipts").iterdir()
    receipt.write_text(damage(json.loads(receipt.read_text())))
    site.hub.requests.clear()
    assert Store(site.store).all() == ()
    assert site.loader().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0
    assert len(Store(site.store).all()) == 1


def test_a_build_that_is_gone_is_fetched_again(site):
    site.loader().load("kernel")
    shutil.rmtree(site.build())
    assert site.loader().load("kernel").double(21) == 42
