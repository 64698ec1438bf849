"""A cache folder that goes away while processes use it: bytes go to memory, and nobody meets an error."""

import os
import shutil
from pathlib import Path

import pytest
from tests.support.faulty_server import FaultyServer

from loadstone.errors import FormatError
from loadstone.fileserver import FileServer
from loadstone.loader.locations import parse_location
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.leases import Leases
from loadstone.loader.node.locks import open_own
from loadstone.loader.node.remote import RemoteSource, open_remote
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

DATA = bytes(range(256)) * 2048


def opened(source: RemoteSource, name: str) -> Blob:
    blob = source.open([name])[name]
    assert not isinstance(blob, Exception), blob
    return blob


def test_objects_still_open_after_the_folder_is_gone(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    for name in ("a", "b"):
        (tmp_path / "files" / name).write_bytes(DATA)
    settings = Settings(cache_dir=str(tmp_path / "cache"))
    with FileServer(tmp_path / "files") as server:
        cache = NodeCache(settings)
        source = open_remote(parse_location(server.url), None, settings, cache)
        opened(source, "a")
        shutil.rmtree(tmp_path / "cache")
        for name in ("a", "b"):
            assert opened(source, name).read(ByteRange(0, len(DATA))) == DATA
        assert cache.entries() == []
        assert not cache.make_room(1)
        source.close()


def test_a_child_whose_folder_is_gone_waits_without_it(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    leases = Leases(lambda: open_own(path, os.O_RDWR | os.O_CREAT))
    key = "ab" * 32
    assert leases.take(key, 1)
    pid = os.fork()
    if pid == 0:
        try:
            shutil.rmtree(tmp_path)
            leases.begin_demand()
            assert not leases.foreign_demand()
            leases.end_demand()
            leases.drop(key)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_lease_that_cannot_be_had_leaves_memory(tmp_path: Path) -> None:
    cache = NodeCache(Settings(cache_dir=str(tmp_path / "cache")))
    pid = os.fork()
    if pid == 0:
        try:
            shutil.rmtree(tmp_path / "cache")
            blob = cache.blob("x", "x", Version('"1"', 1000))
            os._exit(0 if blob.place is None else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("size", [(1 << 44) + 1, 9 * 10**18])
def test_a_size_beyond_belief_is_refused_before_memory_is_taken(tmp_path: Path, size: int) -> None:
    with FaultyServer({"/a": DATA}) as server:
        headers = {"ETag": '"1"', "Content-Range": f"bytes 0-65535/{size}"}
        server.intercept = lambda _: (206, headers, DATA[:65536])
        settings = Settings(cache_dir=str(tmp_path))
        source = open_remote(parse_location(server.url), None, settings, NodeCache(settings))
        assert isinstance(found := source.open(["a"])["a"], FormatError), found
        assert str(size) in str(found)
        source.close()
