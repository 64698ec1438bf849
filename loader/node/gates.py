"""How one running transfer is steered: stopped, slowed down, held back for a thread that is blocked.

Ownership: a gate is used by the thread that runs the transfer. What it asks the fetcher is answered under
the fetcher's lock.
"""

import time
from typing import Protocol

from loadstone.errors import ClosedError
from loadstone.loader.node.claims import Claim
from loadstone.loader.node.jobs import Piece
from loadstone.loader.ranges import ByteRange

_PAUSE = 0.02
# A transfer that is held back still moves one chunk in this time: its connection stays alive, and whoever
# waits for its blocks in another process sees that it does.
_LONGEST_PAUSE = 2.0


class StoppedError(ClosedError):
    """A transfer ends because nobody wants it any more; never shown to callers."""


class YieldedError(StoppedError):
    """A transfer ends because its connection is needed for a thread that is blocked; it is resumed later."""


class Steering(Protocol):
    """What a gate needs of its fetcher."""

    def stopped(self, piece: Piece) -> bool:
        """Say whether the transfer should end."""
        ...

    def hold_back(self, piece: Piece, claim: Claim, rest: ByteRange) -> bool:
        """Say whether the transfer should wait; `YieldedError` when it should end instead."""
        ...

    def delay(self, nbytes: int) -> float:
        """Return 0 when ``nbytes`` may be received now, else the seconds after which to ask again."""
        ...

    def arrived(self, piece: Piece, nbytes: int) -> None:
        """Count bytes that were received."""
        ...

    def slow_down(self) -> None:
        """Take note that the store is overloaded."""
        ...


class StreamGate:
    """The gate and the sink of one transfer.

    Parameters
    ----------
    steering : Steering
        The fetcher.
    piece, claim : Piece, Claim
        What is transferred, and where to.
    """

    def __init__(self, steering: Steering, piece: Piece, claim: Claim) -> None:
        self._steering = steering
        self._piece = piece
        self._claim = claim
        self._at = claim.range.start

    def admit(self, nbytes: int) -> None:
        """Let ``nbytes`` be received when it is their turn."""
        self._check()
        if nbytes == 0:
            return
        self._make_way()
        while (wait := self._steering.delay(nbytes)) > 0:
            time.sleep(min(wait, _PAUSE))
            self._check()
            self._make_way()

    def throttled(self, retry_after: float | None) -> None:  # noqa: ARG002  the transport itself waits
        """Use fewer connections."""
        self._steering.slow_down()

    def receive(self, offset: int, data: memoryview) -> None:
        """Take bytes from the transport."""
        self._claim.write(offset, data)
        self._at = offset + len(data)
        self._steering.arrived(self._piece, len(data))

    def _check(self) -> None:
        if self._steering.stopped(self._piece):
            raise StoppedError("this transfer was cancelled")

    def _make_way(self) -> None:
        deadline = time.monotonic() + _LONGEST_PAUSE
        rest = ByteRange(self._at, max(self._at, self._claim.range.stop))
        while self._steering.hold_back(self._piece, self._claim, rest) and time.monotonic() < deadline:
            time.sleep(_PAUSE / 4)
            self._check()
