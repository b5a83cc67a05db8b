"""Lock files as values: read, written, asked. Nothing here asks a Hub or a store."""

import re
import sys
from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from kernel_loader.errors import LockError, LockMismatch, LockMissing, LockStale, RequestError
from kernel_loader.lock import MAX_BYTES, Lock, LockedBuild, LockedFile, LockedKernel, LockedRepository, Place
from kernel_loader.manifest import Manifest
from kernel_loader.metadata import KernelDependency, Metadata
from kernel_loader.rules import NOTHING
from kernel_loader.sources import Request
from tests.builds import CPU_HOST, H200
from tests.hosts import HOSTS

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = COMMIT[::-1]
SHA = "5e" * 32


def build(variant="torch-universal", *paths, **metadata):
    files = [LockedFile(path, 7, SHA) for path in paths or ("__init__.py", "metadata.json")]
    return LockedBuild.of(variant, files, Metadata(**metadata))


def repository(repo="org/kernel", version=1, commit=COMMIT, builds=None):
    builds = builds or [build()]
    return LockedRepository(Request(repo, version), commit, {one.variant: one for one in builds})


def kernel(name="kernel", *repos, requires=NOTHING, backends=()):
    places = (Place(Request(repo, 1), backends, requires) for repo in repos or ("org/kernel",))
    return LockedKernel(name, tuple(places))


LOCK = Lock((kernel(),), (repository(),))
TEXT = LOCK.to_toml()


# --- written and read ---------------------------------------------------------------------------------------------

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="/\\:"), min_size=1)
paths = (
    st.lists(names.filter(lambda name: name not in (".", "..", "__pycache__")), min_size=1, max_size=3)
    .map("/".join)
    .filter(lambda path: "'''" not in path)
)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
metadata = st.builds(
    Metadata,
    name=st.none() | texts,
    version=st.none() | st.integers(0, 2**40),
    backend=st.none() | st.sampled_from(["cuda", "rocm", "cpu"]),
    archs=st.none() | st.lists(texts, max_size=3).map(tuple),
    python_depends=st.lists(texts, max_size=2).map(tuple),
    kernel_depends=st.lists(
        st.builds(KernelDependency, st.just("org/other"), st.integers(0, 9), st.none())
        | st.builds(KernelDependency, st.just("a/b"), st.none(), texts.filter(bool)),
        max_size=2,
    ).map(tuple),
    kernels_minver=st.none() | st.just("0.17.2"),
)
files = st.lists(
    st.builds(LockedFile, paths, st.integers(0, 2**40), st.binary(min_size=32, max_size=32).map(bytes.hex)),
    min_size=1,
    max_size=4,
    unique_by=lambda file: file.path.casefold().split("/")[0],
)
variants = st.sampled_from(["torch-universal", "torch-cuda", "torch211-cxx11-cu130-x86_64-linux", "torch-cpu"])
builds = st.lists(st.builds(LockedBuild.of, variants, files, metadata), max_size=3, unique_by=lambda one: one.variant)
requires = st.sampled_from(
    [
        {},
        {"cuda-capability": ">=8.9,<10"},
        {"gfx": ["gfx942"], "python": ["einops>=0.8; python_version > '3'"], "driver": ">=580", "torch": ">=2.6"},
    ]
).map(lambda table: Manifest.from_table({"name": "k", "repo": "o/k", "version": 1, "requires": table}, "").requires)


@st.composite
def locks(draw):
    requests = draw(
        st.lists(
            st.builds(Request, st.sampled_from(["org/a", "org/b.c", "x-y/z_1"]), st.integers(0, 3), st.none())
            | st.builds(Request, st.just("org/r"), st.none(), st.sampled_from(["main", COMMIT, "refs/pr/1"])),
            max_size=3,
            unique_by=str,
        )
    )
    repositories = [
        LockedRepository(request, draw(st.sampled_from([COMMIT, OTHER])), {one.variant: one for one in draw(builds)})
        for request in requests
    ]
    places = st.builds(Place, st.sampled_from(requests or [None]), st.sampled_from([(), ("cuda", "rocm")]), requires)
    kernels = draw(
        st.lists(
            st.builds(LockedKernel, texts.filter(bool), st.lists(places, min_size=1, max_size=2).map(tuple)),
            max_size=2 if requests else 0,
            unique_by=lambda one: one.name,
        )
    )
    return Lock(tuple(kernels), tuple(repositories))


@settings(deadline=None)
@given(locks())
def test_a_lock_that_is_written_is_read_as_it_was(lock):
    text = lock.to_toml()
    again = Lock.parse(text.encode())
    assert again == lock
    assert again.to_toml() == text
    assert Lock.parse(text.replace("\n", "\r\n")) == lock  # as git may check it out


def test_what_is_added_is_added_and_nothing_else_changes():
    more = Lock((*LOCK.kernels, kernel("other", "org/other")), (*LOCK.repositories, repository("org/other")))
    old, new = TEXT.splitlines(), more.to_toml().splitlines()
    position = iter(new)
    assert all(line in position for line in old)  # a subsequence: nothing of it was moved or rewritten


def test_equal_locks_are_equal_to_the_byte():
    one, two = (repository(builds=order) for order in ([build(), build("torch-cpu")], [build("torch-cpu"), build()]))
    assert one == two
    assert Lock((), (one,)).to_toml() == Lock((), (two,)).to_toml()
    assert LockedBuild.of("torch-cpu", reversed(build().files), Metadata()) == build("torch-cpu")


def test_what_does_not_decide_is_not_locked():
    about = Metadata(license="MIT", upstream="there", source="here", id="_x_1", dirty=True, version=2)
    assert build(**about._asdict()).metadata == Metadata(version=2)


UNWRITABLE = {
    "no files": (LockedBuild.of("torch-cpu", [], Metadata()), "it has no files"),
    "a literal text in a name": (build("torch-cpu", "it's '''quoted'''.py"), "cannot name the file"),
    "a control character": (build("torch-cpu", "\x7f.py"), "cannot name the file"),
    "half a surrogate pair": (build("torch-cpu", name="\ud800"), "not Unicode"),
    "a path outside": (build("torch-cpu", "../x.py"), "lies outside its build"),
    "bytecode": (build("torch-cpu", "__pycache__/x.txt"), "lies outside its build"),
    "a file below a file": (build("torch-cpu", "A", "a/b"), "has other files below it"),
    "names that differ in capitals": (build("torch-cpu", "A", "a"), "where capitals do not count"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_what_could_not_be_read_again_is_not_written(what):
    wrong, said = UNWRITABLE[what]
    assert said in wrong.problem
    with pytest.raises(LockError, match=f"torch-cpu cannot be written: .*{said}"):
        Lock((), (repository(builds=[wrong]),)).to_toml()


def test_a_name_that_no_file_can_hold_is_not_written():
    with pytest.raises(LockError, match="not Unicode"):
        Lock((kernel("\ud800"),), (repository(),)).to_toml()


def test_the_example_of_the_documentation_is_a_lock():
    page = (Path(__file__).parent.parent / "docs" / "lock.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(schema.*?)```", page, re.DOTALL)
    assert [one.name for one in Lock.parse(example).kernels] == ["finegrained_fp8"]


BAD = {
    "not UTF-8": (b"schema = 1\n\xff", "not UTF-8"),
    "not TOML": (b"what?", "not TOML"),
    "half a file": (TEXT[: len(TEXT) // 2], "not TOML"),
    "empty": (b"", "the key schema is missing"),
    "another file": (b'[project]\nname = "x"', "the key schema is missing"),
    "a newer schema": (TEXT.replace("schema = 1", "schema = 2"), "it is of schema 2, and this release reads 1"),
    "a schema that is none": (TEXT.replace("schema = 1", 'schema = "1"'), "a whole number was expected"),
    "an unknown key": (TEXT.replace("schema = 1", "schema = 1\nextra = 1"), "extra: unknown key"),
    "an unknown key of a build": (TEXT.replace("variant =", "varient ="), "did you mean variant?"),
    "no name": (TEXT.replace('name = "kernel"\n', ""), "the key name is missing"),
    "no commit": (TEXT.replace(f'commit = "{COMMIT}"\n', ""), "the key commit is missing"),
    "a commit that is none": (TEXT.replace(COMMIT, "main"), "'main' is not a commit"),
    "both a version and a revision": (TEXT.replace("version = 1\nc", 'version = 1\nrevision = "x"\nc'), "and not both"),
    "a repository that is none": (TEXT.replace("org/kernel", "kernel"), "is not a repository id"),
    "a backend that is none": (TEXT.replace("version = 1 }", 'version = 1, backends = ["cud"] }'), "'cud' is not one"),
    "a specifier that is none": (
        TEXT.replace("version = 1 }", 'version = 1, requires = { torch = "new" } }'),
        "is not a version specifier",
    ),
    "a digest of other files": (TEXT.replace(f"{SHA} 7 m", f"{'00' * 32} 7 m"), "not the digest of the files"),
    "a line that is none": (TEXT.replace(f"{SHA} 7 m", f"{SHA} seven m"), "is no line of sha256, size and path"),
    "no files": (TEXT.replace(f"{SHA} 7 __init__.py\n{SHA} 7 metadata.json\n", ""), "is no line of sha256"),
    "a path outside": (TEXT.replace("__init__.py", "../__init__.py"), "lies outside its build"),
    "an absolute path": (TEXT.replace("__init__.py", "/__init__.py"), "lies outside its build"),
    "a path of Windows": (TEXT.replace("__init__.py", "a\\\\b.py"), "lies outside its build"),
    "bytecode": (TEXT.replace("__init__.py", "__pycache__/x.pyc"), "lies outside its build"),
    "a path twice": (TEXT.replace("__init__.py", "METADATA.json"), "have one name where capitals do not count"),
    "a file below a file": (TEXT.replace("__init__.py", "metadata.json/x"), "has other files below it"),
    "a variant of no grammar": (TEXT.replace("torch-universal", "torch-cu12"), "builds without compiled code are"),
    "a build twice": (TEXT + TEXT[TEXT.index("\n[[repository.build") :], "torch-universal is listed twice"),
    "a repository twice": (TEXT + TEXT[TEXT.index("\n[[repository]]") :], "the repository org/kernel@v1 has two"),
    "a kernel twice": (
        TEXT.replace("[[repository]]", '[[kernel]]\nname = "kernel"\nfrom = [{ repo = "org/kernel", version = 1 }]\n'
                     "\n[[repository]]"),
        "the kernel kernel has two",
    ),
    "a kernel from nowhere": (TEXT.replace('repo = "org/kernel", version = 1', 'repo = "org/x", version = 1'),
                              "kernel comes from org/x@v1, which has no entry"),
    "a kernel of no repository": (TEXT.replace('{ repo = "org/kernel", version = 1 },', ""), "comes from a repository"),
    "metadata of another kind": (TEXT.replace("files =", 'metadata = { version = "1" }\nfiles ='), "a whole number"),
    "metadata that JSON does not know": (TEXT.replace("files =", "metadata = { name = 1979-05-27 }\nfiles ="), "date"),
    "a deep table": (b"a=" + b"[" * 100_000, "not TOML"),
    "a digest that is none": (TEXT.replace("digest = ", 'digest = "x"\n# '), "'x' is not a sha256 in hexadecimal"),
    "a size beyond all": (TEXT.replace(f"{SHA} 7 m", f"{SHA} {'9' * 17} m"), "is no line of sha256"),
    "a revision with a space": (TEXT.replace("version = 1\nc", 'revision = "a b"\nc'), "not a branch, tag or commit"),
    "a table for a list": (TEXT.replace("[[kernel]]", "[kernel]"), "kernel: a list was expected"),
    "another encoding": (TEXT.encode("utf-16"), "not UTF-8"),
    "a JSON object": (b'{"kernels": []}', "not TOML"),
    "JSON of another form": (b'[{"dependency": {"repo-id": "org/x"}}]', "an entry has a dependency and a lock"),
    "JSON that breaks off": (b'[{"dependency"', "not JSON"),
    "JSON without a commit": (b'[{"dependency": {"repo-id": "org/x"}, "lock": {}}]', "the key commit is missing"),
    "too large": (b"#" * (MAX_BYTES + 1), "are not read"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_bad_lock_file_is_refused_with_its_name(what, tmp_path):
    text, said = BAD[what]
    file = tmp_path / "kernel-loader.lock"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LockError) as caught:
        Lock.read(str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_lock_that_is_not_there_or_cannot_be_read_is_told(tmp_path):
    with pytest.raises(LockMissing, match="there is no such file"):
        Lock.read(str(tmp_path / "none"))
    with pytest.raises(LockError, match="cannot be read"):
        Lock.read(str(tmp_path))


# --- asked --------------------------------------------------------------------------------------------------------


def test_a_request_finds_its_repository_by_version_revision_or_commit():
    lock = Lock((), (repository(), LockedRepository(Request("org/kernel", None, "main"), OTHER, {})))
    assert lock.find(Request("org/kernel", 1)).commit == COMMIT
    assert lock.find(Request("org/kernel", None, "v1")).commit == COMMIT
    assert lock.find(Request("org/kernel", None, "main")).commit == OTHER
    assert lock.find(Request("org/kernel", None, COMMIT)).commit == COMMIT
    with pytest.raises(LockStale, match="has org/kernel at v1, main, and v2 is asked for"):
        lock.find(Request("org/kernel", 2))
    with pytest.raises(LockMissing, match="does not name org/other@v1"):
        lock.find(Request("org/other", 1))
    assert [lock.names(Request("org/kernel", version)) for version in (1, 2)] == [True, False]


def test_other_bytes_are_refused():
    locked = build()
    LOCK.check(Request("org/kernel", 1), "torch-universal", locked.digest, COMMIT)
    for variant, digest in (("torch-universal", "0" * 64), ("torch-cuda", locked.digest)):
        with pytest.raises(LockMismatch, match="not what is locked"):
            LOCK.check(Request("org/kernel", 1), variant, digest, COMMIT)
    with pytest.raises(LockMissing):
        LOCK.check(Request("org/other", 1), "torch-universal", locked.digest, COMMIT)


def test_a_host_selects_by_the_lock_alone():
    about = {"backend": "cuda", "archs": ("9.0",)}
    cuda = [build("torch211-cxx11-cu130-x86_64-linux", **about), build("torch-cuda", backend="cuda")]
    capable = Manifest.from_table(
        {"name": "k", "repo": "o/k", "version": 1, "requires": {"cuda-capability": ">=8.9"}}, ""
    ).requires
    lock = Lock(
        (
            kernel("kernel", "org/first", "org/second"),
            kernel("only_cuda", "org/first", requires=capable, backends=("cuda",)),
        ),
        (repository("org/first", builds=cuda), repository("org/second", builds=[build("torch-cpu")])),
    )
    chosen = {
        name: {kernel: found.taken.chosen.name if found.taken else None for kernel, found in lock.select(host).items()}
        for name, host in (("H200", H200), ("CPU", CPU_HOST), ("T4", HOSTS["T4"]))
    }
    assert chosen == {
        "H200": {"kernel": cuda[0].variant, "only_cuda": cuda[0].variant},
        "CPU": {"kernel": "torch-cpu", "only_cuda": None},
        "T4": {"kernel": "torch-cuda", "only_cuda": None},
    }
    assert "this host computes on cpu" in lock.select(CPU_HOST)["only_cuda"].explain()


def test_selecting_reads_no_file_and_asks_nobody(run_python, tmp_path):
    (tmp_path / "kernel-loader.lock").write_text(TEXT)
    (tmp_path / "host.json").write_text(CPU_HOST.to_json())
    code = f"""
import builtins, os, sys
sys.modules["torch"] = sys.modules["huggingface_hub"] = None
from kernel_loader.host import Host
from kernel_loader.lock import Lock
lock = Lock.read({str(tmp_path / "kernel-loader.lock")!r})
host = Host.from_json(open({str(tmp_path / "host.json")!r}).read())
lock.select(host)  # imports what it needs
sys.addaudithook(lambda event, given: os._exit(3) if event in ("open", "socket.connect") else None)
print(lock.select(host)["kernel"].chosen.name)
sys.stdout.flush()
os._exit(0)
"""
    assert run_python(code) == "torch-universal\n"


# --- the file of the kernels package, and locks that travel in packages ---------------------------------------------

PEERS = '[{"dependency": {"repo-id": "org/kernel", "version": 1}, "lock": {"commit": "%s"}}]' % COMMIT  # noqa: UP031
OLDER = '[{"repo_id": "org/kernel", "sha": "%s", "variants": {}}]' % COMMIT  # noqa: UP031


@pytest.mark.parametrize("text", [PEERS, OLDER, f"\n {PEERS}"])
def test_a_lock_of_the_kernels_package_names_commits_alone(text):
    lock = Lock.parse(text)
    assert lock.find(Request("org/kernel", 1)) == lock.repositories[0]
    assert lock.commit("org/kernel") == COMMIT
    lock.check(Request("org/kernel", 1), "torch-cuda", SHA, COMMIT)
    with pytest.raises(LockMismatch):
        lock.check(Request("org/kernel", 1), "torch-cuda", SHA, None)  # a directory, which no commit names
    for asked in (lambda: lock.select(CPU_HOST), lock.to_toml):
        with pytest.raises(LockError, match="names commits alone"):
            asked()


def test_its_version_counts_where_it_names_one():
    with pytest.raises(LockStale):
        Lock.parse(PEERS).find(Request("org/kernel", 2))
    assert Lock.parse(OLDER).find(Request("org/kernel", 2)).commit == COMMIT
    assert Lock.parse("[]") == Lock()


def test_the_one_commit_of_a_repository():
    two = Lock((), (repository(), replace(repository(version=2), commit=OTHER)))
    with pytest.raises(LockError, match="at 2 commits"):
        two.commit("org/kernel")
    with pytest.raises(LockMissing):
        two.commit("org/other")


@pytest.fixture
def site_packages(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def package(home, name, **files):
    (home / name).mkdir()
    (home / name / "__init__.py").write_text("raise AssertionError('a lock is read without importing its package')\n")
    for file, text in files.items():
        (home / name / file.replace("__", ".").replace("_", "-")).write_text(text)


def test_the_lock_of_a_package_travels_in_it(site_packages):
    package(site_packages, "has_lock", kernel_loader__lock=TEXT)
    assert Lock.for_package("has_lock") == LOCK
    assert "has_lock" not in sys.modules


def test_the_lock_beside_its_metadata_counts_too(site_packages):
    package(site_packages, "has_peers")
    information = site_packages / "has_peers-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: has_peers\nVersion: 1.0\n")
    (information / "kernels.lock").write_text(PEERS)
    assert Lock.for_package("has_peers").commit("org/kernel") == COMMIT


def test_its_distribution_may_be_spelt_with_dashes(site_packages):
    information = site_packages / "has_dashes-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: has-dashes\nVersion: 1.0\n")
    (information / "kernels.lock").write_text(PEERS)
    for name in ("has_dashes", "has-dashes"):
        assert Lock.for_package(name).commit("org/kernel") == COMMIT


def test_its_own_lock_comes_before_that_of_the_kernels_package(site_packages):
    package(site_packages, "has_both", kernel_loader__lock=TEXT)
    information = site_packages / "has_both-1.0.dist-info"
    information.mkdir()
    (information / "kernels.lock").write_text("[]")
    assert Lock.for_package("has_both") == LOCK


def test_an_editable_package_has_its_lock_in_the_sources(tmp_path, monkeypatch):
    package(tmp_path, "is_editable", kernel_loader__lock=TEXT)

    class Finder:  # as build backends install them
        @staticmethod
        def find_spec(name, path=None, target=None):
            home = tmp_path / name
            if name != "is_editable":
                return None
            return spec_from_file_location(name, home / "__init__.py", submodule_search_locations=[str(home)])

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert Lock.for_package("is_editable") == LOCK
    assert "is_editable" not in sys.modules


def test_a_namespace_is_looked_through(tmp_path, monkeypatch):
    for portion in ("one", "two"):
        (tmp_path / portion / "spread").mkdir(parents=True)
        monkeypatch.syspath_prepend(str(tmp_path / portion))
    (tmp_path / "one" / "spread" / "kernel-loader.lock").write_text(TEXT)
    assert Lock.for_package("spread") == LOCK


def test_a_script_has_no_lock_of_its_own(run_python):
    code = """
from kernel_loader import errors
from kernel_loader.lock import Lock
try:
    Lock.for_package(__name__)
except errors.LockMissing as error:
    print(error.detail)
"""
    assert run_python(code) == "no package '__main__' is installed\n"


@pytest.mark.parametrize("name", [None, 1, sys])
def test_a_package_is_named_by_a_text(name):
    with pytest.raises(RequestError, match="package="):
        Lock.for_package(name)


@pytest.mark.parametrize("name", ["no_such_package", "", "a.b", "../etc", "abc"])
def test_what_is_no_package_is_told(name):
    with pytest.raises(LockMissing, match=f"no package {name!r} is installed"):
        Lock.for_package(name)


def test_a_package_without_a_lock_is_told_where_it_would_be(site_packages):
    package(site_packages, "has_none")
    with pytest.raises(LockMissing, match="the package has_none has none") as caught:
        Lock.for_package("has_none")
    assert caught.value.file == f"{site_packages}/has_none/kernel-loader.lock"


def test_a_damaged_lock_of_a_package_is_no_missing_one(site_packages):
    package(site_packages, "damaged", kernel_loader__lock="schema = 9")
    with pytest.raises(LockError, match="schema 9") as caught:
        Lock.for_package("damaged")
    assert not isinstance(caught.value, LockMissing)
