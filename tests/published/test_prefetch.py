"""Builds for other machines: brought from where there is neither a GPU nor torch, with all that they depend on."""

import json

import pytest

from kernel_loader.errors import CyclicDependency, NotCached, TrustError
from kernel_loader.testing import Fault
from tests.builds import CPU_HOST, H200
from tests.published.conftest import REPO, files

NO_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("no torch here")
sys.meta_path.insert(0, Blocked())
sys.argv = ["kernel-loader", *{arguments!r}]
from kernel_loader.cli import main
main()
"""


def depends(*needed, **more):
    """A build that depends on repositories."""
    build = files(4, **more)
    entries = [{"repo-id": repo, "version": version} for repo, version in needed]
    (name,) = (path for path in build if path.endswith("metadata.json"))
    build[name] = json.dumps({"name": "kernel", "version": 1, "kernel-depends": entries}).encode()
    return build


@pytest.fixture
def chain(site):
    """org/kernel needs org/second, which needs org/third."""
    site.publish(depends(("org/second", 2)))
    site.hub.kernel("org/second").commit(depends(("org/third", 1)), branch="v2")
    site.hub.kernel("org/third").commit(files(4), branch="v1")
    site.hub.publisher("org", trusted=True)


def test_what_a_kernel_depends_on_comes_with_it(site, chain):
    ready = site.loader().prefetch("kernel")
    assert [item.kernel for item in ready] == ["kernel", "org/second", "org/third"]
    site.hub.requests.clear()
    assert site.loader(offline=True).load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0


def test_kernels_that_depend_on_each_other_are_prefetched_once(site, chain):
    site.hub.kernel("org/third").commit(depends((REPO, 1)), branch="v1")
    names = [item.kernel for item in site.loader().prefetch("kernel")]
    assert names == ["kernel", "org/second", "org/third", REPO]
    with pytest.raises(CyclicDependency):  # is for loading to say
        site.loader(offline=True).load_module(REPO, version=1)


def test_a_dependency_of_a_stranger_needs_the_users_word(site, chain):
    site.hub.publisher("org", trusted=False)
    with pytest.raises(TrustError):
        site.loader().prefetch("kernel")
    assert len(site.loader().prefetch("kernel", trust_remote_code=True)) == 3


def test_a_dry_run_tells_bytes_and_fetches_nothing(site, chain):
    dry = site.loader().prefetch("kernel", dry_run=True)
    assert [(item.path, item.digest, item.here) for item in dry] == [(None, None, False)] * 3
    assert not (site.store / "builds").exists()
    ready = site.loader().prefetch("kernel")
    assert [item.size for item in dry] == [item.size for item in ready]
    assert [sum(f.stat().st_size for f in item.path.rglob("*")) for item in ready] == [item.size for item in ready]
    again = site.loader().prefetch("kernel", dry_run=True)
    assert all(item.here for item in again)
    assert [item.path for item in again] == [item.path for item in ready]


def test_a_dry_run_costs_one_listing_a_build_and_none_twice(site):
    loader = site.loader()
    loader.prefetch("kernel", dry_run=True)
    loader.prefetch("kernel")
    assert site.hub.counts()["GET", "tree"] == 2  # the names, and the files of the one build


def test_an_offline_dry_run_says_what_is_not_here(site):
    site.loader().prefetch("kernel")
    assert site.loader(offline=True).prefetch("kernel", dry_run=True)[0].here
    with pytest.raises(NotCached):
        site.loader(offline=True, cache=site.root / "other").prefetch("kernel", dry_run=True)


def test_builds_are_chosen_for_each_host(site):
    site.publish(files(variant="torch-cuda", value=3) | files(variant="torch-cpu", value=1))
    ready = site.loader().prefetch("kernel", hosts=[H200, CPU_HOST, H200])
    assert [item.variant for item in ready] == ["torch-cuda", "torch-cpu"]


def test_hosts_may_come_from_a_generator_and_kernels_too(site, chain):
    kernels, hosts = (kernel for kernel in ["kernel", "org/third@1"]), (host for host in [H200, CPU_HOST])
    names = {item.kernel for item in site.loader().prefetch(kernels, hosts=hosts)}
    assert names == {"kernel", "org/second", "org/third"}


def test_all_variants_load_offline_for_every_host(site):
    """The metadata of builds that were not chosen is kept as well, and was once not."""
    site.publish(files(variant="torch-cuda") | files(variant="torch-cpu") | files(variant="torch-universal"))
    assert len(site.loader().prefetch("kernel", all_variants=True)) == 3
    for host, variant in ((H200, "torch-cuda"), (CPU_HOST, "torch-cpu")):
        (ready,) = site.loader(host, offline=True).prefetch("kernel")
        assert (ready.variant, ready.here) == (variant, True)


def test_a_build_that_was_not_chosen_is_held_against_its_digests_too(site):
    wrong = files(variant="torch-cuda")
    digest = {"algorithm": "sha256", "files": {"__init__.py": "A" * 43 + "="}}
    wrong["build/torch-cuda/metadata.json"] = json.dumps({"version": 1, "digest": digest}).encode()
    site.publish(wrong | files())
    with pytest.raises(OSError, match=r"__init__\.py"):
        site.loader().prefetch("kernel", all_variants=True)


@pytest.mark.parametrize("dry", [True, False])
def test_prefetching_for_another_host_needs_no_torch(site, dry):
    (site.root / "host.json").write_text(H200.to_json())
    site.publish(files(variant="torch-cuda"))
    arguments = ["prefetch", "kernel", "--host", str(site.root / "host.json"), *(["--dry-run"] if dry else [])]
    out = site.run(NO_TORCH.format(arguments=arguments))
    assert "torch-cuda" in out
    assert ("B to fetch" in out) == dry


def test_a_transfer_that_breaks_off_leaves_no_build(site):
    site.hub.fault(Fault(path="part0.py", truncate_after=2))
    with pytest.raises(OSError):
        site.loader().prefetch("kernel")
    assert not any((site.store / "builds").glob("*"))
    assert not any((site.store / "staging").iterdir())


def test_what_was_imported_is_not_asked_about(site):
    """Without offline mode: the bundle's answer counts as one of the Hub's, and was once not remembered."""
    site.loader(cache=site.root / "laptop").export("kernel", site.root / "kernels.klb")
    site.loader().import_bundle(site.root / "kernels.klb")
    site.hub.requests.clear()
    assert site.loader().load("kernel").double(21) == 42
    assert len(site.hub.requests) == 0
    before = site.tree()
    site.loader().import_bundle(site.root / "kernels.klb")
    assert site.tree() == before
