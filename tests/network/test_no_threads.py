"""A limit on processes that leaves few threads or none: slower, or one clear error, and no hanging."""

import threading
from pathlib import Path

import pytest
from tests.support.checkpoints import model_tensors, write_sharded

import loadstone
from loadstone.errors import TransferError
from loadstone.fileserver import FileServer


def allow(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let so many fetching threads start, and no other of the loader's, as the kernel would."""
    start, begun = threading.Thread.start, 0

    def limited(thread: threading.Thread) -> None:
        nonlocal begun
        fetching = thread.name.startswith("loadstone-fetch")
        begun += fetching
        if begun > count or thread.name.startswith(("loadstone-open", "loadstone-list")):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_without_threads_there_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = model_tensors()["lm_head.weight"].repeat(9999, 1)
    with FileServer(write_sharded(tmp_path / "m", {**model_tensors(), "big": big})) as server:
        allow(monkeypatch, 0)
        ckpt = loadstone.open(server.url, cache=None)
        with pytest.raises(TransferError, match="no thread can be started"):
            ckpt["big"]
        with pytest.raises(TransferError, match="no thread can be started"):
            ckpt.prefetch(["big"])
        monkeypatch.undo()
        assert ckpt["big"].equal(big)
        ckpt.close()


def test_one_thread_does_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{number}": model_tensors()["lm_head.weight"].repeat(999, 1) for number in range(8)}
    with FileServer(write_sharded(tmp_path / "m", tensors, shards=4)) as server:
        allow(monkeypatch, 1)
        ckpt = loadstone.open(server.url, cache=None)
        assert ckpt.prefetch().wait(60)
        assert all(ckpt[name].equal(tensors[name]) for name in tensors)
        ckpt.close()
