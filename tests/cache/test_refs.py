"""References where the disk refuses what is asked of it, or their writer dies: nothing stays, or is wrong."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.leases import shared_leases
from loadstone.loader.node.refs import References
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

VERSION = Version('"one"', 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "refs").mkdir()
    (tmp_path / "meta.json").write_text('{"tag": "\\"one\\"", "size": 3}')
    return tmp_path


@pytest.mark.parametrize("code", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EXDEV, errno.ENOSPC])
def test_without_second_names_a_file_will_do(
    code: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    references = References(folder, shared_leases(folder / "leases"))
    references.write("x", VERSION, str(folder / "meta.json"))
    assert references.read("x") == VERSION
    (path,) = (folder / "refs").iterdir()
    assert path.stat().st_nlink == (folder / "meta.json").stat().st_nlink == 1


def test_what_cannot_be_written_leaves_no_draft(folder: Path) -> None:
    references = References(folder, shared_leases(folder / "leases"))
    references.write("x", VERSION, str(folder / "missing"))
    (path,) = (folder / "refs").iterdir()
    path.unlink()
    path.mkdir()  # what no file can take the place of
    references.write("x", VERSION, str(folder / "meta.json"))
    assert references.read("x") is None
    assert list((folder / "refs").iterdir()) == [path]


WRITER = """
import os, sys, time
from loadstone.loader.node import cache
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

opened = cache.NodeCache(Settings(cache_dir=sys.argv[1]))

def wait(*_):
    print("drafted", flush=True)
    sys.stdin.read()

os.replace = wait
opened.set_ref("x", Version('"one"', 3))
"""


def drafts(folder: Path) -> list[str]:
    return [path.name for path in (folder / "refs").glob("tmp-*")]


def test_the_draft_of_a_dead_process_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    arguments = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as writer:
        assert writer.stdout is not None
        try:
            assert writer.stdout.readline() == "drafted\n"
            found = drafts(folder)
            assert len(found) == 1
            NodeCache(Settings(cache_dir=str(folder)))
            assert drafts(folder) == found
        finally:
            writer.kill()
    NodeCache(Settings(cache_dir=str(folder)))
    assert drafts(folder) == []


def test_the_own_process_does_not_sweep_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, replace = Settings(cache_dir=str(tmp_path / "cache")), os.replace
    cache = NodeCache(settings)

    def swept_first(source: str, target: str) -> None:
        NodeCache(settings)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", swept_first)
        cache.set_ref("x", VERSION)
    assert cache.ref("x") == VERSION
    (tmp_path / "cache/refs/tmp-0123456789abcdef").touch()  # as drafts were called
    NodeCache(settings)
    assert drafts(tmp_path / "cache") == []
