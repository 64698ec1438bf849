"""References where the disk refuses what is asked of it: nothing is left over, and nothing is wrong."""

import errno
import os
from pathlib import Path

import pytest

from loadstone.loader.node.refs import References
from loadstone.loader.stores.store import Version

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
    references = References(folder)
    references.write("x", VERSION, str(folder / "meta.json"))
    assert references.read("x") == VERSION
    (path,) = (folder / "refs").iterdir()
    assert path.stat().st_nlink == (folder / "meta.json").stat().st_nlink == 1


def test_what_cannot_be_written_leaves_no_draft(folder: Path) -> None:
    references = References(folder)
    references.write("x", VERSION, str(folder / "missing"))
    (path,) = (folder / "refs").iterdir()
    path.unlink()
    path.mkdir()  # what no file can take the place of
    references.write("x", VERSION, str(folder / "meta.json"))
    assert references.read("x") is None
    assert list((folder / "refs").iterdir()) == [path]
