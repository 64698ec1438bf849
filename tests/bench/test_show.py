"""What becomes of a report: tables that fit a terminal, and a plot."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from loadstone.bench.plot import check_plot_path, plot
from loadstone.bench.runner import chosen_works
from loadstone.bench.schema import Absent, Bar, Report, Row
from loadstone.bench.tables import show
from loadstone.errors import BenchError


def _report() -> Report:
    figures = {f"figure_{number}_seconds": 0.25 * number for number in range(1, 12)}
    rows = [
        Row(way, run, "warm", {name: value * (run + 1) for name, value in figures.items()}, "a piece of work")
        for run in range(3)
        for way in ("piece: loadstone", "piece: somebody else, with a name that is rather long")
    ]
    bars = [Bar("as fast as others", 0.5, 1.0, at_most=True), Bar("faster", 0.5, 1.0, at_most=False)]
    return Report("piece", {}, rows, [Absent("piece: a third", "is not installed")], bars)


def _shown(width: int) -> list[str]:
    text = io.StringIO()
    show(_report(), Console(file=text, width=width))
    return text.getvalue().splitlines()


def test_a_wide_table_is_cut_between_figures() -> None:
    narrow, wide = _shown(80), _shown(300)
    assert max(map(len, narrow)) <= 80
    assert sum("piece: loadstone" in line for line in wide) == 1
    assert sum("piece: loadstone" in line for line in narrow) > 1
    ours = " ".join(line for line in narrow if "piece: loadstone" in line)
    assert [f"{0.5 * number:.1f} s" in ours for number in range(2, 12)] == [True] * 10


def test_bars_and_absences_are_said() -> None:
    text = "\n".join(_shown(120))
    assert "met  as fast as others: 0.5 (bar ≤ 1)" in text
    assert "missed  faster: 0.5 (bar ≥ 1)" in text
    assert "absent: piece: a third (is not installed)" in text


@pytest.mark.parametrize(("name", "begins"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_a_plot_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    check_plot_path(tmp_path / name)
    plot(_report(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_a_plot_of_another_kind_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(BenchError, match=r"\.svg, \.png, \.pdf"):
        check_plot_path(Path("results.txt"))


def test_works_are_chosen_by_name() -> None:
    assert chosen_works(None, ["one", "two"]) == ["one", "two"]
    assert chosen_works(["two"], ["one", "two"]) == ["two"]
    with pytest.raises(BenchError, match="no piece of work called 'three'; choose of one, two"):
        chosen_works(["three"], ["one", "two"])
