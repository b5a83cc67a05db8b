"""Whose code may run: named kernels, trusted publishers, the caller's word, and nobody else's."""

import logging

import pytest

import kernel_loader
from kernel_loader.errors import CyclicDependency, KernelImportError, TrustError
from kernel_loader.testing import Fault
from tests.published.conftest import REPO, files


def test_a_named_kernel_may_run_and_costs_no_question(site):
    site.loader().load("kernel")
    assert not [r for r in site.hub.requests if r.route == "organization"]


def test_a_repository_of_a_stranger_is_refused_before_anything_of_it_is_fetched(site):
    with pytest.raises(TrustError, match="does not mark org as a trusted publisher") as caught:
        site.loader().load_module(REPO, version=1)
    assert "trust_remote_code=True" in str(caught.value)
    assert isinstance(caught.value, PermissionError)
    assert site.gets() == 1  # its metadata.json, which says whether it fits
    assert not (site.store / "builds").exists()


def test_a_user_is_no_trusted_publisher(site):
    site.hub.kernel("someone/kernel").commit(files(), branch="v1")
    with pytest.raises(TrustError, match="does not mark someone"):
        site.loader().load_module("someone/kernel", version=1)


def test_a_trusted_publisher_may_run_within_four_requests_more_than_files(site):
    site.hub.publisher("org", trusted=True)
    module = site.loader().load_module(REPO, version=1)
    assert module.double(21) == 42
    assert kernel_loader.origin(module).repo == REPO
    assert len(site.hub.requests) <= 10 + 4


@pytest.mark.parametrize("word", [True, [REPO], {REPO, "other/kernel"}])
def test_the_callers_word_lets_pass(site, word):
    assert site.loader().load_module(REPO, version=1, trust_remote_code=word).double(1) == 2
    assert not [r for r in site.hub.requests if r.route == "organization"]


def test_the_word_for_another_repository_does_not(site):
    with pytest.raises(TrustError):
        site.loader().load_module(REPO, version=1, trust_remote_code=["org/other"])


def test_the_word_is_for_one_call_and_is_not_remembered(site):
    loader = site.loader()
    loader.load_module(REPO, version=1, trust_remote_code=True)
    with pytest.raises(TrustError):
        loader.load_module(REPO, version=1)
    with pytest.raises(TrustError):
        site.loader().load_module(REPO, version=1)


@pytest.mark.parametrize("state", ["offline", "down"])
@pytest.mark.parametrize("trusted", [True, False])
def test_an_outage_turns_no_yes_into_a_no_and_no_no_into_a_yes(site, state, trusted, caplog):
    site.hub.publisher("org", trusted=trusted)
    site.loader().load_module(REPO, version=1, trust_remote_code=True)
    try:
        site.loader().load_module(REPO, version=1)
    except TrustError:
        assert not trusted
    # The Hub would now say the opposite, if it could be asked.
    site.hub.publisher("org", trusted=not trusted)
    site.hub.fault(Fault(status=503))
    loader = site.loader(offline=state == "offline")
    if trusted:
        assert loader.load_module(REPO, version=1).double(21) == 42
    else:
        with pytest.raises(TrustError, match="does not mark"):
            loader.load_module(REPO, version=1)


def test_a_decision_is_asked_for_again_when_that_is_due(site):
    site.hub.publisher("org", trusted=True)
    site.loader().load_module(REPO, version=1)
    site.hub.publisher("org", trusted=False)
    site.loader().load_module(REPO, version=1)
    with pytest.raises(TrustError):
        site.loader(refresh_after=0).load_module(REPO, version=1)


def test_what_was_never_asked_is_no_yes_offline(site):
    site.loader().load_module(REPO, version=1, trust_remote_code=True)
    with pytest.raises(TrustError, match="was never asked"):
        site.loader(offline=True).load_module(REPO, version=1)


def test_a_proposed_change_is_not_the_owners_code_even_of_a_named_kernel(site):
    site.kernel.branch("refs/pr/1", site.publish(files(value=2), branch="other"))
    site.hub.publisher("org", trusted=True)
    with pytest.raises(TrustError, match="a proposed change"):
        site.loader().load("kernel", revision="refs/pr/1")
    with pytest.raises(TrustError, match="a proposed change"):
        site.loader().load_module(REPO, revision="refs/pr/1")
    assert site.loader().load_module(REPO, revision="refs/pr/1", trust_remote_code=True).value == 2


def test_a_directory_that_the_user_names_needs_no_trust_and_asks_nobody(site, tmp_path):
    from tests.builds import write_build

    write_build(tmp_path / "mine", "torch-universal")
    module = site.loader(local={"someone/kernel": tmp_path / "mine"}).load_module("someone/kernel", version=1)
    assert module.double(21) == 42
    assert len(site.hub.requests) == 0


# --- tokens -------------------------------------------------------------------------------------------------------


def test_a_token_opens_a_private_repository_and_stays_with_its_endpoint(site, monkeypatch, caplog):
    site.hub.tokens = {"hf_secret"}
    site.kernel.private = True
    site.kernel.lfs_threshold = 15
    site.hub.cdn = True
    site.publish()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with caplog.at_level(logging.DEBUG):
        site.loader().load("kernel")
    elsewhere = [r for r in site.hub.requests if r.origin == site.hub.cdn_endpoint]
    assert elsewhere
    assert not [r for r in elsewhere if "authorization" in r.headers]
    assert "hf_secret" not in caplog.text
    for file in site.store.rglob("*"):
        assert not file.is_file() or b"hf_secret" not in file.read_bytes()


def test_without_a_token_a_private_repository_is_not_shown(site):
    site.hub.tokens = {"hf_secret"}
    site.kernel.private = True
    with pytest.raises(kernel_loader.RepositoryMissing, match="give a token"):
        site.loader().load("kernel")


# --- kernels that need kernels ------------------------------------------------------------------------------------


def needs(*repositories, source=""):
    import json

    wanted = [{"repo-id": repo, "version": 1} for repo in repositories]
    asked = "".join(f"d{i} = get_kernel_dep({repo!r})\n" for i, repo in enumerate(repositories))
    build = files(2)
    build["build/torch-universal/metadata.json"] = json.dumps(
        {"name": "k", "version": 1, "kernel-depends": wanted}
    ).encode()
    build["build/torch-universal/__init__.py"] = f"from kernels import get_kernel_dep\n{asked}{source}".encode()
    return build


def test_a_kernel_gets_the_kernels_that_its_metadata_names(site):
    site.hub.publisher("org", trusted=True)
    site.hub.kernel("org/user").commit(needs(REPO, source="def double(x): return d0.double(x)"), branch="v1")
    assert site.loader().load_module("org/user", version=1).double(21) == 42
    assert {origin.repo for origin in kernel_loader.loaded_kernels()} >= {"org/user", REPO}
    import sys

    assert "kernels" not in sys.modules


def test_a_dependency_passes_the_same_gate(site):
    site.hub.publisher("good", trusted=True)
    site.hub.kernel("good/user").commit(needs(REPO), branch="v1")
    with pytest.raises(TrustError, match=REPO):
        site.loader().load_module("good/user", version=1)


def test_kernels_that_need_each_other_are_refused(site):
    site.hub.publisher("org", trusted=True)
    site.hub.kernel("org/a").commit(needs("org/b"), branch="v1")
    site.hub.kernel("org/b").commit(needs("org/a"), branch="v1")
    with pytest.raises(CyclicDependency, match="org/a@v1 -> org/b@v1 -> org/a@v1"):
        site.loader().load_module("org/a", version=1)


def test_a_dependency_that_is_not_named_is_told(site):
    site.hub.publisher("org", trusted=True)
    build = needs(REPO, source="get_kernel_dep('org/other')")
    site.hub.kernel("org/user").commit(build, branch="v1")
    with pytest.raises(KernelImportError, match="org/other is not among the kernel-depends"):
        site.loader().load_module("org/user", version=1)


# --- prefetch -----------------------------------------------------------------------------------------------------


def test_what_was_prefetched_loads_without_the_hub(site):
    (ready,) = site.loader().prefetch(["kernel"])
    assert (ready.kernel, ready.variant, ready.reference) == ("kernel", "torch-universal", False)
    assert ready.path.is_dir()
    assert site.loader(offline=True).load("kernel").double(21) == 42


def test_prefetching_imports_nothing(site):
    site.publish(files() | {"build/torch-universal/__init__.py": b"raise SystemExit('imported')"})
    assert site.loader().prefetch(["kernel"])


def test_repositories_versions_and_all_variants_can_be_prefetched(site):
    site.publish(files() | files(variant="torch-cuda"), branch="v2")
    loader = site.loader()
    with pytest.raises(TrustError):
        loader.prefetch([f"{REPO}@2"])
    ready = loader.prefetch([f"{REPO}@2"], all_variants=True, trust_remote_code=True)
    assert [item.variant for item in ready] == ["torch-cuda", "torch-universal"]
    assert loader.prefetch([f"{REPO}@v1"], trust_remote_code=True)[0].variant == "torch-universal"


def test_a_kernel_that_only_its_reference_serves_is_ready_as_that(site):
    (ready,) = site.loader().prefetch(["finegrained_fp8"])
    assert ready.reference
    assert len(site.hub.requests) == 0
