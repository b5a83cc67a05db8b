"""The package as it is imported and installed: what it costs, what it exports, what a wheel holds."""

import ast
import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kernel_loader
from kernel_loader.catalog import Catalog
from kernel_loader.settings import Settings

ROOT = Path(__file__).parent.parent


def python(code: str, **environ: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=os.environ | environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    modules = json.loads(python("import sys, json, kernel_loader; print(json.dumps(sorted(sys.modules)))"))
    ours = {name for name in modules if name.startswith("kernel_loader")}
    assert ours == {"kernel_loader"}
    assert not {"torch", "huggingface_hub", "packaging", "click", "tomllib"} & set(modules)


def test_importing_the_package_opens_no_file_beyond_modules():
    script = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import kernel_loader
print([name for name in opened if not name.endswith((".py", ".pyc"))])
"""
    assert python(script).strip() == "[]"


def test_the_environment_is_not_read_at_import():
    assert python("import kernel_loader", KERNEL_LOADER_FALLBACK="nonsense") == ""


def test_resolving_imports_neither_torch_nor_the_hub(cpu_machine):
    script = """
import sys, kernel_loader
kernel_loader.resolve("finegrained_fp8")
print({"torch", "huggingface_hub", "numpy"} & set(sys.modules))
"""
    assert python(script).strip() == "set()"


def test_all_names_are_exported_and_exist():
    for name in kernel_loader.__all__:
        assert getattr(kernel_loader, name) is not None
    assert sorted(kernel_loader.__all__) == dir(kernel_loader)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kernel_loader.nonsense


def test_a_type_checker_sees_the_same_names_as_a_program():
    tree = ast.parse((ROOT / "kernel_loader" / "__init__.py").read_text())
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (node.module.rpartition(".")[2], alias.name): alias.asname
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name for _, name in seen} == set(kernel_loader.__all__) - {"__version__"}
    assert all(name == alias for (_, name), alias in seen.items())
    for module, name in seen:
        home = getattr(kernel_loader, name).__module__
        assert home == f"kernel_loader.{module}" or home.startswith(f"kernel_loader.{module}."), name


def test_a_type_checker_sees_the_bundle_of_every_shipped_kernel(tmp_path):
    names = [n for n in Catalog(Settings()).names() if Catalog(Settings()).get(n).bundle]
    lines = ["from typing import assert_type", "import kernel_loader"]
    for name in names:
        module, _, cls = Catalog(Settings()).get(name).bundle.partition(":")
        lines += [f"import {module}"]
        for spelling in {name, name.replace("_", "-")}:
            lines += [f'assert_type(kernel_loader.load_kernel("{spelling}"), {module}.{cls})']
        lines += [f"assert_type(kernel_loader.load_kernel({module}.{cls}), {module}.{cls})"]
    (tmp_path / "typed.py").write_text("\n".join(lines))
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(tmp_path / "typed.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    assert names


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kernel_loader.__version__
    assert f"## {kernel_loader.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_dependencies_are_those_of_the_design():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.split(">")[0].split("<")[0] for requirement in project["dependencies"]}
    assert names == {"click", "filelock", "huggingface_hub", "packaging", "platformdirs", "torch"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of the checkout."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (file,) = out.glob("*.whl")
    return file


def test_a_wheel_installs_one_name_and_carries_the_data_inside_it(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "kernel_loader",
        f"kernel_loader-{kernel_loader.__version__}.dist-info",
    }
    for directory in ("registry", "manifests"):
        data = {f"kernel_loader/{file.relative_to(ROOT).as_posix()}" for file in (ROOT / directory).rglob("*.*")}
        data = {name for name in data if "__pycache__" not in name}
        assert data
        assert data <= set(names)
    assert "kernel_loader/py.typed" in names


def test_the_kernels_of_an_installed_wheel_load(wheel, tmp_path, cpu_machine):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "import kernel_loader; print(kernel_loader.origin(kernel_loader.load_kernel('finegrained_fp8')).path)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{script}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if "site-packages" in p)},
    )
    assert done.stdout.strip() == str(tmp_path / "kernel_loader/registry/finegrained-fp8/build/torch-universal"), (
        done.stderr
    )


def test_no_generic_name_is_importable_in_an_editable_install(tmp_path):
    if "PYTHONPATH" in os.environ:
        pytest.skip("the checkout itself is on the path")
    script = """
import importlib.util as u
print([n for n in ("registry", "manifests", "tests", "bench", "hatch_build") if u.find_spec(n)])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    assert done.stdout.strip() == "[]"


def test_the_project_names_no_machine_and_no_registry_host():
    import re

    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    for name in files.splitlines():
        file = ROOT / name
        if file.suffix in {".py", ".md", ".toml", ".json", ".txt", ""} and file.is_file() and file != Path(__file__):
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"/(root|home/[a-z]+|work)/", text), name
