"""AWS signatures, version 4, of what is sent here: GETs without a body, for S3.

botocore's signer gives the same signatures (tests compare them) for any request, at five times the cost of
each, and at the cost of importing it before the first.

Ownership: functions and constants; the derived key that is remembered may be computed twice.
"""

import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from urllib.parse import urlsplit

from loadstone.loader.stores.connections import origin_of

_EMPTY = sha256(b"").hexdigest()
_UNSIGNED = frozenset({"expect", "user-agent"})  # what proxies change on the way


@dataclass(frozen=True, slots=True)
class Credentials:
    """One set of keys; never shown."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def sign(
    url: str, headers: Mapping[str, str], region: str, keys: Credentials, at: float | None = None
) -> dict[str, str]:
    """Return ``headers`` with a signature for a GET of ``url``.

    Parameters
    ----------
    url : str
        Its path and query are quoted as they are sent.
    headers : Mapping
        What else is sent.
    region : str
        The bucket's.
    keys : Credentials
        Whose signature it is.
    at : float, optional
        When it is made, in seconds since 1970; now, by default.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(at))
    sent = {**headers, "X-Amz-Date": moment, "X-Amz-Content-SHA256": _EMPTY}
    if keys.token:
        sent["X-Amz-Security-Token"] = keys.token
    parts = urlsplit(url)
    signed = {name.lower(): " ".join(value.split()) for name, value in sent.items()}
    signed = {name: value for name, value in signed.items() if name not in _UNSIGNED}
    signed.setdefault("host", origin_of(parts).authority)
    names = sorted(signed)
    listed = ";".join(names)
    lines = [
        *("GET", parts.path or "/", _sorted(parts.query)),
        *(f"{name}:{signed[name]}" for name in names),
        *("", listed, _EMPTY),
    ]
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{sha256(chr(10).join(lines).encode()).hexdigest()}"
    signature = hmac.digest(_derived(keys.secret, moment[:8], region), text.encode(), "sha256").hex()
    sent["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.key}/{scope}, SignedHeaders={listed}, Signature={signature}"
    )
    return sent


@lru_cache(maxsize=16)
def _derived(secret: str, day: str, region: str) -> bytes:
    """Return the key that signs for one day in one region."""
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _sorted(query: str) -> str:
    """Return a query in the order in which it is signed."""
    pairs = sorted(pair.partition("=")[::2] for pair in query.split("&") if pair)
    return "&".join(f"{name}={value}" for name, value in pairs)
