"""Keeps loads from slowing a model that is answering.

Reading an adapter is mostly interpreter work, which the thread that runs the model has to wait for. While
batches run, loads therefore start with pauses between them, so that together they take a small share of the
interpreter's time; the first one after a rest starts at once. Without running batches nothing waits.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.025
"""The part of one CPU that loads may take from running batches."""

_LONGEST_PAUSE = 0.2
_LONGEST_WAIT = 1.0
"""Seconds after one load, and before any: who waits for an adapter must not wait for long."""


class Pace:
    """Decides when a load may start; any thread.

    Parameters
    ----------
    busy : callable
        Says whether another thread is running batches.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._lock = threading.Lock()
        self._cost = 0.0
        self._free_at = 0.0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this load's turn, and note what it costs."""
        if self._busy():
            time.sleep(self._book())
        start = time.thread_time()
        try:
            yield
        finally:
            self._cost = time.thread_time() - start

    def _book(self) -> float:
        """Take the next start, and return the seconds until then."""
        now = time.monotonic()
        with self._lock:
            start = max(now, self._free_at)
            start = min(start, now + _LONGEST_WAIT)
            self._free_at = start + min(self._cost / SHARE, _LONGEST_PAUSE)
        return start - now
