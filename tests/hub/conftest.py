"""A Hub, the real client bound to it, and requests without any client."""

import http.client
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import HfApi, constants

from tests.hub import Hub


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


Raw = Callable[..., Reply]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Without this, 2.x asks for /api/agent-harnesses once a process.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        # Read at import. Most functions take the endpoint of their HfApi; 1.x asks this one for an organisation.
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        # Connections of the client's session lead to the Hub of an earlier test.
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def api(hub: Hub) -> HfApi:
    """The client without a token: the developer's own is not looked for."""
    return HfApi(endpoint=hub.endpoint, token=False)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def raw(hub: Hub) -> Raw:
    """One request over a connection of its own."""

    def request(path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection(hub.endpoint.removeprefix("http://"), timeout=30)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    return request
