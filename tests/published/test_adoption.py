"""Builds that the Hugging Face cache holds are used, and never trusted blindly."""

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from kernel_loader.errors import NotCached
from tests.published.conftest import REPO, files


def fill(tmp_path: Path, *left_out: str) -> Path:
    """Let the client fill its cache with the kernel; gives the directory of the build."""
    root = snapshot_download(
        REPO,
        repo_type="kernel",
        revision="v1",
        cache_dir=tmp_path / "hf" / "hub",
        allow_patterns=["build/*"],
        ignore_patterns=list(left_out),
    )
    return Path(root) / "build" / "torch-universal"


@pytest.fixture
def cached(site, tmp_path):
    """The build in the cache of the client."""
    build = fill(tmp_path)
    site.hub.requests.clear()
    return build


def damage(cached, content=b"value = 666\ndef double(x): return 666\n"):
    blob = (cached / "__init__.py").resolve()
    blob.chmod(0o644)
    blob.write_bytes(content)


def test_no_file_is_downloaded_that_the_cache_holds(site, cached):
    assert site.loader().load("kernel").double(21) == 42
    assert site.gets() == 0


def test_offline_a_kernel_in_the_cache_loads_though_it_was_never_loaded_before(site, cached):
    assert site.loader(offline=True).load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


def test_by_commit_too(site, cached):
    commit = cached.parent.parent.name
    assert site.loader(offline=True).load("kernel", revision=commit).double(21) == 42


def test_the_store_keeps_a_build_that_was_adopted(site, cached, tmp_path):
    site.loader(offline=True).load("kernel")
    shutil.rmtree(tmp_path / "hf")
    assert site.loader(offline=True).load("kernel").double(21) == 42


def test_the_cache_of_the_kernels_package_is_looked_into(site, cached, tmp_path, monkeypatch):
    (tmp_path / "hf" / "hub").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("KERNELS_CACHE", str(tmp_path / "elsewhere"))
    assert site.loader(offline=True).load("kernel").double(21) == 42


def test_a_blob_that_is_not_what_its_name_says_is_not_used(site, cached):
    damage(cached)
    with pytest.raises(NotCached):
        site.loader(offline=True).load("kernel")
    assert site.loader().load("kernel").double(21) == 42  # from the Hub


def test_a_build_that_is_not_whole_is_fetched(site, cached):
    (cached / "part3.py").unlink()
    assert site.loader().load("kernel").double(21) == 42
    assert (site.build() / "part3.py").is_file()


def test_a_build_that_its_digests_call_incomplete_is_not_used_offline(site, tmp_path):
    home, build = "build/torch-universal/", files(4)
    hashes = {
        path.removeprefix(home): base64.b64encode(hashlib.sha256(content).digest()).decode()
        for path, content in build.items()
        if not path.endswith("metadata.json")
    }
    metadata = {"name": "kernel", "version": 1, "digest": {"algorithm": "sha256", "files": hashes}}
    site.publish(build | {f"{home}metadata.json": json.dumps(metadata).encode()})
    fill(tmp_path, "*part1.py")
    with pytest.raises(NotCached):
        site.loader(offline=True).load("kernel")
    fill(tmp_path)
    assert site.loader(offline=True).load("kernel").double(21) == 42


def test_a_cache_without_links_is_used_when_the_hub_vouches_for_it(site, cached):
    for link in list(cached.iterdir()):
        content = link.resolve().read_bytes()
        link.unlink()
        link.write_bytes(content)
    assert site.loader().load("kernel").double(21) == 42
    assert site.gets() == 0


def test_changing_the_cache_later_changes_nothing_unseen(site, cached):
    site.loader(offline=True).load("kernel")
    damage(cached)
    # A hard link shares its content: the store sees that it changed, and refuses it.
    with pytest.raises(OSError, match=r"__init__\.py has other content"):
        site.loader(offline=True).load("kernel")


@pytest.mark.parametrize("revision", ["../../../etc", "..", "a/../../b"])
def test_a_revision_leads_to_nothing_outside_the_cache(site, cached, revision):
    with pytest.raises(NotCached):
        site.loader(offline=True).load_module(REPO, revision=revision, trust_remote_code=True)
