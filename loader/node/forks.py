"""What must be renewed in a forked child: locks that dead threads hold, threads, descriptors.

One thing cannot be: Python guards each module that is being imported by a lock of its own. A child forked
while another thread imports a module inherits that lock held, and waits for ever when it imports the same
module. So who forks beside threads that begin to open checkpoints should first have done once all that they
do: opened one from the same kind of store, and read from it.
"""

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something with state of one process."""

    def reset_in_child(self) -> None:
        """Drop what belongs to the parent; runs in the child, before anything else does."""
        ...


_known: "weakref.WeakSet[Renewable]" = weakref.WeakSet()


def renew_in_child(thing: Renewable) -> None:
    """Have ``thing.reset_in_child`` called in every child forked while ``thing`` is alive."""
    _known.add(thing)


def _renew() -> None:
    for thing in list(_known):
        thing.reset_in_child()


os.register_at_fork(after_in_child=_renew)
