"""Bytes of objects over HTTP: ranged GETs, every answer checked, faults resumed at the byte reached.

An object's version (strong ETag and size) is pinned by the first answer about it; every later request
carries ``If-Match``, and every later answer is compared with it, so that bytes of two versions never mix.
Objects without such a validator are only ever taken from one single answer.

Ownership: one `HttpTransport` serves any number of threads; what belongs to one transfer (its `Work`, its
answer and buffer) stays in the thread that called. A sink is called in that thread, in order.
"""

from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPMessage
from typing import cast

from loadstone.errors import ChangedError, FormatError, LoadstoneError, TransferError
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import StatedDigest
from loadstone.loader.stores.access import REDIRECTS, HttpObject, redirected, refusal_error
from loadstone.loader.stores.answers import (
    changed,
    check_length,
    check_not_page,
    check_part,
    check_plain,
    check_version,
    content_length,
    content_range,
    refusal,
    strong_tag,
)
from loadstone.loader.stores.backoff import MIN_PROGRESS, Manners, MisanswerError, TemporaryError, Work
from loadstone.loader.stores.etags import stated
from loadstone.loader.stores.exchange import Answer, Pool
from loadstone.loader.stores.redirects import Redirects
from loadstone.loader.stores.store import CHUNK, Gate, Probe, RemoteObject, Sink, Version
from loadstone.settings import Settings

_ACCEPTED = (200, 206, 304, 412, 416)
_PLAIN = {"Accept-Encoding": "identity"}
_BODY_LIMIT = 64 * 1024
_HOPS = 5
_REPAIRS = 2
_SKIP_LIMIT = 8 * CHUNK
"""Most bytes that are received and thrown away when a server sends the whole object instead of a part."""


class HttpTransport:
    """The transport of every store that can be read by HTTP."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._manners = Manners()
        self._redirects = Redirects()

    def probe(self, obj: RemoteObject, count: int, known: Version | None, gate: Gate) -> Probe:
        """Look at ``obj`` once; see `Transport.probe`."""
        target, work = _http(obj), self._work(obj, gate)
        while True:
            try:
                return self._look(target, count, known, work)
            except TemporaryError as fault:
                work.failed(fault)

    def fetch(self, obj: RemoteObject, version: Version, span: ByteRange, sink: Sink, gate: Gate) -> None:
        """Deliver ``span`` of ``version``; see `Transport.fetch`."""
        if not version.pinned:
            raise TransferError(
                f"{obj.name} has no strong ETag, so parts of it cannot be read safely; read it whole"
            )
        self._fetch(_http(obj), version, span, sink, self._work(obj, gate))

    def fetch_whole(self, obj: RemoteObject, size_hint: int, sink: Sink, gate: Gate) -> Version:
        """Deliver an object from one single answer; see `Transport.fetch_whole`."""
        target, work = _http(obj), self._work(obj, gate)
        furthest = 0
        while True:
            fault: TemporaryError | None
            try:
                with self._send(target, {}, work) as answer:
                    size = _whole_size(obj.name, answer, size_hint)
                    at = 0
                    while not answer.ended and answer.fault is None:
                        at = self._chunk(answer, at, CHUNK, sink, gate)
                        work.progress(at - furthest)
                        furthest = max(furthest, at)
                    fault = answer.fault
                    if fault is None:
                        if size_hint >= 0 and at != size_hint:
                            raise _resized(obj.name, at, size_hint)
                        return Version(strong_tag(answer.headers), at if size is None else size)
            except TemporaryError as error:
                fault = error.with_traceback(None)  # which would lead back here
            work.failed(fault)

    def read(self, obj: RemoteObject, limit: int, gate: Gate) -> bytes:
        """Return a small answer whole, such as a listing.

        Raises
        ------
        TransferError
            It is longer than ``limit``; otherwise as for `probe`.
        """
        target, work = _http(obj), self._work(obj, gate)
        while True:
            try:
                with self._send(target, {}, work) as answer:
                    _whole_size(obj.name, answer, -1)
                    gate.admit(CHUNK)
                    body = answer.read(limit)
                    if not answer.ended:
                        raise TransferError(
                            f"{obj.name}: the answer is longer than {limit} bytes; check the server"
                        )
                    return body
            except TemporaryError as fault:
                work.failed(fault)

    def stated_digest(self, obj: RemoteObject, version: Version, gate: Gate) -> StatedDigest:
        """Ask for the digest of ``version``; see `Transport.stated_digest`."""
        target = _http(obj)
        if not target.access.digest_tags:
            return StatedDigest(reason="the ETags of its store are not known to be digests")

        def ask(query: str, headers: Mapping[str, str]) -> HTTPMessage:
            work = self._work(obj, gate)
            while True:
                try:
                    return self._headers(replace(target, query=query), version, headers, work)
                except TemporaryError as fault:
                    work.failed(fault)

        return stated(version, ask)

    def _headers(
        self, obj: HttpObject, version: Version, headers: Mapping[str, str], work: Work
    ) -> HTTPMessage:
        """Return the headers of an answer, and hang up on its body."""
        with self._send(obj, {**headers, "If-Match": version.tag}, work) as answer:
            if answer.status == 412:
                raise _refused(obj.name, version, answer.headers)
            return answer.headers

    def connect(self, url: str) -> None:
        """Make a connection to ``url``'s host for a request to come; see `Pool.prepare`."""
        self._pool.prepare(url)

    def close(self) -> None:
        """Drop every connection; see `Transport.close`."""
        self._pool.close()

    def _work(self, obj: RemoteObject, gate: Gate) -> Work:
        return Work(obj.name, self._settings.retry_seconds, self._manners, gate)

    def _look(self, obj: HttpObject, count: int, known: Version | None, work: Work) -> Probe:
        headers = {"Range": f"bytes=0-{count - 1}"}
        if known is not None and known.pinned:
            headers["If-None-Match"] = known.tag
        with self._send(obj, headers, work) as answer:
            if answer.status == 304 and known is not None:
                return Probe(None, b"", not_modified=True, whole=False)
            found = None if answer.status == 416 else self._first(obj, answer, count, work)
        if found is None:
            # The range cannot be had: the object is empty, or the server has its own idea of ranges.
            with self._send(obj, {}, work) as answer:
                found = self._first(obj, answer, count, work)
        version, data, missing = found
        if missing.nbytes:  # only now: a thread has one connection at a time
            rest = bytearray()
            self._fetch(obj, version, missing, lambda _, part: rest.extend(part), work)
            data += rest
        return Probe(version, data, not_modified=False, whole=len(data) == version.size)

    def _first(
        self, obj: HttpObject, answer: Answer, count: int, work: Work
    ) -> tuple[Version, bytes, ByteRange]:
        """Read a first answer: the object's version, its first bytes, and which of them did not come."""
        version, want = _pin(obj.name, answer, count)
        parts: list[bytes] = []
        at = 0
        while at < want and not answer.ended and answer.fault is None:
            at = self._chunk(answer, at, want - at, lambda _, part: parts.append(bytes(part)), work.gate)
        data = b"".join(parts)  # nearly always one, which then is not copied again
        if version.size < 0:
            if not answer.ended or answer.fault is not None:
                raise answer.fault or MisanswerError(_no_length(obj.name))
            version = Version(version.tag, len(data))
        check_not_page(obj.name, answer.headers, data[:100])
        missing = ByteRange(len(data), min(want, version.size))
        if missing.nbytes and (not version.pinned or not data):
            raise answer.fault or TemporaryError(f"{obj.name}: the answer ended early")
        return version, data, missing

    def _fetch(self, obj: HttpObject, version: Version, span: ByteRange, sink: Sink, work: Work) -> None:
        at = span.start
        while at < span.stop:
            begun, fault = at, None
            headers = {"Range": f"bytes={at}-{span.stop - 1}", "If-Match": version.tag}
            try:
                with self._send(obj, headers, work) as answer:
                    stop = self._accept(obj.name, answer, version, ByteRange(at, span.stop), work.gate)
                    while at < stop and answer.fault is None and not answer.ended:
                        reached = self._chunk(answer, at, stop - at, sink, work.gate)
                        work.progress(reached - at)
                        at = reached
                    fault = answer.fault
            except TemporaryError as error:
                fault = error.with_traceback(None)  # which would lead back here
            if at < span.stop and (fault is not None or at - begun < MIN_PROGRESS):
                work.failed(fault or TemporaryError(f"{obj.name}: an answer ended after {at - begun} bytes"))

    def _accept(self, name: str, answer: Answer, version: Version, asked: ByteRange, gate: Gate) -> int:
        """Check an answer to a ranged request; returns the offset up to which it has bytes.

        Afterwards the answer's next byte is the first one asked for.
        """
        headers = answer.headers
        check_plain(name, answer.status, headers)
        if answer.status == 206:
            return check_part(name, headers, asked, version).stop
        if answer.status == 412:
            raise _refused(name, version, headers)
        if answer.status == 416:
            found = content_range(headers)
            if found is not None and found.total is not None and found.total != version.size:
                raise changed(name, version, f"its size is now {found.total}")
        if answer.status != 200:
            raise MisanswerError(
                TransferError(f"{name}: answered {answer.status} to an ordinary range; check the server")
            )
        check_not_page(name, headers, b"<")
        check_version(name, headers, version, content_length(headers))
        if asked.start > _SKIP_LIMIT:
            raise MisanswerError(
                FormatError(
                    f"{name}: the server ignores ranges (asked for {asked.start}-{asked.stop - 1}); use one "
                    "that supports them"
                )
            )
        at = 0
        while at < asked.start:
            reached = self._chunk(answer, at, asked.start - at, _discard, gate)
            if reached == at:
                raise answer.fault or TemporaryError(f"{name}: the answer ended early")
            at = reached
        return asked.stop

    def _chunk(self, answer: Answer, at: int, most: int, sink: Sink, gate: Gate) -> int:
        """Receive and hand on at most one chunk; returns the offset reached."""
        view = answer.buffer[: min(most, CHUNK)]
        gate.admit(len(view))
        nbytes = answer.receive(view)
        if nbytes:
            sink(at, view[:nbytes])
        return at + nbytes

    def _send(self, obj: HttpObject, headers: Mapping[str, str], work: Work) -> Answer:
        """Send one request, following redirects and renewing signatures, which are not retries."""
        work.begin()
        moved = self._redirects.find(obj.identity) if "If-Match" in headers else None
        if moved is not None:
            origin = obj.access.request(obj.key, obj.query, {**_PLAIN, **headers})
            try:
                answer = self._pool.get(redirected(origin, moved, obj.name), work.waiting)
                if answer.status in (200, 206):
                    return answer
            except TemporaryError:
                self._redirects.forget(obj.identity)
                raise
            # Whatever went wrong there, from now on the origin is asked again.
            self._redirects.forget(obj.identity)
            with answer:
                _body(answer)
        return self._ask(obj, headers, work)

    def _ask(self, obj: HttpObject, headers: Mapping[str, str], work: Work) -> Answer:
        hops = repairs = 0
        request = None
        while True:
            request = request or obj.access.request(obj.key, obj.query, {**_PLAIN, **headers})
            answer = self._pool.get(request, work.waiting)
            work.answered()
            if answer.status in _ACCEPTED:
                if hops:
                    self._redirects.remember(obj.identity, request.url)
                return answer
            with answer:
                refused = refusal(answer.status, answer.headers, _body(answer))
            target = answer.headers.get("Location")
            if repairs < _REPAIRS and obj.access.repair(obj.key, request, refused):
                repairs, request = repairs + 1, None
            elif answer.status in REDIRECTS and target and hops < _HOPS:
                hops, request = hops + 1, redirected(request, target, obj.name)
            else:
                raise refusal_error(obj, refused, answer.headers)


def _http(obj: RemoteObject) -> HttpObject:
    # A store hands its own objects to its own transport; the protocol cannot say so.
    return cast("HttpObject", obj)


def _body(answer: Answer) -> bytes:
    try:
        return answer.read(_BODY_LIMIT)
    except TemporaryError:
        return b""  # The status says enough.


def _refused(name: str, version: Version, headers: HTTPMessage) -> LoadstoneError:
    """Return the error for a 412: what was pinned is not there. Azure says so of deleted objects, too."""
    tag = strong_tag(headers)[:80]
    found = f"its ETag is now {tag}" if tag else "nothing with its ETag is there any more"
    return changed(name, version, found)


def _discard(_: int, __: memoryview) -> None:
    """Take bytes that nobody asked for."""


def _pin(name: str, answer: Answer, count: int) -> tuple[Version, int]:
    """Return the version a first answer belongs to (size -1: known at its end) and how many bytes to read."""
    headers = answer.headers
    check_plain(name, answer.status, headers)
    if answer.status == 206:
        found = content_range(headers)
        if found is None or found.part is None or found.total is None or found.part.start != 0:
            raise MisanswerError(
                FormatError(f"{name}: answered 206 without a usable Content-Range; check the server")
            )
        check_length(name, headers, found.part.nbytes)
        version = Version(strong_tag(headers), found.total)
        return version, min(found.part.stop, count) if not version.pinned else min(found.total, count)
    if answer.status != 200:
        raise MisanswerError(
            TransferError(f"{name}: answered {answer.status} to a first request; check the server")
        )
    size = content_length(headers)
    if size is None:
        if not answer.delimited:
            raise MisanswerError(_no_length(name))
        return Version("", -1), count + 1
    # A server that ignores Range cannot be read in parts: such objects count as unpinned.
    return Version(strong_tag(headers) if size <= count else "", size), min(size, count)


def _whole_size(name: str, answer: Answer, expected: int) -> int | None:
    """Check the answer to a request for the whole object; returns its size, ``None`` when it is not told."""
    check_plain(name, answer.status, answer.headers)
    if answer.status != 200:
        raise MisanswerError(
            TransferError(f"{name}: answered {answer.status} to a plain request; check the server")
        )
    check_not_page(name, answer.headers, b"<")
    size = content_length(answer.headers)
    if size is None and not answer.delimited and expected < 0:
        raise MisanswerError(_no_length(name))
    if size is not None and expected >= 0 and size != expected:
        raise _resized(name, size, expected)
    return size


def _no_length(name: str) -> LoadstoneError:
    return FormatError(
        f"{name}: the server does not say how long it is, so a cut would go unseen; use another server"
    )


def _resized(name: str, size: int, expected: int) -> LoadstoneError:
    return ChangedError(
        f"{name} was replaced: it has {size} bytes now and had {expected} when opened; open it again"
    )
