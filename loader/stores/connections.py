"""Connections: how one is made, how its bytes are read, and what its failures mean.

Reads happen in short ticks, so that a waiting transfer can be cancelled, and under a pace that a stalled or
trickling server does not keep. Failures are sorted into those that may pass (`TemporaryError`) and those that
will not.

Ownership: a `Link` belongs to the thread that took it from its pool; only `Link.drop` may come from another.
"""

import contextlib
import http.client
import io
import mmap
import os
import select
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from loadstone.errors import AccessError, SettingsError, TransferError
from loadstone.loader.stores.backoff import MIN_PROGRESS, TemporaryError
from loadstone.loader.stores.store import CHUNK
from loadstone.settings import Settings

_IDLE_LIMIT = 50.0
"""Seconds after which an idle connection is not used again: most servers close it at 60 or more."""
TICK = 0.5
"""Seconds between looks at whether a waiting transfer was cancelled."""
_LONG_LABEL = 64  # bytes: no host's name has a label of so many
_AGENT = "loadstone"
_PORTS = {"http": 80, "https": 443}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port: what a connection goes to."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        """What the ``Host`` header says, and signatures sign: without a usual port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS.get(self.scheme) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


class Pace:
    """Notices when bytes stop coming, or come too slowly to be called progress."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.waiting: Callable[[], None] = nothing
        self.restart()

    def restart(self) -> None:
        """Begin to count anew, after a pause of our own."""
        self._since = time.monotonic()
        self._bytes = 0

    def got(self, nbytes: int) -> None:
        """Count ``nbytes``; raises `TooSlowError` when the pace is not kept."""
        self._bytes += nbytes
        if self._bytes >= MIN_PROGRESS:
            self.restart()
        elif time.monotonic() - self._since > self.limit:
            raise TooSlowError(f"only {self._bytes} bytes came in {self.limit:.0f} s")


class TooSlowError(TimeoutError):
    """Caught by the pool: becomes `TemporaryError`."""


class Stopped(BaseException):
    """Takes what a gate raised through the standard library's readers, unmistaken for a network error."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._errors = [error]

    def take(self) -> BaseException:
        """Return what was raised, once: errors that know each other keep all that they passed in memory."""
        return self._errors.pop()


def nothing() -> None:
    """Do nothing while waiting."""


class _PacedRaw(io.RawIOBase):
    """The raw end of a response: reads in short ticks, so that waits can be cancelled, at a pace."""

    def __init__(self, sock: socket.socket, owner: io.RawIOBase, pace: Pace) -> None:
        self._sock = sock
        self._owner = owner
        self._pace = pace

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed's Buffer is wider
        while True:
            try:
                nbytes = self._sock.recv_into(buffer)
            except TimeoutError:
                self._pace.got(0)
                self._wait()
                continue
            self._pace.got(nbytes)
            return nbytes

    def _wait(self) -> None:
        try:
            self._pace.waiting()
        except BaseException as error:  # noqa: BLE001  carried on to the caller
            raise Stopped(error) from None

    def close(self) -> None:
        # The owner counts as a user of the socket, which stays open until the response is done with it.
        self._owner.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that reads through `_PacedRaw`."""

    def __init__(self, sock: socket.socket, *args: object, pace: Pace, **kwargs: object) -> None:
        super().__init__(sock, *args, **kwargs)  # type: ignore[arg-type]  # as http.client gave them
        owner = self.fp.detach()
        self.fp = io.BufferedReader(_PacedRaw(sock, owner, pace))


class Link:
    """One connection, its receive buffer and its pace."""

    def __init__(
        self, connection: http.client.HTTPConnection, origin: Origin, pace: Pace, absolute: bool
    ) -> None:
        self.connection = connection
        connection.auto_open = 0  # A dropped connection stays dropped.
        self.origin = origin
        self.pace = pace
        self.absolute = absolute
        """Requests carry the whole URL: this connection goes to a proxy."""
        self.extra: dict[str, str] = {}
        self.used = False
        """It was idle: the server may have closed it meanwhile."""
        self.asked = False
        """A request was sent on it."""
        self.idle_since = 0.0
        self.socket: socket.socket | None = None
        """Known here even after http.client, told that this answer is the last, has let go of it."""
        self._buffer: memoryview | None = None
        # No method of this object: that would be a cycle, and keep a forgotten socket until a collection.
        connection.response_class = partial(_Response, pace=pace)  # type: ignore[assignment]  # a factory will do

    @property
    def buffer(self) -> memoryview:
        """`CHUNK` bytes of memory, allocated once and touched again and again.

        Pages of it cost nothing before their first use: most answers to a first request are short.
        """
        if self._buffer is None:
            self._buffer = memoryview(mmap.mmap(-1, CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return self._buffer

    def ask(self, parts: SplitResult, headers: Mapping[str, str]) -> None:
        """Send a GET for the URL of ``parts``."""
        target = parts.path or "/"
        if parts.query:
            target = f"{target}?{parts.query}"
        if self.absolute:
            target = f"{parts.scheme}://{self.origin.authority}{target}"
        self.asked = True
        try:
            self.connection.putrequest("GET", target, skip_accept_encoding=True, skip_host="Host" in headers)
            for name, value in {"User-Agent": _AGENT, **self.extra, **headers}.items():
                self.connection.putheader(name, value)
        except (ValueError, http.client.InvalidURL):
            raise TransferError(
                f"a request to {self.origin.host} cannot be sent: its address or a header holds a character "
                "that HTTP does not allow; check the location and the credentials"
            ) from None
        self.connection.endheaders()

    def alive(self) -> bool:
        """Say whether it may be used again; a readable idle connection was closed by the server."""
        sock = self.connection.sock
        if sock is None or time.monotonic() - self.idle_since > _IDLE_LIMIT:
            return False
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(0) or _only_tickets(sock)

    def __del__(self) -> None:
        # A store that nobody closed lets go quietly, as a checkpoint's memory does.
        self.connection.close()

    def drop(self) -> None:
        """Close it; also wakes a thread that waits on it."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def abandon(self) -> None:
        """Close this process's copy of a connection that its parent goes on using: nothing is said on it."""
        if self.socket is not None and (descriptor := self.socket.detach()) >= 0:
            os.close(descriptor)


def _only_tickets(sock: socket.socket) -> bool:
    """Say whether what came unasked is TLS's own: the tickets of a session that has just begun."""
    if not isinstance(sock, ssl.SSLSocket):
        return False
    sock.setblocking(False)
    try:
        sock.recv(1)
    except ssl.SSLWantReadError:
        return True
    except OSError:
        return False
    finally:
        sock.settimeout(TICK)
    return False


def connect(origin: Origin, settings: Settings, context: ssl.SSLContext | None) -> Link:
    """Make a connection to ``origin``, through the environment's proxy if there is one.

    Raises
    ------
    TemporaryError, AccessError, TransferError
        It cannot be made; whether that may pass is in the type.
    """
    proxy = _proxy(origin)
    via = origin_of(proxy) if proxy else origin
    tunnel = proxy is not None and origin.scheme == "https"
    connection: http.client.HTTPConnection
    try:
        if origin.scheme == "https":
            connection = http.client.HTTPSConnection(
                via.host, via.port, timeout=settings.connect_timeout, context=context
            )
        else:
            connection = http.client.HTTPConnection(via.host, via.port, timeout=settings.connect_timeout)
    except http.client.InvalidURL:
        raise _no_host(via) from None
    headers = _proxy_headers(proxy) if proxy else {}
    if tunnel:
        connection.set_tunnel(origin.host, origin.port, headers)
    connection._create_connection = _dial  # type: ignore[attr-defined]  # a seam of the standard library's own
    link = Link(connection, origin, Pace(settings.stall_timeout), absolute=bool(proxy) and not tunnel)
    link.extra = headers if link.absolute else {}
    try:
        connection.connect()
    except UnicodeError:
        raise _no_host(via) from None
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise _connect_error(error, via, bool(proxy), settings.connect_timeout) from None
    link.socket = connection.sock
    link.socket.settimeout(TICK)
    return link


def _no_host(origin: Origin) -> TransferError:
    return TransferError(f"{origin.host[:80]!r} cannot be the name of a host; check the URL's spelling")


def _dial(address: tuple[str, int], *rest: Any) -> socket.socket:
    """Connect as the standard library does, without its codec for host names where plain ASCII will do."""
    host: Any = address[0]
    if host.isascii() and all(0 < len(label) < _LONG_LABEL for label in host.split(".")):
        host = host.encode("ascii")
    return socket.create_connection((host, address[1]), *rest)


def origin_of(parts: SplitResult) -> Origin:
    """Return what a URL's connection goes to."""
    port = parts.port or _PORTS.get(parts.scheme, 80)
    return Origin(parts.scheme, parts.hostname or "", port)


def _proxy(origin: Origin) -> SplitResult | None:
    """Return the proxy the environment names for ``origin``; never one for this machine itself."""
    if origin.host in _LOOPBACK or origin.host.startswith("127."):
        return None
    import urllib.request  # noqa: PLC0415  a hundredth of a second, which this machine's own servers do not cost

    url = urllib.request.getproxies().get(origin.scheme)
    if not url or urllib.request.proxy_bypass(f"{origin.host}:{origin.port}"):
        return None
    try:
        proxy = urlsplit(url if "://" in url else f"http://{url}")
        usable = bool(proxy.hostname) and proxy.port != 0
    except ValueError:
        usable = False
    if not usable:  # what it says may hold a password
        raise SettingsError(
            f"the {origin.scheme}_proxy variable is not of the form http://host:port; correct or unset it"
        )
    if proxy.scheme != "http":
        raise SettingsError(
            f"the {origin.scheme}_proxy variable is a {proxy.scheme}:// proxy; only http:// works"
        )
    return proxy


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    import base64  # noqa: PLC0415  for proxies with a login only

    login = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode("ascii")}


def _connect_error(error: Exception, origin: Origin, proxy: bool, timeout: float) -> Exception:
    where = f"the proxy {origin.host}:{origin.port}" if proxy else f"{origin.host}:{origin.port}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessError(
            f"the certificate of {where} is not trusted ({error.verify_message}); if it should be, name its "
            "authority in SSL_CERT_FILE, or AWS_CA_BUNDLE for S3"
        )
    if isinstance(error, socket.gaierror) and error.errno in (socket.EAI_NONAME, socket.EAI_NODATA):
        return TransferError(
            f"no host is called {origin.host}; check the endpoint's spelling and the network's DNS"
        )
    if isinstance(error, TimeoutError):
        return TemporaryError(f"{where} did not accept a connection within {timeout:.0f} s", unreachable=True)
    if proxy and " 407 " in f"{error} ":
        return AccessError(
            f"{where} wants a login; write it in the proxy variable, as http://user:password@host:port"
        )
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TemporaryError(f"no connection to {where}: {reason}", unreachable=True)


def translate(error: Exception, link: Link) -> TemporaryError:
    """Say what a failure in the middle of an exchange means."""
    host = f"{link.origin.host}:{link.origin.port}"
    if isinstance(error, TimeoutError):
        detail = str(error) if isinstance(error, TooSlowError) else "nothing came"
        return TemporaryError(f"{host} stalled: {detail}", stalled=True)
    if isinstance(error, http.client.IncompleteRead):
        return TemporaryError(f"{host} ended an answer early")
    if isinstance(error, (http.client.RemoteDisconnected, ConnectionError, ssl.SSLError)):
        return TemporaryError(f"{host} broke the connection")
    if isinstance(error, OSError):
        return TemporaryError(f"the connection to {host} failed: {error.strerror or type(error).__name__}")
    return TemporaryError(f"{host} sent an answer that is not HTTP ({type(error).__name__})")
