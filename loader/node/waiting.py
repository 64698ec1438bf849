"""How a thread waits for bytes: it queues what nobody brings, and watches what others do.

Bytes that another process is bringing are waited for by looking at the blob's map, so that the death of
that process ends the wait for it. When it lives but its bytes do not move for ``Settings.stall_timeout``,
the missing blocks are fetched once more, into this process's own pages.

Ownership: a `Demand` is waited for by one thread, and its ``pieces`` list belongs to that thread.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol

from loadstone.errors import LoadstoneError, StalledError
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.jobs import Demand, Fillable, Piece
from loadstone.loader.node.locks import close_own, pauses
from loadstone.loader.node.pace import START
from loadstone.loader.order import requests
from loadstone.loader.ranges import BLOCK, ByteRange, coalesce
from loadstone.settings import Settings

_TELL_SECONDS = 0.01  # a wait that is over sooner is not worth telling other processes of
_SMALLEST = 1024 * 1024
_LOOK_SHARE = 30  # looking takes at most about one part in so many of the waiting time
_ASK_ABOUT = 16


class Queue(Protocol):
    """What waiting needs of the fetcher."""

    settings: Settings

    def begin(self, demand: Demand) -> None:
        """Hold prefetches back for ``demand``."""
        ...

    def end(self, demand: Demand) -> None:
        """Forget ``demand``, and those of its pieces that nobody works on yet."""
        ...

    def submit(self, pieces: Sequence[Piece]) -> None:
        """Bring ``pieces`` before anything else."""
        ...

    def error(self, demand: Demand) -> LoadstoneError | None:
        """Return what went wrong with ``demand``."""
        ...


def wait_for(queue: Queue, blob: Fillable, spans: Sequence[ByteRange], timeout: float | None = None) -> None:
    """Block until all of ``spans`` is usable, ahead of every prefetch.

    Raises
    ------
    LoadstoneError
        It cannot be had, the blob was closed, or ``timeout`` seconds went by (`StalledError`).
    """
    stored = blob.stored
    runs = [run for span in coalesce(spans) for run in stored.missing(span)]
    if not runs:
        return
    blob.check_open()
    total = sum(run.nbytes for run in runs)
    limit = max(_SMALLEST, min(total // START // BLOCK * BLOCK, queue.settings.request_bytes))
    demand = Demand(blob=blob, spans=runs)
    # The first piece is looked at first, at the end of the list.
    demand.pieces = [Piece(blob, run, demand) for run in reversed(requests(runs, stored.size, limit))]
    with ExitStack() as undo:
        undo.callback(queue.end, demand)
        queue.begin(demand)
        queue.submit(demand.pieces[::-1])
        _Wait(queue, blob, demand, undo).run(timeout)


class _Wait:
    def __init__(self, queue: Queue, blob: Fillable, demand: Demand, undo: ExitStack) -> None:
        self._queue = queue
        self._blob = blob
        self._demand = demand
        self._undo = undo
        self._begun = self._moved_at = time.monotonic()
        self._look_at = 0.0
        self._held = 0
        self._told = False

    def run(self, timeout: float | None) -> None:
        stored = self._blob.stored
        for pause in pauses():
            changes = stored.changes()
            error = self._queue.error(self._demand)
            if error is not None:
                raise error
            self._blob.check_open()
            self._advance(stored)
            if not self._demand.pieces:
                return
            waited = time.monotonic() - self._begun
            if timeout is not None and waited >= timeout:
                raise StalledError(
                    f"{stored.name}: not all of {self._demand.spans[0].start} to "
                    f"{self._demand.spans[-1].stop} arrived within {timeout:g} s; wait longer or try again"
                )
            if waited > _TELL_SECONDS and not self._told:
                self._tell(stored)
            stored.wait(changes, pause if timeout is None else min(pause, timeout - waited))

    def _advance(self, stored: StoredBlob) -> None:
        """Drop finished pieces; now and then look at those that nobody here brings."""
        pieces = self._demand.pieces
        while pieces and not stored.missing(pieces[-1].span, look=False):
            pieces.pop()
        now = time.monotonic()
        if now >= self._look_at and any(not piece.busy for piece in pieces):
            self._look(stored, now)
            self._look_at = now + _LOOK_SHARE * (time.monotonic() - now)

    def _look(self, stored: StoredBlob, now: float) -> None:
        """Queue idle pieces that are free again, and watch whether the others move."""
        demand = self._demand
        stored.look(ByteRange(demand.spans[0].start, demand.spans[-1].stop))
        demand.pieces = [
            piece for piece in demand.pieces if piece.busy or stored.missing(piece.span, look=False)
        ]
        idle = [piece for piece in reversed(demand.pieces) if not piece.busy]
        held = sum(run.nbytes for piece in idle for run in stored.missing(piece.span, look=False))
        # Asking about a few keeps the threads busy until the next look; asking about all could take long.
        free = [piece for piece in idle[:_ASK_ABOUT] if demand.private or stored.claimable(piece.span)]
        if free:
            self._queue.submit(free)
        if held != self._held or held == 0:
            self._held, self._moved_at = held, now
        elif now - self._moved_at > self._queue.settings.stall_timeout:
            demand.private = True

    def _tell(self, stored: StoredBlob) -> None:
        """Let other processes know, so that their prefetches make way and their transfers of this do not."""
        self._told = True
        self._blob.begin_demand()
        self._undo.callback(self._blob.end_demand)
        fd = stored.demand(ByteRange(self._demand.spans[0].start, self._demand.spans[-1].stop))
        if fd is not None:
            self._undo.callback(close_own, fd)
