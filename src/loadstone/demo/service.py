"""Starts ``loadstone serve`` as a process of its own, and talks to it as any client would."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from loadstone.commands.adapters import call
from loadstone.demo.store import Store
from loadstone.errors import SettingsError, TransferError
from loadstone.settings import Settings

READY_SECONDS = 300.0
"""How long the demo waits for the service to be able to answer."""


@contextmanager
def running(store: Store, port: int, settings: Settings) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Start the service with an empty node cache; yield its URL and a check that it still runs."""
    with tempfile.TemporaryDirectory(prefix="loadstone-demo-cache-") as cache:
        port = port or _free_port()
        argv = [sys.executable, "-m", "loadstone", "serve", store.base]
        argv += ["--adapters", store.adapters, "--port", str(port), "--name", "base"]
        if "endpoint_url" in store.options:
            argv += ["--endpoint-url", str(store.options["endpoint_url"])]
        service = subprocess.Popen(
            argv, env=replace(settings, cache_dir=cache).environment(), start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}", lambda: service.poll() is None
        finally:
            service.send_signal(signal.SIGTERM)
            try:
                service.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(service.pid, signal.SIGKILL)
                service.wait()


def check_port(port: int) -> None:
    """Refuse a port that something listens on: what answers there would be taken for the demo's service.

    Raises
    ------
    SettingsError
        The port cannot be had.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            text = (
                f"cannot listen on 127.0.0.1:{port} ({error.strerror}); choose another --port, or 0 for any"
            )
            raise SettingsError(text) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(url: str, alive: Callable[[], bool], show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Poll ``/ready`` until the service can answer; ``show`` is told of the progress on the way.

    Raises
    ------
    TransferError
        The service ended, or did not become ready in time.
    """
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if not alive():
            raise TransferError("the service ended before it was ready; its own message is above")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:  # noqa: S310  our own http:// URL
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            body = _state(error, url)
            if body.get("state") == "failed":
                raise TransferError(f"the service cannot start: {body.get('message', body)}") from None
            show(body)
        except (OSError, http.client.HTTPException):
            pass  # it does not listen yet
        time.sleep(0.02)
    raise TransferError(f"the service at {url} was not ready within {READY_SECONDS:.0f} s")


def _state(answer: urllib.error.HTTPError, url: str) -> dict[str, Any]:
    """Return what ``/ready`` says while it does not say yes."""
    with answer:
        try:
            return dict(json.loads(answer.read()))
        except (TypeError, ValueError):
            text = (
                f"{url}/ready answered {answer.code}, not as the demo's service does; choose another --port"
            )
            raise TransferError(text) from None


def ask(url: str, model: str, prompt: str) -> str:
    """Return the greedy answer of one model, base or adapter."""
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0}
    return str(call(f"{url}/v1/completions", body)["choices"][0]["text"]).strip()
