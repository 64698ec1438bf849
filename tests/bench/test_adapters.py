"""The adapters benchmark, small: its inputs, rows, bars and report. Times are nobody's business here."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from loadstone.bench import adapters_child
from loadstone.bench.adapters import WORKS
from loadstone.bench.adapters_bars import adapters_bars
from loadstone.bench.adapters_inputs import FULL, FULL_SIZE, RANK, SMALL, Inputs, make_inputs, scale_of
from loadstone.bench.adapters_sides import SIDES
from loadstone.bench.loader_inputs import llama_config
from loadstone.bench.schema import SCHEMA, Report, Row
from loadstone.cli import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"), 1)


def test_a_small_run_gives_rows_bars_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    argv = ["bench", "adapters", "--size", "1K", "--runs", "1", "--work", str(tmp_path), "--out", str(out)]
    assert main([*argv, "--only", "look"]) == 0
    shown = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["schema"] == SCHEMA
    assert report["benchmark"] == "adapters"
    assert report["settings"]["work"] == ["look"]
    assert report["settings"]["registered"] == SMALL.registered
    assert [row["way"] for row in report["rows"]] == list(WORKS["look"].ways)
    (row,) = report["rows"]
    assert row["state"].startswith("page cache: ")
    assert 0 < row["figures"]["usable_seconds"] <= row["figures"]["slowest_seconds"]
    assert row["way"] in shown
    assert list(tmp_path.iterdir()) == [out]  # the inputs are gone


def test_every_side_does_every_piece_of_work_and_gives_the_same_answers(inputs: Inputs) -> None:
    """In this process: what a child does, without the seconds that its imports take."""
    report = Report("adapters", {})
    for name, work in WORKS.items():
        for way, side in work.ways.items():
            with adapters_child.threads(1):
                figures = adapters_child.WORKS[name](SIDES[side](inputs), inputs)
            assert all(isinstance(value, int | float) for value in figures.values()), way
            report.rows.append(Row(way, 0, "", figures, work.title))
    for way in ("load: loadstone", "mix: loadstone"):
        assert (report.median(way, "adapter_effect") or 0) > 0.5
    answers = [bar for bar in adapters_bars(report) if "answers differ" in bar.text]
    assert len(answers) == 5
    assert all(0 <= bar.value < 0.03 for bar in answers), answers
    assert len(adapters_bars(report)) == 14
    assert report.median("crowd: loadstone", "registered") == SMALL.registered
    assert report.median("crowd: loadstone", "mapped") == SMALL.mapped
    assert report.median("crowd: loadstone", "base_resident_share") == 1.0


def test_every_way_exists() -> None:
    assert set(WORKS) == set(adapters_child.WORKS)
    assert {side for work in WORKS.values() for side in work.ways.values()} == set(SIDES)
    names = [way for work in WORKS.values() for way in work.ways]
    assert len(names) == len(set(names))


def test_an_unknown_piece_of_work_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adapters", "--only", "warp", "--work", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(
        "error: there is no piece of work called 'warp'; choose of load,"
    )


def test_inputs_are_what_the_bars_are_meant_for() -> None:
    config = llama_config(FULL.layers, FULL_SIZE)
    assert (config["hidden_size"], config["intermediate_size"]) == (1280, 3840)
    one_layer = 4 * (1280 + 1280) + 3 * (1280 + 3840)
    assert 24e6 < 2 * RANK * one_layer * FULL.layers < 26e6
    assert scale_of(FULL_SIZE) == FULL
    assert scale_of(FULL_SIZE - 1) == SMALL


def test_inputs_differ_and_the_rest_of_the_crowd_shares_files(inputs: Inputs) -> None:
    first, other = (_some_values(inputs.adapter(number)) for number in (0, 1))
    assert not torch.equal(first, other)
    assert torch.equal(first, _some_values(inputs.adapter(SMALL.rows)))
    files = {path.stat().st_ino for path in inputs.roots.glob("crowd/*/adapter_model.safetensors")}
    assert len(files) == SMALL.mapped
    assert len(list(inputs.roots.glob("crowd/*"))) == SMALL.registered
    assert len(inputs.files()) == 1 + SMALL.rows + SMALL.mapped


def _some_values(folder: Path) -> torch.Tensor:
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        values: torch.Tensor = file.get_tensor(next(iter(file.keys())))
    return values


def test_bars_are_computed_from_medians_against_the_best_of_peft() -> None:
    report = Report("adapters", {})
    assert adapters_bars(report) == []

    def row(way: str, **figures: float) -> None:
        report.rows.append(Row(way, 0, "", figures))

    row("load: loadstone", usable_seconds=0.012)
    row("load: PEFT load_adapter", usable_seconds=0.2)
    row("load: PEFT load_adapter, fastest options", usable_seconds=0.1, answer_difference=0.01)
    row("load: PEFT hotswap_adapter", usable_seconds=0.015)
    row("held: loadstone", times_the_file=1.02)
    row("crowd: loadstone", base_resident_share=1.0, beyond_budget_bytes=6e6, listing_seconds=0.01)
    row("cycle: loadstone", resident_spread=0.03)
    row("decode: loadstone", p99_ratio=1.1)
    row("mix: loadstone", adapter_part_seconds=0.01)
    row("mix: PEFT adapter_names", adapter_part_seconds=0.04)
    assert [(round(bar.value, 3), bar.limit, bar.met) for bar in adapters_bars(report)] == [
        (0.12, 0.15, True),
        (0.8, 0.6, False),
        (1.02, 1.1, True),
        (1.0, 1.0, True),
        (6.0, 5.0, False),
        (10.0, 20.0, True),
        (0.03, 0.02, False),
        (1.1, 1.15, True),
        (4.0, 3.0, True),
        (0.01, 0.05, True),
    ]
