"""Few descriptors, and waiting across processes: run in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FEW_DESCRIPTORS = """
import random, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from pathlib import Path
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.node.remote import RemoteSource
from loadstone.loader.source import Span
from loadstone.settings import Settings
from tests.support.fake_store import FakeStore

objects = {f"shard-{n}": random.Random(n).randbytes(2 * BLOCK + n) for n in range(200)}
store = FakeStore(objects)
settings = Settings(cache_dir=sys.argv[1], max_connections=32)
source = RemoteSource(store, settings, NodeCache(settings))
blobs = source.open(list(objects))
views = {name: blob.buffer() for name, blob in blobs.items()}
assert source.prefetch([Span(blob, ByteRange(0, blob.size)) for blob in blobs.values()]).wait(60)
assert all(bytes(views[name]) == objects[name] for name in objects)
assert store.moved == sum(map(len, objects.values()))
assert len(list(Path("/proc/self/fd").iterdir())) < 20
"""


@pytest.mark.parametrize("kept", ["cache", "none"])
def test_two_hundred_shards_under_sixty_four_descriptors(tmp_path: Path, kept: str) -> None:
    folder = "none" if kept == "none" else str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, folder], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


MAKING_WAY = """
import os, random, sys, time
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.node.remote import RemoteSource
from loadstone.loader.source import Span
from loadstone.settings import Settings
from tests.support.fake_store import FakeStore

objects = {name: random.Random(name).randbytes(100 * BLOCK) for name in "ab"}
settings = Settings(cache_dir=sys.argv[1], request_bytes=8 * BLOCK)
other_begun, other_done = os.pipe(), os.pipe()
store = FakeStore(objects)
store.chunk = BLOCK
if os.fork() == 0:
    store.rate = 4 * 1024 * 1024
    source = RemoteSource(store, settings, NodeCache(settings))
    blobs = source.open(["a", "b"])
    os.read(other_begun[0], 1)
    begun = time.monotonic()
    assert blobs["b"].read(ByteRange(0, 30 * BLOCK)) == objects["b"][: 30 * BLOCK]
    os.write(other_done[1], f"{begun} {time.monotonic()}".encode())
    os._exit(0)
store.rate = 8 * 1024 * 1024
source = RemoteSource(store, settings, NodeCache(settings))
blob = source.open(["a"])["a"]
handle = source.prefetch([Span(blob, ByteRange(0, blob.size))])
time.sleep(0.1)
os.write(other_begun[1], b"x")
begun, done = map(float, os.read(other_done[0], 100).split())
assert os.wait()[1] == 0
assert handle.wait(30)
assert bytes(blob.buffer()) == objects["a"]
sent = [count for request in store.requests for at, count in request.sent if begun + 0.1 < at < done]
assert done - begun > 0.3
assert sum(sent) <= 6 * BLOCK * (1 + done - begun), sum(sent) / BLOCK  # else 128 blocks a second
"""


def test_a_prefetch_makes_way_for_a_blocked_thread_of_another_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAKING_WAY, str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
