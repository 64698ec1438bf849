"""Checkpoints in stores: the same tensors, and no byte more than needed."""

import gc
import hashlib
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.support.checkpoints import minilm, model_tensors, write_sharded
from tests.support.folder_server import Traffic
from tests.support.seaweed import BUCKET, Seaweed

import loadstone
from loadstone.errors import ChangedError, IntegrityError, LoadstoneError, NotFoundError
from loadstone.fileserver import FileServer
from loadstone.loader.layout.manifest import FileRecord, Manifest
from loadstone.loader.ranges import BLOCK
from loadstone.settings import Settings

WORDS = "embeddings.word_embeddings.weight"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path / "cache"), retry_seconds=5.0)


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture
def bert(traffic: Traffic) -> Iterator[str]:
    with FileServer(minilm(), hook=traffic) as server:
        yield server.url
        traffic.release_all()


@pytest.fixture
def reference() -> Iterator[Any]:
    with safe_open(minilm() / "model.safetensors", "pt") as file:
        yield file


def test_what_was_closed_is_gone_at_once(bert: str, settings: Settings) -> None:
    gc.collect()
    gc.disable()  # memory of the size of a model must not wait for a collection
    try:
        ckpt = loadstone.open(bert, settings=settings, cache=None)
        ckpt.prefetch().wait()
        assert ckpt.config()
        source = weakref.ref(ckpt.source)
        ckpt.close()
        del ckpt
        for _ in range(100):  # a thread of the fetcher may be on its last step
            if source() is None:
                break
            time.sleep(0.02)
        assert source() is None
    finally:
        gc.enable()


def test_web_folder_equals_safetensors(bert: str, settings: Settings, reference: Any) -> None:
    with loadstone.open(bert, settings=settings) as ckpt:
        assert sorted(ckpt) == reference.keys()
        config = ckpt.config()
        assert config is not None
        assert config["model_type"] == "bert"
        for name, tensor in ckpt.stream():
            assert torch.equal(tensor, reference.get_tensor(name))
        assert ckpt.read_file("vocab.txt") == (minilm() / "vocab.txt").read_bytes()
        with pytest.raises(NotFoundError):
            ckpt.read_file("nope.json")


def test_s3_equals_safetensors(seaweed: Seaweed, settings: Settings, reference: Any) -> None:
    seaweed.upload(minilm(), "checkpoint/bert")
    where = f"s3://{BUCKET}/checkpoint/bert"
    for location in (where, f"{where}/model.safetensors"):
        with loadstone.open(location, storage_options=seaweed.options, settings=settings) as ckpt:
            assert sorted(ckpt) == reference.keys()
            assert torch.equal(ckpt.slice(WORDS)[100:200, ::2], reference.get_tensor(WORDS)[100:200, ::2])
            for name, tensor in ckpt.get(list(ckpt)).items():
                assert torch.equal(tensor, reference.get_tensor(name))


def test_only_what_is_needed_moves(bert: str, settings: Settings, traffic: Traffic) -> None:
    with loadstone.open(bert, settings=settings) as ckpt:
        opened = traffic.sent["model.safetensors"]
        assert opened <= BLOCK
        assert not ckpt.is_ready(WORDS)
        row = 384 * 4
        part = ckpt.slice(WORDS)[10_000:10_100]
        assert part.shape == (100, 384)
        assert traffic.sent["model.safetensors"] - opened <= 100 * row + 2 * BLOCK
        before = traffic.sent["model.safetensors"]
        names = ckpt.match("encoder.layer.3.*")
        ckpt.get(names)
        moved = traffic.sent["model.safetensors"] - before
        layer = sum(ckpt.info(name).nbytes for name in names)
        assert moved <= layer + 2 * BLOCK * len(names)
        ckpt.get(names)
        assert all(map(ckpt.is_ready, names))
        assert traffic.sent["model.safetensors"] - before == moved  # nothing comes twice
        assert ckpt.raw(names[0]).numel() == ckpt.info(names[0]).nbytes
    with loadstone.open(bert, settings=settings) as again:
        assert all(map(again.is_ready, names))
        again.get(names)
    assert traffic.sent["model.safetensors"] - before == moved  # nor for another checkpoint of this node


def test_without_a_cache_folder(bert: str, reference: Any) -> None:
    with loadstone.open(f"{bert}/model.safetensors", cache=None) as ckpt:
        assert torch.equal(ckpt[WORDS], reference.get_tensor(WORDS))


def test_a_cache_of_its_own(bert: str, tmp_path: Path, reference: Any) -> None:
    name = "pooler.dense.weight"
    with loadstone.open(bert, cache=tmp_path / "mine") as ckpt:
        assert torch.equal(ckpt[name], reference.get_tensor(name))
    assert any((tmp_path / "mine" / "blobs").iterdir())


def test_prefetch_reports_and_waits(bert: str, settings: Settings) -> None:
    with loadstone.open(bert, settings=settings) as ckpt:
        handle = ckpt.prefetch("encoder.layer.0.*")
        assert handle.wait(30)
        progress = handle.progress()
        assert progress.ready == progress.total > 0
        assert all(map(ckpt.is_ready, ckpt.match("encoder.layer.0.*")))
        assert not ckpt.is_ready(WORDS)


def test_arrival_does_not_wait_for_a_file_held_back(
    tmp_path: Path, settings: Settings, traffic: Traffic
) -> None:
    tensors = {
        name: tensor.repeat(400, *[1] * (tensor.dim() - 1)) for name, tensor in model_tensors().items()
    }
    folder = write_sharded(tmp_path / "m", tensors, shards=2)
    with FileServer(folder, hook=traffic) as server, loadstone.open(server.url, settings=settings) as ckpt:
        late = "model-00001-of-00002.safetensors"
        traffic.hold(late)
        early = {name for name in ckpt if ckpt.info(name).file != late}
        at_once = {name for name in ckpt if ckpt.is_ready(name)}
        stream = ckpt.stream()
        got = [next(stream) for _ in range(len(early | at_once))]
        assert {name for name, _ in got} == early | at_once
        traffic.release(late)
        got += list(stream)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in got)
        assert len(got) == len(tensors)


def test_an_object_replaced_is_an_error(tmp_path: Path, settings: Settings) -> None:
    tensors = {"a": torch.ones(100_000), "b": torch.ones(100_000)}
    folder = write_sharded(tmp_path / "m", tensors, shards=1)
    with FileServer(folder) as server, loadstone.open(server.url, settings=settings) as ckpt:
        path = folder / "model-00001-of-00001.safetensors"
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(path.read_bytes())
        fresh.replace(path)
        with pytest.raises(ChangedError):
            ckpt.get(["a", "b"])


def test_digests_of_a_published_folder(tmp_path: Path, settings: Settings) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=2)
    files = {
        path.name: FileRecord(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.iterdir()
    }
    (folder / "loadstone.json").write_text(Manifest(files).to_json())
    with FileServer(folder) as server:
        with loadstone.open(server.url, verify=True, settings=settings) as ckpt:
            assert len(ckpt.verify().verified) == 4
        path = folder / "model-00002-of-00002.safetensors"
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(path.read_bytes()[:-1] + b"\x77")
        fresh.replace(path)
        with pytest.raises(IntegrityError, match=r"model-00002-of-00002\.safetensors has sha256"):
            loadstone.open(server.url, verify=True, settings=settings)


def test_missing_things_are_named(tmp_path: Path, settings: Settings) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with FileServer(folder) as server:
        with pytest.raises(LoadstoneError, match=r"model-00002-of-00003\.safetensors"):
            loadstone.open(server.url, settings=settings)
        with pytest.raises(NotFoundError):
            loadstone.open(f"{server.url}/nothing/here", settings=settings)
        with pytest.raises(NotFoundError):
            loadstone.open(f"{server.url}/nothing.safetensors", settings=settings)
