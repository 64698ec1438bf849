"""AWS credentials and signatures, by botocore's own chain and signer.

botocore resolves keys from the environment, profiles, web identity, SSO, containers and instances, and
renews them; here it is used without its clients, whose construction costs more than a whole first transfer.

Ownership: an `AwsSession` may be used from many threads; its lock guards building and renewing. botocore's
credentials renew themselves under a lock of their own.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadstone.errors import AccessError, SettingsError

_VARIABLES = {
    "loadstone_endpoint_s3": (None, "AWS_ENDPOINT_URL_S3", None, None),
    "loadstone_endpoint": (None, "AWS_ENDPOINT_URL", None, None),
    "loadstone_region": (None, "AWS_REGION", None, None),
    "loadstone_ignore_endpoints": (
        "ignore_configured_endpoint_urls",
        "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS",
        False,
        None,
    ),
}
"""Variables that botocore itself reads only while it builds a client."""

_IGNORED = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "fixed_upload_size",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
        "version_aware",
    }
)
"""Options of s3fs that say nothing about where bytes are."""
_KNOWN = frozenset(
    {
        "anon",
        "client_kwargs",
        "config_kwargs",
        "endpoint_url",
        "key",
        "profile",
        "region",
        "requester_pays",
        "secret",
        "token",
        "use_ssl",
    }
)
_CLIENT = frozenset(
    {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "endpoint_url",
        "region_name",
        "verify",
    }
)
_SHARED: dict[tuple[str, str, str], Any] = {}
_SHARED_LOCK = threading.Lock()
"""Credentials that renew themselves, by profile and files: one walk of the chain serves every store."""
_CONFIG = frozenset({"max_pool_connections", "region_name", "s3", "signature_version"})


@dataclass(frozen=True, slots=True)
class S3Options:
    """``storage_options`` for S3, as s3fs spells them."""

    anonymous: bool = False
    key: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    profile: str | None = None
    endpoint: str = ""
    region: str = ""
    requester_pays: bool = False
    virtual_hosts: bool | None = None
    ca_bundle: str | None = None
    verify: bool = True

    @classmethod
    def parse(cls, options: Mapping[str, object]) -> "S3Options":
        """Read ``options``.

        Raises
        ------
        SettingsError
            One is not known, so that a misspelt ``anon`` is not silently a signed request.
        """
        client = _mapping(options, "client_kwargs", _CLIENT)
        config = _mapping(options, "config_kwargs", _CONFIG)
        _refuse_unknown("storage_options", options, _KNOWN | _IGNORED)
        style = _mapping(config, "s3", None).get("addressing_style")
        verify = client.get("verify", True)
        found = cls(
            anonymous=bool(options.get("anon")) or _is_unsigned(config.get("signature_version")),
            key=_text(options.get("key") or client.get("aws_access_key_id")),
            secret=_text(options.get("secret") or client.get("aws_secret_access_key")),
            token=_text(options.get("token") or client.get("aws_session_token")),
            profile=_text(options.get("profile")) or None,
            endpoint=_text(options.get("endpoint_url") or client.get("endpoint_url")),
            region=_text(options.get("region") or client.get("region_name") or config.get("region_name")),
            requester_pays=bool(options.get("requester_pays")),
            virtual_hosts={"virtual": True, "path": False}.get(_text(style)),
            ca_bundle=verify if isinstance(verify, str) else None,
            verify=verify is not False,
        )
        if bool(found.key) != bool(found.secret):
            raise SettingsError("storage_options give only one of key and secret; a signature needs both")
        return found


@dataclass(frozen=True, slots=True)
class Credentials:
    """One set of keys; never shown."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class AwsSession:
    """What botocore's session says, read once."""

    def __init__(self, options: S3Options) -> None:
        import botocore.session  # noqa: PLC0415  50 to 100 ms, for S3 only

        self._options = options
        self._lock = threading.Lock()
        self._session = botocore.session.Session(profile=options.profile, session_vars=_VARIABLES)
        scoped = self._ask(self._session.get_scoped_config)
        self.region = options.region or self._variable("loadstone_region") or self._variable("region")
        self.endpoint = options.endpoint or self._endpoint(scoped)
        self.ca_bundle = options.ca_bundle or self._variable("ca_bundle") or None
        s3 = scoped.get("s3")
        s3 = s3 if isinstance(s3, dict) else {}
        style = {"virtual": True, "path": False}.get(str(s3.get("addressing_style", "")))
        self.virtual_hosts = style if options.virtual_hosts is None else options.virtual_hosts
        self.anonymous = options.anonymous or _is_unsigned(
            scoped.get("signature_version") or s3.get("signature_version")
        )
        self._source: Any = None  # botocore has no types
        self._found = False

    def credentials(self) -> Credentials | None:
        """Return keys that are valid now; ``None`` when requests go unsigned.

        Raises
        ------
        AccessError
            The chain promises keys and cannot deliver them (an expired SSO login, a broken profile).
        """
        if self.anonymous:
            return None
        if self._options.key:
            return Credentials(self._options.key, self._options.secret, self._options.token or None)
        with self._lock:
            if not self._found:
                self._source = self._ask(self._find)
                self._found = True
            source = self._source
        if source is None:
            return None
        frozen = self._ask(source.get_frozen_credentials)
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def renew(self) -> bool:
        """Ask the chain again; say whether it gives other keys now."""
        before = self.credentials()
        with _SHARED_LOCK:
            _SHARED.clear()
        fresh = AwsSession(self._options)
        after = fresh.credentials()
        with self._lock:
            self._session, self._source, self._found = fresh._session, fresh._source, fresh._found
        return before != after

    def _find(self) -> Any:
        """Walk botocore's chain, or take self-renewing keys that an earlier session found."""
        from botocore.credentials import EnvProvider, RefreshableCredentials  # noqa: PLC0415

        profile = self._options.profile
        if profile is None and (found := EnvProvider().load()) is not None:
            return found
        # Roles and instances answer over the network: a hundred adapters must not ask a hundred times.
        key = (
            profile or self._variable("profile"),
            self._variable("config_file"),
            self._variable("credentials_file"),
        )
        with _SHARED_LOCK:
            if key in _SHARED:
                return _SHARED[key]
        found = self._session.get_credentials()
        if isinstance(found, RefreshableCredentials):
            with _SHARED_LOCK:
                _SHARED[key] = found
        return found

    def _endpoint(self, scoped: Mapping[str, object]) -> str:
        if self._variable("loadstone_ignore_endpoints").lower() == "true":
            return ""
        environment = self._variable("loadstone_endpoint_s3") or self._variable("loadstone_endpoint")
        if environment:
            return environment
        services = _text(scoped.get("services"))
        if services:
            full = self._ask(lambda: self._session.full_config)
            s3 = full.get("services", {}).get(services, {}).get("s3", {})
            if isinstance(s3, dict) and s3.get("endpoint_url"):
                return str(s3["endpoint_url"])
        return _text(scoped.get("endpoint_url"))

    def _variable(self, name: str) -> str:
        return _text(self._ask(lambda: self._session.get_config_variable(name)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        from botocore.exceptions import BotoCoreError  # noqa: PLC0415

        try:
            return question()
        except BotoCoreError as error:
            raise AccessError(
                f"the AWS configuration cannot be used: {error}; correct it, or give key and secret"
            ) from None


def sign(url: str, headers: Mapping[str, str], region: str, keys: Credentials) -> dict[str, str]:
    """Return ``headers`` with an AWS signature (version 4) for a GET of ``url``."""
    from botocore.auth import S3SigV4Auth  # noqa: PLC0415
    from botocore.awsrequest import AWSRequest  # noqa: PLC0415
    from botocore.credentials import ReadOnlyCredentials  # noqa: PLC0415

    request = AWSRequest(method="GET", url=url, headers=dict(headers))
    S3SigV4Auth(ReadOnlyCredentials(keys.key, keys.secret, keys.token), "s3", region).add_auth(request)
    return dict(request.headers.items())


def _mapping(options: Mapping[str, object], name: str, known: frozenset[str] | None) -> Mapping[str, object]:
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise SettingsError(f"{name} is a {type(value).__name__}; give a mapping")
    if known is not None:
        _refuse_unknown(name, value, known)
    return value


def _refuse_unknown(where: str, options: Mapping[str, object], known: frozenset[str]) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise SettingsError(
            f"{where} has {unknown[0]!r}, which is not known; known are {', '.join(sorted(known - _IGNORED))}"
        )


def _is_unsigned(value: object) -> bool:
    # botocore.UNSIGNED is an object of a class of its own; configuration files write the word.
    return type(value).__name__ == "UNSIGNED" or value == "unsigned" or "UNSIGNED" in repr(value)


def _text(value: object) -> str:
    return "" if value is None else str(value)
