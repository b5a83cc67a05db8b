"""NVIDIA driver, devices and toolkit, from files of real formats and a library that answers as NVML does."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kernel_loader.probe import nvidia

PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)  Sun Jul 27 2025
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
ARM = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  575.57.08  Release Build  (dvs-builder@U22)\n"


def file(path: Path, text: str, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


# --------------------------------------------------------------------------------------------------- driver, from files


def test_the_driver_is_read_from_sysfs(tmp_path) -> None:
    file(tmp_path / "sys/module/nvidia/version", "580.95.05\n")
    file(tmp_path / "proc/driver/nvidia/version", PROPRIETARY)
    fact = nvidia.driver(tmp_path)
    assert (fact.value, fact.source) == ("580.95.05", "/sys/module/nvidia/version")


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "535.129.03"), (OPEN, "580.65.06"), (ARM, "575.57.08")])
def test_the_driver_is_read_from_procfs(tmp_path, text: str, version: str) -> None:
    file(tmp_path / "proc/driver/nvidia/version", text)
    fact = nvidia.driver(tmp_path)
    assert (fact.value, fact.source) == (version, "/proc/driver/nvidia/version")


def test_a_file_without_a_version_is_passed_over(tmp_path) -> None:
    file(tmp_path / "sys/module/nvidia/version", "\n")
    file(tmp_path / "proc/driver/nvidia/version", OPEN)
    assert nvidia.driver(tmp_path).value == "580.65.06"


# -------------------------------------------------------------------------------------------------------------- toolkit

VERSION_JSON = json.dumps({"cuda": {"name": "CUDA SDK", "version": "12.8.1"}, "nvcc": {"version": "12.8.93"}})
NVCC = """#!/bin/sh
echo "nvcc: NVIDIA (R) Cuda compiler driver"
echo "Cuda compilation tools, release 12.6, V12.6.85"
echo "Build cuda_12.6.r12.6/compiler.35059454_0"
"""


def toolkit(home: Path, *, nvcc: str | None = NVCC, version: str | None = None) -> Path:
    home.mkdir(parents=True, exist_ok=True)
    if nvcc is not None:
        file(home / "bin/nvcc", nvcc, 0o755)
    if version is not None:
        file(home / "version.json", version)
    return home


def test_the_toolkit_tells_its_version_in_a_file(tmp_path) -> None:
    home = toolkit(tmp_path / "cuda", version=VERSION_JSON)
    assert nvidia.toolkit({"CUDA_HOME": str(home)}, tmp_path).value == "12.8.1"


@pytest.mark.parametrize("version", [None, "", "{}", "[]", '{"cuda": "12.8"}', '{"cuda": {"version": {}}}', "\0"])
def test_the_compiler_is_asked_where_the_file_does_not_tell(tmp_path, version: str | None) -> None:
    home = toolkit(tmp_path / "cuda", version=version)
    assert nvidia.toolkit({"CUDA_HOME": str(home)}, tmp_path).value == "12.6"


@pytest.mark.parametrize("nvcc", ["#!/bin/sh\necho what?\n", "#!/bin/sh\nexit 1\n"])
def test_a_compiler_that_does_not_tell_is_there_and_of_unknown_version(tmp_path, nvcc: str) -> None:
    home = toolkit(tmp_path / "cuda", nvcc=nvcc)
    fact = nvidia.toolkit({"CUDA_HOME": str(home)}, tmp_path)
    assert not fact.known
    assert str(home / "bin" / "nvcc") in fact.source


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_the_named_toolkit_counts_even_where_another_is_on_the_path(tmp_path, variable: str) -> None:
    named, other = toolkit(tmp_path / "named", version=VERSION_JSON), toolkit(tmp_path / "other")
    environ = {variable: str(named), "PATH": str(other / "bin")}
    assert nvidia.toolkit(environ, other).value == "12.8.1"


def test_the_compiler_on_the_path_leads_to_its_toolkit_through_links(tmp_path) -> None:
    home = toolkit(tmp_path / "cuda-12.8", version=VERSION_JSON)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(home / "bin" / "nvcc")
    fact = nvidia.toolkit({"PATH": str(tmp_path / "bin")}, tmp_path / "nowhere")
    assert (fact.value, fact.source) == ("12.8.1", str(home / "bin" / "nvcc"))


@pytest.mark.parametrize("environ", [{}, {"PATH": ""}, {"PATH": "/nowhere"}])
def test_the_usual_place_counts_where_nothing_names_another(tmp_path, environ: dict[str, str]) -> None:
    assert nvidia.toolkit(environ, toolkit(tmp_path / "cuda", version=VERSION_JSON)).value == "12.8.1"


@pytest.mark.parametrize("version", [None, VERSION_JSON])
def test_a_toolkit_without_a_compiler_is_none(tmp_path, version: str | None) -> None:
    home = toolkit(tmp_path / "cuda", nvcc=None, version=version)
    fact = nvidia.toolkit({"CUDA_HOME": str(home)}, home)
    assert (fact.value, fact.known) == (None, True)
    assert str(home / "bin") in fact.source


def test_a_compiler_that_may_not_be_run_is_none(tmp_path) -> None:
    home = toolkit(tmp_path / "cuda", version=VERSION_JSON)
    (home / "bin" / "nvcc").chmod(0o644)
    assert nvidia.toolkit({"CUDA_HOME": str(home)}, tmp_path).value is None


# ----------------------------------------------------------------------------------------------------------------- NVML

NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int open_count;

static const char *of(int index) {  /* the index-th of FAKE_ARCHS, such as "9.0 8.0" */
    const char *p = getenv("FAKE_ARCHS");
    while (index-- && p) { p = strchr(p, ' '); if (p) p++; }
    return p;
}
int nvmlInit_v2(void) {
    if (getenv("FAKE_HANG")) for (;;) pause();
    if (getenv("FAKE_INIT")) return atoi(getenv("FAKE_INIT"));
    open_count++;
    return 0;
}
int nvmlShutdown(void) { open_count--; return 0; }
int fakeOpenCount(void) { return open_count; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (open_count < 1) return 1;
    if (getenv("FAKE_COUNT")) return atoi(getenv("FAKE_COUNT"));
    for (*count = 0; of(*count); ++*count);
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (!of(index)) return 2;
    *handle = (void *)(0x7f0000000000L + index);  /* as wide as a pointer */
    return 0;
}
static int index_of(void *handle) { return (int)((long)handle - 0x7f0000000000L); }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    return sscanf(of(index_of(handle)), "%d.%d", major, minor) == 2 ? 0 : 999;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    snprintf(text, size, "NVIDIA H100 number %d", index_of(handle));
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    snprintf(text, size, "GPU-%d0000000-1111-2222-3333-444444444444", index_of(handle));
    return 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "570.86.15");
    return 0;
}
"""


@pytest.fixture(scope="session")
def nvml_directory(tmp_path_factory) -> Path:
    """A directory with a library that answers as NVML does."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = tmp_path_factory.mktemp("nvml")
    source = file(directory / "nvml.c", NVML)
    library = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return directory


@pytest.fixture
def ask(nvml_directory, run_python, tmp_path):
    """Evaluates expressions in a process whose NVML is the made-up one, and gives their values."""

    def answer(*expressions: str, **environ: str):
        code = (
            "import json\n"
            "from pathlib import Path\n"
            "from kernel_loader.probe import Fact, amd, begin, nvidia, python\n"
            "def devices(**environ): return [d.arch for d in nvidia.devices(environ).value]\n"
            "def facts(probe, *names):\n"
            "    found = begin((probe, names))(0.2 if HANG else 60)\n"
            "    return {name: [fact.value, fact.known, fact.source] for name, fact in found.items()}\n"
            f"ROOT, HANG = Path({str(tmp_path)!r}), {'FAKE_HANG' in environ}\n"
            f"print(json.dumps([{', '.join(expressions)}]))"
        )
        path = os.pathsep.join([str(nvml_directory), os.environ.get("LD_LIBRARY_PATH", "")])
        values = json.loads(run_python(code, env={"LD_LIBRARY_PATH": path, "FAKE_ARCHS": "9.0 9.0"} | environ))
        return values[0] if len(values) == 1 else values

    return answer


needs_compiler = pytest.mark.needs_compiler


@needs_compiler
def test_devices_and_driver_are_read_from_nvml(ask) -> None:
    names = "[d.name for d in nvidia.devices({}).value]"
    shown, called, driver, source = ask("devices()", names, "nvidia.driver(ROOT).value", "nvidia.driver(ROOT).source")
    assert shown == ["9.0", "9.0"]
    assert called == ["NVIDIA H100 number 0", "NVIDIA H100 number 1"]
    assert (driver, source) == ("570.86.15", "NVML")


@needs_compiler
def test_every_session_with_nvml_is_closed(ask) -> None:
    opened = "__import__('ctypes').CDLL('libnvidia-ml.so.1').fakeOpenCount()"
    assert ask("devices()", "nvidia.driver(ROOT).value", opened)[-1] == 0
    failing = "facts(lambda: {'devices': nvidia.devices({})}, 'devices')"
    assert ask(failing, opened, FAKE_COUNT="15")[-1] == 0


@needs_compiler
def test_the_visible_devices_are_chosen_as_cuda_does(ask) -> None:
    values = ["0", "1,0", "GPU-1", "GPU-10000000-1111-2222-3333-444444444444", "", "-1", "7", "MIG-5c8d", "0,1,9"]
    names = [f"[d.name[-1] for d in nvidia.devices({{'CUDA_VISIBLE_DEVICES': {value!r}}}).value]" for value in values]
    shown = ["0", "10", "1", "1", "", "", "", "01", "01"]
    assert ["".join(found) for found in ask(*names)] == shown


@needs_compiler
def test_a_number_may_mean_any_of_unlike_devices(ask) -> None:
    # CUDA counts from the fastest, NVML from the first slot.
    both, hidden, ordered, alone = ask(
        "devices(CUDA_VISIBLE_DEVICES='0')",
        "devices(CUDA_VISIBLE_DEVICES='')",
        "devices(CUDA_VISIBLE_DEVICES='0', CUDA_DEVICE_ORDER='PCI_BUS_ID')",
        "devices(CUDA_VISIBLE_DEVICES='1', CUDA_DEVICE_ORDER='PCI_BUS_ID')",
        FAKE_ARCHS="8.0 9.0",
    )
    assert (both, hidden, ordered, alone) == (["8.0", "9.0"], [], ["8.0"], ["9.0"])


@needs_compiler
def test_a_machine_with_the_library_and_no_devices_has_none(ask) -> None:
    # FAKE_ARCHS is unset for an empty list.
    assert ask("__import__('os').unsetenv('FAKE_ARCHS') or devices()") == []


@needs_compiler
def test_a_library_without_the_driver_means_no_driver_and_no_devices(ask) -> None:
    both = "lambda: {'driver': nvidia.driver(ROOT), 'devices': nvidia.devices({})}"
    found = ask(f"facts({both}, 'driver', 'devices')", FAKE_INIT="9")
    assert found["driver"][:2] == [None, True]
    assert found["devices"][:2] == [[], True]


@needs_compiler
@pytest.mark.parametrize("status", ["18", "4", "999"])
def test_a_driver_that_refuses_leaves_the_facts_unknown_with_its_reason(ask, status: str) -> None:
    # 18: the library is of another version than the loaded driver, as after an update without a reboot.
    driver, devices = ask(
        "facts(lambda: {'driver': nvidia.driver(ROOT)}, 'driver')",
        "facts(lambda: {'devices': nvidia.devices({})}, 'devices')",
        FAKE_INIT=status,
    )
    assert driver["driver"] == [None, False, f"OSError: NVML answered {status}"]
    assert devices["devices"] == [None, False, f"OSError: NVML answered {status}"]


@needs_compiler
def test_a_failure_while_devices_are_listed_leaves_them_unknown(ask) -> None:
    found = ask("facts(lambda: {'devices': nvidia.devices({})}, 'devices')", FAKE_COUNT="15")
    assert found["devices"] == [None, False, "OSError: NVML answered 15"]


@needs_compiler
def test_a_driver_that_hangs_is_not_waited_for(ask) -> None:
    found = ask("facts(lambda: {'devices': nvidia.devices({})}, 'devices')", FAKE_HANG="1")
    assert found["devices"] == [None, False, "no answer in 0.2 s"]


@needs_compiler
def test_a_host_is_detected_with_its_devices_and_without_cuda_or_torch(ask) -> None:
    detected = "(lambda h: [h.driver, [d.arch for d in h.devices], sorted(h.unknown & {'devices', 'driver'})])"
    host, maps, modules = ask(
        f"{detected}(__import__('kernel_loader').Host.detect())",
        "'libcuda' in Path('/proc/self/maps').read_text()",
        "'torch' in __import__('sys').modules",
        CUDA_VISIBLE_DEVICES="0",
    )
    assert host[1:] == [["9.0"], []]
    assert host[0] is not None
    assert not maps
    assert not modules
