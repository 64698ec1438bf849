"""Prefetching local files brings exactly what was asked for into memory, within a budget."""

import errno
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.support.pages import cold_file, drop, resident

import loadstone
from loadstone.errors import AccessError, ChangedError
from loadstone.loader.files import blocks, memory, readahead, residency
from loadstone.loader.files.blocks import BLOCK, BlockReader
from loadstone.loader.files.local import LocalBlob, LocalSource
from loadstone.loader.files.residency import Residency, Window
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Span

MIB = 1024 * 1024
WINDOW = 2 * MIB


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in smaller pieces than usual, so that small files have many of them."""
    monkeypatch.setattr(residency, "WINDOW", WINDOW)
    monkeypatch.setattr(residency, "THREADS", 4)
    monkeypatch.setattr(residency, "_SCRATCH", MIB)


def test_brings_what_was_asked_for_and_little_else(tmp_path: Path) -> None:
    path = cold_file(tmp_path, 24 * MIB)
    source = LocalSource(str(tmp_path))
    blob = source.open(["data"])["data"]
    assert isinstance(blob, LocalBlob)
    handle = source.prefetch([Span(blob, ByteRange(3 * MIB, 13 * MIB))])
    assert handle.wait(60)
    assert handle.done()
    assert handle.progress().ready == handle.progress().total == 10 * MIB
    assert handle.progress().moved == 0
    assert 10 * MIB <= resident(path) <= 11 * MIB
    source.close()


def test_whole_blocks_are_read_and_nothing_beside_them(tmp_path: Path) -> None:
    if not blocks.are_known():
        pytest.skip("this kernel reads no blocks: older than Linux 5.18, or with huge pages of another size")
    path = cold_file(tmp_path, 5 * BLOCK + MIB)
    span = ByteRange(BLOCK + 5000, 4 * BLOCK + 7)
    reader = BlockReader(str(path), [span])
    ends = [ByteRange(BLOCK + 5000, 2 * BLOCK), ByteRange(4 * BLOCK, 4 * BLOCK + 7)]
    assert reader.read(span) == ends
    assert resident(path) == 2 * BLOCK
    within = ByteRange(BLOCK + 5000, 2 * BLOCK)
    assert reader.read(within) == [within]
    assert resident(path) == 2 * BLOCK


def test_a_block_that_spans_share_is_read_for_either(tmp_path: Path) -> None:
    if not blocks.are_known():
        pytest.skip("this kernel reads no blocks: older than Linux 5.18, or with huge pages of another size")
    path = cold_file(tmp_path, 4 * BLOCK)
    middle = BLOCK + BLOCK // 3
    spans = [ByteRange(middle, 3 * BLOCK), ByteRange(0, middle)]
    reader = BlockReader(str(path), spans)
    assert reader.read(ByteRange(middle, middle + 10)) == []
    assert resident(path) == BLOCK
    assert reader.read(spans[1]) == []
    assert resident(path) == 2 * BLOCK
    assert reader.read(spans[0]) == []
    assert resident(path) == 3 * BLOCK


def test_a_file_without_a_reader_of_blocks_is_left_to_others(tmp_path: Path) -> None:
    span = ByteRange(0, BLOCK)
    assert BlockReader(str(tmp_path / "none"), [span]).read(span) == [span]
    (tmp_path / "empty").touch()
    assert BlockReader(str(tmp_path / "empty"), [span]).read(span) == [span]


@pytest.mark.parametrize("known", [True, False])
def test_everything_is_there_with_and_without_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    path = cold_file(tmp_path, 8 * BLOCK + 4097)
    if not known:
        monkeypatch.setattr(blocks, "are_known", lambda: False)
    blob = LocalBlob(str(path))
    assert Residency([Window(blob, ByteRange(4097, 8 * BLOCK + 4097))]).wait(60)
    assert 8 * BLOCK <= resident(path) <= 8 * BLOCK + 8192
    assert bytes(blob.buffer()) == path.read_bytes()


def test_what_is_there_in_parts_is_completed(tmp_path: Path) -> None:
    path = cold_file(tmp_path, 4 * BLOCK)
    blob = LocalBlob(str(path))
    for at in range(BLOCK // 2, 4 * BLOCK, BLOCK):
        assert blob.read(ByteRange(at, at + 4096))
    assert resident(path) < BLOCK
    assert Residency([Window(blob, ByteRange(0, 4 * BLOCK))]).wait(60)
    assert resident(path) == 4 * BLOCK


def test_without_threads_it_is_all_there_when_prefetch_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cold_file(tmp_path, 12 * MIB)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    handle = Residency([Window(LocalBlob(str(path)), ByteRange(0, 12 * MIB))])
    assert handle.done()
    assert resident(path) >= 12 * MIB
    handle.cancel()
    assert handle.wait(1)


def test_one_tensor_from_a_cold_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"layers.{number}.w": torch.full((MIB,), number, dtype=torch.uint8) for number in range(8)}
    save_file(tensors, path)
    drop(path)
    if resident(path) > MIB // 2:
        pytest.skip("this file system keeps its pages: tmpfs cannot be cold")
    with loadstone.open(path) as ckpt:
        assert ckpt["layers.5.w"].sum().item() > 0
    assert MIB <= resident(path) <= MIB * 1.1 + 128 * 1024  # with the header


def test_sequential_reads_bring_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cold_file(tmp_path, 24 * MIB)
    monkeypatch.setattr(residency, "on_network", lambda name: True)
    blob = LocalBlob(str(path))
    handle = Residency([Window(blob, ByteRange(0, 24 * MIB))])
    assert handle.wait(60)
    assert resident(path) >= 24 * MIB
    assert handle.progress().ready == 24 * MIB


def test_a_slow_first_window_turns_to_sequential_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(6 * WINDOW))
    blob = LocalBlob(str(path))
    reads: list[int] = []
    read_into = blob.read_into

    def recorded(at: int, into: memoryview) -> None:
        reads.append(at)
        read_into(at, into)

    monkeypatch.setattr(residency, "THREADS", 1)
    monkeypatch.setattr(residency, "SLOW", 1 << 62)  # every disk is slower than that
    monkeypatch.setattr(blob, "read_into", recorded)
    assert Residency([Window(blob, ByteRange(0, 6 * WINDOW))]).wait(60)
    assert min(reads) == WINDOW  # the first window was populated, all others read
    assert sum(1 for at in reads if at % WINDOW == 0) == 5


def test_stops_at_the_memory_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cold_file(tmp_path, 8 * WINDOW)
    monkeypatch.setattr(memory, "available", lambda: 3 * WINDOW)
    handle = Residency([Window(LocalBlob(str(path)), ByteRange(0, 8 * WINDOW))])
    assert handle.wait(60)
    assert handle.progress().ready == 8 * WINDOW  # the rest can be used, and is read when it is
    assert resident(path) <= 3 * WINDOW


class SlowFile:
    """A file whose every check takes until it is told to go on."""

    def __init__(self, blob: LocalBlob) -> None:
        self.blob = blob
        self.checks = 0
        self.go = threading.Event()

    name = property(lambda self: self.blob.name)

    def buffer(self) -> memoryview:
        return self.blob.buffer()

    def check(self) -> None:
        self.checks += 1
        self.go.wait(30)

    def read_into(self, offset: int, into: memoryview) -> None:
        self.blob.read_into(offset, into)


def test_cancel_ends_it_between_windows(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(16 * WINDOW))
    file = SlowFile(LocalBlob(str(path)))
    handle = Residency([Window(file, ByteRange(0, 16 * WINDOW))])
    assert handle.wait(0.05) is False
    assert not handle.done()
    threading.Timer(0.1, file.go.set).start()
    handle.cancel()
    assert handle.done()
    assert file.checks <= residency.THREADS
    assert handle.progress().ready < 16 * WINDOW
    assert handle.wait(1)


def test_a_file_cut_under_a_prefetch_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * WINDOW))
    file = SlowFile(LocalBlob(str(path)))
    handle = Residency([Window(file, ByteRange(0, 8 * WINDOW))])
    os.truncate(path, MIB)
    file.check = file.blob.check  # type: ignore[method-assign]
    file.go.set()
    with pytest.raises(ChangedError, match="changed from"):
        handle.wait(30)
    assert handle.done()


def refuse_to_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be as a kernel before 5.14, or as one that cannot read the disk."""
    advise = readahead.advise

    def refused(buffer: memoryview, span: ByteRange, advice: int) -> bool:
        return advice != readahead.POPULATE_READ and advise(buffer, span, advice)

    monkeypatch.setattr(residency, "advise", refused)
    monkeypatch.setattr(blocks, "advise", refused)


def test_what_cannot_be_populated_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cold_file(tmp_path, 8 * MIB + 5)
    refuse_to_populate(monkeypatch)
    blob = LocalBlob(str(path))
    assert Residency([Window(blob, ByteRange(0, blob.size))]).wait(60)
    assert resident(path) >= blob.size
    assert bytes(blob.buffer()) == path.read_bytes()


@pytest.mark.parametrize("populates", [True, False])
def test_a_deleted_file_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, populates: bool
) -> None:
    path = cold_file(tmp_path, 8 * MIB)
    if not populates:
        refuse_to_populate(monkeypatch)
    other = tmp_path / "other"
    other.hardlink_to(path)
    blob = LocalBlob(str(path))
    path.unlink()
    assert Residency([Window(blob, ByteRange(0, 8 * MIB))]).wait(60)
    if populates:
        assert resident(other) == 8 * MIB
    assert bytes(blob.buffer()) == other.read_bytes()


def test_an_error_of_the_disk_reaches_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(8 * WINDOW))
    blob = LocalBlob(str(path))
    refuse_to_populate(monkeypatch)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    handle = Residency([Window(blob, ByteRange(0, 8 * WINDOW))])
    with pytest.raises(AccessError, match="data cannot be read: Input/output error; check the disk"):
        handle.wait(30)
    assert handle.done()
    assert handle.progress().ready < 8 * WINDOW
    with pytest.raises(AccessError, match="Input/output error"):
        blob.read(ByteRange(0, 10))


@pytest.mark.root
@pytest.mark.parametrize("sequential", [False, True])
def test_a_disk_with_bad_sectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequential: bool) -> None:
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    image.touch()
    os.truncate(image, 96 * MIB)
    made = (
        shutil.which("mkfs.ext4") and subprocess.run(["mkfs.ext4", "-q", image], check=False).returncode == 0
    )
    mount = ["mount", "-o", "loop", str(image), str(disk)]
    if os.geteuid() != 0 or not made or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root, mkfs.ext4 and loop devices")
    try:
        path = cold_file(disk, 48 * MIB)
        os.truncate(image, 40 * MIB)  # what lay behind cannot be read any more
        monkeypatch.setattr(residency, "on_network", lambda name: sequential)
        blob = LocalBlob(str(path))
        handle = Residency([Window(blob, ByteRange(0, 48 * MIB))])
        with pytest.raises(AccessError, match="data cannot be read: Input/output error"):
            handle.wait(60)
        assert handle.done()
        del blob, handle
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_an_unexpected_failure_of_a_thread_reaches_whoever_waits(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * WINDOW))
    file = SlowFile(LocalBlob(str(path)))
    file.buffer = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    file.go.set()
    handle = Residency([Window(file, ByteRange(0, 4 * WINDOW))])
    with pytest.raises(AccessError, match="failed unexpectedly: ZeroDivisionError"):
        handle.wait(30)
    assert handle.done()


def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(2 * BLOCK))
    blob = LocalBlob(str(path))
    path.unlink()
    os.mkfifo(path)
    span = ByteRange(0, 2 * BLOCK)
    assert not readahead.is_cached(str(path), 2 * BLOCK)
    readahead.begin_reading(str(path), blob.buffer(), [span])
    assert BlockReader(str(path), [span]).read(span) == [span]


def test_what_is_written_to_a_tensor_stays_while_pages_are_mapped(tmp_path: Path) -> None:
    path = cold_file(tmp_path, 32 * MIB)
    blob = LocalBlob(str(path))
    buffer = blob.buffer()
    handle = Residency([Window(blob, ByteRange(0, 32 * MIB))])
    places = range(1234, 32 * MIB, 300_000)
    for at in places:
        buffer[at] = 252
    assert handle.wait(60)
    expected = bytearray(path.read_bytes())
    assert 252 not in expected
    for at in places:
        expected[at] = 252
    assert bytes(buffer) == expected
    assert Residency([Window(blob, ByteRange(0, 32 * MIB))]).wait(60)
    assert bytes(buffer) == expected


def test_many_prefetches_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"w{number}": torch.zeros(MIB, dtype=torch.uint8) for number in range(8)}, path)
    with loadstone.open(path) as ckpt:
        handles = [ckpt.prefetch(f"w{number % 8}") for number in range(32)]
        assert all(handle.wait(30) for handle in handles)
        assert [handle.progress().total for handle in handles] == [MIB] * 32
        empty = ckpt.prefetch([])
        assert empty.wait(1)
        assert empty.progress().total == 0
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("loadstone-resident")]
    assert left == []


def test_closing_stops_prefetches(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(4 * WINDOW))
    source = LocalSource(str(tmp_path))
    blob = source.open(["data"])["data"]
    assert isinstance(blob, LocalBlob)
    handles = [source.prefetch([Span(blob, ByteRange(0, 4 * WINDOW))]) for _ in range(5)]
    began = time.monotonic()
    source.close()
    assert time.monotonic() - began < 10
    assert all(handle.done() for handle in handles)


def test_this_disk_is_not_a_network() -> None:
    assert not readahead.on_network("/proc")
    assert not readahead.on_network("/nonexistent")
