"""Grids of the kernels that ship: what they name is there, draws repeat, and every reference passes its own.

Nothing here knows a kernel: a manifest that names a grid is all that it takes.
"""

import inspect
import operator
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_loader
from kernel_loader.conformance import Draw, Inputs
from kernel_loader.conformance.grid import tensors_in
from kernel_loader.conformance.plan import case_id, grid_of
from kernel_loader.conformance.runner import check

PEAKS = {"fp8", "bf16", "fp16", "fp32"}
MANIFESTS = Path(__file__).parents[2] / "manifests"
KERNELS = sorted(path.stem for path in MANIFESTS.glob("*.toml") if "grid" in tomllib.loads(path.read_text()))


def every_case(grid):
    return [(entry, case) for entry in grid for case in entry.cases]


def content(inputs: Inputs) -> list:
    """Shape, strides, dtype and bytes of each tensor, NaN counting like any other number."""
    return [
        (tuple(t.shape), t.stride(), t.dtype, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for t in tensors_in(inputs)
    ]


def test_every_kernel_that_ships_with_a_reference_has_a_grid():
    manifests = {path.stem: tomllib.loads(path.read_text()) for path in MANIFESTS.glob("*.toml")}
    # A namespace of a grid holds tensors, and these layers call modules of what they are made of: tests/registry has
    # them made by their layouts, and holds them against formulas.
    made_of_modules = {"qkv_packed", "rmsnorm_mlp"}
    assert {*KERNELS, *made_of_modules} == {name for name, manifest in manifests.items() if "reference" in manifest}


@pytest.fixture(params=KERNELS)
def kernel(request, cpu_machine, monkeypatch):
    monkeypatch.setenv("KERNEL_LOADER_DISABLE", request.param)
    return request.param


@pytest.fixture
def grid(kernel):
    return grid_of(kernel)


def test_every_entrypoint_is_in_the_bundle(kernel, grid):
    bundle = kernel_loader.load_kernel(kernel)
    for entry in grid:
        assert callable(operator.attrgetter(entry.entrypoint)(bundle))


def test_cases_are_told_apart_by_their_names(grid):
    names = Counter((entry.entrypoint, case.name) for entry, case in every_case(grid))
    assert [name for name, count in names.items() if count > 1] == []


def test_inputs_are_the_same_for_a_seed_and_others_for_another(grid):
    differ = 0
    for entry, case in every_case(grid):
        first, second, other = (content(case.make(Draw("cpu", seed))) for seed in (0, 0, 1))
        assert first == second, f"{entry.entrypoint}/{case.name}"
        differ += first != other
    assert differ > len(every_case(grid)) / 2


def test_arguments_with_a_gradient_are_float_tensors(grid):
    for entry, case in every_case(grid):
        inputs = case.make(Draw("cpu"))
        for key in entry.gradients if "backward" in case.modes else ():
            assert isinstance(inputs[key], Tensor), f"{entry.entrypoint}/{case.name}: {key}"
            assert inputs[key].dtype.is_floating_point
        for key in entry.mutates:
            assert tensors_in(inputs[key])


def test_every_formula_runs_in_float64_and_leaves_its_inputs_alone(grid):
    for entry, case in every_case(grid):
        inputs = case.make(Draw("cpu"))
        before = content(inputs)
        results = tensors_in(inputs.call(entry.formula))
        assert results or entry.mutates
        assert all(result.dtype == torch.float64 for result in results if result.dtype.is_floating_point)
        assert content(inputs) == before, f"{entry.entrypoint}/{case.name}"


def test_every_size_is_one_of_the_problem_and_has_work(grid):
    for entry in grid:
        assert (entry.problem is None) == (not entry.sizes)
        for sizes in entry.sizes:
            inspect.signature(entry.problem).bind(None, **sizes)
            if entry.work is not None:
                work = entry.work(**sizes)
                assert work.flops > 0
                assert work.nbytes > 0
                assert work.peak in PEAKS


@pytest.mark.parametrize("mode", ["eager", "compile", "backward"])
def test_the_reference_passes(kernel, grid, mode):
    # Compilation takes its time for each case. What is compiled is one op or a few in most of them.
    some = {case_id(entry, case) for entry in grid for case in entry.cases[:3]} if mode == "compile" else ()
    checked = check(kernel, device="cpu", modes=(mode,), processes=0, only=some)
    assert checked.against == "formulas"
    assert [str(finding) for finding in checked.failed] == []
