"""A blob that is made with the bytes that came with its object's version."""

from dataclasses import replace
from pathlib import Path

import pytest

from loadstone.loader.node.cache import NodeCache
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings


@pytest.mark.parametrize(
    ("size", "first", "ready"),
    [
        (10, 10, 10),
        (BLOCK + 10, BLOCK, BLOCK),
        (BLOCK + 10, BLOCK + 10, BLOCK + 10),
        (3 * BLOCK, 2 * BLOCK + 5, 2 * BLOCK),
        (3 * BLOCK, 100, 0),
        (3 * BLOCK, 0, 0),
    ],
)
def test_whole_blocks_of_it_are_there_at_once_and_for_everyone(
    size: int, first: int, ready: int, tmp_path: Path
) -> None:
    settings = replace(Settings(), cache_dir=str(tmp_path / "cache"))
    data = bytes(range(251)) * (size // 251 + 1)
    made = NodeCache(settings).blob("x", "x", Version('"1"', size), data[:first])
    met = NodeCache(settings).blob("x", "x", Version('"1"', size))
    for blob in (made, met):
        assert blob.missing(ByteRange(0, size)) == ([ByteRange(ready, size)] if ready < size else [])
        assert bytes(blob.view[:ready]) == data[:ready]


def test_a_blob_that_is_here_keeps_its_own(tmp_path: Path) -> None:
    cache = NodeCache(replace(Settings(), cache_dir=str(tmp_path / "cache")))
    version = Version('"1"', 2 * BLOCK)
    first = cache.blob("x", "x", version, b"a" * BLOCK)
    again = cache.blob("x", "x", version, b"b" * 2 * BLOCK)
    assert bytes(again.view[:BLOCK]) == bytes(first.view[:BLOCK]) == b"a" * BLOCK
    assert again.missing(ByteRange(0, 2 * BLOCK)) == [ByteRange(BLOCK, 2 * BLOCK)]
