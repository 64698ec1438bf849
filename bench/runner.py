"""Runs the ways of a benchmark in turn, and writes the report.

Ways are interleaved (A B C, A B C, …) so that a machine that drifts slower or faster does so for all of them,
and each run is a fresh process. A way that cannot run here is listed as absent, with the reason.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadstone.bench.schema import Absent, Report, Row
from loadstone.display import human_seconds
from loadstone.errors import BenchError

Measure = Callable[[], tuple[str, Mapping[str, float]]]
"""Does the work once; returns what was cold or warm, and the figures."""


class CannotRun(Exception):  # noqa: N818  an answer, not an error
    """A way cannot be measured on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way of doing the work of a benchmark, or one piece of its work where it has several."""

    name: str
    measure: Measure
    work: str = ""


def run_ways(report: Report, ways: Sequence[Way], runs: int) -> None:
    """Measure every way ``runs`` times, interleaved, into ``report``; progress goes to standard error."""
    gone: set[str] = set()
    for run in range(runs):
        for way in ways:
            if way.name in gone:
                continue
            began = time.monotonic()
            try:
                state, figures = way.measure()
            except CannotRun as reason:
                gone.add(way.name)
                report.absent.append(Absent(way.name, str(reason)))
                _say(f"{way.name}: absent ({reason})")
                continue
            report.rows.append(Row(way.name, run, state, dict(figures), way.work))
            _say(f"{way.name}, run {run + 1} of {runs}: {human_seconds(time.monotonic() - began)}")


def run_process(argv: Sequence[str], env: Mapping[str, str], timeout: float = 600.0) -> dict[str, float]:
    """Run one fresh process to its end and return its figures.

    The process prints one JSON object of figures as its last line. ``cpu_seconds`` (user and system, of it
    and the children it waited for) is added from the kernel's own accounting.

    Raises
    ------
    BenchError
        It failed, or printed no figures; the message carries the end of what it wrote to standard error.
    CannotRun
        It left with status 77 and the reason as its last line.
    """
    before = os.times()
    done = subprocess.run(
        list(argv), env=dict(env), capture_output=True, text=True, timeout=timeout, check=False
    )
    after = os.times()
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 77:
        raise CannotRun(last)
    if done.returncode != 0:
        raise BenchError(
            f"{' '.join(argv[:4])} … ended with status {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    try:
        figures = json.loads(last)
    except ValueError:
        raise BenchError(
            f"{' '.join(argv[:4])} … printed no figures; its last line is {last[:200]!r}"
        ) from None
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {**{name: float(value) for name, value in figures.items()}, "cpu_seconds": cpu}


def chosen_works(only: Sequence[str] | None, known: Iterable[str]) -> list[str]:
    """Return the pieces of work to measure: those that ``only`` names, by default all.

    Raises
    ------
    BenchError
        There is no such piece of work.
    """
    known = list(known)
    for name in only or ():
        if name not in known:
            raise BenchError(f"there is no piece of work called {name!r}; choose of {', '.join(known)}")
    return known if only is None else list(only)


def write(report: Report, path: Path) -> None:
    """Write ``report`` as JSON to ``path``, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.to_json(), indent=2, ensure_ascii=False) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
