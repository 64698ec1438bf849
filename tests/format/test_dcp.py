"""Files of torch's distributed checkpoint: pieces of tensors are never taken for tensors."""

import json
from pathlib import Path

import pytest
from tests.support.memory_folder import Folder, weights
from tests.support.safetensors_files import index_json

from loadstone.errors import IndexFileError

INDEX = "model.safetensors.index.json"


def slices(offsets: list[int]) -> bytes:
    info = json.dumps({"w": {"saved_offsets": offsets}})
    return weights("w", metadata={"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": info})


def rank(number: int) -> str:
    return f"shard-{number:05d}-model-00001-of-00001.safetensors"


def test_slices_that_share_a_name_are_refused_by_name() -> None:
    files = {rank(1): slices([0, 0]), rank(2): slices([2, 0])}
    for more in ({}, {INDEX: index_json({"w": rank(1)})}):
        if more:
            files = {rank(1): slices([2, 0]), **more}
        with pytest.raises(IndexFileError) as caught:
            Folder(files).open()
        assert all(word in str(caught.value) for word in ("'w'", "DCP", "slice", rank(1)))
    with pytest.raises(IndexFileError, match="duplicate"):
        Folder({rank(1): slices([0, 0]), rank(2): slices([0, 0])}).open()


@pytest.mark.parametrize("info", ["", "[]", "{", '{"w":1}', '{"w":{"saved_offsets":"x"}}', "[" * 9999])
def test_unreadable_slice_information_still_marks_the_files(info: str) -> None:
    data = weights("w", metadata={"DCP_SHARDING_INFO": info})
    with pytest.raises(IndexFileError, match="DCP"):
        Folder({rank(1): data, rank(2): data}).open()


def test_what_torch_itself_writes_is_recognised(tmp_path: Path) -> None:
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    with pytest.warns(UserWarning, match="single process"):
        save({"w": torch.ones(4, 2)}, storage_writer=writer, no_dist=True)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    infos, warnings = Folder(written).open()
    assert list(infos) == ["w"]
    assert "DCP" in warnings[0]
    (data,) = written.values()
    with pytest.raises(IndexFileError, match=r"duplicate.*'w'.*DCP"):
        Folder({rank(1): data, rank(2): data}).open()
