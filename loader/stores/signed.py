"""Requests by signed URLs, which expire and are signed anew."""

import threading
import time
from collections.abc import Callable, Mapping

from loadstone.loader.stores.answers import Refusal
from loadstone.loader.stores.exchange import Request

SIGNED_FOR = 3600
"""Seconds a URL is signed for; it is used for half of that."""


class SignedAccess:
    """Makes requests by signed URLs, which are signed anew when they expire; see `Access`."""

    digest_tags = False

    def __init__(self, sign: Callable[[str], str]) -> None:
        self._sign = sign
        self._lock = threading.Lock()
        self._urls: dict[str, tuple[str, float, int]] = {}

    def request(self, key: str, query: str, headers: Mapping[str, str]) -> Request:  # noqa: ARG002
        """Return a request; see `Access.request`."""
        with self._lock:
            url, until, uses = self._urls.get(key, ("", 0.0, 0))
        if time.monotonic() > until:
            url, until, uses = self._sign(key), time.monotonic() + SIGNED_FOR / 2, 0
        with self._lock:
            self._urls[key] = (url, until, uses + 1)
        return Request(url, headers)

    def repair(self, key: str, request: Request, refused: Refusal) -> bool:
        """Have the URL signed again, unless it was fresh; see `Access.repair`."""
        if refused.status not in (400, 401, 403):
            return False
        with self._lock:
            url, _, uses = self._urls.get(key, ("", 0.0, 0))
            if url == request.url and uses <= 1:
                return False
            if url == request.url:
                del self._urls[key]
            return True

    def cause(self, refused: Refusal) -> str:
        """Name the likely cause; see `Access.cause`."""
        if refused.status == 404:
            return "nothing is stored there; check the spelling"
        return "the credentials that signed the URL may not read it; check their permissions"
