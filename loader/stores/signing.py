"""AWS credentials, by botocore's own chain, and what else the environment says about S3.

botocore resolves keys from profiles, web identity, SSO, containers and instances, and renews them; here it
is used without its clients, whose construction costs more than a whole first transfer, and only when the keys
are not in the environment, where they are taken by its rules.

Ownership: an `AwsSession` may be used from many threads; its lock guards building and renewing. botocore's
credentials renew themselves under a lock of their own.
"""

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadstone.errors import SettingsError
from loadstone.loader.stores.profiles import AwsProfile, unusable
from loadstone.loader.stores.sigv4 import Credentials
from loadstone.settings import variable

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
_REGION = re.compile(r"[\w.-]*", re.ASCII)
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


class AwsSession:
    """What the environment and a profile say, read once, and the keys that follow from it."""

    def __init__(self, options: S3Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        profile = AwsProfile(options.profile)
        self._files = profile.name, profile.config_file, profile.credentials_file
        self.region = options.region or profile.get("AWS_REGION", "AWS_DEFAULT_REGION", key="region")
        if not _REGION.fullmatch(self.region):
            raise unusable(f"{self.region[:40]!r} is no region's name")
        self.endpoint = options.endpoint or _endpoint(profile)
        self.ca_bundle = options.ca_bundle or profile.get("AWS_CA_BUNDLE", key="ca_bundle") or None
        s3 = profile.values.get("s3")
        s3 = s3 if isinstance(s3, dict) else {}
        style = {"virtual": True, "path": False}.get(str(s3.get("addressing_style", "")))
        self.virtual_hosts = style if options.virtual_hosts is None else options.virtual_hosts
        self.anonymous = options.anonymous or _is_unsigned(
            profile.values.get("signature_version") or s3.get("signature_version")
        )
        self._source: Any = None  # botocore has no types
        self._found = False

    def credentials(self) -> Credentials | None:
        """Return keys that are valid now; ``None`` when requests go unsigned.

        Raises
        ------
        AccessError
            The chain promises keys and cannot deliver them (an expired SSO login, a broken profile), or
            gives something that cannot be sent.
        """
        if self.anonymous:
            return None
        return _sendable(self._keys())

    def _keys(self) -> Credentials | None:
        if self._options.key:
            return Credentials(self._options.key, self._options.secret, self._options.token or None)
        if self._options.profile is None and (keys := _from_environment()) is not None:
            return keys
        with self._lock:
            if not self._found:
                self._source = _ask(self._find)
                self._found = True
            source = self._source
        if source is None:
            return None
        frozen = _ask(source.get_frozen_credentials)
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)

    def renew(self) -> bool:
        """Ask the chain again; say whether it gives other keys now."""
        before = self.credentials()
        with _SHARED_LOCK:
            _SHARED.clear()
        fresh = AwsSession(self._options)
        after = fresh.credentials()
        with self._lock:
            self._source, self._found = fresh._source, fresh._found
        return before != after

    def _find(self) -> Any:
        """Walk botocore's chain, or take self-renewing keys that an earlier session found."""
        import botocore.session  # noqa: PLC0415  a tenth of a second, where keys do not lie at hand
        from botocore.credentials import RefreshableCredentials  # noqa: PLC0415

        # Roles and instances answer over the network: a hundred adapters must not ask a hundred times.
        with _SHARED_LOCK:
            if self._files in _SHARED:
                return _SHARED[self._files]
        found = botocore.session.Session(profile=self._options.profile).get_credentials()
        if isinstance(found, RefreshableCredentials):
            with _SHARED_LOCK:
                _SHARED[self._files] = found
        return found


def _from_environment() -> Credentials | None:
    """Return keys that the environment holds for good; whatever else it says of keys is left to botocore."""
    key, secret = variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY")
    if not (key and secret) or variable("AWS_CREDENTIAL_EXPIRATION"):
        return None
    return Credentials(key, secret, variable("AWS_SESSION_TOKEN") or variable("AWS_SECURITY_TOKEN") or None)


def _sendable(keys: Credentials | None) -> Credentials | None:
    """Refuse keys that no header can carry, such as one that was read from a file with its line's end."""
    if keys is not None:
        sent = {"access key": keys.key, "session token": keys.token or ""}
        for name, text in {**sent, "secret key": keys.secret}.items():
            if not text.isprintable() or (name in sent and not text.isascii()):
                raise unusable(f"the {name} holds a line's end or another character that no key has")
    return keys


def _endpoint(profile: AwsProfile) -> str:
    ignored = profile.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", key="ignore_configured_endpoint_urls")
    if ignored.lower() == "true":
        return ""
    return (
        profile.get("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        or _text(profile.service("s3").get("endpoint_url"))
        or profile.get(key="endpoint_url")
    )


def _ask(question: Callable[[], Any]) -> Any:
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415

    try:
        return question()
    except (BotoCoreError, ClientError) as error:
        raise unusable(error) from None
    except Exception as error:  # noqa: BLE001  keys may come from anybody's program, or from a file that is not there
        raise unusable(f"its keys cannot be had ({type(error).__name__}: {error})") from None


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
