"""Fault: what goes wrong, and with which requests."""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from .answer import Answer, as_json, error
from .log import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that goes wrong for some requests.

    Which: `method`, `route` and `path` (a regular expression, searched in the unquoted path) must all match; of the
    requests that do, the first `after` are left alone and the next `first` (all, if it is None) are hit. Faults of
    the body (`stall_after`, `truncate_after`, `corrupt_at`) match no HEAD request.

    What: `latency` and `run` come before the answer and go with anything; of the others there is one at most.

    Attributes:
        latency: seconds to wait before anything else.
        run: called with the request, before the answer is made: a branch can move between two requests here.
        close: close the connection without a byte of an answer.
        reset: the same, with a TCP reset.
        status: answer with this status, `error_code` as X-Error-Code, `retry_after` and `headers`.
        json: answer with what this makes, as JSON, and `status` if that is given; an iterator is sent as it is made.
        body: answer with these bytes, and `status` if that is given.
        edit: answer with what this makes of the right answer.
        stall_after: send so many bytes of the body, and the rest after `stall_for` seconds, or never if that is None.
        truncate_after: send so many bytes of the body that Content-Length promised, then close.
        corrupt_at: flip the bits of the byte at this position of the body (negative: from its end).
    """

    method: str | None = None
    route: str | None = None
    path: str | None = None
    first: int | None = None
    after: int = 0

    latency: float = 0.0
    run: Callable[[Request], object] | None = None

    close: bool = False
    reset: bool = False
    status: int | None = None
    error_code: str | None = None
    retry_after: float | str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    json: Callable[[Request], object] | None = None
    body: bytes | None = None
    edit: Callable[[Request, Answer], Answer] | None = None
    stall_after: int | None = None
    stall_for: float | None = None
    truncate_after: int | None = None
    corrupt_at: int | None = None

    def __post_init__(self) -> None:
        broken = [at for at in (self.stall_after, self.truncate_after, self.corrupt_at) if at is not None]
        outcomes = (self.close, self.reset, self._replaces, self.edit is not None)
        if sum(outcomes) + len(broken) > 1 or (self.json is not None and self.body is not None):
            raise ValueError(f"a fault does one thing: {self}")

    @property
    def decides(self) -> bool:
        """Whether this has an outcome, and is not only a wait or a callback before the right answer."""
        return self.close or self.reset or self._replaces or self.edit is not None or self.breaks_body

    @property
    def breaks_body(self) -> bool:
        """Whether the answer is right and what goes wrong is the way of its body."""
        return any(at is not None for at in (self.stall_after, self.truncate_after, self.corrupt_at))

    @property
    def _replaces(self) -> bool:
        return self.status is not None or self.json is not None or self.body is not None

    def matches(self, request: Request) -> bool:
        """Whether this could hit a request, if the count allows."""
        return (
            self.method in (None, request.method)
            and self.route in (None, request.route)
            and (self.path is None or re.search(self.path, unquote(request.path)) is not None)
            and not (self.breaks_body and request.method == "HEAD")
        )

    def answer(self, request: Request, right: Callable[[], Answer]) -> Answer:
        """The answer under this fault; `right` makes the one without it."""
        if self.json is not None:
            return as_json(self.json(request), self.status or 200, self._headers())
        if self.body is not None:
            return Answer(self.status or 200, self._headers(), self.body)
        if self.status is not None:
            return error(self.status, f"fault {self.status}", self.error_code, self._headers())
        if self.edit is not None:
            return self.edit(request, right())
        return self._corrupted(right())

    def _headers(self) -> Mapping[str, str]:
        waiting = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return {**waiting, **self.headers}

    def _corrupted(self, answer: Answer) -> Answer:
        if self.corrupt_at is None:
            return answer
        body = bytearray(answer.whole())
        if body:
            body[self.corrupt_at] ^= 0xFF
        return replace(answer, body=bytes(body))


class Injection:
    """A fault that is in force, until `remove` or until its count is used up."""

    def __init__(self, fault: Fault, remove: Callable[["Injection"], None]) -> None:
        self.fault = fault
        self.hits = 0
        self._seen = 0
        self._remove = remove

    def remove(self) -> None:
        """Let the fault hit nothing any more."""
        self._remove(self)

    def take(self, request: Request) -> bool:
        """Whether this hits a request, which is counted. Called under the lock of `Faults`."""
        if not self.fault.matches(request):
            return False
        self._seen += 1
        late = self.fault.first is not None and self._seen > self.fault.after + self.fault.first
        if self._seen <= self.fault.after or late:
            return False
        self.hits += 1
        return True


class Faults:
    """The faults in force. A request meets the waits and callbacks of all that hit it, and the outcome of the first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._injections: list[Injection] = []

    def add(self, fault: Fault) -> Injection:
        """Put a fault in force."""
        injection = Injection(fault, self._remove)
        with self._lock:
            self._injections.append(injection)
        return injection

    def clear(self) -> None:
        """Remove all."""
        with self._lock:
            self._injections.clear()

    def hitting(self, request: Request) -> list[Fault]:
        """The faults that hit a request, in the order in which they were added."""
        with self._lock:
            return [injection.fault for injection in self._injections if injection.take(request)]

    def _remove(self, injection: Injection) -> None:
        with self._lock:
            if injection in self._injections:
                self._injections.remove(injection)
