"""The cache folder: trust, budget, eviction, references, and folders that cannot be used."""

import gc
import json
import logging
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from loadstone.loader.node import blobfolder, locks, notices
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.leases import Leases
from loadstone.loader.node.locks import close_own, open_own
from loadstone.loader.node.sealing import Sealer
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

DATA = random.Random(3).randbytes(10 * BLOCK)
VERSION = Version('"1"', len(DATA))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _warnings_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_written", set())


def new_cache(folder: Path, cache_bytes: int = 0) -> NodeCache:
    return NodeCache(Settings(cache_dir=str(folder), cache_bytes=cache_bytes))


def leases_at(path: Path) -> Leases:
    return Leases(lambda: open_own(path, os.O_RDWR | os.O_CREAT))


def fill(blob: StoredBlob, blocks: int = 10) -> None:
    claim = blob.claim(ByteRange(0, blocks * BLOCK))
    assert claim is not None
    claim.write(0, memoryview(DATA)[: blocks * BLOCK])
    claim.close()


def add(cache: NodeCache, name: str, blocks: int = 10, used: float = 0.0) -> None:
    """Store an object that was last used ``used`` seconds after the epoch."""
    blob = cache.blob(name, name, VERSION)
    fill(blob, blocks)
    cache.settle(5)
    blob.close()
    if used:
        (found,) = [entry for entry in cache.entries() if entry.location == name]
        assert cache.folder is not None
        os.utime(cache.folder / "blobs" / found.key / "meta.json", (used, used))


def names(cache: NodeCache) -> list[str]:
    return [entry.location for entry in cache.entries()]


def test_entries_say_what_is_here(folder: Path) -> None:
    cache = new_cache(folder)
    add(cache, "all")
    add(cache, "some", blocks=3)
    blob = cache.blob("some", "some", VERSION)
    every, some = cache.entries()
    assert (every.location, every.size, every.stored, every.sealed) == ("all", len(DATA), len(DATA), True)
    assert (some.location, some.stored, some.sealed) == ("some", 3 * BLOCK, False)
    assert every.allocated >= len(DATA)
    assert some.allocated < 5 * BLOCK
    assert every.pids == ()
    assert some.pids == (os.getpid(),)
    assert abs(every.last_use - time.time()) < 60
    blob.close()
    assert cache.entries()[1].pids == ()


def test_nothing_secret_and_nothing_executable_is_written(folder: Path) -> None:
    add(new_cache(folder), "s3://bucket/a")
    (blob,) = (folder / "blobs").iterdir()
    assert json.loads((blob / "meta.json").read_text()).keys() == {
        "location",
        "tag",
        "size",
        "boot",
        "machine",
        "format",
    }
    assert {path.name for path in blob.iterdir()} == {"data", "map", "meta.json", "sealed"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in [folder, *folder.rglob("*")] if path.is_dir())


def test_blobs_of_another_boot_count_only_when_sealed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = new_cache(folder)
    monkeypatch.setattr(blobfolder, "this_host", lambda: blobfolder.Host("boot-1", "machine-1"))
    add(cache, "sealed")
    add(cache, "open", blocks=4)
    hosts = {
        ("boot-1", "machine-1"): (10, 4),
        ("boot-2", "machine-1"): (10, 0),
        ("boot-2", "machine-2"): (0, 0),
    }
    for host, expected in hosts.items():
        monkeypatch.setattr(blobfolder, "this_host", lambda host=host: blobfolder.Host(*host))
        found = []
        for name in ("sealed", "open"):
            blob = cache.blob(name, name, VERSION)
            ready = [
                number for number in range(10) if blob.ready(ByteRange(number * BLOCK, (number + 1) * BLOCK))
            ]
            assert bytes(blob.view[: len(ready) * BLOCK]) == DATA[: len(ready) * BLOCK]
            found.append(len(ready))
            blob.close()
        assert tuple(found) == expected


def test_the_same_boot_is_trusted_whatever_the_machine_id(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache(folder)
    add(cache, "x", blocks=4)
    host = blobfolder.Host(blobfolder.this_host().boot, "another container's")
    monkeypatch.setattr(blobfolder, "this_host", lambda: host)
    assert cache.blob("x", "x", VERSION).ready(ByteRange(0, 4 * BLOCK))


@pytest.mark.parametrize(
    "damage", ["data short", "map short", "map long", "no meta", "bad meta", "other tag", "no data"]
)
def test_damaged_blobs_are_made_anew(folder: Path, damage: str) -> None:
    cache = new_cache(folder)
    add(cache, "x")
    (blob,) = (folder / "blobs").iterdir()
    meta = json.loads((blob / "meta.json").read_text())
    match damage:
        case "data short":
            os.truncate(blob / "data", 5)
        case "map short":
            os.truncate(blob / "map", 9)
        case "map long":
            os.truncate(blob / "map", 11)
        case "no meta":
            (blob / "meta.json").unlink()
        case "bad meta":
            (blob / "meta.json").write_text('{"size": ')
        case "other tag":
            (blob / "meta.json").write_text(json.dumps(meta | {"tag": "other"}))
        case "no data":
            (blob / "data").unlink()
    again = cache.blob("x", "x", VERSION)
    assert not again.ready(ByteRange(0, BLOCK))
    fill(again)
    assert bytes(again.view) == DATA
    assert again.place is not None


def test_the_least_recently_used_goes_first_and_none_in_use(folder: Path) -> None:
    cache = new_cache(folder)
    for number, name in enumerate("abcd"):
        add(cache, name, used=1000 + number)
    used = cache.blob("a", "a", VERSION)
    os.utime(
        folder / "blobs" / next(e.key for e in cache.entries() if e.location == "a") / "meta.json", (1, 1)
    )
    removal = cache.trim(2 * len(DATA) + 100_000)
    assert [entry.location for entry in removal.removed] == ["b", "c"]
    assert [entry.location for entry in removal.in_use] == ["a"]
    assert names(cache) == ["a", "d"]
    assert bytes(used.view) == DATA
    used.close()
    assert [entry.location for entry in cache.trim(0).removed] == ["a", "d"]
    assert bytes(used.view) == DATA
    assert list((folder / "blobs").iterdir()) == []


def test_remove_by_key_location_and_folder(folder: Path) -> None:
    cache = new_cache(folder)
    for name in ("s3://b/m/a", "s3://b/m/b", "s3://b/mm/a", "http://h/x"):
        add(cache, name)
    assert [entry.location for entry in cache.remove("s3://b/m/").removed] == ["s3://b/m/a", "s3://b/m/b"]
    blob = cache.blob("http://h/x", "http://h/x", VERSION)
    removal = cache.remove("http://h/x")
    assert (removal.removed, [entry.location for entry in removal.in_use]) == ((), ["http://h/x"])
    blob.close()
    assert len(cache.remove(cache.entries()[0].key[:12]).removed) == 1
    assert names(cache) == ["s3://b/mm/a"]


def test_a_budget_is_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = new_cache(folder, cache_bytes=3 * len(DATA) + 200_000)
    for number, name in enumerate("abc"):
        add(cache, name, used=1000 + number)
    add(cache, "d")
    assert names(cache) == ["b", "c", "d"]
    held = [cache.blob(name, name, VERSION) for name in "bcd"]
    with caplog.at_level(logging.WARNING, "loadstone"):
        blobs = [cache.blob(name, name, VERSION) for name in "ef"]
    assert [blob.place for blob in blobs] == [None, None]
    assert len(caplog.records) == 1
    assert "LOADSTONE_CACHE_BYTES" in caplog.text
    fill(blobs[0])
    assert bytes(blobs[0].view) == DATA
    assert names(cache) == ["b", "c", "d"]
    assert [blob.ready(ByteRange(0, len(DATA))) for blob in held] == [True, True, True]


def test_nothing_is_evicted_in_vain(folder: Path) -> None:
    cache = new_cache(folder, cache_bytes=3 * len(DATA) + 200_000)
    for name in "abc":
        add(cache, name)
    large = Version('"1"', 4 * len(DATA))
    assert cache.blob("large", "large", large).place is None
    held = cache.blob("a", "a", VERSION)
    assert cache.blob("still too large", "still too large", Version('"1"', 3 * len(DATA))).place is None
    assert names(cache) == ["a", "b", "c"]
    assert held.ready(ByteRange(0, len(DATA)))


def test_blobs_still_filling_count_in_full(folder: Path) -> None:
    cache = new_cache(folder, cache_bytes=2 * len(DATA) + 100_000)
    open_blobs = [cache.blob(name, name, VERSION) for name in "abc"]
    assert [blob.place is None for blob in open_blobs] == [False, False, True]


def test_versions_of_one_object_lie_side_by_side(folder: Path) -> None:
    cache = new_cache(folder)
    versions = [Version('"1"', 2 * BLOCK), Version('"2"', 2 * BLOCK), Version('"1"', 3 * BLOCK)]
    blobs = [cache.blob("x", "x", version) for version in versions]
    for number, blob in enumerate(blobs):
        blob.deposit(bytes([number]) * blob.size)
    for number, blob in enumerate(blobs):
        assert set(blob.view) == {number}
        again = new_cache(folder).blob("x", "x", versions[number])
        assert again.ready(ByteRange(0, again.size))
        assert set(again.view) == {number}
    assert names(cache) == ["x", "x", "x"]


def test_a_reference_is_a_second_name_where_there_is_a_blob(folder: Path) -> None:
    cache = new_cache(folder)
    newer = Version('"newer"', VERSION.size)
    for version in (VERSION, newer, newer, VERSION):
        blob = cache.blob("x", "x", version)
        cache.set_ref("x", version)
        assert cache.ref("x") == version
        blob.close()
    (path,) = (folder / "refs").iterdir()
    cache.set_ref("z", VERSION)  # no blob of it is here
    cache.blob("y", "y", VERSION).close()
    cache.set_ref("y", VERSION)
    assert sorted(path.stat().st_nlink for path in (folder / "refs").iterdir()) == [1, 1, 2]
    assert path.read_text()
    assert len(cache.remove("").removed) == 3
    assert cache.ref("x") == cache.ref("y") == VERSION
    assert not cache.holds("y", VERSION)


def test_references(folder: Path) -> None:
    cache = new_cache(folder)
    assert cache.ref("x") is None
    cache.set_ref("x", VERSION)
    cache.set_ref("y", Version("", 7))
    assert cache.ref("x") == VERSION
    assert cache.ref("y") is None
    (path,) = (folder / "refs").iterdir()
    for text in ("", "[]", '{"tag": 1}', '{"tag": "a", "size": null}'):
        path.write_text(text)
        assert cache.ref("x") is None


def test_openers_take_turns(folder: Path) -> None:
    cache = new_cache(folder)
    inside: list[int] = []
    most: list[int] = []

    def open_it() -> None:
        with cache.opening("x"):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.02)
            inside.pop()

    threads = [threading.Thread(target=open_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    with cache.opening("another"):
        pass
    for thread in threads:
        thread.join()
    assert most == [1] * 6


def test_what_dead_processes_left_is_swept(folder: Path) -> None:
    cache = new_cache(folder)
    add(cache, "x")
    key = cache.entries()[0].key
    for name in (f"tmp-{key}-1234", f"gone-{key}-1234", f"tmp-{'0' * 64}-1234"):
        (folder / "blobs" / name).mkdir()
        (folder / "blobs" / name / "data").write_bytes(b"x")
    user = cache.blob("x", "x", VERSION)
    new_cache(folder)
    assert {path.name for path in (folder / "blobs").iterdir()} == {key, f"tmp-{key}-1234"}
    user.close()
    new_cache(folder)
    assert {path.name for path in (folder / "blobs").iterdir()} == {key}


def test_names_that_no_draft_has_are_left_alone(folder: Path) -> None:
    new_cache(folder)
    for part in ("blobs", "refs"):
        (folder / part / "tmp-of-mine").write_bytes(b"x")
    new_cache(folder)
    assert [path.name for path in folder.glob("*/*")] == ["tmp-of-mine"] * 2


def test_a_folder_others_can_write_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "loadstone"):
        caches = [new_cache(folder) for _ in range(2)]
    assert [cache.folder for cache in caches] == [None, None]
    assert "mode is 777" in caches[0].problem
    assert len(caplog.records) == 1
    blob = caches[0].blob("x", "x", VERSION)
    fill(blob)
    assert bytes(blob.view) == DATA
    assert caches[0].entries() == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/proc/loadstone", "cannot be created"),
        ("/sys/kernel", "not a local one"),
        ("/dev/null/x", "cannot be created"),
    ],
)
def test_folders_that_cannot_be_used(path: str, reason: str) -> None:
    cache = new_cache(Path(path))
    assert cache.folder is None
    assert reason in cache.problem


def test_a_folder_of_someone_else_is_refused(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    assert "belongs to user 12345" in new_cache(folder).problem


def test_a_switched_off_cache_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    cache = NodeCache(Settings(cache_dir="none"))
    assert (cache.folder, cache.problem, caplog.records) == (None, "", [])
    assert cache.ref("x") is None
    assert not cache.holds("x", VERSION)
    assert not cache.make_room(1)
    assert not cache.foreign_demand()


def test_a_cache_folder_removed_under_a_running_process(folder: Path) -> None:
    cache = new_cache(folder)
    blob = cache.blob("x", "x", VERSION)
    fill(blob, 4)
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert blob.ready(ByteRange(0, 4 * BLOCK))
    while (claim := blob.claim(ByteRange(0, len(DATA)))) is not None:
        claim.write(claim.range.start, memoryview(DATA)[claim.range.start : claim.range.stop])
        claim.close()
    assert bytes(blob.view) == DATA
    blob.close()
    again = new_cache(folder).blob("x", "x", VERSION)
    fill(again)
    assert again.place is not None
    assert bytes(again.view) == DATA


def test_users_are_known_by_pid_and_forgotten_at_death(tmp_path: Path) -> None:
    leases = leases_at(tmp_path / "leases")
    key = "ab" * 32
    program = (
        "import sys\nfrom loadstone.loader.node.leases import Leases\n"
        "from loadstone.loader.node.locks import close_own, open_own\n"
        "leases = Leases(lambda: open_own(sys.argv[1], 66)); assert leases.take(sys.argv[2], 1)\n"
        "leases.begin_demand(); print('ready', flush=True); sys.stdin.read()"
    )
    others = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "leases"), key], stdin=-1, stdout=-1, text=True
        )
        for _ in range(2)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    assert leases.take(key, 1)
    assert leases.take(key, 1)
    assert leases.users(key) == sorted([os.getpid(), *(other.pid for other in others)])
    assert leases.users("cd" * 32) == []
    assert leases.foreign_demand()
    for other in others:
        with leases.alone(key) as nobody:
            assert not nobody
        other.kill()
        other.communicate()
    leases.drop(key)
    leases.begin_demand()
    assert not leases.foreign_demand()
    assert leases.users(key) == [os.getpid()]
    leases.drop(key)
    with leases.alone(key) as nobody:
        assert nobody
        assert not leases.take(key, 0.05)
    assert leases.take(key, 0.05)
    del leases
    gc.collect()
    assert leases_at(tmp_path / "leases").users(key) == []


def test_leases_end_in_finalisers_whatever_their_thread_is_doing(tmp_path: Path) -> None:
    leases, key = leases_at(tmp_path / "leases"), "ab" * 32
    assert leases.take(key, 1)
    with locks._guard, leases._lock:
        leases.drop(key)
        close_own(open_own(tmp_path / "leases"))
    assert leases.users(key) == []


def test_a_child_holds_leases_of_its_own(tmp_path: Path) -> None:
    program = """
import os, pathlib, sys, time
from loadstone.loader.node.leases import Leases
from loadstone.loader.node.locks import close_own, open_own
path, key = lambda: open_own(sys.argv[1], os.O_RDWR | os.O_CREAT), "ab" * 32
leases = Leases(path)
assert leases.take(key, 1)
child = os.fork()
if child == 0:
    assert Leases(path).users(key) == [os.getppid()]
    assert leases.take(key, 1)
    assert sorted(Leases(path).users(key)) == sorted([os.getppid(), os.getpid()])
    leases.drop(key)
    leases.drop(key)
    assert Leases(path).users(key) == [os.getppid()]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert leases.users(key) == [os.getpid()]
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "leases")], check=True)
    assert (tmp_path / "leases").stat().st_size == 0


def test_a_failing_disk_drops_the_blob(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    cache = new_cache(folder)
    monkeypatch.setattr("os.fsync", fail)
    blob = cache.blob("x", "x", VERSION)
    fill(blob)
    assert cache.settle(5)
    assert cache.entries() == []
    monkeypatch.undo()
    assert not cache.blob("x", "x", VERSION).ready(ByteRange(0, BLOCK))


def test_forgotten_blobs_are_in_use_no_longer(folder: Path) -> None:
    cache = new_cache(folder)
    blob = cache.blob("x", "x", VERSION)
    assert cache.entries()[0].pids == (os.getpid(),)
    del blob
    gc.collect()
    assert cache.entries()[0].pids == ()


def test_only_complete_blobs_are_sealed(folder: Path) -> None:
    cache = new_cache(folder)
    add(cache, "x", blocks=9)
    sealer = Sealer()
    (path,) = (folder / "blobs").iterdir()
    sealer.add(path)
    sealer.add(folder / "blobs" / "none")
    assert sealer.settle(5)
    assert not cache.entries()[0].sealed
