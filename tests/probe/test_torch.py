"""torch, read from its files without importing it, and asked while it runs."""

import json
import platform
import sys
from pathlib import Path

import pytest

from kernel_loader.probe import torch

NAMES = {"torch", "cxx11_abi", "cuda", "rocm", "xpu", "cann", "metal", "neuron", "tpu"}
PRINT = (
    "import json, sys\n"
    "from kernel_loader.probe import torch as probe\n"
    "facts = probe.probe()\n"
    "print(json.dumps({name: [fact.value, fact.known] for name, fact in facts.items()} | "
    "{'imported': sys.modules.get('torch') is not None}))"
)
CXX11 = b"_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
CXX98 = b"_ZN3c106detail14torchCheckFailEPKcS2_jRKSs"
linux = pytest.mark.skipif(sys.platform != "linux", reason="names carry an ABI of libstdc++ on Linux only")


def version_py(version: str, **backends: str) -> str:
    """A version.py as torch's build writes it."""
    lines = [
        "from typing import Optional",
        "",
        "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'xpu']",
    ]
    lines += [f"__version__ = {version!r}", "debug = False", "git_version = 'cf30153c4c13'"]
    lines += [f"{name}: Optional[str] = {backends.get(name)!r}" for name in ("cuda", "hip", "rocm", "xpu")]
    return "\n".join(lines) + "\n"


def install(site: Path, text: str, library: bytes = CXX11) -> Path:
    directory = site / "torch"
    (directory / "lib").mkdir(parents=True)
    (directory / "__init__.py").write_text("raise SystemExit('torch was imported')\n")
    (directory / "version.py").write_text(text)
    (directory / "lib" / "libc10.so").write_bytes(b"\x7fELF\0" + library + b"\0")
    return directory


def test_the_files_of_the_installed_torch_tell_what_it_tells_when_it_runs(run_python) -> None:
    read, asked = json.loads(run_python(PRINT)), json.loads(run_python(f"import torch\n{PRINT}"))
    assert (read.pop("imported"), asked.pop("imported")) == (False, True)
    assert read == asked
    assert read.keys() == NAMES


BUILDS = {
    "cuda": (version_py("2.11.0+cu130", cuda="13.0"), {"torch": "2.11.0+cu130", "cuda": "13.0"}),
    "rocm": (
        version_py("2.10.0+rocm7.0", hip="7.0.51831-a3e329ad8", rocm="7.0.2"),
        {"torch": "2.10.0+rocm7.0", "rocm": "7.0"},
    ),
    "xpu": (version_py("2.10.0+xpu", xpu="20250200"), {"torch": "2.10.0+xpu", "xpu": "2025.2"}),
    "nightly": (
        version_py("2.12.0.dev20260101+cu128", cuda="12.8"),
        {"torch": "2.12.0.dev20260101+cu128", "cuda": "12.8"},
    ),
    "old style": (
        "__version__ = '2.6.0+cu124'\ndebug = False\ncuda = '12.4'\ngit_version = 'a'\nhip = None\n",
        {"torch": "2.6.0+cu124", "cuda": "12.4"},
    ),
}


@pytest.mark.parametrize(("text", "expected"), BUILDS.values(), ids=BUILDS)
def test_a_build_of_torch_is_read_and_not_imported(run_python, tmp_path, text: str, expected: dict[str, str]) -> None:
    install(tmp_path, text)
    found = json.loads(run_python(PRINT, env={"PYTHONPATH": str(tmp_path)}))
    assert not found.pop("imported")
    backends = {name: found[name][0] for name in ("torch", "cuda", "rocm", "xpu", "cann")}
    assert backends == {"torch": None, "cuda": None, "rocm": None, "xpu": None, "cann": None} | expected
    assert all(known for _, known in found.values())


def test_an_ascend_torch_without_its_toolkit_has_a_cann_of_unknown_version(run_python, tmp_path) -> None:
    install(tmp_path, version_py("2.9.0+cpu"))
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise SystemExit('torch_npu was imported')\n")
    assert json.loads(run_python(PRINT, env={"PYTHONPATH": str(tmp_path)}))["cann"] == [None, False]
    info = tmp_path / "ascend" / "aarch64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir(parents=True)
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.1.RC1\narch=aarch64\n")
    environ = {"PYTHONPATH": str(tmp_path), "ASCEND_TOOLKIT_HOME": str(tmp_path / "ascend")}
    assert json.loads(run_python(PRINT, env=environ))["cann"] == ["8.1", True]


@pytest.mark.parametrize(
    "hide", ["sys.modules['torch'] = None", "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]"]
)
def test_a_hidden_torch_is_absent_and_known_to_be(run_python, hide: str) -> None:
    code = f"import sys, kernel_loader.probe\n{hide}\nsys.path_importer_cache.clear()\n{PRINT}"
    found = json.loads(run_python(code))
    found.pop("imported")
    assert found == {name: [False if name in ("metal", "neuron", "tpu") else None, True] for name in NAMES}


def test_a_torch_whose_version_cannot_be_read_is_an_error_and_not_absent(tmp_path) -> None:
    directory = install(tmp_path, "def broken(:\n")
    with pytest.raises(SyntaxError):
        torch.read_versions(directory)
    (directory / "version.py").unlink()
    with pytest.raises(FileNotFoundError):
        torch.read_versions(directory)


def test_only_plain_assignments_of_texts_are_read(tmp_path) -> None:
    text = "a = 'x'\nb: str = 'y'\nc = d = 'z'\ne = f()\nf = None\nif True:\n    g = 'no'\nh = 1\n"
    assert torch.read_versions(install(tmp_path, text)) == {"a": "x", "b": "y", "c": "z", "d": "z"}


@pytest.mark.parametrize(("library", "value", "known"), [(CXX11, True, True), (CXX98, False, True), (b"", None, False)])
def test_the_abi_is_read_from_the_symbols_of_a_library(tmp_path, library: bytes, value: bool, known: bool) -> None:
    fact = torch.read_abi(install(tmp_path, "", library))
    assert (fact.value, fact.known) == (value, known)


def test_the_abi_of_a_torch_without_its_library_is_unknown(tmp_path) -> None:
    assert not torch.read_abi(tmp_path).known


@linux
@pytest.mark.parametrize(("library", "abi"), [(CXX98, [False, True]), (b"", [None, False])])
def test_the_abi_of_an_installed_torch_is_that_of_its_library(run_python, tmp_path, library: bytes, abi: list) -> None:
    install(tmp_path, version_py("2.6.0"), library)
    assert json.loads(run_python(PRINT, env={"PYTHONPATH": str(tmp_path)}))["cxx11_abi"] == abi


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("20250200", "2025.2"),
        ("20250101", "2025.1"),
        ("20251000", "2025.10"),
        ("2025.2.1", "2025.2"),
        ("x", None),
        (None, None),
    ],
)
def test_a_oneapi_version_has_a_year_and_a_release(version: str | None, release: str | None) -> None:
    assert torch.xpu_release(version) == release


@pytest.mark.parametrize("variable", ["ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH"])
def test_the_ascend_toolkit_is_found_where_the_environment_points(tmp_path, variable: str) -> None:
    info = tmp_path / "x86_64-linux" / "ascend_toolkit_install.info"
    info.parent.mkdir()
    info.write_text("package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n")
    assert torch.cann_release({variable: str(tmp_path)}) == "8.2"
    info.write_text("package_name=Ascend-cann-toolkit\n")
    assert torch.cann_release({variable: str(tmp_path)}) is None
    assert torch.cann_release({}) is None


def test_the_torch_that_is_here_answers_for_every_fact() -> None:
    facts = torch.probe()
    assert facts.keys() == NAMES
    assert facts["torch"].value
    assert facts["metal"].value is (platform.system() == "Darwin" and platform.machine() == "arm64")


def test_a_torch_that_is_still_being_imported_is_read_from_its_files(monkeypatch) -> None:
    import importlib.machinery
    import sys
    import types

    half = types.ModuleType("torch")
    half.version = types.SimpleNamespace()
    half.__spec__ = importlib.machinery.ModuleSpec("torch", None, origin=importlib.util.find_spec("torch").origin)
    half.__spec__._initializing = True
    whole = torch.probe()
    monkeypatch.setitem(sys.modules, "torch", half)
    assert {name: fact.value for name, fact in torch.probe().items()} == {n: f.value for n, f in whole.items()}
