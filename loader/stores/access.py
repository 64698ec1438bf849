"""How an object becomes a request: the seam between a kind of store and the one HTTP transport.

An `Access` knows addresses and signatures, and what a refusal means; the transport knows retries and checks.
So presigned URLs, signed headers, bearer tokens and plain public URLs are one thing to the transport.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPMessage
from typing import Protocol
from urllib.parse import quote, urljoin, urlsplit

from loadstone.errors import AccessError, LoadstoneError, NotFoundError, TransferError
from loadstone.loader.stores.answers import Refusal, retry_after
from loadstone.loader.stores.backoff import MisanswerError, TemporaryError
from loadstone.loader.stores.exchange import Request

REDIRECTS = (301, 302, 303, 307, 308)
_THROTTLES = (429, 503, 509)
_PERMANENT = (501, 505)
_PASSING = (408, 425, 429)
_CREDENTIAL_CODES = ("ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired")
"""Codes that S3 sends with a plain 400."""
_PUBLIC_HEADERS = ("accept-encoding", "if-match", "if-none-match", "range")
"""Headers that may follow a redirect to another host; everything else may be secret."""
_URL_MARKS = "!#$%&'()*+,/:;=?@[]~"
_BARE_PERCENT = re.compile("%(?![0-9A-Fa-f]{2})")


class Access(Protocol):
    """Makes requests for a store's objects. Safe to use from many threads at a time."""

    @property
    def digest_tags(self) -> bool:
        """Whether ETags of this store may be digests, as S3's are."""
        ...

    def request(self, key: str, query: str, headers: Mapping[str, str]) -> Request:
        """Return a request for ``key``, signed as the store wants it."""
        ...

    def repair(self, key: str, request: Request, refused: Refusal) -> bool:
        """Set right what made the store refuse ``request`` (an expired signature, a region).

        A request made after ``True`` is a different one; it does not count as a retry.
        """
        ...

    def cause(self, refused: Refusal) -> str:
        """Name the likely cause of a refusal and what to do about it."""
        ...


@dataclass(frozen=True, slots=True)
class HttpObject:
    """An object that is read by HTTP.

    Attributes
    ----------
    name, identity : str
        As in `RemoteObject`.
    access : Access
        Makes its requests.
    key, query : str
        What ``access`` calls it.
    """

    name: str
    identity: str
    access: Access
    key: str
    query: str = ""


def redirected(request: Request, target: str, name: str) -> Request:
    """Return the request a redirect asks for; secrets stay with the host they were meant for.

    Raises
    ------
    TransferError
        It leads out of HTTP, or from an encrypted connection to a plain one.
    """
    old = urlsplit(request.url)
    try:
        new = urlsplit(urljoin(request.url, plain_url(target)))
        same = (old.scheme, old.hostname, old.port) == (new.scheme, new.hostname, new.port)
    except ValueError:
        raise TransferError(
            f"{name}: redirected to something that is not a web address; check the URL"
        ) from None
    if new.scheme not in ("http", "https") or not new.hostname:
        raise TransferError(f"{name}: redirected to something that is not a web address; check the URL")
    if old.scheme == "https" and new.scheme == "http":
        raise TransferError(
            f"{name}: redirected from https to plain http at {new.hostname}; give that URL if it is meant"
        )
    headers = dict(request.headers)
    if not same:
        headers = {key: value for key, value in headers.items() if key.lower() in _PUBLIC_HEADERS}
    return Request(new._replace(netloc=new.netloc.rpartition("@")[2], fragment="").geturl(), headers)


def plain_url(text: str) -> str:
    """Return what a header says as a URL of plain characters, the others as ``%`` and hex digits.

    Spaces, quotes, raw UTF-8 and a ``%`` that begins nothing are all seen in ``Location``; what is escaped
    already stays as it is.
    """
    # http.client reads headers as Latin-1: each character is one byte as it came.
    plain = quote(text.strip(), safe=_URL_MARKS, encoding="latin-1", errors="replace")
    return _BARE_PERCENT.sub("%25", plain)


def refusal_error(obj: HttpObject, refused: Refusal, headers: HTTPMessage) -> LoadstoneError:
    """Return the error that a refusal means."""
    status, found = refused.status, f"{obj.name}: the store answered {refused}"
    if status in _PASSING or (status >= 500 and status not in _PERMANENT) or refused.code == "RequestTimeout":
        return TemporaryError(
            found,
            retry_after=retry_after(headers),
            throttled=status in _THROTTLES or refused.code == "SlowDown",
        )
    if status in REDIRECTS:
        return MisanswerError(
            TransferError(f"{found}, a redirect that leads nowhere; {obj.access.cause(refused)}")
        )
    message = f"{found}; {obj.access.cause(refused)}"
    if status in (401, 403, 407) or refused.code in _CREDENTIAL_CODES:
        return AccessError(message)
    if status in (404, 410):
        return NotFoundError(message)
    return TransferError(message)
