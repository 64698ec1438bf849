"""More work than fits, clients that leave, and a model that fails: the service goes on."""

import gc
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.served_models import reference
from tests.support.service import Service, check_error, run_service
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache

from loadstone.errors import GenerationError
from loadstone.server.work import Completion
from loadstone.settings import Settings

PROMPT = "The lodestone turns"
SHORT = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
LONG = {"model": "tiny", "prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}


def test_a_full_queue_says_so_and_empties(service: Service) -> None:
    filling = Completion("tiny", (PROMPT,), n=14, max_tokens=240, ignore_eos=True)
    job = service.engine.submit(filling, lambda _: None)
    refused = service.http.post("/v1/completions", json={**SHORT, "n": 3})
    check_error(refused, 429)
    assert refused.headers["retry-after"] == "1"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(service.http.post, "/v1/completions", json={**SHORT, "n": 2})
        service.until("busy")
        job.cancel()
        assert waiting.result().status_code == 200
    assert service.http.post("/v1/completions", json={**SHORT, "n": 16}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_work(service: Service, root: Path, stream: bool) -> None:
    service.load("a1", root / "a1")
    body = {**LONG, "model": "a1", "n": 16, "stream": stream}
    if stream:
        with service.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            assert service.engine.busy
    else:
        with pytest.raises(httpx.ReadTimeout):
            service.http.post("/v1/completions", json=body, timeout=0.1)
    service.until("idle", seconds=2)
    # Its lease is gone too: an unload does not have to wait.
    assert service.unload("a1").status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadstone.server.bodylimit._SECONDS", 0.2)
    port = int(service.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = b""
        while not answer.endswith(b"}}"):
            answer += connection.recv(65536)
    monkeypatch.undo()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"did not arrive within 0.2 s" in answer
    assert service.say("tiny", PROMPT)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half a head"]
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_a_connection_without_a_request_is_ended(
    service: Service, monkeypatch: pytest.MonkeyPatch, sent: bytes, first: bool
) -> None:
    monkeypatch.setattr("loadstone.server.connections._SECONDS", 0.3)
    port = int(service.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        if not first:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(sent)
        rest = b""
        while piece := connection.recv(65536):
            rest += piece
    assert b"200 OK" not in rest


def test_a_connection_in_use_is_not_ended(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadstone.server.connections._SECONDS", 0.1)
    with httpx.Client(base_url=service.url) as client:
        for _ in range(8):
            assert client.get("/health").status_code == 200
            time.sleep(0.05)
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_leaving_the_engines_own_loop_ends_the_work(service: Service) -> None:
    for piece in service.engine.complete(Completion("tiny", (PROMPT,), max_tokens=240, ignore_eos=True)):
        assert piece.index == 0
        break
    service.until("idle", seconds=2)


def test_a_service_that_stops_ends_long_answers_with_an_error(base: Path) -> None:
    body = {**LONG, "n": 16}
    with ThreadPoolExecutor(1) as pool:
        with run_service(base, [], Settings(cache_dir="none", drain_seconds=0.1)) as service:
            asked = pool.submit(httpx.post, f"{service.url}/v1/completions", json=body, timeout=60)
            service.until("busy")
        assert "stopping" in check_error(asked.result(), 503)


def test_an_idle_engine_keeps_no_key_value_cache(service: Service) -> None:
    assert service.say("tiny", PROMPT)
    service.until("idle")
    time.sleep(0.05)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is DynamicCache]


def _poison(model: nn.Module, token: int) -> RemovableHandle:
    def refuse(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        if (arguments[0] == token).any():
            raise RuntimeError("this token\nbreaks the model")

    return model.get_submodule("model.embed_tokens").register_forward_pre_hook(refuse)


def test_a_forward_that_fails_ends_one_request_only(
    service: Service, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handle = _poison(service.engine.loaded().decoder.model, 300)
    try:
        failed = service.http.post("/v1/completions", json={"model": "tiny", "prompt": [0, 300], "n": 2})
        message = check_error(failed, 500)
        assert message == "the answer cannot be finished: RuntimeError: this token breaks the model"
        with service.http.stream(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": [0, 300], "stream": True}
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert '"type": "GenerationError"' in lines[0]
        assert lines[-1] == "data: [DONE]"
        assert service.say("tiny", "A harbour") == reference(base, "A harbour")
        with pytest.raises(GenerationError):
            list(service.engine.complete(Completion("tiny", ((300,),))))
    finally:
        handle.remove()
    assert "this token" in caplog.text
    assert service.http.get("/ready").status_code == 200
