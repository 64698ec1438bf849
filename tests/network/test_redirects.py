"""Where requests are led, and what must not follow them there or show up anywhere else."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from tests.support.faulty_server import Fault, FaultyServer, Seen, always, tag_of
from tests.support.fetching import fetch, store_of

from loadstone.errors import LoadstoneError, TransferError
from loadstone.loader.locations import parse_location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.access import HttpObject
from loadstone.loader.stores.exchange import Pool
from loadstone.loader.stores.signed import SignedAccess
from loadstone.loader.stores.store import OpenGate, Version, open_store
from loadstone.loader.stores.transfer import HttpTransport
from loadstone.settings import Settings

DATA = random.Random(9).randbytes(50_000)
PIN = Version(tag_of(DATA), len(DATA))

pytestmark = pytest.mark.usefixtures("quick")


def test_redirects_are_followed_and_secrets_stay_behind(settings: Settings) -> None:
    with FaultyServer({"/far/m": DATA}) as far, FaultyServer({}) as near:
        target = f"http://localhost:{far.port}/far/m?ticket=1"
        near.intercept = lambda _: (302, {"Location": target}, b"")
        store = open_store(
            parse_location(near.url),
            {"headers": {"Authorization": "Bearer hush", "Cookie": "id=1"}},
            settings,
        )
        probe = store.transport.probe(store.object("m"), 1000, None, OpenGate())
        assert probe.version == PIN
        assert fetch(store, PIN, ByteRange(5, 500)) == DATA[5:500]
        assert near.seen[0].headers["Authorization"] == "Bearer hush"
        assert all(not {"Authorization", "Cookie"} & set(seen.headers) for seen in far.seen)
        assert all("Range" in seen.headers for seen in far.seen)


def test_a_redirect_is_remembered_for_parts_until_it_fails(settings: Settings) -> None:
    with FaultyServer({"/far/m": DATA}) as far, FaultyServer({}) as near:
        tickets = iter(range(100))
        near.intercept = lambda _: (302, {"Location": f"{far.url}/far/m?ticket={next(tickets)}"}, b"")
        far.intercept = lambda seen: (
            (403, {}, b"expired") if seen.path.endswith("ticket=0") and len(far.seen) > 4 else None
        )
        store = store_of(near, settings)
        assert store.transport.probe(store.object("m"), 1000, None, OpenGate()).version == PIN
        for start in range(0, 6000, 1000):
            assert fetch(store, PIN, ByteRange(start, start + 1000)) == DATA[start : start + 1000]
        assert [seen.path[-8:] for seen in far.seen] == ["ticket=0"] * 5 + ["ticket=1"] * 3
        assert len(near.seen) == 2
        store.transport.probe(store.object("m"), 1000, None, OpenGate())
        assert len(near.seen) == 3


def test_a_redirect_on_the_same_host_keeps_the_headers(settings: Settings) -> None:
    with FaultyServer({"/there/m": DATA}) as server:
        server.intercept = lambda seen: (307, {"Location": "/there/m"}, b"") if seen.path == "/m" else None
        store = open_store(
            parse_location(server.url), {"headers": {"Authorization": "Bearer hush"}}, settings
        )
        assert fetch(store, PIN, ByteRange(0, 10)) == DATA[:10]
        assert server.seen[1].headers["Authorization"] == "Bearer hush"


@pytest.mark.parametrize(
    "target", ["ftp://127.0.0.1/m", "file:///etc/passwd", "http://127.0.0.1:port/", "//"]
)
def test_a_redirect_out_of_the_web_is_refused(target: str, settings: Settings) -> None:
    with FaultyServer({}) as server:
        server.intercept = lambda _: (302, {"Location": target}, b"")
        with pytest.raises(TransferError, match="redirect"):
            fetch(store_of(server, settings), PIN, ByteRange(0, 10))


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a b/m", "/a%20b/m"),
        ("/a%20b/m", "/a%20b/m"),
        (' /m?x=a|b^c{d}"e<f>`g\\h ', "/m?x=a%7Cb%5Ec%7Bd%7D%22e%3Cf%3E%60g%5Ch"),
        ("/100%/m?y=%zz%41", "/100%25/m?y=%25zz%41"),
        ("/größe/m".encode().decode("latin-1"), "/gr%C3%B6%C3%9Fe/m"),
        ("/tab\there/m", "/tab%09here/m"),
        ("/m?sig=a%2Fb%3D+c~d-e_f.g&list=1,2;3#part", "/m?sig=a%2Fb%3D+c~d-e_f.g&list=1,2;3"),
        ("there/../m", "/m"),
        ("?just=query", "/start?just=query"),
    ],
)
def test_odd_characters_in_a_redirect_are_escaped_and_others_left_alone(
    target: str, path: str, settings: Settings
) -> None:
    with FaultyServer({path.partition("?")[0]: DATA}) as server:
        server.intercept = lambda seen: (307, {"Location": target}, b"") if seen.path == "/start" else None
        assert fetch(store_of(server, settings), PIN, ByteRange(5, 10), name="start") == DATA[5:10]
        assert server.seen[1].path == path


def test_a_redirect_in_circles_ends(settings: Settings) -> None:
    with FaultyServer({}) as server:
        server.intercept = lambda seen: (302, {"Location": seen.path}, b"")
        with pytest.raises(TransferError, match="leads nowhere"):
            fetch(store_of(server, settings), PIN, ByteRange(0, 10))


def expect_error(action: Callable[[], object]) -> str:
    with pytest.raises(LoadstoneError) as caught:
        action()
    return str(caught.value)


def test_errors_and_reprs_hold_no_secrets(settings: Settings) -> None:
    hidden = re.compile("hush|swordfish|sesame|s3cr3t|signature=")
    texts = []
    for fault in (
        Fault.FORBIDDEN,
        Fault.NOT_FOUND,
        Fault.BUSY,
        Fault.HTML,
        Fault.GARBAGE,
        Fault.RESET_FIRST,
        Fault.WEAK,
    ):
        with FaultyServer({"/m": DATA}, always(fault)) as server:
            url = f"http://swordfish:s3cr3t@127.0.0.1:{server.port}?X-Amz-Signature=sesame&token=hush"
            location = parse_location(url)
            store = open_store(location, {"headers": {"X-Key": "hush"}}, replace(settings, retry_seconds=0.1))
            target = store.object("m")
            texts += [repr(location), str(location), store.name, target.name, target.identity]
            texts.append(expect_error(partial(fetch, store, PIN, ByteRange(0, 10))))
            if fault is Fault.FORBIDDEN:
                assert server.seen[0].headers["Authorization"].startswith("Basic ")
                assert "signature=sesame" in server.seen[0].path.lower()
    texts += [
        expect_error(lambda: parse_location("https://swordfish:s3cr3t@host:port/x?token=hush")),
        expect_error(lambda: parse_location("s3://swordfish:s3cr3t@bucket/x")),
        expect_error(lambda: parse_location("nope://swordfish:s3cr3t@host/x?token=hush")),
        expect_error(lambda: parse_location("https://swordfish:s3cr3t@/x?token=hush")),
    ]
    assert [text for text in texts if hidden.search(text)] == []


def test_a_signed_url_that_is_refused_is_signed_again_without_counting_as_a_retry(settings: Settings) -> None:

    with FaultyServer({"/m": DATA}) as server:
        uses: dict[str, int] = {}

        def expiring(seen: Seen) -> tuple[int, dict[str, str], bytes] | None:
            uses[seen.path] = uses.get(seen.path, 0) + 1
            return (403, {}, b"<Error><Code>AccessDenied</Code></Error>") if uses[seen.path] > 3 else None

        server.intercept = expiring
        signed = iter(range(100))
        access = SignedAccess(lambda key: f"{server.url}/{key}?ticket={next(signed)}")
        transport = HttpTransport(Pool(settings), replace(settings, retry_seconds=0.0))
        target = HttpObject("m", "m", access, "m")
        for start in range(0, 10_000, 1000):
            out = bytearray()

            def sink(offset: int, data: memoryview, out: bytearray = out) -> None:
                out.extend(data)

            transport.fetch(target, PIN, ByteRange(start, start + 1000), sink, OpenGate())
            assert out == DATA[start : start + 1000]
        assert len(uses) == 4
