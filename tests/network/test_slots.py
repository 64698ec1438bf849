"""Connections are bounded for the process: over stores, threads, idle ones and forks."""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace

import fsspec
import pytest
from tests.network.test_exchange import Counter
from tests.support.faulty_server import Fault, FaultyServer, first, tag_of
from tests.support.fetching import fetch, store_of

from loadstone.errors import ClosedError
from loadstone.loader.locations import parse_location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.stores import slots
from loadstone.loader.stores.slots import Share
from loadstone.loader.stores.store import OpenGate, Store, Version, open_store
from loadstone.settings import Settings

DATA = bytes(range(256)) * 4000
PIN = Version(tag_of(DATA), len(DATA))
WHOLE = ByteRange(0, len(DATA))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of the count the stores that other tests have not closed."""
    monkeypatch.setattr(slots, "_shares", weakref.WeakSet())


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with FaultyServer({"/m": DATA}) as running:
        yield running


class Busy:
    """Counts transfers that are under way, through their gates."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()


class SlowGate(OpenGate):
    """Holds one transfer up for a moment, and counts it meanwhile."""

    def __init__(self, busy: Busy) -> None:
        self._busy = busy
        self._counted = False

    def admit(self, nbytes: int) -> None:
        if nbytes and not self._counted:
            self._counted = True
            with self._busy.lock:
                self._busy.now += 1
                self._busy.most = max(self._busy.most, self._busy.now)
            time.sleep(0.03)
            with self._busy.lock:
                self._busy.now -= 1


def test_many_stores_share_one_bound(server: FaultyServer, settings: Settings) -> None:
    bounded = replace(settings, max_connections=3)
    counter, busy, wrong = Counter(server.port), Busy(), list[int]()
    stores = [open_store(parse_location(f"http://127.0.0.1:{counter.port}"), None, bounded) for _ in range(8)]
    assert slots.bound(0) == 3

    def read(store: Store) -> None:
        wrong.append(fetch(store, PIN, WHOLE, SlowGate(busy)) != DATA)

    threads = [threading.Thread(target=read, args=(store,)) for store in stores * 3]
    for thread in threads:
        thread.start()
    open_at_once = 0
    while any(thread.is_alive() for thread in threads):
        pools = [store.transport._pool for store in stores]  # type: ignore[attr-defined]  # looked into
        open_at_once = max(open_at_once, sum(len(pool._idle) + len(pool._busy) for pool in pools))
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert wrong == [False] * 24
    assert 2 <= busy.most <= 3
    assert open_at_once <= 3
    assert slots.taken() == 0
    for store in stores:
        store.close()
    counter.close()


def test_the_bound_holds_for_other_file_systems_too(settings: Settings) -> None:
    fsspec.filesystem("memory").pipe_file("/slots/m", DATA)
    bounded = replace(settings, max_connections=2)
    stores = [open_store(parse_location("memory://slots"), None, bounded) for _ in range(4)]
    version = stores[0].transport.probe(stores[0].object("m"), 10, None, OpenGate()).version
    assert version is not None
    assert fetch(stores[3], version, WHOLE) == DATA
    held = Share(2)
    held.take(lambda: None)
    held.take(lambda: None)
    ended = threading.Event()

    class Cancel(OpenGate):
        def admit(self, nbytes: int) -> None:
            if not nbytes:
                ended.set()
                raise ClosedError("cancelled while it waited for a slot")

    with pytest.raises(ClosedError):
        fetch(stores[1], version, WHOLE, Cancel())
    assert ended.is_set()
    held.give_back()
    assert fetch(stores[1], version, WHOLE) == DATA
    held.give_back()
    for store in stores:
        store.close()
    fsspec.filesystem("memory").rm("/slots", recursive=True)


def test_one_connection_is_enough_for_a_first_look_that_is_cut(
    server: FaultyServer, settings: Settings
) -> None:
    server.plan = first(1, Fault.SHORT)
    store = store_of(server, replace(settings, max_connections=1))
    probe = store.transport.probe(store.object("m"), 64 * 1024, None, OpenGate())
    assert probe.data == DATA[: 64 * 1024]
    store.close()


def test_a_small_share_is_not_starved_by_a_large_one() -> None:
    large, small = Share(4), Share(1)
    for _ in range(3):
        large.take(lambda: None)
    small.take(lambda: None)
    assert slots.taken() == 4
    small.give_back()
    large.take(lambda: None)
    assert not small._free()
    for _ in range(4):
        large.give_back()
    assert small._free()
    large.retire()
    small.retire()


def test_slots_are_given_in_the_order_in_which_they_are_asked_for() -> None:
    busy, new = Share(1), Share(1)
    busy.take(lambda: None)
    order: list[str] = []

    def look() -> None:
        with new.one(lambda: None):
            order.append("new")

    threads = [threading.Thread(target=look)]
    threads[0].start()
    while len(slots._queue) < 1:
        time.sleep(0.001)
    for number in range(5):  # a prefetch that goes from piece to piece
        busy.give_back()
        busy.take(lambda: None)
        order.append(f"piece {number}")
    busy.give_back()
    threads[0].join()
    assert order[0] == "new"
    busy.retire()
    new.retire()


def test_a_store_at_its_own_bound_holds_up_no_other() -> None:
    large, small = Share(4), Share(1)
    small.take(lambda: None)
    waiter = threading.Thread(target=small.take, args=(lambda: None,))
    waiter.start()
    while not slots._queue:
        time.sleep(0.001)
    for _ in range(3):
        large.take(lambda: None)
    small.give_back()
    waiter.join()
    assert slots.taken() == 4
    small.give_back()
    for _ in range(3):
        large.give_back()
    assert (slots.taken(), slots._queue) == (0, {})
    large.retire()
    small.retire()


def test_a_forked_child_has_every_slot(server: FaultyServer, settings: Settings) -> None:
    held = Share(2)
    held.take(lambda: None)
    held.take(lambda: None)
    store = store_of(server, replace(settings, max_connections=2))
    pid = os.fork()
    if pid == 0:
        right = slots.taken() == 0 and fetch(store, PIN, WHOLE) == DATA
        held.give_back()  # what the parent took is not the child's to give
        os._exit(0 if right and slots.taken() == 0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert slots.taken() == 2
    held.give_back()
    held.give_back()
    held.retire()
    store.close()
