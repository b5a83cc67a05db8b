"""Answer: status, headers and body, before they are written to a socket."""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Final

RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
GZIP_LIMIT: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets. A body that is an iterator is sent in chunks while it is made, without Content-Length."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Iterator[bytes] = b""

    def whole(self) -> bytes:
        """The body as bytes; an iterator is used up."""
        return self.body if isinstance(self.body, bytes) else b"".join(self.body)

    def add(self, headers: Mapping[str, str]) -> "Answer":
        """The same with more headers."""
        return replace(self, headers={**self.headers, **headers})


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """An answer of JSON. An iterator becomes an array of which no more than a piece is in memory at a time."""
    everything = {"Content-Type": "application/json; charset=utf-8", **(headers or {})}
    if isinstance(value, Iterator):
        return Answer(status, everything, _json_array(value))
    return Answer(status, everything, json.dumps(value).encode())


def _json_array(items: Iterable[object]) -> Iterator[bytes]:
    pieces, start = [], "["
    for item in items:
        pieces.append(start + json.dumps(item))
        start = ","
        if len(pieces) == 500:
            yield "".join(pieces).encode()
            pieces = []
    yield ("".join(pieces) + ("[]" if start == "[" else "]")).encode()


def error(status: int, message: str, code: str | None = None, headers: Mapping[str, str] | None = None) -> Answer:
    """A refusal in the Hub's form: the reason in the JSON body and in X-Error-Message, its class in X-Error-Code."""
    reason = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return as_json({"error": message}, status, {**reason, **(headers or {})})


def redirect(status: int, location: str, headers: Mapping[str, str]) -> Answer:
    """A redirect with the line of text that the Hub sends along."""
    text = f"{HTTPStatus(status).phrase}. Redirecting to {location}".encode()
    return Answer(status, {"Location": location, "Content-Type": "text/plain; charset=utf-8", **headers}, text)


def content(body: bytes, headers: Mapping[str, str], wanted: str | None) -> Answer:
    """A file, or the part that a Range header asks for; several ranges at once are answered with the whole file."""
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
    match = RANGE.fullmatch(wanted or "")
    if match is None or match.groups() == ("", ""):
        return Answer(200, headers, body)
    first, last = match.groups()
    size = len(body)
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last), size - 1) if first and last else size - 1
    if start > end:
        return error(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{size}"})
    return Answer(206, {**headers, "Content-Range": f"bytes {start}-{end}/{size}"}, body[start : end + 1])


def compressed(answer: Answer) -> Answer:
    """The same in gzip and in chunks, so without Content-Length, as the Hub sends small text where it is taken."""
    body = answer.whole()
    if answer.status != 200 or not body or len(body) > GZIP_LIMIT:
        return replace(answer, body=body)
    return replace(answer, body=iter([gzip.compress(body, mtime=0)])).add({"Content-Encoding": "gzip"})
