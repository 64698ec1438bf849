"""Threads that copy memory: one processor alone does not feed a bus.

Ownership: a `Crew` belongs to the thread that made it. Its threads take jobs from one queue; a job is one
thread's, from taking it to releasing the lock that says it is done. Until then it holds on to the owners of
the memory it reads and of the memory it writes, since whoever asked may be gone: interrupted, with `close`.
Where no thread can be started, whoever asks does the work.
"""

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from loadstone.loader.files.readahead import populate

Run = tuple[int, int, int]
"""Where to, where from, and how many bytes."""
_Job = tuple[Sequence[Run], object, threading.Lock]

_MOST = 6  # threads; with more, they wait for the interpreter and not for memory


class Crew:
    """Copies memory to memory, several pieces at a time."""

    def __init__(self) -> None:
        self.size = min(_MOST, len(os.sched_getaffinity(0)))
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def copy(self, runs: Sequence[Run], owners: object) -> threading.Lock:
        """Begin to copy ``runs``, whose memory ``owners`` keep; return a lock that is free afterwards."""
        done = threading.Lock()
        done.acquire()
        if len(self._threads) < self.size:
            thread = threading.Thread(target=_work, args=[self._jobs], name="loadstone-copy", daemon=True)
            with suppress(RuntimeError):  # no more threads are to be had: fewer will do
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._jobs.put((runs, owners, done))
        else:
            _copy(runs)
            done.release()
        return done

    def close(self) -> None:
        """Finish what was begun, and end the threads; nothing is copied afterwards."""
        self._jobs.put(None)  # each thread passes it on: also to one whose start was interrupted
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (job := jobs.get()) is not None:
        runs, owners, done = job
        _copy(runs)
        del job, owners  # waiting for the next must not keep a file's map alive
        done.release()
    jobs.put(None)


def _copy(runs: Sequence[Run]) -> None:
    """Copy, letting other threads run; torch's way would wake all its threads for each run."""
    for target, source, nbytes in runs:
        populate(source, nbytes)
        ctypes.memmove(target, source, nbytes)
