"""Room that is reserved ahead of writes: on ext4, and nowhere else."""

import os
from pathlib import Path

from loadstone.loader.node import blobfolder
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.filesystem import filesystem_type, reserve
from loadstone.loader.node.places import FolderPlace
from loadstone.loader.ranges import BLOCK, ByteRange

EXT4 = 0xEF53
SIZE = 32 * BLOCK


def _allocated(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_large_claim_reserves_its_room_on_ext4_only(tmp_path: Path) -> None:
    folder = tmp_path / "blob"
    blobfolder.create(folder, blobfolder.Meta("here", "tag", SIZE, "boot", "machine"))
    blob = StoredBlob("here", SIZE, FolderPlace(folder))
    claim = blob.claim(ByteRange(BLOCK, 20 * BLOCK))
    assert claim is not None
    expected = 19 * BLOCK if filesystem_type(tmp_path) == EXT4 else 0
    assert _allocated(folder / "data") == expected
    claim.close()
    # What is reserved and not written is still missing, and reads as nothing.
    assert blob.missing(ByteRange(0, SIZE)) == [ByteRange(0, SIZE)]
    assert (folder / "data").stat().st_size == SIZE
    blob.close()


def test_a_small_claim_reserves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "blob"
    blobfolder.create(folder, blobfolder.Meta("here", "tag", SIZE, "boot", "machine"))
    blob = StoredBlob("here", SIZE, FolderPlace(folder))
    claim = blob.claim(ByteRange(0, 2 * BLOCK))
    assert claim is not None
    assert _allocated(folder / "data") == 0
    claim.close()
    blob.close()


def test_nothing_is_reserved_in_memory() -> None:
    fd = os.memfd_create("memory")
    os.ftruncate(fd, SIZE)
    reserve(fd, 0, SIZE)
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def test_a_reservation_that_fails_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"here")
    fd = os.open(path, os.O_RDONLY)
    reserve(fd, 0, SIZE)
    os.close(fd)
    assert path.read_bytes() == b"here"
