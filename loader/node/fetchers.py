"""One fetcher per process and settings, shared by all its sources, gone with the last of them.

Ownership: ``_lock`` guards the table; it is renewed in forked children, whose sources keep what they share.
"""

import os
import resource
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from loadstone.loader.node.prefetch import Fetcher
from loadstone.settings import Settings

_SPARE = 16  # descriptors left for everything else in the process
_PER_CONNECTION = 3  # a socket, a data file, a map file


@dataclass(slots=True)
class _Shared:
    fetcher: Fetcher
    users: int


_lock = threading.Lock()
_shared: dict[Settings, _Shared] = {}


def acquire(settings: Settings) -> Fetcher:
    """Return the fetcher for ``settings``; to be given back with `release`."""
    own = replace(settings, cache_dir="none", cache_bytes=0)  # several caches share one fetcher
    with _lock:
        entry = _shared.get(own)
        if entry is None:
            entry = _shared[own] = _Shared(Fetcher(own, connection_limit(own)), 0)
        entry.users += 1
        return entry.fetcher


def release(fetcher: Fetcher) -> None:
    """Give a fetcher back; the last one to do so ends it."""
    with _lock:
        entry = _shared.get(fetcher.settings)
        if entry is None or entry.fetcher is not fetcher:
            return
        entry.users -= 1
        if entry.users:
            return
        del _shared[fetcher.settings]
    fetcher.close()


def connection_limit(settings: Settings) -> int:
    """Return how many connections the settings, and the descriptors this process may still open, allow."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = sum(1 for _ in Path("/proc/self/fd").iterdir())
    return max(1, min(settings.max_connections, (most - in_use - _SPARE) // _PER_CONNECTION))


def _renew() -> None:
    global _lock  # noqa: PLW0603  a thread that the child does not have may hold the parent's
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
