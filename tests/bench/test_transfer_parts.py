"""What the transfer benchmark is made of: raw sockets, a distance, a process watched from outside."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from loadstone.bench import rawsockets, watch
from loadstone.bench.delay import delaying
from loadstone.bench.netns import Seat
from loadstone.errors import BenchError
from loadstone.fileserver import FileServer

HERE = Seat((), "127.0.0.1", "loopback")


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_raw_sockets_bring_every_byte_to_its_place(tmp_path: Path) -> None:
    contents = [os.urandom(3_000_000), os.urandom(17)]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.bin").write_bytes(content)
    parts = rawsockets.parts_of(["/0.bin", "/1.bin"], [len(content) for content in contents])
    written = [os.open(tmp_path / f"{number}.copy", os.O_RDWR | os.O_CREAT) for number in range(2)]
    memory = [bytearray(len(content)) for content in contents]
    views = [memoryview(one) for one in memory]
    with FileServer(tmp_path) as server:
        address = _address(server.url)
        assert rawsockets.receive(address, parts, rawsockets.write_to(written)) == 3_000_017
        count = rawsockets.receive(
            address, parts, room=lambda part: views[part.file][part.range.start : part.range.stop]
        )
    for fd in written:
        os.close(fd)
    assert count == 3_000_017
    assert [(tmp_path / f"{number}.copy").read_bytes() for number in range(2)] == contents
    assert [bytes(one) for one in memory] == contents


def test_raw_sockets_say_what_failed(tmp_path: Path) -> None:
    with FileServer(tmp_path) as server, pytest.raises(BenchError, match="404"):
        rawsockets.receive(_address(server.url), rawsockets.parts_of(["/gone"], [10]))


def test_a_distance_takes_its_time_and_keeps_bytes(tmp_path: Path) -> None:
    content = os.urandom(700_000)
    (tmp_path / "file").write_bytes(content)
    memory = bytearray(len(content))
    with FileServer(tmp_path) as server, delaying(_address(server.url)[1], 0.05, HERE) as port:
        began = time.monotonic()
        parts = rawsockets.parts_of(["/file"], [len(content)])
        rawsockets.receive(("127.0.0.1", port), parts, room=lambda _: memoryview(memory))
        seconds = time.monotonic() - began
    assert bytes(memory) == content
    assert seconds >= 0.1  # one round trip for the connection, one for the answer


def test_a_distance_ends_when_its_user_does(tmp_path: Path) -> None:
    with (
        FileServer(tmp_path) as server,
        delaying(_address(server.url)[1], 0.0, HERE) as port,
        socket.create_connection(("127.0.0.1", port)) as sock,
    ):
        sock.sendall(b"GET /none HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert sock.recv(12) == b"HTTP/1.1 404"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_anonymous_memory_is_seen_from_outside() -> None:
    grown = watch.peak_anonymous_bytes(
        [sys.executable, "-c", "x = bytearray(b'x') * 50_000_000; import time; time.sleep(0.2)"], os.environ
    )
    bare = watch.resting_anonymous_bytes([sys.executable, "-c", "print(); input()"], os.environ)
    # The kernel counts pages in batches, and two interpreters differ by some: the tenth is for both.
    assert 45_000_000 < grown["peak_anonymous_bytes"] - bare < 70_000_000


def test_a_process_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(BenchError, match="status 3: so it is"):
        watch.peak_anonymous_bytes(
            [sys.executable, "-c", "import sys; print('so it is', file=sys.stderr); sys.exit(3)"], os.environ
        )


def test_a_first_request_is_timed() -> None:
    code = "import os, urllib.request; urllib.request.urlopen(os.environ['WHERE'])"
    figures = watch.first_request(
        [sys.executable, "-c", code], lambda url: {**os.environ, "WHERE": url, "no_proxy": "*"}, 2
    )
    assert 0 < figures["connected_seconds"] <= figures["first_request_seconds"]
    assert figures["first_request_seconds"] <= figures["slowest_request_seconds"]
