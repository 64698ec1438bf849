"""Sealing in the background: complete blobs are brought safely to the disk, while nobody waits for it.

Ownership: any thread may `add`; one daemon thread, started when there is something to do and gone when
there is not, does the work. Where none can be started, whoever adds does it. A forked child begins with an
empty list: sealing is the parent's.
"""

import logging
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.node import blobfolder
from loadstone.loader.node.forks import renew_in_child

_log = logging.getLogger("loadstone")


class Sealer:
    """Seals blobs one after the other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._todo: deque[Path] = deque()
        self._thread: threading.Thread | None = None
        renew_in_child(self)

    def add(self, folder: Path) -> None:
        """Seal the complete blob in ``folder`` soon."""
        with self._changed:
            self._todo.append(folder)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="loadstone-seal", daemon=True)
            with suppress(RuntimeError):
                self._thread.start()
                return
        self._work()  # no thread is to be had

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until everything added so far is sealed; ``False`` when ``timeout`` seconds went by first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout)

    def reset_in_child(self) -> None:
        """Begin afresh."""
        self._changed = threading.Condition()
        self._todo = deque()
        self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._todo:
                    self._thread = None
                    self._changed.notify_all()
                    return
                folder = self._todo.popleft()
            _seal(folder)


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
