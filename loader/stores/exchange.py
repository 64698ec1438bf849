"""One HTTP exchange at a time over pooled connections: send a GET, receive its body into a reused buffer.

Built on ``http.client``, which measures faster than every other client here. Added to it: a bounded pool
with keep-alive, and answers that say at which byte a fault struck.

Connections made ahead of their requests would harm a server that serves a few at a time: each of its workers
may wait for what one of them is going to ask. So they are used in the order in which they were made, and all
are closed once an answer ends its connection, or is late; no more are made for that server then.

Ownership: the pool's lock guards its lists; a link belongs to the thread that took it until it is put back.
``close`` may be called from any thread and wakes all the others. In a forked child every pool starts empty:
the parent's sockets are closed there, and nothing is said on them.
"""

import http.client
import os
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from urllib.parse import SplitResult, urlsplit

from loadstone.errors import ClosedError, SettingsError, TransferError
from loadstone.loader.stores import slots
from loadstone.loader.stores.backoff import TemporaryError
from loadstone.loader.stores.connections import (
    Link,
    Origin,
    Stopped,
    connect,
    nothing,
    origin_of,
    translate,
)
from loadstone.loader.stores.slots import Share
from loadstone.loader.stores.store import CHUNK
from loadstone.settings import Settings


@dataclass(frozen=True, slots=True)
class Request:
    """A GET. Its URL and headers may hold secrets and are never shown."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


class Answer:
    """One answer; leave it as a context manager, so that its connection is put back or dropped."""

    def __init__(self, pool: "Pool", link: Link, response: http.client.HTTPResponse, url: str) -> None:
        self._pool = pool
        self._link = link
        self._response = response
        self._left = response.length
        self._chunked = bool(response.chunked)
        self._ended = self._left == 0
        self.url = url
        self.status = response.status
        self.headers = response.headers
        self.fault: TemporaryError | None = None
        """Why a body ended before its promised end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        keep = kind is None and self.fault is None and self._ended and not self._response.will_close
        self._response.close()
        self._pool.put(self._link, keep)

    @property
    def buffer(self) -> memoryview:
        """The connection's reused receive buffer."""
        return self._link.buffer

    @property
    def ended(self) -> bool:
        """Whether the body has come to its end."""
        return self._ended

    @property
    def delimited(self) -> bool:
        """Whether the end of the body is marked, so that a cut can be told from it."""
        return self._chunked or self._left is not None

    def receive(self, view: memoryview) -> int:
        """Fill ``view``; fewer bytes mean that the body ended, or that `fault` says what happened."""
        self._link.pace.restart()
        filled = 0
        try:
            while filled < len(view) and not self._ended:
                filled += self._some(view[filled:])
        except Stopped as stop:
            raise stop.take() from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.fault = translate(error, self._link)
        return filled

    def _some(self, view: memoryview) -> int:
        reader = self._response.fp
        if self._chunked:
            data = self._response.read1(len(view))
            view[: len(data)] = data
            nbytes = len(data)
        elif self._left is None:
            nbytes = reader.readinto1(view)
        else:
            nbytes = reader.readinto1(view[: self._left])
            self._left -= nbytes
        if self._left:
            if not nbytes:
                raise http.client.IncompleteRead(b"", self._left)
        else:
            self._ended = self._left == 0 or not nbytes
        return nbytes

    def read(self, limit: int) -> bytes:
        """Return the body, at most ``limit`` bytes of it.

        Raises
        ------
        TemporaryError
            It was cut short.
        """
        parts = []
        while limit > 0 and not self._ended:
            view = self.buffer[: min(limit, CHUNK)]
            nbytes = self.receive(view)
            parts.append(bytes(view[:nbytes]))
            limit -= nbytes
            if self.fault is not None:
                raise self.fault
        return b"".join(parts)


class Pool:
    """A set of connections to any number of hosts, bounded together with every other pool of the process.

    Parameters
    ----------
    settings : Settings
        The number of connections and the time limits.
    ca_bundle : str or None
        File with the certificate authorities to trust instead of the system's (``SSL_CERT_FILE``).
    verify : bool
        Check certificates at all.
    """

    def __init__(self, settings: Settings, ca_bundle: str | None = None, verify: bool = True) -> None:
        self._settings = settings
        self._ca_bundle = ca_bundle
        self._verify = verify
        self._context: ssl.SSLContext | None = None
        self._share = Share(settings.max_connections)
        self._reset()
        with _pools_lock:
            _POOLS.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._no_spares: set[Origin] = set()
        self._closed = False

    def get(self, request: Request, waiting: Callable[[], None] = nothing) -> Answer:
        """Send ``request`` and return its answer once the headers are there.

        ``waiting`` is called now and then while nothing comes; what it raises ends the exchange.

        Raises
        ------
        TemporaryError
            The connection failed in a way that may pass.
        AccessError, TransferError
            It failed in a way that will not: a certificate that is not trusted, a host that does not exist.
        """
        parts = urlsplit(request.url)
        origin = origin_of(parts)
        while True:
            link = self._take(origin, waiting)
            try:
                response = self._exchange(link, parts, request.headers, waiting)
            except TransferError:  # an OSError too
                self.put(link, keep=False)
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                stale = link.used and not isinstance(error, TimeoutError)
                self.put(link, keep=False)
                if stale:
                    continue  # The server closed a kept connection while the request was under way.
                raise translate(error, link) from None
            except Stopped as stop:
                self.put(link, keep=False)
                raise stop.take() from None
            except BaseException:
                self.put(link, keep=False)
                raise
            if response.will_close:
                self._drop_spares(origin)
            return Answer(self, link, response, request.url)

    def prepare(self, url: str) -> None:
        """Make a connection for a request to come, unless as many are there as may be.

        Raises
        ------
        TemporaryError, AccessError, TransferError
            It cannot be made.
        """
        origin = origin_of(urlsplit(url))
        if self._closed or origin in self._no_spares or not self._share.take_spare():
            return
        link = None
        try:
            if _connections(_pools()) <= slots.bound(self._settings.max_connections):
                link = self._connect(origin)
        finally:
            if link is None:
                self._share.give_back()
        if link is not None:
            with self._lock:
                self._busy.add(link)
            self.put(link, keep=True)

    def put(self, link: Link, keep: bool) -> None:
        """Take back ``link``, to be used again or not."""
        link.pace.waiting = nothing
        with self._lock:
            known = link in self._busy
            self._busy.discard(link)
            keep = keep and known and not self._closed
            keep = keep and (link.asked or link.origin not in self._no_spares)
            if keep:
                link.used = True
                link.idle_since = time.monotonic()
                self._idle.append(link)
        if not keep:
            link.drop()
        if known:
            self._share.give_back()

    def close(self) -> None:
        """Drop every connection, also those in use."""
        with self._lock:
            self._closed = True
            links = [*self._idle, *self._busy]
            self._idle.clear()
        self._share.retire()
        for link in links:
            link.drop()

    def after_fork(self) -> None:
        """Start anew in a child: its parent's connections are closed here without a word on them."""
        closed = self._closed
        for link in [*self._idle, *self._busy]:
            link.abandon()
        self._reset()
        self._closed = closed

    def _take(self, origin: Origin, waiting: Callable[[], None]) -> Link:
        self._share.take(waiting)
        try:
            link = self._reuse(origin) or self._connect(origin)
        except BaseException:
            self._share.give_back()
            raise
        with self._lock:
            self._busy.add(link)
            closed = self._closed
        if closed:
            link.drop()  # The exchange then fails, and the next attempt says why.
        return link

    def _reuse(self, origin: Origin) -> Link | None:
        dead = []
        found = None
        with self._lock:
            if self._closed:
                raise ClosedError(f"the connections to {origin.host} were closed; open the checkpoint again")
            links = [link for link in self._idle if link.origin == origin]
            spares = [link for link in links if not link.asked]
            for link in [*(link for link in reversed(links) if link.asked), *spares]:
                self._idle.remove(link)
                if link.alive():
                    found = link
                    break
                dead.append(link)
        for link in dead:
            link.drop()
        return found

    def _drop_spares(self, origin: Origin) -> None:
        """Close the connections to ``origin`` on which nothing was asked yet, and have no more of them."""
        with self._lock:
            self._no_spares.add(origin)
            spares = [link for link in self._idle if link.origin == origin and not link.asked]
            self._idle = [link for link in self._idle if link not in spares]
        for link in spares:
            link.drop()

    def idle_since(self) -> float | None:
        """Return since when its oldest idle connection is idle."""
        with self._lock:
            return self._idle[0].idle_since if self._idle else None

    def idle_count(self) -> int:
        """Return how many connections wait to be used again."""
        return len(self._idle)

    def drop_oldest(self) -> None:
        """Close the connection that has been idle longest."""
        with self._lock:
            link = self._idle.pop(0) if self._idle else None
        if link is not None:
            link.drop()

    def _connect(self, origin: Origin) -> Link:
        _make_room(slots.bound(self._settings.max_connections))
        context = self._tls() if origin.scheme == "https" else None
        return connect(origin, self._settings, context)

    def _tls(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                try:
                    self._context = ssl.create_default_context(cafile=self._ca_bundle)
                except OSError as error:
                    raise SettingsError(f"the CA bundle {self._ca_bundle} cannot be read: {error}") from None
                if not self._verify:
                    self._context.check_hostname = False
                    self._context.verify_mode = ssl.CERT_NONE
            return self._context

    def _exchange(
        self, link: Link, parts: SplitResult, headers: Mapping[str, str], waiting: Callable[[], None]
    ) -> http.client.HTTPResponse:
        def late() -> None:
            self._drop_spares(link.origin)
            waiting()

        link.pace.restart()
        link.pace.waiting = late
        link.ask(parts, headers)
        response = link.connection.getresponse()
        link.pace.waiting = waiting
        return response


_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()
_pools_lock = threading.Lock()


def _pools() -> list[Pool]:
    with _pools_lock:
        return list(_POOLS)


def _connections(pools: list[Pool]) -> int:
    """Return how many connections there are: those that have slots, and idle ones."""
    return slots.taken() + sum(pool.idle_count() for pool in pools)


def _make_room(most: int) -> None:
    """Close idle connections, whichever pool keeps them, until there are no more than the bound."""
    pools = _pools()
    while _connections(pools) > most:
        ages = [(since, pool) for pool in pools if (since := pool.idle_since()) is not None]
        if not ages:
            return
        min(ages, key=lambda age: age[0])[1].drop_oldest()


def _reset_pools() -> None:
    global _pools_lock  # noqa: PLW0603  a thread that the child does not have may hold the parent's
    _pools_lock = threading.Lock()
    for pool in list(_POOLS):
        pool.after_fork()


os.register_at_fork(after_in_child=_reset_pools)
