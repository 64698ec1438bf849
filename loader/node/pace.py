"""How many connections to use, and how fast: pure policy, fed with a clock and with what was measured.

More connections are tried for as long as they bring more bytes, and while receiving leaves the processors
time: where it does not, more threads only take it from each other. A store that asks to slow down halves
them. All numbers of that policy are here.

Ownership: the fetcher calls everything under its own lock, except `Bandwidth.delay`, which has its own, and
`ThreadTime`, which keeps a number for each thread.
"""

import os
import threading
import time
from collections.abc import Callable

START = 4
"""Connections to begin with."""

_WINDOW = 0.25  # seconds over which a rate is measured
_BUSY = 0.5  # share of the processors' time in receiving from which on more connections cannot help
_GAIN = 1.10  # growth in rate that justifies more connections
_CALM = 5.0  # seconds without growth after a store asked to slow down
_RETRY = 10.0  # seconds after which more connections are tried again


class Pace:
    """The number of prefetching connections.

    Parameters
    ----------
    most : int
        Upper bound.
    clock : Callable
        Seconds that never go back.
    processors : int, optional
        How many this process may use; by default asked of the system.
    """

    def __init__(
        self, most: int, clock: Callable[[], float] = time.monotonic, processors: int | None = None
    ) -> None:
        self._most = most
        self._clock = clock
        self._processors = processors or len(os.sched_getaffinity(0))
        self.target = min(START, most)
        self._previous = 0.0
        self._good = self.target
        self._calm_until = 0.0
        self._next_try = 0.0
        self._bytes = 0
        self._spent = 0.0
        self._full = True
        self._since = clock()

    def moved(self, nbytes: int, active: int, spent: float = 0.0) -> bool:
        """Count bytes that arrived while ``active`` connections were busy.

        Parameters
        ----------
        nbytes : int
            How many.
        active : int
            Connections in use.
        spent : float
            Seconds of a processor that receiving them took.

        Returns
        -------
        bool
            The target changed.
        """
        self._bytes += nbytes
        self._spent += spent
        # A rate tells nothing about a number of connections that was not in use all the time.
        self._full = self._full and active >= self.target
        seconds = self._clock() - self._since
        if seconds < _WINDOW:
            return False
        rate, full = self._bytes / seconds, self._full
        busy = self._spent > _BUSY * self._processors * seconds
        self._begin()
        return full and self._adapt(rate, busy)

    def throttled(self) -> None:
        """Halve the connections, and leave it at that for a while."""
        now = self._clock()
        if now < self._calm_until - _CALM + _WINDOW:
            return  # several connections hear of the same overload
        self.target = self._good = max(1, self.target // 2)
        self._calm_until = now + _CALM
        self._previous = 0.0
        self._begin()

    def disturbed(self) -> None:
        """Forget what was measured lately: connections were held back on purpose."""
        self._begin()

    def _begin(self) -> None:
        self._bytes = 0
        self._spent = 0.0
        self._full = True
        self._since = self._clock()

    def _adapt(self, rate: float, busy: bool) -> bool:
        now, before = self._clock(), self.target
        if self.target > self._good:  # an attempt is under way: was it worth it?
            if rate > self._previous * _GAIN:
                self._good = self.target
            else:
                self.target = self._good
                self._next_try = now + _RETRY
                return True
        self._previous = rate
        if not busy and now >= max(self._calm_until, self._next_try):
            self.target = min(self._most, self._good + max(2, self._good // 2))
        return self.target != before


class Bandwidth:
    """A cap on bytes per second, over all connections.

    Parameters
    ----------
    rate : int
        Bytes per second; 0: no cap.
    clock : Callable
        Seconds that never go back.
    """

    def __init__(self, rate: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0

    def delay(self, nbytes: int) -> float:
        """Take ``nbytes`` out of the budget when it allows that now.

        Returns
        -------
        float
            0 when they were taken; otherwise the seconds after which to ask again.
        """
        if not self._rate:
            return 0.0
        with self._lock:
            now = self._clock()
            if self._free_at > now:
                return self._free_at - now
            self._free_at = now + nbytes / self._rate
            return 0.0


class ThreadTime:
    """Tells each thread how much of a processor's time it took since it asked last."""

    def __init__(self) -> None:
        self._last = threading.local()

    def taken(self) -> float:
        """Return the calling thread's seconds; the first time, 0."""
        now = time.thread_time()
        before: float = getattr(self._last, "at", now)
        self._last.at = now
        return now - before
