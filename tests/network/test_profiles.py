"""What the AWS variables and files mean, compared with what botocore's own session says of them."""

from pathlib import Path

import botocore.session
import pytest

from loadstone.errors import AccessError
from loadstone.loader.stores.profiles import AwsProfile
from loadstone.loader.stores.signing import AwsSession, S3Options

_CONFIG = """\
[default]
region = eu-west-1
ca_bundle = /ca/default
[profile team]
region = eu-north-1
s3 =
  addressing_style = virtual
[profile bare]
"""
_KEYS = """\
[default]
aws_access_key_id = D
aws_secret_access_key = DS
[team]
aws_access_key_id = T
aws_secret_access_key = TS
aws_session_token = TT
[only]
aws_access_key_id = O
aws_secret_access_key = OS
region = us-west-2
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_PROFILE"),
        *("AWS_DEFAULT_REGION", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "$HOME/keys")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    (tmp_path / "config").write_text(_CONFIG)
    (tmp_path / "keys").write_text(_KEYS)
    return tmp_path


@pytest.mark.parametrize("profile", [None, "default", "team", "only", "bare"])
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"AWS_PROFILE": "team"},
        {"AWS_PROFILE": "team", "AWS_DEFAULT_PROFILE": "only"},
        {"AWS_DEFAULT_REGION": "sa-east-1", "AWS_CA_BUNDLE": "/ca/env"},
        {"AWS_ACCESS_KEY_ID": "E", "AWS_SECRET_ACCESS_KEY": "ES"},
        {"AWS_ACCESS_KEY_ID": "E", "AWS_SECRET_ACCESS_KEY": "ES", "AWS_SESSION_TOKEN": "ET"},
        {"AWS_ACCESS_KEY_ID": "E", "AWS_SECRET_ACCESS_KEY": "ES", "AWS_PROFILE": "team"},
    ],
    ids=lambda variables: "+".join(variables) or "none",
)
@pytest.mark.usefixtures("files")
def test_profiles_mean_what_botocore_says(
    profile: str | None, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ours = AwsSession(S3Options(profile=profile))
    theirs = botocore.session.Session(profile=profile)
    assert ours.region == (theirs.get_config_variable("region") or "")
    assert ours.ca_bundle == theirs.get_config_variable("ca_bundle")
    assert ours.virtual_hosts == ({"virtual": True}.get(style(theirs)))
    found, expected = ours.credentials(), theirs.get_credentials()
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        keys = expected.get_frozen_credentials()
        assert (found.key, found.secret, found.token) == (keys.access_key, keys.secret_key, keys.token)


def style(session: botocore.session.Session) -> str:
    found = session.get_scoped_config().get("s3", {}).get("addressing_style", "")
    return str(found)


@pytest.mark.usefixtures("files")
def test_half_a_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "E")
    with pytest.raises(AccessError, match="AWS_SECRET_ACCESS_KEY"):
        AwsSession(S3Options()).credentials()


def test_a_damaged_file_is_named(files: Path) -> None:
    (files / "config").write_text("region = nowhere\n")
    with pytest.raises(AccessError, match="config"):
        AwsProfile(None)


def test_a_profile_that_is_nowhere_is_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(AccessError, match="gone"):
        AwsProfile(None)
    (files / "config").unlink()
    (files / "keys").unlink()
    with pytest.raises(AccessError, match="gone"):
        AwsProfile(None)


def test_without_files_there_is_nothing(files: Path) -> None:
    (files / "config").unlink()
    (files / "keys").unlink()
    profile = AwsProfile(None)
    assert (profile.get(key="region"), dict(profile.values), dict(profile.service("s3"))) == ("", {}, {})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("AWS_ACCESS_KEY_ID", "E\n", "access key"),
        ("AWS_ACCESS_KEY_ID", "ключ", "access key"),
        ("AWS_SECRET_ACCESS_KEY", "S\n", "secret key"),
        ("AWS_SECRET_ACCESS_KEY", "S\udcff", "secret key"),
        ("AWS_SESSION_TOKEN", "T\n", "session token"),
        ("AWS_REGION", "us east\n1", "region"),
        ("AWS_REGION", "x/y", "region"),
    ],
)
@pytest.mark.usefixtures("files")
def test_what_cannot_be_sent_is_named(
    name: str, value: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "E")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ES")
    monkeypatch.setenv(name, value)
    with pytest.raises(AccessError, match=named) as caught:
        AwsSession(S3Options()).credentials()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "credential_process = /nonexistent/program",
        "credential_process = echo no keys",
        "credential_process = echo []",
        "role_arn = arn:aws:iam::1:role/x\nweb_identity_token_file = /nonexistent/token",
    ],
)
def test_a_source_of_keys_that_fails_is_named(text: str, files: Path) -> None:
    (files / "config").write_text(f"[default]\nregion = eu-west-1\n{text}\n")
    (files / "keys").unlink()
    with pytest.raises(AccessError, match="keys cannot be had"):
        AwsSession(S3Options()).credentials()
