"""Connections: kept alive, bounded, cut when they stall, proxied, encrypted, and not shared with a child."""

import os
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.certificate import CERTIFICATE, KEY
from tests.support.faulty_server import Fault, FaultyServer, always, first, tag_of

from loadstone.errors import (
    AccessError,
    ClosedError,
    LoadstoneError,
    SettingsError,
    StalledError,
    TransferError,
)
from loadstone.loader.locations import parse_location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores import exchange, slots
from loadstone.loader.stores.backoff import TemporaryError
from loadstone.loader.stores.exchange import Pool, Request
from loadstone.loader.stores.store import OpenGate, Store, Version, open_store
from loadstone.settings import Settings

DATA = bytes(range(256)) * 4000
PIN = Version(tag_of(DATA), len(DATA))
GATE = OpenGate()


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer({"/m": DATA}) as running:
        yield running


class Counter:
    """A TCP relay that counts connections; ``reply`` may answer a proxy's CONNECT first."""

    def __init__(self, port: int, *, proxy: bool = False) -> None:
        self.connections = 0
        self.heads: list[bytes] = []
        self._target = port
        self._proxy = proxy
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            if self._proxy:
                head = client.recv(4096)
                self.heads.append(head)
                if head.startswith(b"CONNECT"):
                    client.sendall(b"HTTP/1.1 200 go on\r\n\r\n")
                else:
                    server.sendall(head)
            back = threading.Thread(target=relay, args=(server, client), daemon=True)
            back.start()
            relay(client, server)
            back.join()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def relay(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def fetch(store: Store, span: ByteRange) -> bytes:
    out = bytearray()
    store.transport.fetch(store.object("m"), PIN, span, lambda _, data: out.extend(data), GATE)
    return bytes(out)


def web(port: int, settings: Settings, scheme: str = "http", **options: object) -> Store:
    return open_store(parse_location(f"{scheme}://127.0.0.1:{port}"), options, settings)


def test_one_connection_serves_many_requests(server: FaultyServer, settings: Settings) -> None:
    counter = Counter(server.port)
    store = web(counter.port, settings)
    for start in range(0, 10_000, 1000):
        assert fetch(store, ByteRange(start, start + 1000)) == DATA[start : start + 1000]
    assert counter.connections == 1
    store.close()
    counter.close()


def test_connections_never_exceed_the_bound(server: FaultyServer, settings: Settings) -> None:
    counter = Counter(server.port)
    store = web(counter.port, replace(settings, max_connections=3, stall_timeout=20.0))
    threads = [
        threading.Thread(target=fetch, args=(store, ByteRange(at * 1000, at * 1000 + 900_000)))
        for at in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= counter.connections <= 3
    store.close()
    counter.close()


def test_a_kept_connection_the_server_closed_costs_no_retry(server: FaultyServer, settings: Settings) -> None:
    store = web(server.port, replace(settings, retry_seconds=0.0))
    server.plan = lambda number: Fault.UNMARKED if number == 0 else Fault.NONE
    assert fetch(store, ByteRange(0, 10)) == DATA[:10]
    assert fetch(store, ByteRange(0, 10)) == DATA[:10]
    store.close()


@pytest.mark.parametrize("last", [False, True], ids=["kept alive", "last answer"])
def test_close_wakes_a_transfer_that_waits(last: bool, settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, always(Fault.STALL_UNMARKED if last else Fault.STALL)) as server:
        store = web(server.port, replace(settings, stall_timeout=30.0, retry_seconds=30.0))
        caught: list[BaseException] = []

        def run() -> None:
            try:
                fetch(store, ByteRange(0, 1000))
            except LoadstoneError as error:
                caught.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while not server.seen:
            time.sleep(0.01)
        store.close()
        thread.join(5)
        assert not thread.is_alive()
        assert isinstance(caught[0], ClosedError)
        with pytest.raises(ClosedError, match="open the checkpoint again"):
            fetch(store, ByteRange(0, 10))


class CancelledError(Exception):
    """What a caller's gate raises."""


class Cancelling(OpenGate):
    def __init__(self) -> None:
        self.cancelled = False

    def admit(self, nbytes: int) -> None:
        if self.cancelled:
            raise CancelledError


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.BUSY, Fault.TOO_MANY])
def test_a_gate_ends_a_transfer_that_waits(fault: Fault, settings: Settings) -> None:
    gate = Cancelling()
    with FaultyServer({"/m": DATA}, always(fault), retry_after=20) as server:
        store = web(server.port, replace(settings, stall_timeout=30.0, retry_seconds=60.0))
        threading.Timer(0.3, lambda: setattr(gate, "cancelled", True)).start()
        begin = time.monotonic()
        with pytest.raises(CancelledError):
            store.transport.fetch(store.object("m"), PIN, ByteRange(0, 1000), lambda _, __: None, gate)
        assert time.monotonic() - begin < 5
        store.close()


def test_refused_connections_end_sooner_than_the_whole_patience(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadstone.loader.stores.backoff._CONNECT_PATIENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(TransferError, match=rf"no connection to 127.0.0.1:{port}: Connection refused"):
        fetch(web(port, replace(settings, retry_seconds=60.0)), ByteRange(0, 10))


def test_an_unknown_host_is_named_at_once(settings: Settings) -> None:
    store = open_store(parse_location("http://no-such-host.invalid/x"), None, settings)
    with pytest.raises(TransferError, match=r"no-such-host\.invalid"):
        store.transport.probe(store.object("m"), 10, None, GATE)


def test_a_forked_child_makes_its_own_connections(server: FaultyServer, settings: Settings) -> None:
    counter = Counter(server.port)
    store = web(counter.port, settings)
    assert fetch(store, ByteRange(0, 1000)) == DATA[:1000]
    child = os.fork()
    if child == 0:
        right = all(fetch(store, ByteRange(at, at + 500)) == DATA[at : at + 500] for at in range(20))
        os._exit(0 if right else 1)
    for at in range(20):
        assert fetch(store, ByteRange(at, at + 700)) == DATA[at : at + 700]
    assert os.waitpid(child, 0)[1] == 0
    assert counter.connections == 2
    store.close()
    counter.close()


def test_a_fork_in_the_middle_of_a_transfer_leaves_it_alone(server: FaultyServer, settings: Settings) -> None:
    store = web(server.port, settings)
    out = bytearray()

    def sink(offset: int, data: memoryview) -> None:
        if not out:
            child = os.fork()
            if child == 0:
                os._exit(0 if fetch(store, ByteRange(5, 50)) == DATA[5:50] else 1)
            assert os.waitpid(child, 0)[1] == 0
        out.extend(data)

    store.transport.fetch(store.object("m"), PIN, ByteRange(0, len(DATA)), sink, GATE)
    assert out == DATA
    store.close()


def test_pools_are_forgotten_with_their_stores(server: FaultyServer, settings: Settings) -> None:
    before = len(exchange._POOLS)
    store = web(server.port, settings)
    assert fetch(store, ByteRange(0, 10)) == DATA[:10]
    assert len(exchange._POOLS) == before + 1
    pool = next(pool for pool in exchange._POOLS if pool._idle)
    link = weakref.ref(pool._idle[0])
    del store, pool
    assert len(exchange._POOLS) == before
    assert link() is None  # Its socket went with it, without waiting for the collector.


def test_what_http_cannot_carry_is_refused_at_once(server: FaultyServer, settings: Settings) -> None:
    pool = Pool(settings)
    for request in (Request(f"{server.url}/m", {"X": "a\nb"}), Request(f"{server.url}/ключ", {})):
        with pool.get(Request(f"{server.url}/m", {})) as answer:  # leaves a connection to be used again
            answer.read(len(server.objects["/m"]))
        with pytest.raises(TransferError, match="cannot be sent") as caught:
            pool.get(request)
        assert not isinstance(caught.value, TemporaryError)
    assert slots.taken() == 0
    pool.close()


def test_a_body_is_received_up_to_the_fault(server: FaultyServer, settings: Settings) -> None:
    server.plan = first(1, Fault.SHORT)
    pool = Pool(settings)
    with pool.get(Request(f"{server.url}/m", {})) as answer:
        view = memoryview(bytearray(len(DATA)))
        assert answer.receive(view) == len(DATA) // 2
        assert answer.fault is not None
        assert bytes(view[: len(DATA) // 2]) == DATA[: len(DATA) // 2]
    pool.close()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "server.pem"
    path.write_text(KEY + CERTIFICATE)
    path.with_name("cert.pem").write_text(CERTIFICATE)
    return path


@pytest.fixture
def encrypted(server: FaultyServer, certificate: Path) -> FaultyServer:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.encrypt(context)
    return server


def test_an_untrusted_certificate_is_refused_at_once(encrypted: FaultyServer, settings: Settings) -> None:
    with pytest.raises(AccessError, match="SSL_CERT_FILE"):
        fetch(web(encrypted.port, settings, "https"), ByteRange(0, 10))


@pytest.mark.parametrize("how", ["variable", "option", "off"])
def test_encrypted_transfers(
    how: str, encrypted: FaultyServer, certificate: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = str(certificate.with_name("cert.pem"))
    if how == "variable":
        monkeypatch.setenv("SSL_CERT_FILE", authority)
    verify = {"variable": True, "option": authority, "off": False}[how]
    store = web(encrypted.port, settings, "https", verify=verify)
    assert fetch(store, ByteRange(0, len(DATA))) == DATA
    assert fetch(store, ByteRange(3, 10)) == DATA[3:10]
    store.close()


def test_the_aws_bundle_is_used_for_s3(
    encrypted: FaultyServer, certificate: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate.with_name("cert.pem")))
    encrypted.objects["/bucket/m"] = DATA
    options = {"anon": True, "endpoint_url": f"https://127.0.0.1:{encrypted.port}"}
    store = open_store(parse_location("s3://bucket"), options, settings)
    assert store.transport.probe(store.object("m"), 100, None, GATE).data == DATA[:100]
    store.close()


def test_a_proxy_from_the_environment_is_used(
    server: FaultyServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.objects["http://model-store.example/m"] = DATA  # As a proxy is asked for it.
    proxy = Counter(server.port, proxy=True)
    monkeypatch.setenv("http_proxy", f"http://user:swordfish@127.0.0.1:{proxy.port}")
    monkeypatch.setenv("no_proxy", "elsewhere.example")
    store = open_store(parse_location("http://model-store.example"), None, settings)
    assert fetch(store, ByteRange(0, 10)) == DATA[:10]
    assert proxy.heads[0].startswith(b"GET http://model-store.example/m HTTP/1.1")
    assert b"Proxy-Authorization: Basic" in proxy.heads[0]
    assert b"Host: model-store.example" in proxy.heads[0]
    monkeypatch.setenv("no_proxy", "model-store.example")
    direct = open_store(
        parse_location("http://model-store.example"), None, replace(settings, retry_seconds=0.0)
    )
    with pytest.raises(TransferError, match=r"model-store\.example"):
        fetch(direct, ByteRange(0, 1))
    proxy.close()


def test_a_proxy_is_told_the_host_that_is_signed(
    server: FaultyServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Counter(server.port, proxy=True)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    pool = Pool(settings)
    with pool.get(Request("http://Model-Store.example:80/m", {})) as answer:
        assert answer.status == 404  # this server knows no whole URLs
    assert b"\r\nHost: model-store.example\r\n" in proxy.heads[0]
    pool.close()
    proxy.close()


def test_an_encrypted_transfer_goes_through_the_proxys_tunnel(
    encrypted: FaultyServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Counter(encrypted.port, proxy=True)
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{proxy.port}")
    monkeypatch.delenv("no_proxy", raising=False)
    store = open_store(parse_location("https://model-store.example"), {"verify": False}, settings)
    assert fetch(store, ByteRange(0, 10)) == DATA[:10]
    assert proxy.heads[0].startswith(b"CONNECT model-store.example:443")
    store.close()
    proxy.close()


def test_a_proxy_of_another_kind_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://u:swordfish@127.0.0.1:1")
    store = open_store(parse_location("http://model-store.example"), None, settings)
    with pytest.raises(SettingsError, match="socks5") as caught:
        fetch(store, ByteRange(0, 10))
    assert "swordfish" not in str(caught.value)


@pytest.mark.parametrize("end", ["port", "0", "99999", "1]"])
def test_a_proxy_that_is_no_address_is_refused(
    end: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://u:swordfish@[::1]:{end}")
    store = open_store(parse_location("http://model-store.example"), None, settings)
    with pytest.raises(SettingsError, match="http_proxy variable is not of the form") as caught:
        fetch(store, ByteRange(0, 10))
    assert "swordfish" not in str(caught.value)


def test_a_host_that_is_none_is_refused(settings: Settings) -> None:
    options = {"anon": True, "endpoint_url": "http://model store.example"}
    store = open_store(parse_location("s3://bucket"), options, settings)
    with pytest.raises(TransferError, match=r"'model store\.example' cannot be the name of a host"):
        store.names()


def test_this_machines_own_servers_need_no_proxy(
    server: FaultyServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert fetch(web(server.port, settings), ByteRange(0, 10)) == DATA[:10]


@pytest.mark.parametrize(
    "headers", [{"Bad": "a\r\nInjected: 1"}, {"Bad\n": "x"}, "text"], ids=["value", "name", "not a mapping"]
)
def test_headers_that_are_none_are_refused(headers: object, settings: Settings) -> None:
    with pytest.raises(SettingsError):
        open_store(parse_location("http://host/x"), {"headers": headers}, settings)


def test_headers_that_trickle_are_cut_too(settings: Settings) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def trickle() -> None:
        while not ended.is_set():
            try:
                client, _ = listener.accept()
                with client:
                    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Filler: y\r\n" * 100:
                        client.sendall(bytes([byte]))
                        if ended.wait(0.05):
                            break
            except OSError:
                continue

    thread = threading.Thread(target=trickle)
    thread.start()
    hurried = replace(settings, stall_timeout=0.3, retry_seconds=0.5)
    with pytest.raises(StalledError, match=r"only .* bytes came"):
        fetch(web(listener.getsockname()[1], hurried), ByteRange(0, 10))
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()
