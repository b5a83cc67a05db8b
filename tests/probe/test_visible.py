"""*_VISIBLE_DEVICES, read as CUDA and HIP read them."""

import pytest

from kernel_loader.probe.visible import visible

UUIDS = ("GPU-8f2a", "GPU-8f3b", "GPU-c001")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("none", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("0,-1,1", [0]),
        ("0,3,1", [0]),
        ("0,,1", [0]),
        ("3", []),
        ("1,1", []),
        ("GPU-c001", [2]),
        ("GPU-8f3b,GPU-8f2a", [1, 0]),
        ("GPU-c", [2]),
        ("GPU-C001", [2]),
        ("gpu-c001", [2]),
        ("GPU-8f", []),
        ("GPU-8f,GPU-c001", []),
        ("GPU-ffff", []),
        ("GPU-8f2a,1", [0, 1]),
        ("MIG-5c8d", [0, 1, 2]),
        ("MIG-GPU-8f2a/1/0", [0, 1, 2]),
        ("GPU-8f2a,MIG-5c8d", [0, 1, 2]),
    ],
)
def test_the_devices_that_a_value_leaves_visible(value: str | None, shown: list[int]) -> None:
    assert list(visible(UUIDS, value)) == shown


@pytest.mark.parametrize("value", [None, "", "0", "GPU-8f2a", "MIG-1"])
def test_a_machine_without_devices_shows_none(value: str | None) -> None:
    assert list(visible((), value)) == []
