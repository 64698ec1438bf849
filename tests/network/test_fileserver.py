"""The small web server: what it serves, what it never does."""

import http.client
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.folder_server import Traffic

from loadstone.errors import LocationError, SettingsError
from loadstone.fileserver import FileServer

DATA = bytes(range(256)) * 5000


@pytest.fixture
def traffic() -> Traffic:
    return Traffic()


@pytest.fixture
def server(tmp_path: Path, traffic: Traffic) -> Iterator[FileServer]:
    (tmp_path / "served" / "deep").mkdir(parents=True)
    (tmp_path / "served" / "a b.bin").write_bytes(DATA)
    (tmp_path / "served" / "deep" / "config.json").write_bytes(b"{}")
    (tmp_path / "served" / "empty").write_bytes(b"")
    (tmp_path / "secret").write_bytes(b"outside")
    with FileServer(tmp_path / "served", hook=traffic) as running:
        yield running
        traffic.release_all()


def ask(
    server: FileServer, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body


@pytest.mark.parametrize(
    ("asked", "status", "start", "stop"),
    [
        (None, 200, 0, len(DATA)),
        ("bytes=0-0", 206, 0, 1),
        ("bytes=5-99", 206, 5, 100),
        ("bytes=100-", 206, 100, len(DATA)),
        ("bytes=-10", 206, len(DATA) - 10, len(DATA)),
        (f"bytes=0-{10**12}", 206, 0, len(DATA)),
        ("bytes=9-5", 200, 0, len(DATA)),
        ("bytes=0-1,5-6", 200, 0, len(DATA)),
        ("lines=1-2", 200, 0, len(DATA)),
        ("bytes=-", 200, 0, len(DATA)),
    ],
)
def test_ranges(asked: str | None, status: int, start: int, stop: int, server: FileServer) -> None:
    found, headers, body = ask(server, "/a%20b.bin", {"Range": asked} if asked else None)
    assert (found, body) == (status, DATA[start:stop])
    assert headers["content-length"] == str(stop - start)
    assert headers.get("content-range") == (
        f"bytes {start}-{stop - 1}/{len(DATA)}" if status == 206 else None
    )


@pytest.mark.parametrize("asked", [f"bytes={len(DATA)}-", f"bytes={10**12}-{10**13}", "bytes=-0"])
def test_a_range_beyond_the_end(asked: str, server: FileServer) -> None:
    status, headers, _ = ask(server, "/a%20b.bin", {"Range": asked})
    assert (status, headers["content-range"]) == (416, f"bytes */{len(DATA)}")


def test_head_has_headers_only(server: FileServer) -> None:
    status, headers, body = ask(server, "/a%20b.bin", method="HEAD")
    assert (status, headers["content-length"], body) == (200, str(len(DATA)), b"")


def test_conditions(server: FileServer) -> None:
    tag = ask(server, "/a%20b.bin")[1]["etag"]
    assert tag.startswith('"')
    assert ask(server, "/a%20b.bin", {"If-None-Match": tag})[0] == 304
    assert ask(server, "/a%20b.bin", {"If-None-Match": '"other"'})[0] == 200
    assert ask(server, "/a%20b.bin", {"If-Match": f'"x", {tag}'})[0] == 200
    assert ask(server, "/a%20b.bin", {"If-Match": '"other"'})[0] == 412
    assert ask(server, "/a%20b.bin", {"Range": "bytes=0-4", "If-Range": tag})[0] == 206
    assert ask(server, "/a%20b.bin", {"Range": "bytes=0-4", "If-Range": '"other"'})[0] == 200


def test_every_change_changes_the_tag(server: FileServer) -> None:
    path = server.folder / "a b.bin"
    tags = {ask(server, "/a%20b.bin")[1]["etag"]}
    path.write_bytes(DATA[:-1])
    tags.add(ask(server, "/a%20b.bin")[1]["etag"])
    os.utime(path, ns=(1, 1))
    tags.add(ask(server, "/a%20b.bin")[1]["etag"])
    (path.with_name("new")).write_bytes(DATA[:-1])
    os.utime(path.with_name("new"), ns=(1, 1))
    path.with_name("new").replace(path)
    tags.add(ask(server, "/a%20b.bin")[1]["etag"])
    assert len(tags) == 4


@pytest.mark.parametrize(
    "path",
    [
        "/../secret",
        "/%2e%2e/secret",
        "/deep/../../secret",
        "/deep/%2e%2e%2f%2e%2e%2fsecret",
        "//etc/passwd",
        "/%2fetc/passwd",
        "/link",
        "/deep",
        "/deep/",
        "/",
        "/nope",
        "/a%00b",
        "/loop",
    ],
)
def test_nothing_outside_and_no_listing(path: str, server: FileServer) -> None:
    (server.folder / "link").symlink_to("../secret")
    (server.folder / "loop").symlink_to("loop")
    status, _, body = ask(server, path)
    assert status == 404
    assert b"outside" not in body


def test_a_link_inside_is_served(server: FileServer) -> None:
    (server.folder / "same").symlink_to("deep/config.json")
    assert ask(server, "/same")[2] == b"{}"


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_nothing_can_be_written(method: str, server: FileServer) -> None:
    assert ask(server, "/a%20b.bin", method=method)[0] == 501
    assert (server.folder / "a b.bin").read_bytes() == DATA


def test_an_empty_file(server: FileServer) -> None:
    assert ask(server, "/empty", {"Range": "bytes=0-9"})[::2] == (200, b"")


def test_traffic_is_counted_and_held_back(server: FileServer, traffic: Traffic) -> None:
    traffic.hold("a b.bin")
    bodies: list[bytes] = []
    thread = threading.Thread(target=lambda: bodies.append(ask(server, "/a%20b.bin")[2]))
    thread.start()
    assert ask(server, "/deep/config.json")[2] == b"{}"
    assert traffic.total == 2
    assert thread.is_alive()
    traffic.release("a b.bin")
    thread.join()
    assert bodies == [DATA]
    assert traffic.total == len(DATA) + 2
    assert ("GET", "a b.bin", 0, len(DATA)) in traffic.requests


def test_close_ends_connections_and_frees_the_port(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    server = FileServer(tmp_path)
    port = int(server.url.rpartition(":")[2])
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    kept.request("GET", "/f")
    assert kept.getresponse().read() == b"x"
    server.close()
    assert kept.sock.recv(1) == b""
    kept.close()
    with FileServer(tmp_path, port=port) as again:
        assert again.url_of("a b/f") == f"http://127.0.0.1:{port}/a%20b/f"
        with pytest.raises(SettingsError, match="choose another port"):
            FileServer(tmp_path, port=port)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocationError, match="nope"):
        FileServer(tmp_path / "nope")
