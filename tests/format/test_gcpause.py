"""The garbage collector's pause: shared by threads, gone in the end, whatever happens in between."""

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from loadstone.loader.format.gcpause import SMALL, paused_gc


@pytest.fixture(autouse=True)
def _collector_on() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_the_collector_rests_inside_and_runs_outside() -> None:
    with paused_gc(SMALL):
        assert not gc.isenabled()
        with paused_gc(SMALL):
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_small_input_leaves_the_process_alone() -> None:
    with paused_gc(SMALL - 1):
        assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(RuntimeError), paused_gc(SMALL):
        raise RuntimeError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with paused_gc(SMALL):
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_the_last_of_many_threads_ends_the_pause() -> None:
    seen: list[bool] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        for _ in range(500):
            with paused_gc(SMALL):
                seen.append(gc.isenabled())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4000
    assert not any(seen)
    assert gc.isenabled()


def test_a_child_forked_in_another_threads_pause_collects() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with paused_gc(SMALL):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            works = gc.isenabled()
            with paused_gc(SMALL):
                works = works and not gc.isenabled()
            code = 0 if works and gc.isenabled() else 1
        finally:
            os._exit(code)
    leave.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.isenabled()
