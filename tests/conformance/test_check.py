"""What is asked of a check, what it says, and how it is asked for on the command line."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from xml.etree import ElementTree as ET

import pytest
import torch

import kernel_loader
from kernel_loader.conformance import Case, Entry, Inputs, Tolerance, Work, report
from kernel_loader.conformance.grid import Draw, map_tensors, tensors_in
from kernel_loader.conformance.measure import bench, prewarm
from kernel_loader.conformance.plot import roofline
from kernel_loader.conformance.roof import Roof
from kernel_loader.conformance.runner import check
from kernel_loader.errors import ManifestError, RequestError
from tests.builds import write_build
from tests.conformance import routed
from tests.conformance.routed import FAULTS, RIGHT, broken


def run(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kernel_loader", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_part_can_be_asked_for(kernel):
    name = kernel(RIGHT)
    checked = check(name, only=["routed/rows", "routed/a row"], modes=("eager",), processes=0)
    assert {finding.case for finding in checked.findings} == {"a row", "rows"}
    with pytest.raises(RequestError, match="the grid has no 'routed/nonsense'"):
        check(name, only=["routed/nonsense"])
    with pytest.raises(RequestError, match="no mode 'nonsense'"):
        check(name, modes=("nonsense",))
    with pytest.raises(RequestError, match="processes=-1"):
        check(name, processes=-1)
    for processes in (0, 1):
        with pytest.raises(RequestError, match="nothing can be computed on nonsense"):
            check(name, device="nonsense", processes=processes)


def test_findings_are_told_while_they_come(kernel):
    told = []
    checked = check(kernel(RIGHT), modes=("eager",), processes=0, watch=told.append)
    assert tuple(told) == checked.findings


def test_a_kernel_needs_a_grid(kernel):
    with pytest.raises(RequestError, match=r"routed has no grid[^`]*package.module:GRID"):
        check(kernel(RIGHT, grid=None))
    for grid in ("tests.conformance.routed:NONSENSE", "tests.nonsense:GRID", "tests.conformance.routed:RIGHT"):
        with pytest.raises(ManifestError, match="grid"):
            check(kernel(RIGHT, grid=grid))


@dataclass(frozen=True)
class Mine:
    """A bundle of a user's own, with a grid of its own."""

    __kernel__: ClassVar[Any] = {
        "name": "mine",
        "repo": "org/routed",
        "version": 1,
        "grid": "tests.conformance.test_check:MY_GRID",
    }

    routed: Any


MY_GRID = (
    Entry(
        entrypoint="routed",
        formula=lambda x, ids, w: torch.zeros(len(x), w.shape[1]),
        cases=(
            Case(
                "all sentinels",
                lambda draw: Inputs(draw.normal(2, 3), draw.put(torch.tensor([9, 9])), draw.normal(1, 4, 3)),
            ),
        ),
        skip={"compile": "it counts on the host"},
    ),
)


WORKING_GRID = (
    dataclasses.replace(routed.GRID[0], work=lambda *, t: Work(flops=2.0 * t * 8 * 5, nbytes=52.0 * t, peak="fp32")),
)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"skip": {"graf": "?"}}, "there is no mode 'graf'"),
        ({"cases": [Case("one", Inputs, ("eager", "bckward"))]}, "there is no mode 'bckward'"),
        ({"cases": [Case("one", Inputs), Case("one", Inputs)]}, "two cases 'one'"),
    ],
)
def test_a_grid_that_contradicts_itself_is_refused(wrong, said):
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(routed.GRID[0], **wrong)


def test_an_entry_for_what_the_bundle_has_not_is_refused(kernel):
    with pytest.raises(RequestError, match="'nope', which the bundle has not"):
        check(kernel(RIGHT, grid="tests.conformance.test_check:NOPE_GRID"), processes=0)


NOPE_GRID = (dataclasses.replace(routed.GRID[0], entrypoint="nope"),)


@dataclass(frozen=True)
class Part:
    """A class that takes some of a kernel's entrypoints."""

    __kernel__: ClassVar[Any] = "routed"

    routed: Any


def test_a_class_that_takes_a_part_is_checked_for_that(kernel):
    source = f"{RIGHT}\ndef other(x):\n    return x\n"
    kernel(source, grid="tests.conformance.test_check:TWO_GRID", entrypoints={"routed": "routed", "other": "other"})
    checked = check(Part, modes=("eager",), processes=0)
    assert {f.entrypoint for f in checked.findings} == {"routed"}
    assert not checked.failed


TWO_GRID = (
    routed.GRID[0],
    Entry(entrypoint="other", formula=lambda x: x.double(), cases=(Case("one", lambda draw: Inputs(draw.normal(2))),)),
)


def test_a_reference_that_is_wrong_is_told_from_a_build_that_is(kernel, workshop):
    name = kernel(RIGHT, reference="routed-reference")
    wrong = broken(*FAULTS["clamped sentinels"][:2])
    write_build(workshop.manifests / "registry" / "routed-reference", "torch-universal", {"__init__.py": wrong})
    checked = check(name, modes=("eager",), processes=0, only=["routed/sentinels"])
    assert "reference" in {f.probe for f in checked.failed}


def test_what_a_kernel_prints_is_no_part_of_the_answer(kernel):
    source = RIGHT.replace("def routed(x, ids, w):\n", "def routed(x, ids, w):\n    print('tuned', flush=True)\n")
    status, out, _ = run("check", kernel(source), "--mode", "eager", "--only", "routed/a row", "--json")
    assert status == 0
    assert json.loads(out)["passed"]


def test_where_an_error_was_raised_is_said(kernel):
    source = RIGHT.replace("    return Routed.apply(x, ids, w)\n", "    raise ValueError('too few')\n")
    checked = check(kernel(source), modes=("eager",), only=["routed/a row"], processes=0)
    assert "raised ValueError: too few (__init__.py:" in checked.failed[0].detail


def test_a_bundle_of_ones_own_has_a_grid_of_its_own(kernel):
    kernel(RIGHT)
    checked = check(Mine, processes=0)
    assert checked.kernel == "tests.conformance.test_check:Mine"
    assert checked.origin.kernel == "mine"
    assert "check tests.conformance.test_check:Mine --device" in report.command(checked, checked.findings[0])
    assert not checked.failed
    assert sum(finding.status == "passed" for finding in checked.findings) == 3
    status, out, _ = run("check", "tests.conformance.test_check:Mine", "--mode", "eager")
    assert (status, "3 passed" in out) == (0, True)


def test_a_build_is_held_against_the_reference_where_it_has_one(kernel, workshop):
    """The formula is right and the reference is not: a published build must do as the reference does."""
    name = kernel(broken(*FAULTS["wrong scale"][:2]), reference="routed-reference")
    write_build(workshop.manifests / "registry" / "routed-reference", "torch-universal", {"__init__.py": RIGHT})
    checked = check(name, modes=("eager",), processes=0)
    assert checked.against == "its reference"
    assert not checked.origin.reference
    assert {finding.case for finding in checked.failed} == {"a row", "rows", "sentinels", "strided"}


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        ("raise ValueError('too few')", {"skipped"}),
        ("return Routed.apply(x, ids, w) * 2", {"failed"}),
        ("return Routed.apply(x, ids, w)", {"passed"}),
    ],
)
def test_a_published_build_may_refuse_what_its_bundle_says_and_nothing_wrong(kernel, workshop, body, statuses):
    source = RIGHT.replace("    return Routed.apply(x, ids, w)\n", f"    {body}\n")
    name = kernel(source, reference="routed-reference", grid="tests.conformance.test_check:REFUSED_GRID")
    write_build(workshop.manifests / "registry" / "routed-reference", "torch-universal", {"__init__.py": RIGHT})
    checked = check(name, modes=("eager",), processes=0)
    own = [f for f in checked.findings if f.probe in ("value", "memory", "again")]
    assert {f.status for f in own} == statuses
    if statuses == {"skipped"}:
        assert {f.detail for f in own} == {"refused, as it may: rows come by the dozen"}


def test_a_reference_may_refuse_nothing(kernel):
    source = RIGHT.replace("    return Routed.apply(x, ids, w)\n", "    raise ValueError('too few')\n")
    checked = check(kernel(source, grid="tests.conformance.test_check:REFUSED_GRID"), modes=("eager",), processes=0)
    assert len(checked.failed) == 3


def scaled(x, bias=None):
    return x.double() * 2 if bias is None else x.double() * 2 + bias.double()


OPTIONAL_GRID = (
    Entry(
        entrypoint="routed",
        formula=scaled,
        gradients=(0, "bias"),
        cases=(
            Case("no bias", lambda draw: Inputs(draw.normal(2, 3))),
            Case("a bias that is None", lambda draw: Inputs(draw.normal(2, 3), bias=None)),
            Case("a bias", lambda draw: Inputs(draw.normal(2, 3), bias=draw.normal(3))),
            Case("a row for all", lambda draw: Inputs(draw.normal(1, 3).expand(4, 3))),
        ),
    ),
)


def test_arguments_may_be_left_out_and_repeat_their_elements(kernel):
    source = "def routed(x, bias=None):\n    return x * 2 if bias is None else x * 2 + bias\n"
    checked = check(kernel(source, grid="tests.conformance.test_check:OPTIONAL_GRID"), processes=0)
    assert checked.failed == ()


def test_an_argument_that_is_not_there_cannot_be_replaced():
    inputs = Inputs(1, x=2)
    assert inputs.replace((0, "x"), lambda value: value + 1)["x"] == 3
    for key in (1, "y", "0.weight"):
        with pytest.raises(KeyError):
            inputs.replace((key,), str)


REFUSED_GRID = (
    dataclasses.replace(routed.GRID[0], cases=[routed.GRID[0].cases[2]._replace(may_refuse="rows come by the dozen")]),
)


def test_the_table_and_the_commands_below_it(kernel):
    name = kernel(broken(*FAULTS["clamped sentinels"][:2]))
    checked = check(name, processes=0)
    text = report.of_check(checked)
    assert "routed on cpu: torch-universal from local org/routed" in text
    assert ", against formulas" in text
    assert "skipped 5 x eager/stream: streams are of CUDA and ROCm devices" in text
    assert "9 passed, 6 FAILED" in text
    command = next(line.strip() for line in text.splitlines() if line.strip().startswith("kernel-loader check"))
    words = shlex.split(command)[1:]
    status, out, _ = run(*words)
    assert status == 1
    assert "nan came, 0.0 is right" in out
    assert "passed" in out


def test_the_command_line_answers_in_json(kernel):
    status, out, _ = run("check", kernel(RIGHT), "--mode", "eager,backward", "--only", "routed/a row", "--json")
    answer = json.loads(out)
    assert status == 0
    assert answer["passed"] is True
    assert answer["origin"]["repo"] == "org/routed"
    assert {f["mode"] for f in answer["findings"]} == {"eager", "backward"}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("routed", "--mode", "nonsense"), 1, "no mode 'nonsense'"),
        (("routed", "--only", "nonsense"), 1, "Its entrypoints are routed"),
        (("routed", "--device", "nonsense"), 1, "nothing can be computed on nonsense"),
        (("routed", "--deadline", "0"), 2, "deadline"),
        (("routed", "--mode", ""), 1, "no mode ''"),
        (("nonsense",), 1, "nonsense"),
        (("tests.conformance.test_check:Nonsense",), 2, "cannot be imported"),
        (("tests.conformance.test_check:run",), 2, "is no class"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_paragraph(kernel, arguments, status, said):
    kernel(RIGHT)
    got, _, error = run("check", *arguments)
    assert got == status
    assert said in error


def test_bench_measures_problems_against_a_roof(kernel, tmp_path):
    name = kernel(RIGHT)
    measured = bench(name, device="cpu")
    assert [dict(t.sizes) for t in measured.timings] == [{"t": 16}, {"t": 64, "sentinels": False}]
    for timing in measured.timings:
        assert timing.first > 0
        assert timing.steady > 0
        assert (timing.reference, timing.roof, timing.work) == (None, None, None)
    assert measured.roof.bandwidth > 1e6
    table = report.of_bench(measured)
    assert "t=64 sentinels=False" in table
    assert json.loads(report.bench_to_json(measured))["timings"][0]["sizes"] == {"t": 16}
    assert "the grid tells the work of no problem" in roofline(measured)
    with pytest.raises(RequestError, match="has no entrypoint 'nonsense'"):
        bench(name, only=["nonsense"])
    with pytest.raises(RequestError, match="is no problem for routed"):
        bench(name, device="cpu", sizes=[{"rows": 3}])


def test_bench_on_the_command_line_takes_sizes_and_draws(kernel, tmp_path):
    name = kernel(RIGHT, grid="tests.conformance.test_check:WORKING_GRID")
    plot = tmp_path / "roof.svg"
    status, out, _ = run("bench", name, "--device", "cpu", "--size", "t=5", "--plot", str(plot))
    assert status == 0
    assert re.search(r"routed +t=5 ", out)
    root = ET.fromstring(plot.read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 2  # a problem, and its name
    assert "routed t=5" in plot.read_text()
    status, _, error = run("bench", name, "--size", "nonsense")
    assert (status, "is not of the form" in error) == (2, True)


def test_what_a_build_wants_in_a_form_of_its_own_is_made_once_and_is_not_timed(kernel):
    bench(kernel(RIGHT, grid="tests.conformance.test_check:PREPARED_GRID"), device="cpu")
    made, called = PREPARED
    assert made == ["routed"]
    assert called > 2


PREPARED: list[Any] = [[], 0]


def prepared(bundle, inputs):
    PREPARED[0].append(bundle.routed.__name__)

    def call():
        PREPARED[1] += 1
        return inputs.call(bundle.routed)

    return call


PREPARED_GRID = (dataclasses.replace(routed.GRID[0], sizes=[{"t": 4}], prepare=prepared),)


def test_the_roof_is_the_longer_of_arithmetic_and_traffic():
    roof = Roof(bandwidth=100.0, flops={"bf16": 1000.0})
    assert roof.seconds(Work(flops=2000, nbytes=100)) == 2.0
    assert roof.seconds(Work(flops=10, nbytes=100)) == 1.0
    assert roof.seconds(Work(flops=1e9, nbytes=100, peak="fp8")) == 1.0  # a peak that the device has not


def test_prewarm_calls_each_problem_once(kernel):
    bundle = kernel_loader.load_kernel(kernel(RIGHT))
    inputs = Inputs(torch.zeros(1, 3), torch.tensor([0]), torch.zeros(1, 4, 3))
    called = kernel_loader.prewarm(bundle, {"routed": [{"t": 3}, inputs]}, device="cpu", backward=True)
    assert [(entrypoint, problem) for entrypoint, problem, _ in called] == [("routed", {"t": 3}), ("routed", inputs)]
    assert all(seconds > 0 for _, _, seconds in called)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ({"nonsense": [{"t": 3}]}, "Routed has no 'nonsense'"),
        ({"nonsense": [Inputs(1)]}, "Routed has no 'nonsense'"),
        ({"routed": {"t": 3}}, "Pass a list of sizes or Inputs"),
        ({"routed": [{"t": -1}]}, "no problem for routed"),
        ({"routed": [{"rows": 3}]}, r"no problem for routed[^`]*sizes: t"),
        ({"routed": [{"t": 2}, {}]}, "no problem for routed"),
    ],
)
def test_prewarm_calls_nothing_unless_all_problems_are_known(kernel, shapes, said):
    source = RIGHT.replace("def routed(x, ids, w):\n", "def routed(x, ids, w):\n    raise AssertionError\n")
    bundle = kernel_loader.load_kernel(kernel(source))
    with pytest.raises(RequestError, match=said):
        prewarm(bundle, shapes, device="cpu")
    with pytest.raises(RequestError, match="was not loaded"):
        prewarm(object(), {})


def test_draws_are_the_same_for_a_seed():
    for make in (
        lambda d: d.normal(3, 4, dtype=torch.bfloat16, scale=2),
        lambda d: d.uniform(5, low=-1, high=1),
        lambda d: d.integers(2, 5, 7),
        lambda d: d.permutation(9),
        lambda d: d.strided(d.normal(3, 4)),
    ):
        assert torch.equal(make(Draw("cpu", 3)), make(Draw("cpu", 3)))
        assert not torch.equal(make(Draw("cpu", 3)), make(Draw("cpu", 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5,), (), (0, 3), (1, 1)])
def test_a_strided_draw_has_the_values_and_other_strides(shape, dtype):
    draw = Draw("cpu")
    tensor = draw.normal(*shape).to(dtype)
    strided = draw.strided(tensor)
    assert torch.equal(strided.float(), tensor.float())
    assert strided.dtype == dtype
    assert strided.is_contiguous() == (tensor.numel() < 2)


def test_structures_are_walked_in_order():
    class Pair(NamedTuple):
        a: object
        b: object

    a, b, c = (torch.tensor(float(i)) for i in range(3))
    value = {"x": [a, (b, 3)], "y": Pair(c, None)}
    assert [id(t) for t in tensors_in(value)] == [id(t) for t in (a, b, c)]
    changed = map_tensors(value, lambda tensor: tensor + 1)
    assert isinstance(changed["y"], Pair)
    assert [float(t) for t in tensors_in(changed)] == [1, 2, 3]
    inputs = Inputs(a, [b], k=c)
    assert [id(t) for t in tensors_in(inputs)] == [id(t) for t in (a, b, c)]
    assert inputs[0] is a
    assert inputs["k"] is c


def scaled_rows(x, scale):
    return x.double() * scale.double()[:, None]


NAMED_ENTRY = Entry(
    entrypoint="routed",
    formula=scaled_rows,
    gradients=("scale",),
    tolerance=Tolerance(row=1e-5),
    cases=(Case("rows", lambda draw: Inputs(draw.normal(3, 4), draw.uniform(3))),),
)
NAMED_GRID = (NAMED_ENTRY,)
ROWS = "def routed(x, scale):\n    return x * scale[:, None]\n"


@pytest.fixture
def named(kernel, monkeypatch):
    """Check the rows kernel, its entry changed, in this process."""

    def with_entry(source: str = ROWS, modes: Any = ("eager", "backward"), only: Any = (), **changed: Any) -> Any:
        monkeypatch.setattr(sys.modules[__name__], "NAMED_GRID", (dataclasses.replace(NAMED_ENTRY, **changed),))
        name = kernel(source, grid="tests.conformance.test_check:NAMED_GRID")
        return check(name, modes=modes, only=only, processes=0)

    return with_entry


@pytest.mark.parametrize("gradients", [("scale",), "scale", ("x", "scale"), (1, "x"), 1])
def test_a_parameter_that_is_given_by_position_gets_its_gradient_by_name(named, gradients):
    assert named(gradients=gradients).failed == ()
    checked = named(ROWS.replace("scale[", "scale.detach()["), gradients=gradients)
    assert {finding.mode for finding in checked.failed} == {"backward"}


def test_a_parameter_has_the_name_that_the_entrypoint_or_the_formula_gives_it(named):
    source = "def routed(x, s):\n    return x * s.detach()[:, None]\n"
    for name in ("s", "scale"):
        assert {finding.mode for finding in named(source, gradients=name).failed} == {"backward"}


@pytest.mark.parametrize("key", ["xx", 7, "7", "scale.weight", "x.weight"])
@pytest.mark.parametrize("of", ["gradients", "mutates"])
def test_what_selects_no_tensor_is_refused(named, key, of):
    with pytest.raises(RequestError, match=rf"{of} of routed names the argument {key!r}, and no case has a tensor"):
        named(**{of: (key,)})


def test_what_selects_no_floats_gets_no_gradient(named):
    case = Case("rows", lambda draw: Inputs(draw.normal(3, 4), draw.integers(1, 3, 3)))
    with pytest.raises(RequestError, match="'scale', and no case has a tensor of floats"):
        named(cases=[case])


def test_an_argument_that_is_written_may_be_named_by_its_parameter(named):
    source = "def routed(x, scale):\n    x.mul_(scale[:, None])\n"
    checked = named(
        source, modes="eager", gradients=(), mutates="x", formula=lambda x, scale: (None, x * scale[:, None])
    )
    assert checked.failed == ()


def test_a_case_without_an_argument_that_gets_a_gradient_is_not_called_passed(named):
    plain = Case("plain", lambda draw: Inputs(draw.normal(3, 4)))
    source = "def routed(x, scale=None):\n    return x if scale is None else x * scale[:, None]\n"
    checked = named(
        source,
        modes="backward",
        cases=[plain, *NAMED_ENTRY.cases],
        formula=lambda x, scale=None: x.double() if scale is None else scaled_rows(x, scale),
    )
    assert {(f.case, f.status) for f in checked.findings} == {("plain", "skipped"), ("rows", "passed")}


def test_a_check_that_would_look_at_nothing_is_refused(named):
    with pytest.raises(RequestError, match="no case of routed"):
        named(cases=())
    with pytest.raises(RequestError, match="nothing would be looked at"):
        named(modes=())


def test_one_text_is_one_name(named):
    checked = named(modes="eager", only="routed/rows")
    assert {(finding.mode, finding.case) for finding in checked.findings} == {("eager", "rows")}
    with pytest.raises(RequestError, match="modes=None"):
        named(modes=None)
    with pytest.raises(RequestError, match="the grid has no entrypoint 'nonsense'"):
        bench("routed", only="nonsense")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tolerance": Tolerance("x")}, "a Tolerance of numbers"),
        ({"tolerance": Tolerance(-1)}, "a Tolerance of numbers"),
        ({"tolerance": 1e-2}, r"tolerance=0\.01; it is a Tolerance"),
        ({"tolerance": None}, "tolerance=None; it is a Tolerance"),
        ({"gradient_tolerance": 1}, "gradient_tolerance=1; it is a Tolerance"),
        ({"cases": [Case("x", "y")]}, "it is Case\\(name, function"),
        ({"cases": Case("x", Inputs)}, "no list of Case"),
        ({"cases": 3}, "no list of Case"),
        ({"cases": ["x"]}, "the case 'x'"),
        ({"formula": None}, "formula=None"),
        ({"gradients": (1.5,)}, "the argument 1.5"),
        (
            {"cases": [Case("rows", lambda draw: (draw.normal(2), 3))]},
            "routed/rows draws a tuple. A case returns Inputs",
        ),
    ],
)
def test_what_is_wrong_in_a_grid_is_said_before_anything_is_called(named, changed, said):
    with pytest.raises(RequestError, match=said):
        named(**changed)


def test_a_mistake_in_a_case_is_a_finding_as_before(named):
    checked = named(cases=[Case("rows", lambda draw: draw.nonsense())], modes="eager")
    assert {finding.status for finding in checked.failed} == {"failed"}


def test_cases_are_listed_where_the_entrypoint_is_known(named):
    with pytest.raises(RequestError, match=r"no 'routed/none'. The cases of that entrypoint are 'rows'\."):
        named(only="routed/none")


@pytest.mark.parametrize("shapes", [[], 3, "routed"])
def test_prewarm_wants_a_table(kernel, shapes):
    bundle = kernel_loader.load_kernel(kernel(RIGHT))
    with pytest.raises(RequestError, match="a table of entrypoint -> problems"):
        prewarm(bundle, shapes, device="cpu")


def test_a_short_deadline_is_told_as_it_was_given(kernel):
    status, out, _ = run("check", kernel(RIGHT), "--mode", "eager", "--only", "routed/a row", "--deadline", "0.0001")
    assert (status, "it was not done after 0.0001 s" in out) == (1, True)
