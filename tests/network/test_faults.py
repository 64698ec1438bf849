"""A server that misbehaves, each fault alone and mixed at random: right bytes or a clear error, no mix."""

import random
from dataclasses import replace

import pytest
from tests.support.faulty_server import Fault, FaultyServer, Plan, always, first, tag_of
from tests.support.fetching import fetch, store_of

from loadstone.errors import (
    AccessError,
    ChangedError,
    FormatError,
    LoadstoneError,
    NotFoundError,
    StalledError,
    TransferError,
)
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores.store import OpenGate, Version
from loadstone.settings import Settings

SIZE = 400_000
DATA = random.Random(9).randbytes(SIZE)
OTHER = random.Random(10).randbytes(SIZE)
PIN = Version(tag_of(DATA), SIZE)
ALL = ByteRange(0, SIZE)
MIXED = [
    fault for fault in Fault if fault not in (Fault.NOT_FOUND, Fault.FORBIDDEN, Fault.TRICKLE, Fault.TOO_MANY)
]

pytestmark = pytest.mark.usefixtures("quick")


class Recorder(OpenGate):
    """Notes what the transport says about the store."""

    def __init__(self) -> None:
        self.throttles: list[float | None] = []

    def throttled(self, retry_after: float | None) -> None:
        self.throttles.append(retry_after)


def attempt(plan: Plan, settings: Settings, gate: OpenGate | None = None, span: ByteRange = ALL) -> bytes:
    with FaultyServer({"/m": DATA}, plan) as server:
        store = store_of(server, settings)
        try:
            return fetch(store, PIN, span, gate)
        finally:
            store.close()


@pytest.mark.parametrize(
    "fault",
    [fault for fault in Fault if fault not in (Fault.NOT_FOUND, Fault.FORBIDDEN, Fault.TRICKLE)],
)
def test_three_faulty_answers_are_survived(fault: Fault, settings: Settings) -> None:
    span = ByteRange(70_000, 390_000)
    assert attempt(first(3, fault), settings, span=span) == DATA[span.start : span.stop]


@pytest.mark.parametrize(
    "fault",
    [
        Fault.SHORT,
        Fault.SHORT_UNMARKED,
        Fault.UNMARKED,
        Fault.CHUNKED,
        Fault.CHUNKED_CUT,
        Fault.CAPPED,
        Fault.RESET,
        Fault.WHOLE,
    ],
)
def test_a_server_that_is_always_like_this_still_gives_all_bytes(fault: Fault, settings: Settings) -> None:
    assert attempt(always(fault), settings) == DATA


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault.WHOLE_WITH_RANGE, FormatError, "200 with a Content-Range"),
        (Fault.SHIFTED, FormatError, "asked for bytes 0-399999, answered with 1000-"),
        (Fault.NO_RANGE_HEADER, FormatError, "without a usable Content-Range"),
        (Fault.WRONG_LENGTH, FormatError, "Content-Length is 399999 where 400000"),
        (Fault.GZIP, FormatError, "Content-Encoding gzip"),
        (Fault.HTML, FormatError, "web page"),
        (Fault.WEAK, TransferError, "strong ETag"),
        (Fault.NO_TAG, TransferError, "strong ETag"),
        (Fault.BUSY, TransferError, "503 SlowDown: Reduce your rate"),
        (Fault.BROKEN, TransferError, "500"),
        (Fault.RESET_FIRST, TransferError, "broke the connection"),
        (Fault.GARBAGE, TransferError, "not HTTP"),
        (Fault.NOT_FOUND, NotFoundError, "404 NoSuchKey; .*spelling"),
        (Fault.FORBIDDEN, AccessError, "403 AccessDenied"),
    ],
)
def test_a_server_that_is_always_like_this_is_a_clear_error(
    fault: Fault, kind: type[LoadstoneError], words: str, settings: Settings
) -> None:
    with pytest.raises(kind, match=words) as caught:
        attempt(always(fault), replace(settings, retry_seconds=0.5))
    assert "127.0.0.1" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", [Fault.NOT_FOUND, Fault.FORBIDDEN])
def test_what_will_not_pass_is_reported_at_once(fault: Fault, settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, always(fault)) as server:
        with pytest.raises(LoadstoneError):
            fetch(store_of(server, settings), PIN, ByteRange(0, 10))
        assert len(server.seen) == 1


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.TRICKLE])
def test_no_progress_ends_within_the_limits(fault: Fault, settings: Settings) -> None:
    hurried = replace(settings, stall_timeout=0.2, retry_seconds=0.6)
    with pytest.raises(StalledError, match=r"stalled: .*gave up"):
        attempt(always(fault), hurried, span=ByteRange(0, 1000))


def test_a_stalled_connection_is_resumed_at_the_byte_reached(settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, first(1, Fault.STALL)) as server:
        store = store_of(server, replace(settings, stall_timeout=0.2))
        assert fetch(store, PIN, ByteRange(0, SIZE)) == DATA
        assert [seen.headers["Range"] for seen in server.seen] == ["bytes=0-399999", "bytes=200000-399999"]


def test_every_request_pins_the_version_and_asks_for_plain_bytes(settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, first(2, Fault.SHORT)) as server:
        fetch(store_of(server, settings), PIN, ByteRange(0, SIZE))
        assert {seen.headers["If-Match"] for seen in server.seen} == {PIN.tag}
        assert {seen.headers["Accept-Encoding"] for seen in server.seen} == {"identity"}


def test_throttling_is_told_to_the_gate_and_retry_after_is_honoured(settings: Settings) -> None:
    gate = Recorder()
    with FaultyServer({"/m": DATA}, first(1, Fault.TOO_MANY), retry_after=1) as server:
        assert fetch(store_of(server, settings), PIN, ByteRange(0, 10), gate) == DATA[:10]
        assert server.seen[1].at - server.seen[0].at >= 1.0
    assert gate.throttles == [1.0]


def test_a_longer_wait_than_allowed_is_said_at_once(settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, always(Fault.TOO_MANY), retry_after=3600) as server:
        with pytest.raises(TransferError, match="asks to wait 3600 s"):
            fetch(store_of(server, settings), PIN, ByteRange(0, 10))
        assert len(server.seen) == 1


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("fault", [Fault.NONE, Fault.SHORT, Fault.WEAK])
def test_an_object_swapped_in_the_middle_is_never_mixed(after: int, fault: Fault, settings: Settings) -> None:
    got = bytearray()

    def sink(offset: int, data: memoryview) -> None:
        got.extend(data)

    with FaultyServer({"/m": DATA}, lambda number: Fault.SHORT if number < after else fault) as server:
        server.swap = (after, "/m", OTHER)
        store = store_of(server, settings)
        with pytest.raises((ChangedError, TransferError), match=r"replaced|strong ETag"):
            store.transport.fetch(store.object("m"), PIN, ByteRange(0, SIZE), sink, OpenGate())
    assert bytes(got) == DATA[: len(got)]
    assert len(got) >= SIZE // 2


def test_without_a_validator_an_object_is_unpinned_and_taken_whole(settings: Settings) -> None:
    for fault in (Fault.WEAK, Fault.NO_TAG, Fault.WHOLE):
        with FaultyServer({"/m": DATA}, always(fault)) as server:
            store = store_of(server, settings)
            probe = store.transport.probe(store.object("m"), 65536, None, OpenGate())
            assert probe.version == Version("", SIZE)
            assert probe.data == DATA[:65536]
            with pytest.raises(TransferError, match="read it whole"):
                fetch(store, probe.version, ByteRange(0, 10))
            out = bytearray(SIZE)

            def sink(offset: int, data: memoryview, out: bytearray = out) -> None:
                out[offset : offset + len(data)] = data

            assert store.transport.fetch_whole(store.object("m"), SIZE, sink, OpenGate()).size == SIZE
            assert out == DATA


@pytest.mark.parametrize(
    "fault", [Fault.SHORT, Fault.CHUNKED_CUT, Fault.STALL, Fault.RESET, Fault.BUSY, Fault.GZIP, Fault.HTML]
)
def test_a_whole_read_begins_again_after_a_fault(fault: Fault, settings: Settings) -> None:
    starts = []
    out = bytearray(SIZE)

    def sink(offset: int, data: memoryview) -> None:
        if offset == 0:
            starts.append(offset)
        out[offset : offset + len(data)] = data

    with FaultyServer({"/m": DATA}, first(2, fault)) as server:
        store = store_of(server, replace(settings, stall_timeout=0.2))
        store.transport.fetch_whole(store.object("m"), SIZE, sink, OpenGate())
    assert out == DATA
    assert len(starts) == (1 if fault in (Fault.BUSY, Fault.GZIP, Fault.HTML) else 3)


def test_a_whole_read_that_never_gets_further_ends(settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, always(Fault.RESET)) as server:
        store = store_of(server, replace(settings, retry_seconds=0.5))
        with pytest.raises(TransferError, match="gave up"):
            store.transport.fetch_whole(store.object("m"), SIZE, lambda _, __: None, OpenGate())


def test_a_body_without_any_length_is_refused_when_the_size_is_unknown(settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, always(Fault.UNMARKED)) as server:
        store = store_of(server, settings)
        with pytest.raises(FormatError, match="how long"):
            store.transport.fetch_whole(store.object("m"), -1, lambda _, __: None, OpenGate())


@pytest.mark.parametrize(
    "fault", [Fault.SHORT, Fault.RESET_FIRST, Fault.BUSY, Fault.STALL, Fault.HTML, Fault.GZIP, Fault.SHIFTED]
)
def test_a_probe_survives_faults(fault: Fault, settings: Settings) -> None:
    with FaultyServer({"/m": DATA}, first(2, fault)) as server:
        store = store_of(server, replace(settings, stall_timeout=0.2))
        probe = store.transport.probe(store.object("m"), 65536, None, OpenGate())
    assert probe.version == PIN
    assert probe.data == DATA[:65536]


def mixed(seed: int) -> Plan:
    """Three answers in five are wrong in a way drawn by chance, but never three running."""
    chance = random.Random(seed)
    drawn: list[Fault] = []

    def plan(number: int) -> Fault:
        while len(drawn) <= number:
            calm = chance.random() < 0.4 or (len(drawn) >= 2 and Fault.NONE not in drawn[-2:])
            drawn.append(Fault.NONE if calm else chance.choice(MIXED))
        return drawn[number]

    return plan


def run_mixed(seed: int, settings: Settings) -> int:
    """Fetch spans of two objects through a random mixture of faults; returns how many ended in an error."""
    chance = random.Random(-seed)
    failed = 0
    with FaultyServer({"/m": DATA[:200_000], "/n": OTHER[:90_000]}, mixed(seed)) as server:
        store = store_of(server, replace(settings, stall_timeout=0.1, retry_seconds=10.0))
        if chance.random() < 0.3:
            server.swap = (chance.randrange(2, 8), "/m", OTHER[:200_000])
        for name in ("m", "n", "m"):
            try:
                probe = store.transport.probe(store.object(name), 16384, None, OpenGate())
                assert probe.version is not None
                truths = [
                    body
                    for body in (DATA[:200_000], OTHER[:200_000], OTHER[:90_000])
                    if len(body) == probe.version.size
                ]
                truth = next(body for body in truths if body.startswith(probe.data))
                if probe.version.pinned:
                    assert probe.version.tag == tag_of(truth)
                    start = chance.randrange(probe.version.size)
                    span = ByteRange(start, chance.randrange(start, probe.version.size) + 1)
                    assert fetch(store, probe.version, span, name=name) == truth[span.start : span.stop]
            except LoadstoneError:
                failed += 1
        store.close()
    return failed


@pytest.mark.parametrize("seed", range(200))
def test_faults_mixed_at_random_give_no_wrong_byte(seed: int, settings: Settings) -> None:
    swapped_or_unlucky = 2
    assert run_mixed(seed, settings) <= swapped_or_unlucky
