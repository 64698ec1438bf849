"""The loader benchmark, small: its inputs, rows, bars and report. Times are nobody's business here."""

import json
from pathlib import Path

import pytest

import loadstone
from loadstone.bench import loader_child, loader_models_child
from loadstone.bench.loader import PROCESSES, WORKS
from loadstone.bench.loader_bars import loader_bars
from loadstone.bench.loader_inputs import FULL_SIZE, llama_config, make_inputs, many_tensors
from loadstone.bench.schema import SCHEMA, Report, Row
from loadstone.cli import main


def test_a_small_run_gives_rows_bars_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    argv = ["bench", "loader", "--size", "4M", "--runs", "1", "--work", str(tmp_path), "--out", str(out)]
    assert main([*argv, "--only", "many", "--only", "layer"]) == 0
    shown = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["schema"] == SCHEMA
    assert report["settings"] == {
        "size": 4 * 1024**2,
        "runs": 1,
        "work": ["many", "layer"],
        "processes": PROCESSES,
    }
    assert [row["way"] for row in report["rows"]] == [*WORKS["many"].ways, *WORKS["layer"].ways]
    assert report["absent"] == []
    for row in report["rows"]:
        cold = row["work"] == WORKS["layer"].title
        assert row["state"].startswith("page cache: 0 B of") == cold
        assert row["figures"]["usable_seconds"] > 0
        assert (row["figures"]["disk_read_bytes"] > 0) == cold
        assert row["way"] in shown
    layer = report["medians"]["layer: loadstone, by use"]
    assert layer["cached_after_bytes"] >= layer["layer_bytes"] > 0
    assert len(report["bars"]) == 5
    assert list(tmp_path.iterdir()) == [out]  # the inputs are gone


def test_every_way_exists() -> None:
    known = {
        "loadstone.bench.loader_child": set(loader_child.WAYS),
        "loadstone.bench.loader_models_child": {
            f"{what}_{whose}" for what in ("load", "hold") for whose in loader_models_child.MAKERS
        },
    }
    used = {
        module: {w for work in WORKS.values() if work.module == module for w in work.ways.values()}
        for module in known
    }
    assert used == known
    names = [way for work in WORKS.values() for way in work.ways]
    assert len(names) == len(set(names))


def test_an_unknown_piece_of_work_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loader", "--only", "warp", "--work", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(
        "error: there is no piece of work called 'warp'; choose of resident,"
    )


def test_inputs_are_what_the_bars_are_meant_for() -> None:
    config = llama_config(32, FULL_SIZE)
    assert (config["hidden_size"], config["num_hidden_layers"]) == (1600, 32)
    assert many_tensors(FULL_SIZE) == 100_000
    assert many_tensors(1) == 100


def test_inputs_can_be_read(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, 1)
    assert len(inputs.shards) == 4
    with loadstone.open(inputs.sharded) as checkpoint:
        assert len(checkpoint) == 32 * 9 + 3
        assert checkpoint["model.norm.weight"].tolist() == [1.0] * 64
        embedding = checkpoint["model.embed_tokens.weight"]
        assert not embedding.equal(checkpoint["lm_head.weight"])
    with loadstone.open(inputs.many) as checkpoint:
        assert len(checkpoint) == 100


def test_bars_are_computed_from_medians_and_only_where_measured() -> None:
    report = Report("loader", {})
    assert loader_bars(report, 1) == []

    def row(way: str, **figures: float) -> None:
        report.rows.append(Row(way, 0, "", figures))

    row("cold: loadstone", resident_seconds=2.0)
    row("disk: past the page cache", resident_seconds=1.9)
    row("disk: plain reads", resident_seconds=3.0)
    row("cold: safetensors load_file, touched", resident_seconds=3.0)
    row("warm: loadstone", anonymous_growth_bytes=0.0)
    row("model: loadstone load_model", callable_seconds=0.1, logits_sum=1.5)
    row("model: build on meta only", callable_seconds=0.03)
    row("model: from_pretrained", callable_seconds=0.5, logits_sum=1.25)
    row("held: loadstone load_model", proportional_bytes=150.0)
    row("held: build on meta only", proportional_bytes=50.0)
    bars = loader_bars(report, 80)
    assert [(round(bar.value, 3), bar.limit, bar.met) for bar in bars] == [
        (0.95, 0.9, True),
        (1.5, 2.0, False),
        (0.0, 20.0, True),
        (0.2, 0.25, True),
        (70.0, 60.0, False),
        (0.25, 0.0, False),
        (1.25, 1.1, False),
    ]
