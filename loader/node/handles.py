"""The handle of a prefetch: what a caller sees of bytes on their way.

Ownership: any thread may use a handle; all state is the fetcher's, and read under its lock.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from loadstone.loader.files.residency import Residency
from loadstone.loader.node.jobs import Batch, Fillable
from loadstone.loader.ranges import ByteRange, coalesce
from loadstone.loader.source import Progress


class Runner(Protocol):
    """What a handle needs of its fetcher."""

    def batch_ended(self, batch: Batch, timeout: float | None) -> bool:
        """Wait until ``batch`` has ended and nothing of it runs."""
        ...

    def cancel(self, batch: Batch) -> None:
        """End ``batch`` now."""
        ...


class PrefetchHandle:
    """A prefetch of this process.

    Parameters
    ----------
    runner : Runner
        The fetcher.
    batch : Batch
        What it works on.
    wanted : Sequence
        What was asked for.

    Attributes
    ----------
    resident : Residency or None
        What was on this node's disk, on its way into memory; set before anyone else has the handle.
    """

    def __init__(self, runner: Runner, batch: Batch, wanted: Sequence[tuple[Fillable, ByteRange]]) -> None:
        self.resident: Residency | None = None
        self._runner = runner
        self._batch = batch
        spans: dict[int, tuple[Fillable, list[ByteRange]]] = {}
        for blob, span in wanted:
            spans.setdefault(id(blob), (blob, []))[1].append(span)
        self._wanted = [(blob, coalesce(found)) for blob, found in spans.values()]
        self._total = sum(span.nbytes for _, found in self._wanted for span in found)
        self._begun = time.monotonic()

    def progress(self) -> Progress:
        """Return how far it has come."""
        missing = sum(
            min(run.stop, span.stop) - max(run.start, span.start)
            for blob, found in self._wanted
            for span in found
            for run in blob.stored.missing(span)
        )
        seconds = (self._batch.ended_at or time.monotonic()) - self._begun
        if self.resident is not None:
            read = self.resident.progress()
            missing = min(self._total, missing + read.total - read.ready)
            seconds = max(seconds, read.seconds)
        return Progress(self._total, self._total - missing, self._batch.moved, seconds)

    def done(self) -> bool:
        """Say whether it has ended: complete, failed or cancelled."""
        here = self.resident is None or self.resident.done()
        return here and self._runner.batch_ended(self._batch, 0)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended; ``False`` when ``timeout`` seconds went by first.

        Raises
        ------
        LoadstoneError
            What stopped it; nothing when that was `cancel`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        if not self._runner.batch_ended(self._batch, timeout):
            return False
        left = None if end is None else max(0.0, end - time.monotonic())
        if self.resident is not None and not self.resident.wait(left):
            return False
        if self._batch.error is not None:
            raise self._batch.error
        return True

    def cancel(self) -> None:
        """Stop it; nothing of it is running when this returns."""
        self._runner.cancel(self._batch)
        if self.resident is not None:
            self.resident.cancel()
