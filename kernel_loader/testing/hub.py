"""Hub: a Site on real sockets."""

from collections import Counter
from types import TracebackType
from typing import Self

from .faults import Fault, Faults, Injection
from .log import RequestLog
from .server import Exchange, Listener
from .site import Site


class Hub(Site):
    """A Hugging Face Hub on the loopback interface, for the real client, in this process or in any other.

        with Hub() as hub:
            commit = hub.kernel("org/name").commit({"build/torch-universal/__init__.py": b""}, branch="v1")
            subprocess.run(command, env=os.environ | hub.environ)
            assert hub.counts()["GET", "tree"] == 1

    It listens from the moment it is made until `close`, on two origins: the Hub's own `endpoint`, and `cdn_endpoint`,
    which serves LFS files while `cdn` is true.

    Attributes:
        latency: seconds that every request waits before it is answered; requests wait side by side.
        requests: what has been asked so far, of both origins.
    """

    def __init__(self, *, latency: float = 0.0, port: int = 0) -> None:
        super().__init__()
        self.latency = latency
        self.requests = RequestLog()
        self._faults = Faults()
        self._exchange = Exchange(self.requests, self._faults.hitting, lambda: self.latency, self.answer)
        self._listeners = [Listener(self._exchange, port), Listener(self._exchange)]
        self.endpoint, self.cdn_endpoint = (listener.endpoint for listener in self._listeners)

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs in its environment to talk to this Hub, and to nobody else.

        It holds no HF_HOME and an empty HF_TOKEN: give a process a cache of its own, and a token if it needs one.
        """
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": "",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def counts(self) -> Counter[tuple[str, str]]:
        """How many requests of each (method, route) so far."""
        return self.requests.counts()

    def fault(self, fault: Fault) -> Injection:
        """Let something go wrong from now on."""
        return self._faults.add(fault)

    def clear_faults(self) -> None:
        """Let everything go right again."""
        self._faults.clear()

    def close(self) -> None:
        """Cut every connection, also of handlers that wait or stall, and wait for the threads to end.

        Raises:
            ExceptionGroup: a callback of a fault, or the Hub itself, had failed.
        """
        if self._exchange.closing.is_set():
            return
        self._exchange.closing.set()
        for listener in self._listeners:
            listener.close()
        if self._exchange.errors:
            raise ExceptionGroup("the Hub failed while it answered", self._exchange.errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
