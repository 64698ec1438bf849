"""Adapters come from the configured roots, and nothing else is looked at."""

import os
from pathlib import Path

import pytest

from loadstone.adapters.roots import Roots
from loadstone.errors import AdapterError, LocationError, NotFoundError


def folder(path: Path) -> Path:
    """Make an adapter's folder; its files are never read here."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder(tmp_path / "root" / "good")
    folder(tmp_path / "root" / "team" / "nested")
    folder(tmp_path / "secret")
    folder(tmp_path / "root-sibling" / "x")
    return tmp_path / "root"


def test_a_name_is_found_in_its_root(root: Path) -> None:
    (place,) = Roots([str(root)]).candidates("good")
    assert place.address == place.text == str(root / "good")


def test_roots_are_searched_in_order(root: Path, tmp_path: Path) -> None:
    folder(tmp_path / "second" / "good")
    roots = Roots([str(tmp_path / "second"), str(root), "s3://bucket/adapters"])
    assert [place.text for place in roots.candidates("good")] == [
        str(tmp_path / "second" / "good"),
        str(root / "good"),
        "s3://bucket/adapters/good",
    ]


def test_a_name_without_a_folder_is_in_no_local_root(root: Path) -> None:
    assert Roots([str(root)]).candidates("absent") == []


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "a/b", "%2e%2e", "a\0b", ""])
def test_names_that_could_lead_out_are_refused(root: Path, name: str) -> None:
    with pytest.raises(AdapterError):
        Roots([str(root)]).candidates(name)


def test_locations_inside_a_root_are_allowed(root: Path) -> None:
    roots = Roots([str(root)])
    for text in (str(root / "good"), f"{root}/good/", f"file://{root}/good", "good", "good/"):
        assert [place.address for place in roots.place(text)] == [str(root / "good")]
    assert [place.address for place in roots.place("team/nested")] == [str(root / "team" / "nested")]


@pytest.mark.parametrize(
    "inner",
    [
        "../secret",
        "good/../../secret",
        "good/..",
        "%2e%2e/secret",
        "good/%2e%2e/%2e%2e/secret",
        "..\\secret",
        "good\0",
        "good\n",
    ],
)
def test_paths_that_could_lead_out_are_refused(root: Path, inner: str) -> None:
    roots = Roots([str(root)])
    for text in (inner, f"{root}/{inner}", f"file://{root}/{inner}"):
        with pytest.raises((LocationError, NotFoundError)):
            roots.place(text)


@pytest.mark.parametrize("text", ["./good", "good/./", "good//x", "."])
def test_relative_paths_are_written_plainly(root: Path, text: str) -> None:
    with pytest.raises(LocationError, match="plainly"):
        Roots([str(root)]).place(text)


@pytest.mark.parametrize(
    "text",
    [
        "/etc",
        "/",
        "~/adapter",
        "s3://bucket/x",
        "https://host/x",
        "file:///etc",
        "gs://bucket/x",
        "http:/x",
        "",
    ],
)
def test_other_places_are_refused(root: Path, text: str) -> None:
    with pytest.raises(LocationError):
        Roots([str(root)]).place(text)


def test_a_folder_whose_name_begins_like_the_root_is_outside(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LocationError, match="outside"):
        Roots([str(root)]).place(str(tmp_path / "root-sibling" / "x"))


def test_links_out_of_the_root_are_refused(root: Path, tmp_path: Path) -> None:
    (root / "escape").symlink_to(tmp_path / "secret")
    inner = folder(root / "files")
    (inner / "adapter_model.safetensors").unlink()
    (inner / "adapter_model.safetensors").symlink_to(tmp_path / "secret" / "adapter_model.safetensors")
    roots = Roots([str(root)])
    for name in ("escape", "files"):
        with pytest.raises(LocationError, match="link"):
            roots.candidates(name)
        with pytest.raises(LocationError, match="link"):
            roots.place(str(root / name))


def test_links_inside_the_root_are_followed_as_the_hf_cache_makes_them(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--x"
    snapshot = cache / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, name in enumerate(("adapter_config.json", "adapter_model.safetensors")):
        (cache / "blobs" / str(number)).write_bytes(b"{}")
        (snapshot / name).symlink_to(Path("..", "..", "blobs", str(number)))
    roots = Roots([str(tmp_path / "hub")])
    assert roots.place(str(snapshot))[0].address == str(snapshot)
    assert roots.place("models--org--x/snapshots/abc")[0].address == str(snapshot)


def test_a_root_that_is_itself_a_link_works(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    assert Roots([str(tmp_path / "link")]).candidates("good")[0].address == str(tmp_path / "link" / "good")


def test_pipes_and_link_loops_are_refused_without_being_opened(root: Path) -> None:
    inner = folder(root / "pipe")
    (inner / "adapter_model.safetensors").unlink()
    os.mkfifo(inner / "adapter_model.safetensors")
    (root / "loop").mkdir()
    (root / "loop" / "adapter_config.json").symlink_to("adapter_config.json")
    roots = Roots([str(root)])
    with pytest.raises(LocationError, match="regular"):
        roots.candidates("pipe")
    assert roots.candidates("loop")[0].address == str(root / "loop")  # reading it will fail


def test_store_locations_must_share_scheme_host_and_prefix() -> None:
    roots = Roots(["s3://bucket/adapters", "https://host:8443/a"])
    assert roots.place("s3://bucket/adapters/x/y")[0].address == "s3://bucket/adapters/x/y"
    assert roots.place("https://host:8443/a/my%20adapter")[0].address == "https://host:8443/a/my%20adapter"
    for text in (
        "s3://bucket/adapters",
        "s3://bucket/adapters-other/x",
        "s3://bucket2/adapters/x",
        "s3://bucket/adapters/../secret",
        "s3://bucket/adapters/%2e%2e/secret",
        "s3://bucket/adapters//x",
        "https://host/a/x",
        "http://host:8443/a/x",
        "https://evil@host:8443/a/x",
        "https://host:8443@evil/a/x",
        "https://host.evil:8443/a/x",
        "https://host:8443/a/../b",
        "https://host:8443/a/%2e%2e/b",
        "https://host:8443/a/%252e%252e/b",
        "https://host:8443/a/x%2f..%2f..%2fb",
        "https://host:8443/a/x%5c..",
        "https://host:8443/a/x?signature=stolen",
    ):
        with pytest.raises(LocationError):
            roots.place(text)


def test_a_roots_credentials_are_used_and_never_shown() -> None:
    roots = Roots(["https://user:pass@host/a?sig=SECRET"])
    (place,) = roots.candidates("x")
    assert place.address == "https://user:pass@host/a/x?sig=SECRET"
    for shown in (place.text, repr(place), *roots.names):
        assert "pass" not in shown
        assert "SECRET" not in shown


def test_without_roots_everything_is_refused() -> None:
    with pytest.raises(LocationError, match="no adapter root"):
        Roots().candidates("x")
    with pytest.raises(LocationError, match="no adapter root"):
        Roots().place("/tmp/x")


def test_a_missing_root_is_noticed_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="not a folder"):
        Roots([str(tmp_path / "absent")])
