"""Networks of a benchmark's own: a private loopback, and a link of stated bandwidth between two ends.

Both are network namespaces: nothing outside reaches them, and the machine's own settings stay as they are.
Inside, TCP uses ``reno``: what a machine has chosen for the wide world (``bbr``) paces loopback far below
what its memory can do. Namespaces need root and ``ip``; without them servers and clients use the machine's
own loopback, rows say so, and there is no link.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadstone.bench.runner import CannotRun
from loadstone.errors import BenchError

_SERVER_END, _CLIENT_END = "10.200.0.1", "10.200.0.2"  # seen by nobody else
_BURST = 128 * 1024  # bytes that may pass at once: two of the kernel's largest packets
_QUEUE_SECONDS = 0.05
_CONGESTION = "net.ipv4.tcp_congestion_control"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where processes run, and how they reach the servers from there.

    Attributes
    ----------
    prefix : tuple of str
        What a command line begins with to run there.
    address : str
        The servers' address as seen from there.
    words : str
        What network that is, for the rows.
    """

    prefix: tuple[str, ...]
    address: str
    words: str


@dataclass(frozen=True, slots=True)
class Networks:
    """Where servers sit (their clients too, for speed), and the far end of the link."""

    near: Seat
    far: Seat | None
    why_not: str = ""

    def link(self) -> Seat:
        """Return the far end.

        Raises
        ------
        CannotRun
            There is no link here.
        """
        if self.far is None:
            raise CannotRun(self.why_not)
        return self.far


@contextmanager
def networks(bits_per_second: int) -> Iterator[Networks]:
    """Give a private loopback and a link of ``bits_per_second`` towards the clients, gone at the end."""
    missing = _missing()
    if missing:
        words = f"this machine's loopback, {_congestion()} ({missing}, so no private one)"
        yield Networks(Seat((), "127.0.0.1", words), None, f"a shaped link cannot be made: {missing}")
        return
    with ExitStack() as stack:
        name = f"loadstone-{secrets.token_hex(4)}"
        near = stack.enter_context(_namespace(f"{name}-s"))
        try:
            far: str | None = stack.enter_context(_namespace(f"{name}-c"))
            _connect(f"{name}-s", f"{name}-c", bits_per_second)
            why_not = ""
        except BenchError as error:
            far, why_not = None, f"a shaped link cannot be made: {error}"
        words = f"link of {bits_per_second / 1e9:g} Gbit/s, reno"
        yield Networks(
            Seat(_inside(near), "127.0.0.1", "private loopback, reno"),
            Seat(_inside(far), _SERVER_END, words) if far else None,
            why_not,
        )


def _missing() -> str:
    """Say what is missing for namespaces; empty when nothing is."""
    if os.geteuid() != 0:
        return "not root"
    tools = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if tools:
        return f"no {tools[0]} command"
    try:
        with _namespace(f"loadstone-{secrets.token_hex(4)}-t"):
            return ""
    except BenchError as error:
        return str(error)


def _congestion() -> str:
    path = Path("/proc/sys") / _CONGESTION.replace(".", "/")
    return path.read_text().strip() if path.exists() else "unknown"


@contextmanager
def _namespace(name: str) -> Iterator[str]:
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(*_inside(name), "sysctl", "-q", "-w", f"{_CONGESTION}=reno")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _inside(name: str) -> tuple[str, ...]:
    return "ip", "netns", "exec", name


def _connect(near: str, far: str, bits_per_second: int) -> None:
    _run("ip", "-n", near, "link", "add", "lk0", "type", "veth", "peer", "name", "lk1", "netns", far)
    for name, end, address in ((near, "lk0", _SERVER_END), (far, "lk1", _CLIENT_END)):
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
        _run("ip", "-n", name, "link", "set", end, "up")
    shape = ["rate", f"{bits_per_second}bit", "burst", str(_BURST), "latency", f"{_QUEUE_SECONDS * 1000:g}ms"]
    _run("tc", "-n", near, "qdisc", "add", "dev", "lk0", "root", "tbf", *shape)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(
            f"`{' '.join(argv)}` failed: {' '.join(done.stderr.split())[:200]}; is this a container?"
        )
