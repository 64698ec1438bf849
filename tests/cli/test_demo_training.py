"""What the demo trains: complete, without a word of other libraries between its own bars."""

import os
import sys
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from loadstone.demo import train
from loadstone.demo.corpus import STYLES
from loadstone.demo.show import training_bar


@pytest.mark.filterwarnings("always::FutureWarning")
def test_training_says_only_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "BASE_STEPS", 2)
    monkeypatch.setattr(train, "ADAPTER_STEPS", 2)
    assert not sys.stderr.isatty()
    bars = transformers_logging.is_progress_bar_enabled()
    left = tmp_path / ".model-left-by-a-killed-run"
    left.mkdir()
    os.utime(left, (0, 0))
    with training_bar() as report:
        train.make(tmp_path / "model", report)
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "trained base model: 2 steps",
        *(f"trained adapter {style}: 2 steps" for style in STYLES),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert len(list((tmp_path / "model" / "base").glob("*.safetensors"))) == 3
    for style in STYLES:
        assert (tmp_path / "model" / "adapters" / style / "adapter_model.safetensors").is_file()
    assert transformers_logging.is_progress_bar_enabled() == bars
