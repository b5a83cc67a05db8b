"""Entrypoints become the fields of a bundle; what is missing is named, all of it."""

import dataclasses
import pickle

import pytest

from kernel_loader.errors import KernelImportError, ManifestError, MissingEntrypoints
from tests.builds import write_build, write_manifest

SOURCE = """
class functions:
    @staticmethod
    def double(x):
        return 2 * x

def alignment():
    return 128

def fails():
    raise OSError("no device")
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """A bundle of the tests."""

    __kernel__ = "tools"

    twice: object
    alignment: int


@dataclasses.dataclass
class Thawed:
    """A bundle that is not frozen."""

    __kernel__ = "tools"

    twice: object
    alignment: int


HERE = f"{__name__}:Tools"


def test_dotted_symbols_and_values_that_are_computed_at_load(workshop):
    workshop.simple("tools", SOURCE, entrypoints={"twice": "functions.double", "alignment": {"call": "alignment"}})
    tools = workshop.loader().load("tools")
    assert tools.twice(21) == 42
    assert tools.alignment == 128


def test_a_package_need_not_import_the_modules_of_its_symbols(workshop):
    entrypoints = {"twice": "inner.functions.double", "alignment": {"call": "inner.alignment"}}
    repository = workshop.kernel("tools", entrypoints=entrypoints)
    files = {
        "__init__.py": "",
        "inner/__init__.py": "def alignment():\n    return 128\n",
        "inner/functions.py": "def double(x):\n    return 2 * x\n",
    }
    write_build(repository, "torch-universal", files)
    tools = workshop.loader().load("tools")
    assert (tools.twice(21), tools.alignment) == (42, 128)


@pytest.mark.parametrize(
    ("source", "error"),
    [("import nonsense_that_is_not_there\n", KernelImportError), ("this is no Python\n", KernelImportError)],
)
def test_a_module_on_the_way_to_a_symbol_that_fails_says_why(workshop, source, error):
    repository = workshop.kernel("tools", entrypoints={"twice": "functions.double", "alignment": "there"})
    write_build(repository, "torch-universal", {"__init__.py": "there = 1\n", "functions.py": source})
    with pytest.raises(error, match=r"looking up functions\.double raised") as caught:
        workshop.loader().load("tools")
    assert not isinstance(caught.value, MissingEntrypoints)


def test_a_bundle_made_from_entrypoints_is_a_frozen_dataclass(workshop):
    workshop.simple("tools", SOURCE, entrypoints={"twice": "functions.double", "alignment": "alignment"})
    tools = workshop.loader().load("tools")
    assert type(tools).__name__ == "Tools"
    assert [field.name for field in dataclasses.fields(tools)] == ["twice", "alignment"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        tools.twice = None
    assert pickle.loads(pickle.dumps(tools)) == tools


def test_fields_without_an_entrypoint_bind_to_their_own_name(workshop):
    workshop.simple("tools", SOURCE, bundle=HERE, entrypoints={"twice": "functions.double"})
    tools = workshop.loader().load("tools")
    assert isinstance(tools, Tools)
    assert tools.alignment() == 128


def test_all_missing_symbols_are_reported_at_once(workshop):
    entrypoints = {"twice": "functions.triple", "alignment": {"call": "nothing.at.all"}, "double": "functions.double"}
    workshop.simple("tools", SOURCE, entrypoints=entrypoints)
    with pytest.raises(MissingEntrypoints) as caught:
        workshop.loader().load("tools")
    assert caught.value.names == ("twice = functions.triple", "alignment = nothing.at.all()")
    assert "alignment, fails, functions" in str(caught.value)
    assert "torch-universal" in str(caught.value)


def test_a_computed_value_that_fails_is_an_import_error(workshop):
    workshop.simple("tools", SOURCE, entrypoints={"value": {"call": "fails"}})
    with pytest.raises(KernelImportError, match=r"fails\(\) raised OSError: no device"):
        workshop.loader().load("tools")


@pytest.mark.parametrize(
    ("keys", "path", "detail"),
    [
        ({"bundle": "no.such.module:Tools"}, "bundle", "cannot be imported"),
        ({"bundle": f"{__name__}:NoSuchClass"}, "bundle", "cannot be imported"),
        ({"bundle": f"{__name__}:SOURCE"}, "bundle", "is not a class"),
        ({"bundle": f"{__name__}:Thawed"}, "bundle", "is not a frozen dataclass"),
        ({"bundle": "builtins:int"}, "bundle", "is not a frozen dataclass"),
        ({"bundle": HERE, "entrypoints": {"thrice": "functions.double"}}, "entrypoints.thrice", "no such field"),
        ({"entrypoints": None}, "entrypoints", "without a bundle"),
    ],
)
def test_a_manifest_whose_bundle_cannot_be_made_is_refused(workshop, keys, path, detail):
    workshop.simple("tools", SOURCE)
    write_manifest(workshop.manifests, "tools", **({"entrypoints": {"twice": "functions.double"}} | keys))
    with pytest.raises(ManifestError, match=detail) as caught:
        workshop.loader().load("tools")
    assert caught.value.path == path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lenient:
    """A bundle with fields that a build may lack, and one that it never has."""

    twice: object
    alignment: int = 64
    extra: tuple = dataclasses.field(default=(), init=False)


def test_a_field_with_a_default_may_lack_its_symbol(workshop):
    entrypoints = {"twice": "functions.double", "alignment": {"call": "no_such_function"}}
    workshop.simple("tools", SOURCE, bundle=f"{__name__}:Lenient", entrypoints=entrypoints)
    assert workshop.loader().load("tools").alignment == 64


def test_whatever_a_lookup_raises_is_an_error_of_our_tree(workshop):
    workshop.simple("tools", "def __getattr__(name): raise RuntimeError(name)", entrypoints={"twice": "double"})
    with pytest.raises(KernelImportError, match="looking up double raised RuntimeError"):
        workshop.loader().load("tools")


@dataclasses.dataclass(frozen=True)
class Picky:
    """A bundle that refuses to be made."""

    twice: object

    def __post_init__(self):
        raise ValueError("refused")


def test_a_bundle_that_refuses_its_entrypoints_is_an_error_of_our_tree(workshop):
    workshop.simple("tools", SOURCE, bundle=f"{__name__}:Picky", entrypoints={"twice": "functions.double"})
    with pytest.raises(KernelImportError, match="making Picky raised ValueError: refused"):
        workshop.loader().load("tools")


def test_entrypoints_of_an_alternative_are_fields_too(workshop):
    other = {"repo": "org/other", "version": 1, "entrypoints": {"thrice": "functions.double"}}
    for bundle in (HERE, None):
        workshop.simple("tools", SOURCE, bundle=bundle, entrypoints={"twice": "x"}, alternatives=[other])
        with pytest.raises(ManifestError, match="no such field") as caught:
            workshop.loader().load("tools")
        assert caught.value.path == "alternatives[0].entrypoints.thrice"
