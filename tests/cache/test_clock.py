"""A wall clock that jumps, and files stamped in the future: nothing but the order of eviction notices."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
from tests.support.faulty_server import Fault, FaultyServer

from loadstone.loader.locations import parse_location
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.remote import RemoteBlob, open_remote
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Span
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

YEAR = 366 * 86_400.0
DATA = random.Random(4).randbytes(60 * BLOCK + 7)


def stamp(folder: Path, when: float) -> None:
    """Give every file and folder in ``folder`` the same times."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (when, when))


def test_uses_in_the_future_were_long_ago(tmp_path: Path) -> None:
    cache = NodeCache(Settings(cache_dir=str(tmp_path / "cache")))
    for name in "abc":
        blob = cache.blob(name, name, Version('"1"', BLOCK))
        blob.deposit(DATA[:BLOCK])
        blob.close()
    assert cache.settle(10)
    folders = {entry.location: tmp_path / "cache" / "blobs" / entry.key for entry in cache.entries()}
    stamp(folders["a"], time.time() - 1000)
    stamp(folders["b"], time.time() + 3 * YEAR)  # used before the clock was set back by years
    stamp(folders["c"], time.time() - 10)
    assert [entry.location for entry in cache.trim(2 * BLOCK + 20_000).removed] == ["b"]
    assert cache.make_room(BLOCK)
    assert [entry.location for entry in cache.entries()] == ["c"]


@pytest.mark.parametrize("seed", range(3))
def test_a_clock_that_jumps_by_years_while_bytes_come(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, jumps = random.Random(seed), random.Random(seed)
    faults = (Fault.BUSY, Fault.SHORT, Fault.RESET, Fault.TOO_MANY, Fault.STALL)
    settings = Settings(
        cache_dir=str(tmp_path / "cache"), request_bytes=4 * BLOCK, stall_timeout=0.4, retry_seconds=20
    )
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jumps.choice((-40, -1, 0, 1, 40)) * YEAR)
    with FaultyServer({"/m": DATA}, retry_after=0) as server:
        server.plan = lambda number: rng.choice(faults) if number and number % 5 == 0 else Fault.NONE
        for number in range(3):
            source = open_remote(parse_location(server.url), None, settings, NodeCache(settings))
            blob = source.open(["m"])["m"]
            assert isinstance(blob, RemoteBlob)
            ahead = source.prefetch([Span(blob, ByteRange(0, 30 * BLOCK * (number + 1) // 2))])
            reader = threading.Thread(target=blob.read, args=(ByteRange(10 * BLOCK, 11 * BLOCK),))
            reader.start()
            assert ahead.wait(30)
            reader.join()
            part = ByteRange(rng.randrange(BLOCK), len(DATA) * (number + 1) // 3)
            assert blob.read(part) == DATA[part.start : part.stop]
            source.close()
            stamp(tmp_path / "cache", real() + rng.choice((-30, 30)) * YEAR)
        assert sum(seen.headers.get("Range") == "bytes=0-65535" for seen in server.seen) >= 3
    assert [entry.stored for entry in NodeCache(settings).entries()] == [len(DATA)]
