"""A TCP proxy that makes a network slow, not narrow: ``delay LISTEN TARGET SECONDS`` on loopback.

Whatever passes takes half of ``SECONDS`` (a round trip) each way. A new connection first costs one round trip
more, as its handshake would: the kernel's own, over loopback, costs nothing. Prints ``ready`` once it
listens, and ends when its standard input does.

The proxy has its clients' processor to share, so it does as little as can be done: no tasks, no streams.
"""

import asyncio
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from selectors import SelectSelector
from typing import Self, cast

from loadstone.bench.netns import Seat
from loadstone.bench.servers import free_port
from loadstone.errors import BenchError

_UNDER_WAY = 64 * 1024 * 1024  # most bytes on their way at a time, one direction of one connection


class _End(asyncio.Protocol):
    """One end of a connection: what it receives leaves by the other end, later.

    Parameters
    ----------
    seconds : float
        How much later.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._open_at = 0.0
        self._way: deque[bytes] = deque()
        self._nbytes = 0
        self._ended = False
        self._transport: asyncio.Transport | None = None
        self._other: Self | None = None

    def join(self, other: Self, open_at: float) -> None:
        """Send what comes to ``other``; until ``open_at``, the connection does not exist."""
        self._other, self._open_at = other, open_at
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._other is None:
            self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._way.append(data)
        self._nbytes += len(data)
        if self._nbytes > _UNDER_WAY and self._transport is not None:
            self._transport.pause_reading()
        self._loop.call_at(max(self._loop.time(), self._open_at) + self._seconds, self._arrive)

    def eof_received(self) -> bool:
        self.data_received(b"")
        return True  # the other direction may go on

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is not None and self._other is not None and self._other._transport is not None:
            self._other._transport.abort()

    def _arrive(self) -> None:
        """Hand on the oldest piece: pieces leave in the order in which they came."""
        data = self._way.popleft()
        if self._nbytes > _UNDER_WAY >= self._nbytes - len(data) and self._transport is not None:
            self._transport.resume_reading()
        self._nbytes -= len(data)
        other = self._other
        if other is None or other._transport is None:
            return
        if data:
            other._transport.write(data)
            return
        self._ended = True
        if not other._ended:
            with suppress(OSError):
                other._transport.write_eof()
            return
        for end in (self, other):
            if end._transport is not None:
                end._transport.close()


async def _serve(listen: int, target: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    waiting: set[asyncio.Task[None]] = set()

    async def reach(front: _End, open_at: float) -> None:
        _, back = await loop.create_connection(lambda: _End(seconds / 2), "127.0.0.1", target)
        back.join(front, open_at)
        front.join(back, open_at)

    def accept() -> _End:
        front = _End(seconds / 2)
        task = loop.create_task(reach(front, loop.time() + seconds))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        return front

    async with await loop.create_server(accept, "127.0.0.1", listen, backlog=256):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


@contextmanager
def delaying(target: int, seconds: float, seat: Seat) -> Iterator[int]:
    """Run a proxy to the port ``target`` at a distance of ``seconds`` (a round trip); gives its port."""
    port = free_port()
    module = [sys.executable, "-m", "loadstone.bench.delay"]
    argv = [*seat.prefix, *module, str(port), str(target), str(seconds)]
    proxy = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None  # it is a pipe
        if proxy.stdout.readline() != "ready\n":
            raise BenchError(f"the delaying proxy did not start on port {port}; try again")
        yield port
    finally:
        proxy.terminate()
        proxy.communicate()


def _loop() -> asyncio.AbstractEventLoop:
    # Epoll, the default, rounds waits up to whole milliseconds, which are a tenth of a hop.
    return asyncio.SelectorEventLoop(SelectSelector())


def main() -> int:
    """Serve until standard input ends."""
    listen, target, seconds = sys.argv[1:4]
    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=_loop) as runner:
        runner.run(_serve(int(listen), int(target), float(seconds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
