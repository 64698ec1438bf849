"""A service from its process's start to its end, in a process of its own, over a store that holds back."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from tests.support.folder_server import Traffic
from tests.support.served_models import reference
from tests.support.service import check_error
from transformers import BertConfig, BertModel, RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from loadstone.errors import BindError, LocationError, NotFoundError, SettingsError
from loadstone.fileserver import FileServer
from loadstone.server.generate import Decoder
from loadstone.server.run import serve
from loadstone.server.startup import served_name
from loadstone.settings import Settings

PROGRAM = """
import sys
from loadstone.server.run import serve
sys.exit(serve(sys.argv[1], port=0, name="tiny", announce=lambda url, engine: print(url, flush=True)))
"""
PROMPT = "The lodestone turns"
LONG = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 240, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Child:
    process: "subprocess.Popen[str]"
    http: httpx.Client

    def ready(self) -> tuple[int, dict[str, Any]]:
        try:
            answer = self.http.get("/ready")
        except httpx.ConnectError:
            pytest.fail(f"the service ended: {self.process.communicate(timeout=20)}")
        return answer.status_code, answer.json()

    def until(self, condition: Callable[[dict[str, Any]], object], seconds: float = 90.0) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while not condition(found := self.ready()[1]):
            assert time.monotonic() < deadline, found
            time.sleep(0.05)
        return found

    def stop(self) -> tuple[int, str, str]:
        """Ask it to stop; return its exit code and what it wrote."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextmanager
def child(location: str) -> Iterator[Child]:
    environment = {**os.environ, "LOADSTONE_CACHE_DIR": "none", "LOADSTONE_ADMIN_TOKEN": "s3cret-token"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, location],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), process.communicate()
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Child(process, http)
    finally:
        process.kill()
        process.communicate()


class HeldAfterOpening(Traffic):
    """Holds back nothing of a file's first 64 KiB."""

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        if offset >= 64 * 1024:
            super().sending(path, offset, nbytes)


@pytest.fixture
def held(base: Path) -> Iterator[tuple[str, Traffic, str]]:
    """Serve the base's folder; the shard with the head is held back after the 64 KiB that opening reads."""
    last = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]["lm_head.weight"]
    traffic = HeldAfterOpening()
    traffic.hold(last)
    with FileServer(base, hook=traffic) as server:
        try:
            yield server.url, traffic, last
        finally:
            traffic.release_all()


def test_a_service_answers_at_once_is_ready_with_the_last_weight_and_ends_after_its_answers(
    held: tuple[str, Traffic, str], base: Path
) -> None:
    url, traffic, last = held
    with child(url) as service:
        assert service.http.get("/health").json() == {"status": "ok"}
        status, found = service.ready()
        assert (status, found["state"], found["model"]) == (503, "starting", "tiny")
        early = service.http.post("/v1/completions", json=LONG)
        check_error(early, 503)
        assert early.headers["retry-after"] == "1"
        check_error(service.http.get("/v1/models"), 503)

        # Everything is built, but a weight is missing: not ready.
        found = service.until(lambda found: found["stage"] == "computing the first token")
        assert 0 < found["bytes"]["ready"] < found["bytes"]["total"]
        assert "last_byte" not in found["events"]
        assert list(found["events"])[:2] == ["serve", "opened"]
        time.sleep(0.3)
        assert service.ready()[0] == 503

        traffic.release(last)
        found = service.until(lambda found: found["state"] == "ready")
        events = found["events"]
        assert set(events) == {
            *("serve", "listening", "opened", "imported", "first_tensor"),
            *("model_built", "first_token", "last_byte"),
        }
        assert events["opened"] < events["imported"]
        assert events["listening"] < events["imported"]
        assert events["first_tensor"] < events["model_built"] < events["first_token"] <= found["seconds"]
        assert events["model_built"] < events["last_byte"]
        assert found["bytes"]["ready"] == found["bytes"]["total"]
        timeline = service.http.get("/v1/loadstone/timeline").json()
        assert timeline["events"] == events
        assert abs(timeline["process_start"] + timeline["seconds"] - time.time()) < 5

        answers: list[str] = []

        def ask() -> None:
            answers.append(service.http.post("/v1/completions", json=LONG).json()["choices"][0]["text"])

        asking = Thread(target=ask)
        asking.start()
        time.sleep(0.15)
        code, out, err = service.stop()
        asking.join(30)
        assert code == 0
        assert (out, err) == ("", "")
    assert answers[0].startswith(reference(base, PROMPT)[:8])


def test_a_service_that_waits_for_bytes_can_be_stopped(held: tuple[str, Traffic, str]) -> None:
    url, _, _ = held
    with child(url) as service:
        service.until(lambda found: found["stage"] == "computing the first token")
        began = time.monotonic()
        code, _, err = service.stop()
        assert code == 0
        assert err == ""
        assert time.monotonic() - began < 20


def _serve(location: Path | str, **options: Any) -> int:
    return serve(str(location), **{"port": 0, "settings": Settings(cache_dir="none"), **options})


def test_what_cannot_be_served_is_one_clear_error(base: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        _serve(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match="no-such-root"):
        _serve(base, adapters=[str(tmp_path / "no-such-root")])
    with pytest.raises(LocationError):
        _serve("nosuchscheme://x/y")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            _serve(base, port=port)
    for host in ("256.0.0.1", "no..name", "x" * 80):
        with pytest.raises(SettingsError, match=r"not an address.*check --host"):
            _serve(base, host=host)
    with pytest.raises(SettingsError, match="no address of this machine; choose another --host"):
        _serve(base, host="192.0.2.1")  # reserved for examples


def test_a_model_that_cannot_generate_is_refused(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(BindError, match="BertModel cannot be served"):
        _serve(tmp_path)


def test_a_model_that_keeps_an_answers_state_in_its_layers_is_refused() -> None:
    config = RecurrentGemmaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(BindError, match="RecurrentGemmaForCausalLM cannot be served: it keeps"):
        Decoder(RecurrentGemmaForCausalLM(config))


def test_a_missing_or_broken_tokenizer_is_named(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(base, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match=r"tokenizer\.json"):
        _serve(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(Exception, match="the tokenizer cannot be read") as caught:
        _serve(folder)
    assert str(folder) in str(caught.value)
    assert "/tmp/loadstone-" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("/data/models/llama-3-8b/", "llama-3-8b"),
        ("s3://bucket", "bucket"),
        ("https://host/a/b.safetensors", "b"),
        ("/cache/models--meta-llama--Llama-3-8B/snapshots/0f3c", "meta-llama/Llama-3-8B"),
    ],
)
def test_a_model_is_called_what_its_folder_is_called(where: str, name: str) -> None:
    assert served_name(where) == name
