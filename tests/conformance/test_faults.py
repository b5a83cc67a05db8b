"""A kernel that is right passes; each way of being wrong is found, and said."""

import multiprocessing
import time

import pytest

from kernel_loader.conformance.runner import check
from tests.conformance.routed import ENDS_THE_PROCESS, FAULTS, HANGS, RIGHT, broken

# What would write into memory of this process that is not guarded.
IN_ANOTHER_PROCESS = {"off-by-one store", "store before the start"}


def test_a_right_kernel_passes(kernel):
    checked = check(kernel(RIGHT), processes=0)
    assert checked.failed == ()
    assert checked.against == "formulas"
    passed = [(f.case, f.mode, f.probe) for f in checked.findings if f.status == "passed"]
    cases = ["no row", "a row", "rows", "sentinels", "strided"]
    probes = {"eager": ["value", "memory", "again"], "backward": ["value", "expanded", "sliced", "memory", "again"]}
    assert passed == [(case, mode, probe) for case in cases for mode in probes for probe in probes[mode]]
    reasons = {(f.mode, f.probe): f.detail for f in checked.findings if f.status == "skipped"}
    assert reasons == {
        ("eager", "reference"): "the formula is what the build is held against",
        ("eager", "stream"): "streams are of CUDA and ROCm devices",
        ("eager", "device"): "there is no device beside the CPU",
        ("compile", "value"): "the rows of an expert are counted on the host",
        ("graph", "value"): "CUDA graphs are of CUDA and ROCm devices",
    }


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_said(kernel, fault):
    right, wrong, said = FAULTS[fault]
    name = kernel(broken(right, wrong))
    modes = ("backward",) if "gradient" in fault else ("eager",)
    checked = check(name, modes=modes, processes=int(fault in IN_ANOTHER_PROCESS))
    assert checked.failed
    assert any(said in finding.detail for finding in checked.failed), checked.failed


def test_what_is_right_in_a_faulty_kernel_passes(kernel):
    """A fault is found where it is, and nowhere else."""
    checked = check(kernel(broken(*FAULTS["clamped sentinels"][:2])), modes=("eager",), processes=0)
    assert {finding.case for finding in checked.failed} == {"sentinels", "strided"}
    checked = check(kernel(broken(*FAULTS["uninitialised rows"][:2])), modes=("eager",), processes=0)
    assert {finding.probe for finding in checked.failed} >= {"memory"}


def test_a_kernel_that_ends_the_process_is_a_finding_and_the_rest_goes_on(kernel):
    checked = check(kernel(broken(*ENDS_THE_PROCESS)), modes=("eager",))
    assert [(f.case, f.probe, f.detail) for f in checked.failed] == [
        ("a row", probe, "the process ended (signal 6)") for probe in ("value", "memory", "again")
    ]
    passed = [f.case for f in checked.findings if f.probe == "memory" and f.status == "passed"]
    assert passed == ["no row", "rows", "sentinels", "strided"]


def test_several_processes_find_the_same_in_the_same_order(kernel):
    name = kernel(broken(*FAULTS["clamped sentinels"][:2]))
    alone, together = check(name, modes=("eager",)), check(name, modes=("eager",), processes=3)
    assert [f._replace(detail="", worst=None) for f in together.findings] == [
        f._replace(detail="", worst=None) for f in alone.findings
    ]
    assert {finding.case for finding in together.failed} == {"sentinels", "strided"}


def test_a_caller_that_stops_leaves_no_process(kernel):
    class EnoughError(Exception):
        pass

    def stop(finding):
        raise EnoughError

    before = set(multiprocessing.active_children())
    with pytest.raises(EnoughError):
        check(kernel(RIGHT), modes=("eager",), processes=2, watch=stop)
    for _ in range(100):
        if not set(multiprocessing.active_children()) - before:
            return
        time.sleep(0.1)
    pytest.fail("a process is still there after 10 s")


def test_a_kernel_that_hangs_is_a_finding_and_the_rest_goes_on(kernel):
    name = kernel(broken(*HANGS))
    checked = check(name, modes=("eager",), only=["routed/a row", "routed/rows"], deadline=4)
    assert [(f.case, f.detail) for f in checked.failed] == [("a row", "it was not done after 4 s")]
    assert any(f.case == "rows" and f.status == "passed" for f in checked.findings)
