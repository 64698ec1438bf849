"""Processes that fill and read one node cache together; run as ``python -m tests.support.cache_worker``.

Each process compares all it reads with the files that the server serves, and exits with 1 when a byte is
wrong. ``audit`` looks at a cache folder with nothing of the code under test: a block that is marked must
hold the right bytes.
"""

import contextlib
import functools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from logging.handlers import QueueHandler
from pathlib import Path
from queue import Queue

from loadstone.loader.locations import parse_location
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.remote import RemoteBlob, RemoteSource, open_remote
from loadstone.loader.node.sealed import SealedPlace
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Span
from loadstone.settings import Settings


def settings_for(cache: Path, stall_timeout: float = 5.0) -> Settings:
    return Settings(
        cache_dir=str(cache), request_bytes=8 * BLOCK, stall_timeout=stall_timeout, max_connections=8
    )


def open_source(url: str, settings: Settings) -> RemoteSource:
    return open_remote(parse_location(url), None, settings, NodeCache(settings))


def blobs_of(source: RemoteSource, names: list[str]) -> dict[str, RemoteBlob]:
    found = source.open(names)
    blobs = {}
    for name in names:
        blob = found[name]
        assert isinstance(blob, RemoteBlob), blob
        blobs[name] = blob
    return blobs


def read_everything(url: str, folder: Path, settings: Settings, seed: int, *, ahead: bool = True) -> int:
    """Read every file in pieces, in an order of its own; return the number of wrong pieces."""
    names = sorted(path.name for path in folder.iterdir())
    rng = random.Random(seed)
    rng.shuffle(names)
    source = open_source(url, settings)
    blobs = blobs_of(source, names)
    if ahead:
        source.prefetch([Span(blobs[name], ByteRange(0, blobs[name].size)) for name in names])
    wrong = 0
    for name in names:
        data = (folder / name).read_bytes()
        starts = list(range(0, len(data), 3 * BLOCK + 17))
        rng.shuffle(starts)
        for start in starts:
            span = ByteRange(start, min(start + 3 * BLOCK + 17, len(data)))
            wrong += blobs[name].read(span) != data[span.start : span.stop]
        wrong += bytes(blobs[name].buffer()) != data
    source.close()
    return wrong


def audit(cache: Path, folder: Path) -> list[str]:
    """Return what is wrong in a cache folder."""
    found = []
    for blob in (cache / "blobs").iterdir():
        if len(blob.name) != 64:
            continue
        meta = json.loads((blob / "meta.json").read_text())
        truth = (folder / meta["location"].rpartition("/")[2]).read_bytes()
        data, marks = (blob / "data").read_bytes(), (blob / "map").read_bytes()
        if len(data) != len(truth) or len(marks) != -(-len(truth) // BLOCK):
            found.append(f"{meta['location']}: sizes {len(data)}, {len(marks)}")
        for number, mark in enumerate(marks):
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            if mark not in {0, 1} or (mark and data[part] != truth[part]):
                found.append(f"{meta['location']}: block {number} is marked {mark} and wrong")
    return found


def forked(work: Callable[[], int]) -> int:
    """Run ``work`` in a child; its exit status is what it returns."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        status = min(work(), 98)
    except BaseException:  # noqa: BLE001  nothing may return from the child
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_rounds(url: str, folder: Path, cache: Path, rounds: int, seed: int) -> list[str]:
    """Kill a fetching process at random moments while two others read."""
    rng = random.Random(seed)
    problems = []
    in_the_middle = 0
    for number in range(rounds):
        own = cache / str(number)
        reading = functools.partial(read_everything, url, folder, settings_for(own))
        fetching = forked(functools.partial(reading, 0))
        readers = [forked(functools.partial(reading, n, ahead=n == 1)) for n in (1, 2)]
        time.sleep(rng.uniform(0, 0.25))
        os.kill(fetching, signal.SIGKILL)
        in_the_middle += exit_status(fetching) == -signal.SIGKILL
        statuses = [exit_status(pid) for pid in readers]
        problems += [f"round {number}: a reader ended with {status}" for status in statuses if status]
        problems += [f"round {number}: {problem}" for problem in audit(own, folder)]
    if not in_the_middle:
        problems.append("no process was killed before it was done")
    return problems


def stopped_holder(url: str, folder: Path, cache: Path) -> list[str]:
    """Stop a process that holds claims, read past it, and let it go on."""
    settings = settings_for(cache, stall_timeout=0.4)
    holder = forked(lambda: read_everything(url, folder, settings, 0))
    time.sleep(0.15)
    os.kill(holder, signal.SIGSTOP)
    reader = forked(lambda: read_everything(url, folder, settings, 1, ahead=False))
    problems = [f"the reader ended with {status}" for status in [exit_status(reader)] if status]
    os.kill(holder, signal.SIGCONT)
    problems += [f"the holder ended with {status}" for status in [exit_status(holder)] if status]
    return problems + audit(cache, folder)


def fork_after_open(url: str, folder: Path, cache: Path) -> list[str]:
    """Fork while transfers run: both sides read everything, and the child's end changes nothing."""
    settings = settings_for(cache)
    names = sorted(path.name for path in folder.iterdir())
    source = open_source(url, settings)
    blobs = blobs_of(source, names)
    handle = source.prefetch([Span(blob, ByteRange(0, blob.size)) for blob in blobs.values()])
    problems = []

    def read(first: bool) -> int:
        if first and not handle.done():
            return 50
        wrong = 0
        for name in names if first else reversed(names):
            data = (folder / name).read_bytes()
            wrong += blobs[name].read(ByteRange(0, len(data))) != data
        if first:
            spans = [Span(blob, ByteRange(0, blob.size)) for blob in blobs.values()]
            wrong += not source.prefetch(spans).wait(10)
            source.close()
        return wrong

    for number in range(3):
        time.sleep(0.03)
        child = forked(lambda: read(first=True))
        if number == 0:
            os.kill(child, signal.SIGKILL)
            exit_status(child)
        elif number == 1:
            problems += [f"the parent read {wrong} files wrongly" for wrong in [read(first=False)] if wrong]
        if number:
            problems += [f"a child ended with {status}" for status in [exit_status(child)] if status]
    if not handle.wait(10):
        problems.append("the parent's prefetch did not end")
    source.close()
    return problems + audit(cache, folder)


def wait_for_first_block(cache: Path) -> None:
    """Wait until something has arrived in a cache folder."""
    while True:
        with contextlib.suppress(
            FileNotFoundError
        ):  # a folder gets its name between being seen and being read
            if any(b"\1" in path.read_bytes() for path in cache.glob("blobs/*/map")):
                return
        time.sleep(0.005)


def full_disk(url: str, folder: Path, cache: Path, rounds: int, seed: int) -> list[str]:
    """Take the cache's disk away from it at random moments, while two processes read."""
    rng = random.Random(seed)
    problems = []
    junk = cache.parent / "junk"
    in_memory = 0
    for number in range(rounds):
        own = cache / str(number)
        reading = functools.partial(read_everything, url, folder, settings_for(own))
        readers = [forked(functools.partial(reading, n)) for n in (1, 2)]
        if number % 4:  # every fourth time before anything has come, perhaps
            wait_for_first_block(own)
        time.sleep(rng.uniform(0, 0.2))
        with junk.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        statuses = [exit_status(pid) for pid in readers]
        problems += [f"round {number}: a reader ended with {status}" for status in statuses if status]
        problems += [f"round {number}: {problem}" for problem in audit(own, folder)]
        in_memory += sum(path.read_bytes().count(0) for path in own.glob("blobs/*/map")) > 0
        junk.unlink()
        shutil.rmtree(own)
    if not in_memory:
        problems.append("the disk was never full in the middle")
    return problems


def read_only_disk(url: str, folder: Path, cache: Path, seed: int) -> list[str]:
    """Let the cache's disk become read-only, as ext4 does after an error, while two processes read."""
    mount = ["mount", "-o", "remount,abort", str(cache.parent)]
    readers = [
        forked(functools.partial(read_everything, url, folder, settings_for(cache), n, ahead=n == 1))
        for n in (1, 2)
    ]
    wait_for_first_block(cache)
    time.sleep(random.Random(seed).uniform(0.0, 0.1))
    # What was lost on the way to a broken disk is another matter.
    subprocess.run(["sync", "-f", str(cache)], check=True)
    subprocess.run(mount, check=True)
    statuses = [exit_status(pid) for pid in readers]
    problems = [f"a reader ended with {status}" for status in statuses if status]
    if sum(path.read_bytes().count(0) for path in cache.glob("blobs/*/map")) == 0:
        problems.append("the disk was never read-only in the middle")
    return problems


def look(url: str, folder: Path, cache: Path) -> dict[str, object]:
    """Read everything, and say what of it came from a cache that is only read, and what was warned of."""
    told: Queue[logging.LogRecord] = Queue()
    logging.getLogger("loadstone").addHandler(QueueHandler(told))
    settings = settings_for(cache)
    wrong = read_everything(url, folder, settings, 0)
    source = open_source(url, settings)
    names = sorted(path.name for path in folder.iterdir())
    blobs = blobs_of(source, names)
    mapped = Path("/proc/self/maps").read_text()
    return {
        "wrong": wrong,
        "sealed": [name for name in names if isinstance(blobs[name].stored.place, SealedPlace)],
        "mapped": mapped.count(f"{cache}/blobs/"),
        "passing": source.passing(),
        "told": [told.get().getMessage() for _ in range(told.qsize())],
    }


def main(arguments: list[str]) -> int:
    mode, url, folder, cache, *rest = arguments
    numbers = [int(number) for number in rest]
    if mode == "read":
        return read_everything(url, Path(folder), settings_for(Path(cache)), numbers[0])
    if mode == "look":
        print(json.dumps(look(url, Path(folder), Path(cache))))
        return 0
    modes: dict[str, Callable[..., list[str]]] = {
        "kill": kill_rounds,
        "stop": stopped_holder,
        "fork": fork_after_open,
        "full": full_disk,
        "read-only": read_only_disk,
    }
    problems = modes[mode](url, Path(folder), Path(cache), *numbers)
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
