"""Connections made ahead of the requests that need them: used, bounded, and never in the way."""

import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.network.test_exchange import Counter
from tests.support.certificate import CERTIFICATE, KEY
from tests.support.checkpoints import model_tensors, write_sharded
from tests.support.faulty_server import FaultyServer

import loadstone
from loadstone.fileserver import FileServer
from loadstone.loader.locations import parse_location
from loadstone.loader.stores import slots
from loadstone.loader.stores.store import OpenGate, Store, open_store
from loadstone.settings import Settings

DATA = b"x" * 1000
GATE = OpenGate()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of the count the stores that other tests have not closed."""
    monkeypatch.setattr(slots, "_shares", weakref.WeakSet())


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer({"/bucket/m": DATA}) as running:
        yield running


@pytest.fixture
def counter(server: FaultyServer) -> Iterator[Counter]:
    running = Counter(server.port)
    yield running
    running.close()


def s3(port: int, settings: Settings, scheme: str = "http") -> Store:
    options = {
        "anon": True,
        "endpoint_url": f"{scheme}://127.0.0.1:{port}",
        "client_kwargs": {"verify": False},
    }
    return open_store(parse_location("s3://bucket"), options, settings)


def connect(store: Store, count: int = 1) -> None:
    connector = store.connector()
    assert connector is not None
    for _ in range(count):
        connector.connect()


def settled(counter: Counter, count: int) -> bool:
    """Say whether there have been ``count`` connections, and a moment later still."""
    deadline = time.monotonic() + 20
    while counter.connections < count and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return counter.connections == count


def read(store: Store) -> bytes:
    return store.transport.probe(store.object("m"), 2000, None, GATE).data


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_next_request_uses_it(
    scheme: str, server: FaultyServer, counter: Counter, settings: Settings, tmp_path: Path
) -> None:
    if scheme == "https":
        (tmp_path / "both.pem").write_text(CERTIFICATE + KEY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "both.pem")
        server.encrypt(context)
    store = s3(counter.port, settings, scheme)
    connect(store)
    assert settled(counter, 1)  # and the tickets of a TLS session have come, which nobody asked for
    assert read(store) == read(store) == DATA
    assert settled(counter, 1)
    store.close()


def test_one_that_was_closed_meanwhile_is_replaced(settings: Settings) -> None:
    answer = b'HTTP/1.1 200 OK\r\nETag: "x"\r\nContent-Length: 3\r\n\r\nabc'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            listener.accept()[0].close()
            link, _ = listener.accept()
            with link:
                link.recv(4096)
                link.sendall(answer)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        store = s3(listener.getsockname()[1], settings)
        connect(store)
        assert read(store) == b"abc"
        serving.join(20)
        store.close()


def test_the_bound_counts_them(counter: Counter, settings: Settings) -> None:
    stores = [s3(counter.port, replace(settings, max_connections=3)) for _ in range(2)]
    connect(stores[0], 5)
    assert settled(counter, 3)
    connect(stores[1])  # it closes none of the others' for a request that nobody has made yet
    assert settled(counter, 3)
    assert slots.taken() == 0
    assert read(stores[1]) == DATA
    assert settled(counter, 4)
    for store in stores:
        store.close()


def test_a_slot_that_others_wait_for_is_left_to_them(counter: Counter, settings: Settings) -> None:
    store = s3(counter.port, replace(settings, max_connections=1))
    share = slots.Share(1)
    share.take(lambda: None)
    connect(store)
    assert settled(counter, 0)
    share.give_back()
    connect(store)
    assert settled(counter, 1)
    store.close()


def test_where_nothing_can_be_reached_nothing_is_raised(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = s3(port, settings)
    connect(store)
    assert slots.taken() == 0
    store.close()
    connect(store)


def test_a_web_server_is_not_asked_for_connections(settings: Settings, tmp_path: Path) -> None:
    with FileServer(write_sharded(tmp_path / "m", model_tensors(), shards=4)) as server:
        counter = Counter(int(server.url.rpartition(":")[2]))
        with loadstone.open(f"http://127.0.0.1:{counter.port}", cache=None, settings=settings) as ckpt:
            assert len(ckpt) == len(model_tensors())
        assert counter.connections <= 4
        counter.close()
