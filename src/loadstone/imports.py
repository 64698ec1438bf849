"""Imports made at their first use, for the end of which a fork waits.

Python guards each module that is being imported by a lock. A child that is forked while another thread
imports one inherits the lock without the thread that would release it, and waits for ever when it imports
the same module. What loadstone imports late is therefore imported ``with importing``, and ``os.fork`` lets
those imports come to their end, for `_PATIENCE` seconds at most. What other code imports is its own affair.

Ownership: ``_lock`` guards which threads are importing; a forking thread holds it while it forks. Imports
do not wait for each other here, and a thread's own do not keep it from forking.
"""

import concurrent.futures.thread
import logging
import os
import threading
from types import TracebackType

_PATIENCE = 30.0
"""Seconds: longer than a framework takes to be imported from a slow disk."""
_OLDER = concurrent.futures.thread, logging
"""They hold locks over a fork, too. Hooks that are younger run before these: an import would wait for a lock
of theirs while they wait for the import. And a hook that an import brings while a fork waits runs by half.
"""


class Importing:
    """Counts imports that are under way; a context manager that may be entered again and again."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._depths: dict[int, int] = {}
        self._more: list[threading.RLock] = []
        self._held: list[threading.RLock] = []

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._lock:
            self._depths[me] = self._depths.get(me, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        me = threading.get_ident()
        with self._lock:
            self._depths[me] -= 1
            if not self._depths[me]:
                del self._depths[me]
                self._lock.notify_all()

    def over_forks(self, lock: "threading.RLock") -> None:
        """Have each forking thread hold ``lock`` too, which an import may need to come to its end."""
        self._more.append(lock)

    def _hold(self) -> None:
        me = threading.get_ident()
        self._lock.acquire()
        self._held = []  # should the wait be interrupted
        self._lock.wait_for(lambda: self._depths.keys() <= {me}, _PATIENCE)
        self._held = list(self._more)  # one that is added while a fork is under way is not held for it
        for lock in self._held:
            lock.acquire()

    def _let_go(self) -> None:
        for lock in self._held:
            lock.release()
        self._lock.release()

    def _let_go_in_child(self) -> None:
        me = threading.get_ident()
        self._depths = {thread: depth for thread, depth in self._depths.items() if thread == me}
        self._let_go()

    def follow_forks(self) -> None:
        """Have every fork of this process wait."""
        os.register_at_fork(
            before=self._hold, after_in_parent=self._let_go, after_in_child=self._let_go_in_child
        )


importing = Importing()
importing.follow_forks()
