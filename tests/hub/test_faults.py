"""Every fault that the loopback Hub can make, and its end."""

import contextlib
import http.client
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from kernel_loader.testing import Answer, Fault, Hub, Request
from tests.hub.conftest import Raw

CONTENT = b"0123456789" * 100
FILE = "/kernels/org/k/resolve/main/a.txt"
INFO = "/api/kernels/org/k"


@pytest.fixture(autouse=True)
def repository(hub: Hub) -> None:
    hub.kernel("org/k").commit({"a.txt": CONTENT, "b.txt": CONTENT})


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 502, 503, 504])
def test_a_status_reaches_the_client(hub: Hub, api: HfApi, status: int) -> None:
    hub.fault(Fault(route="info", status=status))
    with pytest.raises(HfHubHTTPError) as caught:
        api.kernel_info("org/k")
    assert caught.value.response.status_code == status
    assert [request.status for request in hub.requests] == [status]


def test_a_status_can_carry_the_hubs_error_code(hub: Hub, api: HfApi) -> None:
    hub.fault(Fault(status=403, error_code="GatedRepo"))
    with pytest.raises(GatedRepoError):
        api.kernel_info("org/k")


def test_the_client_waits_as_long_as_it_is_told(hub: Hub, api: HfApi) -> None:
    hub.page_size = 1
    # The second page: 1.x does not try the first one again.
    fault = hub.fault(Fault(route="tree", after=1, first=1, status=429, retry_after=1))
    start = time.monotonic()
    assert len(list(api.list_repo_tree("org/k", repo_type="kernel"))) == 2
    assert time.monotonic() - start >= 1
    assert fault.hits == 1
    assert [request.status for request in hub.requests] == [200, 429, 200]


def test_a_fault_hits_only_what_it_names(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(method="GET", route="resolve", path=r"/a\.txt$", status=500))
    assert raw(FILE).status == 500
    assert raw(FILE, "HEAD").status == 200
    assert raw(FILE.replace("a.txt", "b.txt")).status == 200
    assert raw(INFO).status == 200


def test_a_fault_hits_the_first_or_the_later_requests(hub: Hub, raw: Raw) -> None:
    fault = hub.fault(Fault(after=1, first=2, status=503))
    assert [raw(INFO).status for _ in range(5)] == [200, 503, 503, 200, 200]
    assert fault.hits == 2


def test_a_fault_can_be_taken_back(hub: Hub, raw: Raw) -> None:
    fault = hub.fault(Fault(status=500))
    assert raw(INFO).status == 500
    fault.remove()
    assert raw(INFO).status == 200
    hub.fault(Fault(status=500))
    hub.clear_faults()
    assert raw(INFO).status == 200


def test_the_first_fault_that_has_an_outcome_decides(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(latency=0.01))
    hub.fault(Fault(first=1, status=502))
    hub.fault(Fault(status=504))
    assert [raw(INFO).status for _ in range(2)] == [502, 504]


def test_a_fault_does_one_thing() -> None:
    with pytest.raises(ValueError, match="one thing"):
        Fault(status=500, close=True)
    with pytest.raises(ValueError, match="one thing"):
        Fault(stall_after=0, truncate_after=0)


@pytest.mark.parametrize("everywhere", [True, False])
def test_latency_delays_requests_side_by_side(hub: Hub, raw: Raw, everywhere: bool) -> None:
    if everywhere:
        hub.latency = 0.2
    else:
        hub.fault(Fault(latency=0.2))
    start = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        assert {reply.status for reply in pool.map(raw, [INFO] * 16)} == {200}
    assert time.monotonic() - start >= 0.2
    assert hub.requests.peak > 1


def test_a_connection_is_closed_before_the_answer(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(close=True, first=1))
    with pytest.raises(http.client.RemoteDisconnected):
        raw(INFO)
    assert raw(INFO).status == 200
    assert [request.status for request in hub.requests] == [0, 200]


def test_a_connection_is_reset(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(reset=True, first=1))
    with pytest.raises(ConnectionResetError):
        raw(INFO)
    assert raw(INFO).status == 200


def test_a_body_is_truncated_below_its_length(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(route="resolve", truncate_after=100, first=1))
    with pytest.raises(http.client.IncompleteRead) as caught:
        raw(FILE)
    assert caught.value.partial == CONTENT[:100]
    assert (hub.requests[0].status, hub.requests[0].bytes_sent) == (200, 100)
    assert raw(FILE).body == CONTENT


def test_the_client_gives_up_a_stalled_body_and_resumes_with_a_range(
    hub: Hub, api: HfApi, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 50)  # what the client keeps of a body that breaks off
    hub.fault(Fault(route="resolve", stall_after=100, first=1))  # not used up by the HEAD, which has no body
    path = api.hf_hub_download("org/k", "a.txt", repo_type="kernel", cache_dir=cache)
    assert Path(path).read_bytes() == CONTENT
    assert [(r.method, r.status, r.headers.get("range")) for r in hub.requests] == [
        ("HEAD", 200, None),
        ("GET", 200, None),
        ("GET", 206, "bytes=100-"),
    ]


def test_a_stall_can_end(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(stall_after=10, stall_for=0.1))
    start = time.monotonic()
    assert raw(FILE).body == CONTENT
    assert time.monotonic() - start >= 0.1


@pytest.mark.parametrize("position", [0, 500, -1])
def test_one_byte_is_wrong_and_the_length_is_right(hub: Hub, raw: Raw, position: int) -> None:
    hub.fault(Fault(corrupt_at=position))
    body = raw(FILE).body
    assert len(body) == len(CONTENT)
    assert [i for i, (a, b) in enumerate(zip(body, CONTENT, strict=True)) if a != b] == [position % len(CONTENT)]


def test_a_corrupt_lfs_file_comes_from_the_redirect_target(hub: Hub, api: HfApi, cache: Path) -> None:
    hub.kernel("org/k").commit({"k.so": CONTENT})
    hub.cdn = True
    hub.fault(Fault(route="redirect-target", corrupt_at=3))
    path = api.hf_hub_download("org/k", "k.so", repo_type="kernel", cache_dir=cache)
    assert Path(path).read_bytes() == CONTENT[:3] + bytes([CONTENT[3] ^ 0xFF]) + CONTENT[4:]


def test_a_branch_moves_between_two_requests(hub: Hub, api: HfApi) -> None:
    repository = hub.kernel("org/k")
    old = repository.commit({"a.txt": b"old"}, branch="v1")
    hub.fault(Fault(route="tree", first=1, run=lambda _: repository.commit({"b.txt": b"new"}, branch="v1")))
    assert api.kernel_info("org/k", revision="v1").sha == old
    moved = api.list_repo_tree("org/k", repo_type="kernel", revision="v1")
    assert [entry.path for entry in moved] == ["b.txt"]
    kept = api.list_repo_tree("org/k", repo_type="kernel", revision=old)
    assert [entry.path for entry in kept] == ["a.txt"]


def test_a_listing_can_be_hostile(hub: Hub, api: HfApi) -> None:
    names = ["../escape", "/etc/passwd", "A.py", "a.py", "a.py"]
    listing = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
    hub.fault(Fault(route="tree", json=lambda _: listing))
    assert [entry.path for entry in api.list_repo_tree("org/k", repo_type="kernel")] == names


def test_a_huge_listing_is_sent_while_it_is_made(hub: Hub, raw: Raw) -> None:
    made = itertools.count()

    def entries(_: Request) -> object:
        return ({"type": "file", "path": f"{next(made)}", "size": 0, "oid": "0" * 40} for _ in range(100_000))

    hub.fault(Fault(route="tree", json=entries))
    reply = raw("/api/kernels/org/k/tree/main")
    assert reply.headers["Transfer-Encoding"] == "chunked"
    assert len(json.loads(reply.body)) == 100_000
    assert hub.requests[0].bytes_sent == len(reply.body)


def test_an_answer_can_be_any_bytes(hub: Hub, raw: Raw) -> None:
    hub.fault(Fault(body=b"<html>a proxy's page</html>", headers={"Content-Type": "text/html"}))
    reply = raw(INFO)
    assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html")
    assert reply.body == b"<html>a proxy's page</html>"


def test_the_right_answer_can_be_edited(hub: Hub, api: HfApi) -> None:
    def lie(_: Request, answer: Answer) -> Answer:
        listing = json.loads(answer.whole())
        return replace(answer, body=json.dumps([{**entry, "size": 1} for entry in listing]).encode())

    hub.fault(Fault(route="tree", edit=lie))
    assert {entry.size for entry in api.list_repo_tree("org/k", repo_type="kernel")} == {1}  # type: ignore[union-attr]


def _get(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    return connection.getresponse().read()


def test_closing_ends_stalled_and_waiting_handlers_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    hub = Hub()
    hub.kernel("org/k").commit({"a.txt": CONTENT})
    arrived = threading.Barrier(5, timeout=30)
    hub.fault(Fault(route="info", run=lambda _: arrived.wait()))
    hub.fault(Fault(route="resolve", stall_after=10))
    hub.fault(Fault(route="refs", latency=3600))

    def ask(path: str) -> None:
        connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            _get(connection, INFO)
            with pytest.raises((http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError)):
                _get(connection, path)

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, path) for path in (FILE, FILE, f"{INFO}/refs", f"{INFO}/refs")]
        arrived.wait()
        while len(hub.requests) < 8:
            threading.Event().wait(0.001)
        hub.close()
        for future in asked:
            future.result(timeout=30)
    assert set(threading.enumerate()) == before
    hub.close()  # a second time does nothing
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(hub.endpoint.removeprefix("http://")).request("GET", INFO)


def test_a_callback_that_fails_is_shown_when_the_hub_is_closed() -> None:
    hub = Hub()
    hub.fault(Fault(run=lambda _: 1 / 0))
    connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", INFO)
        assert connection.getresponse().status == 500
    with pytest.raises(ExceptionGroup) as caught:
        hub.close()
    assert caught.group_contains(ZeroDivisionError)
