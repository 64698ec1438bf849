"""What people write, understood or refused, and never printed with its secrets."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadstone.errors import LoadstoneError, LocationError, TransferError
from loadstone.loader.locations import parse_location, redact
from loadstone.loader.stores.store import OpenGate, open_store
from loadstone.settings import Settings


@pytest.mark.parametrize(
    ("text", "scheme", "shown", "path"),
    [
        ("/data/model", "file", "/data/model", "/data/model"),
        ("/data/a b#c%20?d", "file", "/data/a b#c%20?d", "/data/a b#c%20?d"),
        ("file:///data/a%20b", "file", "/data/a b", "/data/a b"),
        ("file://localhost/data", "file", "/data", "/data"),
        ("s3://bucket", "s3", "s3://bucket", "bucket"),
        ("S3://bucket/run/", "s3", "s3://bucket/run", "bucket/run"),
        ("s3a://bucket/run", "s3", "s3://bucket/run", "bucket/run"),
        ("s3://bucket/a b+c%20#d?e", "s3", "s3://bucket/a b+c%20#d?e", "bucket/a b+c%20#d?e"),
        ("https://Host.example/m/", "https", "https://host.example/m", "/m"),
        ("https://host", "https", "https://host/", "/"),
        ("http://host:8080/a b/ü", "http", "http://host:8080/a%20b/%C3%BC", "/a%20b/%C3%BC"),
        ("http://[::1]:80/x#part", "http", "http://[::1]:80/x", "/x"),
        ("https://u:p@host/x?sig=1", "https", "https://host/x?…", "/x"),
        ("memory://folder/x", "memory", "memory://folder/x", "folder/x"),
        ("sftp://u:p@host/x", "sftp", "sftp://host/x", "host/x"),
    ],
)
def test_locations_that_are_understood(text: str, scheme: str, shown: str, path: str) -> None:
    found = parse_location(text)
    assert (found.scheme, found.text, found.path) == (scheme, shown, path)
    assert found.is_local == (scheme == "file")


def test_a_relative_path_is_made_absolute_and_links_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert parse_location("link/x").path == str(tmp_path / "link" / "x")
    assert parse_location(Path("link")).path == str(tmp_path / "link")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse_location("~/x").path == str(tmp_path / "x")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "a\0b",
        "a\ud800b",
        "s3://bucket/a\nb",
        "s3://bucket/a\udcff",
        "https://a\udcffb/x",
        "memory://a\udcff",
        "s3://",
        "s3:///key",
        "s3://-bad/x",
        "s3://key:secret@bucket/x",
        "s3://arn:aws:s3:eu-west-1:1:accesspoint/x",
        "https://",
        "https:///path",
        "http://host:port/",
        "http://[::1/",
        "nosuch://x/y",
        "file://elsewhere/x",
        "file:///a%00b",
        "memory::s3://x",
        " s3://bucket/x",
        "zip://a::s3://b",
        "~nobody-of-that-name/x",
    ],
)
def test_locations_that_are_refused(text: str) -> None:
    with pytest.raises(LocationError) as caught:
        parse_location(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["/data/run", "s3://bucket/run", "https://host/run?sig=1", "memory://folder/run"]
)
@pytest.mark.parametrize("name", ["model.safetensors", "a b+c#d%20?e.bin", "größe"])
def test_a_child_has_its_parent_and_name(text: str, name: str) -> None:
    folder = parse_location(text)
    child = folder.child(name)
    assert child.parent() == (folder, name)
    assert child.secrets == folder.secrets
    assert copy.copy(child) == pickle.loads(pickle.dumps(child)) == child


@pytest.mark.parametrize("text", ["s3://bucket", "https://host/", "memory://x", "/"])
def test_what_names_no_file_has_no_parent(text: str) -> None:
    with pytest.raises(LocationError, match="names no file"):
        parse_location(text).parent()


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        found = parse_location(text)
    except LocationError:
        return
    assert found.text
    assert parse_location(found.url() if found.is_web else found.text).path == found.path


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/"), min_size=1, max_size=30)
)
def test_any_file_name_survives_every_kind_of_location(name: str) -> None:
    for text in ("/data", "s3://bucket/run", "https://host/run?token=1"):
        folder = parse_location(text)
        if name in (".", ".."):
            with pytest.raises(LocationError):
                folder.child(name)
        else:
            assert folder.child(name).parent()[1] == name


def test_secrets_are_kept_for_requests_and_out_of_everything_else() -> None:
    found = parse_location("https://user:swordfish@host/run?X-Amz-Signature=sesame")
    assert found.child("m").url() == "https://user:swordfish@host/run/m?X-Amz-Signature=sesame"
    for text in (repr(found), str(found), found.text, repr(found.child("m")), repr(found.secrets)):
        assert "swordfish" not in text
        assert "sesame" not in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://u:p@h/x?sig=1 for more", "see https://h/x?… for more"),
        ("'s3://k:s@b/x'", "'s3://b/x'"),
        ("nothing here? no: a@b", "nothing here? no: a@b"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_identities_differ_where_a_query_chooses_the_object_and_not_by_signatures() -> None:
    def identity(query: str) -> str:
        store = open_store(parse_location(f"https://host/run?{query}"), None, Settings())
        return store.object("m").identity

    assert identity("X-Amz-Signature=1&X-Amz-Date=2") == identity("X-Amz-Signature=3") == "https://host/run/m"
    assert identity("sv=1&sig=2&se=3") == "https://host/run/m"
    assert identity("file=a") != identity("file=b")
    assert "hush" not in identity("token=hush")


def test_a_local_folder_is_not_a_store() -> None:
    with pytest.raises(LoadstoneError, match="local"):
        open_store(parse_location("/data"), None, Settings())


@pytest.mark.parametrize("host", ["a..b", "a" * 80 + ".example"])
def test_a_host_that_cannot_be_is_named(host: str) -> None:
    store = open_store(parse_location(f"http://{host}/m"), None, Settings())
    with pytest.raises(TransferError, match="cannot be the name of a host") as caught:
        store.transport.probe(store.object("x"), 8, None, OpenGate())
    assert "attempt" not in str(caught.value)


@pytest.mark.parametrize("wrong", [3, None, b"model", ["model"]])
def test_what_is_no_location_at_all_is_refused(wrong: Any) -> None:
    with pytest.raises(LocationError, match=type(wrong).__name__):
        parse_location(wrong)
