"""Locked programs: nobody is asked what to load, no other bytes are taken, and what a lock is made of."""

import base64
import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

import kernel_loader
from kernel_loader.errors import (
    IntegrityError,
    KernelLoaderError,
    LockMismatch,
    LockMissing,
    LockStale,
    NoCompatibleBuild,
    NotCached,
    RequestError,
    SourceError,
    TrustError,
    UnknownKernel,
    UnknownVersion,
)
from kernel_loader.loader import KernelLoader
from kernel_loader.lock import Lock
from kernel_loader.settings import Settings
from kernel_loader.testing import Fault
from tests.builds import CPU_HOST, H200, write_build
from tests.hosts import HOSTS
from tests.published.conftest import REPO, files
from tests.published.test_prefetch import depends

LOAD = """
import kernel_loader
bundle = kernel_loader.load_kernel("kernel")
print(bundle.value, kernel_loader.origin(bundle).commit)
"""


@pytest.fixture
def locked(site):
    """The lock of the kernel as it is now, in a file."""
    file = site.root / "kernel-loader.lock"
    file.write_text(site.loader().make_lock(["kernel"]).to_toml())
    site.hub.requests.clear()
    return file


def under(site, lock, host=CPU_HOST, **settings):
    """A loader under a lock."""
    return KernelLoader(site.loader(host, **settings).settings, host, lock=lock)


def digested(build, variant="torch-universal", algorithm="sha256", **more):
    """A build with digests of its own."""
    prefix = f"build/{variant}/"
    hashes = {
        path.removeprefix(prefix): base64.b64encode(hashlib.new(algorithm, content).digest()).decode()
        for path, content in build.items()
        if not path.endswith("metadata.json")
    }
    about = {"name": "kernel", "version": 1, "digest": {"algorithm": algorithm, "files": hashes}} | more
    return build | {f"{prefix}metadata.json": json.dumps(about).encode()}


# --- a locked load ------------------------------------------------------------------------------------------------


def test_the_branch_moves_and_the_locked_program_does_not(site, locked):
    before = site.run(LOAD, KERNEL_LOADER_LOCK=str(locked))
    moved = site.publish(files(value=7))
    environ = {"KERNEL_LOADER_LOCK": str(locked), "KERNEL_LOADER_REFRESH_AFTER": "0"}
    assert site.run(LOAD, **environ) == before
    assert site.run(LOAD, **environ, KERNEL_LOADER_CACHE=str(site.root / "fresh")) == before
    assert site.run(LOAD) == f"7 {moved}\n"
    assert site.run(LOAD, **environ) == before
    site.loader().make_lock(["kernel"])
    locked.write_text(site.loader().make_lock(["kernel"], known=Lock.read(str(locked)), upgrade=None).to_toml())
    assert site.run(LOAD, **environ) == f"7 {moved}\n"


def test_a_cold_locked_load_costs_one_get_a_file_and_a_warm_one_nothing(site, locked):
    assert under(site, locked).load("kernel").value == 1
    assert site.hub.counts() == {("GET", "resolve"): 10}
    site.hub.requests.clear()
    assert under(site, locked, refresh_after=0).load("kernel").value == 1
    assert len(site.hub.requests) == 0


def test_what_is_in_the_store_is_taken_from_there(site, locked):
    site.loader().load("kernel")
    site.hub.requests.clear()
    assert under(site, locked).load("kernel").value == 1
    assert len(site.hub.requests) == 0


def test_a_locked_load_disturbs_no_other(site, locked):
    moved = site.publish(files(value=7))
    assert site.loader().load("kernel").value == 7
    site.hub.requests.clear()
    under(site, locked).load("kernel")
    loader = site.loader()
    assert kernel_loader.origin(loader.load("kernel")).commit == moved
    assert site.hub.counts() == {("GET", "resolve"): 10}  # of the locked load alone


@pytest.mark.parametrize("given", [str, Lock.read, lambda file: file])
def test_a_lock_is_given_as_a_value_or_a_path(site, locked, given):
    value = given(locked) if given is not Lock.read else Lock.read(str(locked))
    assert under(site, value).load("kernel").value == 1


@pytest.mark.parametrize("given", [1, b"x", object()])
def test_anything_else_is_refused(site, given):
    with pytest.raises(RequestError, match="Pass a Lock"):
        under(site, given)


def test_a_lock_file_that_is_not_there_is_told_when_the_loader_is_made(site):
    with pytest.raises(LockMissing, match="there is no such file"):
        site.loader(lock=site.root / "nothing.lock")


# --- other bytes --------------------------------------------------------------------------------------------------


OTHER_BYTES = {
    "another first byte": Fault(corrupt_at=0, path=r"part0\.py"),
    "another last byte": Fault(corrupt_at=-1, path=r"part0\.py"),
    "a byte less": Fault(body=b"part = 0", path=r"part0\.py"),
    "a byte more": Fault(body=b"part = 0\n\n", path=r"part0\.py"),
    "nothing": Fault(body=b"", path=r"part0\.py"),
    "the commit rewritten": Fault(edit=lambda _, answer: replace(answer, body=answer.whole().swapcase())),
    "other metadata": Fault(body=b'{"name": "kernel", "version": 2, "python-depends": []}', path="metadata"),
}


@pytest.mark.parametrize("what", OTHER_BYTES)
def test_other_bytes_from_the_hub_are_refused_and_nothing_stays(site, locked, what):
    fault = site.hub.fault(replace(OTHER_BYTES[what], route="resolve"))
    with pytest.raises(LockMismatch, match=r"part\d\.py|__init__|metadata"):
        under(site, locked).load("kernel")
    assert not any((site.store / "builds").glob("*"))
    assert not any((site.store / "staging").iterdir())
    fault.remove()
    assert under(site, locked).load("kernel").value == 1


@pytest.mark.parametrize("code", ["EntryNotFound", "RevisionNotFound"])
def test_a_commit_that_the_hub_no_longer_has_is_told(site, locked, code):
    site.hub.fault(Fault(route="resolve", status=404, error_code=code))
    with pytest.raises(SourceError, match="the Hub no longer has its commit .* --upgrade"):
        under(site, locked).load("kernel")


@pytest.fixture
def cached(site, locked):
    """The build in the cache of the client, which has its files without links, as on Windows."""
    root = snapshot_download(REPO, repo_type="kernel", revision="v1", cache_dir=site.root / "hf" / "hub")
    build = Path(root) / "build" / "torch-universal"
    for file in build.iterdir():
        content = file.read_bytes()
        file.unlink()
        file.write_bytes(content)
    site.hub.requests.clear()
    return build


def test_what_the_hugging_face_cache_has_is_taken_where_it_is_what_is_locked(site, locked, cached):
    assert under(site, locked, offline=True).load("kernel").value == 1
    assert under(site, locked, cache=site.root / "other").load("kernel").value == 1
    assert len(site.hub.requests) == 0


def test_other_bytes_in_the_hugging_face_cache_are_refused_or_fetched(site, locked, cached):
    (cached / "part0.py").write_text("part = 6\n")
    with pytest.raises(NotCached):
        under(site, locked, offline=True).load("kernel")
    assert not any((site.store / "builds").glob("*"))
    assert not any((site.store / "receipts").glob("*"))
    assert under(site, locked).load("kernel").value == 1
    assert (site.build() / "part0.py").read_text() == "part = 0\n"


def test_offline_what_is_not_here_is_told(site, locked):
    with pytest.raises(NotCached):
        under(site, locked, offline=True).load("kernel")
    assert len(site.hub.requests) == 0


def test_a_damaged_build_is_fetched_again_or_refused(site, locked):
    under(site, locked).load("kernel")
    (site.build() / "part0.py").write_text("part = 666\n")
    with pytest.raises(IntegrityError):
        under(site, locked, offline=True).load("kernel")
    site.hub.requests.clear()
    assert under(site, locked).load("kernel").value == 1
    assert (site.build() / "part0.py").read_text() == "part = 0\n"


def test_a_directory_of_ones_own_is_refused_unless_it_has_the_locked_bytes(site, locked):
    repository = site.root / "own"
    write_build(repository, "torch-universal", {"__init__.py": "value = 99\ndef double(x): return x\n"})
    with pytest.raises(LockMismatch, match="KERNEL_LOADER_LOCK"):
        under(site, locked, local={REPO: repository}).load("kernel")
    same = site.root / "same"
    for path, content in files().items():
        (same / path).parent.mkdir(parents=True, exist_ok=True)
        (same / path).write_bytes(content)
    assert under(site, locked, local={REPO: same}).load("kernel").value == 1


def test_what_is_refused_is_served_by_the_reference_only_where_that_is_agreed(site, locked):
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(f'reference = "kernel"\n{manifest.read_text()}')
    write_build(site.manifests / "registry" / "kernel", "torch-universal", {"__init__.py": "value, double = 0, None\n"})
    site.hub.fault(Fault(route="resolve", path="part0", corrupt_at=0))
    with pytest.raises(LockMismatch):
        under(site, locked).load("kernel")
    bundle = under(site, locked).load("kernel", fallback="reference")
    assert (bundle.value, kernel_loader.origin(bundle).reference) == (0, True)


# --- what is not locked -------------------------------------------------------------------------------------------


def test_what_the_lock_does_not_name_is_not_loaded(site, locked):
    site.hub.kernel("org/other").commit(files(), branch="v1")
    loader = under(site, locked)
    with pytest.raises(LockMissing, match="does not name org/other@v1"):
        loader.load_module("org/other", version=1, trust_remote_code=True)
    with pytest.raises(LockStale, match="v1, and v2 is asked for"):
        loader.load("kernel", version=2)
    assert not loader.can_load("kernel", version=2)
    assert len(site.hub.requests) == 0


def test_where_no_locked_build_fits_no_other_version_is_looked_for(site):
    site.publish(files(variant="torch-cuda"))
    site.publish(files(), branch="v2")
    lock = site.loader().make_lock(["kernel"])
    site.hub.requests.clear()
    with pytest.raises(NoCompatibleBuild):
        under(site, lock).load("kernel")
    assert len(site.hub.requests) == 0


def test_dependencies_load_as_they_are_locked(site):
    site.publish(depends(("org/second", 2)))
    second = site.hub.kernel("org/second")
    second.commit(files(4, value=2), branch="v2")
    lock = site.loader().make_lock(["kernel"], trust_remote_code=["org/second"])
    second.commit(files(4, value=3), branch="v2")
    site.hub.requests.clear()
    loader = under(site, lock)
    assert loader.load("kernel").value == 1
    assert loader.load_module("org/second", version=2).value == 2  # of a stranger, and locked
    assert set(site.hub.counts()) == {("GET", "resolve")}
    (kernel,) = (one for one in lock.repositories if one.request.repo == REPO)
    with pytest.raises(LockMissing, match="does not name org/second@v2"):
        under(site, Lock(lock.kernels, (kernel,))).load("kernel")


def test_a_kernel_that_needs_no_repository_loads_all_the_same(site, locked):
    pytest.importorskip("torch")
    loader = under(site, locked)
    assert kernel_loader.origin(loader.load("moe_experts")).reference
    assert kernel_loader.origin(loader.load("activation")).reference  # not for this host, which nobody need ask
    assert len(site.hub.requests) == 0


def test_what_is_locked_is_trusted(site):
    site.hub.publisher("org", trusted=False)
    with pytest.raises(TrustError):
        site.loader().make_lock([f"{REPO}@1"])
    lock = site.loader().make_lock([f"{REPO}@1"], trust_remote_code=True)
    site.hub.requests.clear()
    assert under(site, lock).load_module(REPO, version=1).value == 1
    assert ("GET", "organization") not in site.hub.counts()
    with pytest.raises(TrustError):
        site.loader().load_module(REPO, version=1)


def test_a_lock_of_the_kernels_package_pins_the_commit(site):
    commit = site.loader().make_lock(["kernel"]).commit(REPO)
    text = json.dumps([{"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": commit}}])
    site.publish(files(value=7))
    file = site.root / "kernels.lock"
    file.write_text(text)
    loader = site.loader(lock=file)
    bundle = loader.load("kernel")
    assert (bundle.value, kernel_loader.origin(bundle).commit) == (1, commit)
    site.hub.requests.clear()
    assert site.loader(lock=file, refresh_after=0).load("kernel").value == 1
    assert len(site.hub.requests) == 0
    assert site.loader(lock=file).load_module(REPO, version=1).value == 1


def test_prefetching_under_a_lock_brings_what_is_locked(site, locked):
    site.publish(files(value=7))
    (ready,) = under(site, locked).prefetch("kernel", dry_run=True)
    assert (ready.size, len(site.hub.requests)) == (sum(map(len, files().values())), 0)
    (ready,) = under(site, locked).prefetch("kernel")
    assert "value = 1\n" in (ready.path / "__init__.py").read_text()
    assert under(site, locked, offline=True).load("kernel").value == 1


ALTERNATIVE = '[[alternatives]]\nrepo = "org/second"\nversion = 3\nbackends = ["cpu", "xpu"]\n'


@pytest.fixture
def selecting(site):
    """A lock of a kernel with an alternative, and builds for several machines."""
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(f"{manifest.read_text()}{ALTERNATIVE}")
    of_gpus = ("torch-cuda", "torch-rocm", "torch213-cxx11-cu130-x86_64-linux")
    site.publish({path: content for variant in of_gpus for path, content in files(4, variant=variant).items()})
    site.hub.kernel("org/second").commit(files(4, variant="torch-cpu") | files(4), branch="v3")
    lock = Lock.parse(site.loader().make_lock(["kernel"]).to_toml())
    site.hub.requests.clear()
    return lock


def test_the_lock_selects_as_a_loader_under_it_resolves(site, selecting):
    loader = under(site, selecting)
    taken = set()
    for host in HOSTS.values():
        selected, resolved = selecting.select(host)["kernel"], loader.resolve("kernel", host=host)
        assert (selected.verdicts, selected.chosen) == (resolved.verdicts, resolved.chosen)
        assert (selected.taken is None) == (resolved.taken is None)
        if selected.taken is not None and resolved.taken is not None:
            assert (selected.taken.repo, selected.taken.chosen) == (resolved.taken.repo, resolved.taken.chosen)
            taken.add(f"{selected.taken.repo} {selected.taken.chosen.name}")
    assert taken >= {f"{REPO}@v1 torch-cuda", f"{REPO}@v1 torch-rocm", "org/second@v3 torch-cpu"}
    assert len(site.hub.requests) == 0


# --- making one ---------------------------------------------------------------------------------------------------


def test_a_lock_made_again_is_the_same_to_the_byte(site):
    site.hub.kernel("org/other").commit(files(), branch="v1")
    site.hub.publisher("org", trusted=True)
    names = ["kernel", "org/other@1", "org/other@main", "moe_experts"]
    site.hub.kernel("org/other").commit(files(value=2), branch="main")
    first = site.loader().make_lock(names).to_toml()
    assert site.loader(cache=site.root / "other").make_lock(reversed([*names, "kernel"])).to_toml() == first
    assert "moe_experts" not in first  # it is of the package


def test_what_is_locked_costs_no_request_again(site):
    lock = site.loader().make_lock(["kernel"])
    site.hub.requests.clear()
    assert site.loader().make_lock(["kernel"], known=lock) == lock
    assert site.loader(offline=True).make_lock(["kernel"], known=lock) == lock
    assert len(site.hub.requests) == 0
    with pytest.raises(NotCached, match="not locked yet"):
        site.loader(offline=True).make_lock(["kernel"])


def test_large_files_and_those_with_digests_are_not_fetched(site):
    build = digested(files(5) | {"build/torch-universal/kernel.so": b"\x7fELF" + bytes(100_000)})
    site.publish(build)
    lock = site.loader().make_lock(["kernel"])
    assert [request.path.rpartition("/")[2] for request in site.hub.requests.of("resolve")] == ["metadata.json"]
    assert sum(request.bytes_sent for request in site.hub.requests) < 5_000
    (locked,) = lock.repositories[0].builds.values()
    assert {file.path: file.sha256 for file in locked.files} == {
        path.removeprefix("build/torch-universal/"): hashlib.sha256(content).hexdigest()
        for path, content in build.items()
    }
    assert under(site, lock).prefetch("kernel")[0].digest == locked.digest


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_digests_of_either_kind_are_locked(site, algorithm):
    site.publish(digested(files(5), algorithm=algorithm))
    lock = site.loader().make_lock(["kernel"])
    site.hub.requests.clear()
    assert under(site, lock).load("kernel").value == 1
    assert site.hub.counts() == {("GET", "resolve"): 5}
    wrong = digested(files(5), algorithm=algorithm)
    site.publish(wrong | {"build/torch-universal/part0.py": b"part = 666\n"})
    with pytest.raises(LockMismatch, match=r"part0\.py"):
        under(site, site.loader().make_lock(["kernel"]), cache=site.root / "other").load("kernel")


def test_files_that_builds_share_are_fetched_once(site):
    site.publish(files(6, variant="torch-cuda") | files(6, variant="torch-cpu") | files(6, variant="torch-rocm"))
    lock = site.loader().make_lock(["kernel"])
    assert len(lock.repositories[0].builds) == 3
    assert site.gets() == 6
    assert site.hub.counts()["GET", "tree"] == 1


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_build_that_differs_from_its_own_digests_is_left_out(site, algorithm, caplog):
    wrong = digested(files(5, variant="torch-cuda"), "torch-cuda", algorithm)
    wrong["build/torch-cuda/extra.py"] = b""
    site.publish(wrong | digested(files(5), algorithm=algorithm))
    with caplog.at_level(logging.WARNING, "kernel_loader"):
        lock = site.loader().make_lock(["kernel"])
    assert list(lock.repositories[0].builds) == ["torch-universal"]
    assert "torch-cuda is left out of the lock: extra.py is not in its digests" in caplog.text
    assert under(site, lock).load("kernel").value == 1


BROKEN = {
    "metadata that is no JSON": ({"metadata.json": b"{"}, "metadata.json cannot be read, not JSON"),
    "metadata of another form": ({"metadata.json": b'{"version": "1"}'}, "a whole number was expected"),
    "metadata that is no Unicode": ({"metadata.json": b'{"name": "\\ud800"}'}, "not Unicode"),
    "a file below a file": ({"A": b"", "a/b": b""}, "has other files below it"),
    "a name of quotes": ({"'''.py": b""}, "a lock cannot name the file"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_build_that_no_lock_can_hold_is_left_out(site, what, caplog):
    more, said = BROKEN[what]
    broken = files(4, variant="torch-cuda") | {f"build/torch-cuda/{path}": content for path, content in more.items()}
    site.publish(broken | files(4))
    with caplog.at_level(logging.WARNING, "kernel_loader"):
        lock = site.loader().make_lock(["kernel"])
    assert list(lock.repositories[0].builds) == ["torch-universal"]
    assert "torch-cuda is left out of the lock: " in caplog.text
    assert said in caplog.text
    assert Lock.parse(lock.to_toml()) == lock


def test_a_version_and_its_branch_are_one_repository(site):
    site.hub.publisher("org", trusted=True)
    names = ["kernel", f"{REPO}@1", f"{REPO}@v1", f"{REPO}@main"]
    site.publish(branch="main")
    lock = site.loader().make_lock(names)
    assert [str(one.request) for one in lock.repositories] == [f"{REPO}@main", f"{REPO}@v1"]
    assert [one.name for one in lock.kernels] == ["kernel", f"{REPO}@1", f"{REPO}@main", f"{REPO}@v1"]
    assert Lock.parse(lock.to_toml()) == lock
    assert site.loader().make_lock(reversed(names)).to_toml() == lock.to_toml()
    site.hub.requests.clear()
    assert site.loader().make_lock([f"{REPO}@v1"], known=lock).repositories == lock.repositories[1:]
    assert len(site.hub.requests) == 0


@pytest.mark.parametrize("older", [False, True])
def test_a_lock_of_the_kernels_package_becomes_one_at_the_same_commits(site, older):
    first = site.loader().make_lock(["kernel"])
    commit = first.commit(REPO)
    entry = {"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": commit}}
    known = Lock.parse(json.dumps([{"repo_id": REPO, "sha": commit} if older else entry]))
    site.publish(files(value=7))
    assert site.loader().make_lock(["kernel"], known=known) == first
    assert site.loader().make_lock(["kernel"], known=known, upgrade=None).commit(REPO) != commit


def test_a_build_without_metadata_is_locked(site):
    bare = {path: content for path, content in files(5).items() if not path.endswith("metadata.json")}
    site.publish(bare | {"build/README.md": b"no build", "build/strange/file": b"no build either"})
    lock = site.loader().make_lock(["kernel"])
    assert list(lock.repositories[0].builds) == ["torch-universal"]
    assert under(site, lock).load("kernel").value == 1


def test_bytecode_is_not_locked(site):
    build = "build/torch-universal"
    site.publish(files(4) | {f"{build}/__pycache__/notes.txt": b"", f"{build}/part0.pyc": b""})
    lock = site.loader().make_lock(["kernel"])
    paths = [file.path for file in lock.repositories[0].builds["torch-universal"].files]
    assert paths == ["__init__.py", "metadata.json", "part0.py", "part1.py"]
    assert under(site, lock).load("kernel").value == 1


def test_a_repository_without_builds_or_version_is_told(site):
    site.publish({"README.md": b""}, branch="v2")
    with pytest.raises(SourceError, match="it has no builds"):
        site.loader().make_lock([f"{REPO}@2"], trust_remote_code=True)
    with pytest.raises(UnknownVersion):
        site.loader().make_lock([f"{REPO}@9"], trust_remote_code=True)


def test_dependencies_are_locked_with_their_own(site):
    site.publish(depends(("org/second", 2)))
    site.hub.kernel("org/second").commit(depends(("org/third", 1)), branch="v2")
    site.hub.kernel("org/third").commit(depends((REPO, 1)), branch="v1")  # a circle ends
    site.hub.publisher("org", trusted=True)
    lock = site.loader().make_lock(["kernel"])
    assert [str(one.request) for one in lock.repositories] == [f"{REPO}@v1", "org/second@v2", "org/third@v1"]
    assert [one.name for one in lock.kernels] == ["kernel"]


def test_an_upgrade_of_one_kernel_moves_it_and_what_it_needs_alone(site):
    site.publish(depends(("org/shared", 1)))
    for name in ("org/shared", "org/other"):
        site.hub.kernel(name).commit(files(4), branch="v1")
    site.hub.publisher("org", trusted=True)
    names = ["kernel", "org/other@1"]
    old = site.loader().make_lock(names)
    for name in (REPO, "org/shared", "org/other"):
        content = depends(("org/shared", 1), value=2) if name == REPO else files(4, value=2)
        site.hub.kernel(name).commit(content, branch="v1")
    new = site.loader().make_lock(names, known=old, upgrade=["kernel"])
    moved = {str(now.request): now != was for now, was in zip(new.repositories, old.repositories, strict=True)}
    assert moved == {f"{REPO}@v1": True, "org/shared@v1": True, "org/other@v1": False}
    assert site.loader().make_lock(names, known=new, upgrade=None).repositories[1] != old.repositories[1]


def test_what_two_kernels_need_is_upgraded_with_either(site):
    for name in ("org/other", "org/shared"):
        site.hub.kernel(name).commit(depends(("org/shared", 1)) if name == "org/other" else files(4), branch="v1")
    site.publish(depends(("org/shared", 1)))
    site.hub.publisher("org", trusted=True)
    names = ["org/other@1", "kernel"]
    old = site.loader().make_lock(names)
    moved = site.hub.kernel("org/shared").commit(files(4, value=2), branch="v1")
    for upgrade in names:
        assert site.loader().make_lock(names, known=old, upgrade=upgrade).commit("org/shared") == moved


def test_a_dependency_of_a_stranger_is_not_locked_without_the_users_word(site):
    site.publish(depends(("org/second", 2)))
    site.hub.kernel("org/second").commit(files(4), branch="v2")
    with pytest.raises(TrustError, match="org/second@v2"):
        site.loader().make_lock(["kernel"])


def test_a_kernel_to_upgrade_is_named_as_elsewhere(site):
    old = site.loader().make_lock(["kernel"])
    site.publish(files(value=7))
    moved = [
        site.loader().make_lock(["kernel"], known=old, upgrade=given).commit(REPO) != old.commit(REPO)
        for given in ((), [], None, "kernel", ["kernel"], ["Kernel"])
    ]
    assert moved == [False, False, True, True, True, True]
    for wrong, raised in (("relu", RequestError), ("moe_experts", RequestError), ("kernal", UnknownKernel)):
        with pytest.raises(raised, match=wrong):
            site.loader().make_lock(["kernel"], known=old, upgrade=[wrong])


def test_alternatives_and_what_offers_a_capability_are_all_locked(site):
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(
        f'{manifest.read_text()}[[alternatives]]\nrepo = "org/second"\nversion = 3\nbackends = ["cuda"]\n'
    )
    site.hub.kernel("org/second").commit(files(4), branch="v3")
    (kernel,) = site.loader().make_lock(["kernel"]).kernels
    assert [(str(place.request), place.backends) for place in kernel.places] == [
        (f"{REPO}@v1", ()),
        ("org/second@v3", ("cuda",)),
    ]
    loader = KernelLoader(Settings(cache=site.store))
    offering = {m.name for m in loader._manifests("attention[varlen]")}
    assert {"flash_attn2", "flash_attn3"} < offering
    assert all("varlen" in loader.catalog.get(name).offers("attention") for name in offering)


def test_requires_of_a_manifest_are_locked(site):
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(manifest.read_text().replace("[entry", '[requires]\ncuda-capability = ">=10"\n[entry'))
    site.publish(files(variant="torch-cuda") | files(variant="torch-cpu"))
    selected = Lock.parse(site.loader().make_lock(["kernel"]).to_toml()).select(H200)["kernel"]
    assert selected.chosen is None
    assert "10" in selected.explain()


@pytest.mark.parametrize("wrong", [[1], [None], "kernel@"])
def test_what_names_no_kernel_is_refused(site, wrong):
    with pytest.raises(KernelLoaderError):
        site.loader().make_lock(wrong)
