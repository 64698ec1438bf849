"""Adapters in a store go through the same loader and node cache as checkpoints."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.folder_server import Traffic
from tests.support.peft_adapters import pair, write_adapter, write_checkpoint

from loadstone.adapters.check import check_adapter
from loadstone.adapters.reader import read_adapter
from loadstone.errors import NotFoundError
from loadstone.fileserver import FileServer
from loadstone.settings import Settings

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture
def url(tmp_path: Path, traffic: Traffic) -> Iterator[str]:
    write_checkpoint(tmp_path / "store" / "tiny", {f"{Q}.weight": torch.ones(8, 8)})
    write_adapter(tmp_path / "store" / "lora", pair(Q))
    server = FileServer(tmp_path / "store", hook=traffic)
    yield server.url.rstrip("/")
    server.close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=str(tmp_path / "cache"), retry_seconds=2.0)


def test_a_stored_adapter_is_the_local_one(
    url: str, tmp_path: Path, settings: Settings, traffic: Traffic
) -> None:
    with read_adapter(tmp_path / "store" / "lora", base=tmp_path / "store" / "tiny") as local:
        assert traffic.total == 0
        with read_adapter(f"{url}/lora", base=f"{url}/tiny", settings=settings) as stored:
            assert torch.equal(stored.delta(Q), local.delta(Q))
            assert stored.digest == local.digest
    moved = traffic.total
    with read_adapter(f"{url}/lora", base=f"{url}/tiny", settings=settings) as again:
        assert again.digest == local.digest
    assert traffic.total == moved


def test_both_files_come_side_by_side(url: str, settings: Settings, traffic: Traffic) -> None:
    traffic.hold("lora/adapter_config.json")
    reading = threading.Thread(target=lambda: check_adapter(f"{url}/lora", None, settings=settings))
    reading.start()
    for _ in range(500):
        if traffic.sent["lora/adapter_model.safetensors"]:
            break
        reading.join(0.02)
    early = traffic.sent["lora/adapter_model.safetensors"]
    traffic.release("lora/adapter_config.json")
    reading.join(20)
    assert not reading.is_alive()
    assert early > 0


def test_a_pickle_in_a_store_that_cannot_list_is_named(url: str, tmp_path: Path, settings: Settings) -> None:
    weights = tmp_path / "store" / "lora" / "adapter_model.safetensors"
    weights.rename(weights.with_name("adapter_model.bin"))
    with pytest.raises(NotFoundError, match="pickle"):
        read_adapter(f"{url}/lora", base=None, settings=settings)


def test_nothing_at_all(url: str, settings: Settings) -> None:
    with pytest.raises(NotFoundError, match=r"adapter_config\.json"):
        read_adapter(f"{url}/nothing", base=None, settings=settings)
