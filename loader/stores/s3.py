"""S3 and everything that speaks its language: addresses, regions, signatures, listings.

Ownership: one `S3Store` serves any number of threads. `S3Access` holds two facts that may change, the
bucket's region and the store's clock; setting them twice does no harm.
"""

import calendar
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import quote, urlsplit

from loadstone.errors import AccessError, LoadstoneError, LocationError, SettingsError, TransferError
from loadstone.loader.locations import Location, check_name
from loadstone.loader.stores.access import HttpObject
from loadstone.loader.stores.answers import Refusal, xml_text
from loadstone.loader.stores.exchange import Pool, Request
from loadstone.loader.stores.signing import AwsSession, S3Options
from loadstone.loader.stores.sigv4 import sign
from loadstone.loader.stores.store import Connector, OpenGate
from loadstone.loader.stores.transfer import HttpTransport
from loadstone.settings import Settings

_KEY_SAFE = "/-_.~"
_LISTING_LIMIT = 16 * 1024 * 1024
_NAMES_LIMIT = 100_000
_LISTED_KEY = re.compile(r"<Contents>.*?<Key>([^<]*)</Key>.*?</Contents>", re.DOTALL)
_MORE = re.compile(r"<NextContinuationToken>([^<]*)<")
_SECURE_AHEAD = 16  # connections made ahead where each costs a handshake of TLS
_SAME_CLOCK = 60.0  # seconds that may go by between a signature and the store's look at it
_DATE, _EPOCH = "%Y%m%dT%H%M%SZ", "19700101T000000Z"
_DEFAULT_REGION = "us-east-1"
_REGION_CODES = (
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraint",
)
_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_SKEWED = "RequestTimeTooSkewed"
_CAUSES = {
    "NoSuchBucket": "there is no such bucket; check its name and the endpoint",
    "NoSuchKey": "there is no such key; check the spelling, upper and lower case count",
    "InvalidAccessKeyId": "the access key is not known there; check the credentials and the endpoint",
    "SignatureDoesNotMatch": "the secret key is wrong for this access key; check the credentials",
    _SKEWED: "this machine's clock differs too much from the store's; set the clock",
    "ExpiredToken": "the session token has expired; renew the credentials",
    "InvalidObjectState": "the object is archived; restore it first",
}


class S3Access:
    """Makes signed requests for the keys of one bucket; see `Access`."""

    def __init__(self, bucket: str, options: S3Options) -> None:
        self._bucket = bucket
        self._options = options
        self._lock = threading.Lock()
        self._session: AwsSession | None = None
        self._region = ""
        self._clock: float | None = None
        """The store's clock less `time.monotonic`, where this machine's own clock is wrong."""

    @property
    def session(self) -> AwsSession:
        """The AWS session, built at its first use."""
        with self._lock:
            if self._session is None:
                session = AwsSession(self._options)
                _check_endpoint(session.endpoint)
                self._region = session.region or _DEFAULT_REGION
                self._session = session
            return self._session

    @property
    def digest_tags(self) -> bool:
        """Whether ETags may be digests: not in directory buckets."""
        return not self._bucket.endswith("--x-s3")

    @property
    def endpoint(self) -> str:
        """What distinguishes this S3 from others."""
        return self.session.endpoint.rstrip("/") or "https://s3.amazonaws.com"

    @property
    def base(self) -> str:
        """The bucket's URL."""
        session, bucket = self.session, self._bucket
        if session.endpoint:
            if not session.virtual_hosts:
                return f"{session.endpoint.rstrip('/')}/{bucket}"
            parts = urlsplit(session.endpoint.rstrip("/"))
            return f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}"
        suffix = "amazonaws.com.cn" if self._region.startswith("cn-") else "amazonaws.com"
        # A bucket with dots does not match the certificate's wildcard; upper case is not a host name.
        if session.virtual_hosts is False or "." in bucket or bucket != bucket.lower():
            return f"https://s3.{self._region}.{suffix}/{bucket}"
        return f"https://{bucket}.s3.{self._region}.{suffix}"

    def request(self, key: str, query: str, headers: Mapping[str, str]) -> Request:
        """Return a signed request; see `Access.request`."""
        keys = self.session.credentials()
        url = self.base + "/" + quote(key, safe=_KEY_SAFE) + (f"?{query}" if query else "")
        if self._options.requester_pays:
            headers = {**headers, "x-amz-request-payer": "requester"}
        if keys is not None:
            at = None if self._clock is None else time.monotonic() + self._clock
            headers = sign(url, headers, self._region, keys, at)
        return Request(url, headers)

    def repair(self, key: str, request: Request, refused: Refusal) -> bool:  # noqa: ARG002  part of `Access`
        """Follow the bucket to its region, renew keys, go by the store's clock; see `Access.repair`."""
        if refused.code == _SKEWED:
            return self._set_clock(request, refused)
        moved = refused.status in (301, 307) or refused.code in _REGION_CODES
        if refused.region and (moved or (refused.status in (400, 403) and refused.region != self._region)):
            self._region = refused.region
            return True
        return refused.code in _EXPIRED_CODES and self.session.renew()

    def _set_clock(self, request: Request, refused: Refusal) -> bool:
        """Sign by the store's clock from now on; ``False`` when ``request`` was signed by it already."""
        signed_at = calendar.timegm(time.strptime(request.headers.get("X-Amz-Date", _EPOCH), _DATE))
        if refused.clock is None or abs(signed_at - refused.clock) < _SAME_CLOCK:
            return False
        self._clock = refused.clock - time.monotonic()
        return True

    def cause(self, refused: Refusal) -> str:
        """Name the likely cause; see `Access.cause`."""
        if refused.code in _CAUSES:
            return _CAUSES[refused.code]
        if refused.status in (301, 307) or refused.code in _REGION_CODES:
            where = f"it is {refused.region}" if refused.region else "the store does not say which"
            return f"the bucket lies in another region than {self._region} ({where}); set AWS_REGION"
        if refused.status in (401, 403):
            return self._forbidden()
        if refused.status == 404:
            return "nothing is stored there; check the spelling"
        return "check the endpoint and the credentials"

    def _forbidden(self) -> str:
        if self.session.anonymous:
            return "the request was anonymous (anon) and the bucket is not public; give credentials"
        if self.session.credentials() is None:
            return (
                "no AWS credentials were found, so the request was not signed; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile, or a role"
            )
        return (
            "the credentials may not read it, or it does not exist and they may not list it; check the "
            "permission s3:GetObject and the spelling"
        )


class S3Store:
    """A folder (a prefix) of a bucket."""

    def __init__(self, location: Location, options: Mapping[str, object], settings: Settings) -> None:
        self.name = location.text
        self._settings = settings
        self._options = S3Options.parse(options)
        self._bucket, _, self._prefix = location.path.partition("/")
        self._access = S3Access(self._bucket, self._options)
        self._lock = threading.Lock()
        self._transport: HttpTransport | None = None

    @property
    def transport(self) -> HttpTransport:
        """What moves the bytes."""
        with self._lock:
            if self._transport is None:
                pool = Pool(self._settings, self._access.session.ca_bundle, self._options.verify)
                self._transport = HttpTransport(pool, self._settings)
            return self._transport

    def object(self, name: str) -> HttpObject:
        """Return the object of that name in this folder."""
        check_name(name, self.name)
        key = f"{self._prefix}/{name}" if self._prefix else name
        identity = f"{self._access.endpoint}/{self._bucket}/{key}"
        return HttpObject(f"s3://{self._bucket}/{key}", identity, self._access, key)

    def names(self) -> tuple[str, ...] | None:
        """List the folder; ``None`` when that is not allowed."""
        prefix = f"{self._prefix}/" if self._prefix else ""
        found: list[str] = []
        token = ""
        while True:
            try:
                page = self._page(prefix, token)
            except AccessError:
                # Reading objects and listing them are separate permissions: objects may still be readable.
                return None
            keys = [xml_text(key) for key in _LISTED_KEY.findall(page)]
            found += [key[len(prefix) :] for key in keys if key.startswith(prefix)]
            if len(found) > _NAMES_LIMIT:
                raise LocationError(
                    f"{self.name} holds more than {_NAMES_LIMIT} files, so it is no checkpoint's folder"
                )
            more = _MORE.search(page)
            if more is None or "<IsTruncated>true<" not in page:
                return tuple(name for name in found if name and "/" not in name)
            if xml_text(more[1]) == token:
                raise TransferError(f"{self.name}: the listing repeats itself; check the store")
            token = xml_text(more[1])

    def connector(self) -> Connector:
        """Return what makes connections to the bucket's address; see `Store.connector`."""
        secure = self._access.base.startswith("https:")
        return Connector(self._connect, _SECURE_AHEAD if secure else self._settings.max_connections)

    def close(self) -> None:
        """Drop every connection."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()

    def _connect(self) -> None:
        with suppress(LoadstoneError):  # the next request meets it too, and says so
            self.transport.connect(self._access.base)

    def _page(self, prefix: str, token: str) -> str:
        query = f"list-type=2&delimiter=%2F&prefix={quote(prefix, safe='')}"
        if token:
            query += f"&continuation-token={quote(token, safe='')}"
        listing = HttpObject(f"{self.name}/", "", self._access, "", query)
        text = self.transport.read(listing, _LISTING_LIMIT, OpenGate()).decode("utf-8", "replace")
        if "ListBucketResult" not in text:
            raise TransferError(
                f"{self.name}: the answer to a listing is not one; is the endpoint an S3 server?"
            )
        return text


def _check_endpoint(endpoint: str) -> None:
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
    except ValueError:
        valid = False
    if not valid or "@" in parts.netloc:
        raise SettingsError(
            "the S3 endpoint is not of the form https://host:port; correct AWS_ENDPOINT_URL or endpoint_url"
        )
