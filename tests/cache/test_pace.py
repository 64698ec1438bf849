"""The policy of connections and bandwidth, on a simulated store and clock."""

import threading
import time
from collections.abc import Callable

import pytest

from loadstone.loader.node.pace import START, Bandwidth, Pace, ThreadTime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(pace: Pace, clock: Clock, rate: Callable[[int], float], seconds: float) -> None:
    """Let a store deliver ``rate(connections)`` bytes per second to ``pace``."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 0.01
        pace.moved(int(rate(pace.target) * 0.01), pace.target)


def test_it_grows_while_that_brings_more() -> None:
    clock = Clock()
    pace = Pace(32, clock)
    assert pace.target == START
    run(pace, clock, lambda connections: 90e6 * connections, 5)
    assert pace.target == 32


def test_it_stays_where_more_brings_nothing() -> None:
    clock = Clock()
    pace = Pace(32, clock)
    run(pace, clock, lambda connections: 125e6, 30)
    assert pace.target <= START + 2


@pytest.mark.parametrize(("share", "grows"), [(0.2, True), (0.8, False)])
def test_it_does_not_grow_where_receiving_takes_the_processors(share: float, grows: bool) -> None:
    clock = Clock()
    pace = Pace(32, clock, processors=4)
    for _ in range(300):
        clock.now += 0.01
        pace.moved(10_000 * pace.target, pace.target, 0.01 * 4 * share)
    assert (pace.target > START) == grows


def test_each_thread_is_told_its_own_time() -> None:
    meter = ThreadTime()
    taken = []

    def work() -> None:
        meter.taken()
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        taken.append(meter.taken())

    thread = threading.Thread(target=work)
    assert meter.taken() == 0
    thread.start()
    thread.join()
    assert taken[0] >= 0.02
    assert meter.taken() < taken[0] + 0.02


def test_it_finds_the_knee() -> None:
    clock = Clock()
    pace = Pace(64, clock)
    run(pace, clock, lambda connections: min(90e6 * connections, 1200e6), 9)
    assert 12 <= pace.target <= 20


def test_it_halves_when_asked_to_slow_down_and_grows_again_later() -> None:
    clock = Clock()
    pace = Pace(32, clock)
    run(pace, clock, lambda connections: 90e6 * connections, 5)
    for _ in range(10):
        pace.throttled()
    assert pace.target == 16
    clock.now += 1
    pace.throttled()
    assert pace.target == 8
    run(pace, clock, lambda connections: 90e6 * connections, 4)
    assert pace.target == 8
    run(pace, clock, lambda connections: 90e6 * connections, 5)
    assert pace.target > 8
    for _ in range(20):
        clock.now += 1
        pace.throttled()
    assert pace.target == 1


def test_idle_connections_prove_nothing() -> None:
    clock = Clock()
    pace = Pace(32, clock)
    for _ in range(1000):
        clock.now += 0.01
        pace.moved(10_000_000, 1)
    assert pace.target == START


@pytest.mark.parametrize("most", [1, 2, 3])
def test_it_stays_within_its_bounds(most: int) -> None:
    clock = Clock()
    pace = Pace(most, clock)
    run(pace, clock, lambda connections: 90e6 * connections, 5)
    assert pace.target == most


def test_bandwidth_is_shared_out_in_time() -> None:
    clock = Clock()
    cap = Bandwidth(1000, clock)
    assert [cap.delay(500) for _ in range(3)] == [0.0, 0.5, 0.5]
    clock.now += 0.5
    assert [cap.delay(2000), cap.delay(1)] == [0.0, 2.0]
    clock.now += 10
    assert [cap.delay(1000), cap.delay(1)] == [0.0, 1.0]
    assert Bandwidth(0, clock).delay(10**12) == 0.0
