"""Threads that do small things side by side, and stay for a moment, since more of the like often follows.

Starting a thread makes whoever starts it wait for it: where thirty objects are to be looked at within one
round trip, thirty starts would be seen.

All sources of a process share one set of them: however many are opened, and never closed, the idle threads
are as many as were busy at the same time.

Ownership: ``_lock`` guards the counts. Tasks are taken from one queue by daemon threads, which end when there
was nothing to do for a while, or when their helpers are closed. ``_shared_lock`` guards the shared set and
who uses it. A forked child starts without threads or tasks.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

from loadstone.loader.node.forks import renew_in_child

_IDLE_SECONDS = 2.0
_CLOSE_SECONDS = 1.0


class Helpers:
    """See the module's description.

    Parameters
    ----------
    name : str
        What the threads are called.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.reset_in_child()
        renew_in_child(self)

    def run(self, task: Callable[[], None]) -> None:
        """Have a thread do ``task``, which must not raise; `RuntimeError`: none can or may be started."""
        with self._lock:
            if self._closed:  # a thread more than `close` knew of would take what it sent to another
                raise RuntimeError("closed")
            if self._free <= 0:  # less where an interrupted start left a thread that is not counted
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._threads.add(thread)
                self._free += 1
            self._free -= 1
            self._tasks.put(task)

    def close(self) -> None:
        """End the threads that have nothing to do; those that do something end after it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
            for _ in threads:
                self._tasks.put(None)
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def reset_in_child(self) -> None:
        """Begin afresh."""
        self._lock = threading.Lock()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._free = 0  # threads without a task, queued ones counted

    def _serve(self) -> None:
        while (task := self._next()) is not None:
            task()
            del task  # a thread that waits keeps nothing in memory
            with self._lock:
                self._free += 1

    def _next(self) -> Callable[[], None] | None:
        try:
            return self._tasks.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            pass
        with self._lock:
            try:
                return self._tasks.get_nowait()  # it came just now
            except queue.Empty:
                self._free -= 1
                self._threads.discard(threading.current_thread())
                return None


_shared_lock = threading.Lock()
_users: "weakref.WeakSet[object]" = weakref.WeakSet()
_shared: Helpers | None = None


def acquire(user: object) -> Helpers:
    """Return the helpers of the process, for ``user`` to `release`, or to be forgotten with."""
    global _shared  # noqa: PLW0603  the process has one set
    with _shared_lock:
        if _shared is None:
            _shared = Helpers("loadstone-open")
        _users.add(user)
        return _shared


def release(user: object) -> None:
    """Use them no longer; the last one to say so ends them."""
    global _shared
    with _shared_lock:
        _users.discard(user)
        if _shared is None or _users:
            return
        last, _shared = _shared, None
    last.close()


def _renew() -> None:
    global _shared_lock  # noqa: PLW0603  a thread that the child does not have may hold the parent's
    _shared_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
