"""The commands as people and scripts meet them: output, JSON, one-line errors, exit statuses."""

import json
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.tiny_model import write_tiny_checkpoint

import loadstone
from loadstone.bench.link import Link
from loadstone.cli import build_parser, main
from loadstone.fileserver import FileServer, Hook


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "model")


def test_the_public_surface_is_what_it_is() -> None:
    assert loadstone.__all__ == [
        "Checkpoint",
        "LoadstoneError",
        "Settings",
        "__version__",
        "load_model",
        "open",
    ]
    assert all(hasattr(loadstone, name) for name in loadstone.__all__)


def test_completion_finds_names_before_their_first_use() -> None:
    code = "import loadstone; print({*loadstone.__all__} <= {*dir(loadstone)})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_inspect_shows_dtypes_files_and_matching_tensors(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(checkpoint), "--tensors", "lm_head.*"]) == 0
    out = capsys.readouterr().out
    assert "9 tensors" in out or "10 tensors" in out
    assert "lm_head.weight" in out
    assert "F32" in out


def test_inspect_json_describes_every_tensor(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    with loadstone.open(checkpoint) as ckpt:
        assert [row["name"] for row in shown["tensors"]] == list(ckpt)
        assert shown["bytes"] == ckpt.nbytes
        assert shown["fingerprint"] == ckpt.fingerprint()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "/no/such/folder"], "/no/such/folder"),
        (["inspect", "gopher://x/y"], "gopher"),
        (["adapters", "list", "--url", "http://127.0.0.1:9"], "no service answers"),
        (["cache", "trim", "much"], "'much' is not a size"),
        (["cache", "list", "--cache", "/dev/null/x"], "the node cache /dev/null/x is not used"),
        (["cache", "remove", "s3://nothing/here"], "nothing of s3://nothing/here is cached"),
    ],
)
def test_a_failure_is_one_line_and_exit_status_1(
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOADSTONE_CACHE_DIR", str(tmp_path / "cache"))
    assert main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_wrong_usage_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["inspect"])
    assert left.value.code == 2
    assert "LOCATION" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "prog", "said"),
    [
        (["inspect", "x", "--jsn"], "loadstone inspect", "--jsn"),
        (["run", "x", "ls", "-l"], "loadstone run", "write -- before the command"),
        (["inspect", "x", "--", "ls"], "loadstone inspect", "takes words after --"),
        (["serve", "x", "--port", "99999"], "loadstone serve", "99999 is not a port; use 0 to 65535"),
        (["run", "x"], "loadstone run", "no command given; write: loadstone run LOCATION -- CMD"),
        (["bench", "cold-start", "x", "--runs", "0"], "loadstone bench cold-start", "use 1 or more"),
        (["demo", "--port", "http"], "loadstone demo", "invalid port value: 'http'"),
    ],
)
def test_wrong_usage_is_told_by_the_command_that_was_meant(
    words: list[str], prog: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert f"usage: {prog}" in err
    assert said in err


def test_names_are_never_shortened(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["inspect", str(checkpoint), "--tensors", "model.layers.*"]) == 0
    with loadstone.open(checkpoint) as ckpt:
        names = ckpt.match("model.layers.*")
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[-len(names) :]] == names
    cache = ["--cache", str(tmp_path / "cache")]
    with FileServer(checkpoint) as server:
        assert main(["prefetch", server.url, *cache]) == 0
        capsys.readouterr()
        assert main(["cache", "list", *cache]) == 0
        lines = capsys.readouterr().out.splitlines()
        objects = [line.split()[-1] for line in lines[1:-1]]
        assert f"{server.url.rstrip('/')}/model-00001-of-00002.safetensors" in objects


def test_a_local_checkpoint_is_here_already(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(checkpoint), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["complete"]
    assert state["bytes_ready"] == state["bytes_total"] > 0
    assert main(["status", str(checkpoint)]) == 0
    assert "it needs no cache" in capsys.readouterr().out
    assert main(["status", str(checkpoint / "missing")]) == 1


def test_verify_says_what_it_could_not_check(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(checkpoint)]) == 3
    told = capsys.readouterr()
    assert told.out.count("not checked: nobody published a digest of it") == 2
    assert told.err.startswith("warning: nothing could be checked")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("LOADSTONE_RETRY_SECONDS=soon", "is not a number"),
        ("LOADSTONE_CACHE_BYTES=2Q", "is not a number or a size"),
        ("LOADSTONE_VERIFY=perhaps", "is not a switch"),
    ],
)
def test_a_wrong_setting_is_named(
    setting: str,
    said: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable, text = setting.split("=")
    monkeypatch.setenv(variable, text)
    assert main(["inspect", str(checkpoint)]) == 1
    err = capsys.readouterr().err
    assert f"{variable}='{text}' {said}" in err
    assert err.count("\n") == 1


def test_the_demo_refuses_a_port_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["demo", "--once", "--port", port, "--work", str(tmp_path / "work")]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert f"cannot listen on 127.0.0.1:{port}" in told.err
    assert not (tmp_path / "work").exists()


def test_prefetch_then_list_status_trim(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = ["--cache", str(tmp_path / "cache")]
    with FileServer(checkpoint, hook=(link := Link())) as server:
        assert main(["status", server.url, *cache]) == 1
        assert main(["prefetch", server.url, *cache]) == 0
        capsys.readouterr()
        assert main(["status", server.url, *cache, "--json"]) == 0
        state = json.loads(capsys.readouterr().out)
        assert state["complete"]
        moved = link.bytes_sent
        assert main(["prefetch", server.url, *cache]) == 0
        assert link.bytes_sent == moved
    capsys.readouterr()
    assert main(["cache", "list", *cache, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    shards = [entry for entry in entries if entry["location"].endswith(".safetensors")]
    assert len(shards) == 2
    assert all(entry["stored"] == entry["size"] for entry in shards)
    assert main(["cache", "trim", "0", *cache]) == 0
    assert main(["cache", "list", *cache, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("object", 1)[-1].split("\n", 1)[1])["entries"] == []


@pytest.fixture
def plain_server(checkpoint: Path) -> Iterator[str]:
    """Serve the checkpoint as Python's own server does: no ranges, no ETags."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(checkpoint))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("words", [[], ["--until", "header"], ["lm_head.*", "--json"]])
def test_prefetch_fails_when_nothing_is_kept(
    words: list[str],
    tmp_path: Path,
    plain_server: str,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with FileServer(checkpoint, hook=(link := Link())) as server:
        for location, folder, reason in (
            (plain_server, "cache", "the store gives no strong ETag"),
            (server.url, "none", "the node cache is switched off"),
            (server.url, "open", f"the node cache {tmp_path}/open is not used: its mode is 777"),
            (server.url, "open/cache", ""),
        ):
            cache = folder if folder == "none" else str(tmp_path / folder)
            assert main(["prefetch", location, *words, "--cache", cache]) == (1 if reason else 0)
            told = capsys.readouterr()
            assert f"is kept for other processes: {reason}" in told.err or not reason
            assert told.err.count("error: nothing of ") == bool(reason)
            if reason:
                assert told.out == ""
                assert link.bytes_sent < 3 * 2**16  # what an opening takes, and no more


def test_prefetch_tells_a_part_by_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"model-1.safetensors": 2**20, "model-2.safetensors": 3 * 2**20}
    (tmp_path / "model").mkdir()
    for file, size in sizes.items():
        save_file({f"{file}.w": np.ones(size, np.uint8)}, tmp_path / "model" / file)
    index = {"weight_map": {f"{file}.w": file for file in sizes}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setenv("LOADSTONE_CACHE_BYTES", "2M")
    with FileServer(tmp_path / "model", hook=(link := Link())) as server:
        for patterns, status, kept in (([], 3, False), (["model-1*"], 0, True), (["model-2*"], 1, None)):
            where = ["--cache", str(tmp_path / "cache"), "--json"]
            assert main(["prefetch", server.url, *patterns, *where]) == status
            told = capsys.readouterr()
            assert (json.loads(told.out.splitlines()[-1])["kept"] if told.out else None) is kept
            assert ("other processes will not find all of 1 of 2 files: model-2" in told.err) is (status == 3)
            assert ("error: nothing of " in told.err) is (status == 1)
            assert ("raise LOADSTONE_CACHE_BYTES" in told.err) is (status != 0)
        assert link.bytes_sent < 2 * 2**20  # the larger one was not brought for nobody


class Removing(Hook):
    """Takes the cache's files away in the middle of a transfer."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def sending(self, path: str, offset: int, nbytes: int) -> None:
        if offset > 2**20:
            shutil.rmtree(self.cache / "blobs", ignore_errors=True)


def test_prefetch_tells_what_was_lost_on_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones(4 * 2**20, np.uint8)}, tmp_path / "model" / "model.safetensors")
    monkeypatch.setenv("LOADSTONE_REQUEST_BYTES", "64K")
    with FileServer(tmp_path / "model", hook=Removing(tmp_path / "cache")) as server:
        assert main(["prefetch", server.url, "--cache", str(tmp_path / "cache"), "--json"]) == 3
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["kept"] is False
    assert "warning: other processes will not find all of 1 of 1 file: model.safetensors" in told.err


def test_prefetch_json_ends_with_a_done_event(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileServer(checkpoint) as server:
        assert main(["prefetch", server.url, "lm_head.*", "--json", "--cache", str(tmp_path / "cache")]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events][-2:] == ["progress", "done"]
    assert events[-1]["bytes_ready"] == 64 * 32 * 4


@pytest.mark.parametrize("words", [["--until", "first-layer"], ["--until", "header"], []])
def test_prefetch_events_all_count_the_same(
    words: list[str], tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "tokenizer_config.json").write_text("{}")
    with FileServer(checkpoint) as server:
        assert main(["prefetch", server.url, *words, "--json", "--cache", str(tmp_path / "cache")]) == 0
    *progress, done = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert done["event"] == "done"
    assert done["bytes_ready"] == done["bytes_total"]
    assert bool(progress) == (done["bytes_total"] > 0) == ("header" not in words)
    for event in progress[-1:]:
        counts = ("bytes_total", "bytes_ready", "bytes_moved")
        assert [event[count] for count in counts] == [done[count] for count in counts]


def test_prefetch_of_the_first_layer_leaves_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", layers=4)
    assert main(["prefetch", str(folder), "--until", "first-layer"]) == 0
    assert "4 tensors" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["inspect"], ["prefetch"]])
def test_reading_commands_import_neither_torch_nor_transformers(words: list[str], checkpoint: Path) -> None:
    code = (
        "import sys\nfrom loadstone.cli import main\n"
        f"assert main([*{words!r}, {str(checkpoint)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 's3fs', 'aiohttp', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    parser = build_parser()
    actions = [
        action
        for action in parser._actions
        if hasattr(action, "choices") and isinstance(action.choices, dict)
    ]
    names = set(actions[0].choices or ())
    assert {
        "inspect",
        "verify",
        "prefetch",
        "run",
        "serve",
        "cache",
        "adapters",
        "bench",
        "demo",
        "status",
    } == names
    for name in names:
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0
    assert "usage: loadstone" in capsys.readouterr().out
