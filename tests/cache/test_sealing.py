"""When sealing happens: after transfers, but before whoever waits for it."""

import threading
import time
from dataclasses import replace
from pathlib import Path

from loadstone.loader.node.cache import NodeCache
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

QUIET = 0.5  # seconds that pass after the last complete blob


def complete(cache: NodeCache, name: str) -> None:
    cache.blob(name, name, Version('"1"', 10), b"0123456789")


def test_it_waits_for_a_quiet_moment(tmp_path: Path) -> None:
    cache = NodeCache(replace(Settings(), cache_dir=str(tmp_path / "cache")))
    begun = time.monotonic()
    for number in range(4):
        complete(cache, f"b{number}")
        time.sleep(QUIET / 4)
    sealed = sum(entry.sealed for entry in cache.entries())
    if time.monotonic() - begun < QUIET * 1.5:  # on a machine that is busy with something else, who knows
        assert sealed == 0
    deadline = time.monotonic() + 20
    while sealed < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
        sealed = sum(entry.sealed for entry in cache.entries())
    assert sealed == 4


def test_it_happens_at_once_for_whoever_waits(tmp_path: Path) -> None:
    cache = NodeCache(replace(Settings(), cache_dir=str(tmp_path / "cache")))
    complete(cache, "x")
    assert cache.settle(20)
    assert [entry.sealed for entry in cache.entries()] == [True]


def test_what_is_sealed_needs_no_thread(tmp_path: Path) -> None:
    cache = NodeCache(replace(Settings(), cache_dir=str(tmp_path / "cache")))
    complete(cache, "x")
    assert cache.settle(20)
    before = threading.active_count()
    for _ in range(10):
        complete(NodeCache(replace(Settings(), cache_dir=str(tmp_path / "cache"))), "x")
    assert threading.active_count() <= before
