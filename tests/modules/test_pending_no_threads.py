"""A pending tensor where no thread can be started: one clear error, and it can be used later."""

import threading
from collections.abc import Iterable

import pytest
import torch

from loadstone.errors import TransferError
from loadstone.loader.modules.pending import Arrival, PendingParameter, pending


class Here:
    """Bytes that are there already."""

    def wait(self, names: Iterable[str] | None = None, timeout: float | None = None) -> None:
        """Return at once."""


def test_without_threads_inference_mode_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    arrival = Arrival(Here(), ["t"], lambda: torch.ones(3))
    tensor = pending(PendingParameter, arrival, (3,), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with torch.inference_mode(), pytest.raises(TransferError, match="no thread can be started"):
        tensor + 1
    monkeypatch.undo()
    with torch.inference_mode():
        assert (tensor + 1).tolist() == [2, 2, 2]
