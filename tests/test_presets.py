"""Hosts that have a name: what they assume, what they leave open, and that they choose as the machine would."""

import json
from dataclasses import fields, replace

import pytest
from click.testing import CliRunner

from kernel_loader.cli import main
from kernel_loader.errors import HostError
from kernel_loader.host import Host, HostDevice, is_arch
from kernel_loader.loader import KernelLoader
from kernel_loader.presets import ACCELERATORS, preset
from kernel_loader.settings import Settings
from tests.hosts import HOSTS
from tests.repositories import REPOSITORIES, Published

# A preset, and the machine of the catalogue's table that it stands for.
STANDS_FOR = {
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


@pytest.mark.parametrize("name", STANDS_FOR)
def test_a_preset_survives_its_description(name):
    assert Host.from_json(preset(name).to_json()) == preset(name)


@pytest.mark.parametrize(
    ("name", "torch", "abi"),
    [
        ("a100-cu124-torch2.6", "2.6.0+cu124", False),
        ("a100-cu126-torch2.6", "2.6.0+cu126", True),
        ("gh200-cu124-torch2.6", "2.6.0+cu124", True),
        ("mi300x-rocm624-torch2.6", None, None),
        ("mi300x-rocm62-torch2.6", "2.6.0+rocm6.2", True),
        ("x86_64-cpu-torch2.6", "2.6.0+cpu", False),
        ("a100-cu124-torch2.7", "2.7.0+cu124", True),
        ("h200-cu12.8-torch2.10", "2.10.0+cu128", True),
        ("H200-cu128-torch2.10", "2.10.0+cu128", True),
        ("mac-cpu-torch2.11", "2.11.0", None),
    ],
)
def test_torch_is_that_of_the_wheels(name, torch, abi):
    if torch is None:
        return  # read as 6.24, which names of builds mean by it
    host = preset(name)
    assert (host.torch, host.cxx11_abi) == (torch, abi)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h200", "a preset is <accelerator>"),
        ("h200-cu130", "a preset is <accelerator>"),
        ("h200-cu130-torch2", "a preset is <accelerator>"),
        ("h200-cu130-2.11", "a preset is <accelerator>"),
        ("h201-cu130-torch2.11", "did you mean h200"),
        ("quantum-cu130-torch2.11", "there are v100, t4"),
        ("h200-rocm72-torch2.11", "computes on cuda"),
        ("h200-cpu-torch2.11", "computes on cuda"),
        ("mac-cu130-torch2.11", "computes on metal or cpu"),
        ("h200-cu1-torch2.11", "is no backend"),
        ("h200-cudaa130-torch2.11", "is no backend"),
        ("b200-cu126-torch2.11", "needs CUDA 12.8 or later"),
        ("v100-cu130-torch2.11", "CUDA 13.0 and later have nothing for NVIDIA V100"),
        ("h200-cu990-torch2.11", "CUDA 99.0 is not known here"),
        ("h200-cu130-torch1.13", "older than any that is supported"),
    ],
)
def test_what_cannot_be_is_refused(name, said):
    with pytest.raises(HostError, match=said) as caught:
        preset(name)
    assert f"preset:{name}" in str(caught.value)
    assert "host --presets" in caught.value.remedy


def test_every_accelerator_has_a_host_for_each_of_its_backends():
    words = {"cuda": ("cu126", "cu128", "cu129", "cu130"), "rocm": ("rocm72",), "xpu": ("xpu20260",)}
    for name, accelerator in ACCELERATORS.items():
        assert accelerator.arch is None or is_arch(accelerator.arch)
        for backend in accelerator.backends:
            hosts = []
            for word in words.get(backend, (backend,)):
                try:
                    hosts.append(preset(f"{name}-{word}-torch2.13"))
                except HostError as error:
                    assert "CUDA" in error.detail
            assert hosts
            assert all((host.backend.kind, host.cpu) == (backend, accelerator.cpu) for host in hosts)


@pytest.mark.parametrize(("name", "machine"), STANDS_FOR.items())
def test_a_preset_takes_what_a_machine_with_the_packages_takes(name, machine):
    real = HOSTS[machine]
    toolkit = real.cuda if machine in ("T4", "A100", "H200", "B200", "GB10") else None
    packages = PACKAGES | dict(real.packages) | {"transformers": "5.0.0"}
    real = replace(real, packages=packages, tvm_ffi="0.1.9", cuda_toolkit=toolkit)
    theirs, ours = (KernelLoader(Settings(), host, (Published(),)) for host in (real, preset(name)))
    for repository in REPOSITORIES:
        expected, found = (loader.resolve(repository.kernel).chosen for loader in (theirs, ours))
        assert (found and found.name) == (expected and expected.name), repository.kernel


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
    assert json.loads(run("host", "--presets", "--json").output)["accelerators"]["h200"]["arch"] == "9.0"


def test_every_command_that_takes_a_file_takes_a_preset(workshop, monkeypatch):
    workshop.simple("my_kernel", backends=["cuda"], reference=None)
    monkeypatch.setenv("KERNEL_LOADER_MANIFESTS", str(workshop.manifests))
    monkeypatch.setenv("KERNEL_LOADER_LOCAL", ":".join(f"{repo}={path}" for repo, path in workshop.local.items()))
    for arguments in (("explain", "my_kernel"), ("prefetch", "my_kernel"), ("list",)):
        done = run(*arguments, "--host", "preset:h200-cu130-torch2.11")
        assert done.exit_code == 0, done.output
        assert "torch-universal" in done.output


@pytest.mark.parametrize(("given", "status"), [("preset:h201-cu130-torch2.11", 1), ("no-such-file", 2)])
def test_what_is_neither_file_nor_preset_is_told(given, status):
    done = run("host", "--host", given)
    assert done.exit_code == status
    assert "h200" in done.output or "does not exist" in done.output


def test_presets_need_no_torch(run_python):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from kernel_loader.presets import preset\n"
        "print(preset('h200-cu130-torch2.11').torch)"
    )
    assert run_python(code) == "2.11.0+cu130\n"
