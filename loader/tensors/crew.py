"""Threads that copy memory: one processor alone does not feed a bus.

Ownership: a `Crew` belongs to the thread that made it. Its threads take jobs from one queue; a job is one
thread's, from taking it to releasing the lock that says it is done. Until then it holds on to the memory's
owners. Where no thread can be started, whoever asks does the work.
"""

import ctypes
import os
import threading
from contextlib import suppress
from queue import SimpleQueue

import torch

from loadstone.loader.files.residency import populate

Job = tuple[torch.Tensor, torch.Tensor, threading.Lock]
"""Where to, where from, and the lock to release then."""

_MOST = 8  # threads; more gain nothing, measured up to 16 on a machine whose bus moves 50 GiB/s


class Crew:
    """Copies between contiguous host tensors of bytes, several at a time."""

    def __init__(self) -> None:
        self.size = min(_MOST, len(os.sched_getaffinity(0)))
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> threading.Lock:
        """Begin to copy ``source`` to ``target``, of the same size; return a lock that is free afterwards."""
        done = threading.Lock()
        done.acquire()
        if len(self._threads) < self.size:
            thread = threading.Thread(target=self._work, name="loadstone-copy", daemon=True)
            with suppress(RuntimeError):  # no more threads are to be had: fewer will do
                thread.start()
                self._threads.append(thread)
        if self._threads:
            self._jobs.put((target, source, done))
        else:
            _copy(target, source)
            done.release()
        return done

    def close(self) -> None:
        """Finish what was begun, and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            target, source, done = job
            _copy(target, source)
            del job, target, source  # waiting for the next must not keep a file's map alive
            done.release()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, letting other threads run, at half the cost of torch's way, which wakes all its threads."""
    populate(source.data_ptr(), source.numel())
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())
