"""All probes together: bounded, never raising, each fact with its source, and each to be overridden."""

import json
import threading
from dataclasses import fields
from pathlib import Path

import packaging
import pytest

import kernel_loader
from kernel_loader.errors import SettingsError
from kernel_loader.host import Backend, Host, HostDevice
from kernel_loader.probe import Fact, begin, detect


def test_every_fact_of_a_host_is_asked_for() -> None:
    host = detect({})
    assert host.provenance.keys() == {f.name for f in fields(Host)} - {"unknown", "provenance"}
    assert all(host.provenance.values())


def test_the_public_door_finds_the_same_machine() -> None:
    assert Host.detect() == detect({})
    assert Host.detect({"CUDA": "12.8"}).cuda == "12.8"


def test_what_was_detected_reads_back_from_json() -> None:
    host = detect({})
    assert Host.from_json(host.to_json()) == host


# ---------------------------------------------------------------------------------------------------------------- begin


def test_a_probe_that_raises_leaves_its_facts_unknown_with_the_reason() -> None:
    def probe():
        raise ValueError("no such file")

    facts = begin((probe, ("driver", "cuda_toolkit")))(60)
    assert facts == dict.fromkeys(("driver", "cuda_toolkit"), Fact(None, "ValueError: no such file", known=False))


def test_a_probe_that_hangs_leaves_its_facts_unknown_with_the_reason() -> None:
    release = threading.Event()

    def probe():
        release.wait()
        return {"driver": Fact("580", "late")}

    try:
        assert begin((probe, ("driver",)))(0.05) == {"driver": Fact(None, "no answer in 0.05 s", known=False)}
    finally:
        release.set()


def test_a_probe_that_hangs_takes_no_earlier_answer_with_it() -> None:
    release = threading.Event()

    def probe():
        release.wait()
        return {"devices": Fact((), "late")}

    try:
        facts = begin((lambda: {"driver": Fact("580", "x")}, ("driver",)), (probe, ("devices",)))(0.5)
    finally:
        release.set()
    assert facts["driver"] == Fact("580", "x")
    assert not facts["devices"].known


def test_a_probe_that_hangs_does_not_keep_the_process(run_python) -> None:
    code = (
        "import threading\n"
        "from kernel_loader.probe import begin\n"
        "print(begin((threading.Event().wait, ('driver',)))(0.05)['driver'].known)"
    )
    assert run_python(code).strip() == "False"


def test_a_probe_that_answers_is_believed() -> None:
    assert begin((lambda: {"driver": Fact("580", "x")}, ("driver",)))(60) == {"driver": Fact("580", "x")}


def test_a_torch_that_cannot_be_read_is_unknown_and_the_rest_is_not(run_python, tmp_path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    code = "import kernel_loader; print(kernel_loader.Host.detect().to_json())"
    host = Host.from_json(run_python(code, env={"PYTHONPATH": str(tmp_path)}))
    names = {"torch", "cxx11_abi", "cuda", "rocm", "xpu", "cann", "metal", "neuron", "tpu"}
    assert host.unknown == names | {"cuda_toolkit"}
    assert "version.py" in host.provenance["cuda"]


def test_a_compiler_that_cannot_be_run_leaves_only_the_toolkit_unknown(run_python, tmp_path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_bytes(b"\0\0")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    code = "import kernel_loader; print(kernel_loader.Host.detect({'CUDA': '13.0'}).to_json())"
    host = Host.from_json(run_python(code, env={"CUDA_HOME": str(tmp_path)}))
    assert host.unknown == {"cuda_toolkit"}
    assert "OSError" in host.provenance["cuda_toolkit"]


def test_a_torch_that_is_not_for_cuda_needs_no_compiler(run_python, tmp_path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text(f"#!/bin/sh\ntouch {tmp_path / 'asked'}\n")
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    code = "import kernel_loader; print(kernel_loader.Host.detect({'CUDA': ''}).provenance['cuda_toolkit'])"
    assert "not looked for" in run_python(code, env={"CUDA_HOME": str(tmp_path)})
    assert not (tmp_path / "asked").exists()


# ---------------------------------------------------------------------------------------------------- nothing is loaded


def test_asking_the_machine_imports_no_torch_and_opens_no_cuda(run_python) -> None:
    code = (
        "import kernel_loader, sys\n"
        "kernel_loader.Host.detect()\n"
        "print([name for name in ('torch', 'huggingface_hub', 'numpy') if name in sys.modules])\n"
        "import ctypes\n"
        "try: cuda = ctypes.CDLL('libcuda.so.1')\n"
        "except OSError: print('not initialised')\n"  # no driver at all
        "else: print('not initialised' if cuda.cuCtxGetCurrent(ctypes.byref(ctypes.c_void_p())) == 3 else 'CUDA!')"
    )
    assert run_python(code).split("\n")[:2] == ["[]", "not initialised"]


def test_a_machine_without_torch_is_detected(run_python, tmp_path) -> None:
    for package in (kernel_loader, packaging):
        directory = Path(package.__file__).parent
        (tmp_path / directory.name).symlink_to(directory)
    # Without site and environment there is nothing but the standard library.
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.util, json, kernel_loader\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "print(kernel_loader.Host.detect().to_json())"
    )
    host = Host.from_json(run_python(code, flags=("-I", "-S")))
    assert host.torch is None
    assert host.backend == Backend("cpu")
    assert not host.unknown & {"torch", "cuda", "packages"}
    assert "torch" not in host.packages


def test_a_host_is_detected_while_torch_runs(run_python) -> None:
    code = "import kernel_loader{}; print(kernel_loader.Host.detect().to_json())"
    alone, running = (Host.from_json(run_python(code.format(more))) for more in ("", ", torch"))
    assert alone == running
    assert running.provenance["torch"] == "running torch"
    assert alone.provenance["torch"] == "torch/version.py"


# ------------------------------------------------------------------------------------------------------------ overrides


@pytest.mark.parametrize(
    ("name", "value", "fact", "expected"),
    [
        ("OS", "windows", "os", "windows"),
        ("CPU", "aarch64", "cpu", "aarch64"),
        ("MACOS", "26.1", "macos", "26.1"),
        ("MACOS", "26", "macos", "26"),
        ("GLIBC", "2.17", "glibc", "2.17"),
        ("PYTHON", "3.15.0", "python", "3.15.0"),
        ("FREE_THREADED", "1", "free_threaded", True),
        ("FREE_THREADED", "false", "free_threaded", False),
        ("TORCH", "2.11.0+cu130", "torch", "2.11.0+cu130"),
        ("CXX11_ABI", "0", "cxx11_abi", False),
        ("CXX11_ABI", "True", "cxx11_abi", True),
        ("CUDA", "12.8", "cuda", "12.8"),
        ("ROCM", "7.0", "rocm", "7.0"),
        ("XPU", "2025.2", "xpu", "2025.2"),
        ("CANN", "8.1", "cann", "8.1"),
        ("METAL", "1", "metal", True),
        ("NEURON", "1", "neuron", True),
        ("TPU", "true", "tpu", True),
        ("DRIVER", "580.65.06", "driver", "580.65.06"),
        ("DRIVER", "580", "driver", "580"),
        ("CUDA_TOOLKIT", "13.0", "cuda_toolkit", "13.0"),
        ("TVM_FFI", "0.1.8", "tvm_ffi", "0.1.8"),
        ("ARCH", "9.0", "devices", (HostDevice(arch="9.0"),)),
        ("ARCH", "9.0, 8.0,", "devices", (HostDevice(arch="9.0"), HostDevice(arch="8.0"))),
        ("ARCH", "gfx942", "devices", (HostDevice(arch="gfx942"),)),
    ],
)
def test_a_fact_is_overridden_and_says_so(name: str, value: str, fact: str, expected: object) -> None:
    host = detect({name: value})
    assert getattr(host, fact) == expected
    assert fact not in host.unknown
    assert host.provenance[fact] == f"KERNEL_LOADER_OVERRIDE_{name}"


@pytest.mark.parametrize(
    ("name", "fact", "absent"),
    [("CUDA", "cuda", None), ("DRIVER", "driver", None), ("GLIBC", "glibc", None), ("TORCH", "torch", None),
     ("CXX11_ABI", "cxx11_abi", None), ("METAL", "metal", False), ("FREE_THREADED", "free_threaded", False),
     ("ARCH", "devices", ()), ("CUDA_TOOLKIT", "cuda_toolkit", None), ("TVM_FFI", "tvm_ffi", None)],
)  # fmt: skip
def test_an_empty_override_says_that_the_thing_is_absent(name: str, fact: str, absent: object) -> None:
    host = detect({name: ""})
    assert getattr(host, fact) == absent
    assert fact not in host.unknown
    assert host.provenance[fact] == f"KERNEL_LOADER_OVERRIDE_{name}"


def test_overrides_describe_another_machine_together() -> None:
    host = detect({"CUDA": "13.0", "ROCM": "", "METAL": "0", "DRIVER": "580.1", "ARCH": "9.0", "TORCH": "2.11.0+cu130"})
    assert host.backend == Backend("cuda", (13, 0))
    assert Host.from_json(host.to_json()) == host


@pytest.mark.parametrize(
    ("name", "value"),
    [("CUDA", "13"), ("CUDA", "new"), ("DRIVER", "none"), ("GLIBC", "musl"), ("ARCH", "h100"), ("ARCH", "9.0,sm_80"),
     ("METAL", "maybe"), ("CXX11_ABI", "cxx11"), ("TORCH", "nightly"), ("PACKAGES", "numpy"), ("UNKNOWN", ""),
     ("PROVENANCE", "x"), ("GPU", "9.0"), ("", "9.0")],
)  # fmt: skip
def test_an_override_that_makes_no_sense_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        detect({name: value})
    assert caught.value.variable == f"KERNEL_LOADER_OVERRIDE_{name}"
    assert caught.value.value == value


def test_an_unknown_override_is_told_those_that_there_are() -> None:
    with pytest.raises(SettingsError) as caught:
        detect({"GPU": "9.0"})
    for name in ("ARCH", "CUDA", "CUDA_TOOLKIT", "GLIBC"):
        assert name in str(caught.value)
    assert "PROVENANCE" not in str(caught.value)


def test_a_flag_that_is_neither_is_told_what_it_may_be() -> None:
    with pytest.raises(SettingsError, match="true or false"):
        detect({"METAL": "maybe"})


def test_an_override_is_read_from_the_environment(run_python) -> None:
    code = (
        "import json, kernel_loader\n"
        "host = kernel_loader.Host.detect(kernel_loader.Settings.from_env().overrides)\n"
        "print(json.dumps([host.cuda, [d.arch for d in host.devices]]))"
    )
    environ = {"KERNEL_LOADER_OVERRIDE_CUDA": "12.8", "KERNEL_LOADER_OVERRIDE_ARCH": "9.0"}
    assert json.loads(run_python(code, env=environ)) == ["12.8", ["9.0"]]
