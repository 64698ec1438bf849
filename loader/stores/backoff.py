"""How long to keep trying: patience for one piece of work, and manners towards one store.

A `TemporaryError` is tried again after a pause that grows exponentially, with full jitter. All failures of
one piece of work draw on the same patience, ``Settings.retry_seconds`` without progress; *progress* is
`MIN_PROGRESS` new bytes, so that a store that trickles a byte at a time does not count as working. When a
store asks everybody to slow down, every transfer from it holds until the moment it named.

Ownership: a `Manners` is shared by all threads of one transport (its lock guards one float); a `Work`
belongs to the thread that does the work.
"""

import random
import threading
import time
from collections.abc import Callable

from loadstone.errors import LoadstoneError, StalledError, TransferError
from loadstone.loader.stores.store import Gate

MIN_PROGRESS = 16 * 1024
"""New bytes that count as progress: less within one stall limit is a stall."""
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 8.0
_SLICE = 0.1
_MISANSWERS = 3
_CONNECT_PATIENCE = 10.0


class TemporaryError(TransferError):
    """A failure that may pass.

    Attributes
    ----------
    retry_after : float or None
        Seconds the store asked for.
    throttled : bool
        The store asked to slow down.
    unreachable : bool
        No connection could be made.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        throttled: bool = False,
        unreachable: bool = False,
        stalled: bool = False,
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.throttled = throttled
        self.unreachable = unreachable
        self.stalled = stalled


class MisanswerError(TemporaryError):
    """An answer that cannot be right; given a few chances, since a proxy on the way may be to blame."""

    def __init__(self, error: LoadstoneError) -> None:
        super().__init__(str(error))
        self.error = error


class Manners:
    """What one store asked of everybody who reads from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._not_before = 0.0
        self.reached = False
        """Whether the store ever answered."""

    def hold(self, seconds: float) -> None:
        """Let no transfer begin for ``seconds``."""
        with self._lock:
            self._not_before = max(self._not_before, time.monotonic() + seconds)

    def wait(self, gate: Gate) -> None:
        """Wait until the store may be asked again."""
        _sleep(lambda: self._not_before - time.monotonic(), gate)


class Work:
    """One piece of work and what is left of its patience.

    Parameters
    ----------
    name : str
        The object, for messages.
    seconds : float
        Longest time without progress.
    """

    def __init__(self, name: str, seconds: float, manners: Manners, gate: Gate) -> None:
        self.name = name
        self.gate = gate
        self._seconds = seconds
        self._manners = manners
        self._since = time.monotonic()
        self._fresh = 0
        self._failures = 0
        self._misanswers = 0

    def progress(self, nbytes: int) -> None:
        """Count ``nbytes`` that were not there before."""
        self._fresh += nbytes
        if nbytes > 0:
            # A store that gives anything is not overloaded: the pauses begin again, the patience does not.
            self._failures = self._misanswers = 0
        if self._fresh >= MIN_PROGRESS:
            self._fresh = 0
            self._since = time.monotonic()

    def begin(self) -> None:
        """Wait for the store's leave to make a request."""
        self._manners.wait(self.gate)

    def waiting(self) -> None:
        """Give the gate a chance to end a transfer that waits."""
        self.gate.admit(0)

    def answered(self) -> None:
        """Note that the store answers at all."""
        self._manners.reached = True

    def failed(self, fault: TemporaryError) -> None:
        """Pause before the next attempt.

        Raises
        ------
        TransferError
            The patience is used up; the message names the last failure.
        """
        if fault.throttled:
            self.gate.throttled(fault.retry_after)
        if isinstance(fault, MisanswerError):
            self._misanswers += 1
            if self._misanswers > _MISANSWERS:
                raise fault.error from None
        waited = time.monotonic() - self._since
        pause = self._pause(fault)
        if waited + pause > self._patience(fault):
            raise self._give_up(fault, waited) from None
        if fault.throttled and fault.retry_after:
            self._manners.hold(fault.retry_after)
        until = time.monotonic() + pause
        _sleep(lambda: until - time.monotonic(), self.gate)

    def _pause(self, fault: TemporaryError) -> float:
        # Full jitter: many nodes that start together must not come back together.
        longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._failures)
        self._failures += 1
        return (fault.retry_after or 0.0) + random.uniform(0.0, longest)  # noqa: S311  no secret

    def _patience(self, fault: TemporaryError) -> float:
        if fault.unreachable and not self._manners.reached:
            return min(self._seconds, _CONNECT_PATIENCE)
        return self._seconds

    def _give_up(self, fault: TemporaryError, waited: float) -> TransferError:
        kind = StalledError if fault.stalled else TransferError
        advice = "check the network and the endpoint, or raise LOADSTONE_RETRY_SECONDS"
        if fault.retry_after and fault.retry_after > self._seconds:
            return kind(
                f"{fault}; the store asks to wait {fault.retry_after:.0f} s, longer than is allowed; {advice}"
            )
        tries = "1 attempt" if self._failures == 1 else f"{self._failures} attempts"
        return kind(f"{fault}; gave up after {waited:.0f} s and {tries} without progress; {advice}")


def _sleep(left: Callable[[], float], gate: Gate) -> None:
    """Sleep while ``left()`` is positive, in slices, so that a cancelled transfer ends soon."""
    while (seconds := left()) > 0:
        time.sleep(min(seconds, _SLICE))
        gate.admit(0)
