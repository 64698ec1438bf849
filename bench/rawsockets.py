"""The control of the transfer benchmark: plain sockets, ranged GETs, ``recv_into``; nothing is checked.

It knows every file's size beforehand, opens its connections at once and keeps them. Where the bytes go is
the caller's choice: back into one reused buffer, to files, or into memory nobody has touched.
"""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadstone.errors import BenchError
from loadstone.loader.ranges import ByteRange, split

CONNECTIONS = 4
REQUEST_BYTES = 16 * 1024 * 1024

_BUFFER = 1024 * 1024
_HEAD = 8192


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one file: ``file`` is a number of the caller's, ``path`` its path at the server."""

    file: int
    path: str
    range: ByteRange


Take = Callable[[Part, int, memoryview], None]
"""Takes (part, offset in the file, bytes); the memory is reused once it returns."""
Room = Callable[[Part], memoryview]
"""Gives the memory that a part's bytes belong into."""


def parts_of(paths: Sequence[str], sizes: Sequence[int]) -> list[Part]:
    """Return the requests that bring whole files, in order."""
    return [
        Part(number, path, piece)
        for number, (path, size) in enumerate(zip(paths, sizes, strict=True))
        for piece in split(ByteRange(0, size), REQUEST_BYTES)
    ]


def drop(part: Part, offset: int, data: memoryview) -> None:
    """Take bytes to nowhere."""


def write_to(descriptors: Sequence[int]) -> Take:
    """Return what writes each file's bytes to its descriptor."""

    def write(part: Part, offset: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(descriptors[part.file], data, offset)
            offset, data = offset + count, data[count:]

    return write


def receive(
    address: tuple[str, int], parts: Sequence[Part], take: Take = drop, room: Room | None = None
) -> int:
    """Receive ``parts`` and return how many bytes that were.

    Parameters
    ----------
    address : tuple of str and int
        The server.
    parts : sequence of Part
        What to ask for.
    take : Take
        What to do with bytes that came into the connection's own buffer.
    room : Room, optional
        Memory to receive into instead; then nothing is taken.
    """
    left = deque(parts)
    counts: list[int] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            with socket.create_connection(address) as sock:
                connection = _Connection(sock, address[0], take, room)
                counts.extend(connection.bring(part) for part in _taken(left))
        except (OSError, BenchError) as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(CONNECTIONS, len(parts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(
            f"the raw transfer from {address[0]}:{address[1]} failed: {failures[0]}; see the server's log"
        )
    return sum(counts)


def _taken(left: "deque[Part]") -> Iterator[Part]:
    """Give parts until none is left; every connection takes from the same."""
    with suppress(IndexError):
        while True:
            yield left.popleft()


class _Connection:
    """One connection with a buffer of its own, used by one thread."""

    def __init__(self, sock: socket.socket, host: str, take: Take, room: Room | None) -> None:
        self._sock = sock
        self._host = host
        self._take = take
        self._room = room
        self._buffer = memoryview(bytearray(_BUFFER))

    def bring(self, part: Part) -> int:
        """Ask for ``part`` and receive all of it; returns its length."""
        span = part.range
        asked = f"bytes={span.start}-{span.stop - 1}"
        self._sock.sendall(
            f"GET {part.path} HTTP/1.1\r\nHost: {self._host}\r\nRange: {asked}\r\n\r\n".encode()
        )
        self._skip_head(part)
        place = self._room(part) if self._room else None
        at = 0
        while at < span.nbytes:
            view = self._buffer[: span.nbytes - at] if place is None else place[at:]
            count = self._sock.recv_into(view)
            if not count:
                raise BenchError(f"{part.path}: the server closed the connection")
            if place is None:
                self._take(part, span.start + at, view[:count])
            at += count
        return at

    def _skip_head(self, part: Part) -> None:
        """Take the answer's head off the socket, and not a byte of its body."""
        while True:
            seen = self._sock.recv(_HEAD, socket.MSG_PEEK)
            end = seen.find(b"\r\n\r\n")
            if not seen or (end < 0 and len(seen) == _HEAD):
                raise BenchError(f"{part.path}: the answer has no head")
            if end >= 0:
                self._sock.recv(end + 4)
                break
        if not seen.startswith(b"HTTP/1.1 206 "):
            raise BenchError(f"{part.path}: answered {seen[:30]!r}")
