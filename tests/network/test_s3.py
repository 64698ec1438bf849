"""What is particular to S3: listings, regions, credentials and their renewal, addresses."""

import datetime as dt
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest
from tests.support.faulty_server import FaultyServer, Seen
from tests.support.seaweed import ACCESS_KEY, BUCKET, PUBLIC_BUCKET, SECRET_KEY, Seaweed

from loadstone.errors import AccessError, LoadstoneError, NotFoundError, SettingsError, TransferError
from loadstone.loader.locations import parse_location
from loadstone.loader.stores.s3 import S3Access
from loadstone.loader.stores.signing import S3Options
from loadstone.loader.stores.sigv4 import Credentials, sign
from loadstone.loader.stores.store import OpenGate, Store, open_store
from loadstone.settings import Settings

GATE = OpenGate()
Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture(autouse=True)
def no_aws_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the tests from the credentials of whoever runs them."""
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_PROFILE",
        "AWS_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def fake() -> Iterator[FaultyServer]:
    with FaultyServer({"/bucket/run/m": b"x" * 1000}) as server:
        yield server


def fake_store(server: FaultyServer, settings: Settings, **options: object) -> Store:
    keys = {"key": "AKIA", "secret": "hush", "endpoint_url": server.url}
    return open_store(parse_location("s3://bucket/run"), {**keys, **options}, settings)


def read(store: Store, name: str = "m") -> bytes:
    return store.transport.probe(store.object(name), 65536, None, GATE).data


def test_a_listing_over_pages_has_every_name_once(seaweed: Seaweed, settings: Settings) -> None:
    client = seaweed.client()
    wanted = sorted(f"shard-{number:05}.safetensors" for number in range(2100))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: client.put_object(Bucket=BUCKET, Key=f"many/{name}", Body=b""), wanted))
    for key in (
        "many/",
        "many/deeper/",
        "many/deeper/shard",
        "many2/sibling",
        "many-more/sibling",
        "many.json",
    ):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    store = open_store(parse_location(f"s3://{BUCKET}/many"), seaweed.options, settings)
    assert sorted(store.names() or ()) == wanted


def test_a_whole_bucket_can_be_the_folder(seaweed: Seaweed, settings: Settings) -> None:
    seaweed.put("at-the-top", b"here", PUBLIC_BUCKET)
    store = open_store(parse_location(f"s3://{PUBLIC_BUCKET}"), seaweed.options, settings)
    assert "at-the-top" in (store.names() or ())
    assert read(store, "at-the-top") == b"here"


def test_anonymous_reads_work_where_the_bucket_is_public(seaweed: Seaweed, settings: Settings) -> None:
    seaweed.put("open/m", b"for all", PUBLIC_BUCKET)
    seaweed.put("closed/m", b"for some")
    options = {"anon": True, "endpoint_url": seaweed.endpoint}
    assert read(open_store(parse_location(f"s3://{PUBLIC_BUCKET}/open"), options, settings)) == b"for all"
    with pytest.raises(AccessError, match="anonymous"):
        read(open_store(parse_location(f"s3://{BUCKET}/closed"), options, settings))


def test_without_any_credentials_the_request_goes_unsigned_and_says_so(
    seaweed: Seaweed, settings: Settings
) -> None:
    seaweed.put("open/m", b"for all", PUBLIC_BUCKET)
    options = {"endpoint_url": seaweed.endpoint}
    assert read(open_store(parse_location(f"s3://{PUBLIC_BUCKET}/open"), options, settings)) == b"for all"
    with pytest.raises(AccessError, match="no AWS credentials were found"):
        read(open_store(parse_location(f"s3://{BUCKET}/open"), options, settings))


def test_names_is_none_where_listing_is_refused_but_reading_works(
    seaweed: Seaweed, settings: Settings
) -> None:
    seaweed.put("readable/m", b"bytes")
    store = open_store(parse_location(f"s3://{BUCKET}/readable"), seaweed.reader_options, settings)
    assert store.names() is None
    assert read(store) == b"bytes"


@pytest.mark.parametrize(
    ("change", "words"),
    [({"secret": "wrong"}, "secret key is wrong"), ({"key": "nobody"}, "access key is not known")],
)
def test_wrong_keys_are_named(
    change: dict[str, str], words: str, seaweed: Seaweed, settings: Settings
) -> None:
    store = open_store(parse_location(f"s3://{BUCKET}/x"), {**seaweed.options, **change}, settings)
    with pytest.raises(AccessError, match=words) as caught:
        read(store)
    assert SECRET_KEY not in str(caught.value)


def test_a_missing_bucket_is_named(seaweed: Seaweed, settings: Settings) -> None:
    store = open_store(parse_location("s3://no-such-bucket/x"), seaweed.options, settings)
    with pytest.raises(NotFoundError, match="no such bucket"):
        store.names()


def test_the_environment_reaches_the_server(
    seaweed: Seaweed, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    seaweed.put("env/m", b"by variables")
    assert read(open_store(parse_location(f"s3://{BUCKET}/env"), None, settings)) == b"by variables"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweed.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert read(open_store(parse_location(f"s3://{BUCKET}/env"), None, settings)) == b"by variables"


@pytest.mark.parametrize("how", ["option", "variable", "service"])
def test_a_profile_gives_keys_and_endpoint(
    how: str, seaweed: Seaweed, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n"
    endpoint = f"endpoint_url={seaweed.endpoint}\n"
    if how == "service":
        text = f"[profile team]\n{keys}services=local\n[services local]\ns3=\n  {endpoint}"
    else:
        text = f"[profile team]\n{keys}{endpoint}"
    (tmp_path / "config").write_text(text)
    if how == "variable":
        monkeypatch.setenv("AWS_PROFILE", "team")
    seaweed.put("profile/m", b"by profile")
    options = None if how == "variable" else {"profile": "team"}
    assert read(open_store(parse_location(f"s3://{BUCKET}/profile"), options, settings)) == b"by profile"


def test_keys_that_renew_themselves_are_asked_for_once(
    fake: FaultyServer, settings: Settings, tmp_path: Path
) -> None:
    script = tmp_path / "keys"
    script.write_text(
        "#!/bin/sh\necho asked >> " + str(tmp_path / "log") + "\n"
        """echo '{"Version": 1, "AccessKeyId": "A", "SecretAccessKey": "B","""
        """ "Expiration": "2999-01-01T00:00:00Z"}'\n"""
    )
    script.chmod(0o755)
    (tmp_path / "config").write_text(f"[profile role]\ncredential_process={script}\n")
    for _ in range(3):
        options = {"profile": "role", "endpoint_url": fake.url}
        assert read(open_store(parse_location("s3://bucket/run"), options, settings)) == b"x" * 1000
    assert (tmp_path / "log").read_text() == "asked\n"


def test_a_missing_profile_is_named(settings: Settings) -> None:
    with pytest.raises(AccessError, match="nowhere"):
        read(open_store(parse_location("s3://bucket/x"), {"profile": "nowhere"}, settings))


def signed_region(seen: Seen) -> str:
    match = re.search(r"Credential=[^/]+/\d+/([^/]+)/s3/", seen.headers.get("Authorization", ""))
    return match[1] if match else ""


@pytest.mark.parametrize(
    "reply",
    [
        (301, {"x-amz-bucket-region": "eu-north-1"}, b"<Error><Code>PermanentRedirect</Code></Error>"),
        (400, {}, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-north-1</Region></Error>"),
        (403, {"x-amz-bucket-region": "eu-north-1"}, b"<Error><Code>AccessDenied</Code></Error>"),
    ],
    ids=["301", "400", "403"],
)
def test_a_bucket_in_another_region_is_followed_once_and_remembered(
    reply: Reply, fake: FaultyServer, settings: Settings
) -> None:
    fake.intercept = lambda seen: None if signed_region(seen) == "eu-north-1" else reply
    store = fake_store(fake, settings, region="us-west-2")
    assert read(store) == b"x" * 1000
    assert read(store) == b"x" * 1000
    assert [signed_region(seen) for seen in fake.seen] == ["us-west-2", "eu-north-1", "eu-north-1"]


def test_a_region_that_never_fits_is_named(fake: FaultyServer, settings: Settings) -> None:
    fake.intercept = lambda seen: (301, {"x-amz-bucket-region": f"other-{len(fake.seen)}"}, b"")
    with pytest.raises(LoadstoneError, match="another region"):
        read(fake_store(fake, replace(settings, retry_seconds=0.0)))


def test_an_expired_token_is_an_error_that_says_so(fake: FaultyServer, settings: Settings) -> None:
    fake.intercept = lambda seen: (
        400,
        {},
        b"<Error><Code>ExpiredToken</Code><Message>expired</Message></Error>",
    )
    with pytest.raises(AccessError, match="session token has expired"):
        read(fake_store(fake, settings, token="stale"))
    assert len(fake.seen) == 1


def test_keys_renewed_in_the_profile_are_taken_up(
    fake: FaultyServer, settings: Settings, tmp_path: Path
) -> None:
    def write(token: str) -> None:
        text = f"[default]\naws_access_key_id=A\naws_secret_access_key=B\naws_session_token={token}\n"
        (tmp_path / "credentials").write_text(text)

    def fresh_only(seen: Seen) -> Reply | None:
        stale = seen.headers.get("X-Amz-Security-Token") == "stale"
        return (400, {}, b"<Error><Code>ExpiredToken</Code></Error>") if stale else None

    write("stale")
    fake.intercept = fresh_only
    store = open_store(parse_location("s3://bucket/run"), {"endpoint_url": fake.url}, settings)
    with pytest.raises(AccessError, match="expired"):
        read(store)
    write("fresh")
    assert read(store) == b"x" * 1000


def move_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let this process's wall clock be wrong, as after a jump."""
    true_time, true_gmtime = time.time, time.gmtime
    monkeypatch.setattr(time, "time", lambda: true_time() + seconds)
    monkeypatch.setattr(
        time, "gmtime", lambda at=None: true_gmtime(true_time() + seconds if at is None else at)
    )


@pytest.mark.parametrize("days", [-4000, -1, 1, 4000])
def test_a_wrong_clock_is_corrected_by_the_stores(
    days: int, seaweed: Seaweed, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seaweed.put("clock/m", b"x" * 1000)
    store = open_store(parse_location(f"s3://{BUCKET}/clock"), seaweed.options, settings)
    with monkeypatch.context() as wrong:
        move_clock(wrong, days * 86_400.0)
        assert read(store) == b"x" * 1000
        assert store.names() == ("m",)
        with ThreadPoolExecutor(8) as pool:  # all of them are refused once, and all are put right
            fresh = open_store(parse_location(f"s3://{BUCKET}/clock"), seaweed.options, settings)
            assert set(pool.map(lambda _: read(fresh), range(16))) == {b"x" * 1000}
            fresh.close()
        move_clock(wrong, -2 * days * 86_400.0)  # again, in the middle of the work
        assert read(store) == b"x" * 1000
    assert read(store) == b"x" * 1000
    store.close()


def test_a_clock_that_cannot_be_corrected_is_named(fake: FaultyServer, settings: Settings) -> None:
    fake.intercept = lambda seen: (403, {}, b"<Error><Code>RequestTimeTooSkewed</Code></Error>")
    with pytest.raises(AccessError, match="set the clock"):
        read(fake_store(fake, settings))
    assert len(fake.seen) == 1  # the store's clock is this one


def test_requester_pays_is_said_and_signed(fake: FaultyServer, settings: Settings) -> None:
    read(fake_store(fake, settings, requester_pays=True))
    assert fake.seen[0].headers["x-amz-request-payer"] == "requester"
    assert "x-amz-request-payer" in fake.seen[0].headers["Authorization"]


def test_a_listing_that_repeats_itself_ends(fake: FaultyServer, settings: Settings) -> None:
    page = (
        b"<ListBucketResult><IsTruncated>true</IsTruncated><Contents><Key>run/a&amp;b&#233;</Key></Contents>"
        b"<NextContinuationToken>same</NextContinuationToken></ListBucketResult>"
    )
    fake.intercept = lambda seen: (200, {}, page)
    with pytest.raises(TransferError, match="repeats itself"):
        fake_store(fake, settings).names()


def test_an_endpoint_that_is_no_s3_server_is_named(fake: FaultyServer, settings: Settings) -> None:
    fake.intercept = lambda seen: (200, {}, b"hello")
    with pytest.raises(TransferError, match="is the endpoint an S3 server"):
        fake_store(fake, settings).names()


@pytest.mark.parametrize(
    ("options", "bucket", "key", "url"),
    [
        ({}, "models", "a/b", "https://models.s3.us-east-1.amazonaws.com/a/b"),
        (
            {"region": "eu-west-1"},
            "models",
            "a b+c%#ü",
            "https://models.s3.eu-west-1.amazonaws.com/a%20b%2Bc%25%23%C3%BC",
        ),
        ({"region": "cn-north-1"}, "models", "k", "https://models.s3.cn-north-1.amazonaws.com.cn/k"),
        ({}, "my.models", "k", "https://s3.us-east-1.amazonaws.com/my.models/k"),
        ({"endpoint_url": "http://10.0.0.1:9000/"}, "models", "k", "http://10.0.0.1:9000/models/k"),
        (
            {
                "client_kwargs": {"endpoint_url": "https://store"},
                "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            },
            "models",
            "k",
            "https://models.store/k",
        ),
    ],
)
def test_addresses(options: dict[str, object], bucket: str, key: str, url: str) -> None:
    access = S3Access(bucket, S3Options.parse({"anon": True, **options}))
    assert access.request(key, "", {}).url == url


@pytest.mark.parametrize(
    ("url", "headers", "token"),
    [
        ("https://models.s3.eu-west-1.amazonaws.com/a%20b/%C3%BC", {"Range": "bytes=0-9"}, None),
        ("https://s3.eu-west-1.amazonaws.com/models/k", {"If-Match": '"a  b"', "User-Agent": "x"}, "t"),
        ("http://localhost:80/models/?list-type=2&prefix=x%2F&delimiter=%2F&a-b=1&a=2", {}, None),
        ("http://[::1]:9000/models/k", {"x-amz-request-payer": "requester", "Expect": "x"}, "t/+="),
        ("http://10.0.0.1:9000/models/k?versions", {"Accept-Encoding": "identity"}, None),
        ("https://Store.example:443/k", {"Host": "other"}, None),
    ],
)
def test_the_signature_is_botocores_own(
    url: str, headers: dict[str, str], token: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = dt.datetime(2026, 11, 29, 12, 30, 45, tzinfo=dt.UTC)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: at)
    theirs = botocore.awsrequest.AWSRequest("GET", url, headers=dict(headers))
    keys = botocore.credentials.Credentials("AKIA", "hush", token)
    botocore.auth.S3SigV4Auth(keys, "s3", "eu-west-1").add_auth(theirs)
    ours = sign(url, headers, "eu-west-1", Credentials("AKIA", "hush", token), at.timestamp())
    assert ours == dict(theirs.headers.items())


def test_a_signed_request_shows_no_secret() -> None:
    access = S3Access("models", S3Options.parse({"key": "AKIA", "secret": "hush", "token": "t"}))
    request = access.request("k", "", {})
    assert "Authorization" in request.headers
    assert "hush" not in repr(request)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"anonn": True}, "'anonn'"),
        ({"client_kwargs": {"endpoint": "x"}}, "'endpoint'"),
        ({"client_kwargs": 5}, "mapping"),
        ({"key": "only"}, "both"),
    ],
)
def test_options_that_are_not_understood_are_refused(
    options: dict[str, object], words: str, settings: Settings
) -> None:
    with pytest.raises(SettingsError, match=words):
        open_store(parse_location("s3://bucket/x"), options, settings)


@pytest.mark.parametrize(
    "endpoint", ["localhost:9000", "ftp://x", "http://", "http://u:p@host", "http://h:port"]
)
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str, settings: Settings) -> None:
    with pytest.raises(SettingsError, match="endpoint"):
        read(open_store(parse_location("s3://bucket/x"), {"endpoint_url": endpoint}, settings))
