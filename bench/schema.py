"""What a benchmark writes: rows of figures, with everything needed to judge or repeat them.

One report is one run of one benchmark. A row is one *way* of doing the work, once. Figures are plain numbers
whose names carry their unit (``first_token_seconds``, ``moved_bytes``); what cannot be measured is absent,
never zero.
"""

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

SCHEMA = "loadstone.bench/1"
_PACKAGES = (
    *("loadstone", "torch", "transformers", "peft", "safetensors", "fsspec", "s3fs"),
    *("fastsafetensors", "obstore", "runai-model-streamer", "tensorizer"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way of doing the work, once.

    Attributes
    ----------
    way : str
        What was measured, in words that a table can show; unique in its report.
    run : int
        Which repetition, from 0.
    state : str
        What was cold and what was warm, as it was proved before the run.
    figures : mapping of str to float
        The measurements; units are in the names.
    work : str
        Which piece of work, where a benchmark has several: each is a table of its own.
    """

    way: str
    run: int
    state: str
    figures: Mapping[str, float]
    work: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    """A way that could not be measured here, and why."""

    way: str
    why: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio that the work must reach, computed from the medians of one report.

    Attributes
    ----------
    text : str
        What is compared, as a sentence.
    value, limit : float
        What was reached and what is asked for.
    at_most : bool
        Whether ``value`` must not exceed ``limit``; otherwise it must reach it.
    """

    text: str
    value: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        """Whether the bar is reached."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(slots=True)
class Report:
    """All rows of one run of a benchmark."""

    benchmark: str
    settings: Mapping[str, object]
    rows: list[Row] = field(default_factory=list)
    absent: list[Absent] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    started: float = field(default_factory=time.time)

    def median(self, way: str, figure: str) -> float | None:
        """Return the median of one figure over a way's runs; ``None`` where it was not measured."""
        values = [row.figures[figure] for row in self.rows if row.way == way and figure in row.figures]
        return median(values) if values else None

    def works(self) -> list[str]:
        """Return the pieces of work that have rows, in the order of their first one."""
        return list(dict.fromkeys(row.work for row in self.rows))

    def ways(self, work: str | None = None) -> list[str]:
        """Return the ways that have rows (of one piece of work), in the order of their first one."""
        return list(dict.fromkeys(row.way for row in self._of(work)))

    def figures(self, work: str | None = None) -> list[str]:
        """Return the names of all figures (of one piece of work), in the order of their first use."""
        return list(dict.fromkeys(name for row in self._of(work) for name in row.figures))

    def _of(self, work: str | None) -> list[Row]:
        return [row for row in self.rows if work is None or row.work == work]

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON-ready data, medians, hardware and versions included."""
        medians = {way: self._medians(way) for way in self.ways()}
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started)),
            "settings": dict(self.settings),
            "machine": machine(),
            "versions": versions(_PACKAGES),
            "medians": medians,
            "bars": [{**asdict(bar), "met": bar.met} for bar in self.bars],
            "rows": [asdict(row) for row in self.rows],
            "absent": [asdict(gone) for gone in self.absent],
        }

    def _medians(self, way: str) -> dict[str, float]:
        found = ((figure, self.median(way, figure)) for figure in self.figures())
        return {figure: value for figure, value in found if value is not None}


def machine() -> dict[str, object]:
    """Return what this machine is: processor, cores, memory in bytes, kernel."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those ``packages`` that are installed."""
    found: dict[str, str] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def ratio(report: Report, figure: str, ours: str, theirs: Sequence[str]) -> float | None:
    """Return our median of ``figure`` over the smallest of ``theirs``; ``None`` when either is missing."""
    mine = report.median(ours, figure)
    others = [value for way in theirs if (value := report.median(way, figure))]
    return mine / min(others) if mine is not None and others else None
