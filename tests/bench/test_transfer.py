"""The transfer benchmark: small, without peers, never judged by time."""

import json
import shutil
from pathlib import Path

import pytest

from loadstone.bench.runner import write
from loadstone.bench.schema import SCHEMA, Report, Row
from loadstone.bench.transfer import transfer
from loadstone.bench.transfer_bars import transfer_bars
from loadstone.bench.transfer_works import (
    OBSTORE,
    OURS,
    RUNAI,
    S3FS,
    START_ALONE,
    START_RUN,
    START_TRANSFER,
    WORKS,
)
from loadstone.errors import BenchError

SIZE = 48 * 1024 * 1024
SMALL = [name for name in WORKS if name not in ("start", "disk")]  # those import torch
LINK = ("link: loadstone", "layer: loadstone, the rest on its way")
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return transfer(size=SIZE, runs=1, work=tmp_path_factory.mktemp("work"), peers=False, only=SMALL)


@needs_nginx
def test_every_piece_of_work_has_its_rows_or_a_reason(report: Report) -> None:
    titles = {WORKS[name][0] for name in SMALL}
    absent = {gone.way for gone in report.absent}
    assert set(report.works()) | {WORKS["link"][0], WORKS["layer"][0]} == titles
    for way in ("memory: loadstone", "open: loadstone, at a distance", "anonymous: loadstone prefetch"):
        assert report.ways().count(way) == 1
    for way in LINK:
        assert (way in report.ways()) != (way in absent)
    assert all(gone.why for gone in report.absent)


@needs_nginx
def test_all_bytes_arrive_whatever_the_way(report: Report) -> None:
    ours = report.median("memory: loadstone", "arrived_bytes")
    raw = report.median("memory: raw sockets, anonymous", "arrived_bytes")
    assert ours is not None
    assert raw is not None
    assert ours >= SIZE
    # Raw sockets bring whole files: the headers too.
    assert ours < raw < ours + 200_000
    assert raw == report.median("memory: raw sockets, shared (memfd)", "arrived_bytes")


@needs_nginx
def test_a_layer_is_the_same_bytes_for_both(report: Report) -> None:
    if LINK[1] not in report.ways():
        assert any("link" in gone.why for gone in report.absent)
        return
    ours = report.median(LINK[1], "layer_bytes")
    assert ours is not None
    assert ours == report.median("layer: raw sockets, alone", "layer_bytes")


@needs_nginx
def test_rows_say_what_was_cold_and_warm(report: Report) -> None:
    states = {row.way: row.state for row in report.rows}
    assert "node cache empty, in memory" in states["memory: loadstone"]
    assert "page cache" in states["memory: loadstone"]
    assert "20 ms" in states["open: loadstone, at a distance"]
    assert all(states.values())


@needs_nginx
def test_the_report_can_be_written_and_read(report: Report, tmp_path: Path) -> None:
    write(report, tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["schema"] == SCHEMA
    assert data["benchmark"] == "transfer"
    assert len(data["rows"]) == len(report.rows)
    assert {bar["limit"] for bar in data["bars"]} >= {0.6, 6.0, 100.0, 0.35}
    assert data["settings"]["size"] == SIZE


def test_what_is_missing_is_absent_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    report = transfer(size=1024, runs=1, work=tmp_path, peers=False, only=["memory", "link"])
    assert report.rows == []
    reasons = {gone.way: gone.why for gone in report.absent}
    assert "nginx is not installed" in reasons["memory: loadstone"]
    assert "shaped link cannot be made" in reasons["link: loadstone"]
    assert list(tmp_path.iterdir()) == []


def test_unknown_work_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"'nonsense'.*first-request"):
        transfer(size=1024, work=tmp_path, only=["nonsense"])


def test_bars_compare_with_the_best_of_the_others() -> None:
    seconds = {OURS: 2.0, RUNAI[0]: 9.0, RUNAI[1]: 8.0, S3FS: 7.0, OBSTORE[0]: 2.4, OBSTORE[1]: 3.0}
    report = Report("transfer", {})
    for way, value in seconds.items():
        figures = {"all_bytes_seconds": value, "cpu_seconds_per_gib": value / 10}
        report.rows.append(Row(way, 0, "made up", figures))
    for way, figure, value in (
        (START_RUN, "first_token_seconds", 6.0),
        (START_ALONE, "first_token_seconds", 5.0),
        (START_TRANSFER, "all_bytes_seconds", 4.0),
    ):
        report.rows.append(Row(way, 0, "made up", {figure: value}))
    bars = {bar.text.partition(" (")[0]: bar for bar in transfer_bars(report)}
    values = [round(bar.value, 3) for bar in bars.values()]
    assert values == [4.0, 3.5, 1.2, 0.25, 0.286, 1.2]
    assert [bar.met for bar in bars.values()] == [True, True, False, True, True, False]
    assert any("one after the other: 9.0 s" in bar.text for bar in transfer_bars(report))
