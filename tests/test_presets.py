"""Hosts that have a name: what they assume, what they leave open, and that they choose as the machine would."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kernel_loader.cli import main
from kernel_loader.errors import HostError
from kernel_loader.host import Host, HostDevice, is_arch
from kernel_loader.loader import KernelLoader
from kernel_loader.presets import ACCELERATORS, ASSUMES, preset
from kernel_loader.settings import Settings
from tests.builds import write_build
from tests.hosts import HOSTS
from tests.repositories import BY_KERNEL, Published

ROOT = Path(__file__).parent.parent

# A preset, and the machine of the catalogue's table that it stands for, but for the release of torch.
STANDS_FOR = {
    "h200-cu130-torch2.11": "H200",
    "x86_64-cpu-torch2.13": "cpu",
    "aarch64-cpu-torch2.13": "cpu-arm",
    "t4-cu126-torch2.12": "T4",
    "a100-cu126-torch2.13": "A100",
    "h200-cu130-torch2.13": "H200",
    "b200-cu132-torch2.13": "B200",
    "gb10-cu130-torch2.13": "GB10",
    "mi250x-rocm71-torch2.12": "MI250",
    "mi300x-rocm72-torch2.13": "MI300",
    "max1550-xpu20260-torch2.13": "PVC",
    "mac-metal-torch2.13": "Mac",
}
PACKAGES = {"triton": "3.7.0", "einops": "0.8.1", "apache-tvm-ffi": "0.1.9", "nvidia-cutlass-dsl": "4.5.0"}


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_preset_is_the_machine_that_its_name_says():
    host = preset("h200-cu130-torch2.11")
    assert host == Host(
        os="linux",
        cpu="x86_64",
        glibc="2.35",
        python="3.12",
        torch="2.11.0+cu130",
        cxx11_abi=True,
        cuda="13.0",
        driver="580",
        devices=(HostDevice("9.0", "NVIDIA H200"),),
        unknown=frozenset({"packages", "tvm_ffi", "cuda_toolkit"}),
    )
    assert host.torch_is_release
    known = {field.name for field in fields(Host)} - host.unknown - {"unknown", "provenance"}
    assert host.provenance == dict.fromkeys(known, "preset:h200-cu130-torch2.11")


def test_documents_name_presets_that_are_there():
    text = "".join((ROOT / file).read_text() for file in ("README.md", "docs/hosts.md"))
    named = set(re.findall(r"[a-z0-9_]+-[a-z]+[0-9.]*-torch\d\.\d+", text))
    assert len(named) > 5
    for name in named:
        assert preset(name).torch.startswith(name.partition("-torch")[2])


@pytest.mark.parametrize("name", STANDS_FOR)
def test_a_preset_survives_its_description(name):
    assert Host.from_json(preset(name).to_json()) == preset(name)


@pytest.mark.parametrize(
    ("name", "torch", "abi"),
    [
        ("a100-cu124-torch2.6", "2.6.0+cu124", False),
        ("a100-cu126-torch2.6", "2.6.0+cu126", True),
        ("gh200-cu124-torch2.6", "2.6.0+cu124", True),
        ("mi300x-rocm62-torch2.6", "2.6.0+rocm6.2", True),
        ("x86_64-cpu-torch2.6", "2.6.0+cpu", False),
        ("a100-cu124-torch2.7", "2.7.0+cu124", True),
        ("h200-cu12.8-torch2.10", "2.10.0+cu128", True),
        ("H200-cu128-torch2.10", "2.10.0+cu128", True),
        ("mi300x-rocm714-torch2.12", "2.12.0+rocm7.14", True),
        ("mi300x-rocm7.14-torch2.12", "2.12.0+rocm7.14", True),
        ("b580-xpu2025.2-torch2.9", "2.9.0+xpu", True),
        ("orin-cu126-torch2.6", "2.6.0+cu126", True),
        ("mac-cpu-torch2.11", "2.11.0", None),
        ("mac-metal-torch2.11", "2.11.0", None),
        ("windows-cpu-torch2.11", "2.11.0+cpu", None),
    ],
)
def test_torch_is_that_of_the_wheels(name, torch, abi):
    host = preset(name)
    assert (host.torch, host.cxx11_abi) == (torch, abi)
    assert host.torch_is_release


@pytest.mark.parametrize(
    ("name", "os", "glibc", "macos", "driver"),
    [
        ("l4-cu118-torch2.6", "linux", "2.35", None, "450.80.02"),
        ("gh200-cu129-torch2.9", "linux", "2.35", None, "525.60.13"),
        ("mi355x-rocm72-torch2.11", "linux", "2.35", None, None),
        ("aarch64-cpu-torch2.11", "linux", "2.35", None, None),
        ("mac-metal-torch2.11", "darwin", None, "26.0", None),
        ("windows-cpu-torch2.11", "windows", None, None, None),
    ],
)
def test_the_system_is_that_of_most_such_machines(name, os, glibc, macos, driver):
    host = preset(name)
    assert (host.os, host.glibc, host.macos, host.driver) == (os, glibc, macos, driver)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h200", "a preset is <accelerator>"),
        ("h200-cu130", "a preset is <accelerator>"),
        ("h200-cu130-torch2", "a preset is <accelerator>"),
        ("h200-cu130-2.11", "a preset is <accelerator>"),
        ("h200-cu130-torch2.011", "a preset is <accelerator>"),
        ("h201-cu130-torch2.11", "near it are h20, h200"),
        ("quantum-cu130-torch2.11", "there are v100, t4"),
        ("h200-rocm72-torch2.11", "computes on cuda"),
        ("h200-cpu-torch2.11", "computes on cuda"),
        ("mac-cu130-torch2.11", "computes on metal or cpu"),
        ("h200-cu1-torch2.11", "is no backend"),
        ("h200-cudaa130-torch2.11", "is no backend"),
        ("h200-cu1.28-torch2.11", "'cu1.28' is no backend"),
        ("mi300x-rocm6.2.4-torch2.6", "'rocm6.2.4' is no backend"),
        ("x86_64-cpu.-torch2.11", "is no backend"),
        ("b200-cu126-torch2.11", "needs CUDA 12.8 or later"),
        ("thor-cu129-torch2.11", "NVIDIA Jetson Thor needs CUDA 13.0 or later"),
        ("mi355x-rocm63-torch2.7", "AMD Instinct MI355X needs ROCm 6.4 or later"),
        ("v100-cu130-torch2.11", "CUDA 13.0 and later have nothing for NVIDIA V100"),
        ("h200-cu990-torch2.11", "CUDA 99.0 is not known here"),
        ("h200-cu1210-torch2.11", "CUDA 12.10 is not known here"),
        ("mi300x-rocm624-torch2.6", "ROCm 6.24 is not known here"),
        ("h200-cu130-torch1.13", "older than any that is supported"),
    ],
)
def test_what_cannot_be_is_refused(name, said):
    with pytest.raises(HostError, match=said) as caught:
        preset(name)
    assert f"preset:{name}" in str(caught.value)
    assert "host --presets" in caught.value.remedy


def test_every_accelerator_has_a_host_for_each_of_its_backends():
    words = {"cuda": "cu130", "rocm": "rocm72", "xpu": "xpu20260"}
    for name, accelerator in ACCELERATORS.items():
        assert accelerator.arch is None or is_arch(accelerator.arch)
        for backend in accelerator.backends:
            word = "cu128" if name == "v100" else words.get(backend, backend)
            host = preset(f"{name}-{word}-torch2.13")
            assert (host.backend.kind, host.cpu, host.os) == (backend, accelerator.cpu, accelerator.os)
            assert [device.arch for device in host.devices] == [accelerator.arch] * (accelerator.arch is not None)


@pytest.mark.parametrize(("name", "machine"), STANDS_FOR.items())
def test_a_preset_takes_what_a_machine_with_the_packages_takes(name, machine):
    toolkit = HOSTS[machine].cuda if machine in ("T4", "A100", "H200", "B200", "GB10") else None
    known = {
        "packages": PACKAGES | dict(HOSTS[machine].packages) | {"transformers": "5.0.0"},
        "tvm_ffi": "0.1.9",
        "cuda_toolkit": toolkit,
    }
    expected = _taken(replace(HOSTS[machine], torch=preset(name).torch, **known))
    assert expected.keys() >= BY_KERNEL.keys()
    assert any(taken and taken[0] for taken in expected.values())  # published ones are among them
    assert _taken(replace(preset(name), unknown=frozenset(), **known)) == expected
    found = _taken(preset(name))
    differ = {kernel: found[kernel] for kernel in expected if found[kernel] != expected[kernel]}
    # Embedded builds in Triton, which is in doubt, give way to their references. None of either is fetched.
    embedded = {kernel for kernel, taken in expected.items() if taken == (None, "torch-cuda")}
    assert differ == dict.fromkeys(embedded, (None, "torch-universal"))


def _taken(host):
    """Of each kernel, the repository (None where it is embedded) and the name of the build that a host takes."""
    loader = KernelLoader(Settings(), host, (Published(),))
    resolutions = {kernel: loader.resolve(kernel) for kernel in loader.catalog.names()}
    return {
        kernel: (None if taken is resolution.reference else taken.repo, taken.chosen.name)
        if (taken := resolution.taken)
        else None
        for kernel, resolution in resolutions.items()
    }


# --- on the command line ------------------------------------------------------------------------------------------


def test_a_preset_becomes_a_description_that_can_be_corrected(tmp_path):
    made = run("host", "--host", "preset:h200-cu130-torch2.11", "--json")
    facts = json.loads(made.output)
    assert facts["unknown"] == ["cuda_toolkit", "packages", "tvm_ffi"]
    (tmp_path / "h200.json").write_text(made.output.replace('"580"', '"590"'))
    shown = run("host", "--host", tmp_path / "h200.json").output
    assert "590" in shown
    assert "preset:h200-cu130-torch2.11" in shown


def test_presets_are_listed():
    listed = run("host", "--presets").output
    assert all(name in listed for name in ACCELERATORS)
    assert ASSUMES in listed
    told = json.loads(run("host", "--presets", "--json").output)
    assert {name: row["arch"] for name, row in told["accelerators"].items()} == {
        name: accelerator.arch for name, accelerator in ACCELERATORS.items()
    }
    assert told["assumes"] == ASSUMES


def test_presets_are_not_listed_instead_of_a_host_that_is_asked_for():
    done = run("host", "--presets", "--host", "preset:h200-cu130-torch2.11")
    assert done.exit_code == 2
    assert "leave it out" in done.output


def test_every_command_that_takes_a_file_takes_a_preset(workshop, monkeypatch):
    workshop.simple("my_kernel", backends=["cuda"], reference=None)
    monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(workshop.manifests))
    monkeypatch.setenv("KERNEL_LOADER_LOCAL", ":".join(f"{repo}={path}" for repo, path in workshop.local.items()))
    for arguments in (("explain", "my_kernel"), ("prefetch", "my_kernel"), ("list",)):
        done = run(*arguments, "--host", "preset:h200-cu130-torch2.11")
        assert done.exit_code == 0, done.output
        assert "torch-universal" in done.output


def test_list_answers_for_the_machine_that_is_named(workshop, monkeypatch):
    write_build(workshop.kernel("for_rocm"), "torch-rocm")
    monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(workshop.manifests))
    monkeypatch.setenv("KERNEL_LOADER_LOCAL", ":".join(f"{repo}={path}" for repo, path in workshop.local.items()))
    builds = {}
    for name in ("mi300x-rocm72-torch2.11", "h200-cu130-torch2.11"):
        listed = run("list", "--host", f"preset:{name}", "--json")
        builds[name] = {row["name"]: row["build"] for row in json.loads(listed.output)["kernels"]}["for_rocm"]
    assert builds == {"mi300x-rocm72-torch2.11": "torch-rocm", "h200-cu130-torch2.11": "none"}
    assert "    there: torch-rocm\n" in run("list", "--host", "preset:mi300x-rocm72-torch2.11").output


@pytest.mark.parametrize("command", [("host",), ("list",), ("explain", "rotary"), ("prefetch", "rotary"), ("doctor",)])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("preset:h201-cu130-torch2.11", "near it are h20, h200"),
        ("h200-cu130-torch2.11", "begins with preset:"),
        ("no-such-file", "'no-such-file' does not exist"),
    ],
)
def test_what_is_neither_file_nor_preset_is_wrong_use(command, given, said):
    done = run(*command, "--host", given)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    "command", [("host",), ("host", "--json"), ("host", "--presets"), ("list",), ("explain", "moe_experts")]
)
def test_presets_need_no_torch(run_python, tmp_path, command):
    host = () if "--presets" in command else ("--host", "preset:h200-cu130-torch2.11")
    code = f"import sys; sys.modules['torch'] = None\nfrom kernel_loader.cli import main\nmain({[*command, *host]!r})"
    out = run_python(code, env={"KERNEL_LOADER_OFFLINE": "1", "KERNEL_LOADER_CACHE": str(tmp_path)})
    assert {"host": "h200", "list": "there: ", "explain": "driver 580, 1 x 9.0"}[command[0]] in out
