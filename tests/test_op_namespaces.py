"""A build is not run when its ops would take the place of another's."""

import sys
import textwrap
import threading

import pytest
import torch

from kernel_loader.errors import OpNamespaceTaken
from kernel_loader.importer import import_build, module_name, package_directory
from kernel_loader.metadata import Metadata
from kernel_loader.op_namespaces import Claims, NamespaceTakenError, defined
from kernel_loader.provenance import Origin
from tests.builds import compile_library, counts_runs, write_build

OPS_OF_KERNEL_BUILDER = """
import torch

def _find_ops_name() -> str:
    kernel_name = "{name}"
    unique_id = "{id}"
    backend = get_backend()
    return f"_{{kernel_name}}_{{backend}}_{{unique_id}}"

ops = getattr(torch.ops, _find_ops_name())
"""

SOURCES = {
    "import torch\n@torch.library.custom_op('mine::double', mutates_args=())\ndef double(x: int) -> int: ...": {"mine"},
    "from torch.library import triton_op\n@triton_op('mine::double', mutates_args={})\ndef f(): ...": {"mine"},
    "import torch\ntorch.library.define('mine::double', '(Tensor x) -> Tensor')": {"mine"},
    "from torch.library import Library\nLIBRARY = Library('mine', 'DEF')": {"mine"},
    "from torch.library import Library\nLIBRARY = Library('mine', 'FRAGMENT')": {"mine"},
    "from torch.library import Library\nLIBRARY = Library('aten', 'IMPL')": set(),
    "from torch.library import Library\nLIBRARY = Library('aten', kind='IMPL')": set(),
    "import torch\nNAME = 'mine'\ntorch.library.define(f'{NAME}::double', '() -> ()')": {"mine"},
    "import torch\nNAME = 'mine'\ntorch.library.define(NAME + '::double', '() -> ()')": {"mine"},
    "import torch\nfor op in 'ab': torch.library.define(f'mine::{op}', '() -> ()')": {"mine"},
    "import torch\nfor op in 'ab': torch.library.define(f'mine_{op}::x', '() -> ()')": set(),
    "import torch\ntorch.library.define(name(), '() -> ()')": set(),
    "import torch\ntorch.ops.theirs.double(3)": set(),
    '"""As torch.library.custom_op("mine::double") does."""\nimport torch': set(),
    "import torch\nthis is no Python: custom_op('mine::x')": set(),
    "import torch\nLIBRARY = torch.library.Library(ns='mine', kind='DEF')": {"mine"},
    "import torch\nLIBRARY = torch.library.Library('mine', 'DEF')\nLIBRARY.define('norm(Tensor x) -> Tensor')": {
        "mine"
    },
    "import torch\nNAME: str = 'mine'\ntorch.library.define(NAME + '::x', '() -> ()')": {"mine"},
    "from torch.library import custom_op as op\n@op('mine::x', mutates_args=())\ndef f(): ...": {"mine"},
    "import torch\ntorch.library.define(qualname='mine::x', schema='() -> ()')": {"mine"},
    "import torch\ntable.define('a name')": set(),
    "": set(),
}


@pytest.mark.parametrize(("source", "names"), SOURCES.items())
def test_namespaces_are_read_from_source(tmp_path, source, names):
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "kernels.py").write_text(source)
    assert defined(tmp_path) == names


def test_the_namespace_of_kernel_builder_is_read(tmp_path):
    (tmp_path / "_ops.py").write_text(OPS_OF_KERNEL_BUILDER.format(name="fp8", id="40d4194"))
    assert defined(tmp_path) == {"_fp8_*_40d4194"}
    (tmp_path / "_ops.py").write_text("import torch\nfrom . import _fp8_7c3a\nops = torch.ops._fp8_7c3a\n")
    assert defined(tmp_path) == {"_fp8_7c3a"}


def test_what_cannot_be_read_defines_nothing(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"import torch # \xe4")
    (tmp_path / "empty.so").write_bytes(b"")
    (tmp_path / "nul.py").write_bytes(b"torch\0")
    (tmp_path / "dangling.so").symlink_to(tmp_path / "nowhere")
    assert defined(tmp_path) == set()
    assert defined(tmp_path / "nowhere") == set()


# --- builds -------------------------------------------------------------------------------------------------------


@pytest.fixture
def describe(tmp_path):
    def describe(name, files, number):
        build = write_build(tmp_path / str(number) / name, "torch-universal", files)
        digest = f"{number:02}" * 32
        origin = Origin(
            kernel=name, source="local", repo=f"org/{name}", revision=None, variant="torch-universal", digest=digest,
            path=build, reference=False, why="",
        )  # fmt: skip
        return package_directory(build, Metadata()), module_name(f"org/{name}", Metadata(), digest), origin

    return describe


def python_build(namespace, value, more=""):
    return {
        "__init__.py": f"import torch\n{more}\n"
        f"@torch.library.custom_op('{namespace}::value', mutates_args=())\n"
        f"def value(x: torch.Tensor) -> torch.Tensor:\n    return x * {value}\n"
    }


def test_a_second_build_of_a_namespace_is_refused_before_it_runs(describe, tmp_path):
    runs = tmp_path / "runs"
    first = import_build(*describe("kernel", python_build("kl_first", 2), 11))
    second = describe("kernel", python_build("kl_first", 3, counts_runs(runs)), 12)
    with pytest.raises(OpNamespaceTaken, match=r"kl_first are those of kernel_loader\.loaded\.kernel_1111") as caught:
        import_build(*second)
    assert caught.value.namespaces == ("kl_first",)
    assert caught.value.origin.digest == "12" * 32
    assert not runs.exists()
    assert second[1] not in sys.modules
    assert torch.ops.kl_first.value(torch.ones(1)).item() == first.value(torch.ones(1)).item() == 2


def test_builds_of_other_namespaces_live_side_by_side(describe):
    one = import_build(*describe("kernel", python_build("kl_one", 2), 21))
    two = import_build(*describe("kernel", python_build("kl_two", 3), 22))
    assert [build.value(torch.ones(1)).item() for build in (one, two)] == [2, 3]


def test_a_build_that_has_begun_to_run_keeps_its_namespace(describe, tmp_path):
    ready = tmp_path / "ready"
    source = python_build("kl_failed", 4)["__init__.py"]
    failing = {
        "__init__.py": f"{source}\nimport pathlib\nif not pathlib.Path({str(ready)!r}).exists(): raise RuntimeError"
    }
    build = describe("kernel", failing, 31)
    with pytest.raises(Exception, match="RuntimeError"):
        import_build(*build)
    with pytest.raises(OpNamespaceTaken):  # its ops may be there
        import_build(*describe("kernel", python_build("kl_failed", 5), 32))
    ready.touch()
    assert import_build(*build).value(torch.ones(1)).item() == 4


def test_a_large_library_is_searched_in_no_time(tmp_path):
    (tmp_path / "digits.so").write_bytes(
        b"1" * 2**20 + b"_ZL25TORCH_LIBRARY_init_my_opsRN5torch7LibraryE" + b"7" * 2**20
    )
    assert defined(tmp_path) == {"my_ops"}


def test_threads_that_come_with_one_namespace_are_told_apart(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("import torch\ntorch.library.define('mine::x', '() -> ()')")
    claims, outcomes, inside = Claims(), [], threading.Event()

    def take(name):
        try:
            with claims.claim(name, tmp_path / name):
                inside.wait(20)
                outcomes.append("ran")
        except NamespaceTakenError:
            outcomes.append("refused")
            inside.set()

    threads = [threading.Thread(target=take, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["ran", "refused"]


# --- compiled -----------------------------------------------------------------------------------------------------

COMPILED = """
#define Py_LIMITED_API 0x03090000
#include <Python.h>
#include <ATen/Tensor.h>
#include <torch/library.h>
static at::Tensor twice(const at::Tensor &x) { return x.mul(2); }
TORCH_LIBRARY(kl_compiled, m) { m.def("twice(Tensor x) -> Tensor", &twice); }
TORCH_LIBRARY_FRAGMENT(kl_fragment, m) { m.def("twice(Tensor x) -> Tensor", &twice); }
TORCH_LIBRARY_IMPL(aten, Meta, m) {}
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "ext", "", -1, nullptr};
PyMODINIT_FUNC PyInit_ext(void) { return PyModule_Create(&module); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A compiled module that registers ops with torch's own macros."""
    return compile_library(COMPILED, tmp_path_factory.mktemp("compiled") / "ext.abi3.so")


@pytest.mark.needs_compiler
def test_a_second_compiled_build_of_a_namespace_does_not_end_the_process(library, tmp_path, run_python):
    for name in "ab":
        write_build(tmp_path / name, "torch-universal", {"__init__.py": f"from . import ext\nname = {name!r}"})
        (tmp_path / name / "build/torch-universal/ext.abi3.so").write_bytes(library.read_bytes())
    assert defined(tmp_path / "a") == {"kl_compiled", "kl_fragment"}
    script = textwrap.dedent("""
        import kernel_loader, torch
        first = kernel_loader.load_module("org/a")
        try:
            kernel_loader.load_module("org/b")
        except kernel_loader.OpNamespaceTaken as error:
            print(error.namespaces, torch.ops.kl_compiled.twice(torch.ones(1)).item())
    """)
    local = f"org/a={tmp_path / 'a'}:org/b={tmp_path / 'b'}"
    assert run_python(script, env={"KERNEL_LOADER_LOCAL": local}) == "('kl_compiled', 'kl_fragment') 2.0\n"
