"""A cache folder that cannot be written: what is sealed there is used, and nothing of it moves again."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cache_worker import blobs_of, open_source, settings_for
from tests.support.served_folder import ROOT, Counting, Served
from tests.support.tiny_model import write_tiny_checkpoint

import loadstone
from loadstone.cli import main
from loadstone.fileserver import FileServer
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Span

FILES = {"config": 700, "model-1": 40 * BLOCK + 1000, "model-2": 7 * BLOCK}
NOBODY = 65534
KINDS = [
    pytest.param("mounted", marks=pytest.mark.root),
    "mode",
    pytest.param("other user", marks=pytest.mark.root),
]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "served", FILES)
    yield made
    made.server.close()


@pytest.fixture
def cache(served: Served, tmp_path: Path) -> Iterator[Path]:
    """Return a cache folder that holds all of what is served."""
    folder = tmp_path / "cache"
    bring(served, folder, FILES)
    assert [entry.sealed for entry in NodeCache(settings_for(folder)).entries()] == [True] * len(FILES)
    served.hook.sent.clear()
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | 0o700)


def bring(served: Served, folder: Path, names: dict[str, int]) -> None:
    source = open_source(served.server.url, settings_for(folder))
    blobs = blobs_of(source, list(names)).values()
    assert source.prefetch([Span(blob, ByteRange(0, blob.size)) for blob in blobs]).wait(30)
    assert source.settle(30)
    source.close()


def only_read(kind: str, cache: Path) -> list[str]:
    """Return what runs a command that can read ``cache`` and not write it."""
    if kind != "mode" and os.geteuid() != 0:
        pytest.skip("needs root")
    if kind == "mounted":
        mount = f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}"
        within = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    elif kind == "mode":
        for path in (cache, *(path for path in cache.rglob("*") if path.is_dir())):
            path.chmod(0o500)
        # Root may write all the same, but for this.
        within = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    else:
        for path in (cache, *cache.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        for path in cache.parents:  # pytest's own folders are closed to others
            if not path.stat().st_mode & 0o001 and path.owner() == cache.owner():
                path.chmod(path.stat().st_mode | 0o011)
        within = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    probe = [*within, sys.executable, "-c", "import tests.support.cache_worker"]
    if subprocess.run(probe, cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip(f"cannot run a command that way ({kind}) here")
    return within


def look(served: Served, cache: Path, within: list[str]) -> dict[str, object]:
    found = json.loads(served.run("look", cache, within=within))
    assert isinstance(found, dict)
    assert found["wrong"] == 0
    return found


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return what would tell that something was written."""
    infos = {str(path): path.lstat() for path in (folder, *folder.rglob("*"))}
    return {path: (info.st_ino, info.st_size, info.st_mtime_ns) for path, info in infos.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_complete_moves_no_more(kind: str, served: Served, cache: Path) -> None:
    within = only_read(kind, cache)
    before = state(cache)
    found = look(served, cache, within)
    assert (found["sealed"], found["passing"], found["told"]) == (list(FILES), "", [])
    assert found["mapped"] == len(FILES)
    assert served.hook.sent.total() == 0
    assert state(cache) == before


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_goes_to_memory(kind: str, served: Served, cache: Path, tmp_path: Path) -> None:
    shutil.rmtree(cache)
    bring(served, cache, {"config": 0, "model-2": 0})
    served.hook.sent.clear()
    found = look(served, cache, only_read(kind, cache))
    assert found["sealed"] == ["config", "model-2"]
    assert "is read-only, and not all of it is there" in str(found["passing"])
    (told,) = list(found["told"])  # type: ignore[call-overload]
    assert "model-1 is kept in memory: the node cache" in told
    assert "is read-only" in told
    assert set(served.hook.sent) == {"model-1"}
    assert FILES["model-1"] <= served.hook.sent["model-1"] <= FILES["model-1"] + 2 * BLOCK


def spoil(blob: Path, how: str) -> None:
    meta = json.loads((blob / "meta.json").read_text())
    match how:
        case "not sealed":  # complete all the same, and of this boot
            (blob / "sealed").unlink()
        case "not complete":
            with (blob / "map").open("r+b") as file:
                file.write(b"\0")
        case "map short":
            os.truncate(blob / "map", 9)
        case "data short":
            os.truncate(blob / "data", 9 * BLOCK)
        case "data missing":
            (blob / "data").unlink()
        case "data a link":
            (blob / "data").rename(blob / "elsewhere")
            (blob / "data").symlink_to("elsewhere")
        case "meta missing":
            (blob / "meta.json").unlink()
        case "other version":
            (blob / "meta.json").write_text(json.dumps(meta | {"tag": "other"}))
        case "others may write":
            (blob / "data").chmod(0o666)


@pytest.mark.root
@pytest.mark.parametrize(
    "how",
    [
        *("not sealed", "not complete", "map short", "data short", "data missing", "data a link"),
        *("meta missing", "other version", "others may write"),
    ],
)
def test_what_cannot_be_relied_on_is_not_used(how: str, served: Served, cache: Path) -> None:
    (entry,) = [e for e in NodeCache(settings_for(cache)).entries() if e.location.endswith("model-1")]
    spoil(cache / "blobs" / entry.key, how)
    found = look(served, cache, only_read("mounted", cache))
    assert found["sealed"] == ["config", "model-2"]
    assert len(list(found["told"])) == 1  # type: ignore[call-overload]
    assert set(served.hook.sent) == {"model-1"}


def test_a_new_version_is_fetched(served: Served, cache: Path) -> None:
    (served.folder / "model-2").write_bytes(b"new" * BLOCK)
    found = look(served, cache, only_read("mode", cache))
    assert found["sealed"] == ["config", "model-1"]
    assert served.hook.sent["model-1"] == 0
    assert served.hook.sent["model-2"] >= 3 * BLOCK


@pytest.mark.parametrize("missing", ["leases", "refs", "opens"])
def test_a_copy_without_everything_will_do(missing: str, served: Served, cache: Path, tmp_path: Path) -> None:
    """An image may have the blobs alone; a copy is of another machine, after another boot."""
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    shutil.rmtree(cache)
    if (copy / missing).is_dir():
        shutil.rmtree(copy / missing)
    else:
        (copy / missing).unlink()
    for path in copy.rglob("meta.json"):
        told = json.loads(path.read_text())
        path.write_text(json.dumps(told | {"boot": "another", "machine": "another"}))
    copy.rename(cache)
    found = look(served, cache, only_read("mode", cache))
    assert (found["sealed"], found["told"]) == (list(FILES), [])
    # Without references each opening looks at the objects anew, at their first block; it opens them twice.
    assert served.hook.sent.total() <= (2 * len(FILES) * BLOCK if missing == "refs" else 0)


READER = """
import sys
from pathlib import Path
from tests.support.cache_worker import blobs_of, open_source, settings_for
source = open_source(sys.argv[1], settings_for(Path(sys.argv[2])))
(blob,) = blobs_of(source, ["model-1"]).values()
print("ready", flush=True)
sys.stdin.readline()
same = bytes(blob.buffer()) == Path(sys.argv[3]).read_bytes()
print(same, flush=True)
"""


@pytest.mark.root
@pytest.mark.parametrize("how", ["evicted", "deleted"])
def test_another_mount_takes_it_away(how: str, served: Served, cache: Path) -> None:
    within = only_read("mounted", cache)
    truth = served.folder / "model-1"
    reader = subprocess.Popen(
        [*within, sys.executable, "-c", READER, served.server.url, str(cache), str(truth)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == "ready\n"
    here = NodeCache(settings_for(cache))
    if how == "evicted":
        # A lease is seen here: what is mapped there is in use, and stays.
        removal = here.trim(0)
        assert [entry.location.rpartition("/")[2] for entry in removal.in_use] == ["model-1"]
        assert len(removal.removed) == len(FILES) - 1
    else:
        shutil.rmtree(cache / "blobs")
    out, _ = reader.communicate("go\n", timeout=60)
    assert (reader.returncode, out) == (0, "True\n")
    assert served.hook.sent.total() == 0


COMMAND = """
import hashlib, os, sys
import loadstone
with loadstone.open(sys.argv[1]) as ckpt:
    ckpt.wait()
    parts = hashlib.sha256(b"".join(bytes(ckpt.raw(name).numpy()) for name in ckpt))
print(parts.hexdigest(), os.environ["LOADSTONE_CACHE_DIR"].partition(":")[2].partition(":")[2])
"""


@pytest.mark.parametrize("complete", [True, False])
def test_a_command_reads_the_folder_and_inherits_the_rest(
    complete: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, cache = write_tiny_checkpoint(tmp_path / "model"), tmp_path / "cache"
    with loadstone.open(checkpoint) as ckpt:
        truth = hashlib.sha256(b"".join(bytes(ckpt.raw(name).numpy()) for name in ckpt)).hexdigest()
    with FileServer(checkpoint, hook=(hook := Counting())) as server:
        assert main(["prefetch", server.url, "--cache", str(cache)]) == 0
        capfd.readouterr()
        weights = [e for e in NodeCache(settings_for(cache)).entries() if e.location.endswith(".safetensors")]
        for entry in [] if complete else weights:
            (cache / "blobs" / entry.key / "sealed").unlink()
        hook.sent.clear()
        argv = [sys.executable, "-m", "loadstone", "run", server.url, "--cache", str(cache), "--"]
        within = only_read("mode", cache)
        subprocess.run([*within, *argv, sys.executable, "-c", COMMAND, server.url], cwd=ROOT, check=True)
        told = capfd.readouterr()
        assert told.out == f"{truth} {cache}\n"
        # What is missing is warned of once, not by the command too, which inherits it, and moves once.
        assert told.err.count("is kept in memory") == told.err.count("\n") == (0 if complete else 1)
        missing = {} if complete else {entry.location.rpartition("/")[2]: entry.size for entry in weights}
        assert {name: count for name, count in hook.sent.items() if count} == missing
        prefetch = [sys.executable, "-m", "loadstone", "prefetch", server.url, "--cache", str(cache)]
        done = subprocess.run([*within, *prefetch], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == (0 if complete else 1)
        lacking = (
            f"is kept for other processes: the node cache {cache} is read-only, and not all of it is there"
        )
        assert (lacking in done.stderr) is not complete
    cache.chmod(0o700)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_listed_and_not_trimmed(kind: str, served: Served, cache: Path) -> None:
    within, url = only_read(kind, cache), served.server.url

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        argv = [*within, sys.executable, "-m", "loadstone", *words, "--cache", str(cache)]
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)

    assert run("status", url).returncode == 0
    listed = json.loads(run("cache", "list", "--json").stdout)
    assert listed["folder"] == str(cache)
    assert [entry["location"].rpartition("/")[2] for entry in listed["entries"]] == list(FILES)
    for words in (["trim", "0"], ["remove", url]):
        done = run("cache", *words)
        assert done.returncode == 1
        assert done.stderr == (
            f"error: the node cache {cache} is read-only here; do it where it can be written\n"
        )
    assert len(list((cache / "blobs").iterdir())) == len(FILES)
