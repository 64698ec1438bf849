"""A link of a stated bandwidth, as a hook of the file server: counts what is sent, and paces it."""

import threading
import time

from loadstone.fileserver import Hook


class Link(Hook):
    """Counts the bytes sent over all connections, and holds them to ``bandwidth`` bytes per second together.

    Each piece is given its place on the link's clock under a lock, and its thread sleeps until then.
    """

    def __init__(self, bandwidth: int = 0) -> None:
        self._bandwidth = bandwidth
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._sent = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes of files sent so far."""
        return self._sent

    def sending(self, path: str, offset: int, nbytes: int) -> None:  # noqa: ARG002  the hook says more than is needed
        """Wait until the link has room for ``nbytes``."""
        with self._lock:
            self._sent += nbytes
            if not self._bandwidth:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + nbytes / self._bandwidth
            wait = self._free_at - now
        time.sleep(wait)
