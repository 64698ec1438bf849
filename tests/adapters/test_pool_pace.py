"""Loads leave the interpreter to batches that run."""

import threading
import time
from pathlib import Path

import torch
from tests.support.plain_adapters import Base, inputs, pool_over, write

from loadstone.adapters.pace import SHARE, Pace


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_loads_pause_in_proportion_to_what_they_cost_while_batches_run() -> None:
    pace = Pace(lambda: True)
    start = time.monotonic()
    for _ in range(4):
        with pace.turn():
            spin(0.004)
    # The first starts at once and its cost is not known before, so two pauses are certain.
    assert time.monotonic() - start >= 2 * 0.004 / SHARE * 0.9


def test_loads_do_not_wait_when_nothing_runs() -> None:
    pace = Pace(lambda: False)
    with pace.turn():
        spin(0.05)
    start = time.monotonic()
    for _ in range(3):
        with pace.turn():
            pass
    assert time.monotonic() - start < 0.05 / SHARE


def test_a_pool_knows_whether_another_thread_runs_batches(tmp_path: Path) -> None:
    model = Base()
    write(tmp_path, "a", 0)
    seen: list[bool] = []

    def look() -> None:
        thread = threading.Thread(target=lambda: seen.append(pool._attacher.runs_elsewhere()))
        thread.start()
        thread.join()

    with pool_over(model, tmp_path) as pool:
        look()
        with pool.lease(["a"]) as lease, pool.apply(lease.rows), torch.no_grad():
            model(inputs())
            look()
            assert not pool._attacher.runs_elsewhere()  # a thread does not wait for itself
        look()
        time.sleep(0.25)
        look()
    assert seen == [False, True, True, False]
