"""Once: a function runs once for each key, whatever the threads, and its result is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Final

from kernel_loader.errors import CyclicDependency


class Once:
    """Results by key. Threads that ask for one that is being made wait for it; a failure is not kept.

    functools.cache alone would let threads that come at the same time make the same thing at the same time; a lock for
    each key alone would let two that need each other's wait forever.
    """

    def __init__(self) -> None:
        self._results: Final[dict[Hashable, Any]] = {}
        self._makers: Final[dict[Hashable, int]] = {}
        self._stacks: Final[dict[int, list[Hashable]]] = {}
        self._waits_for: Final[dict[int, Hashable]] = {}
        self._changed: Final = threading.Condition()

    def get(self, key: Hashable, make: Callable[[], Any], name: Callable[[Any], str] = str) -> Any:  # noqa: ANN401
        """The result for a key, made now if it is the first time.

        Raises:
            CyclicDependency: it is being made by this thread, or by one that waits for this one. `name` says what for.
            Whatever `make` raises.
        """
        if key in self._results:
            return self._results[key]
        me = threading.get_ident()
        with self._changed:
            while key not in self._results and key in self._makers:
                if (circle := self._circle(key, me)) is not None:
                    raise CyclicDependency(tuple(name(part) for part in circle))
                self._waits_for[me] = key
                self._changed.wait()
                del self._waits_for[me]
            if key in self._results:
                return self._results[key]
            self._makers[key] = me
            self._stacks.setdefault(me, []).append(key)
        try:
            self._results[key] = make()
        finally:
            with self._changed:
                del self._makers[key]
                self._stacks[me].remove(key)
                self._changed.notify_all()
        return self._results[key]

    def _circle(self, key: Hashable, me: int) -> list[Hashable] | None:
        """The keys that need each other, when waiting for `key` would never end."""
        chain = [key]
        while True:
            maker = self._makers.get(chain[-1])
            if maker == me:
                mine = self._stacks[me]
                return [*chain, *mine[mine.index(chain[-1]) + 1 :], key]
            wanted = self._waits_for.get(maker) if maker is not None else None
            if wanted is None or wanted in chain:
                return None
            chain.append(wanted)
