"""``loadstone bench cold-start``: from process start to first token, three ways, each in fresh processes.

A local folder is served over loopback by loadstone's own file server, through a link of a stated bandwidth
if one is given, so that there is a store to start from, and so that the bytes moved are counted where they
leave. Each run has an empty node cache of its own: the network side is cold, the interpreter's files warm.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import loadstone
from loadstone.bench.link import Link
from loadstone.bench.runner import Way, run_process, run_ways
from loadstone.bench.schema import Bar, Report, ratio
from loadstone.fileserver import FileServer
from loadstone.loader.locations import parse_location
from loadstone.settings import Settings

DOWNLOAD = "download everything, then load"
LAZY = "map lazily, no overlap"
OVERLAP = "loadstone run: fetch while starting"


@dataclass(frozen=True, slots=True)
class _Store:
    """Where the runs read from; ``link`` is set when the server is ours, and then counts bytes."""

    location: str
    options: Mapping[str, object]
    link: Link | None


def cold_start(
    location: str,
    *,
    prompt: str,
    runs: int = 3,
    bandwidth: int = 0,
    storage_options: Mapping[str, object] | None = None,
    settings: Settings | None = None,
) -> Report:
    """Measure a model's cold start three ways.

    Parameters
    ----------
    location : str
        The model's folder, with a ``tokenizer.json``.
    prompt : str
        What it is asked; the first token of the answer ends the start.
    runs : int
        Runs of each way.
    bandwidth : int
        Bytes per second of the link that a local folder is read through; 0: no limit.

    Returns
    -------
    Report
        Rows of first token, all bytes, bytes moved, and peak memory.
    """
    base = settings or Settings.from_env()
    with _store(location, storage_options or {}, bandwidth) as store:
        files = _files(store, base)
        report = Report(
            "cold-start", {"location": location, "runs": runs, "bandwidth": bandwidth, "prompt": prompt}
        )

        def way(name: str, mode: str) -> Way:
            return Way(name, lambda: ("node cache empty", _one_run(mode, store, files, prompt, base)))

        run_ways(report, [way(DOWNLOAD, "download"), way(LAZY, "lazy"), way(OVERLAP, "overlap")], runs)
    share = ratio(report, "first_token_seconds", OVERLAP, [DOWNLOAD])
    if share is not None:
        report.bars.append(Bar("first token, loadstone run / download then load", share, 1.0, at_most=True))
    return report


def _one_run(mode: str, store: _Store, files: list[str], prompt: str, base: Settings) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="loadstone-bench-") as scratch:
        settings = replace(base, cache_dir=str(Path(scratch) / "cache"))
        spec = {
            "location": store.location,
            "files": files,
            "options": dict(store.options),
            "scratch": scratch,
            "prompt": prompt,
            "started": time.monotonic(),
        }
        child = [sys.executable, "-m", "loadstone.bench.cold_start_child", mode, json.dumps(spec)]
        argv = [*_run_command(store), "--", *child] if mode == "overlap" else child
        before = store.link.bytes_sent if store.link else 0
        figures = run_process(argv, settings.environment())
        if store.link:
            figures["moved_bytes"] = store.link.bytes_sent - before
        return figures


def _run_command(store: _Store) -> list[str]:
    command = [sys.executable, "-m", "loadstone", "run", store.location]
    if "endpoint_url" in store.options:
        command += ["--endpoint-url", str(store.options["endpoint_url"])]
    if store.options.get("anon"):
        command.append("--anonymous")
    return command


def _files(store: _Store, settings: Settings) -> list[str]:
    """Return the files that a download fetches: the checkpoint's own, and the small ones beside them."""
    with loadstone.open(
        store.location, storage_options=store.options, settings=replace(settings, cache_dir="none")
    ) as ckpt:
        names = ckpt.source.names()
        weights = {ckpt.info(name).file for name in ckpt}
        if names is not None:
            small = [name for name in names if name.endswith((".json", ".txt", ".model"))]
        else:
            small = [
                name
                for name in ("config.json", "generation_config.json", "tokenizer.json")
                if _has(ckpt, name)
            ]
            small += ["model.safetensors.index.json"] if len(weights) > 1 else []
        return sorted(weights | set(small))


def _has(checkpoint: loadstone.Checkpoint, name: str) -> bool:
    found = checkpoint.source.open([name])[name]
    return not isinstance(found, loadstone.LoadstoneError)


@contextmanager
def _store(location: str, options: Mapping[str, object], bandwidth: int) -> Iterator[_Store]:
    if not parse_location(location).is_local:
        yield _Store(location, options, None)
        return
    link = Link(bandwidth)
    with FileServer(location, hook=link) as server:
        yield _Store(server.url, {}, link)
