"""Servers that serve a few connections at a time: those made ahead must not hold them up."""

import functools
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from tests.support.checkpoints import model_tensors, write_sharded
from tests.support.faulty_server import tag_of

import loadstone
from loadstone.loader.stores.exchange import Pool, Request
from loadstone.settings import Settings

SECONDS = 10.0  # far less than a stall takes to be noticed


class Handler(BaseHTTPRequestHandler):
    """As much of S3 as opening needs; each answer ends its connection."""

    def __init__(self, files: dict[str, bytes], delay: float, *rest: object) -> None:
        self._files = files
        self._delay = delay
        super().__init__(*rest)  # type: ignore[arg-type]  # what the server gives

    def log_message(self, *_args: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        time.sleep(self._delay)
        parts = urlsplit(self.path)
        data = self._files.get(unquote(parts.path).removeprefix("/bucket/m/"))
        if "list-type" in parts.query:
            keys = "".join(f"<Contents><Key>m/{name}</Key></Contents>" for name in self._files)
            self._answer(200, f"<ListBucketResult>{keys}</ListBucketResult>".encode())
        elif data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
            assert asked is not None
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(data))
            self._answer(206, data[start:stop], tag_of(data), f"bytes {start}-{stop - 1}/{len(data)}")

    def _answer(self, status: int, body: bytes, tag: str = "", content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
            self.send_header("Content-Range", content_range)
        self.end_headers()
        self.wfile.write(body)


class Server(HTTPServer):
    """Serves on ``workers`` threads, each of which waits for what its connection will ask."""

    request_queue_size = 128

    def __init__(self, files: dict[str, bytes], workers: int, delay: float) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(Handler, files, delay))
        for _ in range(workers):
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                link, address = self.socket.accept()
            except OSError:
                return
            with suppress(OSError):
                self.finish_request(link, address)
            self.shutdown_request(link)

    def stop(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.server_close()


@pytest.fixture(params=[(1, 0.0), (1, 0.05), (4, 0.05)])
def few(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    folder = write_sharded(tmp_path / "m", model_tensors(), shards=2)
    server = Server({path.name: path.read_bytes() for path in folder.iterdir()}, *request.param)
    yield server
    server.stop()


def test_they_are_not_held_up(few: Server) -> None:
    options = {"anon": True, "endpoint_url": f"http://127.0.0.1:{few.server_address[1]}"}
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(2):  # the second while the first is still open
            opened = loadstone.open("s3://bucket/m", cache=None, storage_options=options)
            ckpt = stack.enter_context(opened)
            assert all(torch.equal(ckpt[name], tensor) for name, tensor in model_tensors().items())
    assert time.monotonic() - began < SECONDS


def test_one_that_waits_for_an_answer_closes_those_not_needed(settings: Settings) -> None:
    """A server may be waiting for what they will ask, whatever order it took them in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url, links, asked = f"http://127.0.0.1:{listener.getsockname()[1]}/", list[socket.socket](), []
        pool = Pool(settings)
        for _ in range(3):
            pool.prepare(url)
            links.append(listener.accept()[0])

        def serve() -> None:
            asked.append(links[0].recv(1000)[:5])  # the oldest is used first
            asked.extend(link.recv(1000) for link in links[1:])
            links[0].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        with pool.get(Request(url, {})) as answer:
            assert answer.read(10) == b"hi"
        serving.join()
        assert asked == [b"GET /", b"", b""]
        pool.prepare(url)
        assert pool.idle_count() == 1  # no more are made; the one that was asked stays
        pool.close()
        for link in links:
            link.close()


def test_a_closed_pool_makes_none(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        pool = Pool(settings)
        pool.close()
        pool.prepare(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        with pytest.raises(BlockingIOError):
            listener.accept()
