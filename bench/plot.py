"""Draws a report as bars: one panel for each piece of work, one bar for each way, loadstone's own in colour.

A bar is the median of one figure, the time to the first token or else the first that was measured; the line
across it goes from the least run to the greatest.
"""

from importlib.util import find_spec
from pathlib import Path

from loadstone.bench.schema import Report
from loadstone.bench.tables import cell, heading
from loadstone.errors import BenchError

_OURS, _OTHERS, _SPREAD = "#2f6f9f", "#b9bec4", "#3c4043"
_WIDTH, _BAR, _PANEL = 8.0, 0.34, 0.75  # inches
_FIRST = "first_token_seconds"
_KINDS = (".svg", ".png", ".pdf")


def check_plot_path(path: Path) -> None:
    """Refuse a file that cannot be drawn, before anything is measured.

    Raises
    ------
    BenchError
        Its name ends with none of the known kinds, or matplotlib is not installed.
    """
    if path.suffix.lower() not in _KINDS:
        raise BenchError(f"{path} is no plot; let its name end with {', '.join(_KINDS)}")
    if find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib; pip install 'loadstone[bench]'")


def plot(report: Report, path: Path) -> None:
    """Draw ``report`` into ``path``; its ending says in which format."""
    from matplotlib.figure import Figure  # noqa: PLC0415  slow to import, and an extra

    works = report.works()
    rows = [len(report.ways(work)) for work in works]
    height = sum(rows) * _BAR + len(works) * _PANEL
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    panels = figure.subplots(len(works), 1, squeeze=False, height_ratios=[count + 1 for count in rows])
    for axes, work in zip(panels[:, 0], works, strict=True):
        figures = report.figures(work)
        shown = _FIRST if _FIRST in figures else figures[0]
        ways = [way for way in report.ways(work) if report.median(way, shown) is not None]
        medians = [report.median(way, shown) or 0.0 for way in ways]
        runs = [[row.figures[shown] for row in report.rows if row.way == way] for way in ways]
        colours = [_OURS if "loadstone" in way else _OTHERS for way in ways]
        axes.barh(ways, medians, color=colours)
        axes.hlines(ways, [min(values) for values in runs], [max(values) for values in runs], color=_SPREAD)
        for way, value, values in zip(ways, medians, runs, strict=True):
            axes.text(max(values), way, f"  {cell(shown, value)}", va="center", fontsize=9)
        axes.set_title(f"{work or report.benchmark}: {heading(shown)}", loc="left", fontsize=10)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
        axes.tick_params(axis="y", length=0)
    figure.savefig(path)
