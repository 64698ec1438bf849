"""How many connections the process has at a time, over all its stores together.

Each store has a `Share` with a bound of its own, ``Settings.max_connections``; the process's bound is the
largest of them. Slots are given in the order in which they are asked for, as far as shares allow, so that a
look at a new store does not wait for a whole prefetch. A slot is held for one exchange. Whoever holds one
never waits for another, and exchanges that stall are cut, so waiting for a slot needs no limit of its own.

Ownership: shares are used by any thread; ``_changed`` guards every count. A forked child begins with no slot
taken.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICK = 0.5  # seconds between looks at whether a waiting transfer was cancelled

_changed = threading.Condition()
_total = 0
_queue: "dict[object, Share]" = {}
_shares: "weakref.WeakSet[Share]" = weakref.WeakSet()


class Share:
    """One store's part of the process's connections.

    Parameters
    ----------
    most : int
        Most connections to this store.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken = 0
        with _changed:
            _shares.add(self)

    def take(self, waiting: Callable[[], None]) -> None:
        """Wait for a slot and take it, to be given back with `give_back`.

        ``waiting`` is called now and then while none is free; what it raises ends the wait.
        """
        global _total  # noqa: PLW0603  the process has one count
        ticket = object()
        with _changed:
            _queue[ticket] = self
        try:
            while True:
                with _changed:
                    if _changed.wait_for(lambda: self._is_next(ticket), _TICK):
                        self._taken += 1
                        _total += 1
                        return
                waiting()
        finally:
            with _changed:
                _queue.pop(ticket, None)
                if _queue:
                    _changed.notify_all()

    def take_spare(self) -> bool:
        """Take a slot if one is free that nobody else waits for; it is given back as any other."""
        global _total  # noqa: PLW0603  likewise
        with _changed:
            free = min(self.most - self._taken, _largest(self.most) - _total)
            if free <= len(_queue):
                return False
            self._taken += 1
            _total += 1
            return True

    def give_back(self) -> None:
        """Give a slot back; in a child that was forked meanwhile, there is none to give."""
        global _total  # noqa: PLW0603  likewise
        with _changed:
            if self._taken:
                self._taken -= 1
                _total -= 1
                _changed.notify_all()

    @contextmanager
    def one(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold a slot for a while; see `take`."""
        self.take(waiting)
        try:
            yield
        finally:
            self.give_back()

    def retire(self) -> None:
        """Let the process's bound be that of the other stores: this one is closed."""
        with _changed:
            _shares.discard(self)
            _changed.notify_all()

    def _free(self) -> bool:
        return self._taken < self.most and (_total < self.most or _total < _largest(self.most))

    def _is_next(self, ticket: object) -> bool:
        """Say whether a slot is free, and nobody who came earlier could take it."""
        if not self._free():
            return False
        for other, share in _queue.items():
            if other is ticket:
                break
            if share._taken < share.most:
                return False
        return True

    def _forget(self) -> None:
        self._taken = 0


def taken() -> int:
    """Return how many slots of the process are taken."""
    return _total


def bound(least: int) -> int:
    """Return the process's bound; ``least`` where no store is open."""
    with _changed:
        return _largest(least)


def _largest(least: int) -> int:
    return max((share.most for share in _shares), default=least)


def _renew() -> None:
    global _changed, _total  # noqa: PLW0603  a thread that the child does not have may hold the parent's
    _changed = threading.Condition()
    _total = 0
    _queue.clear()
    for share in list(_shares):
        share._forget()


os.register_at_fork(after_in_child=_renew)
