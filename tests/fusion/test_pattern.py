"""Where modules are found, and what is said when they are not."""

import re

import pytest

from kernel_loader.fusion.pattern import Site, covering, find_sites, selecting

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
    assert re.search(message, next(iter(problems)))


def test_all_problems_are_named():
    _, problems = sites("layers.*.a", "layers.*.b")
    assert len(problems) == 2
    _, problems = sites("layers.*.mlp", re.compile(r"layers\.([02-9]|10)\.norm"))
    assert list(problems) == [
        r"layers.1 has no child for re.compile('layers\\.([02-9]|10)\\.norm')",
        r"layers.11 has no child for re.compile('layers\\.([02-9]|10)\\.norm')",
    ]


def test_paths_that_are_advised_give_the_sites_that_are_whole():
    paths = [path for path in PATHS if path not in {"layers.1.norm", "layers.10.norm"}]
    whole, problems = sites("layers.*.norm", "layers.*.mlp", paths=paths)
    (advice,) = {*problems.values()}
    patterns = [re.compile(text) for text in re.findall(r're\.compile\(r"(.*?)"\)', advice)]
    assert sites(*patterns, paths=paths) == (whole, {})
    assert len(whole) == 10
    assert (
        selecting(whole[:1]) == r'write the paths as re.compile(r"layers\.0\.norm") and re.compile(r"layers\.0\.mlp")'
    )


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a"], "a"),
        (["a.0.m", "a.2.m", "a.10.m"], r"a\.(?:0|2|10)\.m"),
        (["a.0.m", "a.1.m", "b.0.m", "b.1.m"], r"(?:a|b)\.(?:0|1)\.m"),
        (["a.0.m", "b.1.m"], r"a\.0\.m|b\.1\.m"),
        (["a.b", "c"], r"a\.b|c"),
        (["x+y.0"], r"x\+y\.0"),
    ],
)
def test_paths_are_covered_by_a_regular_expression_for_them_alone(paths, expected):
    found = covering(paths)
    assert found == expected
    around = [*paths, "a.1", "a.0.m.x", "b", "a.0.mm", "xxy.0", "b.0.n"]
    assert [path for path in around if re.fullmatch(found, path)] == paths
