"""Sealing in the background: complete blobs are brought safely to the disk, while nobody waits for it.

It begins when no blob has been completed for a moment: the processor and the disk belong to transfers first.

Ownership: any thread may `add`; one daemon thread, started when there is something to do and gone when
there is not, does the work. Where none can be started, whoever adds does it. A forked child begins with an
empty list: sealing is the parent's.
"""

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.node import blobfolder
from loadstone.loader.node.forks import renew_in_child

_QUIET = 0.5  # seconds without another complete blob after which sealing begins
_LATEST = 10.0  # seconds after which it begins in any case

_log = logging.getLogger("loadstone")


class Sealer:
    """Seals blobs one after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._todo: deque[Path] = deque()
        self._thread: threading.Thread | None = None
        self._added_at = 0.0
        self._awaited = 0
        renew_in_child(self)

    def add(self, folder: Path) -> None:
        """Seal the complete blob in ``folder`` soon."""
        if blobfolder.is_sealed(folder):
            return  # whoever opens it again and again needs no thread each time
        with self._changed:
            self._todo.append(folder)
            self._added_at = time.monotonic()
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="loadstone-seal", daemon=True)
            with suppress(RuntimeError):
                self._thread.start()
                return
        self._work(at_once=True)  # no thread is to be had

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until everything added so far is sealed; ``False`` when ``timeout`` seconds went by first."""
        with self._changed:
            self._awaited += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: self._thread is None, timeout)
            finally:
                self._awaited -= 1

    def reset_in_child(self) -> None:
        """Begin afresh."""
        self._changed = threading.Condition()
        self._todo = deque()
        self._thread = None
        self._awaited = 0

    def _work(self, *, at_once: bool = False) -> None:
        latest = 0.0 if at_once else time.monotonic() + _LATEST
        while True:
            with self._changed:
                while not self._awaited and (left := self._quiet_in(latest)) > 0:
                    self._changed.wait(left)
                if not self._todo:
                    self._thread = None
                    self._changed.notify_all()
                    return
                folder = self._todo.popleft()
            _seal(folder)

    def _quiet_in(self, latest: float) -> float:
        """Return the seconds until work may begin."""
        return min(self._added_at + _QUIET, latest) - time.monotonic()


def _seal(folder: Path) -> None:
    if blobfolder.is_sealed(folder):
        return
    try:
        blobfolder.seal(folder)
    except (FileNotFoundError, CacheError):
        return  # it was removed, or replaced by one that is not complete
    except OSError as error:
        _log.warning("the disk did not take %s (%s); it is dropped and will be fetched again", folder, error)
        blobfolder.drop(folder)
