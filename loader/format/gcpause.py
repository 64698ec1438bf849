"""Pauses Python's cyclic garbage collector while a large table is built.

Building a hundred thousand small objects that all stay alive makes the collector walk them again and again:
two thirds of the time to parse a large header. Nothing that is built here holds a cycle.

The collector is one per process, so pauses are counted: the first of several threads switches it off, the
last one on again, and only if it was on to begin with. A child forked meanwhile starts without a pause.
"""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SMALL = 256 * 1024
"""Inputs below this many bytes are not worth a change of process-wide state."""


class _Pauses:
    """How many pauses are in force, and whether the collector is owed a restart; guarded by its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.restart = False

    def enter(self) -> None:
        with self.lock:
            if self.count == 0:
                self.restart = gc.isenabled()
                gc.disable()
            self.count += 1

    def leave(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count == 0 and self.restart:
                gc.enable()

    def after_fork(self) -> None:
        # The threads that would have ended their pauses, or hold the lock, do not exist in the child.
        if self.count and self.restart:
            gc.enable()
        self.lock = threading.Lock()
        self.count = 0


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.after_fork)


@contextmanager
def paused_gc(nbytes: int) -> Iterator[None]:
    """Pause the collector for the length of a ``with`` block whose input has ``nbytes`` bytes."""
    if nbytes < SMALL:
        yield
        return
    _pauses.enter()
    try:
        yield
    finally:
        _pauses.leave()
