"""A build becomes a module: once, under a stable name, from source, and without a trace when it fails."""

import importlib
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

from kernel_loader.digest import verify
from kernel_loader.errors import AbiMismatch, KernelImportError, MissingDependency, SourceError
from kernel_loader.importer import import_build, module_name, package_directory
from kernel_loader.metadata import Metadata
from kernel_loader.provenance import Origin
from tests.builds import counts_runs, write_build


@pytest.fixture
def describe(tmp_path, workshop):
    """Write a build that is made of these files; gives the arguments of `import_build`."""

    def describe(files, name="k", where="repository"):
        build = write_build(tmp_path / where / name, "torch-universal", files)
        metadata = Metadata.parse((build / "metadata.json").read_bytes())
        digest = verify(build, metadata)
        origin = Origin(
            kernel=name,
            source="local",
            repo=f"org/{name}",
            revision=None,
            variant="torch-universal",
            digest=digest,
            path=build,
            reference=False,
            why="",
        )
        return package_directory(build, metadata), module_name(f"org/{name}", metadata, digest), origin

    return describe


@pytest.fixture
def bring(describe):
    """Import a build that is made of these files; gives the module."""
    return lambda files, **where: import_build(*describe(files, **where))


def loaded():
    return {name for name in sys.modules if name.startswith("kernel_loader.loaded.")}


def test_the_name_says_which_kernel_and_which_content(bring):
    module = bring({"__init__.py": "x = 1"}, name="some-kernel")
    stem, _, digits = module.__name__.rpartition("_")
    assert stem == "kernel_loader.loaded.some_kernel"
    assert len(digits) == 12
    assert sys.modules[module.__name__] is module


def test_a_second_import_gives_the_same_module_and_runs_nothing(bring, tmp_path):
    source = counts_runs(tmp_path / "runs")
    assert bring({"__init__.py": source}) is bring({"__init__.py": source})
    assert (tmp_path / "runs").read_text() == "x"


def test_builds_of_other_content_live_side_by_side(bring):
    one, two = bring({"__init__.py": "x = 1"}), bring({"__init__.py": "x = 2"}, where="other")
    assert (one.x, two.x) == (1, 2)


def test_the_nested_layout_of_old_builds_is_found(tmp_path, bring):
    build = tmp_path / "repository" / "some-kernel" / "build" / "torch-universal"
    write_build(tmp_path / "repository" / "some-kernel", "torch-universal", {"some_kernel/__init__.py": "x = 3"})
    (build / "__init__.py").unlink()
    assert package_directory(build, Metadata(name="some-kernel")) == build / "some_kernel"
    assert package_directory(build, Metadata()) == build / "some_kernel"


def test_a_directory_without_a_package_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no __init__"):
        package_directory(tmp_path / "empty", Metadata())
    with pytest.raises(SourceError, match="cannot be listed"):
        package_directory(tmp_path / "gone", Metadata())


def test_relative_imports_work_at_any_time(bring):
    module = bring(
        {
            "__init__.py": "from .a import value\ndef late():\n    from .sub.b import value\n    return value\n",
            "a.py": "value = 1",
            "sub/__init__.py": "",
            "sub/b.py": "from ..a import value as one\nvalue = one + 1",
        }
    )
    assert module.value == 1
    assert module.late() == 2
    assert importlib.import_module(f"{module.__name__}.sub.b").value == 2


def test_a_directory_without_init_is_a_namespace_package(bring):
    module = bring({"__init__.py": "from .sub import b\nvalue = b.value", "sub/b.py": "value = 4"})
    assert module.value == 4


def test_bytecode_is_neither_written_nor_read(bring, tmp_path):
    module = bring({"__init__.py": "from . import a", "a.py": "value = 1"})
    build = tmp_path / "repository/k/build/torch-universal"
    assert not list(build.rglob("*.pyc"))
    # Bytecode of other content, in the place and with the stamp that Python trusts.
    import py_compile

    evil = tmp_path / "evil.py"
    evil.write_text("value = 2")
    os.utime(evil, ns=((build / "a.py").stat().st_atime_ns, (build / "a.py").stat().st_mtime_ns))
    py_compile.compile(str(evil), cfile=importlib.util.cache_from_source(str(build / "a.py")))
    for name in [name for name in sys.modules if name.startswith(module.__name__)]:
        del sys.modules[name]
    assert bring({"__init__.py": "from . import a", "a.py": "value = 1"}).a.value == 1


def test_thirty_two_threads_run_a_build_once(describe, tmp_path):
    source = f"{counts_runs(tmp_path / 'runs')}\nimport time\nfor _ in range(1000): time.sleep(0)\ndone = True"
    arguments = describe({"__init__.py": source})
    start, modules = threading.Barrier(32), []

    def work():
        start.wait(10)
        modules.append(import_build(*arguments))

    threads = [threading.Thread(target=work) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(modules) == 32
    assert len({id(module) for module in modules}) == 1
    assert modules[0].done
    assert (tmp_path / "runs").read_text() == "x"


@pytest.mark.parametrize(
    "failure", ["raise RuntimeError('no such device')", "1 / 0", "import kernel_loader.nothing", "def ("]
)
def test_a_failed_import_leaves_nothing_behind(bring, failure):
    before = loaded()
    with pytest.raises(KernelImportError) as caught:
        bring({"__init__.py": f"from . import a\n{failure}", "a.py": "from . import b", "b.py": ""})
    assert loaded() == before
    assert caught.value.__cause__ is not None
    assert type(caught.value.__cause__).__name__ in caught.value.cause
    assert caught.value.origin.variant == "torch-universal"


def test_an_interrupt_passes_through_and_leaves_nothing_behind(bring):
    before = loaded()
    with pytest.raises(KeyboardInterrupt):
        bring({"__init__.py": "from . import a\nraise KeyboardInterrupt", "a.py": ""})
    assert loaded() == before


def test_a_failure_is_not_remembered(bring, tmp_path):
    source = f"import pathlib\nif not pathlib.Path({str(tmp_path / 'ready')!r}).exists(): raise RuntimeError('not yet')"
    with pytest.raises(KernelImportError, match="not yet"):
        bring({"__init__.py": source})
    (tmp_path / "ready").touch()
    assert bring({"__init__.py": source})


def test_a_package_that_is_not_installed_is_named_with_the_command_that_installs_it(bring):
    with pytest.raises(MissingDependency, match="pip install no_such_package_here") as caught:
        bring({"__init__.py": "import no_such_package_here.sub"})
    assert caught.value.requirements == ("no_such_package_here",)


def test_a_module_that_the_build_itself_lacks_is_no_missing_dependency(bring):
    with pytest.raises(KernelImportError) as caught:
        bring({"__init__.py": "from . import gone"})
    assert not isinstance(caught.value, MissingDependency)


# --- shared libraries ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def extension(tmp_path_factory):
    """A compiled module `ext` with `answer()`, for the limited API."""
    directory = tmp_path_factory.mktemp("extension")
    source = directory / "ext.c"
    source.write_text(
        textwrap.dedent("""
        #define Py_LIMITED_API 0x03090000
        #include <Python.h>
        static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
        static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {0}};
        static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "ext", "", -1, methods};
        PyMODINIT_FUNC PyInit_ext(void) { return PyModule_Create(&module); }
        """)
    )
    import sysconfig

    library = directory / "ext.abi3.so"
    include = sysconfig.get_path("include")
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)], check=True, timeout=60)
    return library


def with_library(tmp_path, content, name="k"):
    build = write_build(tmp_path / "repository" / name, "torch-universal", {"__init__.py": "from . import ext"})
    (build / "ext.abi3.so").write_bytes(content)


@pytest.mark.needs_compiler
def test_a_compiled_module_inside_a_build_is_imported(tmp_path, bring, extension):
    with_library(tmp_path, extension.read_bytes())
    assert bring({"__init__.py": "from . import ext"}).ext.answer() == 42


@pytest.mark.needs_compiler
@pytest.mark.parametrize("damage", ["other cpu", "truncated", "garbage", "empty"])
def test_a_library_that_does_not_fit_this_machine_is_an_abi_mismatch(tmp_path, bring, extension, damage):
    content = bytearray(extension.read_bytes())
    if damage == "other cpu":
        content[18:20] = b"\xb7\x00" if content[18] != 0xB7 else b"\x3e\x00"  # e_machine: AArch64, or x86-64
    elif damage == "truncated":
        del content[40:]  # inside the header
    else:
        content = bytearray(b"not a library" * 100 if damage == "garbage" else b"")
    with_library(tmp_path, bytes(content))
    before = loaded()
    said = {"other cpu": "it was built for", "truncated": "cut short", "garbage": "no ELF", "empty": "no ELF"}[damage]
    with pytest.raises(AbiMismatch, match=f"ext.abi3.so: .*{said}"):
        bring({"__init__.py": "from . import ext"})
    assert loaded() == before


# --- other processes ----------------------------------------------------------------------------------------------


def test_an_object_of_a_loaded_module_pickles_to_a_process_that_has_not_loaded_it(tmp_path, bring):
    module = bring({"__init__.py": "class Point:\n    def __init__(self, x):\n        self.x = x\n"})
    data = pickle.dumps(module.Point(7))
    script = "import pickle, sys; print(pickle.load(sys.stdin.buffer).x)"
    local = {"KERNEL_LOADER_LOCAL": f"org/k={tmp_path / 'repository' / 'k'}"}
    run = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, timeout=60, check=False, env=os.environ | local
    )
    assert run.stdout == b"7\n", run.stderr.decode()
    # What is there now is verified against the digest in the name.
    (tmp_path / "repository/k/build/torch-universal/__init__.py").write_text("raise SystemExit('ran')")
    run = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, timeout=60, check=False, env=os.environ | local
    )
    assert b"ModuleNotFoundError" in run.stderr
    assert b"ran" not in run.stderr


def test_a_build_that_vanishes_is_an_error_of_our_tree(tmp_path, bring):
    build = write_build(tmp_path / "gone", "torch-universal")
    shutil.rmtree(build)
    with pytest.raises(SourceError):
        verify(build, Metadata())


def test_bytecode_of_an_old_layout_is_never_taken_for_the_package(tmp_path):
    build = write_build(tmp_path / "k", "torch-universal", {"zzz/__init__.py": "", "__pycache__/__init__.py": "evil"})
    (build / "__init__.py").unlink()
    assert package_directory(build, Metadata()) == build / "zzz"


@pytest.mark.parametrize("name", ["../../outside", "a.b", "__pycache__", "/tmp"])
def test_a_name_in_the_metadata_leads_to_nothing_outside_the_build(tmp_path, name):
    build = write_build(tmp_path / "k", "torch-universal")
    (build / "__init__.py").unlink()
    write_build(tmp_path, "outside")
    with pytest.raises(SourceError, match="no __init__"):
        package_directory(build, Metadata(name=name))


def test_several_packages_need_one_of_the_kernels_name(tmp_path):
    build = write_build(tmp_path / "k", "torch-universal", {"a/__init__.py": "", "b/__init__.py": ""})
    (build / "__init__.py").unlink()
    assert package_directory(build, Metadata(name="b")) == build / "b"
    with pytest.raises(SourceError, match="several packages"):
        package_directory(build, Metadata())


def test_what_is_imported_is_what_was_verified_last(describe, tmp_path):
    broken = "raise RuntimeError('not yet')"
    with pytest.raises(KernelImportError):
        import_build(*describe({"__init__.py": broken}, where="first"))
    (tmp_path / "first/k/build/torch-universal/__init__.py").write_text(
        "raise SystemExit('changed after it was verified')"
    )
    with pytest.raises(KernelImportError, match="not yet"):
        import_build(*describe({"__init__.py": broken}, where="second"))


def test_a_build_that_ends_the_process_is_a_failed_import(bring):
    with pytest.raises(KernelImportError, match="SystemExit: 3"):
        bring({"__init__.py": "import sys; sys.exit(3)"})


def test_a_missing_module_of_an_installed_package_is_no_missing_dependency(bring):
    with pytest.raises(KernelImportError) as caught:
        bring({"__init__.py": "import json.no_such_module"})
    assert not isinstance(caught.value, MissingDependency)


@pytest.mark.needs_compiler
def test_a_library_that_was_cut_short_does_not_end_the_process(tmp_path, bring, extension):
    whole = extension.read_bytes()
    for kept in (len(whole) // 2, len(whole) // 4, 100):
        with_library(tmp_path, whole[:kept], name=f"k{kept}")
        with pytest.raises(AbiMismatch, match="cut short"):
            bring({"__init__.py": "from . import ext"}, name=f"k{kept}")


def test_a_process_that_cannot_find_the_build_of_an_object_is_told_what_it_lacks(bring):
    data = pickle.dumps(bring({"__init__.py": "class Point: pass"}).Point())
    script = "import pickle, sys; pickle.load(sys.stdin.buffer)"
    run = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=60, check=False)
    assert b"Give it the environment of the process that loaded the kernel" in run.stderr
