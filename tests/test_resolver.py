"""The order of builds, the choice, the nearest miss, and what a person is told."""

import json
import pickle
import random
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from packaging.specifiers import SpecifierSet

from kernel_loader.errors import MetadataError, NoCompatibleBuild
from kernel_loader.manifest import Manifest
from kernel_loader.metadata import Metadata
from kernel_loader.resolver import Resolution, resolve
from kernel_loader.rules import Advisory, Note
from tests.builds import CPU_HOST, H200

# Best first on an H200 with torch 2.11 and CUDA 13.0.
RANKED = [
    "torch-stable-abi211-cu130-x86_64-linux",
    "torch-stable-abi210-cu130-x86_64-linux",
    "torch-stable-abi29-cu130-x86_64-linux",
    "torch211-cu130-x86_64-linux",
    "torch211-cxx11-cu130-x86_64-linux",
    "tvm-ffi01-cu130-x86_64-linux",
    "torch-cuda",
    "torch-universal",
]
HOST = replace(H200, tvm_ffi="0.1.9")


@given(st.permutations(RANKED))
def test_the_order_is_total_and_independent_of_the_input(names):
    assert [verdict.name for verdict in resolve(names, HOST).verdicts] == RANKED


def test_each_build_is_chosen_when_the_better_ones_are_gone():
    for index, name in enumerate(RANKED):
        assert resolve(RANKED[index:], HOST).chosen.name == name


def test_within_one_kind_the_highest_backend_version_wins_also_with_two_digits():
    host = replace(HOST, cuda="12.10")
    names = [f"torch211-cxx11-cu{v}-x86_64-linux" for v in ("126", "1210", "129", "128")]
    assert [v.name for v in resolve(names, host).verdicts] == [names[i] for i in (1, 2, 3, 0)]


def test_a_name_that_is_not_of_the_grammar_is_shown_as_rejected():
    verdicts = resolve(["torch-universal", "../evil", ""], CPU_HOST).verdicts
    assert [(v.name, v.status) for v in verdicts[1:]] == [("", "rejected"), ("../evil", "rejected")]
    assert {reason.code for v in verdicts[1:] for reason in v.reasons} == {"grammar"}


def test_metadata_is_read_for_the_best_build_alone_when_it_fits():
    read = []
    resolution = resolve(RANKED, HOST, read_metadata=lambda name: read.append(name) or Metadata())
    assert read == RANKED[:1]
    assert resolution.chosen.name == RANKED[0]
    assert resolution.chosen.metadata == Metadata()


def test_the_next_build_is_tried_when_metadata_rejects():
    archs = dict.fromkeys(RANKED, ("8.0",)) | {"torch-cuda": ("9.0",)}
    resolution = resolve(RANKED, HOST, read_metadata=lambda name: Metadata(archs=archs[name]))
    assert resolution.chosen.name == "torch-cuda"
    rejected = [v for v in resolution.verdicts if v.status == "rejected"]
    assert [v.name for v in rejected] == RANKED[:6]
    assert all(v.reasons[0].code == "arch" for v in rejected)


def test_unknown_ranks_below_accepted_whatever_its_kind():
    names = ["torch-stable-abi211-cu130-x86_64-linux", "torch-universal"]
    host = replace(HOST, unknown=frozenset({"glibc"}))
    resolution = resolve(names, host, read_metadata=lambda _: Metadata())
    assert resolution.chosen.name == "torch-universal"
    assert [v.status for v in resolution.verdicts] == ["accepted", "unknown"]


def test_a_build_that_its_metadata_leaves_unknown_gives_way_to_a_lower_one_that_is_accepted():
    archs = {"torch-stable-abi211-cu130-x86_64-linux": ("sm_90",), "torch-cuda": None}
    resolution = resolve(archs, HOST, read_metadata=lambda name: Metadata(archs=archs[name]))
    assert resolution.chosen.name == "torch-cuda"


def test_unknown_is_chosen_when_nothing_is_accepted_unless_strict():
    names = ["torch211-cu130-x86_64-linux", "torch-cpu"]
    host = replace(HOST, unknown=frozenset({"glibc"}))
    assert resolve(names, host).chosen.name == names[0]
    assert resolve(names, host).chosen.status == "unknown"
    assert resolve(names, host, strict=True).chosen is None


def test_the_best_of_several_unknown_builds_is_chosen():
    host = replace(HOST, unknown=frozenset({"glibc"}))
    names = RANKED[:5]
    assert resolve(names, host, read_metadata=lambda _: Metadata()).chosen.name == RANKED[0]


def test_a_damaged_candidate_is_not_passed_over_in_silence():
    def damaged(name):
        raise MetadataError(name, "", "not JSON")

    with pytest.raises(MetadataError):
        resolve(RANKED, HOST, read_metadata=damaged)


def test_builds_that_share_every_number_are_ordered_by_name():
    names = ["torch211-cxx11-cu130-x86_64-linux", "torch211-cxx98-cu130-x86_64-linux"]
    host = replace(HOST, cxx11_abi=None, unknown=frozenset({"cxx11_abi"}))
    assert [v.name for v in resolve(names, host).verdicts] == names
    assert [v.name for v in resolve(reversed(names), host).verdicts] == names


def test_a_name_that_stands_twice_is_judged_once():
    assert len(resolve(["torch-universal", "torch-universal"], HOST).verdicts) == 1


@pytest.mark.parametrize(
    ("names", "nearest"),
    [
        # one pip install is less than another torch, which is less than another machine
        (["tvm-ffi01-cu130-x86_64-linux", "torch210-cxx11-cu130-x86_64-linux"], "tvm-ffi01-cu130-x86_64-linux"),
        (
            ["torch210-cxx11-cu130-x86_64-linux", "torch211-cxx11-cu130-aarch64-linux"],
            "torch210-cxx11-cu130-x86_64-linux",
        ),
        # the torch that is nearest, not the newest
        (
            ["torch213-cxx11-cu130-x86_64-linux", "torch210-cxx11-cu130-x86_64-linux"],
            "torch210-cxx11-cu130-x86_64-linux",
        ),
        # one change rather than two
        (
            ["torch210-cxx98-cu130-x86_64-linux", "torch210-cxx11-cu130-x86_64-linux"],
            "torch210-cxx11-cu130-x86_64-linux",
        ),
        # anything rather than a name that means nothing
        (["nonsense", "torch210-cxx98-cu118-aarch64-windows"], "torch210-cxx98-cu118-aarch64-windows"),
        (["torch211-cxx11-cu130-x86_64-linux"], None),
    ],
)
def test_the_nearest_miss_is_the_build_that_needs_the_least_change(names, nearest):
    for order in (names, names[::-1]):
        found = resolve(order, H200).nearest
        assert (found.name if found else None) == nearest


def test_explain_shows_every_build_and_every_reason():
    resolution = resolve(["torch-universal", "torch210-cxx98-cu118-aarch64-windows", "junk"], CPU_HOST, repo="org/k@v1")
    text = resolution.explain()
    for verdict in resolution.verdicts:
        assert verdict.name in text
        for reason in verdict.reasons:
            assert reason.message in text
    assert "org/k@v1" in text
    assert "Chosen: torch-universal" in text


def test_explain_ends_with_the_nearest_miss_and_its_remedy_when_nothing_fits():
    text = resolve(["torch-cuda"], CPU_HOST).explain()
    assert "Nearest: torch-cuda. Install a torch that was built for cuda." in text


def test_a_vendor_build_of_torch_is_marked():
    assert "no public release" in resolve([], replace(H200, torch="2.8.0a0+5228986c39.nv25.5")).explain()
    assert "no public release" not in resolve([], H200).explain()


def test_json_holds_the_same_for_programs():
    resolution = resolve([*RANKED, "junk"], replace(HOST, torch="2.10.0"), repo="org/k@v1")
    document = json.loads(resolution.to_json())
    assert document["chosen"] == resolution.chosen.name
    assert document["nearest"] == resolution.nearest.name
    assert [v["name"] for v in document["verdicts"]] == [v.name for v in resolution.verdicts]
    assert document["verdicts"][-1]["reasons"][0]["code"] == "grammar"
    assert document["host"]["torch"] == "2.10.0"


def test_a_resolution_pickles_with_the_error_that_carries_it():
    error = NoCompatibleBuild("org/k", resolve(["torch-cuda"], CPU_HOST, repo="org/k@v1"))
    copy = pickle.loads(pickle.dumps(error))
    assert copy.resolution == error.resolution
    assert str(copy) == str(error)
    assert copy.nearest.name == "torch-cuda"


def test_the_choice_for_a_thousand_builds_does_not_depend_on_their_order():
    names = [
        f"torch{major}{minor}{abi}-{backend}-{cpu}-linux"
        for major, minor in [(2, m) for m in range(5, 14)]
        for abi in ("", "-cxx11", "-cxx98")
        for backend in ("cpu", "cu118", "cu126", "cu128", "cu129", "cu130", "rocm64", "rocm70", "xpu20252")
        for cpu in ("x86_64", "aarch64")
    ] * 2
    first = resolve(names, HOST)
    for seed in range(5):
        random.Random(seed).shuffle(names)
        assert resolve(names, HOST) == first
    assert first.chosen.name == "torch211-cu130-x86_64-linux"


def test_what_the_manifest_requires_rejects_a_build_whose_name_fits():
    requires = Manifest.parse('name="k"\nrepo="o/k"\nversion=1\n[requires]\ndriver=">=590"', "k.toml").requires
    resolution = resolve(["torch-cuda", "torch-universal"], HOST, requires=requires)
    assert resolution.chosen is None
    assert [reason.code for verdict in resolution.verdicts for reason in verdict.reasons] == ["driver", "driver"]


def test_of_several_builds_that_their_metadata_leaves_in_doubt_the_best_is_chosen():
    resolution = resolve(RANKED[:3], HOST, read_metadata=lambda _: Metadata(archs=("sm_90",)))
    assert resolution.chosen.name == RANKED[0]


def test_metadata_of_doubtful_builds_is_not_read_once_one_is_chosen():
    read = []
    host = replace(HOST, unknown=frozenset({"glibc"}))
    resolve(RANKED[:5], host, read_metadata=lambda name: read.append(name) or Metadata())
    assert read == RANKED[:1]


def test_strict_names_what_it_refuses():
    resolution = resolve(["torch211-cu130-x86_64-linux"], replace(HOST, unknown=frozenset({"glibc"})), strict=True)
    assert resolution.nearest.name == "torch211-cu130-x86_64-linux"
    assert "glibc" in str(NoCompatibleBuild("org/k", resolution))


def test_a_machine_of_the_right_kind_is_nearer_than_another_kind_of_machine():
    names = ["torch211-cxx11-cu130-x86_64-linux", "torch-rocm"]
    assert resolve(names, replace(H200, devices=(), driver=None)).nearest.name == names[0]


def test_builds_in_doubt_that_are_passed_over_are_named():
    host = replace(HOST, unknown=frozenset({"glibc"}))
    text = resolve(["torch211-cu130-x86_64-linux", "torch-cuda"], host).explain()
    assert "In doubt, and passed over: torch211-cu130-x86_64-linux" in text


# --- advisories -----------------------------------------------------------------------------------------------------

FAULT = Advisory("the-id", "org/k", "reject", "it fails", "Use another.", "issue 1", versions=SpecifierSet("<=2"))


def test_an_advisory_counts_for_the_version_that_a_build_names():
    versions = {"torch-cuda": 1, "torch-universal": 3}

    def chosen(**asked):
        found = resolve(
            versions, HOST, advisories=[FAULT], read_metadata=lambda n: Metadata(version=versions[n]), **asked
        )
        return found.chosen.name

    assert chosen() == "torch-universal"
    assert chosen(version=1) == "torch-universal"
    versions = {"torch-cuda": None, "torch-universal": None}
    assert chosen(version=3) == "torch-cuda"


def test_where_names_alone_decide_the_version_that_was_asked_for_counts():
    assert resolve(["torch-cuda"], HOST, version=3, advisories=[FAULT]).chosen
    rejected = resolve(["torch-cuda"], HOST, version=2, advisories=[FAULT])
    assert rejected.chosen is None
    assert [reason.code for reason in rejected.nearest.reasons] == ["advisory"]


def test_a_doubt_gives_way_to_what_is_accepted_and_is_refused_by_strict():
    doubt = FAULT._replace(effect="doubt", versions=SpecifierSet("==1"))
    versions = {"torch-cuda": 1, "torch-universal": 2}
    read = lambda name: Metadata(version=versions[name])  # noqa: E731
    assert resolve(versions, HOST, advisories=[doubt], read_metadata=read).chosen.name == "torch-universal"
    versions["torch-universal"] = 1
    assert resolve(versions, HOST, advisories=[doubt], read_metadata=read).chosen.name == "torch-cuda"
    assert resolve(versions, HOST, advisories=[doubt], read_metadata=read, strict=True).chosen is None


def test_a_warning_is_shown_and_the_build_is_accepted_and_none_is_nearest():
    warn = FAULT._replace(effect="warn")
    resolution = resolve(["torch-cuda"], HOST, version=1, advisories=[warn], read_metadata=lambda _: Metadata())
    assert resolution.chosen.status == "accepted"
    assert resolution.chosen.reasons == ()
    assert resolution.chosen.notes == (
        Note("advisory", "known fault the-id: it fails", "Use another. Reported: issue 1."),
    )
    assert resolution.nearest is None
    assert "fits\n" in resolution.explain()
    assert "known fault the-id: it fails\n" in resolution.explain()
    (verdict,) = json.loads(resolution.to_json())["verdicts"]
    assert verdict["notes"][0]["code"] == "advisory"
    assert pickle.loads(pickle.dumps(resolution)) == resolution


# --- several repositories -------------------------------------------------------------------------------------------


def several(first, second, embedded=None):
    """A resolution with an alternative, of the builds of each."""
    found = resolve(first, CPU_HOST, repo="org/first@v1")
    other = resolve(second, CPU_HOST, repo="org/second@v2")
    reference = resolve(embedded, CPU_HOST, repo="registry/k") if embedded else None
    return found._replace(alternatives=(other,), reference=reference)


@pytest.mark.parametrize(
    ("first", "second", "embedded", "taken", "conclusion"),
    [
        (["torch-cpu"], ["torch-cpu"], ["torch-cpu"], "org/first@v1", "Chosen: torch-cpu"),
        (["torch-cuda"], ["torch-cpu"], ["torch-cpu"], "org/second@v2", "Chosen: torch-cpu, of org/second@v2"),
        (["torch-cuda"], ["torch-rocm"], ["torch-cpu"], "registry/k", "Chosen: torch-cpu, embedded"),
        (["torch-cuda"], [], ["torch-universal"], "registry/k", "Chosen: torch-universal, the reference"),
        (["torch-cuda"], [], ["torch-rocm"], None, "Chosen: none"),
        (["torch-cuda"], [], None, None, "Chosen: none"),
    ],
)
def test_what_is_taken_is_of_the_first_that_chose(first, second, embedded, taken, conclusion):
    resolution = several(first, second, embedded)
    assert (resolution.taken and resolution.taken.repo) == taken
    assert resolution.explain().splitlines()[-1] == conclusion


def test_each_repository_is_shown_in_its_order_with_what_is_nearest_in_it():
    text = several(["torch-cuda"], ["torch-rocm"], ["torch-universal"]).explain()
    assert text.index("org/first@v1\n") < text.index("org/second@v2\n") < text.index("registry/k\n")
    assert "None fits. Nearest: torch-cuda. Install a torch that was built for cuda." in text
    assert "None of org/second@v2 fits. Nearest: torch-rocm. Install a torch that was built for rocm." in text
    document = json.loads(several(["torch-cuda"], ["torch-rocm"], ["torch-universal"]).to_json())
    assert [other["repo"] for other in document["alternatives"]] == ["org/second@v2"]
    assert document["alternatives"][0]["nearest"] == "torch-rocm"
    assert document["reference"]["chosen"] == "torch-universal"


def test_guards_are_shown_for_what_is_taken():
    resolution = several(["torch-cuda"], ["torch-cpu"])
    guarded = resolution.alternatives[0]._replace(guards=("double: contiguous", "triple: empty"))
    resolution = resolution._replace(alternatives=(guarded,))
    assert resolution.explain().endswith(
        "Chosen: torch-cpu, of org/second@v2\nGuarded: double: contiguous\nGuarded: triple: empty"
    )
    document = json.loads(resolution.to_json())
    assert document["guards"] == []
    assert document["alternatives"][0]["guards"] == ["double: contiguous", "triple: empty"]


def test_an_error_tells_of_every_repository():
    error = NoCompatibleBuild("org/first@v1", several(["torch-cuda", "junk"], ["torch-rocm"]))
    assert error.nearest.name == "torch-cuda"
    assert "No build of org/first@v1 runs on this host, nor one of org/second@v2 (3 looked at)" in str(error)
    excluded = Resolution("org/first@v1", CPU_HOST, note="it is for cuda")
    error = NoCompatibleBuild(
        "org/first@v1", excluded._replace(alternatives=(several([], ["torch-rocm"]).alternatives))
    )
    assert error.nearest.name == "torch-rocm"
    error = NoCompatibleBuild("org/first@v1", excluded._replace(alternatives=(several([], []).alternatives)))
    assert "nor one of org/second@v2: it is for cuda; it has none." in str(error)
