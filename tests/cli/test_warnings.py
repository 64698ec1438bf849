"""What is logged while a command runs looks like everything else that commands warn of."""

import logging
from pathlib import Path

import pytest
from tests.support.tiny_model import write_tiny_checkpoint

from loadstone.cli import main
from loadstone.fileserver import FileServer
from loadstone.loader.node import notices


@pytest.fixture(autouse=True)
def _warnings_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_written", set())


def test_what_is_said_of_the_cache_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = list(logging.getLogger("loadstone").handlers)
    with FileServer(folder) as server:
        for _ in range(2):  # each command leaves the log as it was
            monkeypatch.setattr(notices, "_written", set())
            assert main(["inspect", server.url, "--cache", str(tmp_path / "open")]) == 0
            told = capsys.readouterr().err
            assert told.startswith(f"warning: the node cache {tmp_path}/open is not used: its mode is 777")
            assert told.count("\n") == 1
    assert logging.getLogger("loadstone").handlers == before
