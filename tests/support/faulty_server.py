"""A web server that misbehaves on purpose, one answer at a time.

Every answer asks a *plan* which `Fault` to commit; the plan is a function of the answer's number, so that a
test says exactly what happens when. Independent of the code under test: it shares nothing with it but HTTP.
"""

import contextlib
import gzip
import re
import socket
import socketserver
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

PIECE = 64 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Fault(Enum):
    """What is wrong with an answer."""

    NONE = "nothing"
    SHORT = "half the promised body, then the connection ends"
    SHORT_UNMARKED = "half the body, no Content-Length, then the connection ends"
    UNMARKED = "the whole part, no Content-Length"
    CHUNKED = "the whole part, chunked"
    CHUNKED_CUT = "chunked, cut in the middle"
    WHOLE = "Range ignored: 200 with everything"
    WHOLE_WITH_RANGE = "200, but with a Content-Range and only the part"
    SHIFTED = "206 that starts 1,000 bytes later"
    CAPPED = "206 with only the first half of what was asked for"
    NO_RANGE_HEADER = "206 without Content-Range"
    WRONG_LENGTH = "Content-Length one too small for the range"
    GZIP = "compressed"
    BUSY = "503"
    TOO_MANY = "429 with Retry-After"
    BROKEN = "500"
    HTML = "a login page with 200"
    STALL = "half the body, then silence"
    STALL_UNMARKED = "half the body, no Content-Length, then silence"
    TRICKLE = "one byte a second"
    RESET = "connection reset after 64 KiB"
    RESET_FIRST = "connection reset before any answer"
    GARBAGE = "not HTTP"
    WEAK = "the ETag is weak"
    NO_TAG = "no ETag"
    NOT_FOUND = "404"
    FORBIDDEN = "403 with S3's XML"


_INSTEAD = {
    Fault.BUSY: (503, b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"),
    Fault.TOO_MANY: (429, b"slow down"),
    Fault.BROKEN: (500, b"oops"),
    Fault.NOT_FOUND: (404, b"<Error><Code>NoSuchKey</Code></Error>"),
    Fault.FORBIDDEN: (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
    Fault.HTML: (200, b"<html>log in</html>" * 100),
}
"""Answers that have nothing of the object."""

Plan = Callable[[int], Fault]


def always(fault: Fault) -> Plan:
    """Every answer has ``fault``."""
    return lambda _: fault


def first(count: int, fault: Fault) -> Plan:
    """The first ``count`` answers have ``fault``, later ones are right."""
    return lambda number: fault if number < count else Fault.NONE


@dataclass
class Seen:
    """One request, as it came."""

    path: str
    headers: dict[str, str]
    at: float = field(default_factory=time.monotonic)


class FaultyServer:
    """Serves ``objects`` (path → bytes) wrongly, as ``plan`` says."""

    def __init__(self, objects: dict[str, bytes], plan: Plan | None = None, *, retry_after: int = 1) -> None:
        self.objects = dict(objects)
        self.plan = plan or always(Fault.NONE)
        self.retry_after = retry_after
        self.seen: list[Seen] = []
        self.swap: tuple[int, str, bytes] | None = None
        """After so many answers, this path has these bytes instead."""
        self.intercept: Callable[[Seen], tuple[int, dict[str, str], bytes] | None] = lambda _: None
        """May answer a request instead: status, headers, body."""
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, request: Seen) -> int:
        """Record a request; returns its number."""
        with self._lock:
            self.seen.append(request)
            number = len(self.seen) - 1
            if self.swap is not None and number >= self.swap[0]:
                self.objects[self.swap[1]] = self.swap[2]
            return number

    def encrypt(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )

    def close(self) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, owner: FaultyServer) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that give up are ordinary here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the parent's name for it
        """Keep quiet."""

    def do_GET(self) -> None:
        owner = self.server.owner
        request = Seen(self.path, dict(self.headers.items()))
        number = owner.count(request)
        instead = owner.intercept(request)
        if instead is not None:
            self._answer(*instead)
            return
        body = owner.objects.get(self.path.partition("?")[0])
        if body is None:
            self._answer(404, {}, b"no such thing")
            return
        self._commit(owner.plan(number), body, tag_of(body))

    def _commit(self, fault: Fault, body: bytes, tag: str) -> None:
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if self._refused(fault, tag):
            return
        if fault is Fault.WEAK:
            tag = f"W/{tag}"
        headers = {} if fault is Fault.NO_TAG else {"ETag": tag}
        if match is None or fault is Fault.WHOLE:
            self._send(200, headers, body, fault)
            return
        start, stop = int(match[1]), min(int(match[2]) + 1, len(body))
        if start >= len(body):
            self._answer(416, {"Content-Range": f"bytes */{len(body)}"}, b"")
            return
        if fault is Fault.SHIFTED and stop - start > 2000:
            start += 1000
        if fault is Fault.CAPPED and stop - start > 1:
            stop = (start + stop) // 2
        if fault is not Fault.NO_RANGE_HEADER:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(body)}"
        self._send(200 if fault is Fault.WHOLE_WITH_RANGE else 206, headers, body[start:stop], fault)

    def _refused(self, fault: Fault, tag: str) -> bool:
        owner = self.server.owner
        wanted, known = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if fault in _INSTEAD:
            status, body = _INSTEAD[fault]
            headers = {"Content-Type": "text/html" if fault is Fault.HTML else "text/plain"}
            if fault is Fault.TOO_MANY:
                headers["Retry-After"] = str(owner.retry_after)
            self._answer(status, headers, body)
        elif fault is Fault.RESET_FIRST:
            self._reset()
        elif fault is Fault.GARBAGE:
            self.wfile.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")
            self.close_connection = True
        elif wanted is not None and wanted != tag and fault is not Fault.WEAK:
            self._answer(412, {"ETag": tag}, b"")
        elif known is not None and known == tag:
            self._answer(304, {"ETag": tag}, b"")
        else:
            return False
        return True

    def _send(self, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
        if fault is Fault.GZIP:
            body = gzip.compress(body, 1)
            headers["Content-Encoding"] = "gzip"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        chunked = fault in (Fault.CHUNKED, Fault.CHUNKED_CUT)
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif fault in (Fault.SHORT_UNMARKED, Fault.UNMARKED, Fault.STALL_UNMARKED):
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body) - (fault is Fault.WRONG_LENGTH)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self._body(memoryview(body), fault, chunked)

    def _body(self, body: memoryview, fault: Fault, chunked: bool) -> None:
        half = body[: (len(body) + 1) // 2]
        if fault in (Fault.SHORT, Fault.SHORT_UNMARKED):
            self.wfile.write(half)
            self.close_connection = True
        elif fault in (Fault.STALL, Fault.STALL_UNMARKED):
            self.wfile.write(half)
            self.server.owner.closing.wait(30)
            self.close_connection = True
        elif fault is Fault.TRICKLE:
            for at in range(len(body)):
                self.wfile.write(body[at : at + 1])
                if self.server.owner.closing.wait(1.0):
                    break
            self.close_connection = True
        elif fault is Fault.RESET and len(body) > PIECE:
            self.wfile.write(body[:PIECE])
            time.sleep(0.02)  # A reset overtakes bytes that the other side has not read yet.
            self._reset()
        elif chunked:
            self._chunks(body, cut=fault is Fault.CHUNKED_CUT)
        else:
            self.wfile.write(body)
            self.close_connection = fault in (Fault.UNMARKED, Fault.WRONG_LENGTH)

    def _chunks(self, body: memoryview, *, cut: bool) -> None:
        for at in range(0, len(body), 10_000):
            piece = body[at : at + 10_000]
            self.wfile.write(b"%x\r\n" % len(piece))
            self.wfile.write(piece)
            self.wfile.write(b"\r\n")
            if cut and at > len(body) // 2:
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status != 304:
            self.wfile.write(body)

    def _reset(self) -> None:
        # Linger 0: closing sends RST instead of an orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        self.rfile.close()
        self.wfile.close()
        self.connection.close()
        self.close_connection = True


def tag_of(body: bytes) -> str:
    """The strong ETag the server gives ``body``."""
    import hashlib

    return f'"{hashlib.md5(body).hexdigest()}"'
