"""Where objects were redirected to: asking the origin again for every part is slow, and origins throttle it.

Only reads that pin a version take the short way, so that a stale target can give an error but never other
bytes. Ownership: shared by the threads of one transport; the lock guards the table.
"""

import threading
import time

_SECONDS = 60.0
"""How long a target is believed: they are often signed for minutes."""
_MOST = 1000


class Redirects:
    """The last targets, by object. They may hold signatures and are never shown."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._targets: dict[str, tuple[str, float]] = {}

    def find(self, identity: str) -> str | None:
        """Return where ``identity`` was last found, if that was not long ago."""
        with self._lock:
            target, until = self._targets.get(identity, ("", 0.0))
        return target if time.monotonic() < until else None

    def remember(self, identity: str, target: str) -> None:
        """Note that ``identity`` was found at ``target``."""
        with self._lock:
            if len(self._targets) >= _MOST:
                self._targets.clear()
            self._targets[identity] = (target, time.monotonic() + _SECONDS)

    def forget(self, identity: str) -> None:
        """Note that a target does not serve any more."""
        with self._lock:
            self._targets.pop(identity, None)
