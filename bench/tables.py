"""Shows a report on a terminal: tables for each piece of work, then the bars, then what is absent."""

import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from loadstone.bench.schema import Report
from loadstone.display import counted, human_bytes, human_seconds

_WIDTH = 160  # columns of a table that goes to a file or a pipe
_BORDERS = 3  # columns that a cell takes beside its text


def show(report: Report, console: Console | None = None) -> None:
    """Print the medians, the bars and what is absent.

    A table that is wider than the console is cut between two figures into several, one below the other.
    """
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH)
    for work in report.works():
        for table in _tables(report, work, console.width):
            console.print(table)
    for bar in report.bars:
        sign = "≤" if bar.at_most else "≥"
        verdict = "[green]met[/]" if bar.met else "[red]missed[/]"
        console.print(f"{verdict}  {bar.text}: {bar.value:.3g} (bar {sign} {bar.limit:g})")
    for gone in report.absent:
        console.print(f"absent: {gone.way} ({gone.why})")


def heading(figure: str) -> str:
    """Return a figure's name without its unit, as words."""
    name = figure.removesuffix("_per_second").removesuffix("_seconds").removesuffix("_bytes")
    return name.replace("_", " ")


def cell(figure: str, value: float | None) -> str:
    """Return a figure in the unit that its name ends with."""
    if value is None:
        return "-"
    if figure.endswith("_seconds"):
        return human_seconds(value) if value >= 0.1 else f"{1000 * value:.3g} ms"
    if figure.endswith("_bytes"):
        return human_bytes(value)
    if figure.endswith("_bytes_per_second"):
        return f"{human_bytes(value)}/s"
    return f"{value:.3g}"


def _tables(report: Report, work: str, width: int) -> list[Table]:
    ways = report.ways(work)
    columns = [
        [heading(figure), *(cell(figure, report.median(way, figure)) for way in ways)]
        for figure in report.figures(work)
    ]
    room = width - max(map(len, ways)) - _BORDERS - 1
    title = f"{work or report.benchmark}: medians of {counted(_runs(report, work), 'run')}"
    starts = _cuts([_natural_width(column) for column in columns], room)
    return [
        _table(title if start == 0 else None, ways, columns[start:stop]) for start, stop in pairwise(starts)
    ]


def _cuts(widths: Sequence[int], room: int) -> list[int]:
    """Return where each table begins, and the end of the last."""
    starts, used = [0], 0
    for number, width in enumerate(widths):
        if used and used + width > room:
            starts.append(number)
            used = 0
        used += width
    return [*starts, len(widths)]


def _natural_width(column: Sequence[str]) -> int:
    """Return how wide one must be: its heading may be broken between words, its figures must not."""
    return max(len(text) for text in [*column[0].split(), *column[1:]]) + _BORDERS


def _lines(column: Sequence[str]) -> list[str]:
    """Break a heading into lines that are no longer than need be."""
    return textwrap.wrap(column[0], _natural_width(column) - _BORDERS)


def _table(title: str | None, ways: Sequence[str], columns: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("way", no_wrap=True)
    for column in columns:
        table.add_column("\n".join(_lines(column)), justify="right")
    for number, way in enumerate(ways, 1):
        table.add_row(way, *(column[number] for column in columns))
    return table


def _runs(report: Report, work: str) -> int:
    return max(row.run for row in report.rows if row.work == work) + 1
