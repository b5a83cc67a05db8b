"""AMD devices from trees as the amdkfd driver shows them."""

from pathlib import Path

import pytest

from kernel_loader.host import HostDevice
from kernel_loader.probe import amd

CPU = "cpu_cores_count 96\nsimd_count 0\nmem_banks_count 1\ngfx_target_version 0\nunique_id 0\n"


def gpu(target: int, unique_id: int = 0) -> str:
    return (
        "cpu_cores_count 0\nsimd_count 1216\nmem_banks_count 1\nwave_front_size 64\n"
        f"gfx_target_version {target}\nvendor_id 4098\ndevice_id 29857\nunique_id {unique_id}\nnum_xcc 8\n"
    )


def tree(root: Path, *nodes: str, names: tuple[str, ...] = ()) -> Path:
    for number, properties in enumerate(nodes):
        (root / str(number)).mkdir(parents=True)
        (root / str(number) / "properties").write_text(properties)
        if names:
            (root / str(number) / "name").write_text(f"{names[number]}\n")
    return root


def archs(root: Path, **environ: str) -> list[str]:
    fact = amd.devices(environ, root)
    assert fact.known
    return [device.arch for device in fact.value]


@pytest.mark.parametrize(
    ("target", "name"),
    [(90010, "gfx90a"), (90402, "gfx942"), (90006, "gfx906"), (90008, "gfx908"), (90500, "gfx950"),
     (100300, "gfx1030"), (110000, "gfx1100"), (110501, "gfx1151"), (120001, "gfx1201"), (80003, "gfx803")],
)  # fmt: skip
def test_a_target_version_has_the_name_that_compilers_use(target: int, name: str) -> None:
    assert amd.gfx_name(target) == name


def test_the_cpus_of_a_topology_are_no_devices(tmp_path) -> None:
    tree(tmp_path, CPU, CPU, gpu(90402), gpu(90402))
    assert archs(tmp_path) == ["gfx942", "gfx942"]


def test_a_device_has_the_name_that_the_driver_gives_it(tmp_path) -> None:
    tree(tmp_path, CPU, gpu(90010), names=("", "aldebaran"))
    assert amd.devices({}, tmp_path).value == (HostDevice(arch="gfx90a", name="aldebaran"),)


def test_nodes_are_counted_as_numbers(tmp_path) -> None:
    tree(tmp_path, CPU, *[gpu(90402)] * 8, gpu(90010), gpu(110000))
    assert archs(tmp_path, HIP_VISIBLE_DEVICES="8,9") == ["gfx90a", "gfx1100"]


def test_a_machine_without_the_driver_is_known_to_have_no_devices(tmp_path) -> None:
    fact = amd.devices({}, tmp_path / "nodes")
    assert (fact.value, fact.known) == ((), True)


@pytest.fixture
def three(tmp_path) -> Path:
    """One device each of three architectures, after a CPU."""
    return tree(tmp_path, CPU, gpu(90010, 0xAA01), gpu(90402, 0xBB02), gpu(110000, 0x1F2E3D4C5B6A7988))


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        ({}, ["gfx90a", "gfx942", "gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "2,0"}, ["gfx1100", "gfx90a"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["gfx90a"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "-1"}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000bb02"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000BB02"}, ["gfx942"]),
        ({"HIP_VISIBLE_DEVICES": "GPU-1f2e3d4c5b6a7988"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1f2e"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-0000"}, []),
    ],
)
def test_variables_hide_devices_as_the_runtimes_do(three, environ: dict[str, str], shown: list[str]) -> None:
    assert archs(three, **environ) == shown


def test_a_device_outside_the_container_is_not_there(open_path, unprivileged) -> None:
    # The driver answers EPERM for the node of a device that the cgroup does not allow.
    tree(open_path, CPU, gpu(90402), gpu(90010))
    (open_path / "1" / "properties").chmod(0)
    with unprivileged():
        assert archs(open_path) == ["gfx90a"]


def test_a_tree_that_cannot_be_understood_is_an_error_and_no_empty_list(tmp_path) -> None:
    (tmp_path / "0").mkdir()
    with pytest.raises(OSError, match="properties"):
        amd.devices({}, tmp_path)
