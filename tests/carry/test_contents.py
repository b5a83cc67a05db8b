"""bundle.json: what is read of it is what was written, and nothing else passes."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from kernel_loader.carry.contents import Bundle
from kernel_loader.errors import BundleError
from tests.carry.conftest import BUILD, COMMIT, digest, document, listed

OTHER = BUILD | {"__init__.py": b"value = 2\n"}


def changed(**more):
    """The document, with its repository changed."""
    found = document()
    found["repositories"][0] |= more
    return found


def renamed(*paths):
    """A build with files of these paths, consistent otherwise."""
    return document(dict.fromkeys(paths, b"x"))


def wrong_file(**more):
    found = document()
    found["builds"][digest()]["__init__.py"] |= more
    return found


def test_what_is_written_is_read():
    bundle = Bundle.parse(json.dumps(document(BUILD, OTHER)))
    assert bundle.files == {digest(BUILD): listed(BUILD), digest(OTHER): listed(OTHER)}
    (repository,) = bundle.repositories
    assert (repository.repo, repository.revision, repository.commit) == ("org/kernel", "v1", COMMIT)
    assert repository.metadata["torch-universal"] == BUILD["metadata.json"].decode()
    assert bundle.size == sum(map(len, [*BUILD.values(), *OTHER.values()]))
    assert Bundle.parse(bundle.to_json()) == bundle


def test_equal_bundles_have_equal_texts():
    bundle = Bundle.parse(json.dumps(document(BUILD, OTHER)))
    (repository,) = bundle.repositories
    turned = Bundle(
        (repository._replace(names=repository.names[::-1], builds=dict(reversed(repository.builds.items()))),),
        dict(reversed(bundle.files.items())),
        bundle.publishers,
    )
    assert turned.to_json() == bundle.to_json()


def test_a_build_without_metadata_and_one_that_is_not_carried_are_known():
    bare = {"__init__.py": b""}
    found = document(bare)
    found["repositories"][0]["names"] += ["torch-cuda", "not-of-the-grammar"]
    found["repositories"][0]["metadata"]["torch-cuda"] = '{"name": "naïve"}'
    bundle = Bundle.parse(json.dumps(found))
    assert bundle.repositories[0].metadata == {"torch-universal": None, "torch-cuda": '{"name": "naïve"}'}
    assert Bundle.parse(bundle.to_json()).to_json() == bundle.to_json()


BAD = {
    "no JSON": (b"{", "is no JSON"),
    "no table": ([], "a table was expected"),
    "not Unicode": (b'{"schema": "\xff"}', "is no JSON"),
    "deep": (b"[" * 100_000, "is no JSON"),
    "a key twice": (b'{"schema": 1, "schema": 1}', "a key stands twice"),
    "a huge number": (b'{"schema": %s}' % (b"9" * 5000), "is no JSON"),
    "no schema": (document(schema=None), "it has no schema"),
    "of another kind": ({"files": {}}, "it has no schema"),
    "older": (document(schema=0), r"older format \(0; this release reads 1\)"),
    "newer": (document(schema=2, whatever=3), r"newer format \(2; this release reads 1\)"),
    "an unknown key": (document(more=1), "more"),
    "no builds": (document(builds=None), "the key builds is missing"),
    "no repositories": (document(repositories=None), "the key repositories is missing"),
    "no publishers": (document(publishers=None), "the key publishers is missing"),
    "a publisher of nothing": (document(publishers=["evil"]), "'evil' has no repository here"),
    "a repository twice": (document(repositories=document()["repositories"] * 2), "org/kernel@v1 is there twice"),
    "a build of nobody": (document(repositories=[], publishers=[]), "is of no repository"),
    "a build that is not there": (document(builds={}), "torch-universal of org/kernel is not among its builds"),
    "no repository id": (changed(repo="../kernel"), "is not a repository id"),
    "no revision": (changed(revision=None), "the key revision is missing"),
    "a revision that is no text": (changed(revision="\ud800"), "is not a branch, tag or commit"),
    "an empty revision": (changed(revision=""), "is not a branch, tag or commit"),
    "a short commit": (changed(commit="abc"), "is not a commit"),
    "a name that is not listed": (changed(names=["torch-cpu"]), "'torch-universal' is not among the names"),
    "a build of no grammar": (
        changed(names=["../x"], metadata={"../x": BUILD["metadata.json"].decode()}, builds={"../x": digest()}),
        "'../x' is no build",
    ),
    "other metadata": (changed(metadata={"torch-universal": "{}"}), "is not its metadata.json"),
    "no metadata of a build": (changed(metadata={}), "is not its metadata.json"),
    "null for metadata": (changed(metadata={"torch-universal": None}), "is not its metadata.json"),
    "damaged metadata": (changed(metadata={"torch-universal": "{"}), "not JSON"),
    "metadata that is no text": (changed(metadata={"torch-universal": '{"name": "\ud800"}'}), "is not Unicode"),
    "a wrong digest": (
        document(builds={"0" * 64: document()["builds"][digest()]}), "its name is not the digest of its files",
    ),
    "a build without files": (document({}), "a build has files"),
    "no size": (wrong_file(size=None), "the key size is missing"),
    "a size below zero": (wrong_file(size=-1), "is below zero"),
    "no hash": (wrong_file(sha256="A" * 64), "is not a sha256"),
    "another hash": (wrong_file(sha256="0" * 64), "its name is not the digest"),
    **{
        f"the path {path!r}": (renamed(path), "outside its build")
        for path in (
            "../x", "/abs", "a/../../x", "a//b", "a/", ".", "..", "", "C:\\x", "C:x", "a\\b", "a\0b", "a\nb",
            "__pycache__/x.pyc", "a/__pycache__/x.pyc",
        )
    },
    "equal by case": (renamed("a.py", "A.py"), "have one name where capitals do not count"),
    "a file below a file": (renamed("a", "a/b"), "has other files below it"),
    "a file below a file by case": (renamed("A", "a/b"), "has other files below it"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_said(what):
    given, said = BAD[what]
    text = given if isinstance(given, bytes) else json.dumps(given).encode()
    with pytest.raises(BundleError, match=said) as raised:
        Bundle.parse(text, "carried.klb")
    assert str(raised.value).startswith("Bundle carried.klb: ")
    assert re.search("Make it again|make it again", raised.value.remedy)


def test_another_format_says_which_release_reads_it():
    with pytest.raises(BundleError) as raised:
        Bundle.parse(json.dumps(document(schema=2)))
    assert raised.value.remedy.startswith("Import it with the release of kernel-loader that made it")


DEEP = """
import json, resource
from kernel_loader.carry.contents import Bundle
from kernel_loader.errors import BundleError
from tests.carry.conftest import document
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
try:
    Bundle.parse(json.dumps(document({"a/" * 8000 + "x": b"", "a/a": b""})))
except BundleError as error:
    print("refused")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no RLIMIT_CPU")
def test_a_deep_path_costs_little():
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "refused\n", done.stderr


def places(value, path=()):
    """The way to each value in a document."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


PLACES = [path for path in places(document(BUILD, OTHER)) if path]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(PLACES), ANYTHING)
def test_whatever_stands_anywhere_is_read_or_refused(path, value):
    found = document(BUILD, OTHER)
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        bundle = Bundle.parse(json.dumps(found))
    except BundleError:
        return
    bundle.to_json().encode()
    assert Bundle.parse(bundle.to_json()).to_json() == bundle.to_json()
