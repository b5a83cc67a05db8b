"""A Hub, the real client bound to it, and requests without any client."""

import http.client
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from kernel_loader.testing import Hub


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


Raw = Callable[..., Reply]


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
