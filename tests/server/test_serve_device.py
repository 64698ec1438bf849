"""Which device a service computes on: how it is said, and when one that is not there is refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.service import Service, run_service

from loadstone.cli import main
from loadstone.errors import SettingsError
from loadstone.fileserver import FileServer, Hook
from loadstone.server import device
from loadstone.server.run import serve
from loadstone.settings import Settings

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")

PROGRAM = """
import sys
from loadstone.cli import main
status = main(["serve", sys.argv[1], "--device", "cuda", "--port", "0", "--cache", "none"])
print(status, "torch" in sys.modules)
"""


class Asked(Hook):
    """Counts requests."""

    def __init__(self) -> None:
        self.count = 0

    def requested(self, method: str, path: str, start: int, stop: int) -> None:
        """Count one."""
        self.count += 1


@pytest.mark.parametrize("wrong", ["", "meta", "meta:0", "cuda:x", "cuda:", "0", "cuda 1", "cpu\n"])
def test_what_is_no_device_is_refused_as_a_setting(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"device is .*; use cpu, cuda, or one by its number: cuda:1"):
        Settings(device=wrong)


def test_the_environment_says_it_too() -> None:
    assert Settings.from_env({}).device == "cpu"
    assert Settings.from_env({"LOADSTONE_DEVICE": "cuda:1"}).device == "cuda:1"
    assert Settings(device="cuda").environment()["LOADSTONE_DEVICE"] == "cuda"


def test_the_command_line_goes_before_the_environment(
    base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOADSTONE_DEVICE", "cpu")
    monkeypatch.setenv("LOADSTONE_CACHE_DIR", "none")
    assert main(["serve", str(base), "--port", "0", "--device", "meta"]) == 1
    assert capsys.readouterr().err.startswith("error: device is 'meta'; use cpu, cuda")


@without_cuda
def test_cuda_is_refused_before_anything_is_fetched_or_imported(base: Path) -> None:
    asked = Asked()
    with FileServer(base, hook=asked) as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    assert done.stdout == "1 False\n"
    assert done.stderr.startswith("error: device 'cuda' is not there: ")
    assert done.stderr.count("\n") == 1
    assert asked.count == 0


@pytest.mark.parametrize("absent", ["nowhere", "cuda:99"])
def test_what_only_torch_can_tell_ends_the_start(
    base: Path, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadstone.server.startup.refuse_absent", lambda device: None)
    with pytest.raises(SettingsError, match=f"device '{absent}' is not"):
        serve(str(base), port=0, settings=Settings(cache_dir="none", device=absent))


def test_a_torch_with_cuda_needs_the_machines_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "_NODE", tmp_path / "nvidiactl")
    monkeypatch.setattr(device, "_DRIVER", "libnosuchdriver.so.1")
    builds: list[dict[str, object]] = [{"cuda": "13.0", "hip": None}, {"cuda": None, "hip": "7.0"}, {}]
    monkeypatch.setattr(device, "_torch_build", lambda: builds[0])
    with pytest.raises(SettingsError, match=r"device 'cuda:1' is not there: .* no CUDA driver"):
        device.refuse_absent("cuda:1")
    device.refuse_absent("cpu")
    (tmp_path / "nvidiactl").touch()
    device.refuse_absent("cuda:1")
    (tmp_path / "nvidiactl").unlink()
    for build in builds[1:]:
        monkeypatch.setattr(device, "_torch_build", lambda build=build: build)
        device.refuse_absent("cuda")


def test_torch_says_how_it_was_built_without_being_imported() -> None:
    build = device._torch_build()
    assert build["__version__"] == torch.__version__
    assert build["cuda"] == torch.version.cuda


def test_a_service_told_to_use_the_cpu_does(base: Path, root: Path) -> None:
    settings = Settings(cache_dir="none", device="cpu:0")
    with run_service(base, [root], settings) as service:
        assert _places(service) == {"cpu"}


def _places(service: Service) -> set[str]:
    return {tensor.device.type for tensor in service.engine.loaded().decoder.model.parameters()}
