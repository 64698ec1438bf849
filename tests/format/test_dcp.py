"""Files of torch's distributed checkpoint: pieces of tensors are never taken for tensors."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tests.support.memory_folder import Folder, weights
from tests.support.safetensors_files import index_json

import loadstone
from loadstone.errors import IndexFileError, LoadstoneWarning

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


RANK = """
import os
import sys
import torch
import torch.distributed
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

folder, rank = sys.argv[1], int(sys.argv[2])
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
mesh = DeviceMesh("cpu", [0, 1])
spread = {
    "rows": distribute_tensor(torch.arange(20.0).view(5, 4), mesh, [Shard(0)]),
    "columns": distribute_tensor(torch.arange(12.0).view(2, 6), mesh, [Shard(1)]),
    "one": distribute_tensor(torch.ones(1, 4), mesh, [Shard(0)]),
}
whole = {name: distribute_tensor(torch.full((3,), float(ord(name))), mesh, [Replicate()]) for name in "abcd"}
two_files = {"a": 1, "b": 1, "c": 2, "d": 2}
for name, state, options in (
    ("pieces", {**spread, **whole}, {}),
    ("merged", {**spread, **whole}, {"enable_consolidation": True}),
    ("whole", whole, {"fqn_to_index_mapping": two_files}),
):
    save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/{name}", save_distributed=True, **options))
torch.distributed.barrier()
os._exit(0)  # torch's own threads, ended by the interpreter, now and then take the process with them
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of checkpoints that two processes saved together."""
    folder = tmp_path_factory.mktemp("dcp")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(folder), str(number)], stderr=subprocess.PIPE
        )
        for number in range(2)
    ]
    said = [process.communicate(timeout=120)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    return folder


def test_pieces_that_several_ranks_saved_are_refused(saved: Path) -> None:
    assert len(list((saved / "pieces").glob("shard-*"))) == 2
    with pytest.raises(IndexFileError, match=r"duplicate name: .*slice of tensor '(rows|columns|one)'.*DCP"):
        loadstone.open(saved / "pieces")
    with pytest.raises(IndexFileError, match=r"slice.*open the folder above sharded/"):
        loadstone.open(saved / "merged" / "sharded")
    (saved / "pieces" / rank(1)).rename(saved / rank(1))
    with pytest.raises(IndexFileError, match=r"only a slice of tensor .* the file before it is missing"):
        loadstone.open(saved / "pieces")
    for lone, said in (
        (saved / rank(1), "may be slices of tensors;"),
        (saved / "pieces" / rank(2), "it is one"),
    ):
        with pytest.warns(LoadstoneWarning, match=said), loadstone.open(lone) as ckpt:
            assert "rows" in ckpt


def test_what_ranks_merged_opens_as_any_other(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with loadstone.open(saved / "merged") as ckpt:
            assert ckpt["rows"].flatten().tolist() == list(range(20))
            assert ckpt["columns"].flatten().tolist() == list(range(12))
            assert set(ckpt) == {"rows", "columns", "one", *"abcd"}


def test_ranks_that_had_nothing_for_some_of_their_files(saved: Path) -> None:
    names = sorted(path.name for path in (saved / "whole").glob("*.safetensors"))
    assert 2 <= len(names) <= 4
    with pytest.warns(LoadstoneWarning, match="DCP"), loadstone.open(saved / "whole") as ckpt:
        assert {name: ckpt[name].tolist() for name in ckpt} == {
            name: [float(ord(name))] * 3 for name in "abcd"
        }
    second = "shard-00001-model-00002-of-00002.safetensors"  # the only one of its rank
    infos, said = Folder({second: weights("a", metadata={"DCP_SHARDING_INFO": "{}"})}).open()
    assert list(infos) == ["a"]
    assert "DCP" in said[0]
