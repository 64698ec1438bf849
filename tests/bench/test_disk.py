"""Cold and warm are proved, not assumed; raw reads read everything."""

import mmap
import os
from pathlib import Path

import pytest

from loadstone.bench.disk import (
    PIECE,
    make_cold,
    make_warm,
    read_and_keep,
    read_direct,
    read_plainly,
    resident_bytes,
)
from loadstone.bench.process import disk_read_bytes, proportional_bytes, status_bytes
from loadstone.bench.runner import CannotRun
from loadstone.errors import BenchError

SIZES = (PIECE + 12_345, 1, 0)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"file{at}" for at in range(len(SIZES))]
    for path, size in zip(made, SIZES, strict=True):
        path.write_bytes(os.urandom(size))
    return made


def test_cold_is_proved_and_a_read_makes_it_less_cold(files: list[Path]) -> None:
    assert resident_bytes(files) == sum(SIZES)
    assert "0 B of" in make_cold(files)
    assert resident_bytes(files) == 0
    with files[0].open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(10_000)
    assert resident_bytes(files) == 3 * mmap.PAGESIZE


def test_what_stays_in_the_page_cache_is_never_called_cold(files: list[Path]) -> None:
    with files[0].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        held.madvise(mmap.MADV_WILLNEED)
        assert held[:].count(0) > 0  # touches every page: now they are mapped
        with pytest.raises(BenchError, match="nothing cold can be measured"):
            make_cold(files)


def test_warm_is_proved_too(files: list[Path]) -> None:
    make_cold(files)
    assert make_warm(files).startswith("page cache: 16 MiB of 16 MiB")
    assert resident_bytes(files) == sum(SIZES)


def test_raw_reads_read_every_byte(files: list[Path]) -> None:
    make_cold(files)
    before = disk_read_bytes()
    try:
        assert read_direct(files) == sum(SIZES)
    except CannotRun as reason:
        pytest.skip(str(reason))
    assert disk_read_bytes() - before >= sum(SIZES)
    assert resident_bytes(files) == 0
    assert read_and_keep(files) == sum(SIZES)
    assert read_plainly(files) == sum(SIZES)
    assert resident_bytes(files) == sum(SIZES)


def test_a_process_knows_its_own_memory() -> None:
    before = status_bytes("RssAnon")
    with mmap.mmap(-1, 32_000_000, flags=mmap.MAP_PRIVATE) as held:
        held.write(b"\1" * 32_000_000)
        assert status_bytes("RssAnon") - before >= 30_000_000
        assert proportional_bytes() > 32_000_000
