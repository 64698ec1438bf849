"""Names and settings that nobody expects: they neither steer the terminal, nor hide, nor give away."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.tiny_model import write_tiny_checkpoint

from loadstone.cli import main
from loadstone.errors import SettingsError
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings, parse_size


def test_control_characters_of_a_name_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["[/bold]", "[red]x", "a\x1b[31mb", "two\nlines"]
    header = {
        name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]} for at, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(names)))
    assert main(["inspect", str(tmp_path / "m.safetensors"), "--tensors", "*"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for shown in ("[/bold]", "[red]x", r"a\x1b[31mb", r"two\nlines"):
        assert f"\n{shown} " in out


def test_removing_needs_a_location_or_an_id_and_repeats_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = NodeCache(Settings(cache_dir=str(tmp_path)))
    cache.blob("http://h/x?…", "x", Version('"1"', 10)).close()
    key = cache.entries()[0].key
    for which in ("", key[:1], "http://user:hunter2@h/y?sig=hunter2"):
        assert main(["cache", "remove", which, "--cache", str(tmp_path)]) == 1
        assert "hunter2" not in capsys.readouterr().err
    assert len(cache.entries()) == 1
    assert main(["cache", "remove", "http://user:hunter2@h/x?sig=hunter2", "--cache", str(tmp_path)]) == 0
    assert cache.entries() == []


@pytest.mark.parametrize("field", ["connect_timeout", "stall_timeout", "retry_seconds", "drain_seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e9"])
def test_seconds_that_are_no_number_are_refused(field: str, value: str) -> None:
    with pytest.raises(SettingsError, match=field):
        Settings.from_env({f"LOADSTONE_{field.upper()}": value})


def test_sizes_and_folders_that_cannot_be_are_refused() -> None:
    with pytest.raises(SettingsError):
        parse_size("9" * 400)
    with pytest.raises(SettingsError, match="home"):
        _ = Settings(cache_dir="~nobody-of-that-name/x").cache_path


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["status", "--json"]])
def test_output_that_nobody_takes_is_one_line_or_none(tmp_path: Path, words: list[str]) -> None:
    location = str(write_tiny_checkpoint(tmp_path / "model"))
    argv = [sys.executable, "-m", "loadstone", *words, location]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: [Errno 28] No space left on device\n")
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait(30) == 141
