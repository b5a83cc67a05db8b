"""Digests: what is checked before a build runs, and how builds are sealed."""

import base64
import hashlib
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from kernel_loader.digest import content_digest, is_sealed, measure, seal, verify, violations
from kernel_loader.errors import IntegrityError, MetadataError, SourceError
from kernel_loader.metadata import Metadata
from kernel_loader.resources import data_directory

FILES = {
    "__init__.py": b"from . import _ops\n",
    "_ops.py": b"",
    "lib/_kernel.abi3.so": b"\x7fELF",
    "data/a b.bin": b"\0",
}
BUILDS = sorted(file.parent for file in data_directory("registry").glob("*/build/*/metadata.json"))


def hash_of(content: bytes, algorithm: str = "sha256") -> str:
    return base64.b64encode(hashlib.new(algorithm, content).digest()).decode()


def write(directory: Path, files: dict[str, bytes] = FILES, **metadata: object) -> Path:
    for path, content in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (directory / "metadata.json").write_text(json.dumps({"version": 1} | metadata), encoding="utf-8")
    return directory


def metadata_of(directory: Path) -> Metadata:
    return Metadata.parse((directory / "metadata.json").read_bytes())


@pytest.fixture
def build(tmp_path) -> Path:
    """A sealed build."""
    directory = write(tmp_path / "build")
    seal(directory)
    return directory


# --------------------------------------------------------------------------------------------------------------- verify


def test_a_build_as_it_was_published_is_good(build) -> None:
    digest = verify(build, metadata_of(build))
    assert len(digest) == 64
    assert int(digest, 16)


@pytest.mark.parametrize("algorithm", ["sha256", "sha512"])
def test_a_digest_written_by_others_is_checked(tmp_path, algorithm: str) -> None:
    listed = {path: hash_of(content, algorithm) for path, content in FILES.items()}
    directory = write(tmp_path / "build", digest={"algorithm": algorithm, "files": listed})
    assert violations(directory, metadata_of(directory).digest) == ()
    verify(directory, metadata_of(directory))
    (directory / "_ops.py").write_bytes(b"import os\n")
    with pytest.raises(IntegrityError):
        verify(directory, metadata_of(directory))


def test_every_difference_is_told_at_once(build) -> None:
    (build / "_ops.py").unlink()
    (build / "__init__.py").write_bytes(b"import os\n")
    (build / "data" / "more.py").write_bytes(b"")
    with pytest.raises(IntegrityError) as caught:
        verify(build, metadata_of(build))
    assert caught.value.violations == (
        "__init__.py has other content",
        "_ops.py is missing",
        "data/more.py is not listed",
    )
    assert caught.value.build == str(build)


def test_contents_that_change_places_are_told(build) -> None:
    first, second = build / "__init__.py", build / "_ops.py"
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    assert len(violations(build, metadata_of(build).digest)) == 2


@pytest.mark.parametrize("name", [".hidden", "extra.so", "lib/__init__.py", "deep/er/x.py", "legacy.pyc"])
def test_a_file_too_many_is_told_wherever_it_is(build, name: str) -> None:
    (build / name).parent.mkdir(parents=True, exist_ok=True)
    (build / name).write_bytes(b"")
    assert violations(build, metadata_of(build).digest) == (f"{name} is not listed",)


def test_a_build_without_digests_is_measured_all_the_same(tmp_path) -> None:
    directory = write(tmp_path / "build")
    before = verify(directory, metadata_of(directory))
    (directory / "_ops.py").write_bytes(b"x = 1\n")
    assert verify(directory, metadata_of(directory)) != before


def test_bytecode_is_no_part_of_a_build(build) -> None:
    before = verify(build, metadata_of(build))
    for place in (build, build / "lib"):
        (place / "__pycache__").mkdir()
        (place / "__pycache__" / "_ops.cpython-311.pyc").write_bytes(b"\0")
    assert verify(build, metadata_of(build)) == before


def test_the_file_that_holds_the_digest_is_not_in_it(build) -> None:
    assert "metadata.json" not in metadata_of(build).digest.files
    assert set(metadata_of(build).digest.files) == set(FILES)


def test_what_a_build_says_of_itself_is_part_of_its_content(build) -> None:
    before = verify(build, metadata_of(build))
    document = json.loads((build / "metadata.json").read_bytes())
    (build / "metadata.json").write_text(json.dumps(document | {"version": 2}))
    assert verify(build, metadata_of(build)) != before


def test_a_metadata_json_further_down_is_a_file_like_others(build) -> None:
    (build / "lib" / "metadata.json").write_bytes(b"{}")
    assert violations(build, metadata_of(build).digest) == ("lib/metadata.json is not listed",)


def test_the_content_digest_does_not_depend_on_the_place(build, tmp_path) -> None:
    elsewhere = tmp_path / "some where" / "else"
    shutil.copytree(build, elsewhere)
    assert verify(elsewhere, metadata_of(elsewhere)) == verify(build, metadata_of(build))


def test_the_content_digest_does_not_depend_on_the_order_of_writing(tmp_path) -> None:
    forth = write(tmp_path / "a", FILES)
    back = write(tmp_path / "b", dict(reversed(FILES.items())))
    assert verify(forth, metadata_of(forth)) == verify(back, metadata_of(back))


HASHES = st.dictionaries(
    st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0\n"), min_size=1, max_size=5),
    st.binary(max_size=3).map(hash_of),
)


@given(HASHES, st.randoms())
def test_the_content_digest_does_not_depend_on_the_order_of_listing(hashes: dict[str, str], random) -> None:
    shuffled = list(hashes.items())
    random.shuffle(shuffled)
    assert content_digest(dict(shuffled)) == content_digest(hashes)


@given(HASHES, HASHES)
def test_other_files_have_another_content_digest(one: dict[str, str], other: dict[str, str]) -> None:
    assert (content_digest(one) == content_digest(other)) == (one == other)


def test_the_content_digest_is_a_hash_that_anyone_can_compute(tmp_path) -> None:
    files = {"b.py": b"2", "a/c.py": b"1"}
    directory = write(tmp_path / "build", files)
    everything = files | {"metadata.json": (directory / "metadata.json").read_bytes()}
    lines = "".join(f"{path}\0{hash_of(everything[path])}\n" for path in sorted(everything))
    assert verify(directory, Metadata()) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_name_that_is_no_text_is_an_unlisted_file_and_breaks_nothing(build) -> None:
    name = os.fsdecode(b"caf\xe9.py")
    (build / name).write_bytes(b"")
    assert violations(build, metadata_of(build).digest) == (f"{name} is not listed",)
    assert len(verify(build, Metadata())) == 64


# ----------------------------------------------------------------------------------------------- what cannot be a build


def test_a_link_to_a_directory_is_refused(build, tmp_path) -> None:
    (tmp_path / "other").mkdir()
    (build / "lib" / "more").symlink_to(tmp_path / "other")
    with pytest.raises(SourceError, match="link to a directory"):
        verify(build, metadata_of(build))


def test_a_link_to_a_file_counts_by_what_it_leads_to(build, tmp_path) -> None:
    # As the files of the Hugging Face cache do.
    blob = tmp_path / "blob"
    shutil.move(build / "__init__.py", blob)
    (build / "__init__.py").symlink_to(blob)
    verify(build, metadata_of(build))
    blob.write_bytes(b"import os\n")
    with pytest.raises(IntegrityError, match=r"__init__\.py has other content"):
        verify(build, metadata_of(build))


def test_a_link_that_leads_nowhere_is_refused(build) -> None:
    (build / "gone.py").symlink_to("nowhere")
    with pytest.raises(SourceError, match=r"gone\.py is no regular file"):
        verify(build, metadata_of(build))


def test_a_pipe_is_refused_and_not_waited_for(build) -> None:
    os.mkfifo(build / "pipe.py")
    with pytest.raises(SourceError, match=r"pipe\.py is no regular file"):
        verify(build, metadata_of(build))


@pytest.mark.parametrize("path", ["_ops.py", "lib"])
def test_what_may_not_be_read_is_refused(open_path, unprivileged, path: str) -> None:
    directory = write(open_path / "build")
    seal(directory)
    metadata = metadata_of(directory)
    (directory / path).chmod(0)
    with unprivileged(), pytest.raises(SourceError, match=path):
        verify(directory, metadata)
    (directory / path).chmod(0o755)


@pytest.mark.parametrize("there", [False, True])
def test_a_place_that_is_no_directory_is_refused(tmp_path, there: bool) -> None:
    place = tmp_path / "nowhere"
    if there:
        place.write_bytes(b"")
    with pytest.raises(SourceError, match="nowhere"):
        verify(place, Metadata())
    with pytest.raises(SourceError, match="nowhere"):
        seal(place)


# ----------------------------------------------------------------------------------------------------------------- seal


def test_sealing_makes_a_build_verifiable(tmp_path) -> None:
    directory = write(tmp_path / "build")
    assert not is_sealed(directory)
    assert seal(directory) is True
    assert is_sealed(directory)
    assert metadata_of(directory).digest.files == {path: hash_of(content) for path, content in FILES.items()}


def test_sealing_twice_changes_nothing(build) -> None:
    before, stat = (build / "metadata.json").read_bytes(), (build / "metadata.json").stat()
    assert seal(build) is False
    assert (build / "metadata.json").read_bytes() == before
    assert (build / "metadata.json").stat().st_ino == stat.st_ino


def test_a_changed_build_is_not_sealed_until_it_is_sealed_again(build) -> None:
    (build / "_ops.py").write_bytes(b"x = 1\n")
    assert not is_sealed(build)
    assert seal(build) is True
    verify(build, metadata_of(build))


def test_sealing_with_another_algorithm_changes_the_digest(build) -> None:
    assert not is_sealed(build, "sha512")
    seal(build, "sha512")
    assert metadata_of(build).digest.algorithm == "sha512"
    assert is_sealed(build, "sha512")
    verify(build, metadata_of(build))


def test_sealing_keeps_whatever_else_stands_there_in_its_order(tmp_path) -> None:
    document = {"z": [1, {"ü": None}], "name": "n", "digest": None, "a": 1.5}
    directory = write(tmp_path / "build", **document)
    seal(directory)
    after = json.loads((directory / "metadata.json").read_bytes())
    assert {key: value for key, value in after.items() if key != "digest"} == {
        "version": 1, "z": [1, {"ü": None}], "name": "n", "a": 1.5
    }  # fmt: skip
    assert list(after) == ["version", "z", "name", "digest", "a"]


def test_sealing_keeps_the_permissions_of_the_file(tmp_path) -> None:
    directory = write(tmp_path / "build")
    (directory / "metadata.json").chmod(0o640)
    seal(directory)
    assert (directory / "metadata.json").stat().st_mode & 0o777 == 0o640


def test_sealing_ignores_bytecode(build) -> None:
    (build / "__pycache__").mkdir()
    (build / "__pycache__" / "x.pyc").write_bytes(b"")
    assert is_sealed(build)


@pytest.mark.parametrize("text", ["", "[]", '{"version": "1"}', '{"version": 1, "version": 1}', '{"x": "\\ud800"}'])
def test_a_metadata_json_that_cannot_be_read_is_not_sealed(tmp_path, text: str) -> None:
    directory = write(tmp_path / "build")
    (directory / "metadata.json").write_text(text)
    for function in (seal, is_sealed):
        with pytest.raises(MetadataError):
            function(directory)
    assert (directory / "metadata.json").read_text() == text


def test_a_directory_without_metadata_json_is_not_sealed(tmp_path) -> None:
    (tmp_path / "__init__.py").write_bytes(b"")
    with pytest.raises(SourceError, match=r"metadata\.json"):
        seal(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["__init__.py"]


@pytest.mark.parametrize("name", ["a:b.py", "a\\b.py", os.fsdecode(b"caf\xe9.py")])
def test_a_file_that_no_reader_would_accept_is_not_sealed(tmp_path, name: str) -> None:
    directory = write(tmp_path / "build")
    (directory / name).write_bytes(b"")
    with pytest.raises(SourceError, match="no portable name"):
        seal(directory)


def test_a_seal_that_cannot_be_written_leaves_the_file_whole_and_nothing_beside_it(tmp_path) -> None:
    directory = write(tmp_path / "build")
    before = (directory / "metadata.json").read_bytes()
    names = sorted(directory.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # as a disk that is full after 100 bytes
    try:
        with pytest.raises(SourceError, match="cannot be written"):
            seal(directory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (directory / "metadata.json").read_bytes() == before
    assert sorted(directory.iterdir()) == names


def test_a_build_in_a_directory_that_may_not_be_written_is_an_error_of_that_build(open_path, unprivileged) -> None:
    directory = write(open_path / "build")
    before = (directory / "metadata.json").read_bytes()
    directory.chmod(0o555)
    with unprivileged(), pytest.raises(SourceError, match="cannot be written"):
        seal(directory)
    assert (directory / "metadata.json").read_bytes() == before


# ------------------------------------------------------------------------------------------------------ embedded builds


def test_there_are_embedded_builds() -> None:
    assert BUILDS


@pytest.mark.parametrize("directory", BUILDS, ids=lambda d: f"{d.parents[1].name}/{d.name}")
def test_an_embedded_build_is_sealed(directory: Path) -> None:
    assert is_sealed(directory)
    verify(directory, metadata_of(directory))


def test_measure_names_files_with_slashes_and_all_of_them(build) -> None:
    assert set(measure(build, "sha256")) == {*FILES, "metadata.json"}


def test_a_build_without_metadata_is_told_what_to_write(tmp_path):
    (tmp_path / "__init__.py").touch()
    with pytest.raises(SourceError, match=r"has none. Write `\{\}` into it"):
        seal(tmp_path)
