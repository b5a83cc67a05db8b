"""Where modules are found, and what is said when they are not."""

import re

import pytest

from kernel_loader.fusion.pattern import Site, find_sites

PATHS = ["", "norm", "layers", *(f"layers.{n}{rest}" for n in range(12) for rest in ("", ".norm", ".mlp", ".mlp.up"))]


def sites(*patterns, paths=PATHS):
    return find_sites(patterns, paths)


def test_sites_are_in_the_order_of_the_model_and_children_in_that_of_the_patterns():
    found, problems = sites("layers.*.mlp", "layers.*.norm")
    assert not problems
    assert found == [Site(f"layers.{n}", ("mlp", "norm")) for n in range(12)]
    assert found[3].paths == ("layers.3.mlp", "layers.3.norm")


def test_a_star_stands_for_one_component_and_dots_for_themselves():
    assert [site.parent for site in sites("*.norm", paths=["norm", "a.norm", "a.b.norm", "aXnorm"])[0]] == ["a"]
    assert [site.paths for site in sites("*", paths=["", "a", "a.b"])[0]] == [("a",)]
    assert sites("layers.1.mlp")[0] == [Site("layers.1", ("mlp",))]


def test_a_regular_expression_matches_all_of_a_path():
    found, problems = sites(re.compile(r"layers\.[0-3]\.mlp"))
    assert not problems
    assert [site.parent for site in found] == ["layers.0", "layers.1", "layers.2", "layers.3"]


def test_children_of_the_model_itself_have_no_parent_path():
    assert sites("a", "b", paths=["", "a", "b"])[0] == [Site("", ("a", "b"))]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["layers.*.nrm"], r"layers\.\*\.nrm matches no module; there is layers\.\*\.norm"),
        (["layer.*.mlp"], r"layer\.\*\.mlp matches no module; there is layers\.\*\.mlp"),
        (["layers*.mlp"], r"matches no module, in which \* stands for a whole component; there is"),
        (["zzzzz"], "zzzzz matches no module$"),
        ([re.compile(r"layers\.\d\.mpl")], r"re\.compile\('layers\\\\\.\\\\d\\\\\.mpl'\) matches no module"),
        (
            ["layers.*.mlp", "norm"],
            r"the children have no parent in common: .*mlp in layers\.0 and 11 more and norm",
        ),
        (["layers.*.mlp", "layers.3.norm"], r"layers\.0 has no child for layers\.3\.norm"),
        (["layers.0.*"], r"layers\.0\.\* matches both norm and mlp of layers\.0"),
        (["layers.*.mlp", "layers.*.mlp"], r"layers\.0\.mlp is matched by two of the patterns"),
        ([""], " matches no module"),
    ],
)
def test_a_problem_says_what_was_looked_for_and_what_is_there(patterns, message):
    _, problems = sites(*patterns)
    assert re.search(message, problems[0]), problems[0]


def test_all_problems_are_named():
    _, problems = sites("layers.*.a", "layers.*.b")
    assert len(problems) == 2
    _, problems = sites("layers.*.mlp", re.compile(r"layers\.([02-9]|10)\.norm"))
    assert problems == [
        r"layers.1 has no child for re.compile('layers\\.([02-9]|10)\\.norm')",
        r"layers.11 has no child for re.compile('layers\\.([02-9]|10)\\.norm')",
    ]
