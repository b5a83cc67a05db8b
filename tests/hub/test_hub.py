"""The real client of the Hub against the loopback one."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import HfApi, RepoFile, RepoFolder
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from kernel_loader.testing import Fault, Hub, demo
from tests.hub.conftest import Raw

BUILD = "build/torch-universal"
FILES = {
    "README.md": b"# A kernel\n",
    f"{BUILD}/__init__.py": b"from .ops import double\n",
    f"{BUILD}/metadata.json": b'{"version": 1}\n',
    f"{BUILD}/ops.py": b"def double(x):\n    return 2 * x\n",
}
LIBRARY = b"\x7fELF" + bytes(range(256)) * 8


def test_a_version_is_a_branch_with_a_commit(hub: Hub, api: HfApi) -> None:
    commit = hub.kernel("org/k").commit(FILES, branch="v1")
    info = api.repo_info("org/k", repo_type="kernel", revision="v1")
    assert (info.id, info.sha, info.private, info.gated) == ("org/k", commit, False, False)
    assert api.kernel_info("org/k", revision=commit).sha == commit
    assert api.kernel_info("org/k").sha == hub.kernel("org/k").branches["main"] != commit
    assert hub.counts() == {("GET", "info"): 3}


def test_a_model_lists_its_files_in_its_info_and_a_kernel_does_not(hub: Hub, api: HfApi) -> None:
    hub.model("org/m").commit({"a.so": LIBRARY, "b.txt": b"text"})
    hub.kernel("org/m").commit({"c.txt": b"text"})
    siblings = api.model_info("org/m", files_metadata=True).siblings
    assert [(s.rfilename, s.size, s.lfs is not None) for s in siblings or ()] == [
        ("a.so", len(LIBRARY), True),
        ("b.txt", 4, False),
    ]
    assert not hasattr(api.kernel_info("org/m"), "siblings")


def test_a_commit_is_named_by_its_content_and_its_parent(hub: Hub) -> None:
    first, second = (hub.kernel(f"org/{name}") for name in "ab")
    assert first.commit(FILES, branch="v1") == second.commit(FILES, branch="v1")
    assert first.commit(FILES, branch="v1") != first.commit(FILES, branch="v1")
    assert first.commit(FILES, branch="v2") != first.commit({**FILES, "README.md": b""}, branch="v3")


def test_object_ids_are_those_of_git(hub: Hub, tmp_path: Path) -> None:
    commit = hub.kernel("org/k").find(hub.kernel("org/k").commit({**FILES, "build.md": b"", "build-x/a": b"a"}))
    assert commit is not None
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    for path, blob in commit.files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(blob.content)
    subprocess.run([*git, "add", "-A"], check=True)
    written = subprocess.run([*git, "write-tree"], check=True, capture_output=True, text=True).stdout.strip()
    listed = subprocess.run([*git, "ls-tree", "-rt", written], check=True, capture_output=True, text=True).stdout
    assert commit.directories[""] == written
    assert {entry.path: entry.oid for entry in commit.entries} == {
        line.split("\t")[1]: line.split()[2] for line in listed.splitlines()
    }


def test_refs_are_branches_and_tags(hub: Hub, api: HfApi) -> None:
    repository = hub.kernel("org/k")
    commit = repository.commit(FILES, branch="v1")
    repository.branch("feature/x", commit)
    repository.tag("release", commit)
    repository.delete_branch("main")
    refs = api.list_repo_refs("org/k", repo_type="kernel")
    assert [(ref.name, ref.ref) for ref in refs.branches] == [
        ("feature/x", "refs/heads/feature/x"),
        ("v1", "refs/heads/v1"),
    ]
    assert [(ref.name, ref.target_commit) for ref in refs.tags] == [("release", commit)]
    assert api.kernel_info("org/k", revision="release").sha == commit
    assert api.kernel_info("org/k", revision="feature/x").sha == commit


def test_a_listing_has_names_sizes_and_hashes(hub: Hub, api: HfApi) -> None:
    hub.kernel("org/k").commit({**FILES, f"{BUILD}/k.so": LIBRARY}, branch="v1")
    flat = list(api.list_repo_tree("org/k", "build", repo_type="kernel", revision="v1"))
    assert [(type(entry), entry.path) for entry in flat] == [(RepoFolder, BUILD)]
    entries = api.list_repo_tree("org/k", BUILD, recursive=True, repo_type="kernel", revision="v1")
    files = {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}
    assert sorted(files) == sorted([path for path in FILES if path.startswith(BUILD)] + [f"{BUILD}/k.so"])
    small = FILES[f"{BUILD}/ops.py"]
    assert files[f"{BUILD}/ops.py"].blob_id == hashlib.sha1(b"blob %d\0" % len(small) + small).hexdigest()
    lfs = files[f"{BUILD}/k.so"].lfs
    assert lfs is not None
    assert (lfs.sha256, lfs.size) == (hashlib.sha256(LIBRARY).hexdigest(), len(LIBRARY))
    assert files[f"{BUILD}/k.so"].size == len(LIBRARY)


def test_a_listing_comes_in_pages(hub: Hub, api: HfApi) -> None:
    hub.page_size = 10
    hub.kernel("org/k").commit({f"build/x/{number}.py": b"" for number in range(33)}, branch="v/1")
    entries = list(api.list_repo_tree("org/k", recursive=True, repo_type="kernel", revision="v/1"))
    assert len(entries) == len({entry.path for entry in entries}) == 35
    assert hub.counts() == {("GET", "tree"): 4}
    assert {request.path for request in hub.requests} == {"/api/kernels/org/k/tree/v%2F1"}


def test_a_limit_makes_pages_smaller_and_expand_adds_the_commit(hub: Hub, raw: Raw, api: HfApi) -> None:
    commit = hub.kernel("org/k").commit({f"{number:03}.py": b"" for number in range(60)})
    page = raw("/api/kernels/org/k/tree/main?limit=7")
    assert len(json.loads(page.body)) == 7
    assert page.headers["Link"].endswith('>; rel="next"')
    entries = list(api.list_repo_tree("org/k", expand=True, repo_type="kernel"))
    assert len(entries) == 60
    assert {entry.last_commit.oid for entry in entries if entry.last_commit} == {commit}
    assert len(hub.requests) == 3


def test_paths_are_described_alone(hub: Hub, api: HfApi) -> None:
    hub.kernel("org/k").commit(FILES, branch="v1")
    found = api.get_paths_info("org/k", ["build", "README.md", "absent"], repo_type="kernel", revision="v1")
    assert [(type(entry), entry.path) for entry in found] == [(RepoFolder, "build"), (RepoFile, "README.md")]


def test_a_publisher_is_trusted_or_not_or_unknown(hub: Hub, api: HfApi) -> None:
    hub.publisher("good", trusted=True)
    hub.publisher("other", trusted=False)
    # The client keeps the fields that it does not know.
    assert vars(api.get_organization_overview("good"))["trustedKernelPublisher"] is True
    assert vars(api.get_organization_overview("other"))["trustedKernelPublisher"] is False
    with pytest.raises(HfHubHTTPError) as caught:
        api.get_organization_overview("nobody")
    assert caught.value.response.status_code == 404


def test_files_are_downloaded_one_by_one_and_as_a_snapshot(hub: Hub, api: HfApi, cache: Path) -> None:
    files = {**FILES, f"{BUILD}/k.so": LIBRARY, f"{BUILD}/a name, ünusual.txt": b"x"}
    commit = hub.kernel("org/k").commit(files, branch="v1")
    path = api.hf_hub_download("org/k", f"{BUILD}/ops.py", repo_type="kernel", revision="v1", cache_dir=cache)
    assert Path(path).read_bytes() == files[f"{BUILD}/ops.py"]
    snapshot = Path(api.snapshot_download("org/k", repo_type="kernel", revision="v1", cache_dir=cache))
    assert snapshot.name == commit
    assert {str(f.relative_to(snapshot)): f.read_bytes() for f in snapshot.rglob("*") if f.is_file()} == files


def test_what_is_not_there_is_named(hub: Hub, api: HfApi, cache: Path) -> None:
    hub.kernel("org/k").commit(FILES, branch="v1")
    with pytest.raises(RepositoryNotFoundError):
        api.kernel_info("org/absent")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/k")
    with pytest.raises(RevisionNotFoundError):
        api.kernel_info("org/k", revision="v2")
    with pytest.raises(EntryNotFoundError):
        api.hf_hub_download("org/k", "absent.py", repo_type="kernel", revision="v1", cache_dir=cache)
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree("org/k", "absent", repo_type="kernel", revision="v1"))


def test_a_private_repository_is_hidden_from_strangers(hub: Hub, api: HfApi) -> None:
    repository = hub.kernel("org/k")
    repository.private = True
    hub.tokens = {"hf_good", "hf_other"}
    with pytest.raises(RepositoryNotFoundError) as caught:
        api.kernel_info("org/k")
    assert caught.value.response.status_code == 401
    assert api.kernel_info("org/k", token="hf_good").private is True
    repository.readers = {"hf_good"}
    with pytest.raises(RepositoryNotFoundError) as caught:
        api.kernel_info("org/k", token="hf_other")
    assert caught.value.response.status_code == 404


def test_a_gated_repository_is_listed_but_not_read(hub: Hub, api: HfApi, cache: Path) -> None:
    repository = hub.kernel("org/k")
    repository.commit(FILES)
    repository.gated, repository.readers = True, {"hf_good"}
    hub.tokens = {"hf_good", "hf_other"}
    assert api.kernel_info("org/k").gated == "auto"
    assert list(api.list_repo_tree("org/k", repo_type="kernel"))
    for token, status in ((False, 401), ("hf_other", 403)):
        with pytest.raises(GatedRepoError) as caught:
            api.hf_hub_download("org/k", "README.md", repo_type="kernel", cache_dir=cache, token=token)
        assert caught.value.response.status_code == status
    api.hf_hub_download("org/k", "README.md", repo_type="kernel", cache_dir=cache, token="hf_good")


def test_a_token_that_is_not_valid_is_refused_everywhere(hub: Hub, api: HfApi) -> None:
    hub.kernel("org/k")
    hub.tokens = {"hf_good"}
    assert api.whoami(token="hf_good")["name"] == "tester"
    with pytest.raises(HfHubHTTPError) as caught:
        api.kernel_info("org/k", token="hf_bad")
    assert caught.value.response.status_code == 401
    assert not isinstance(caught.value, RepositoryNotFoundError)


@pytest.mark.parametrize("cdn", [False, True])
def test_an_lfs_file_is_redirected_and_the_token_stays_at_its_origin(
    hub: Hub, api: HfApi, cache: Path, cdn: bool
) -> None:
    hub.cdn, hub.tokens = cdn, {"hf_good"}
    hub.kernel("org/k").commit({"k.so": LIBRARY})
    path = api.hf_hub_download("org/k", "k.so", repo_type="kernel", cache_dir=cache, token="hf_good")
    assert Path(path).read_bytes() == LIBRARY
    assert Path(path).resolve().name == hashlib.sha256(LIBRARY).hexdigest()
    target = hub.requests.of("redirect-target")[-1]
    assert (target.method, target.status, target.bytes_sent) == ("GET", 200, len(LIBRARY))
    assert target.origin == (hub.cdn_endpoint if cdn else hub.endpoint)
    assert ("authorization" in target.headers) is not cdn
    assert all("authorization" in request.headers for request in hub.requests.of("resolve"))


def test_a_file_is_lfs_by_its_size_or_its_suffix(hub: Hub, raw: Raw) -> None:
    repository = hub.kernel("org/k")
    repository.lfs_threshold, repository.lfs_suffixes = 100, (".dylib",)
    repository.commit({"large": b"x" * 100, "small": b"x" * 99, "a.dylib": b"", "b.so": b""})
    assert [
        raw(f"/kernels/org/k/resolve/main/{name}", "HEAD").status for name in ("large", "small", "a.dylib", "b.so")
    ] == [
        302,
        200,
        302,
        200,
    ]


@pytest.mark.parametrize(
    ("wanted", "status", "part"),
    [
        ("bytes=2-4", 206, b"cde"),
        ("bytes=7-", 206, b"hij"),
        ("bytes=-2", 206, b"ij"),
        ("bytes=8-99", 206, b"ij"),
        ("bytes=0-0,2-2", 200, b"abcdefghij"),
        ("bytes=10-", 416, None),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.so"])
def test_a_range_is_a_part(hub: Hub, raw: Raw, name: str, wanted: str, status: int, part: bytes | None) -> None:
    hub.kernel("org/k").commit({name: b"abcdefghij"})
    reply = raw(f"/kernels/org/k/resolve/main/{name}", headers={"Range": wanted})
    if reply.status == 302:
        reply = raw(reply.headers["Location"].removeprefix(hub.endpoint), headers={"Range": wanted})
    assert reply.status == status
    assert part is None or reply.body == part
    if status != 200:
        assert reply.headers["Content-Range"].endswith("/10") or reply.headers["Content-Range"] == "bytes */10"


def test_a_head_has_the_headers_and_no_body(hub: Hub, raw: Raw) -> None:
    commit = hub.kernel("org/k").commit({"a.txt": b"abc"})
    head, get = (raw("/kernels/org/k/resolve/main/a.txt", method) for method in ("HEAD", "GET"))
    assert head.headers["ETag"].strip('"') == hashlib.sha1(b"blob 3\0abc").hexdigest()
    assert head.headers["X-Repo-Commit"] == commit
    assert head.headers["Accept-Ranges"] == "bytes"
    assert head.headers["Content-Length"] == "3"
    assert (head.body, get.body) == (b"", b"abc")
    assert [(request.method, request.status, request.bytes_sent) for request in hub.requests] == [
        ("HEAD", 200, 0),
        ("GET", 200, 3),
    ]


def test_small_text_can_come_compressed_and_without_a_length(hub: Hub, api: HfApi, raw: Raw, cache: Path) -> None:
    hub.gzip = True
    hub.kernel("org/k").commit(FILES)
    reply = raw("/kernels/org/k/resolve/main/README.md", headers={"Accept-Encoding": "gzip"})
    assert "Content-Length" not in reply.headers
    assert gzip.decompress(reply.body) == FILES["README.md"]
    path = api.hf_hub_download("org/k", "README.md", repo_type="kernel", cache_dir=cache)
    assert Path(path).read_bytes() == FILES["README.md"]


def test_small_files_can_take_the_redirect_of_the_real_hub(hub: Hub, api: HfApi, cache: Path) -> None:
    hub.resolve_cache = True
    hub.kernel("org/k").commit(FILES)
    path = api.hf_hub_download("org/k", "README.md", repo_type="kernel", cache_dir=cache)
    assert Path(path).read_bytes() == FILES["README.md"]
    assert hub.counts()["GET", "resolve-cache"] == 1


def test_thirty_two_clients_are_answered_at_one_time(hub: Hub, raw: Raw) -> None:
    hub.kernel("org/k").commit({"a.txt": b"abc"})
    together = threading.Barrier(32, timeout=30)  # nobody is answered before all have asked
    hub.fault(Fault(run=lambda _: together.wait()))
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(raw, ["/kernels/org/k/resolve/main/a.txt"] * 32))
    assert {reply.body for reply in replies} == {b"abc"}
    assert hub.counts() == {("GET", "resolve"): 32}
    assert hub.requests.peak == 32
    hub.requests.clear()
    assert (list(hub.requests), hub.requests.peak) == ([], 0)


def test_a_log_shows_what_was_asked(hub: Hub, api: HfApi) -> None:
    hub.kernel("org/k").commit(FILES, branch="v1")
    list(api.list_repo_tree("org/k", BUILD, recursive=True, repo_type="kernel", revision="v1"))
    (request,) = hub.requests
    assert (request.method, request.route, request.status) == ("GET", "tree", 200)
    assert request.path == "/api/kernels/org/k/tree/v1/build%2Ftorch-universal"
    assert request.query == {"recursive": "true", "expand": "false"}
    assert "hf_hub/" in request.headers["user-agent"]
    assert request.bytes_sent > 0
    assert request.origin == hub.endpoint


def test_another_process_is_a_client_through_the_environment(hub: Hub, tmp_path: Path) -> None:
    hub.kernel("org/k").commit(FILES, branch="v1")
    code = "import huggingface_hub as h; print(h.snapshot_download('org/k', repo_type='kernel', revision='v1'))"
    environment = {**os.environ, **hub.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)
    assert hub.counts()["GET", "resolve"] == len(FILES)


def test_what_a_client_asks_for_its_telemetry_is_answered(hub: Hub, raw: Raw) -> None:
    assert json.loads(raw("/api/agent-harnesses").body) == {"standardEnvVars": [], "harnesses": {}}
    assert hub.counts() == {("GET", "agent-harnesses"): 1}
    assert raw("/api/telemetry/anything").status == 404
    assert hub.requests[-1].route == "unknown"


def test_a_repository_of_many_files_is_cheap(hub: Hub, api: HfApi) -> None:
    hub.kernel("org/k").commit({f"build/x/{number}": b"" for number in range(20_000)}, branch="v1")
    entries = api.list_repo_tree("org/k", "build", recursive=True, repo_type="kernel", revision="v1")
    assert sum(1 for _ in entries) == 20_001
    assert hub.counts() == {("GET", "tree"): 21}


def test_it_serves_from_a_script_with_the_standard_library_alone(api: HfApi, cache: Path) -> None:
    # -S leaves site-packages out.
    command = [sys.executable, "-S", "-m", "kernel_loader.testing", "--files", "12", "--size", "50"]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        path = HfApi(endpoint=endpoint, token=False).snapshot_download(
            demo.REPO_ID, repo_type="kernel", revision="v1", cache_dir=cache
        )
        server.send_signal(signal.SIGTERM)
        counts = json.loads(server.stdout.read())
    assert len(list(Path(path).glob("build/torch-universal/*"))) == 12
    assert counts["GET resolve"] == 12
    assert server.returncode == 0
