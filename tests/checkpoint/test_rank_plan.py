"""A rank's plan: parts of tensors, brought ahead of use, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadstone
from loadstone.errors import SliceError, TensorNotFoundError
from loadstone.fileserver import FileServer, Hook
from loadstone.settings import Settings

BLOCK = 64 * 1024


class Sent(Hook):
    """Counts bytes that left the server."""

    nbytes = 0

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        self.nbytes += nbytes


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    made = {name: torch.rand(1024, 1024) for name in ("rows", "columns", "whole", "unused")}
    (tmp_path / "served").mkdir()
    save_file(made, tmp_path / "served" / "model.safetensors")
    return made


def test_only_the_parts_of_a_plan_are_brought(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    plan: dict[str, Any] = {"rows": slice(512, 768), "whole": ..., "columns": (slice(0, 128), slice(0, 512))}
    settings = Settings(cache_dir=str(tmp_path / "cache"))
    with (
        FileServer(tmp_path / "served", hook=(sent := Sent())) as server,
        loadstone.open(server.url, settings=settings) as checkpoint,
    ):
        before = sent.nbytes
        handle = checkpoint.prefetch(plan)
        assert handle.wait(30)
        needed = 256 * 4096 + 1024 * 4096 + 128 * 4096
        assert handle.progress().total <= needed
        assert needed - 4096 * 128 <= sent.nbytes - before <= needed + 6 * BLOCK
        before = sent.nbytes
        for name, index in plan.items():
            assert torch.equal(checkpoint.slice(name)[index], tensors[name][index])
        assert sent.nbytes == before


def test_a_plan_that_does_not_fit_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert tensors
    with loadstone.open(tmp_path / "served") as checkpoint:
        with pytest.raises(SliceError, match="rows"):
            checkpoint.prefetch({"rows": 1024})
        with pytest.raises(TensorNotFoundError, match="row"):
            checkpoint.prefetch({"row": 1})
        assert checkpoint.prefetch({"rows": 1, "whole": slice(5)}).wait(30)
        assert checkpoint.prefetch({}).wait(30)
