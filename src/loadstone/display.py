"""What people see while bytes move: a bar on a terminal, a line now and then in a log, events for machines.

Everything here goes to standard error, so that a command's own output can be piped; only ``--json`` events
go to standard output. rich is imported when the first bar is drawn, after the first request has been sent.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from loadstone.loader.source import Prefetch, Progress

LOG_SECONDS = 5.0
"""Seconds between two lines in a log."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: float) -> str:
    """Return ``count`` bytes in binary units, three significant digits: ``12.6 MiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return (
        f"{count:.0f} B"
        if unit == 0
        else f"{count:.3g} {_UNITS[unit]}"
        if count < 1000
        else f"{count:.0f} {_UNITS[unit]}"
    )


def human_seconds(seconds: float) -> str:
    """Return a duration as people read it: ``350 ms``, ``4.2 s``, ``3 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 object``, ``3 objects``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns to standard output, never shortened: names are there to be copied.

    Characters that would steer the terminal are shown as their escapes.
    """
    lines = [[_shown(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def _shown(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def follow(
    prefetch: Prefetch, label: str, *, as_json: bool = False, enough: Callable[[], bool] | None = None
) -> None:
    """Show ``prefetch`` until it ends, or until ``enough()`` says so.

    Parameters
    ----------
    prefetch : Prefetch
        What to watch.
    label : str
        What is being fetched, in a few words.
    as_json : bool
        Print one JSON object a line to standard output instead: ``{"event": "progress", …}`` with bytes and
        seconds.
    enough : callable, optional
        Asked ten times a second; true ends the display, and leaves the prefetch running.

    Raises
    ------
    LoadstoneError
        What stopped the prefetch.
    """
    if as_json:
        show: Callable[[Progress], None] = _json_lines(label)
        every = 0.5
    elif sys.stderr.isatty():
        _follow_bar(prefetch, label, enough)
        return
    else:
        show = _log_lines(label, sys.stderr)
        every = LOG_SECONDS
    last = time.monotonic()
    while not _ended(prefetch, enough):
        if time.monotonic() - last >= every:
            show(prefetch.progress())
            last = time.monotonic()
    show(prefetch.progress())


def _ended(prefetch: Prefetch, enough: Callable[[], bool] | None) -> bool:
    return prefetch.wait(0.1) or (enough is not None and enough())


def _json_lines(label: str) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        event = {
            "event": "progress",
            "what": label,
            "bytes_total": progress.total,
            "bytes_ready": progress.ready,
            "bytes_moved": progress.moved,
            "seconds": round(progress.seconds, 3),
        }
        print(json.dumps(event), flush=True)

    return show


def _log_lines(label: str, out: TextIO) -> Callable[[Progress], None]:
    def show(progress: Progress) -> None:
        out.write(f"{label}: {describe(progress)}\n")
        out.flush()

    return show


def describe(progress: Progress) -> str:
    """Return ``progress`` as one phrase: bytes, share, rate, time left."""
    share = 100 if progress.total == 0 else int(100 * progress.ready / progress.total)
    text = f"{human_bytes(progress.ready)} of {human_bytes(progress.total)} ({share}%)"
    if not progress.moved or progress.seconds <= 0:
        return f"{text} in {human_seconds(progress.seconds)}"
    rate = progress.moved / progress.seconds
    text += f", {human_bytes(rate)}/s"
    if progress.ready < progress.total:
        return f"{text}, {human_seconds((progress.total - progress.ready) / rate)} left"
    return f"{text}, done in {human_seconds(progress.seconds)}"


def _follow_bar(prefetch: Prefetch, label: str, enough: Callable[[], bool] | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}", style="progress.data.speed"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(escape(label), total=prefetch.progress().total, rate="")
        ended = False
        while not ended:
            ended = _ended(prefetch, enough)
            progress = prefetch.progress()
            rate = f"{human_bytes(progress.moved / progress.seconds)}/s" if progress.seconds > 0 else ""
            bars.update(task, completed=progress.ready, total=progress.total, rate=rate)
