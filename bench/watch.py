"""What is seen of another process from outside: its anonymous memory, and its first request to a server."""

import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from loadstone.errors import BenchError

_LOOK_SECONDS = 0.005
_SPEAK_SECONDS = 30.0


def peak_anonymous_bytes(argv: Sequence[str], env: Mapping[str, str]) -> dict[str, float]:
    """Run ``argv`` to its end; return the most anonymous memory it had, and how long it took.

    Raises
    ------
    BenchError
        It failed; the message carries the end of what it wrote to standard error.
    """
    began, peak = time.monotonic(), 0
    child = subprocess.Popen(
        list(argv), env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid))
        time.sleep(_LOOK_SECONDS)
    seconds = time.monotonic() - began
    _, errors = child.communicate()
    if child.returncode != 0:
        raise BenchError(f"{' '.join(argv)} ended with status {child.returncode}: {errors.strip()[-2000:]}")
    return {"peak_anonymous_bytes": peak, "process_seconds": seconds}


def resting_anonymous_bytes(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Return the anonymous memory of a process that has printed a line and waits for its standard input."""
    with subprocess.Popen(
        list(argv), env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None  # it is a pipe
        child.stdout.readline()
        found = anonymous_bytes(child.pid)
        child.kill()
    return found


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; 0 once it has none."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def first_request(
    argv: Sequence[str], env: Callable[[str], Mapping[str, str]], times: int
) -> dict[str, float]:
    """Start ``argv`` ``times`` times; return the medians of when it connected and when its request came.

    Parameters
    ----------
    argv : sequence of str
        Ended as soon as its first request is there.
    env : Callable
        Makes its environment from the server's URL.
    times : int
        How often.
    """
    seen = [_first_request(argv, env) for _ in range(times)]
    connected, requested = ([moment[which] for moment in seen] for which in (0, 1))
    return {
        "connected_seconds": median(connected),
        "first_request_seconds": median(requested),
        "slowest_request_seconds": max(requested),
    }


def _first_request(argv: Sequence[str], env: Callable[[str], Mapping[str, str]]) -> tuple[float, float]:
    """Return when ``argv`` connected and when its request came, from just before its start."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_SPEAK_SECONDS)
        environment = dict(env(f"http://127.0.0.1:{server.getsockname()[1]}"))
        began = time.monotonic()
        with subprocess.Popen(
            list(argv), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            try:
                peer, _ = server.accept()
                connected = time.monotonic() - began
                with peer:
                    peer.settimeout(_SPEAK_SECONDS)
                    if not peer.recv(1):
                        raise BenchError(f"{' '.join(argv)} connected and sent nothing")
                    return connected, time.monotonic() - began
            except TimeoutError:
                raise BenchError(f"{' '.join(argv)} sent no request in {_SPEAK_SECONDS:g} s") from None
            finally:
                child.kill()
