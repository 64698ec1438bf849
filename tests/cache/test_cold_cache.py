"""A cache whose bytes are on the disk and no longer in memory is read ahead, not page by page."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.cache_worker import blobs_of, open_source, settings_for
from tests.support.pages import drop, resident
from tests.support.served_folder import Served

from loadstone.cli import main
from loadstone.errors import CacheError, ClosedError, TransferError
from loadstone.fileserver import FileServer
from loadstone.loader.files import blocks, paging
from loadstone.loader.files.blocks import BLOCK as LARGE
from loadstone.loader.node.cached import CachedFile
from loadstone.loader.node.handles import PrefetchHandle
from loadstone.loader.node.jobs import Batch
from loadstone.loader.node.remote import RemoteBlob, RemoteSource
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Span

SIZE = 8 * LARGE + 1000
PAGE = 4096


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "served", {"model": SIZE})
    yield made
    made.server.close()


class Node:
    """A cache folder with one blob in it, which is opened afresh, out of memory."""

    def __init__(self, served: Served, cache: Path) -> None:
        self.served = served
        self.cache = cache
        self.sources: list[RemoteSource] = []

    @property
    def data(self) -> Path:
        (found,) = self.cache.glob("blobs/*/data")
        return found

    def open(self) -> tuple[RemoteSource, RemoteBlob]:
        source = open_source(self.served.server.url, settings_for(self.cache))
        self.sources.append(source)
        blob = blobs_of(source, ["model"])["model"]
        assert isinstance(blob, RemoteBlob)
        return source, blob

    def bring(self, *spans: ByteRange) -> None:
        source, blob = self.open()
        assert source.prefetch([Span(blob, span) for span in spans]).wait(30)
        assert source.settle(30)
        source.close()
        self.served.hook.sent.clear()

    def grow_cold(self) -> None:
        drop(self.data)
        if resident(self.data) > PAGE:
            pytest.skip("this file system keeps its pages: tmpfs cannot be cold")


@pytest.fixture
def node(served: Served, tmp_path: Path) -> Iterator[Node]:
    made = Node(served, tmp_path / "cache")
    yield made
    for source in made.sources:
        source.close()


def test_a_prefetch_brings_all_of_it_into_memory(node: Node) -> None:
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    source, blob = node.open()
    assert blob.ready(ByteRange(0, SIZE))
    assert resident(node.data) <= LARGE
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))])
    assert handle.wait(30)
    assert handle.done()
    assert handle.progress().ready == handle.progress().total == SIZE
    assert handle.progress().moved == 0
    assert resident(node.data) >= SIZE
    assert bytes(blob.buffer()) == (node.served.folder / "model").read_bytes()
    assert node.served.hook.sent["model"] == 0


def test_a_prefetch_brings_nothing_beside_what_was_asked_for(node: Node) -> None:
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    source, blob = node.open()
    before = resident(node.data)
    assert source.prefetch([Span(blob, ByteRange(2 * LARGE, 5 * LARGE))]).wait(30)
    # The first block of the opening may come late, and looks at the file bring a page here and there.
    assert 3 * LARGE - 8 * PAGE <= resident(node.data) - before <= 3 * LARGE + BLOCK + 8 * PAGE


def test_the_disk_is_left_alone_where_that_is_asked_for(
    node: Node,
) -> None:
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    source, blob = node.open()
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))], warm=False)
    assert handle.wait(30)
    assert handle.progress().ready == SIZE
    assert resident(node.data) <= LARGE


def test_the_command_fetches_and_reads_nothing_else(tmp_path: Path) -> None:
    folder, cache = tmp_path / "checkpoint", tmp_path / "cache"
    folder.mkdir()
    save_file({"w": torch.ones(4 * LARGE, dtype=torch.uint8)}, folder / "model.safetensors")
    with FileServer(folder) as server:
        argv = ["prefetch", server.url, "--cache", str(cache)]
        assert main(argv) == 0
        (data,) = (path for path in cache.glob("blobs/*/data") if path.stat().st_size > LARGE)
        drop(data)
        if resident(data) > PAGE:
            pytest.skip("this file system keeps its pages: tmpfs cannot be cold")
        assert main(argv) == 0
        assert resident(data) <= LARGE


def test_use_reads_blocks_when_they_are_touched(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "is_cached", lambda path, size: False)  # a look brings a page of a block
    if not blocks.are_known():
        pytest.skip("this kernel reads no blocks: older than Linux 5.18, or with huge pages of another size")
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    _, blob = node.open()
    assert blob.read(ByteRange(0, BLOCK))  # it is on its way since the opening
    blob.ensure([ByteRange(2 * LARGE, 4 * LARGE)])
    before = resident(node.data)
    assert before == BLOCK
    served = (node.served.folder / "model").read_bytes()
    assert blob.buffer()[3 * LARGE] == served[3 * LARGE]
    assert resident(node.data) - before == LARGE


def test_of_what_is_here_in_parts_the_rest_is_fetched(node: Node) -> None:
    node.bring(ByteRange(0, 2 * LARGE), ByteRange(4 * LARGE, 6 * LARGE))
    node.grow_cold()
    source, blob = node.open()
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))])
    assert handle.wait(30)
    assert handle.progress().ready == SIZE
    assert resident(node.data) >= SIZE
    assert bytes(blob.buffer()) == (node.served.folder / "model").read_bytes()
    assert node.served.hook.sent["model"] <= SIZE - 4 * LARGE + 2 * BLOCK


def test_what_is_in_memory_or_new_is_not_read_ahead(node: Node) -> None:
    source, blob = node.open()
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))])
    assert handle.resident is None
    assert handle.wait(30)
    assert source.settle(30)
    source.close()
    source, blob = node.open()
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))])
    assert handle.resident is None
    assert handle.wait(30)


def test_a_closed_blob_ends_it(node: Node) -> None:
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    source, blob = node.open()
    blob.closed = True
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))])
    with pytest.raises(ClosedError, match="model was closed"):
        handle.wait(30)
    assert handle.done()
    assert resident(node.data) <= LARGE


def test_cancelling_ends_it(node: Node) -> None:
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    source, blob = node.open()
    handle = source.prefetch([Span(blob, ByteRange(0, SIZE))])
    handle.cancel()
    assert handle.done()
    assert handle.wait(0)
    assert bytes(blob.buffer()) == (node.served.folder / "model").read_bytes()


def test_a_cache_that_was_removed_is_no_failure(node: Node) -> None:
    node.bring(ByteRange(0, SIZE))
    node.grow_cold()
    source, blob = node.open()
    os.rename(node.data, node.data.with_name("elsewhere"))  # noqa: PTH104  as evictions do, more or less
    assert source.prefetch([Span(blob, ByteRange(0, SIZE))]).wait(30)
    blob.ensure([ByteRange(LARGE, 2 * LARGE)])
    assert bytes(blob.buffer()) == (node.served.folder / "model").read_bytes()


def test_an_error_of_the_disk_is_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.bring(ByteRange(0, SIZE))
    _, blob = node.open()
    file = CachedFile(blob, str(node.data))
    into = memoryview(bytearray(100))
    file.read_into(5000, into)
    assert into == (node.served.folder / "model").read_bytes()[5000:5100]
    CachedFile(blob, f"{node.data}-evicted").read_into(0, into)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CacheError, match="of the node cache cannot be read: Input/output error"):
        file.read_into(0, into)


class Failed:
    """A fetcher whose every transfer has failed."""

    def batch_ended(self, batch: Batch, timeout: float | None) -> bool:
        batch.error = TransferError("the store is away")
        return True

    def cancel(self, batch: Batch) -> None:
        pass


class Reading:
    """Reads of the disk that go on until they are told to end."""

    def __init__(self) -> None:
        self.ended = False

    def wait(self, timeout: float | None = None) -> bool:
        return self.ended

    def done(self) -> bool:
        return self.ended


def test_a_failed_transfer_is_told_when_the_disk_is_read_too() -> None:
    reading = Reading()
    handle = PrefetchHandle(Failed(), Batch(), [])
    handle.resident = reading  # type: ignore[assignment]
    assert handle.wait(0.01) is False
    assert not handle.done()
    reading.ended = True
    with pytest.raises(TransferError, match="the store is away"):
        handle.wait(0.01)
    assert handle.done()
