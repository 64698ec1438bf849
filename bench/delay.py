"""A TCP proxy that makes a network slow, not narrow: ``delay LISTEN TARGET SECONDS`` on loopback.

Whatever passes takes half of ``SECONDS`` (a round trip) each way. A new connection first costs one round trip
more, as its handshake would: the kernel's own, over loopback, costs nothing. Prints ``ready`` once it
listens, and ends when its standard input does.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from loadstone.bench.netns import Seat
from loadstone.bench.servers import free_port
from loadstone.errors import BenchError

_PIECE = 256 * 1024
_PIECES = 256  # most that are on their way at a time, one direction of one connection


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Hand on what comes, ``seconds`` later; then the end."""
    loop = asyncio.get_running_loop()
    way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_PIECES)

    async def arrive() -> None:
        while True:
            due, data = await way.get()
            await asyncio.sleep(due - loop.time())
            if not data:
                break
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    arriving = asyncio.create_task(arrive())
    with suppress(OSError):
        while data := await reader.read(_PIECE):
            await way.put((loop.time() + seconds, data))
    await way.put((loop.time() + seconds, b""))
    with suppress(OSError):
        await arriving


async def _serve(listen: int, target: int, seconds: float) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        ahead, back = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(_carry(reader, back, seconds / 2), _carry(ahead, writer, seconds / 2))
        for end in (back, writer):
            end.close()

    async with await asyncio.start_server(pass_on, "127.0.0.1", listen, backlog=256):
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


def main() -> int:
    """Serve until standard input ends."""
    listen, target, seconds = sys.argv[1:4]
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(listen), int(target), float(seconds)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
