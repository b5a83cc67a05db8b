"""Archives: written whole or not at all; of one that is not what it says, nothing is imported."""

import hashlib
import json
import random
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from kernel_loader.carry.archive import verify_archive, write_archive
from kernel_loader.carry.contents import Bundle
from kernel_loader.errors import BundleError, IntegrityError, LockMismatch, LockMissing, StoreError
from kernel_loader.index import Index
from kernel_loader.lock import Lock, LockedBuild, LockedRepository
from kernel_loader.metadata import Metadata
from kernel_loader.sources import Request
from kernel_loader.store import Source, Store
from tests.carry.conftest import (
    BUILD,
    COMMIT,
    bring,
    digest,
    document,
    imported,
    kept,
    listed,
    member,
    members,
    pack,
    write,
)

OTHER = BUILD | {"__init__.py": b"value = 2\n"}
V1 = Request("org/kernel", version=1)


# --- bundles that are not what they say ---------------------------------------------------------------------------

# Where things stand in the two headers that a ZIP has of each member.
CENTRAL = {"flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<L"), "compressed": (20, "<L"), "size": (24, "<L")}
CENTRAL |= {"extra": (30, "<H"), "attributes": (38, "<L"), "offset": (42, "<L"), "name": (46, "")}
LOCAL = {"flags": (6, "<H"), "method": (8, "<H"), "compressed": (18, "<L"), "size": (22, "<L"), "name": (30, "")}


def patched(raw: bytes, header: dict[str, tuple[int, str]], name: str, /, **values: int | bytes) -> bytes:
    """A ZIP with fields of one member's header overwritten."""
    signature = b"PK\1\2" if header is CENTRAL else b"PK\3\4"
    content = bytearray(raw)
    at = raw.index(name.encode(), 0 if header is LOCAL else raw.index(b"PK\1\2")) - header["name"][0]
    assert raw[at : at + 4] == signature
    for field, value in values.items():
        start, kind = header[field]
        packed = value if isinstance(value, bytes) else struct.pack(kind, value)
        content[at + start : at + start + len(packed)] = packed
    return bytes(content)


def with_member(name: str, content: bytes = b"x"):
    return lambda file: pack(file, members() | {name: content})


def without(name: str):
    return lambda file: pack(file, {key: value for key, value in members().items() if key != name})


def with_content(path: str, content: bytes, build=BUILD):
    return lambda file: pack(file, members(build) | {member(path, build): content})


def with_bundle(text: bytes):
    return lambda file: pack(file, members() | {"bundle.json": text})


def edited(header, name: str, /, **values: int | bytes):
    def make(file: Path) -> Path:
        pack(file, members()).write_bytes(patched(file.read_bytes(), header, name, **values))
        return file

    return make


def raw(content: bytes):
    def make(file: Path) -> Path:
        file.write_bytes(content)
        return file

    return make


def bomb(name: str):
    """A gigabyte of zeros in a megabyte, deflated."""

    def make(file: Path) -> Path:
        deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
        block = deflate.compress(bytes(2**20)) + deflate.flush(zlib.Z_FULL_FLUSH)
        packed = block * 1024 + deflate.flush()
        pack(file, members() | {name: packed})
        content = patched(file.read_bytes(), CENTRAL, name, method=8, size=2**30)
        file.write_bytes(patched(content, LOCAL, name, method=8, size=2**30))
        assert len(packed) < 2 * 2**20
        return file

    return make


def twice(file: Path) -> Path:
    pack(file, members())
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(member("__init__.py"), b"value = 666\n")
    return file


def overlapping(file: Path) -> Path:
    """A member that lies in another: both hash to what bundle.json says."""
    inner = pack(file, {member("part.py", NESTED): NESTED["part.py"]}).read_bytes()
    return pack(file, members(NESTED) | {member("outer.py", NESTED): inner[: inner.index(b"PK\1\2")]})


NESTED = {"part.py": b"part = 1\n"}


def link(file: Path) -> Path:
    found = members() | {member("__init__.py"): b"/etc/passwd"}
    pack(file, found)
    attributes = (stat.S_IFLNK | 0o777) << 16
    file.write_bytes(patched(file.read_bytes(), CENTRAL, member("__init__.py"), attributes=attributes))
    return file


def zip64(size: int, offset: int):
    """A member whose true sizes are told in the extra field that ZIP64 has for them."""

    def make(file: Path) -> Path:
        name = member("__init__.py")
        found = members()
        with zipfile.ZipFile(file, "w") as archive:
            for key, content in found.items():
                info = zipfile.ZipInfo(key)
                if key == name:
                    info.extra = struct.pack("<HHQQQ", 1, 24, size, size, offset)
                archive.writestr(info, content)
        everything = dict.fromkeys(("compressed", "size", "offset"), 0xFFFFFFFF)
        file.write_bytes(patched(file.read_bytes(), CENTRAL, name, **everything))
        return file

    return make


def end64(file: Path) -> Path:
    """An end that sends the reader to a directory of 2^60 members."""
    content = pack(file, members()).read_bytes()
    end = content.rindex(b"PK\5\6")
    record = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 2**60, 2**60, 2**60, 2**60)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, end, 1)
    full = content[end : end + 8] + b"\xff" * 12 + content[end + 20 :]
    file.write_bytes(content[:end] + record + locator + full)
    return file


def count(file: Path) -> Path:
    """200,000 members of nothing."""
    directory, at = bytearray(), 0
    with file.open("wb") as stream:
        for number in range(200_000):
            name = b"%06d" % number
            directory += struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, 0, 0, 0, 0, 33, 0, 0, 0, 6, *[0] * 5, at)
            directory += name
            at += stream.write(struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 0, 0, 33, 0, 0, 0, 6, 0) + name)
        stream.write(directory)
        stream.write(struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 200_000, 200_000, len(directory), at))
        stream.write(struct.pack("<4sLQL", b"PK\6\7", 0, at + len(directory), 1))
        stream.write(b"PK\5\6" + bytes(4) + b"\xff" * 12 + bytes(2))
    return file


FIRST = member("__init__.py")
BAD = {
    "an empty file": (raw(b""), "it is no bundle, or not all of one"),
    "a text file": (raw(b"hello\n" * 100), "it is no bundle, or not all of one"),
    "no file": (lambda file: file, "it cannot be read"),
    "a directory": (lambda file: file.mkdir() or file, "it cannot be read"),
    "compressed": (lambda file: pack(file, members(), zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "compressed otherwise": (lambda file: pack(file, members(), zipfile.ZIP_LZMA), "is compressed or encrypted"),
    "a bomb": (bomb(FIRST), "is compressed or encrypted"),
    "a bomb for bundle.json": (bomb("bundle.json"), "bundle.json is compressed or encrypted"),
    "encrypted": (edited(CENTRAL, FIRST, flags=1), "is compressed or encrypted"),
    "encrypted otherwise": (edited(CENTRAL, FIRST, flags=0x40), "cannot be read"),
    "patched data": (edited(CENTRAL, FIRST, flags=0x20), "cannot be read"),
    "a size that lies": (edited(CENTRAL, FIRST, size=2**31), "says that it is larger than what is there"),
    "sizes that lie": (edited(CENTRAL, FIRST, size=2**31, compressed=2**31), "says that it is larger"),
    "a member that reaches into the next": (edited(CENTRAL, FIRST, size=60, compressed=60), "has 60 bytes, and its"),
    "an empty member": (edited(CENTRAL, FIRST, size=0, compressed=0), "has 0 bytes, and its"),
    "a member elsewhere": (edited(CENTRAL, FIRST, offset=1), "cannot be read"),
    "a member far away": (edited(CENTRAL, FIRST, offset=2**31), "cannot be read"),
    "a member where another is": (edited(CENTRAL, FIRST, offset=0), "cannot be read"),
    "another name in the other header": (edited(LOCAL, FIRST, name=b"x"), "cannot be read"),
    "sizes of ZIP64 that lie": (zip64(2**60, 0), "says that it is larger"),
    "an offset of ZIP64 that lies": (zip64(len(BUILD["__init__.py"]), 2**62), "cannot be read"),
    "an offset of ZIP64 below zero": (zip64(len(BUILD["__init__.py"]), 2**64 - 1), "cannot be read"),
    "a directory of ZIP64 that lies": (end64, "it is no bundle, or not all of one"),
    "a wrong checksum": (edited(CENTRAL, FIRST, crc=1), "cannot be read"),
    "a name that is no UTF-8": (edited(CENTRAL, FIRST, flags=0x800, name=b"\xff"), "it is no bundle"),
    "a member twice": (twice, "two of its members have one name"),
    "an extra member": (with_member("builds/readme.md"), "'builds/readme.md' is not named in its bundle.json"),
    "an extra directory": (with_member("builds/", b""), "'builds/' is not named"),
    "an extra file of a build": (with_member(member("more.py")), "more.py' is not named"),
    "a second bundle.json": (with_member("BUNDLE.JSON", members()["bundle.json"]), "'BUNDLE.JSON' is not named"),
    "overlapping members": (overlapping, "is not named"),
    "a member outside": (with_member("../x"), r"'\.\./x' is not named"),
    "an absolute member": (with_member("/abs"), "'/abs' is not named"),
    "a drive": (with_member("C:\\x"), "is not named"),
    "a backslash": (with_member("builds\\x"), "is not named"),
    "bytecode": (with_member(member("__pycache__/x.pyc")), "is not named"),
    "a member too few": (without(FIRST), "__init__.py' is missing"),
    "no bundle.json": (without("bundle.json"), "it has no bundle.json"),
    "no members": (lambda file: pack(file, {}), "it has no bundle.json"),
    "many members": (count, "it has no bundle.json"),
    "a link": (link, "has 11 bytes, and its bundle.json says"),
    "other bytes": (with_content("__init__.py", BUILD["__init__.py"].replace(b"1", b"2")), "what its bundle.json says"),
    "more bytes": (with_content("__init__.py", BUILD["__init__.py"] + b"x"), "bytes, and its bundle.json says"),
    "a large bundle.json": (with_bundle(b" " * 100 * 2**20), "and more than 67,108,864 are not read"),
    "a newer bundle.json": (with_bundle(json.dumps(document(schema=2)).encode()), "it is of a newer format"),
    "a bundle.json of another": (with_bundle(json.dumps(document(OTHER)).encode()), "is not named in its bundle.json"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_of_a_bad_bundle_nothing_is_imported_and_what_is_wrong_is_said(what, tmp_path):
    make, said = BAD[what]
    home = tmp_path / "store"
    bring(write(tmp_path, OTHER), home)
    before = kept(home)
    file = make(tmp_path / "bad.klb")
    for read in (lambda: bring(file, home), lambda: verify_archive(file)):
        with pytest.raises(BundleError, match=said) as raised:
            read()
        assert raised.value.file == str(file)
        assert raised.value.remedy
    assert kept(home) == before


def test_a_bundle_that_is_a_wheel_is_installed(tmp_path):
    with pytest.raises(BundleError) as raised:
        verify_archive(pack(tmp_path / "kernels-1.0-py3-none-any.whl", {"kernels-1.0.dist-info/WHEEL": b""}))
    assert "pip install" in raised.value.remedy


def test_every_part_of_a_bundle_is_no_bundle(good, tmp_path):
    content = good.read_bytes()
    for part in range(16):
        file = raw(content[: len(content) * part // 16])(tmp_path / "part.klb")
        with pytest.raises(BundleError):
            bring(file, tmp_path / "store")
        assert kept(tmp_path / "store") == {}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(data):
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        file = write(root, BUILD)
        bring(file, root / "right")
        content = bytearray(file.read_bytes())
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        try:
            bring(file, root / "store")
        except BundleError:
            assert kept(root / "store") == {}
        else:
            assert imported(root / "store") == imported(root / "right")


@pytest.mark.parametrize("header", [CENTRAL, LOCAL], ids=["central", "local"])
@pytest.mark.parametrize("what", ["link", "sizes", "method", "flags"])
def test_what_a_header_says_beside_the_content_makes_nothing_else_of_it(tmp_path, header, what):
    values = {
        "link": {"attributes": (stat.S_IFLNK | 0o777) << 16} if header is CENTRAL else {"flags": 0x8},
        "sizes": {"size": 3, "compressed": 3},
        "method": {"method": 8},
        "flags": {"flags": 0x2},
    }[what]
    bring(pack(tmp_path / "right.klb", members()), tmp_path / "right")
    file = edited(header, FIRST, **values)(tmp_path / "said.klb")
    try:
        bring(file, tmp_path / "store")
    except BundleError:
        assert kept(tmp_path / "store") == {}
    else:
        assert imported(tmp_path / "store") == imported(tmp_path / "right")
        assert all(path.is_file() and not path.is_symlink() for path in (tmp_path / "store").glob("builds/*/*.*"))


LIMITED = """
import resource, sys
from pathlib import Path
from kernel_loader.carry.archive import verify_archive
from kernel_loader.errors import BundleError
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 256 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (size, size))
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
try:
    verify_archive(Path(sys.argv[1]))
except BundleError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS counts on Linux")
@pytest.mark.parametrize("what", ["a bomb", "a bomb for bundle.json", "many members", "a large bundle.json"])
def test_what_a_bad_bundle_costs_is_bounded(what, tmp_path):
    make, said = BAD[what]
    command = [sys.executable, "-c", LIMITED, str(make(tmp_path / "bad.klb"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


# --- importing ----------------------------------------------------------------------------------------------------


def stamps(home: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in [home, *home.rglob("*")]}


def newer(tmp_path: Path, *builds, name: str = "newer.klb", **more) -> Path:
    """A bundle of the same version, at another commit."""
    (repository,) = document(*builds)["repositories"]
    return write(tmp_path, *builds, name=name, repositories=[repository | {"commit": "d" * 40} | more])


def test_what_is_imported_is_found_and_remembered(good, tmp_path):
    (one,) = bring(good, tmp_path / "store")
    assert one == ("org/kernel", "v1", "torch-universal", digest(), True)
    store = Store(tmp_path / "store")
    directory = store.find(digest(), trust_receipt=False)
    assert {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()} == BUILD
    assert store.all()[0].sources == (Source(one.repo, one.revision, COMMIT, one.variant),)
    entry = Index(store).get(V1)
    assert (entry.commit, entry.names, entry.builds) == (COMMIT, ("torch-universal",), {one.variant: digest()})
    assert time.time() - 60 < entry.checked <= time.time()
    assert Index(store).publisher("org")[0] is True
    assert not list((tmp_path / "store" / "staging").iterdir())


def test_importing_twice_writes_nothing(good, tmp_path):
    bring(good, tmp_path / "store")
    before = stamps(tmp_path / "store")
    assert [one.new for one in bring(good, tmp_path / "store")] == [False]
    assert stamps(tmp_path / "store") == before


def test_importing_twice_works_where_nothing_can_be_written(open_path, unprivileged):
    file, home = write(open_path, BUILD), open_path / "store"
    bring(file, home)
    for path in [home, *home.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    with unprivileged():
        assert [one.new for one in bring(file, home)] == [False]


def test_the_bundle_that_is_imported_last_counts(good, tmp_path):
    home = tmp_path / "store"
    bring(good, home)
    bring(newer(tmp_path, OTHER), home)
    entry = Index(Store(home)).get(V1)
    assert (entry.commit, entry.builds) == ("d" * 40, {"torch-universal": digest(OTHER)})
    assert Store(home).find(digest()) is not None  # who is locked to it has it


def test_two_bundles_of_one_commit_add_up(tmp_path):
    home = tmp_path / "store"
    (whole,) = document(BUILD, OTHER)["repositories"]
    for number, variant in enumerate(whole["builds"]):
        build = (BUILD, OTHER)[number]
        half = whole | {"builds": {variant: digest(build)}, "metadata": {variant: whole["metadata"][variant]}}
        bring(write(tmp_path, build, repositories=[half]), home)
    entry = Index(Store(home)).get(V1)
    assert (entry.builds, entry.metadata) == (whole["builds"], whole["metadata"])


def test_a_build_of_two_repositories_is_carried_once_and_known_of_both(tmp_path):
    (one,) = document()["repositories"]
    file = write(tmp_path, BUILD, repositories=[one, one | {"repo": "org/twin", "revision": "main"}])
    with zipfile.ZipFile(file) as archive:
        assert len(archive.namelist()) == 1 + len(BUILD)
    assert [(found.repo, found.new) for found in bring(file, tmp_path / "store")] == [
        ("org/kernel", True), ("org/twin", True),
    ]  # fmt: skip
    index = Index(Store(tmp_path / "store"))
    assert index.get(V1).builds == index.get(Request("org/twin", revision="main")).builds


@pytest.mark.parametrize("damage", ["changed", "missing", "added"])
def test_a_damaged_copy_is_replaced(good, tmp_path, damage):
    home = tmp_path / "store"
    bring(good, home)
    directory = Store(home).find(digest())
    if damage == "changed":
        (directory / "__init__.py").write_bytes(b"value = 666\n")
    elif damage == "missing":
        (directory / "__init__.py").unlink()
    else:
        (directory / "more.py").write_bytes(b"")
    assert [one.new for one in bring(good, home)] == [True]
    assert Store(home).find(digest(), trust_receipt=False) is not None


def test_a_build_of_a_shared_store_is_not_copied(good, tmp_path):
    bring(good, tmp_path / "shared")
    before = stamps(tmp_path / "shared")
    assert [one.new for one in bring(good, tmp_path / "own", shared=(tmp_path / "shared",))] == [False]
    assert kept(tmp_path / "own") == {}
    assert stamps(tmp_path / "shared") == before


def test_a_bundle_makes_no_yes_of_a_no(good, tmp_path):
    Index(Store(tmp_path / "store")).put_publisher("org", trusted=False, asked=1.0)
    bring(good, tmp_path / "store")
    assert Index(Store(tmp_path / "store")).publisher("org") == (False, 1.0)


# --- under a lock -------------------------------------------------------------------------------------------------


def lock(build=BUILD, repo: str = "org/kernel", variant: str = "torch-universal") -> Lock:
    locked = LockedBuild.of(variant, listed(build), Metadata.parse(build["metadata.json"]))
    return Lock(repositories=(LockedRepository(Request(repo, version=1), "e" * 40, {variant: locked}),))


NOT_LOCKED = {
    "other bytes": (lock(OTHER), LockMismatch, "torch-universal: the build at hand"),
    "another variant": (lock(variant="torch-cpu"), LockMismatch, "torch-universal: the build at hand"),
    "another repository": (lock(repo="org/other"), LockMissing, "it does not name org/kernel"),
    "nothing": (Lock(), LockMissing, "it does not name org/kernel"),
    "another commit": (Lock(repositories=(LockedRepository(V1, "e" * 40),)), LockMismatch, "the build at hand"),
}


@pytest.mark.parametrize("what", NOT_LOCKED)
def test_a_bundle_that_is_not_as_the_lock_has_it_is_refused(what, good, tmp_path):
    held, error, said = NOT_LOCKED[what]
    with pytest.raises(error, match=said):
        bring(good, tmp_path / "store", held)
    assert kept(tmp_path / "store") == {}


def test_a_repository_without_builds_is_held_to_the_lock_too(tmp_path):
    (one,) = document()["repositories"]
    empty = one | {"repo": "evil/kernel", "builds": {}, "metadata": {}}
    file = write(tmp_path, BUILD, repositories=[one, empty])
    with pytest.raises(LockMissing, match="it does not name evil/kernel"):
        bring(file, tmp_path / "store", lock())
    assert kept(tmp_path / "store") == {}


@pytest.mark.parametrize("held", [lock(), Lock(repositories=(LockedRepository(V1, COMMIT),))])
def test_a_bundle_that_is_as_the_lock_has_it_is_imported(held, good, tmp_path):
    assert [one.new for one in bring(good, tmp_path / "store", held)] == [True]


# --- a store that takes nothing, and processes that die ------------------------------------------------------------


def test_a_store_that_cannot_be_written_is_told(open_path, unprivileged):
    file, home = write(open_path, BUILD), open_path / "store"
    home.mkdir(mode=0o555)
    with unprivileged(), pytest.raises(StoreError, match="cannot be written"):
        bring(file, home)
    assert kept(home) == {}


@pytest.mark.skipif(sys.platform == "win32", reason="has no RLIMIT_FSIZE")
def test_of_a_bundle_that_has_no_room_nothing_is_left(tmp_path):
    large = {"__init__.py": b"", "part.bin": bytes(200_000)}
    file, home = write(tmp_path, BUILD, large), tmp_path / "store"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError):
            bring(file, home)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert kept(home) == {}
    assert [one.new for one in bring(file, home)] == [True, True]


IMPORT = """
import sys
from pathlib import Path
from kernel_loader.carry.archive import import_archive
from kernel_loader.index import Index
from kernel_loader.store import Store
store = Store(Path(sys.argv[2]))
print("ready", flush=True)
import_archive(Path(sys.argv[1]), store, Index(store))
print("done", flush=True)
"""
INSTANTS = 24


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_killed_at_any_instant_an_import_leaves_whole_builds_and_the_next_one_succeeds(tmp_path):
    builds = [{f"part{i}.py": b"%d, %d" % (number, i) for i in range(15)} for number in range(8)]
    (one,) = document(builds[0])["repositories"]
    repositories = [
        one | {"repo": f"org/kernel{n}", "builds": {"torch-universal": digest(b)}} for n, b in enumerate(builds)
    ]
    file = write_many(tmp_path, builds, repositories)

    def start(home: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", IMPORT, str(file), str(home)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "ready\n"
        return process

    began = time.monotonic()
    process = start(tmp_path / "whole")
    ready = time.monotonic()
    assert process.communicate(timeout=60)[0] == "done\n"
    whole, dice, seen = time.monotonic() - ready, random.Random(0), Counter()
    assert ready > began
    for instant in range(INSTANTS):
        home = tmp_path / f"store{instant}"
        process = start(home)
        time.sleep(whole * dice.uniform(0, 1))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        there = sorted(path.name for path in home.glob("builds/*"))
        seen["none" if not there else "all" if len(there) == len(builds) else "some"] += 1
        for name in there:
            assert Store(home).find(next(digest(b) for b in builds if digest(b).startswith(name)), trust_receipt=False)
        bring(file, home)
        assert imported(home) == imported(tmp_path / "whole")
        with Store(home).staging() as mine:  # the next that writes a build sweeps what was left
            assert list((home / "staging").iterdir()) == [mine]
        shutil.rmtree(home)
    assert len(seen) > 1, seen  # instants before and after publication were met


@pytest.mark.skipif(sys.platform == "win32", reason="an open directory cannot be renamed over")
def test_many_processes_that_import_at_once_have_it_all(tmp_path):
    file = write(tmp_path, BUILD, OTHER)
    command = [sys.executable, "-c", IMPORT, str(file), str(tmp_path / "store")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["ready\ndone\n"] * 6
    bring(file, tmp_path / "right")
    assert imported(tmp_path / "store") == imported(tmp_path / "right")
    assert not list((tmp_path / "store" / "staging").iterdir())


def write_many(home: Path, builds, repositories) -> Path:
    found = {"schema": 1, "repositories": repositories, "publishers": ["org"], "builds": {}}
    for build in builds:
        found["builds"][digest(build)] = {f.path: {"size": f.size, "sha256": f.sha256} for f in listed(build)}
    content = {"bundle.json": json.dumps(found).encode()}
    return pack(home / "many.klb", content | {member(p, b): text for b in builds for p, text in b.items()})


# --- writing ------------------------------------------------------------------------------------------------------


def test_the_format_is_as_documented(good):
    with zipfile.ZipFile(good) as archive:
        infos = archive.infolist()
        assert [info.filename for info in infos] == ["bundle.json", *(member(path) for path in sorted(BUILD))]
        assert {(i.compress_type, i.date_time, i.flag_bits, i.extra) for i in infos} == {
            (0, (1980, 1, 1, 0, 0, 0), 0, b"")
        }
        assert {i.external_attr >> 16 for i in infos} == {0o100644}
        assert json.loads(archive.read("bundle.json")) == document()
        assert {i.filename: archive.read(i) for i in infos[1:]} == {member(p): text for p, text in BUILD.items()}
    assert stat.S_IMODE(good.stat().st_mode) == 0o644


def test_a_bundle_has_these_bytes_on_every_system_and_python(good):
    """Sites compare hashes of bundles: say so in the change log where this has to change."""
    told = "3577cce488cc8669d7d49f3f82d42e09b7ad67076e1594d91975a84f6ca7791d"
    assert hashlib.sha256(good.read_bytes()).hexdigest() == told


def test_a_name_that_is_no_ascii_goes_there_and_back(tmp_path):
    build = {"__init__.py": b"", "größe ∞, 'a' \"b\".txt": b"x", "-x": b""}
    bring(write(tmp_path, build), tmp_path / "store")
    assert {path.name for path in Store(tmp_path / "store").find(digest(build)).iterdir()} == set(build)


def test_a_file_that_cannot_be_written_is_told_and_the_old_one_stays(open_path, unprivileged):
    old = write(open_path, BUILD)
    before = old.read_bytes()
    open_path.chmod(0o555)
    bundle, sources = Bundle.parse(json.dumps(document())), {digest(): open_path / "sources" / digest()}
    with unprivileged():
        for file in (old, open_path / "new.klb", open_path / "nowhere" / "new.klb"):
            with pytest.raises(BundleError, match="it cannot be written") as raised:
                write_archive(file, bundle, sources)
            assert "Free space, or name a file in a directory of yours" in raised.value.remedy
    open_path.chmod(0o755)
    assert old.read_bytes() == before
    assert sorted(path.name for path in open_path.iterdir()) == ["good.klb", "sources"]


@pytest.mark.parametrize("change", [b"value = 2\n" * 3, b"", b"x" * len(BUILD["__init__.py"]), None])
def test_a_build_that_changes_while_it_is_written_is_refused_and_the_old_file_stays(good, tmp_path, change):
    before = good.read_bytes()
    source = tmp_path / "sources" / digest()
    (source / "__init__.py").unlink() if change is None else (source / "__init__.py").write_bytes(change)
    with pytest.raises(IntegrityError, match=r"__init__\.py") as raised:
        write_archive(good, Bundle.parse(json.dumps(document())), {digest(): source})
    assert "Nothing was written" in raised.value.remedy
    assert good.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


WRITE = """
import sys
from pathlib import Path
from kernel_loader.carry.archive import write_archive
from kernel_loader.carry.contents import Bundle
write_archive(Path(sys.argv[1]), Bundle.parse(Path(sys.argv[2]).read_bytes()), {sys.argv[3]: Path(sys.argv[4])})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_killed_while_it_writes_an_export_leaves_the_old_file(good, tmp_path):
    before = good.read_bytes()
    large = {"part.bin": bytes(128 * 2**20)}
    (source := tmp_path / "large").mkdir()
    (source / "part.bin").write_bytes(large["part.bin"])
    (tmp_path / "bundle.json").write_text(json.dumps(document(large)))
    arguments = map(str, (good, tmp_path / "bundle.json", digest(large), source))
    process = subprocess.Popen([sys.executable, "-c", WRITE, *arguments])
    while not (halves := [path for path in tmp_path.glob(".*.tmp") if path.stat().st_size > 2**20]):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    assert halves[0].exists()  # it was in the midst of it
    assert good.read_bytes() == before
