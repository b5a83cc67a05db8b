"""When is something the same?"""

import math
import re

import pytest
import torch

from kernel_loader.conformance import Tolerance
from kernel_loader.conformance.compare import compare

INF, NAN = float("inf"), float("nan")


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def differs(got, want, *, tolerance=None, dtypes=FLOATS):
    return compare(got, want, tolerance or Tolerance(), dtypes)


def test_equal_things_are_equal():
    x = torch.tensor([1.0, 0.0, -2.0, NAN, INF, -INF])
    assert differs(x, x.double()) == (0.0, "")
    assert differs((x, [x, 3]), (x, [x, 3])) == (0.0, "")
    assert differs(torch.empty(0, 4), torch.empty(0, 4).double()) == (0.0, "")
    assert differs(torch.tensor(True), torch.tensor(True)) == (0.0, "")
    assert differs(7, 7) == (0.0, "")
    assert differs([x, (None, {"a": x})], (x, [None, {"a": x}])) == (0.0, "")
    assert differs(torch.tensor([INF]).half(), torch.tensor([7e4])) == (0.0, "")  # more than float16 holds


@pytest.mark.parametrize(
    ("got", "want", "said"),
    [
        (torch.zeros(2), torch.zeros(3), r"shape \(2,\) came, \(3,\) is right"),
        ((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), "1 items came, 2 are right"),
        ((torch.zeros(2),), torch.zeros(2), "a tuple came, a tensor is right"),
        (torch.zeros(2), (torch.zeros(2),), "a tensor came, a tuple is right"),
        ((torch.zeros(2), 3), (torch.zeros(2), 4), r"item 1: 3 came, 4 is right"),
        ((torch.zeros(2), None), (torch.zeros(2), torch.zeros(2)), r"item 1: None came, a tensor is right"),
        ([torch.zeros(2), None, "more"], [torch.zeros(2)], "3 items came, 1 are right"),
        ({"a": 1}, {"b": 1}, "1 items came, 1 are right"),
        ({"a": [1]}, {"a": [2]}, r"item 'a'\[0\]: 1 came, 2 is right"),
        (torch.tensor([3], dtype=torch.uint64), torch.tensor([4]), "3 came, 4 is right"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"1 of 2 elements differ, first at \[1\]: 2 came, 3 is right"),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, 2.0]), r"first at \[1\]: nan came, 2.0 is right"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, NAN]), r"first at \[1\]: 2.0 came, nan is right"),
        (torch.tensor([INF]), torch.tensor([-INF]), "inf came, -inf is right"),
        (torch.tensor([3e38]), torch.tensor([INF]), "came, inf is right"),
        (torch.tensor([INF]).half(), torch.tensor([7e3]), "inf came, 7000.0 is right"),
        (torch.zeros(2, 3), torch.ones(2, 3), "6 of 6 elements, in 2 rows differ"),
        ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2), torch.ones(2)), "item 1: 2 of 2 elements"),
        (6, 7, "6 came, 7 is right"),
        (torch.tensor(1.0), torch.tensor(2.0), r"first at \[\]: 1.0 came, 2.0 is right"),
    ],
)
def test_what_differs_is_said(got, want, said):
    found = differs(got, want)
    assert found.worst > 1
    assert re.search(said, found.detail), found.detail


def test_dtypes_count_where_they_should():
    assert differs(torch.zeros(2), torch.zeros(2).bfloat16()).detail == ""
    for dtypes in (None, (), (torch.bfloat16,)):
        found = differs(torch.zeros(2), torch.zeros(2).bfloat16(), dtypes=dtypes)
        assert "torch.float32 came, torch.bfloat16 is right" in found.detail
    found = differs(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), dtypes=None)
    assert "torch.int32 came, torch.int64 is right" in found.detail


def test_an_element_may_be_two_units_off_by_default():
    want = torch.tensor([1.0], dtype=torch.float64)
    eps = torch.finfo(torch.bfloat16).eps
    assert differs(torch.tensor([1 + 2 * eps]).bfloat16(), want).detail == ""
    assert differs(torch.tensor([1 + 3 * eps]).bfloat16(), want).detail != ""


def test_a_sum_may_be_off_by_a_share_of_its_row():
    want = torch.tensor([[100.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    tolerance = Tolerance(row=0.01)
    assert differs((want + torch.tensor([[0.0, 0.7], [0.0, 0.0]])).float(), want, tolerance=tolerance).detail == ""
    found = differs((want + torch.tensor([[0.0, 0.0], [0.0, 0.7]])).float(), want, tolerance=tolerance)
    assert "first at [1, 1]" in found.detail
    assert found.worst == pytest.approx(0.7 / (0.01 * math.sqrt(0.5)), rel=1e-3)


def test_a_row_of_zeros_must_be_zeros():
    want = torch.zeros(1, 4, dtype=torch.float64)
    assert differs(torch.full((1, 4), 1e-30), want, tolerance=Tolerance(row=0.5)).detail != ""
    assert differs(-torch.zeros(1, 4), want).detail == ""
