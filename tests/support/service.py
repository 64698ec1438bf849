"""A real service on a real port, inside the test process."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from loadstone.server.engine import Engine
from loadstone.server.listen import Server
from loadstone.server.startup import Startup
from loadstone.settings import Settings

if TYPE_CHECKING:
    import openai


@dataclass(frozen=True)
class Service:
    """A running service and clients for it; ``held`` is left when it ends."""

    url: str
    engine: Engine
    http: httpx.Client
    held: ExitStack

    @cached_property
    def client(self) -> "openai.OpenAI":
        """OpenAI's own client, imported by whoever wants it."""
        from openai import OpenAI  # most tests need not have it

        return self.held.enter_context(OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0))

    def until(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until the engine is ``"idle"`` or ``"busy"``."""
        deadline = time.monotonic() + seconds
        while bool(self.engine.busy) != (condition == "busy"):
            assert time.monotonic() < deadline, f"the engine did not become {condition}"
            time.sleep(0.005)

    def load(self, name: str, path: Path | str | None = None, **options: object) -> httpx.Response:
        """Load an adapter and return the answer."""
        body: dict[str, object] = {"lora_name": name, **options}
        if path is not None:
            body["lora_path"] = str(path)
        return self.http.post("/v1/load_lora_adapter", json=body, headers={"Accept": "application/json"})

    def unload(self, name: str) -> httpx.Response:
        """Unload an adapter and return the answer."""
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def say(self, model: str, prompt: str, **options: object) -> str:
        """Return what a model says to a prompt, greedily."""
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12, **options}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        assert isinstance(text, str)
        return text

    def stream(self, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion."""
        with self.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))


@contextmanager
def run_service(
    base: Path | str,
    roots: Sequence[Path | str],
    settings: Settings,
    host: str = "127.0.0.1",
    storage_options: dict[str, object] | None = None,
) -> Iterator[Service]:
    """Serve ``base`` until the block ends."""
    startup = Startup(
        str(base), settings=settings, roots=[str(root) for root in roots], storage_options=storage_options
    )
    engine = Engine(startup, settings)
    with socket.create_server((host, 0)) as bound:
        listening = threading.Event()
        server = Server(engine, settings, bound, listening.set)
        thread = threading.Thread(target=server.run, args=([bound],), name="test-uvicorn")
        engine.start()
        thread.start()
        try:
            assert listening.wait(20)
            url = f"http://127.0.0.1:{bound.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=60) as http, ExitStack() as held:
                _until_ready(http)
                yield Service(url, engine, http, held)
        finally:
            server.should_exit = True
            thread.join(30)
            engine.close()
            assert not thread.is_alive()


def _until_ready(http: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while (answer := http.get("/ready")).status_code != 200:
        assert answer.json()["state"] == "starting", answer.text
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)


def check_error(answer: httpx.Response, status: int, param: str | None = None) -> str:
    """Check that an answer is an error in the one shape, and return its message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param
    assert "\n" not in error["message"]
    return str(error["message"])
