"""Request: what a client asked and got. RequestLog: all of them, in the order of arrival."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import overload


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request.

    Attributes:
        method: GET, HEAD or POST.
        path: as it was sent, still quoted, without the query.
        query: parsed; the last of several values counts.
        headers: the names in lower case.
        body: what a POST carried.
        route: what was asked: info, refs, tree, paths-info, resolve, resolve-cache, redirect-target, organization,
            whoami, agent-harnesses or unknown.
        origin: scheme, host and port of the listener that was asked: the Hub's own endpoint or that of its CDN.
        status: of the answer; 0 while there is none, and for ever if the connection was closed or reset instead.
        bytes_sent: of the body; below the Content-Length if the body was cut or the client went away.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(default=b"", repr=False)
    route: str
    origin: str
    status: int = 0
    bytes_sent: int = 0


class RequestLog(Sequence[Request]):
    """The requests so far, safe to read while others arrive. A request is in it from its arrival on.

    Status and size of an answer are entered before its last byte leaves, so that a client that has its answer finds
    them here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, Request] = {}
        self._active: set[int] = set()
        self._next = 0
        self._peak = 0

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self.snapshot()[index]

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.snapshot())

    def __repr__(self) -> str:
        return "\n".join(f"{r.method} {r.path} {dict(r.query)} -> {r.status}, {r.bytes_sent} B" for r in self)

    @property
    def peak(self) -> int:
        """The most requests that were being answered at one time since the log was cleared."""
        with self._lock:
            return self._peak

    def snapshot(self) -> tuple[Request, ...]:
        """The requests so far, as they stand now."""
        with self._lock:
            return tuple(self._entries.values())

    def of(self, route: str) -> tuple[Request, ...]:
        """The requests of one route."""
        return tuple(request for request in self if request.route == route)

    def counts(self) -> Counter[tuple[str, str]]:
        """How many requests of each (method, route)."""
        return Counter((request.method, request.route) for request in self)

    def clear(self) -> None:
        """Forget all requests, also those that are still being answered."""
        with self._lock:
            self._entries.clear()
            self._peak = len(self._active)

    def begin(self, request: Request) -> int:
        """Enter a request that has arrived; the number is for `update` and `end`."""
        with self._lock:
            number = self._next
            self._next += 1
            self._entries[number] = request
            self._active.add(number)
            self._peak = max(self._peak, len(self._active))
            return number

    def update(self, number: int, *, status: int, bytes_sent: int) -> None:
        """Enter what is being answered."""
        with self._lock:
            if entry := self._entries.get(number):
                self._entries[number] = replace(entry, status=status, bytes_sent=bytes_sent)

    def end(self, number: int) -> None:
        """The request is no longer being answered."""
        with self._lock:
            self._active.discard(number)
