"""What the fetcher works on: pieces of blobs, wanted by a blocked thread or by a prefetch.

Ownership: every attribute here belongs to the fetcher and is read and written under its lock, apart from
those said to be constant.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loadstone.errors import LoadstoneError
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.store import Gate, Sink


class Fillable(Protocol):
    """A blob whose bytes can be fetched."""

    @property
    def stored(self) -> StoredBlob:
        """Where they go."""
        ...

    def fill(self, span: ByteRange, sink: Sink, gate: Gate) -> None:
        """Fetch the bytes of ``span`` into ``sink``, in order."""
        ...

    def check_open(self) -> None:
        """Raise `ClosedError` when the blob was closed."""
        ...

    def make_room(self, nbytes: int) -> bool:
        """Try to free ``nbytes`` where its bytes are stored."""
        ...

    def foreign_demand(self) -> bool:
        """Say whether a thread of another process is blocked on bytes."""
        ...

    def begin_demand(self) -> None:
        """Tell other processes that a thread of this one is blocked on bytes."""
        ...

    def end_demand(self) -> None:
        """Undo one `begin_demand`."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """Who wants pieces: common to both kinds.

    Attributes
    ----------
    error : LoadstoneError or None
        What went wrong first.
    ended : bool
        Nothing more is to be done for it.
    running : int
        Its pieces that a thread is working on.
    moved : int
        Bytes that were fetched for it.
    """

    error: LoadstoneError | None = None
    ended: bool = False
    running: int = 0
    moved: int = 0


@dataclass(slots=True, eq=False)
class Piece:
    """One request's worth of a blob.

    Attributes
    ----------
    blob, span : Fillable, ByteRange
        What to bring (constant).
    job : Job
        Who wants it (constant).
    busy : bool
        It waits in a queue, or a thread is working on it.
    """

    blob: Fillable
    span: ByteRange
    job: Job
    busy: bool = False


@dataclass(slots=True, eq=False)
class Demand(Job):
    """A thread is blocked on bytes of one blob.

    Attributes
    ----------
    blob, spans : Fillable, Sequence
        What it waits for (constant).
    pieces : list
        Those that may still be missing.
    private : bool
        Take no more notice of other processes: one of them holds the bytes and does not move.
    """

    blob: Fillable | None = None
    spans: Sequence[ByteRange] = ()
    pieces: list[Piece] = field(default_factory=list)
    private: bool = False

    def touches(self, blob: Fillable, span: ByteRange) -> bool:
        """Say whether it waits for bytes of ``span``."""
        return blob is self.blob and any(
            want.start < span.stop and span.start < want.stop for want in self.spans
        )


@dataclass(slots=True, eq=False)
class Batch(Job):
    """A prefetch.

    Attributes
    ----------
    todo : deque
        Pieces nobody works on yet, in order.
    later : deque
        Pieces that other processes or threads were filling when they were looked at.
    held : int
        Bytes missing in ``later`` when it was last looked at.
    moved_at : float
        When that number last changed.
    ended_at : float
        When the prefetch ended; 0 while it has not.
    """

    todo: deque[Piece] = field(default_factory=deque)
    later: deque[Piece] = field(default_factory=deque)
    held: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
