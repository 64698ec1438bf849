"""The README's examples run as they stand, against a real S3 server; its settings are all of them."""

import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.support.seaweed import Seaweed
from tests.support.served_models import make_adapter, make_llama

from loadstone.settings import Settings

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def _blocks(language: str, containing: str) -> list[str]:
    found = [
        text for kind, text in BLOCK.findall(README.read_text()) if kind == language and containing in text
    ]
    assert found, f"the README has no {language} block with {containing!r}"
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, seaweed: Seaweed) -> tuple[Path, dict[str, str]]:
    """Return a folder to run examples in, and the environment that finds the README's buckets."""
    folder = tmp_path_factory.mktemp("readme")
    base = make_llama(folder / "model")
    seaweed.upload(base, "base")
    seaweed.upload(make_adapter(folder / "adapters" / "pirate", base, 1), "adapters/pirate")
    tensors: dict[str, object] = {}
    for shard in base.glob("*.safetensors"):
        tensors |= load_file(shard)
    save_file(tensors, folder / "model.safetensors")  # type: ignore[arg-type]
    environment = {
        **os.environ,
        **seaweed.environment,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LOADSTONE_CACHE_DIR": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    return folder, environment


def _run(argv: list[str], place: tuple[Path, dict[str, str]]) -> str:
    done = subprocess.run(
        argv, cwd=place[0], env=place[1], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{argv[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", _blocks("python", "import loadstone") + _blocks("python", "safe_open"))
def test_python_examples_run(block: str, place: tuple[Path, dict[str, str]]) -> None:
    printed = _run([sys.executable, "-W", "error", "-c", block], place)
    if "print(" in block:
        assert "tensors" in printed
        assert "lm_head.weight" in printed


@pytest.mark.parametrize(
    "line", [line for line in "".join(_blocks("bash", "loadstone inspect")).splitlines() if line.strip()]
)
def test_command_examples_run(line: str, place: tuple[Path, dict[str, str]]) -> None:
    _run(["bash", "-c", line], place)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
def test_the_service_example_answers(place: tuple[Path, dict[str, str]]) -> None:
    block = _blocks("bash", "loadstone serve")[0]
    port = str(_free_port())
    start, rest = block.replace("8000", port).split("\n", 1)
    service = subprocess.Popen(["bash", "-c", f"exec {start}"], cwd=place[0], env=place[1])
    try:
        _wait(f"http://127.0.0.1:{port}/ready", service)
        printed = _run(["bash", "-ec", rest], place)
    finally:
        service.terminate()
        assert service.wait(60) == 0
    assert "Success: LoRA adapter 'pirate' added" in printed
    assert '"text_completion"' in printed


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, service: "subprocess.Popen[bytes]") -> None:
    for _ in range(600):
        assert service.poll() is None, "the service ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError("the service did not become ready")


def test_every_setting_is_in_the_table() -> None:
    text = README.read_text()
    for setting in dataclasses.fields(Settings):
        assert f"`LOADSTONE_{setting.name.upper()}`" in text, f"{setting.name} is not in the README's table"
