"""Kernels that are published in several repositories: who is asked, who is trusted, and what a load costs then."""

import pytest

import kernel_loader
from kernel_loader.errors import RepositoryMissing, TrustError
from kernel_loader.testing import Fault
from tests.published.conftest import files

SECOND = "else/second"
LOAD = """
import kernel_loader
bundle = kernel_loader.load_kernel("kernel")
print(bundle.double(21), kernel_loader.origin(bundle).repo)
"""


@pytest.fixture
def second(site):
    """A second repository of the kernel, with the one build that fits; the first has builds for GPUs alone."""
    site.publish(files(variant="torch-cuda"))
    site.hub.kernel(SECOND).commit(files(), branch="v3")
    manifest = site.manifests / "kernel.toml"
    manifest.write_text(f'{manifest.read_text()}[[alternatives]]\nrepo = "{SECOND}"\nversion = 3\n')
    return manifest


def asked(site, repo):
    return [request for request in site.hub.requests if repo in request.path]


def test_a_named_kernel_may_run_from_each_of_its_repositories(site, second):
    loader = site.loader()
    bundle = loader.load("kernel")
    origin = kernel_loader.origin(bundle)
    assert (bundle.double(21), origin.repo, origin.revision) == (42, SECOND, "v3")
    assert not [request for request in site.hub.requests if request.route == "organization"]
    assert len(asked(site, SECOND)) <= 10 + 4


def test_what_was_loaded_from_an_alternative_loads_again_without_a_request(site, second):
    assert site.run(LOAD) == f"42 {SECOND}\n"
    site.hub.requests.clear()
    before = site.tree()
    assert site.run(LOAD) == f"42 {SECOND}\n"
    assert len(site.hub.requests) == 0
    assert site.tree() == before


def test_a_repository_that_its_backends_exclude_is_not_asked(site, second):
    second.write_text(second.read_text().replace("version = 1\n", 'version = 1\nbackends = ["cuda"]\n'))
    assert kernel_loader.origin(site.loader().load("kernel")).repo == SECOND
    assert asked(site, "org/kernel") == []


def test_an_alternative_is_not_asked_where_a_build_of_the_first_fits(site, second):
    site.publish(files())
    assert kernel_loader.origin(site.loader().load("kernel")).repo == "org/kernel"
    assert asked(site, SECOND) == []


def test_when_the_hub_refuses_the_first_the_next_is_not_taken(site, second):
    site.hub.fault(Fault(path="org/kernel", status=404, error_code="RepoNotFound"))
    with pytest.raises(RepositoryMissing, match="org/kernel@v1"):
        site.loader().load("kernel")
    assert asked(site, SECOND) == []


def test_a_proposed_change_of_an_alternative_may_not_run(site, second):
    site.hub.kernel(SECOND).commit(files(), branch="refs/pr/1")
    second.write_text(second.read_text().replace("version = 3", 'revision = "refs/pr/1"'))
    with pytest.raises(TrustError, match="a proposed change"):
        site.loader().load("kernel")
    assert not (site.store / "builds").exists()
