"""Local files where no thread, or only one, can be started: slower, and otherwise the same."""

import hashlib
import threading
from pathlib import Path

import pytest
from tests.support.checkpoints import model_tensors, write_sharded

import loadstone
from loadstone.errors import ChangedError, IntegrityError
from loadstone.loader.layout.manifest import MANIFEST, FileRecord, Manifest
from loadstone.loader.node.sealing import Sealer
from loadstone.loader.together import side_by_side


@pytest.fixture(params=[0, 1])
def few_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let so many threads start in the whole test, as the kernel would at a limit on processes."""
    left: int = request.param
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        nonlocal left
        if left == 0:
            raise RuntimeError("can't start new thread")
        left -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def publish(folder: Path) -> Path:
    """Write a checkpoint of twelve shards with a manifest."""
    tensors = {f"t{number}": tensor for number, tensor in enumerate([*model_tensors().values()] * 2)}
    write_sharded(folder, tensors, shards=12)
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    records = {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    (folder / MANIFEST).write_text(Manifest(records).to_json())
    return folder


@pytest.mark.usefixtures("few_threads")
def test_opening_checking_and_prefetching_local_files(tmp_path: Path) -> None:
    folder = publish(tmp_path / "m")
    with loadstone.open(folder, verify=True) as ckpt:
        handle = ckpt.prefetch()
        assert handle.wait(30)
        assert handle.done()
        assert handle.progress().ready == handle.progress().total == ckpt.nbytes
        assert len(list(ckpt.stream())) == len(ckpt)
        handle.cancel()


@pytest.mark.usefixtures("few_threads")
def test_errors_are_the_same(tmp_path: Path) -> None:
    folder = publish(tmp_path / "m")
    file = folder / "model-00003-of-00012.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=file.name):
        loadstone.open(folder, verify=True)
    with loadstone.open(folder) as ckpt:
        file.write_bytes(data[:-4])
        with pytest.raises(ChangedError, match=file.name):
            ckpt.prefetch().wait(30)
    assert ckpt.files


@pytest.mark.usefixtures("few_threads")
def test_sealing_ends(tmp_path: Path) -> None:
    sealer = Sealer()
    for _ in range(3):
        sealer.add(tmp_path / "gone")
        assert sealer.settle(10)


@pytest.mark.usefixtures("few_threads")
def test_side_by_side_keeps_order_and_tells_the_first_error() -> None:
    assert side_by_side(str, range(9), 4, "test") == list("012345678")
    assert side_by_side(str, [], 4, "test") == []
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda number: 1 // (number - 5), range(9), 4, "test")


def test_side_by_side_works_side_by_side() -> None:
    meeting = threading.Barrier(4, timeout=30)  # passed by four at a time only
    assert len(side_by_side(lambda _: meeting.wait(), range(8), 4, "test")) == 8
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda number: 1 // (number - 5), range(9), 4, "test")
