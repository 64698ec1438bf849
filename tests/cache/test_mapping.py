"""Maps hold no descriptor, live as long as their views, and are private."""

import gc
import os
import resource
from pathlib import Path

import pytest

from loadstone.errors import CacheError
from loadstone.loader.files.mapping import map_private


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _mapped(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def _open_map(path: Path, size: int) -> memoryview:
    fd = os.open(path, os.O_RDONLY)
    try:
        return map_private(fd, size)
    finally:
        os.close(fd)


def test_the_map_is_private_and_sees_later_writes_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(200_000))
    view = _open_map(path, 200_000)
    assert view[:4] == bytes(4)
    with path.open("r+b") as file:
        file.write(b"late")
    assert bytes(view[:4]) == b"late"
    view[100_000:100_003] = b"own"
    assert path.read_bytes()[100_000:100_003] == bytes(3)
    assert bytes(view[100_000:100_003]) == b"own"


def test_the_map_lives_exactly_as_long_as_its_views(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x" * 10_000)
    part = _open_map(path, 10_000)[5:9]
    gc.collect()
    assert _mapped(path) == 1
    assert bytes(part) == b"xxxx"
    with pytest.raises(BufferError):
        part.obj.close()  # type: ignore[attr-defined]  # the owner is a mmap object
    del part
    gc.collect()
    assert _mapped(path) == 0


def test_two_hundred_maps_need_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"abc")
    before = _descriptors()
    views = [_open_map(path, 3) for _ in range(200)]
    assert _descriptors() == before
    assert all(bytes(view) == b"abc" for view in views)


def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    size = 1 << 42
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.truncate(size)
    view = _open_map(path, size)
    assert len(view) == size
    assert view[size - 1] == 0


def test_an_empty_file_gives_an_empty_view(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"")
    assert len(_open_map(path, 0)) == 0


def test_torch_tensors_keep_the_map(tmp_path: Path) -> None:
    import torch

    path = tmp_path / "data"
    path.write_bytes(bytes(range(256)) * 16)
    view = _open_map(path, 4096)
    tensor = torch.frombuffer(view, dtype=torch.uint8, offset=1, count=3)
    del view
    gc.collect()
    assert tensor.tolist() == [1, 2, 3]
    tensor += 1
    assert path.read_bytes()[1:4] == bytes([1, 2, 3])


def test_a_refused_map_says_so(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, hard))
    try:
        with pytest.raises(CacheError, match="cannot map a file of"):
            _open_map(path, 1 << 42)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(CacheError, match="cannot map"):
            map_private(fd, 1)
    finally:
        os.close(fd)
