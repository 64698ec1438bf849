"""Plain web servers, and URLs that are signed already.

A folder is the path of its URL. It cannot be listed; its index says which files it has. A query (a
signature, a token) is repeated for every file, which suits both a signed single file and a signed folder.
"""

import base64
import hashlib
from collections.abc import Mapping
from urllib.parse import parse_qsl, quote, unquote

from loadstone.errors import SettingsError
from loadstone.loader.locations import Location
from loadstone.loader.stores.access import HttpObject
from loadstone.loader.stores.answers import Refusal
from loadstone.loader.stores.exchange import Pool, Request
from loadstone.loader.stores.transfer import HttpTransport
from loadstone.settings import Settings

_KNOWN = ("client_kwargs", "headers", "verify")
_SIGNATURE_PARTS = (
    "x-amz-",
    "x-goog-",
    "signature",
    "expires",
    "policy",
    "key-pair-id",
    "awsaccesskeyid",
    "googleaccessid",
)
_SAS_PARTS = frozenset(
    {"se", "sig", "ske", "skoid", "sks", "skt", "sktid", "skv", "sp", "spr", "sr", "st", "sv", "sip"}
)


class WebAccess:
    """Makes requests to one web server; see `Access`."""

    digest_tags = False

    def __init__(self, location: Location, headers: Mapping[str, str]) -> None:
        self._origin = f"{location.scheme}://{location.authority}"
        self._headers = dict(headers)
        self._signed = bool(location.secrets.query)
        if location.secrets.userinfo:
            user, _, password = location.secrets.userinfo.partition(":")
            login = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode("ascii")
            self._headers.setdefault("Authorization", f"Basic {login}")

    def request(self, key: str, query: str, headers: Mapping[str, str]) -> Request:
        """Return a request; see `Access.request`."""
        return Request(f"{self._origin}{key}" + (f"?{query}" if query else ""), {**self._headers, **headers})

    def repair(self, key: str, request: Request, refused: Refusal) -> bool:  # noqa: ARG002  part of `Access`
        """Nothing can be set right here; see `Access.repair`."""
        return False

    def cause(self, refused: Refusal) -> str:
        """Name the likely cause; see `Access.cause`."""
        if refused.status in (401, 403) and self._signed:
            return "the URL's signature may have expired or be for another file; get a new URL"
        if refused.status in (401, 403):
            return "it needs a login; give storage_options={'headers': {'Authorization': …}}"
        if refused.status == 404:
            return "nothing is stored there; check the URL's spelling"
        return "check the URL"


class WebStore:
    """A folder of a web server."""

    def __init__(self, location: Location, options: Mapping[str, object], settings: Settings) -> None:
        self.name = location.text
        self._location = location
        headers, verify = _options(options)
        ca_bundle = verify if isinstance(verify, str) else None
        self._access = WebAccess(location, headers)
        self.transport = HttpTransport(Pool(settings, ca_bundle, verify is not False), settings)

    def object(self, name: str) -> HttpObject:
        """Return the file of that name in this folder."""
        child = self._location.child(name)
        identity = f"{child.scheme}://{child.authority}{child.path}{_query_identity(child.secrets.query)}"
        return HttpObject(child.text, identity, self._access, child.path, child.secrets.query)

    def names(self) -> tuple[str, ...] | None:
        """Return ``None``: the web knows no listings."""
        return None

    def connector(self) -> None:
        """Return ``None``: the server may have few workers; see `Store.connector`."""

    def close(self) -> None:
        """Drop every connection."""
        self.transport.close()


def _options(options: Mapping[str, object]) -> tuple[dict[str, str], object]:
    client = options.get("client_kwargs") or {}
    if not isinstance(client, Mapping):
        raise SettingsError("client_kwargs is not a mapping")
    unknown = sorted((set(options) | set(client)) - set(_KNOWN))
    if unknown:
        raise SettingsError(
            f"storage_options has {unknown[0]!r}, which is not known for a URL; known are {_KNOWN}"
        )
    headers: dict[str, str] = {}
    for source in (client.get("headers"), options.get("headers")):
        if source is not None and not isinstance(source, Mapping):
            raise SettingsError("headers is not a mapping of names to values")
        for name, value in (source or {}).items():
            if any(mark in f"{name}{value}" for mark in "\r\n\0"):
                raise SettingsError(f"the header {str(name)[:40]!r} holds a line break; a header is one line")
            headers[str(name)] = str(value)
    return headers, options.get("verify", client.get("verify", True))


def _query_identity(query: str) -> str:
    """Return what of a query tells objects apart, as a digest: it may still be secret."""
    kept = [
        f"{quote(name)}={quote(value)}"
        for name, value in parse_qsl(query, keep_blank_values=True)
        if not name.lower().startswith(_SIGNATURE_PARTS) and name.lower() not in _SAS_PARTS
    ]
    return f"?{hashlib.sha256('&'.join(kept).encode()).hexdigest()[:32]}" if kept else ""
