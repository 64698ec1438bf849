"""Opening folders that cannot be listed, and how many questions it takes."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import model_tensors, write_sharded

from loadstone.errors import AccessError, LoadstoneError, NotFoundError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.files.local import LocalSource
from loadstone.loader.opening import INDEX, read_checkpoint
from loadstone.loader.source import Blob


class Unlistable(LocalSource):
    """A folder that may not be listed, and says "access denied" for what it does not have, as S3 does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.asked: list[list[str]] = []

    def names(self) -> tuple[str, ...] | None:
        return None

    def open(self, names: Sequence[str]) -> dict[str, Blob | LoadstoneError]:
        self.asked.append(list(names))
        found = super().open(names)
        denied = AccessError(f"{self.name}: access denied")
        return {name: denied if isinstance(blob, NotFoundError) else blob for name, blob in found.items()}


def open_unlistable(folder: Path) -> tuple[Checkpoint, Unlistable]:
    source = Unlistable(folder)
    return Checkpoint(read_checkpoint(source, str(folder), None, None)), source


def test_shards_without_a_listing(tmp_path: Path) -> None:
    tensors = model_tensors()
    ckpt, source = open_unlistable(write_sharded(tmp_path / "m", tensors, shards=3))
    with ckpt:
        assert all(torch.equal(ckpt[name], tensor) for name, tensor in tensors.items())
        assert len(source.asked) == 2  # the small files, then the shards: two round trips
        assert ckpt.verify().verified == ()
        with pytest.raises(NotFoundError):
            ckpt.read_file("tokenizer.json")


def test_one_file_without_a_listing_or_a_config(tmp_path: Path) -> None:
    tensors = model_tensors()
    folder = write_sharded(tmp_path / "m", tensors, shards=1)
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    (folder / INDEX).unlink()
    (folder / "config.json").unlink()
    ckpt, source = open_unlistable(folder)
    with ckpt:
        assert set(ckpt) == set(tensors)
        assert ckpt.config() is None
        assert "model.safetensors" in source.asked[0]


def test_denied_altogether_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match="access denied"):
        open_unlistable(tmp_path)
