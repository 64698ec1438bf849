"""Variables that look like settings and are none are told, once; those of others are not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny_model import write_tiny_checkpoint

from loadstone import variables
from loadstone.settings import Settings


@pytest.fixture(autouse=True)
def _warnings_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_told", set())


def warned(env: dict[str, str], caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    Settings.from_env(env)
    return caplog.messages


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LOADSTONE_CACHE_DIRR", "did you mean LOADSTONE_CACHE_DIR?"),
        ("LOADSTONE_CACHEDIR", "did you mean LOADSTONE_CACHE_DIR?"),
        ("LOADSTONE_TOKEN", "did you mean LOADSTONE_ADMIN_TOKEN?"),
        ("LOADSTONE_cache_dir", "did you mean LOADSTONE_CACHE_DIR?"),
        ("LOADSTONE_PORT", "the README lists"),
        ("LOADSTONE_SOMETHING_ELSE", "the README lists"),
        ("LOADSTONE_", "the README lists"),
        ("LOADSTONE_A\nB", r"'LOADSTONE_A\nB' is not a setting"),
    ],
)
def test_unknown_variables_are_told_once(name: str, hint: str, caplog: pytest.LogCaptureFixture) -> None:
    env = {name: "secret", "LOADSTONE_VERIFY": "0", "LOADSTONEX": "1"}
    (told,) = warned(env, caplog)
    assert hint in told
    assert "secret" not in told
    assert "\n" not in told
    assert warned(env, caplog) == []


def test_known_variables_and_those_of_others_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    kubernetes = {
        "LOADSTONE_SERVICE_HOST": "10.0.0.1",
        "LOADSTONE_SERVICE_PORT": "8000",
        "LOADSTONE_SERVICE_PORT_HTTP": "8000",
        "LOADSTONE_PORT": "tcp://10.0.0.1:8000",
        "LOADSTONE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "LOADSTONE_PORT_8000_TCP_PROTO": "tcp",
        "LOADSTONE_PORT_8000_TCP_PORT": "8000",
        "LOADSTONE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    more = {name.replace("LOADSTONE_", "LOADSTONE_SERVER_"): value for name, value in kubernetes.items()}
    own = {name: value for name, value in Settings().environment().items() if name.startswith("LOADSTONE_")}
    assert warned({**kubernetes, **more, **own, "LOADSTONE_TEST_KILLS": "3"}, caplog) == []


def run(*words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "loadstone", *words]
    return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)


def test_commands_and_the_library_say_it_on_standard_error(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    told = "LOADSTONE_VERIFI is not a setting and has no effect; did you mean LOADSTONE_VERIFY?\n"
    done = run("inspect", str(folder), LOADSTONE_VERIFI="1")
    assert (done.returncode, done.stderr) == (0, f"warning: {told}")
    program = "import loadstone, sys; loadstone.open(sys.argv[1]); loadstone.open(sys.argv[1])"
    argv = [sys.executable, "-c", program, str(folder)]
    env = {**os.environ, "LOADSTONE_VERIFI": "1"}
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stderr == told
