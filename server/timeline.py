"""When a starting service reached what, in seconds since its process began.

A `Timeline` may be marked and read from any thread; the first mark of an event counts.
"""

import os
import threading
import time
from pathlib import Path
from typing import Literal

Event = Literal[
    "serve",  # loadstone's own code runs
    "listening",  # the port answers
    "opened",  # the checkpoint's headers are read, its bytes begin to flow
    "imported",  # torch and transformers are imported
    "first_tensor",  # the first tensor's bytes are here
    "model_built",  # the model is callable; its parameters still wait for their bytes
    "first_token",  # a whole forward pass has given a token: the service is ready
    "last_byte",  # every byte of the checkpoint is here
]


class Timeline:
    """Moments of one start-up.

    Attributes
    ----------
    began : float
        When the process began, in seconds since 1970.
    """

    def __init__(self) -> None:
        age = _process_age()
        self.began = time.time() - age
        self._origin = time.monotonic() - age
        self._lock = threading.Lock()
        self._events: dict[Event, float] = {}

    def mark(self, event: Event) -> None:
        """Record that ``event`` happens now, unless it is recorded already."""
        now = self.elapsed()
        with self._lock:
            self._events.setdefault(event, now)

    def elapsed(self) -> float:
        """Return the seconds since the process began."""
        return time.monotonic() - self._origin

    def events(self) -> dict[Event, float]:
        """Return the recorded events in the order in which they happened."""
        with self._lock:
            return dict(sorted(self._events.items(), key=lambda item: item[1]))


def _process_age() -> float:
    """Return how many seconds ago this process began: Python's own start-up is part of a cold start."""
    # The second field, the program's name, may hold spaces and brackets; field 22 is the start in ticks.
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 0.0)
