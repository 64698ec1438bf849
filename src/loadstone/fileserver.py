"""A small web server for the files of one folder, with everything a careful reader needs.

Ranges, strong ETags, ``If-Match``, ``If-None-Match``, ``If-Range``, HEAD and keep-alive; nothing outside the
folder, no listings, no writing. `loadstone demo` serves its model with it, and a hook lets tests count, slow
down or hold back what is sent. It has no TLS and no login: it binds to this machine unless told otherwise.

Ownership: one thread accepts, one thread serves each connection; the hook is called from those and must
be safe for that. ``close`` ends all of them.
"""

import contextlib
import os
import re
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self
from urllib.parse import quote, unquote, urlsplit

from loadstone.errors import LocationError, SettingsError

_PIECE = 256 * 1024
_RANGE = re.compile(r"bytes=(\d{1,19})?-(\d{1,19})?")
_IDLE_LIMIT = 120.0


class Hook:
    """Sees what a `FileServer` does; the base class lets everything pass."""

    def requested(self, method: str, path: str, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` of ``path`` (below the folder) were asked for and will be sent."""

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        """``nbytes`` are about to be sent; may block."""


class FileServer:
    """Serves ``folder`` on ``host`` from a background thread; a context manager.

    Parameters
    ----------
    folder : path
        Only files inside it are served; a link that leads out of it is not.
    host, port
        Where to listen; port 0 takes a free one.
    hook : Hook
        Sees every request.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        hook: Hook | None = None,
    ) -> None:
        self.folder = Path(folder).resolve()
        if not self.folder.is_dir():
            raise LocationError(f"{folder} is not a folder, so its files cannot be served")
        try:
            self._server = _Server((host, port), self.folder, hook or Hook())
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another port"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.05},
            name="loadstone-fileserver",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The folder's address, without a slash at its end."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def url_of(self, name: str) -> str:
        """Return the address of the file (or folder) ``name`` below the folder."""
        return f"{self.url}/{quote(name)}"

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_connections()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], folder: Path, hook: Hook) -> None:
        self.folder = folder
        self.hook = hook
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # The parent looks up this machine's full name, which can take seconds and is not needed.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away in the middle are ordinary."""

    def drop_connections(self) -> None:
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "loadstone"
    sys_version = ""
    timeout = _IDLE_LIMIT
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the parent's name for it
        """Keep quiet; a hook sees requests."""

    def _answer(self) -> None:
        path = self._path()
        file = _open(self.server.folder, path) if path is not None else None
        if path is None or file is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        with file:
            facts = os.fstat(file.fileno())
            tag = f'"{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"'
            wanted = self.headers.get("If-Match")
            known = self.headers.get("If-None-Match")
            if wanted is not None and not _matches(wanted, tag):
                self._refuse(HTTPStatus.PRECONDITION_FAILED, tag)
            elif known is not None and _matches(known, tag):
                self.send_response(HTTPStatus.NOT_MODIFIED)
                self.send_header("ETag", tag)
                self.end_headers()
            else:
                self._send(file, path, tag, facts.st_size)

    def _send(self, file: BinaryIO, path: str, tag: str, size: int) -> None:
        asked = self.headers.get("Range") if self.headers.get("If-Range", tag) == tag else None
        part = _part(asked, size)
        if part == (0, 0):
            self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, tag, f"bytes */{size}")
            return
        start, stop = part or (0, size)
        self.send_response(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK)
        if part:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header(
            "Content-Type", "application/json" if path.endswith(".json") else "application/octet-stream"
        )
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", tag)
        self.server.hook.requested(self.command, path, start, stop)
        self.end_headers()
        if self.command == "GET":
            self._body(file, path, start, stop, self.server.hook.sending)

    def _body(
        self, file: BinaryIO, path: str, start: int, stop: int, sending: Callable[[str, int, int], None]
    ) -> None:
        self.wfile.flush()
        for offset in range(start, stop, _PIECE):
            nbytes = min(_PIECE, stop - offset)
            sending(path, offset, nbytes)
            if self.connection.sendfile(file, offset, nbytes) < nbytes:
                self.close_connection = True  # The file shrank: the promised length cannot be kept.
                return

    def _refuse(self, status: HTTPStatus, tag: str = "", content_range: str = "") -> None:
        body = f"{status.value} {status.phrase}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _path(self) -> str | None:
        """Return the wanted file below the folder; ``None`` when it is no plain relative path."""
        path = unquote(urlsplit(self.path).path).removeprefix("/")
        parts = path.split("/")
        return None if "\0" in path or any(part in ("", ".", "..") for part in parts) else path


def _open(folder: Path, path: str) -> BinaryIO | None:
    try:
        found = (folder / path).resolve(strict=True)
        return found.open("rb") if found.is_relative_to(folder) and found.is_file() else None
    except (OSError, RuntimeError):
        return None


def _matches(header: str, tag: str) -> bool:
    return header.strip() == "*" or tag in (value.strip() for value in header.split(","))


def _part(asked: str | None, size: int) -> tuple[int, int] | None:
    """Return the range to send: ``None`` for all of it, ``(0, 0)`` when nothing of it exists."""
    match = _RANGE.fullmatch((asked or "").strip())
    if not size or match is None or (match[1] is None and match[2] is None):
        return None
    if match[1] is None:
        start, stop = max(0, size - int(match[2])), size
    else:
        start, stop = int(match[1]), size if match[2] is None else min(int(match[2]) + 1, size)
        if match[2] is not None and int(match[2]) < start:
            return None
    return (start, stop) if start < stop else (0, 0)
