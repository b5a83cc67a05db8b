"""Listener: a socket, the threads behind it, and the writing of answers, right or broken."""

import contextlib
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, cast
from urllib.parse import parse_qsl

from .answer import Answer, error
from .faults import Fault
from .log import Request, RequestLog
from .routes import Target, parse

# SO_LINGER on with no time to linger: closing sends RST in place of FIN.
RESET: Final = struct.pack("ii", 1, 0)


class Exchange:
    """What a listener asks its Hub: the faults of a request, its latency and its answer."""

    def __init__(
        self,
        log: RequestLog,
        hitting: Callable[[Request], Sequence[Fault]],
        latency: Callable[[], float],
        answer: Callable[[Request, Target], Answer],
    ) -> None:
        self.log = log
        self.hitting = hitting
        self.latency = latency
        self.answer = answer
        self.closing = threading.Event()
        self.errors: list[Exception] = []

    def wait(self, seconds: float | None) -> None:
        """Wait so long, or for ever.

        Raises:
            ConnectionAbortedError: the Hub closes meanwhile.
        """
        if self.closing.wait(seconds):
            raise ConnectionAbortedError


class Listener(ThreadingHTTPServer):
    """One origin on a free port of 127.0.0.1, with a thread a connection."""

    daemon_threads = False  # so that server_close() waits for all of them
    request_queue_size = 1024

    def __init__(self, exchange: Exchange, port: int = 0) -> None:
        self.exchange = exchange
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._doomed: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, name=self.endpoint)
        self._thread.start()

    def server_bind(self) -> None:
        """Bind without the name look-up that HTTPServer makes, which can take seconds without a network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
            doomed = request in self._doomed
            self._doomed.discard(request)
        if not doomed:
            super().shutdown_request(request)
            return
        with contextlib.suppress(OSError):
            request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close_request(request)

    def reset(self, connection: socket.socket) -> None:
        """Let a connection end with a TCP reset."""
        with self._lock:
            self._doomed.add(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that go away, and our own closing, are no errors; anything else is one of the Hub or of a callback.
        problem = sys.exception()
        if isinstance(problem, Exception) and not isinstance(problem, ConnectionError | TimeoutError):
            self.exchange.errors.append(problem)

    def close(self) -> None:
        """Stop accepting, cut every connection and wait for the threads. The exchange is closing already."""
        self.shutdown()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        # A forked child may hold the listening socket as well: closing ours would leave a Hub that accepts.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version = "LoopbackHub"
    disable_nagle_algorithm = True
    wbufsize = -1  # head and small body leave in one packet

    def do_GET(self) -> None:
        """Answer a GET."""
        self._serve()

    def do_HEAD(self) -> None:
        """Answer a HEAD: as a GET, without the body."""
        self._serve()

    def do_POST(self) -> None:
        """Answer a POST."""
        self._serve()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it
        """Print nothing: the log is a `RequestLog`."""

    @property
    def _listener(self) -> Listener:
        return cast("Listener", self.server)

    def _serve(self) -> None:
        path, _, query = self.path.partition("?")
        target = parse(path)
        request = Request(
            method=self.command,
            path=path,
            query=dict(parse_qsl(query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length", 0))),
            route=target.route,
            origin=self._listener.endpoint,
        )
        log = self._listener.exchange.log
        number = log.begin(request)
        try:
            self._answer(request, target, number)
        except BaseException:
            self.close_connection = True
            raise
        finally:
            log.end(number)

    def _answer(self, request: Request, target: Target, number: int) -> None:
        exchange = self._listener.exchange
        faults = exchange.hitting(request)
        if pause := exchange.latency() + sum(fault.latency for fault in faults):
            exchange.wait(pause)
        fault = next((fault for fault in faults if fault.decides), Fault())
        try:
            for hit in faults:
                if hit.run is not None:
                    hit.run(request)
            if fault.close or fault.reset:
                self._drop(reset=fault.reset)
                return
            answer = fault.answer(request, lambda: exchange.answer(request, target))
        except Exception as problem:  # noqa: BLE001  # of a callback or of the Hub: shown when the Hub is closed
            exchange.errors.append(problem)
            answer = error(500, f"{type(problem).__name__}: {problem}")
        self._write(answer, fault, number)

    def _drop(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:
            self._listener.reset(self.connection)

    def _write(self, answer: Answer, fault: Fault, number: int) -> None:
        if fault.breaks_body:
            answer = replace(answer, body=answer.whole())
        self.send_response(answer.status)
        for name, value in {"X-Request-Id": f"Root={number}", **answer.headers}.items():
            self.send_header(name, value)
        body = answer.body
        if isinstance(body, bytes):
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._write_body(answer.status, body, fault, number)

    def _write_body(self, status: int, body: bytes | Iterator[bytes], fault: Fault, number: int) -> None:
        log = self._listener.exchange.log
        whole = len(body) if isinstance(body, bytes) and self.command != "HEAD" else 0
        sent = 0
        try:
            for piece in self._pieces(body, fault):
                # Entered before the bytes leave: a client that has them all must find them in the log.
                log.update(number, status=status, bytes_sent=sent + len(piece))
                if isinstance(body, bytes) and sent + len(piece) == whole:
                    log.end(number)
                self.wfile.write(piece if isinstance(body, bytes) else _chunk(piece))
                sent += len(piece)
            if not isinstance(body, bytes) and self.command != "HEAD":
                self.wfile.write(b"0\r\n\r\n")
            self.wfile.flush()
        except ConnectionError:
            log.update(number, status=status, bytes_sent=sent)
            raise

    def _pieces(self, body: bytes | Iterator[bytes], fault: Fault) -> Iterator[bytes]:
        """The pieces of the body, which are to be written one after the other; never none."""
        if self.command == "HEAD":
            yield b""
        elif not isinstance(body, bytes):
            yield from body
        elif fault.truncate_after is not None:
            self.close_connection = True
            yield body[: fault.truncate_after]
        elif fault.stall_after is not None:
            yield body[: fault.stall_after]
            self.wfile.flush()
            self._listener.exchange.wait(fault.stall_for)
            yield body[fault.stall_after :]
        else:
            yield body


def _chunk(piece: bytes) -> bytes:
    # A chunk of no bytes would end the body.
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
