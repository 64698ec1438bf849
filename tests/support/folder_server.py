"""Hooks for `loadstone.fileserver.FileServer`: count what is sent, hold files back, slow them down."""

import threading
import time
from collections import Counter

from loadstone.fileserver import Hook


class Traffic(Hook):
    """Counts requests and bytes, and holds back or slows down named files.

    Ownership: the server's threads and the test share it; its lock guards the counters.
    """

    def __init__(self, *, latency: float = 0.0, bytes_per_second: float = 0.0) -> None:
        self.latency = latency
        self.bytes_per_second = bytes_per_second
        self.requests: list[tuple[str, str, int, int]] = []
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._held: dict[str, threading.Event] = {}

    def hold(self, path: str) -> None:
        """Send nothing of ``path`` until `release`."""
        self._held[path] = threading.Event()

    def release(self, path: str) -> None:
        """Let ``path`` flow."""
        self._held[path].set()

    def release_all(self) -> None:
        """Let everything flow, so that a server can end."""
        for event in self._held.values():
            event.set()

    @property
    def total(self) -> int:
        """Bytes sent so far."""
        with self._lock:
            return self.sent.total()

    def requested(self, method: str, path: str, start: int, stop: int) -> None:
        with self._lock:
            self.requests.append((method, path, start, stop))
        if self.latency:
            time.sleep(self.latency)

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        event = self._held.get(path)
        if event is not None:
            event.wait(60)
        if self.bytes_per_second:
            time.sleep(nbytes / self.bytes_per_second)
        with self._lock:
            self.sent[path] += nbytes
