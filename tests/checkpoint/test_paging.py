"""What is used of a cold file comes in blocks when it is touched; nothing else of it comes."""

import time
from pathlib import Path

import pytest
from tests.support.pages import drop, resident

from loadstone.loader.files import blocks, paging
from loadstone.loader.files.blocks import BLOCK
from loadstone.loader.files.local import LocalBlob
from loadstone.loader.files.paging import IN_ORDER, PARTS
from loadstone.loader.ranges import ByteRange

PAGE = 4096
BLOCKS = 2 * PARTS + 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.write_bytes(b"".join(bytes([number]) * BLOCK for number in range(BLOCKS)))
    drop(made)
    if resident(made) > BLOCK:
        pytest.skip("this file system keeps its pages: tmpfs cannot be cold")
    return made


@pytest.fixture
def by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """See to it that blocks are read whole: a look at the file would have brought a page of some."""
    monkeypatch.setattr(paging, "is_cached", lambda path, size: False)
    if not blocks.are_known():
        pytest.skip("this kernel reads no blocks: older than Linux 5.18, or with huge pages of another size")


def maps_of(path: Path) -> int:
    """Return how many maps of the file the kernel counts in this process."""
    return Path("/proc/self/maps").read_text().count(f" {path}\n")


def wait_for(path: Path, nbytes: int) -> int:
    deadline = time.monotonic() + 30
    while resident(path) < nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return resident(path)


@pytest.mark.usefixtures("by_blocks")
def test_a_block_comes_when_it_is_touched_and_by_itself(path: Path) -> None:
    blob = LocalBlob(str(path))
    blob.ensure([ByteRange(4 * BLOCK, 8 * BLOCK)])
    before = resident(path)
    assert before == 0
    assert blob.buffer()[5 * BLOCK + 1234] == 5
    assert resident(path) - before == BLOCK
    assert bytes(blob.buffer()[4 * BLOCK : 8 * BLOCK]) == path.read_bytes()[4 * BLOCK : 8 * BLOCK]


@pytest.mark.usefixtures("by_blocks")
def test_the_ends_of_a_span_are_read_ahead(path: Path) -> None:
    blob = LocalBlob(str(path))
    blob.ensure([ByteRange(4 * BLOCK - 20 * PAGE, 6 * BLOCK + 30 * PAGE)])
    assert 50 * PAGE <= wait_for(path, 50 * PAGE) <= 52 * PAGE


def test_without_blocks_all_of_it_is_read_ahead(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "are_known", lambda: False)
    blob = LocalBlob(str(path))
    blob.ensure([ByteRange(4 * BLOCK, 6 * BLOCK)])
    assert 2 * BLOCK <= wait_for(path, 2 * BLOCK) <= 2 * BLOCK + 2 * PAGE
    assert maps_of(path) == 1


@pytest.mark.usefixtures("by_blocks")
def test_many_scattered_spans_do_not_leave_many_maps(path: Path) -> None:
    blob = LocalBlob(str(path))
    most = 0
    for number in reversed(range(PARTS + 1)):
        blob.ensure([ByteRange(2 * number * BLOCK, (2 * number + 1) * BLOCK)])
        most = max(most, maps_of(path))
    assert PARTS < most <= 2 * PARTS + 1
    assert maps_of(path) == 1
    before = resident(path)
    assert blob.buffer()[7 * BLOCK] == 7
    assert resident(path) - before == BLOCK


@pytest.mark.usefixtures("by_blocks")
def test_a_file_read_in_order_is_read_ahead(path: Path) -> None:
    blob = LocalBlob(str(path))
    for number in range(IN_ORDER + 1):
        span = ByteRange(number * BLOCK + 100, (number + 1) * BLOCK + 100)
        blob.ensure([span])
        assert blob.buffer()[span.start] == number
    assert maps_of(path) == 1
    at = (IN_ORDER + 4) * BLOCK
    before = resident(path)
    assert blob.buffer()[at] == IN_ORDER + 4
    assert wait_for(path, before + 2 * BLOCK) >= before + 2 * BLOCK


def test_what_is_in_memory_is_not_advised_on(path: Path) -> None:
    path.read_bytes()
    blob = LocalBlob(str(path))
    blob.ensure([ByteRange(4 * BLOCK, 8 * BLOCK)])
    assert maps_of(path) == 1


def test_a_file_on_a_network_is_read_by_spans(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "on_network", lambda name: True)
    blob = LocalBlob(str(path))
    blob.ensure([ByteRange(4 * BLOCK, 6 * BLOCK)])
    assert resident(path) >= 2 * BLOCK  # there when it returns
