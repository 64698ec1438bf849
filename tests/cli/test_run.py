"""`loadstone run`: CMD's environment, exit status and signals pass through, and its bytes are shared."""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.tiny_model import write_tiny_checkpoint

from loadstone.bench.link import Link
from loadstone.commands import run
from loadstone.fileserver import FileServer


def _run(location: str, cache: Path, *command: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "loadstone", "run", location, "--cache", str(cache), "--", *command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


def test_exit_status_and_output_pass_through(checkpoint: Path, tmp_path: Path) -> None:
    child = _run(str(checkpoint), tmp_path / "c", sys.executable, "-c", "print('hello'); raise SystemExit(7)")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (7, "hello\n", "")


def test_a_signal_reaches_the_command_and_its_end_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('got it', flush=True))\n"
    code += "print('ready', flush=True); time.sleep(60)"
    child = _run(str(checkpoint), tmp_path / "c", sys.executable, "-c", code)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGUSR1)
    assert child.stdout.readline() == "got it\n"
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGTERM


def test_the_command_joins_the_cache_and_no_byte_moves_twice(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import loadstone, sys\n"
        "with loadstone.open(sys.argv[1]) as ckpt:\n"
        "    ckpt.wait()\n"
        "    print(len(ckpt), sum(len(ckpt.raw(name)) for name in ckpt))\n"
    )
    stored = sum(path.stat().st_size for path in checkpoint.iterdir())
    with FileServer(checkpoint, hook=(link := Link())) as server:
        child = _run(server.url, tmp_path / "c", sys.executable, "-c", code, server.url)
        out, err = child.communicate(timeout=60)
        assert (child.returncode, err) == (0, "")
        assert int(out.split()[0]) > 0
        assert link.bytes_sent <= stored


def test_a_location_that_cannot_be_opened_ends_the_command(tmp_path: Path) -> None:
    began = time.monotonic()
    child = _run(str(tmp_path / "nothing"), tmp_path / "c", "sleep", "60")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert err.startswith("error: ")
    assert "nothing" in err
    assert err.count("\n") == 1
    assert time.monotonic() - began < 30


def test_a_command_that_does_not_exist_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    child = _run(str(checkpoint), tmp_path / "c", "no-such-command-here")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 127
    assert (
        err == "error: 'no-such-command-here' is not a command on this machine; check its spelling and PATH\n"
    )


@pytest.mark.parametrize("command", ["not-a-program", "not-a-program/below"])
def test_a_command_that_cannot_be_executed_is_one_line(
    checkpoint: Path, tmp_path: Path, command: str
) -> None:
    program = tmp_path / "not-a-program"
    program.write_bytes(b"\0neither a binary nor a script")
    program.chmod(0o755)
    child = _run(str(checkpoint), tmp_path / "c", str(tmp_path / command))
    _, err = child.communicate(timeout=60)
    assert child.returncode == 126
    assert err.startswith("error: ")
    assert "cannot be executed" in err
    assert err.count("\n") == 1


def test_nothing_after_the_dashes_is_said(checkpoint: Path, tmp_path: Path) -> None:
    child = _run(str(checkpoint), tmp_path / "c")
    _, err = child.communicate(timeout=60)
    assert child.returncode == 2
    assert "write: loadstone run LOCATION -- CMD" in err


def test_without_a_cache_folder_the_command_inherits_the_memory(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import loadstone, sys\n"
        "with loadstone.open(sys.argv[1]) as ckpt:\n"
        "    ckpt.wait()\n"
        "    print(len(ckpt))\n"
    )
    stored = sum(path.stat().st_size for path in checkpoint.iterdir())
    with FileServer(checkpoint, hook=(link := Link())) as server:
        argv = [sys.executable, "-m", "loadstone", "run", server.url, "--cache", "none", "--"]
        done = subprocess.run(
            [*argv, sys.executable, "-c", code, server.url],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert int(done.stdout) > 0
        assert link.bytes_sent <= stored


def test_without_versions_the_command_fetches_alone(checkpoint: Path, tmp_path: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(checkpoint))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        location = f"http://127.0.0.1:{server.server_address[1]}"
        child = _run(location, tmp_path / "c", "sleep", "2")
        _, err = child.communicate(timeout=60)
        server.shutdown()
    assert child.returncode == 0
    assert err.startswith("warning: CMD fetches alone: the store gives no strong ETag")
    assert err.count("\n") == 1


def test_the_end_of_imports_midway_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    told: list[object] = []

    def opening(_args: argparse.Namespace) -> None:
        closed.wait(60)
        raise RuntimeError("imports fail while the interpreter ends")

    monkeypatch.setattr(run, "open_checkpoint", opening)
    monkeypatch.setattr(threading, "excepthook", told.append)
    fetching = run._Fetching(argparse.Namespace())
    fetching.start()
    fetching.close()
    closed.set()
    fetching.join(60)
    assert not fetching.is_alive()
    assert told == []


def test_a_signal_leaves_an_ended_command_to_whoever_waits_for_it() -> None:
    child = subprocess.Popen(["sh", "-c", "exit 3"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    signals = run._Signals()
    signals.forward_to(child)
    signals._take(signal.SIGUSR1, None)
    # Process 1 waits for any child: it would wait for an orphan now, had the signal's handler taken this one.
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert (pid, child.returncode) == (child.pid, 3)


def test_a_terminals_interrupt_reaches_the_command_once(checkpoint: Path, tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, lambda *_: print('got it', flush=True))\n"
    code += "print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "loadstone", "run", str(checkpoint), "--cache", str(tmp_path / "c")]
    redirected = ["sh", "-c", 'exec "$@" </dev/null', "sh", *command, "--", sys.executable, "-c", code]
    terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *redirected]
    child = subprocess.Popen(terminal, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    seen = [child.stdout.readline()]
    for _ in range(8):
        child.stdin.write(b"\x03")
        child.stdin.flush()
        seen.append(child.stdout.readline())
        time.sleep(0.2)
    rest, _ = child.communicate(b"\x1c", timeout=60)
    assert b"".join([*seen, rest]).count(b"got it") == 8
