"""Several processes that hold something at the same time, and how much memory they take together.

Each process prints ``ready`` when it holds it; when all of them do, each is told to measure, and none ends
before all have: what processes share counts once over all of them only while all of them are there.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from loadstone.bench.runner import CannotRun
from loadstone.errors import BenchError


def hold_together(argv: Sequence[str], env: Mapping[str, str], processes: int) -> dict[str, float]:
    """Start ``processes`` times ``argv``; return the sum of each figure over all of them.

    Raises
    ------
    BenchError
        One of them failed; the message carries the end of what it wrote to standard error.
    CannotRun
        One of them left with status 77 and the reason as its last line.
    """
    with tempfile.TemporaryFile("w+") as errors, _started(argv, env, processes, errors) as children:
        for child in children:
            _hear(child, errors)
        measured = [json.loads(_ask(child, errors)) for child in children]
        for child in children:
            child.communicate()
    return {figure: float(sum(each[figure] for each in measured)) for figure in measured[0]}


@contextmanager
def _started(
    argv: Sequence[str], env: Mapping[str, str], processes: int, errors: IO[str]
) -> Iterator[list["subprocess.Popen[str]"]]:
    children: list[subprocess.Popen[str]] = []
    try:
        for _ in range(processes):
            child = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            children.append(child)
        yield children
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.communicate()


def _ask(child: "subprocess.Popen[str]", errors: IO[str]) -> str:
    assert child.stdin is not None  # it is a pipe
    child.stdin.write("measure\n")
    child.stdin.flush()
    return _hear(child, errors)


def _hear(child: "subprocess.Popen[str]", errors: IO[str]) -> str:
    """Return the next line that ``child`` prints."""
    assert child.stdout is not None  # it is a pipe
    line = child.stdout.readline()
    if line.startswith(("ready", "{")):
        return line
    status = child.wait()
    if status == 77:
        raise CannotRun(line.strip())
    errors.seek(0)
    raise BenchError(
        f"a process that was to hold a model ended with status {status}: {errors.read()[-2000:]}"
    )
