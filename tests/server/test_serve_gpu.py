"""A service that computes on a GPU, and what transformers and PEFT say there."""

import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from tests.support.served_models import make_llama, reference
from tests.support.service import Service, run_service

from loadstone.errors import SettingsError
from loadstone.fileserver import FileServer
from loadstone.loader.modules.bind import pending_tensors
from loadstone.server.run import serve
from loadstone.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SETTINGS = Settings(cache_dir="none", device="cuda", max_running=4, max_waiting=12, drain_seconds=5)
PROMPTS = [
    "The lodestone turns",
    "A harbour, a lantern and a map: whoever comes first",
    "Grüße aus Köln",
]


@pytest.fixture(scope="module")
def on_gpu(base: Path, root: Path) -> Iterator[Service]:
    with run_service(base, [root], SETTINGS) as running:
        yield running


def allocated() -> int:
    """Return the bytes of the GPU's memory that tensors have."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def until_allocated(wanted: int, seconds: float = 20.0) -> None:
    """Wait until as much is in use as ``wanted``: the engine lets go a moment after its answer is sent."""
    deadline = time.monotonic() + seconds
    while (found := allocated()) != wanted:
        assert time.monotonic() < deadline, f"{found} bytes are in use, not {wanted}"
        time.sleep(0.05)


def test_the_model_lies_on_the_device(on_gpu: Service) -> None:
    model = on_gpu.engine.loaded().decoder.model
    assert not list(pending_tensors(model))  # the first token needed them all
    assert all(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_those_of_generate_on_the_device(on_gpu: Service, base: Path, prompt: str) -> None:
    assert on_gpu.say(base.name, prompt) == reference(base, prompt, device="cuda")


def test_answers_side_by_side_are_those_of_each_alone(on_gpu: Service, base: Path, root: Path) -> None:
    for name in ("a1", "a2"):
        assert on_gpu.load(name, root / name).status_code == 200
    asked = [(model, prompt) for model in (base.name, "a1", "a2") for prompt in PROMPTS]
    with ThreadPoolExecutor(len(asked)) as threads:
        said = list(threads.map(lambda each: on_gpu.say(*each), asked))
    for (model, prompt), text in zip(asked, said, strict=True):
        adapter = None if model == base.name else root / model
        assert text == reference(base, prompt, adapter, device="cuda")
    for name in ("a1", "a2"):
        assert on_gpu.unload(name).status_code == 200


def test_an_adapter_loaded_over_http_answers_as_in_peft(on_gpu: Service, base: Path, root: Path) -> None:
    plain = on_gpu.say(base.name, PROMPTS[0])
    for name in ("a1", "a2", "a3"):
        assert on_gpu.load(name, root / name).status_code == 200
        said = on_gpu.say(name, PROMPTS[0])
        assert said == reference(base, PROMPTS[0], root / name, device="cuda")
        assert said != plain
        assert on_gpu.unload(name).status_code == 200
    assert on_gpu.say(base.name, PROMPTS[0]) == plain


def test_unloading_gives_the_devices_memory_back(on_gpu: Service, base: Path, root: Path) -> None:
    pool = on_gpu.engine.loaded().pool
    on_gpu.load("a1", root / "a1")  # what libraries take at the first use of a kernel
    on_gpu.say("a1", PROMPTS[0])
    on_gpu.unload("a1")
    on_gpu.until("idle")
    time.sleep(0.5)
    before = allocated()
    for name in ("a2", "a3", "a1"):
        on_gpu.load(name, root / name)
        on_gpu.say(name, PROMPTS[0])
        on_gpu.until("idle")
        assert pool.attached_bytes == pool.status(name).mapped_bytes > 0
        assert allocated() >= before + pool.attached_bytes
        assert on_gpu.unload(name).status_code == 200
        assert pool.attached_bytes == 0
        until_allocated(before)
    assert on_gpu.say(base.name, PROMPTS[0]) == reference(base, PROMPTS[0], device="cuda")


def test_sampling_and_log_probabilities_work_on_the_device(on_gpu: Service, base: Path) -> None:
    body = {"model": base.name, "prompt": PROMPTS[0], "max_tokens": 8, "ignore_eos": True}
    sampling = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "repetition_penalty": 1.2, "seed": 5}
    texts = {
        on_gpu.http.post("/v1/completions", json={**body, **sampling}).json()["choices"][0]["text"]
        for _ in range(2)
    }
    assert len(texts) == 1
    for count in (0, 3):
        answer = on_gpu.http.post("/v1/completions", json={**body, "temperature": 0, "logprobs": count})
        assert answer.status_code == 200, answer.text
        logprobs = answer.json()["choices"][0]["logprobs"]
        assert len(logprobs["token_logprobs"]) == 8
        assert all(value <= 0 for value in logprobs["token_logprobs"])


def test_a_base_that_arrives_over_http_is_served_from_the_device(tmp_path: Path) -> None:
    base = make_llama(tmp_path / "far", seed=3)
    with FileServer(base) as server, run_service(server.url, [], SETTINGS) as service:
        said = service.say(service.engine.name, PROMPTS[1])
    assert said == reference(base, PROMPTS[1], device="cuda")


def test_a_number_beyond_the_last_is_refused(base: Path) -> None:
    with pytest.raises(SettingsError, match=r"device 'cuda:99' is not there: this torch sees \d+"):
        serve(str(base), port=0, settings=Settings(cache_dir="none", device="cuda:99"))


def test_the_command_serves_from_the_device(base: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "loadstone", "serve", str(base), "--device", "cuda:0", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOADSTONE_CACHE_DIR": "none"},
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r"http://\S+[^;\s]", line)
        assert found, line + process.stderr.read()
        with httpx.Client(base_url=found[0], timeout=60) as http:
            deadline = time.monotonic() + 90
            while (ready := http.get("/ready")).status_code != 200:
                assert ready.json()["state"] == "starting", ready.text
                assert time.monotonic() < deadline, ready.text
                time.sleep(0.1)
            body = {"model": base.name, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 12}
            text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert text == reference(base, PROMPTS[0], device="cuda")
