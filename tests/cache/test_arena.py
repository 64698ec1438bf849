"""Objects in shared memory: kept once, handed over to a program, safe from what happens to the descriptor."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from loadstone.errors import CacheError
from loadstone.loader.node.arena import Arena, adopt
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

DATA = random.Random(5).randbytes(5 * BLOCK + 17)
WHOLE = ByteRange(0, len(DATA))
ROOT = Path(__file__).parents[2]


def fill(blob: StoredBlob, span: ByteRange = WHOLE, data: bytes = DATA) -> None:
    while (claim := blob.claim(span)) is not None:
        claim.write(claim.range.start, memoryview(data)[claim.range.start : claim.range.stop])
        claim.close()


def test_objects_lie_apart_and_are_found_again() -> None:
    arena = Arena()
    other = bytes(reversed(DATA))
    first, second = arena.blob("a", "a", len(DATA)), arena.blob("b", "b", len(DATA))
    fill(first)
    fill(second, data=other)
    assert (bytes(first.view), bytes(second.view)) == (DATA, other)
    again = arena.blob("a", "a", len(DATA))
    assert again.ready(WHOLE)
    assert bytes(again.view) == DATA
    assert arena.holds("a")
    assert not arena.holds("c")


def test_references_follow_the_last_word() -> None:
    arena = Arena()
    assert arena.ref("x") is None
    for number in range(1500):
        arena.set_ref("x", Version(f'"{number}"', number))
    assert arena.ref("x") == Version('"1499"', 1499)
    fill(blob := arena.blob("a", "a", len(DATA)))
    assert bytes(blob.view) == DATA
    assert arena.ref("x") == Version('"1499"', 1499)


def test_a_record_cut_short_is_written_over() -> None:
    arena = Arena()
    arena.set_ref("x", Version('"1"', 1))
    end = len(os.pread(arena.fd, 4096, 0).rstrip(b"\0"))
    os.pwrite(arena.fd, b"\x90\0\0\0" + b"torn" * 12, end)
    assert arena.ref("x") == Version('"1"', 1)
    arena.set_ref("y", Version('"2"', 2))
    assert arena.ref("y") == Version('"2"', 2)
    assert arena.ref("x") == Version('"1"', 1)


def test_memory_outlives_the_arena_and_then_goes() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    arena = Arena()
    blob = arena.blob("a", "a", len(DATA))
    fill(blob)
    view = blob.view
    blob.close()
    del arena, blob
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert bytes(view) == DATA
    del view
    assert "memfd:loadstone" not in Path("/proc/self/maps").read_text()


def test_a_descriptor_closed_by_others_does_no_harm(tmp_path: Path) -> None:
    arena = Arena()
    blob = arena.blob("a", "a", len(DATA))
    fill(blob, ByteRange(0, BLOCK))
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(1_000_000))
    with victim.open("r+b") as file:
        os.dup2(file.fileno(), arena.fd, inheritable=False)
        fill(blob)
    assert bytes(blob.view) == DATA
    assert blob.place is None
    assert victim.read_bytes() == bytes(1_000_000)


HANDED_OVER = """
import sys
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings
cache = NodeCache(Settings.from_env())
version = cache.ref("a")
assert version is not None, cache.problem
blob = cache.blob("a", "a", version)
assert blob.ready(ByteRange(0, version.size))
sys.stdout.buffer.write(blob.view)
claim = cache.blob("b", "b", Version('"b"', 3)).claim(ByteRange(0, 3))
claim.write(0, memoryview(b"new"))
"""


def test_a_program_that_inherits_it_joins_in() -> None:
    arena = Arena()
    cache = NodeCache(Settings(cache_dir=arena.address))
    version = Version('"1"', len(DATA))
    fill(cache.blob("a", "a", version))
    cache.set_ref("a", version)
    done = subprocess.run(
        [sys.executable, "-c", HANDED_OVER],
        env={**os.environ, "LOADSTONE_CACHE_DIR": arena.address},
        pass_fds=[arena.fd],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == DATA
    back = cache.blob("b", "b", Version('"b"', 3))
    assert back.ready(ByteRange(0, 3))
    assert bytes(back.view) == b"new"


@pytest.mark.parametrize("address", ["memfd:0", "memfd:999", "memfd:x"])
def test_what_was_not_inherited_is_refused(address: str) -> None:
    with pytest.raises(CacheError, match="was not inherited"):
        adopt(address)
    cache = NodeCache(Settings(cache_dir=address))
    assert "was not inherited" in cache.problem
    fill(blob := cache.blob("a", "a", Version('"1"', len(DATA))))
    assert bytes(blob.view) == DATA


def test_openers_take_turns() -> None:
    arena = Arena()
    with arena.opening("x", 1), arena.opening("y", 1), arena.opening("x", 0.01):
        assert arena.ref("x") is None
