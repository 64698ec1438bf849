"""The pieces of work of the transfer benchmark: which ways there are, and where each of them runs."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from loadstone.bench import disk, watch
from loadstone.bench.delay import delaying
from loadstone.bench.netns import Networks
from loadstone.bench.runner import CannotRun, Way, run_process
from loadstone.bench.servers import BUCKET
from loadstone.bench.transfer_inputs import Served, weights
from loadstone.settings import Settings

ROUND_TRIP = 0.02
"""Seconds of a round trip through the delaying proxy."""
LAUNCHES = 5
"""Process starts in one run of *first-request*."""

OURS = "disk: loadstone"
RUNAI = ("disk: Run:ai streamer, as it comes", "disk: Run:ai streamer, chunks of 2 MiB")
S3FS = "disk: s3fs.get, then load_file"
OBSTORE = ("disk: obstore, ranges of 4 MiB to files", "disk: obstore, ranges of 8 MiB to files")
S3FS_FIRST = "first request: s3fs, listing"
PEERS = frozenset({*RUNAI, S3FS, *OBSTORE, S3FS_FIRST})
"""The ways that are not ours and no controls."""
RAW_MEMORY = ("memory: raw sockets, anonymous", "memory: raw sockets, shared (memfd)")
OPEN_FAR, OPEN_NEAR = "open: loadstone, at a distance", "open: loadstone, at none"
START_RUN, START_ALONE, START_TRANSFER = (
    "start: loadstone run",
    "start: the process alone, bytes here",
    "start: the transfer alone",
)

_CHILD = "loadstone.bench.transfer_child"
_START_CHILD = "loadstone.bench.transfer_start_child"
_RUNAI_CHUNK = {"RUNAI_STREAMER_CHUNK_BYTESIZE": str(2 * 1024 * 1024)}
_S3FS_LIST = "import s3fs; s3fs.S3FileSystem().ls('bench/sharded')"
_FIGURES = tuple[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Everything that is running, and where.

    Attributes
    ----------
    served : Served
        What the server serves.
    networks : Networks
        Where the server is, and the far end of the link.
    port : int or None
        The server's; ``None``: there is none, ``why_not`` says why.
    scratch : Path
        A folder on the disk that is written to.
    settings : Settings
        For loadstone; each run has a node cache of its own.
    memory : str
        What state free memory is in, in words.
    """

    served: Served
    networks: Networks
    port: int | None
    why_not: str
    scratch: Path
    settings: Settings
    memory: str

    def store_port(self) -> int:
        """Return the server's port; raises `CannotRun` when there is none."""
        if self.port is None:
            raise CannotRun(self.why_not)
        return self.port

    def environment(self, endpoint: str, cache: str) -> dict[str, str]:
        """Return what a client finds in its environment: endpoint, keys, node cache, and no proxy."""
        inherited = replace(self.settings, cache_dir=cache).environment()
        kept = {name: value for name, value in inherited.items() if not name.lower().endswith("_proxy")}
        return kept | {
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        }

    def child(
        self,
        target: str,
        folder: Path,
        *,
        far: bool = False,
        cache: str = "disk",
        extra: Mapping[str, str] | None = None,
        port: int | None = None,
        words: str = "",
        keep: bool = False,
    ) -> _FIGURES:
        """Run one transfer in a process of its own.

        Parameters
        ----------
        target : str
            A way of `loadstone.bench.transfer_child`; beginning with ``run`` or ``start``: that of
            `loadstone.bench.transfer_start_child`, below ``loadstone run`` or by itself.
        folder : Path
            Which checkpoint.
        far : bool
            Run the client at the far end of the link.
        cache : str
            ``disk`` (a new folder), ``none``, or a folder that is there.
        extra : mapping, optional
            More of the environment.
        port : int, optional
            Another port than the server's.
        words : str
            What else is to be said of the state.
        keep : bool
            Leave what the run wrote until the end: file systems take longer to make files beside those that
            were deleted just before.
        """
        seat = self.networks.link() if far else self.networks.near
        state = [f"server's files: {disk.make_warm(weights(folder))}", seat.words, self.memory]
        port = port or self.store_port()
        os.sync()  # what earlier runs wrote must not be written back during this one
        with ExitStack() as stack:
            scratch = tempfile.mkdtemp(prefix="run-", dir=self.scratch)
            if not keep:
                stack.callback(shutil.rmtree, scratch)
            state.append(_cache_words(cache))
            where = f"{scratch}/cache" if cache == "disk" else cache
            env = self.environment(f"http://{seat.address}:{port}", where) | dict(extra or {})
            spec = {"address": [seat.address, port], "folder": str(folder), "scratch": scratch}
            argv = _argv(target, folder, json.dumps({**spec, "started": time.monotonic()}))
            figures = run_process([*seat.prefix, *argv], env)
        return ", ".join([*state, words] if words else state), figures


def _argv(target: str, folder: Path, spec: str) -> list[str]:
    start = [sys.executable, "-m", _START_CHILD, spec]
    if target == "run":
        return [sys.executable, "-m", "loadstone", "run", f"s3://{BUCKET}/{folder.name}", "--", *start]
    return start if target == "start" else [sys.executable, "-m", _CHILD, target, spec]


def _cache_words(cache: str) -> str:
    known = {"disk": "node cache empty, on disk", "none": "node cache empty, in memory"}
    return known.get(cache, "node cache complete, in the page cache")


def _disk(bench: Bench) -> Iterator[Way]:
    targets: dict[str, tuple[str, Mapping[str, str]]] = {
        OURS: ("tensors_loadstone", {}),
        RUNAI[0]: ("runai", {}),
        RUNAI[1]: ("runai", _RUNAI_CHUNK),
        S3FS: ("s3fs_get", {}),
        OBSTORE[0]: ("obstore-4", {}),
        OBSTORE[1]: ("obstore-8", {}),
        "disk: raw sockets to files": ("raw_to_files", {}),
    }
    for name, (target, extra) in targets.items():
        yield _way(name, bench, target, bench.served.sharded, extra=extra)


def _memory(bench: Bench) -> Iterator[Way]:
    for name, target in (
        ("memory: loadstone", "bytes_loadstone"),
        (RAW_MEMORY[0], "raw_to_memory"),
        (RAW_MEMORY[1], "raw_to_memfd"),
        ("memory: raw sockets, buffers touched again and again", "raw_dropped"),
    ):
        yield _way(name, bench, target, bench.served.sharded, cache="none")


def _link(bench: Bench) -> Iterator[Way]:
    for name, target in (("link: loadstone", "bytes_loadstone"), ("link: raw sockets", "raw_dropped")):
        yield _way(name, bench, target, bench.served.llama, far=True)


def _start(bench: Bench) -> Iterator[Way]:
    model, here = bench.served.llama, bench.scratch / "here"

    def alone() -> _FIGURES:
        bench.networks.link()
        if not here.exists():
            bench.child("bytes_loadstone", model, cache=str(here))
        return bench.child("start", model, far=True, cache=str(here))

    yield Way(START_ALONE, alone)
    yield _way(START_TRANSFER, bench, "process_loadstone", model, far=True)
    yield _way(START_RUN, bench, "run", model, far=True)


def _layer(bench: Bench) -> Iterator[Way]:
    for name, target, words in (
        ("layer: loadstone, the rest on its way", "layer_loadstone", "link full"),
        ("layer: loadstone, alone", "layer_alone_loadstone", "link idle"),
        ("layer: raw sockets, alone", "raw_layer", "link idle"),
    ):
        yield _way(name, bench, target, bench.served.sharded, far=True, words=words)


def _way(name: str, bench: Bench, target: str, folder: Path, **options: Any) -> Way:
    return Way(name, partial(bench.child, target, folder, **options))


def _open(bench: Bench) -> Iterator[Way]:
    def at(distance: float) -> _FIGURES:
        seat = bench.networks.near
        with delaying(bench.store_port(), distance, seat) as port:
            words = f"proxy of {distance * 1000:g} ms a round trip, one more for a new connection"
            state, figures = bench.child(
                "open_loadstone", bench.served.many, port=port, words=words, keep=True
            )
        trips = {"round_trips": figures["open_seconds"] / distance} if distance else {}
        return state, {**figures, **trips}

    yield Way(OPEN_FAR, partial(at, ROUND_TRIP))
    yield Way(OPEN_NEAR, partial(at, 0.0))


def _anonymous(bench: Bench) -> Iterator[Way]:
    def peak() -> _FIGURES:
        seat, folder = bench.networks.near, bench.served.sharded
        port = bench.store_port()
        with tempfile.TemporaryDirectory(prefix="run-", dir=bench.scratch) as scratch:
            env = bench.environment(f"http://{seat.address}:{port}", f"{scratch}/cache")
            bare = watch.resting_anonymous_bytes([sys.executable, "-c", "print(); input()"], env)
            argv = [sys.executable, "-m", "loadstone", "prefetch", f"s3://{BUCKET}/{folder.name}"]
            figures = watch.peak_anonymous_bytes([*seat.prefix, *argv], env)
        over = figures["peak_anonymous_bytes"] - bare
        state = f"{seat.words}, node cache empty, on disk; an interpreter that does nothing is the zero"
        return state, {**figures, "interpreter_bytes": bare, "over_interpreter_bytes": over}

    yield Way("anonymous: loadstone prefetch", peak)


def _first_request(bench: Bench) -> Iterator[Way]:
    def first(*argv: str) -> _FIGURES:
        with tempfile.TemporaryDirectory(prefix="run-", dir=bench.scratch) as scratch:
            figures = watch.first_request(
                argv, lambda url: bench.environment(url, f"{scratch}/cache"), LAUNCHES
            )
        return f"interpreter's files in the page cache, {LAUNCHES} starts", figures

    ours = [sys.executable, "-m", "loadstone", "prefetch", f"s3://{BUCKET}/sharded"]
    yield Way("first request: loadstone prefetch", partial(first, *ours))
    yield Way(S3FS_FIRST, partial(first, sys.executable, "-c", _S3FS_LIST))


WORKS: dict[str, tuple[str, Callable[[Bench], Iterator[Way]]]] = {
    "disk": ("four shards until every byte is usable in the node cache on disk", _disk),
    "memory": ("four shards until every byte is in memory", _memory),
    "link": ("a model over the link, until all bytes are here", _link),
    "start": ("over the link, from process start to the first token", _start),
    "layer": ("over the link, one layer on demand", _layer),
    "open": ("30 shards until they are open", _open),
    "anonymous": ("four shards streamed to disk: anonymous memory", _anonymous),
    "first-request": ("from process start to the first request", _first_request),
}
"""Every piece of work, by the name that ``--only`` takes: its title and its ways."""


def ways_of(bench: Bench, work: str) -> list[Way]:
    """Return the ways of one piece of work."""
    title, ways = WORKS[work]
    return [replace(way, work=title) for way in ways(bench)]
