"""metadata.json in every form in which it was published, and in forms in which it must not be read."""

import base64
import hashlib
import json
import pickle

import pytest
from hypothesis import given, settings, strategies as st

from kernel_loader.errors import MetadataError
from kernel_loader.metadata import MAX_BYTES, Digest, KernelDependency, Metadata, is_safe_path

HASH = base64.b64encode(hashlib.sha256(b"").digest()).decode()
HASH512 = base64.b64encode(hashlib.sha512(b"").digest()).decode()

# The metadata.json of a published build (kernels-community/einops, torch-cpu), some of its files left out.
EXAMPLE = b"""{
  "name": "einops",
  "id": "_einops_cpu_d45adda",
  "version": 1,
  "license": "MIT",
  "upstream": "https://github.com/arogozhnikov/einops.git",
  "python-depends": [],
  "backend": {
    "type": "cpu"
  },
  "digest": {
    "algorithm": "sha256",
    "files": {
      "__init__.py": "Zi5UF5cdv0EjT90oh0zsv0Jfi4QbTrfZnE0Tv5on8F8=",
      "_backends.py": "7BAiKWdBLLvAiryfhwDbwxglGDW9Dh5FNMT1ERSuzxk=",
      "experimental/__init__.py": "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=",
      "layers/torch.py": "504G99kEgy7dk1UPBbj9hzJmZkAHwVhMDFN/8J+p3C8="
    }
  },
  "provenance": {
    "kernel-builder": {
      "version": "0.17.0-dev0",
      "sha": "d0610aa58db33b142c86b59598a2a1c730f52996",
      "dirty": false
    },
    "kernel": {
      "sha": "d45addadb0c380f3d7cc2813310b3bcd75f8aa9a",
      "dirty": false
    }
  }
}
"""


def parse(**keys: object) -> Metadata:
    return Metadata.parse(json.dumps({key.replace("_", "-"): value for key, value in keys.items()}))


# ------------------------------------------------------------------------------------------------------ published forms


def test_a_published_file_is_read() -> None:
    metadata = Metadata.parse(EXAMPLE)
    assert metadata.name == "einops"
    assert metadata.id == "_einops_cpu_d45adda"
    assert metadata.version == 1
    assert metadata.license == "MIT"
    assert metadata.upstream == "https://github.com/arogozhnikov/einops.git"
    assert metadata.backend == "cpu"
    assert metadata.archs is None
    assert metadata.python_depends == ()
    assert metadata.dirty is False
    assert metadata.digest is not None
    assert metadata.digest.algorithm == "sha256"
    assert list(metadata.digest.files) == ["__init__.py", "_backends.py", "experimental/__init__.py", "layers/torch.py"]


def test_an_empty_object_says_nothing() -> None:
    assert Metadata.parse("{}") == Metadata()


def test_the_oldest_form_has_a_version_and_python_packages() -> None:
    metadata = Metadata.parse('{"version": 1, "python-depends": ["einops", "nvidia-cutlass-dsl>=4.2"]}')
    assert metadata == Metadata(version=1, python_depends=("einops", "nvidia-cutlass-dsl>=4.2"))


def test_a_form_without_name_and_id_has_archs() -> None:
    metadata = parse(version=2, backend={"type": "CUDA", "archs": ["9.0a", "10.0f", "12.0+PTX"]})
    assert metadata == Metadata(version=2, backend="cuda", archs=("9.0a", "10.0f", "12.0+PTX"))


def test_a_file_of_every_key_is_read() -> None:
    metadata = parse(
        name="n",
        id="_n_cuda_1",
        version=3,
        license="MIT",
        upstream="u",
        source="s",
        kernels_minver="0.17.2",
        kernel_depends=[{"repo-id": "org/a", "version": 1}, {"repo-id": "org/b", "revision": "main"}],
        digest={"algorithm": "SHA512", "files": {"a.py": HASH512}},
    )
    assert metadata == Metadata(
        name="n",
        id="_n_cuda_1",
        version=3,
        license="MIT",
        upstream="u",
        source="s",
        kernels_minver="0.17.2",
        kernel_depends=(KernelDependency("org/a", 1), KernelDependency("org/b", revision="main")),
        digest=Digest("sha512", {"a.py": HASH512}),
    )


@pytest.mark.parametrize("commit", ["sha", "commit", "rev"])
@pytest.mark.parametrize("part", ["kernel", "kernel-builder"])
def test_a_dirty_tree_is_told_however_its_commit_is_called(commit: str, part: str) -> None:
    assert parse(provenance={part: {commit: "d45adda", "dirty": True}}).dirty
    assert not parse(provenance={part: {commit: "d45adda", "dirty": False}}).dirty
    assert not parse(provenance={part: {commit: "d45adda"}}).dirty


def test_keys_that_are_not_known_are_passed_over_at_every_level() -> None:
    more = {"x": [1], "y": {"z": None}}
    metadata = parse(
        **more,
        version=1,
        backend={"type": "cuda", **more},
        digest={"algorithm": "sha256", "files": {}, **more},
        kernel_depends=[{"repo-id": "org/a", "version": 1, **more}],
        provenance={"kernel": {"dirty": False, **more}, "compiler": "gcc", **more},
    )
    assert metadata == Metadata(
        version=1, backend="cuda", digest=Digest("sha256", {}), kernel_depends=(KernelDependency("org/a", 1),)
    )


@pytest.mark.parametrize(
    "key",
    ["name", "id", "version", "license", "upstream", "source", "backend", "python-depends", "kernel-depends",
     "kernels-minver", "digest", "provenance"],
)  # fmt: skip
def test_null_is_as_good_as_absent(key: str) -> None:
    assert Metadata.parse(json.dumps({key: None})) == Metadata()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_what_editors_of_other_systems_write_is_read(encoding: str) -> None:
    assert Metadata.parse('{"name": "ä"}'.encode(encoding)).name == "ä"


def test_metadata_is_a_value() -> None:
    metadata = Metadata.parse(EXAMPLE)
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    changed = Metadata.parse(EXAMPLE.replace(b"Zi5U", b"Zi5V"))
    assert changed != metadata


# ---------------------------------------------------------------------------------------------------------- wrong forms


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"name": 1}, "name"),
        ({"id": ["a"]}, "id"),
        ({"license": {}}, "license"),
        ({"upstream": True}, "upstream"),
        ({"source": 1.5}, "source"),
        ({"version": "1"}, "version"),
        ({"version": True}, "version"),
        ({"version": 1.0}, "version"),
        ({"version": -1}, "version"),
        ({"version": 2**63}, "version"),
        ({"version": [[[]]]}, "version"),
        ({"backend": "cuda"}, "backend"),
        ({"backend": {"type": 1}}, "backend.type"),
        ({"backend": {"archs": "9.0"}}, "backend.archs"),
        ({"backend": {"archs": ["9.0", 9.0]}}, "backend.archs[1]"),
        ({"backend": {"archs": [None]}}, "backend.archs[0]"),
        ({"python_depends": "einops"}, "python-depends"),
        ({"python_depends": {"einops": "1"}}, "python-depends"),
        ({"python_depends": ["a", []]}, "python-depends[1]"),
        ({"kernel_depends": {}}, "kernel-depends"),
        ({"kernel_depends": ["org/a"]}, "kernel-depends[0]"),
        ({"kernel_depends": [{"version": 1}]}, "kernel-depends[0]"),
        ({"kernel_depends": [{"repo-id": "org/a"}]}, "kernel-depends[0]"),
        ({"kernel_depends": [{"repo-id": "org/a", "version": 1, "revision": "x"}]}, "kernel-depends[0]"),
        ({"kernel_depends": [{"repo-id": "a", "version": 1}]}, "kernel-depends[0].repo-id"),
        ({"kernel_depends": [{"repo-id": "../..", "version": 1}]}, "kernel-depends[0].repo-id"),
        ({"kernel_depends": [{"repo-id": "org/..", "version": 1}]}, "kernel-depends[0].repo-id"),
        ({"kernel_depends": [{"repo-id": "org/a/b", "version": 1}]}, "kernel-depends[0].repo-id"),
        ({"kernel_depends": [{"repo-id": "org/a", "version": "1"}]}, "kernel-depends[0].version"),
        ({"kernel_depends": [{"repo-id": "org/a", "revision": 1}]}, "kernel-depends[0].revision"),
        ({"kernels_minver": 1}, "kernels-minver"),
        ({"kernels_minver": "latest"}, "kernels-minver"),
        ({"kernels_minver": "0.17\n"}, "kernels-minver"),
        ({"kernels_minver": "9" * 5000}, "kernels-minver"),
        ({"digest": []}, "digest"),
        ({"digest": {"files": {}}}, "digest"),
        ({"digest": {"algorithm": "sha256"}}, "digest"),
        ({"digest": {"algorithm": "sha256", "files": None}}, "digest"),
        ({"digest": {"algorithm": "md5", "files": {}}}, "digest.algorithm"),
        ({"digest": {"algorithm": 256, "files": {}}}, "digest.algorithm"),
        ({"digest": {"algorithm": "sha256", "files": []}}, "digest.files"),
        ({"digest": {"algorithm": "sha256", "files": {"a.py": 1}}}, "digest.files.a.py"),
        ({"digest": {"algorithm": "sha256", "files": {"a.py": ""}}}, "digest.files.a.py"),
        ({"digest": {"algorithm": "sha256", "files": {"a.py": "é"}}}, "digest.files.a.py"),
        ({"digest": {"algorithm": "sha256", "files": {"a.py": "e3b0c442" * 8}}}, "digest.files.a.py"),
        ({"digest": {"algorithm": "sha256", "files": {"a.py": HASH512}}}, "digest.files.a.py"),
        ({"digest": {"algorithm": "sha512", "files": {"a.py": HASH}}}, "digest.files.a.py"),
        ({"digest": {"algorithm": "sha256", "files": {"../a.py": HASH}}}, "digest.files.../a.py"),
        ({"provenance": "clean"}, "provenance"),
        ({"provenance": {"kernel": "d45adda"}}, "provenance.kernel"),
        ({"provenance": {"kernel": {"dirty": "no"}}}, "provenance.kernel.dirty"),
        ({"provenance": {"kernel-builder": {"dirty": 0}}}, "provenance.kernel-builder.dirty"),
    ],
)
def test_a_value_of_the_wrong_form_is_refused_with_the_way_to_it(keys: dict[str, object], path: str) -> None:
    text = json.dumps({key.replace("_", "-"): value for key, value in keys.items()})
    with pytest.raises(MetadataError) as caught:
        Metadata.parse(text, "build/x/metadata.json")
    assert caught.value.path == path
    assert caught.value.file == "build/x/metadata.json"
    assert f"build/x/metadata.json, {path}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "null", "[]", "1", '"a"', "{", "{}}", b"\xff\xff", "{'name': 'a'}", "1" * 5000])
def test_what_is_no_json_object_is_refused(text: str | bytes) -> None:
    with pytest.raises(MetadataError) as caught:
        Metadata.parse(text)
    assert caught.value.path == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"version": 1, "version": 2}',
        '{"version": 1, "version": 1}',
        '{"version": null, "version": 1}',
        f'{{"digest": {{"algorithm": "sha256", "files": {{"a": "{HASH}", "a": "{HASH}"}}}}}}',
        f'{{"digest": {{"algorithm": "sha256", "files": {{"a": "{HASH}", "\\u0061": "{HASH}"}}}}}}',
        '{"other": [{"x": 1, "x": 1}]}',
    ],
)
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(MetadataError, match="twice"):
        Metadata.parse(text)


@pytest.mark.parametrize("as_bytes", [True, False])
def test_a_file_up_to_the_size_limit_is_read_and_no_larger_one(as_bytes: bool) -> None:
    text = '{"version": 1}'.ljust(MAX_BYTES)
    for good in (text, text.encode()) if not as_bytes else (text.encode(),):
        assert Metadata.parse(good).version == 1
    with pytest.raises(MetadataError, match=str(MAX_BYTES)):
        Metadata.parse(text.encode() + b" " if as_bytes else text + " ")


@pytest.mark.parametrize("opening", ["[", '{"version":'])
def test_nesting_that_no_parser_follows_is_refused(opening: str) -> None:
    with pytest.raises(MetadataError):
        Metadata.parse(opening * 100_000)


@pytest.mark.parametrize("key", ["version", "name", "python-depends", "digest"])
def test_nesting_to_the_limit_of_the_parser_is_refused(key: str) -> None:
    for depth in range(850, 1000, 5):
        for left, right in (("[", "]"), ('{"a":', "}")):
            value = f"{left * depth}1{right * depth}"
            with pytest.raises(MetadataError):
                Metadata.parse(
                    f'{{"{key}": [{value}]}}'
                    if key != "digest"
                    else f'{{"digest": {{"algorithm": {value}, "files": 1}}}}'
                )


def test_a_file_cut_short_anywhere_is_refused() -> None:
    for length in range(len(EXAMPLE.rstrip())):
        with pytest.raises(MetadataError):
            Metadata.parse(EXAMPLE[:length])


PIECES = st.sampled_from(
    ["sha256", "cuda", "9.0", "org/a", HASH, "..", "1", "name", "version", "backend", "type", "archs", "digest",
     "files", "algorithm", "python-depends", "kernel-depends", "repo-id", "revision", "provenance", "kernel", "dirty",
     "kernels-minver"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | PIECES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PIECES | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=300)
def test_any_json_is_read_or_refused(document: object) -> None:
    try:
        metadata = Metadata.parse(json.dumps(document))
    except MetadataError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - much is refused, some is not
    else:
        assert isinstance(metadata, Metadata)


@given(st.binary() | st.text())
def test_garbage_is_refused(text: bytes) -> None:
    try:
        parsed = Metadata.parse(text)
    except MetadataError:
        return
    assert isinstance(json.loads(text), dict)  # such as {}, in which nothing is known
    assert parsed == Metadata()


@given(st.integers(0, len(EXAMPLE) - 1), st.integers(0, 255))
@settings(max_examples=300)
def test_one_wrong_byte_is_read_or_refused(place: int, byte: int) -> None:
    damaged = bytearray(EXAMPLE)
    damaged[place] = byte
    try:
        Metadata.parse(bytes(damaged))
    except MetadataError as error:
        assert error.file == "metadata.json"  # noqa: PT017 - a byte of a name may be any other


# ---------------------------------------------------------------------------------------------------------------- paths


@pytest.mark.parametrize(
    "path", ["a", "__init__.py", "a/b/c.py", "a b.py", "...", "a..b", ".hidden", "ä.py", "-x", "~"]
)
def test_a_relative_path_below_the_build_is_safe(path: str) -> None:
    assert is_safe_path(path)
    assert path in parse(digest={"algorithm": "sha256", "files": {path: HASH}}).digest.files


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "/", "/etc/passwd", "../a", "a/../b", "a/..", "a//b", "a/", "./a", "a\\b", "..\\a", "C:a", "C:/a",
     "a:stream", "a\0b", "a\nb", "\x1f", "\\\\server\\share", "\ud800"],
)  # fmt: skip
def test_a_path_that_leads_out_or_is_not_portable_is_refused(path: str) -> None:
    assert not is_safe_path(path)
    with pytest.raises(MetadataError) as caught:
        parse(digest={"algorithm": "sha256", "files": {path: HASH}})
    assert caught.value.path == f"digest.files.{path}"
