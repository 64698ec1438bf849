"""Locks belong to one description, and die with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadstone.errors import CacheError
from loadstone.loader.node.locks import close_own, conflict, open_own, pauses, try_lock, unlock
from loadstone.loader.ranges import ByteRange


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "locks"
    file.touch()
    return file


def test_descriptions_exclude_each_other_by_range(path: Path) -> None:
    first, second = open_own(path), open_own(path)
    assert try_lock(first, 10, 10)
    assert try_lock(first, 10, 10)
    assert not try_lock(second, 19, 5)
    assert try_lock(second, 20, 5)
    assert conflict(second, 0, 100) == ByteRange(10, 20)
    assert conflict(second, 15, 2) == ByteRange(15, 17)
    assert conflict(first, 0, 20) is None
    unlock(first, 15, 5)
    assert try_lock(second, 15, 5)
    close_own(first)
    assert try_lock(second, 0, 100)
    close_own(second)
    close_own(second)


def test_shared_locks_go_together(path: Path) -> None:
    first, second, third = (open_own(path) for _ in range(3))
    assert try_lock(first, 0, 1, shared=True)
    assert try_lock(second, 0, 1, shared=True)
    assert not try_lock(third, 0, 1)
    close_own(first)
    assert not try_lock(third, 0, 1)
    close_own(second)
    assert try_lock(third, 0, 1)
    close_own(third)


def test_a_forked_child_neither_keeps_nor_drops_a_lock(path: Path) -> None:
    program = """
import os, sys
from loadstone.loader.node.locks import close_own, open_own, try_lock
held = open_own(sys.argv[1])
assert try_lock(held, 0, 10)
child_is_up, parent_let_go = os.pipe(), os.pipe()
if os.fork() == 0:
    try:
        os.fstat(held)
        os._exit(1)
    except OSError:
        close_own(held)
    own = open_own(sys.argv[1])
    assert not try_lock(own, 0, 10)
    os.write(child_is_up[1], b"x")
    os.read(parent_let_go[0], 1)
    assert try_lock(own, 0, 10)
    os._exit(0)
os.read(child_is_up[0], 1)
other = open_own(sys.argv[1])
assert not try_lock(other, 0, 10)
close_own(held)
assert try_lock(other, 0, 10)
close_own(other)
os.write(parent_let_go[1], b"x")
assert os.wait()[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_descriptors_are_not_inherited_by_programs(path: Path) -> None:
    fd = open_own(path)
    assert not os.get_inheritable(fd)
    close_own(fd)


def test_a_file_that_cannot_be_locked_says_so(path: Path) -> None:
    fd = open_own(path, os.O_RDONLY)
    try:
        with pytest.raises(CacheError, match="cannot lock files"):
            try_lock(fd, 0, 1)
    finally:
        close_own(fd)


def test_pauses_grow_from_one_to_twenty_milliseconds() -> None:
    ticks = pauses()
    found = [next(ticks) for _ in range(30)]
    assert found[0] == 0.001
    assert found == sorted(found)
    assert found[-1] == 0.02
