"""Helpers: threads that stay for the next task, and go when there is none."""

import os
import threading
import time
from pathlib import Path

import pytest
from tests.support.checkpoints import model_tensors, write_sharded

import loadstone
from loadstone.fileserver import FileServer
from loadstone.loader.node import helpers
from loadstone.loader.node.helpers import Helpers, acquire, release

NAME = "loadstone-test-helper"


def alive() -> int:
    return sum(thread.name == NAME for thread in threading.enumerate())


def wait_until_gone() -> None:
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert alive() == 0


def test_tasks_run_side_by_side() -> None:
    crew = Helpers(NAME)
    meeting = threading.Barrier(5)

    def meet() -> None:
        meeting.wait(20)

    for _ in range(4):
        crew.run(meet)
    meeting.wait(20)  # all of them came
    crew.close()
    assert alive() == 0


def test_a_thread_serves_again() -> None:
    crew, served = Helpers(NAME), list[int]()
    for _ in range(5):
        done = threading.Event()

        def task(done: threading.Event = done) -> None:
            served.append(threading.get_ident())
            done.set()

        crew.run(task)
        assert done.wait(20)
        while crew._free == 0:  # until it has noticed that it is done
            time.sleep(0.001)
    assert len(set(served)) == 1
    crew.close()


def test_idle_threads_end_and_new_ones_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "_IDLE_SECONDS", 0.01)
    crew = Helpers(NAME)
    for _ in range(3):
        done = [threading.Event() for _ in range(3)]
        for event in done:
            crew.run(event.set)
        assert all(event.wait(20) for event in done)
        wait_until_gone()
        assert crew._free == 0


def test_no_task_is_lost_to_a_thread_that_is_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "_IDLE_SECONDS", 0.0005)
    crew = Helpers(NAME)
    for number in range(500):
        done = threading.Event()
        crew.run(done.set)
        assert done.wait(20), number
        time.sleep(0.0001 * (number % 10))
    crew.close()
    assert alive() == 0


def test_without_threads_the_caller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    crew, done = Helpers(NAME), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            crew.run(done.set)
    assert not done.is_set()
    crew.run(done.set)
    assert done.wait(20)
    crew.close()


def test_a_child_has_helpers_of_its_own() -> None:
    crew, done = Helpers(NAME), threading.Event()
    crew.run(done.set)
    assert done.wait(20)
    child = os.fork()
    if child == 0:
        own = threading.Event()
        crew.run(own.set)
        os._exit(0 if own.wait(20) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    crew.close()


def test_a_start_that_is_interrupted_loses_no_later_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "_IDLE_SECONDS", 0.01)
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    crew = Helpers(NAME)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            crew.run(lambda: None)
    wait_until_gone()
    for _ in range(3):
        done = threading.Event()
        crew.run(done.set)
        assert done.wait(20)
    crew.close()


def test_closed_ones_start_no_more() -> None:
    crew, go = Helpers(NAME), threading.Event()

    def wait() -> None:
        go.wait(20)

    crew.run(wait)
    ending = threading.Thread(target=crew.close)
    ending.start()
    while not crew._closed:
        time.sleep(0.001)
    with pytest.raises(RuntimeError):
        crew.run(lambda: None)
    go.set()
    ending.join(20)
    assert alive() == 0


def openers() -> int:
    return sum(thread.name == "loadstone-open" for thread in threading.enumerate())


def test_checkpoints_that_nobody_closes_share_the_idle_threads(tmp_path: Path) -> None:
    kept, most = [], 0
    with FileServer(write_sharded(tmp_path / "m", model_tensors(), shards=4)) as server:
        for _ in range(15):
            kept.append(loadstone.open(server.url, cache=None))
            most = max(most, openers())
        assert 0 < most <= 16
        for checkpoint in kept:
            checkpoint.close()
    assert openers() == 0


def test_what_is_closed_leaves_the_threads_to_those_that_are_open() -> None:
    class User:
        pass

    one, two = User(), User()
    crew = acquire(one)
    assert acquire(two) is crew
    release(one)
    release(one)
    done = threading.Event()
    crew.run(done.set)
    assert done.wait(20)
    release(two)
    with pytest.raises(RuntimeError):
        crew.run(done.set)
    forgotten = User()
    other = acquire(forgotten)
    assert other is not crew
    del forgotten
    three = User()
    assert acquire(three) is other
    release(three)
    assert openers() == 0
