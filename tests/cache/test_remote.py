"""A remote source over the node cache: right bytes, each moved once, whatever the order."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.fake_store import FakeStore

from loadstone.errors import (
    ChangedError,
    ClosedError,
    LoadstoneError,
    NotFoundError,
    StalledError,
    TransferError,
)
from loadstone.loader.node import remote
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.remote import RemoteBlob, RemoteSource
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Span
from loadstone.loader.stores.store import Connector
from loadstone.settings import Settings

Open = Callable[..., RemoteSource]


def some_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        cache_dir=str(tmp_path / "cache"), request_bytes=4 * BLOCK, stall_timeout=1.0, retry_seconds=2
    )


@pytest.fixture
def opened(settings: Settings) -> Iterator[Open]:
    sources: list[RemoteSource] = []

    def open_source(store: FakeStore, **changes: object) -> RemoteSource:
        own = replace(settings, **changes)  # type: ignore[arg-type]  # any setting
        sources.append(RemoteSource(store, own, NodeCache(own)))
        return sources[-1]

    yield open_source
    for source in sources:
        source.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("loadstone-fetch", "loadstone-open"))]


def blob_of(source: RemoteSource, name: str) -> RemoteBlob:
    blob = source.open([name])[name]
    assert isinstance(blob, RemoteBlob), blob
    return blob


def test_demand_moves_the_blocks_it_needs_and_no_more(opened: Open) -> None:
    data = some_bytes(20 * BLOCK + 123)
    store = FakeStore({"a": data})
    blob = blob_of(opened(store), "a")
    assert store.moved == BLOCK
    assert blob.ready(ByteRange(0, BLOCK))
    assert not blob.ready(ByteRange(BLOCK, BLOCK + 1))
    assert blob.read(ByteRange(3 * BLOCK + 5, 4 * BLOCK + 1)) == data[3 * BLOCK + 5 : 4 * BLOCK + 1]
    assert store.moved == 3 * BLOCK
    assert blob.read(ByteRange(20 * BLOCK, len(data))) == data[20 * BLOCK :]
    assert store.moved == 3 * BLOCK + 123
    assert blob.read(ByteRange(0, len(data))) == data
    assert store.moved == len(data)
    assert bytes(blob.buffer()) == data


def test_opening_again_moves_nothing(opened: Open) -> None:
    data = some_bytes(3 * BLOCK)
    store = FakeStore({"a": data})
    first = opened(store)
    blob_of(first, "a").read(ByteRange(0, len(data)))
    first.close()
    again = FakeStore({"a": data})
    blob = blob_of(opened(again), "a")
    assert blob.read(ByteRange(0, len(data))) == data
    assert again.moved == 0
    assert again.not_modified == 1


def test_versions_live_side_by_side(opened: Open) -> None:
    old, new = some_bytes(5 * BLOCK, 1), some_bytes(5 * BLOCK, 2)
    store = FakeStore({"a": old})
    first = blob_of(opened(store), "a")
    first.read(ByteRange(BLOCK, 2 * BLOCK))
    store.replace("a", new)
    with pytest.raises(ChangedError):
        first.read(ByteRange(4 * BLOCK, 5 * BLOCK))
    second = blob_of(opened(store), "a")
    assert second.read(ByteRange(0, len(new))) == new
    assert first.read(ByteRange(BLOCK, 2 * BLOCK)) == old[BLOCK : 2 * BLOCK]
    store.replace("a", old, f'"{len(old)}-0"')
    assert blob_of(opened(store), "a").read(ByteRange(0, len(old))) == old


def test_many_objects_are_probed_side_by_side(opened: Open) -> None:
    store = FakeStore({f"s{number}": some_bytes(2 * BLOCK, number) for number in range(30)})
    store.latency = 0.1
    begun = time.monotonic()
    blobs = opened(store).open([*store.objects, "missing"])
    assert time.monotonic() - begun < 1.0
    assert isinstance(blobs.pop("missing"), NotFoundError)
    assert all(isinstance(blob, RemoteBlob) and blob.ready(ByteRange(0, BLOCK)) for blob in blobs.values())


def test_small_and_empty_objects(opened: Open) -> None:
    store = FakeStore({"empty": b"", "small": b"tiny", "block": some_bytes(BLOCK)})
    source = opened(store)
    blobs = source.open(list(store.objects))
    for name, blob in blobs.items():
        assert isinstance(blob, RemoteBlob)
        assert blob.read(ByteRange(0, blob.size)) == store.objects[name][1]
        assert len(blob.buffer()) == blob.size
    assert store.moved == 4 + BLOCK
    assert source.prefetch(
        [Span(blob, ByteRange(0, 0)) for blob in blobs.values() if isinstance(blob, RemoteBlob)]
    ).wait()


def test_prefetch_brings_everything_in_order_and_reports(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(40 * BLOCK), "b": some_bytes(10 * BLOCK + 1, 1)})
    source = opened(store, max_connections=1)
    blobs = [blob_of(source, "b"), blob_of(source, "a")]
    handle = source.prefetch([Span(blob, ByteRange(0, blob.size)) for blob in blobs])
    assert handle.wait(10)
    assert handle.done()
    progress = handle.progress()
    assert progress.ready == progress.total == 50 * BLOCK + 1
    assert progress.moved == 48 * BLOCK + 1
    assert store.moved == progress.total
    asked = [(request.name[-1], request.span.start) for request in store.requests[2:]]
    assert asked == sorted(asked, key=lambda item: (item[0] == "a", item[1]))
    for blob in blobs:
        assert bytes(blob.buffer()) == store.objects[blob.name[-1]][1]


def test_demand_overtakes_prefetch(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(400 * BLOCK), "b": some_bytes(20 * BLOCK, 1)})
    store.rate, store.chunk = 20 * 1024 * 1024, BLOCK
    source = opened(store)
    first, second = blob_of(source, "a"), blob_of(source, "b")
    handle = source.prefetch([Span(first, ByteRange(0, first.size))])
    time.sleep(0.1)
    begun = time.monotonic()
    assert second.read(ByteRange(0, second.size)) == store.objects["b"][1]
    waited = time.monotonic() - begun
    assert waited < 0.8  # behind the prefetch it would be 1.3
    prefetched = [request for request in store.requests if request.name.endswith("a")]
    sent = [chunk for request in prefetched for chunk in request.sent]
    between = [count for at, count in sent if begun + 0.05 < at < begun + waited]
    assert sum(between) <= 12 * BLOCK
    assert handle.wait(10)
    assert store.moved == first.size + second.size


def test_one_connection_still_serves_demand_first(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(400 * BLOCK), "b": some_bytes(20 * BLOCK, 1)})
    store.rate, store.chunk = 20 * 1024 * 1024, BLOCK
    source = opened(store, max_connections=1, request_bytes=256 * BLOCK)
    first, second = blob_of(source, "a"), blob_of(source, "b")
    handle = source.prefetch([Span(first, ByteRange(0, first.size))])
    time.sleep(0.1)
    begun = time.monotonic()
    second.read(ByteRange(0, second.size))
    assert time.monotonic() - begun < 0.9  # behind the prefetch it would be 1.3
    assert handle.wait(10)
    assert store.most_active == 1
    assert bytes(first.buffer()) == store.objects["a"][1]


def test_demand_waits_for_the_stream_that_carries_its_blocks(opened: Open) -> None:
    data = some_bytes(64 * BLOCK)
    store = FakeStore({"a": data})
    store.rate, store.chunk = 40 * 1024 * 1024, BLOCK
    source = opened(store, request_bytes=64 * BLOCK)
    blob = blob_of(source, "a")
    handle = source.prefetch([Span(blob, ByteRange(0, blob.size))])
    time.sleep(0.02)
    assert blob.read(ByteRange(40 * BLOCK, 41 * BLOCK)) == data[40 * BLOCK : 41 * BLOCK]
    assert handle.wait(10)
    assert store.moved == len(data)


def test_cancel_leaves_nothing_running(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(400 * BLOCK)})
    store.rate, store.chunk = 20 * 1024 * 1024, BLOCK
    source = opened(store)
    blob = blob_of(source, "a")
    handle = source.prefetch([Span(blob, ByteRange(0, blob.size))])
    time.sleep(0.1)
    handle.cancel()
    assert store.active == 0
    moved = store.moved
    assert handle.done()
    assert handle.wait()
    time.sleep(0.1)
    assert store.moved == moved < blob.size
    assert blob.read(ByteRange(0, blob.size)) == store.objects["a"][1]


def test_close_ends_waiting_threads_and_transfers(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(400 * BLOCK)})
    store.rate, store.chunk = 1024 * 1024, BLOCK
    source = opened(store)
    blob = blob_of(source, "a")
    view = blob.buffer()
    source.prefetch([Span(blob, ByteRange(0, blob.size))])
    errors: list[LoadstoneError] = []

    def wait() -> None:
        try:
            blob.ensure([ByteRange(0, blob.size)])
        except LoadstoneError as error:
            errors.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.1)
    source.close()
    waiter.join(2)
    assert not waiter.is_alive()
    assert store.active == 0
    assert isinstance(errors[0], ClosedError)
    with pytest.raises(ClosedError):
        blob.ensure([ByteRange(0, 1)])
    with pytest.raises(ClosedError):
        source.open(["a"])
    assert bytes(view[:BLOCK]) == store.objects["a"][1][:BLOCK]


def test_a_failure_reaches_who_asked_and_the_next_tries_afresh(opened: Open) -> None:
    data = some_bytes(30 * BLOCK)
    store = FakeStore({"a": data})
    source = opened(store)
    blob = blob_of(source, "a")

    def fail(name: str, at: int) -> None:
        if at >= 10 * BLOCK:
            raise TransferError("the store is down")

    store.before_chunk = fail
    handle = source.prefetch([Span(blob, ByteRange(0, blob.size))])
    with pytest.raises(TransferError, match="the store is down"):
        handle.wait(10)
    with pytest.raises(TransferError, match="the store is down"):
        blob.read(ByteRange(12 * BLOCK, 13 * BLOCK))
    store.before_chunk = lambda name, at: 1 // 0  # type: ignore[assignment]  # a bug somewhere
    with pytest.raises(TransferError, match="ZeroDivisionError"):
        blob.read(ByteRange(12 * BLOCK, 13 * BLOCK))
    store.before_chunk = None
    assert blob.read(ByteRange(0, blob.size)) == data
    assert source.prefetch([Span(blob, ByteRange(0, blob.size))]).wait(10)


def test_a_timeout_says_so(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(30 * BLOCK)})
    source = opened(store)
    blob = blob_of(source, "a")
    store.latency = 0.5
    with pytest.raises(StalledError, match=r"within 0\.1 s"):
        blob.ensure([ByteRange(BLOCK, 2 * BLOCK)], timeout=0.1)
    store.latency = 0
    blob.ensure([ByteRange(BLOCK, 2 * BLOCK)], timeout=5)


def test_many_threads_read_at_random(opened: Open) -> None:
    data = some_bytes(200 * BLOCK + 77)
    store = FakeStore({"a": data})
    source = opened(store)
    blob = blob_of(source, "a")
    wrong: list[ByteRange] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            start = rng.randrange(len(data))
            span = ByteRange(start, min(len(data), start + rng.randrange(1, 6 * BLOCK)))
            if blob.read(span) != data[span.start : span.stop]:
                wrong.append(span)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    handle = source.prefetch([Span(blob, ByteRange(0, blob.size))])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert handle.wait(10)
    assert not wrong
    assert store.moved == len(data)


def test_unpinned_objects_are_read_whole_and_compared(opened: Open) -> None:
    data = some_bytes(30 * BLOCK + 5)
    store = FakeStore({"a": data})
    store.replace("a", data, "")
    source = opened(store)
    blob = blob_of(source, "a")
    broken = iter([True])

    def break_once(name: str, at: int) -> None:
        if at > 20 * BLOCK and next(broken, False):
            raise TransferError("cut")

    store.before_chunk = break_once
    with pytest.raises(TransferError, match="cut"):
        blob.read(ByteRange(25 * BLOCK, 26 * BLOCK))
    assert blob.ready(ByteRange(0, 15 * BLOCK))
    assert blob.read(ByteRange(0, len(data))) == data
    assert source.prefetch([Span(blob, ByteRange(0, blob.size))]).wait(5)


def test_an_unpinned_object_that_changes_is_noticed(opened: Open) -> None:
    data = some_bytes(30 * BLOCK)
    store = FakeStore({"a": data})
    store.replace("a", data, "")
    blob = blob_of(opened(store), "a")
    store.replace("a", data[:100] + b"!" + data[101:], "")
    with pytest.raises(ChangedError, match="changed while it was read"):
        blob.read(ByteRange(25 * BLOCK, 26 * BLOCK))
    store.replace("a", data[:-1], "")
    with pytest.raises(ChangedError):
        blob.read(ByteRange(25 * BLOCK, 26 * BLOCK))


def test_memory_only(opened: Open) -> None:
    data = some_bytes(30 * BLOCK + 3)
    store = FakeStore({"a": data})
    source = opened(store, cache_dir="none")
    blob = blob_of(source, "a")
    assert blob.read(ByteRange(5 * BLOCK + 1, 9 * BLOCK)) == data[5 * BLOCK + 1 : 9 * BLOCK]
    assert source.prefetch([Span(blob, ByteRange(0, blob.size))]).wait(5)
    assert bytes(blob.buffer()) == data
    assert store.moved == len(data)


def test_a_slow_store_gets_fewer_connections_when_it_asks(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(100 * BLOCK)})
    store.chunk, store.rate = BLOCK, 20 * 1024 * 1024
    store.throttle = {3, 4}
    source = opened(store, request_bytes=BLOCK * 8)
    blob = blob_of(source, "a")
    assert source.prefetch([Span(blob, ByteRange(0, blob.size))]).wait(20)
    late = store.requests[8:]
    assert late
    overlapping = max(
        sum(other.begun <= request.begun < other.sent[-1][0] for other in late) for request in late
    )
    assert overlapping <= 2


def test_a_bandwidth_cap_holds(opened: Open) -> None:
    store = FakeStore({"a": some_bytes(64 * BLOCK)})
    source = opened(store, bandwidth=8 * 1024 * 1024)
    blob = blob_of(source, "a")
    begun = time.monotonic()
    assert source.prefetch([Span(blob, ByteRange(0, blob.size))]).wait(20)
    assert time.monotonic() - begun > 0.35


class _Reaching(FakeStore):
    """A store that counts the connections made ahead."""

    connected = 0
    most = 32

    def connector(self) -> Connector:
        return Connector(self._connect, self.most)

    def _connect(self) -> None:
        with self._lock:
            self.connected += 1


def test_the_first_look_at_several_objects_reaches_out_for_more(opened: Open) -> None:
    store = _Reaching({name: some_bytes(10) for name in "abcde"})
    store.latency = 0.3
    source = opened(store, max_connections=8)
    source.open(["a", "b"])
    assert store.connected == 8 - 2 - 1  # one is listing the folder, perhaps
    source.open(["c", "d", "e"])
    assert store.connected == 5
    one = _Reaching({"a": some_bytes(10)})
    opened(one).open(["a"])
    assert one.connected == 0


def test_no_more_connections_are_made_ahead_than_are_worth_while(opened: Open) -> None:
    store = _Reaching({name: some_bytes(10) for name in "ab"})
    store.latency, store.most = 0.3, 3
    opened(store, max_connections=8).open(["a", "b"])
    assert store.connected == 3


def test_a_store_that_answers_at_once_is_not_reached_out_for(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_AT_ONCE", 5.0)
    store = _Reaching({name: some_bytes(10) for name in "ab"})
    source = opened(store)
    source.open(["a", "b"])
    source.close()
    assert store.connected == 0
