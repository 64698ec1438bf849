"""Processes that hold something together."""

import sys

import pytest

from loadstone.bench.hold import hold_together
from loadstone.bench.runner import CannotRun
from loadstone.errors import BenchError
from loadstone.settings import Settings

HOLD = """
import sys
print("ready", flush=True)
sys.stdin.readline()
print('{"held": 7}', flush=True)
sys.stdin.read()
"""
ENV = Settings.from_env().environment()


def run(code: str) -> dict[str, float]:
    return hold_together([sys.executable, "-c", code], ENV, 3)


def test_figures_are_summed_over_processes_that_are_all_there() -> None:
    assert run(HOLD) == {"held": 21.0}


def test_a_process_that_fails_is_an_error_with_its_last_words() -> None:
    with pytest.raises(BenchError, match=r"status 1: (.|\n)*ValueError: no room"):
        run("raise ValueError('no room')")


def test_a_process_that_cannot_says_why() -> None:
    with pytest.raises(CannotRun, match="not installed"):
        run("print('not installed'); raise SystemExit(77)")
