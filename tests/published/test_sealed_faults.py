"""Faults that reviews found in what is locked and carried, so that they stay found."""

import json

import pytest

import kernel_loader
from kernel_loader import LockedLayerRepository, api
from kernel_loader.errors import IntegrityError, LockMismatch, NotCached, TrustError
from kernel_loader.loader import KernelLoader
from tests.builds import CPU_HOST
from tests.published.conftest import REPO, files


@pytest.fixture
def bundle(site):
    """What a laptop exports."""
    file = site.root / "kernels.klb"
    site.loader(cache=site.root / "laptop").export("kernel", file)
    site.hub.requests.clear()
    return file


def under(site, lock, **settings):
    return KernelLoader(site.loader(**settings).settings, CPU_HOST, lock=lock)


def layers(value):
    """A build with a layer."""
    source = f"class layers:\n    import torch.nn as nn\n    class Layer(nn.Module):\n        value = {value}\n"
    return files() | {"build/torch-universal/__init__.py": source.encode()}


def test_a_locked_layer_takes_no_other_bytes_and_asks_nothing_but_files(site, monkeypatch):
    pytest.importorskip("torch")
    site.publish(layers(1))
    lock = site.loader().make_lock([f"{REPO}@1"], trust_remote_code=True)
    file = site.root / "kernel-loader.lock"
    file.write_text(lock.to_toml())
    site.publish(layers(2))
    site.hub.requests.clear()
    for name, value in site.environ().items():
        if name.startswith(("KERNEL_LOADER_", "HF_")):
            monkeypatch.setenv(name, value)
    api.reset()
    repository = LockedLayerRepository(REPO, lockfile=file, layer_name="Layer")
    assert repository.load().cls.value == 1
    assert {route for _, route in site.hub.counts()} == {"resolve"}
    site.hub.requests.clear()
    assert repository.load().cls.value == 1
    assert len(site.hub.requests) == 0


def test_two_locked_versions_do_not_stand_for_each_other(site):
    site.hub.publisher("org", trusted=True)
    site.kernel.commit(files(value=2), branch="v2")
    lock = site.loader().make_lock([f"{REPO}@1", f"{REPO}@2"])
    second = site.root / "second"
    for path, content in files(value=2).items():
        (second / path).parent.mkdir(parents=True, exist_ok=True)
        (second / path).write_bytes(content)
    with pytest.raises(LockMismatch):
        under(site, lock, local={REPO: second}).load_module(REPO, version=1)
    assert under(site, lock, local={REPO: second}).load_module(REPO, version=2).value == 2


def test_an_imported_publisher_is_asked_about_where_the_hub_can_be_asked(site):
    site.hub.publisher("org", trusted=True)
    file = site.root / "kernels.klb"
    site.loader(cache=site.root / "laptop").export(f"{REPO}@1", file)
    site.hub.publisher("org", trusted=False)
    site.hub.kernel("org/other").commit(files(value=5), branch="v1")
    site.loader().import_bundle(file)
    assert site.loader(offline=True).load_module(REPO, version=1).value == 1
    with pytest.raises(TrustError):
        site.loader().load_module("org/other", version=1)


def test_a_name_that_is_no_build_is_not_carried(site, bundle):
    site.publish(files() | files(variant="torch29-experimental"))
    carried = site.loader(cache=site.root / "again").export("kernel", bundle, all_variants=True)
    assert list(carried.repositories[0].builds) == ["torch-universal"]
    assert site.loader(offline=True).import_bundle(bundle)
    assert len(site.loader(cache=site.root / "all").prefetch("kernel", all_variants=True)) == 1


def test_what_lies_in_pycache_is_no_file_of_a_build(site):
    site.publish(files() | {"build/torch-universal/__pycache__/x.nbi": b"numba"})
    lock = site.loader().make_lock(["kernel"])
    assert under(site, lock).load("kernel").value == 1
    assert site.loader(cache=site.root / "plain").load("kernel").value == 1


def test_commits_alone_find_what_is_in_the_store(site):
    origin = kernel_loader.origin(site.loader().load("kernel"))
    file = site.root / "kernels.lock"
    entry = {"dependency": {"repo-id": REPO, "version": 1}, "lock": {"commit": origin.commit}}
    file.write_text(json.dumps([entry]))
    site.hub.requests.clear()
    assert site.loader(lock=file, offline=True).load("kernel").value == 1
    assert site.loader(lock=file).load("kernel").value == 1
    assert site.gets() == 0


def test_prefetching_brings_a_damaged_build_anew(site):
    site.loader().prefetch("kernel")
    (site.build() / "part0.py").write_text("part = 666\n")
    (ready,) = site.loader().prefetch("kernel")
    assert ((ready.path / "part0.py").read_text(), ready.here) == ("part = 0\n", False)
    (site.build() / "part0.py").write_text("part = 666\n")
    with pytest.raises(IntegrityError):
        site.loader(offline=True).prefetch("kernel")


def test_both_repositories_of_one_build_are_remembered(site):
    site.hub.kernel("org/twin").commit(files(), branch="v1")
    site.hub.publisher("org", trusted=True)
    file = site.root / "kernels.klb"
    site.loader(cache=site.root / "laptop").export(["kernel", "org/twin@1"], file)
    site.loader(offline=True).import_bundle(file)
    for answer in (site.store / "index").iterdir():
        answer.unlink()  # what the index loses, the receipts tell
    assert site.loader(offline=True).load("kernel").value == 1
    assert site.loader(offline=True).load_module("org/twin", version=1).value == 1


def test_a_store_that_cannot_be_read_is_no_matter_of_trust(site, bundle):
    """Where nobody can be asked, and nothing is here, that nothing is here says more."""
    with pytest.raises(NotCached):
        site.loader(offline=True).load_module(REPO, version=1)


def test_a_lock_that_cannot_be_had_is_not_waited_for(site, caplog, monkeypatch):
    from filelock import FileLock

    def refuse(*_, **__):
        raise PermissionError("it is another's")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    assert site.loader().load("kernel").value == 1
    assert "fetched without a lock" in caplog.text
    assert "waited" not in caplog.text


def test_what_is_taken_from_the_package_is_told_when_nothing_is_carried(site, caplog):
    site.loader().export("moe_experts", site.root / "nothing.klb")
    assert "moe_experts: no build is carried" in caplog.text


def test_an_upgrade_moves_a_shared_dependency_whatever_the_order(site):
    entries = [{"repo-id": "org/shared", "version": 1}]
    about = json.dumps({"name": "kernel", "version": 1, "kernel-depends": entries}).encode()
    needs = files(4) | {"build/torch-universal/metadata.json": about}
    site.hub.publisher("org", trusted=True)
    for repo in ("org/a", "org/z"):
        site.hub.kernel(repo).commit(needs, branch="v1")
    site.hub.kernel("org/shared").commit(files(4), branch="v1")
    names = ["org/a@1", "org/z@1"]
    old = site.loader().make_lock(names)
    site.hub.kernel("org/shared").commit(files(4, value=2), branch="v1")
    for upgraded in names:
        new = site.loader().make_lock(names, known=old, upgrade=[upgraded])
        assert new.commit("org/shared") != old.commit("org/shared")
        assert new.commit("org/a") == old.commit("org/a")


def test_what_is_known_may_be_given_as_a_path(site):
    file = site.root / "kernel-loader.lock"
    lock = site.loader().make_lock(["kernel"])
    file.write_text(lock.to_toml())
    assert site.loader(offline=True).make_lock(["kernel"], known=file) == lock


def test_a_locked_loader_asks_for_no_other_versions(site):
    site.publish(files(variant="torch-cuda"))
    lock = site.loader().make_lock(["kernel"])
    site.hub.requests.clear()
    with pytest.raises(FileNotFoundError):
        under(site, lock).load("kernel")
    assert len(site.hub.requests) == 0


def test_a_large_file_that_differs_from_the_digests_leaves_its_build_out(site, caplog):
    from tests.published.test_locked import digested

    library = "build/torch-cuda/kernel.so"
    build = digested(files(4, variant="torch-cuda") | {library: b"\x7fELF" + bytes(9)}, "torch-cuda")
    site.publish(build | {library: b"\x7fELF" + bytes(10)} | files(4))
    assert list(site.loader().make_lock(["kernel"]).repositories[0].builds) == ["torch-universal"]
    assert "kernel.so has other content than its digests say" in caplog.text


def test_the_doctor_tells_of_a_locked_build_that_is_not_here(site):
    from tests.published.test_processes import command

    file = site.root / "kernel-loader.lock"
    file.write_text(site.loader().make_lock([f"{REPO}@1"], trust_remote_code=True).to_toml())
    sealed = {"KERNEL_LOADER_LOCK": str(file), "KERNEL_LOADER_OFFLINE": "1"}
    status, out, _ = command(site, "doctor", **sealed)
    assert (status, f"The lock names {REPO}@1, its build is not here" in " ".join(out.split())) == (1, True)
    under(site, file).prefetch(f"{REPO}@1")
    status, out, _ = command(site, "doctor", **sealed)
    assert (status, "its build is not here" in " ".join(out.split())) == (0, False)
